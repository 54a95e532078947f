//! `weact eval`.

use std::{collections::BTreeSet, fs, io::IsTerminal, path::PathBuf, process::ExitCode, sync::atomic::Ordering};

use burn::tensor::DType;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use weact::eval::{
    config,
    record::{Record, State},
    run::{self, Bench, Existing, Progress, Regraded, Rules, Selection, Store},
    score::{self, Score},
};

use super::{
    Common, Say,
    exit::Usage,
    train::{interrupt_flag, resume_command},
};

/// Runs methods on benchmarks
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The run's configuration
    run: PathBuf,
    /// Make what is missing in the run directory
    #[arg(long, conflicts_with_all = ["overwrite", "regrade"])]
    resume: bool,
    /// Remove what an earlier evaluation wrote into it
    #[arg(long, conflicts_with = "regrade")]
    overwrite: bool,
    /// Grade all stored answers again, with the graders and the judge that the configuration names now, instead of running
    #[arg(long, conflicts_with_all = ["limit", "ids", "shard"])]
    regrade: bool,
    /// The first N tasks of each benchmark, or, below 1, this share of them
    #[arg(long, value_name = "N", value_parser = limit)]
    limit: Option<f64>,
    /// Only tasks whose ids stand in this file, one a line
    #[arg(long, value_name = "FILE")]
    ids: Option<PathBuf>,
    /// Only this part of the tasks, as 1/4; the parts of all numbers together are all tasks
    #[arg(long, value_name = "I/N", value_parser = shard)]
    shard: Option<(u64, u64)>,
    /// Write texts of obfuscated benchmarks in plain, and their episodes
    #[arg(long)]
    reveal: bool,
    /// Element type of the weights in memory: f32, bf16 or f16
    #[arg(long, default_value = "f32", value_parser = super::model::dtype)]
    dtype: DType,
    /// Exit with status 1 if a greater share of the tasks can't be judged
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = share)]
    max_judge_errors: f64,
}

fn shard(text: &str) -> Result<(u64, u64), String> {
    let parts = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
    parts.filter(|(i, n)| (1..=*n).contains(i)).ok_or_else(|| "use I/N with I from 1 to N, as 1/4".to_owned())
}

fn limit(text: &str) -> Result<f64, String> {
    let limit = text.parse().ok().filter(|n: &f64| *n > 0.0 && n.is_finite() && (*n < 1.0 || n.fract() == 0.0));
    limit.ok_or_else(|| "use a number of tasks, or a share below 1".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "use a share from 0 to 1".to_owned())
}

/// Runs it.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let say = common.say;
    let mut config = config::Run::read(&args.run)?;
    config.seed = common.seed.unwrap_or(config.seed);
    if args.regrade {
        return regrade(args, &config, say);
    }
    let existing = match (args.resume, args.overwrite) {
        (true, _) => Existing::Resume,
        (_, true) => Existing::Overwrite,
        _ => Existing::Refuse,
    };
    Store::check(&config.out, existing)?;
    let selection = Selection { limit: args.limit, ids: ids(args)?, shard: args.shard };
    let benches = run::benches(&config, &selection)?;
    for bench in &benches {
        if bench.benchmark.is_secret() && !args.reveal {
            say.note(&format!("{}: its texts are stored obfuscated, and no episodes (--reveal)", bench.name));
        }
    }
    let rules = Rules { seed: config.seed, retry: config.retry.clone(), reveal: args.reveal };
    let methods = run::methods(&config)?;
    let (device_name, device) = common.device.open()?;
    let mut store = Store::open(&config.out, &config.to_toml(), existing)?;
    for prepared in &methods {
        prepared.warnings.iter().for_each(|warning| say.warn(warning));
        run::check(prepared.name(), &|benchmark| prepared.identity(benchmark, args.dtype), &benches, &rules, &store)?;
    }
    say.note(&format!("running on {device_name}"));
    let stop = interrupt_flag()?;
    let interrupted = || stop.load(Ordering::Relaxed);
    for mut prepared in methods {
        prepared.about.insert("device".to_owned(), json!(device_name));
        let method = prepared.load(&device, args.dtype)?;
        let mut bar = Bar::new(say);
        let done = run::run(&method, &benches, &rules, &mut store, &mut |progress| bar.show(progress), &interrupted);
        bar.finish();
        if !done? {
            say.warn(&format!("interrupted; what was finished is kept. Go on with: {}", resume_command()));
            return Ok(ExitCode::from(130));
        }
    }
    report(store.records(), &benches, args, say)
}

/// Grades all that is stored again, by the judge and the benchmarks of `new`. What was run stays as the run directory says it was.
fn regrade(args: &Args, new: &config::Run, say: Say) -> anyhow::Result<ExitCode> {
    let mut config = config::Run::read(&new.out.join("config.toml"))?;
    (config.judge, config.benchmarks) = (new.judge.clone(), new.benchmarks.clone());
    let resolved = config.to_toml();
    for benchmark in &mut config.benchmarks {
        (benchmark.ids, benchmark.limit) = (None, None);
    }
    let benches = run::benches(&config, &Selection::default())?;
    let mut store = Store::open(&new.out, &resolved, Existing::Resume)?;
    let rules = Rules { seed: config.seed, retry: config.retry.clone(), reveal: args.reveal };
    let Regraded { n, n_changed } = run::regrade(&benches, &rules, &mut store)?;
    say.note(&format!("{n} records graded again; the old ones are in records.before-regrade.jsonl"));
    if n_changed > 0 {
        let what = "are of tasks whose question or gold answers have changed since they were answered";
        say.warn(&format!("{n_changed} records {what}: make sure that it was the gold answers"));
    }
    report(store.records(), &benches, args, say)
}

