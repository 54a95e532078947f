//! `weact train`.

use std::{
    env,
    io::IsTerminal,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use weact::train::{
    config::Run,
    log::{Data, Event, Step, Validation},
    memory::Prediction,
    run_directory::Existing,
    sft::{self, Options, Outcome},
};

use super::{Common, Say};

/// Trains an adapter or a whole model as a TOML file says
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The run's configuration
    #[arg(value_name = "RUN.toml")]
    run: PathBuf,
    /// Go on from the newest checkpoint of the run directory
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Remove what an earlier run left in the run directory
    #[arg(long)]
    overwrite: bool,
    /// Check everything and say what would be done
    #[arg(long)]
    dry_run: bool,
    /// Leave out rows without any labelled stage
    #[arg(long)]
    allow_empty: bool,
    /// Use the embedding as the output head where the checkpoint has none
    #[arg(long)]
    tie_embeddings: bool,
}

/// Runs it.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let mut run = Run::read(&args.run)?;
    if let Some(seed) = common.seed {
        run.train.seed = seed;
    }
    let (name, device) = common.device.open()?;
    let existing = match (args.resume, args.overwrite) {
        (true, _) => Existing::Resume,
        (_, true) => Existing::Overwrite,
        _ => Existing::Refuse,
    };
    let options = Options { existing, allow_empty: args.allow_empty, tie_embeddings: args.tie_embeddings };
    let say = common.say;
    if args.dry_run {
        let preview = sft::preview(&run, options, &device)?;
        let (n, modules) = (preview.modules.len(), preview.modules.join(" "));
        let memory = memory_text(&preview.memory)?;
        let text = format!("{}\n{n} modules: {modules}\n{memory}nothing was written", data_text(&preview.data));
        say.result(&text, &serde_json::to_value(&preview)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let stop = interrupt_flag()?;
    say.note(&format!("training into {} on {name}", run.out.display()));
    let mut progress = Progress::new(say);
    let outcome = sft::train(&run, options, &device, &mut |event| progress.show(event), &|| stop.load(Ordering::Relaxed));
    progress.finish();
    match outcome? {
        Outcome::Interrupted { step } => {
            say.warn(&format!("interrupted; a checkpoint after batch {step} is saved. Go on with: {}", resume_command()));
            Ok(ExitCode::from(130))
        }
        Outcome::Done(done) => {
            let untouched = format!("the backbone and {} adapters beside it are unchanged", done.others.len());
            let text = format!("wrote {} after {} batches, digest {}; {untouched}", run.out.display(), done.step, done.digest);
            say.summary(&text, &json!({"out": run.out, "step": done.step, "digest": done.digest, "base": done.base, "peak_bytes": done.peak_bytes}))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// This process's own command for a shell, with all its flags: a resumed run must have the same.
pub(super) fn resume_command() -> String {
    let given = env::args_os().map(|word| word.to_string_lossy().into_owned());
    let kept = given.filter(|word| word != "--overwrite" && word != "--resume");
    let is_plain = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "_-./=:,+@%".contains(c));
    let quoted = kept.map(|word| if is_plain(&word) { word } else { format!("'{}'", word.replace('\'', "'\\''")) });
    quoted.chain(["--resume".to_owned()]).collect::<Vec<_>>().join(" ")
}

/// True once Ctrl-C or a termination signal came; a second one ends the process at once.
pub(super) fn interrupt_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    ctrlc::set_handler(move || {
        if set.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })?;
    Ok(flag)
}

fn data_text(data: &Data) -> String {
    let dropped: Vec<String> = data.dropped.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
    let dropped = if dropped.is_empty() { "none left out".to_owned() } else { format!("left out: {}", dropped.join(", ")) };
    let Data { samples, tokens, supervised_tokens, trained_tensors, trained_parameters, steps, .. } = data;
    format!(
        "{samples} samples, {tokens} tokens, {supervised_tokens} supervised; {dropped}\n\
         {trained_tensors} trained tensors, {trained_parameters} parameters, {steps} batches"
    )
}

/// The predicted peak and its parts, one a line.
fn memory_text(memory: &Prediction) -> anyhow::Result<String> {
    let Prediction { bytes, largest, micro_batches, recomputed } = memory;
    let (samples, tokens) = (largest.lengths.len(), largest.lengths.iter().sum::<usize>());
    let mut text = format!(
        "predicted peak memory, at {samples} samples of {tokens} tokens together; blocks are recomputed in {recomputed} of \
         {micro_batches} micro-batches:\n"
    );
    for (part, bytes) in serde_json::to_value(bytes)?.as_object().into_iter().flatten() {
        let mb = bytes.as_u64().unwrap_or_default() as f64 / 1e6;
        text += &format!("  {:<20}{mb:>10.1} MB\n", part.replace('_', " "));
    }
    Ok(text)
}

/// A bar on a terminal, plain lines elsewhere.
struct Progress {
    say: Say,
    bar: Option<ProgressBar>,
    n_steps: usize,
}

/// Lines about batches in a log file.
const PLAIN_LINES: usize = 50;

impl Progress {
    fn new(say: Say) -> Self {
        let bar = (std::io::stderr().is_terminal() && !say.quiet).then(|| {
            let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed_precise} left {eta_precise} {msg}");
            ProgressBar::new(0).with_style(style.expect("a legal template"))
        });
        Self { say, bar, n_steps: 0 }
    }

    fn show(&mut self, event: &Event) {
        match event {
            Event::Data(data) => {
                self.n_steps = data.steps;
                self.line(&data_text(data));
            }
            Event::Resumed { step, steps, passed_over } => {
                self.n_steps = *steps;
                self.line(&format!("going on after batch {step}"));
                passed_over
                    .iter()
                    .for_each(|error| self.say.warn(&format!("a newer checkpoint is broken and passed over: {error}")));
            }
            Event::Step(step) => self.step(step),
            Event::Valid(Validation { step, nll, top1, tokens }) => {
                self.line(&format!(
                    "validation after batch {step}: nll {nll:.4} nats, top-1 {:.1}% of {tokens} tokens",
                    top1 * 100.0
                ));
            }
            Event::Checkpoint { .. } | Event::Done(_) => {}
        }
    }

    fn step(&mut self, step: &Step) {
        let loss = step.loss.map_or_else(|| "0 trained tokens".to_owned(), |loss| format!("loss {loss:.4}"));
        match &self.bar {
            Some(bar) => {
                bar.set_length(self.n_steps.max(step.step) as u64);
                bar.set_position(step.step as u64);
                bar.set_message(loss);
            }
            None if step.step == 1 || step.step.is_multiple_of(self.n_steps.div_ceil(PLAIN_LINES).max(1)) => {
                let rate = step.tokens as f64 / step.wall_s;
                self.say.note(&format!("batch {}: {loss}, lr {:.2e}, {rate:.0} tokens/s", step.step, step.lr));
            }
            None => {}
        }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => self.say.note(text),
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
