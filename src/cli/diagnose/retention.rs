//! `weact diagnose retention`.

use std::{io::IsTerminal, path::PathBuf, process::ExitCode, sync::atomic::Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use weact::{
    eval::report::Format,
    retention::{self, Outcome, Progress, Study},
    train::{log::Event, run_directory::Existing},
};

use crate::cli::{
    Common, Say,
    train::{interrupt_flag, resume_command},
};

/// Trains capabilities one after another in every order and measures what is kept (Table 7, Figure 3)
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct Args {
    /// The study's configuration
    #[arg(value_name = "RUN.toml")]
    run: PathBuf,
    /// Train and measure what is missing in the study's directory
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Remove what an earlier study left in it
    #[arg(long)]
    overwrite: bool,
}

/// Runs it.
pub(in crate::cli) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let mut study = Study::read(&args.run)?;
    if let Some(seed) = common.seed {
        (study.seed, study.train.seed) = (seed, seed);
    }
    let existing = match (args.resume, args.overwrite) {
        (true, _) => Existing::Resume,
        (_, true) => Existing::Overwrite,
        _ => Existing::Refuse,
    };
    let say = common.say;
    let (name, device) = common.device.open()?;
    let stop = interrupt_flag()?;
    say.note(&format!("training and measuring into {} on {name}", study.out.display()));
    let bar = Bar::new(say);
    let outcome =
        retention::run(&study, existing, &device, &mut |progress| bar.show(&progress), &|| stop.load(Ordering::Relaxed));
    bar.finish();
    if outcome? == Outcome::Interrupted {
        say.warn(&format!("interrupted; what was finished is kept. Go on with: {}", resume_command()));
        return Ok(ExitCode::from(130));
    }
    let (report, numbers) = retention::report(&study, &retention::read(&study.out)?)?;
    let dir = study.out.join("report");
    report.write(&dir)?;
    let table = &report.tables[0];
    let text =
        format!("{}\n{}{}\n{}", table.title, table.render(Format::Terminal), table.caption, dir.join("report.html").display());
    say.result(&text, &json!({"out": study.out, "report": dir, "retention": numbers}))?;
    Ok(ExitCode::SUCCESS)
}

/// A bar on a terminal, a line a stage elsewhere.
struct Bar {
    say: Say,
    bar: Option<ProgressBar>,
}

impl Bar {
    fn new(say: Say) -> Self {
        let bar = (std::io::stderr().is_terminal() && !say.quiet).then(|| {
            let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed_precise} {msg}");
            ProgressBar::new(0).with_style(style.expect("a legal template"))
        });
        Self { say, bar }
    }

    fn show(&self, progress: &Progress<'_>) {
        match (progress, &self.bar) {
            (Progress::Stage { number, n, name, event: Event::Step(step) }, Some(bar)) => {
                bar.set_length(*n as u64);
                bar.set_position(*number as u64 - 1);
                let loss = step.loss.map_or_else(|| "no supervised token".to_owned(), |loss| format!("loss {loss:.4}"));
                bar.set_message(format!("{name}: batch {}, {loss}", step.step));
            }
            (Progress::Stage { number, n, name, event: Event::Done(done) }, None) => {
                self.say.note(&format!("{number} of {n} stages: {name}, {} batches", done.step));
            }
            (Progress::Measured { number, n }, Some(bar)) => {
                bar.set_length(*n as u64);
                bar.set_position(*number as u64);
                bar.set_message("measuring");
            }
            (Progress::Measured { number, n }, None) if number == n => self.say.note(&format!("{n} points are measured")),
            _ => {}
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