fn ids(args: &Args) -> anyhow::Result<Option<BTreeSet<String>>> {
    let Some(path) = &args.ids else { return Ok(None) };
    let text = fs::read_to_string(path).map_err(|e| weact::core::Error::io("can't read", path, e))?;
    let ids: BTreeSet<String> = text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect();
    if ids.is_empty() {
        return Err(Usage(format!("{}: holds no id", path.display())).into());
    }
    Ok(Some(ids))
}

/// What came of it, over all records of the directory.
fn report(records: &[Record], benches: &[Bench], args: &Args, say: Say) -> anyhow::Result<ExitCode> {
    let scores = score::scores(records)?;
    let percent = |x: Option<f64>| x.map_or_else(|| "unknown".to_owned(), |x| format!("{:.1}", 100.0 * x));
    let line = |s: &Score| {
        let states: Vec<String> = s.states.iter().map(|(state, n)| format!("{n} {}", state.name())).collect();
        format!(
            "{:<20} {:<14} {:>5} tasks  {:>6} % right (± {}), of those graded {} %; {}",
            s.method,
            s.benchmark,
            s.n,
            percent(s.accuracy),
            percent(s.se),
            percent(s.accuracy_graded),
            states.join(", ")
        )
    };
    let text: Vec<String> = scores.iter().map(line).collect();
    let rows: Vec<_> = scores
        .iter()
        .map(|s| {
            json!({"method": s.method, "benchmark": s.benchmark, "n": s.n, "states": s.states, "accuracy": s.accuracy, "se": s.se,
                "wilson95": s.wilson, "accuracy_graded": s.accuracy_graded, "first_accuracy": s.first_accuracy,
                "retry_share": s.retry_share, "scores": s.scores})
        })
        .collect();
    say.result(&text.join("\n"), &json!({"scores": rows}))?;
    for score in &scores {
        let bench = benches.iter().find(|bench| bench.name == score.benchmark);
        if let (Some(bench), [(state, n)]) = (bench, &score.states.iter().collect::<Vec<_>>()[..])
            && **n >= 10
        {
            let (grader, state) = (bench.grader.id(), state.name());
            say.warn(&format!("{} on {}: all {n} tasks are {state} by {grader}; look at some", score.method, score.benchmark));
        }
    }
    let n: usize = scores.iter().map(|s| s.n).sum();
    let n_unjudged: usize = scores.iter().filter_map(|s| s.states.get(&State::JudgeError)).sum();
    if n_unjudged as f64 > args.max_judge_errors * n as f64 {
        say.warn(&format!("{n_unjudged} of {n} answers could not be judged (--max-judge-errors)"));
        return Ok(ExitCode::from(1));
    }
    Ok(ExitCode::SUCCESS)
}

/// Bars on a terminal, some plain lines elsewhere.
struct Bar {
    say: Say,
    bar: Option<ProgressBar>,
    name: String,
    todo: usize,
    done: usize,
    right: usize,
}

/// Lines about tasks in a log file, for each method and benchmark.
const PLAIN_LINES: usize = 5;

impl Bar {
    fn new(say: Say) -> Self {
        let bar = (std::io::stderr().is_terminal() && !say.quiet).then(|| {
            let style = "{wide_bar} {pos}/{len} {per_sec} left {eta_precise} {msg}";
            ProgressBar::new(0).with_style(ProgressStyle::with_template(style).expect("a legal template"))
        });
        Self { say, bar, name: String::new(), todo: 0, done: 0, right: 0 }
    }

    fn show(&mut self, progress: &Progress<'_>) {
        match progress {
            Progress::Begin { method, benchmark, todo, done } => {
                self.name = format!("{method} on {benchmark}");
                (self.todo, self.done, self.right) = (*todo, 0, 0);
                let before = if *done > 0 { format!(", {done} are done") } else { String::new() };
                match &self.bar {
                    Some(bar) => {
                        bar.reset();
                        bar.set_length(*todo as u64);
                    }
                    None => self.say.note(&format!("{}: {todo} tasks{before}", self.name)),
                }
            }
            Progress::Attempt { record, last } => {
                if *last {
                    self.done += 1;
                    self.right += usize::from(record.state == State::Correct);
                }
                let text = format!("{}: {} of {} right", self.name, self.right, self.done);
                match &self.bar {
                    Some(bar) => {
                        bar.set_position(self.done as u64);
                        bar.set_message(text);
                    }
                    None if *last && (self.done == self.todo || self.done.is_multiple_of(self.todo.div_ceil(PLAIN_LINES))) => {
                        self.say.note(&format!("{text}, {} tasks in all", self.todo));
                    }
                    None => {}
                }
            }
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
