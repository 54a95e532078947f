//! The harness: methods and tasks to records, each attempt one durable line, so that a run that was killed loses at most the attempt
//! it was in.

mod plan;
mod setup;
mod identity;
mod store;

use std::time::Instant;

use serde_json::{Map, Value};

use identity::attempt_seed;
pub use plan::{Selection, select};
pub use setup::{benches, methods};
pub use store::{Existing, Store, episode_file, read};

use crate::{
    Error, Result,
    benchmark::Benchmark,
    config::Retry,
    grade::{Graded, Grader, Verdict},
    method::{Answer, Cost, Method},
    record::{self, Record, State},
    suite::cipher::Cipher,
    task::Task,
};

/// One column of the table: tasks and who grades them.
#[expect(missing_debug_implementations, reason = "graders are trait objects")]
pub struct Bench {
    /// The name in tables.
    pub name: String,
    /// Whose tasks these are.
    pub benchmark: Benchmark,
    /// The tasks, in the order in which they are asked.
    pub tasks: Vec<Task>,
    /// The grader.
    pub grader: Box<dyn Grader>,
}

/// How attempts are made.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The run's seed.
    pub seed: u64,
    /// Which are made again.
    pub retry: Retry,
    /// Write down texts of obfuscated benchmarks in plain, and their episodes.
    pub reveal: bool,
}

/// What the harness tells while it runs.
#[derive(Debug)]
pub enum Progress<'a> {
    /// So many tasks of this method and benchmark are to do, and so many are final already.
    Begin {
        /// The method's name.
        method: &'a str,
        /// The benchmark's name.
        benchmark: &'a str,
        /// Tasks without a final record.
        todo: usize,
        /// Tasks with one.
        done: usize,
    },
    /// An attempt was written down; whether the task is final now.
    Attempt {
        /// The record.
        record: &'a Record,
        /// Whether no further attempt follows.
        last: bool,
    },
}

/// Whether the records of `store` are those of the method that has this identity on each benchmark, of these tasks and graders.
/// Changes nothing: it can be asked for all methods before the first one runs.
///
/// # Errors
/// [`Error::RunDirectory`] if a record is another method's, benchmark's, seed's or question's: the message names what differs.
pub fn check(
    method: &str,
    identity: &dyn Fn(&str) -> Map<String, Value>,
    benches: &[Bench],
    rules: &Rules,
    store: &Store,
) -> Result<()> {
    let parts = identity::method_parts(identity, benches);
    store.check_parts(&store::method_part(method), &parts)?;
    for bench in benches {
        store.check_parts(&store::benchmark_part(&bench.name), &identity::bench_parts(bench))?;
        for task in &bench.tasks {
            check_task(&made(store.records(), method, bench, task), &parts, bench, task, rules, store)?;
        }
    }
    Ok(())
}

/// Runs what is missing of one method on all benchmarks. `false` if it was interrupted: what was finished is on disk.
///
/// # Errors
/// As [`check`]; nothing has been touched then. If the disk is full.
pub fn run(
    method: &dyn Method,
    benches: &[Bench],
    rules: &Rules,
    store: &mut Store,
    observe: &mut dyn FnMut(&Progress<'_>),
    interrupted: &dyn Fn() -> bool,
) -> Result<bool> {
    let identity = |benchmark: &str| method.identity(benchmark);
    check(method.name(), &identity, benches, rules, store)?;
    let parts = identity::method_parts(&identity, benches);
    store.accept([(store::method_part(method.name()), parts.clone())].into_iter().chain(all_bench_parts(benches)))?;
    for bench in benches {
        let is_open = |task: &&Task| !rules.is_final(made(store.records(), method.name(), bench, task).last().copied());
        let todo: Vec<&Task> = bench.tasks.iter().filter(is_open).collect();
        let done = bench.tasks.len() - todo.len();
        observe(&Progress::Begin { method: method.name(), benchmark: &bench.name, todo: todo.len(), done });
        for task in todo {
            loop {
                let before = made(store.records(), method.name(), bench, task).last().copied();
                if rules.is_final(before) {
                    break;
                }
                if interrupted() {
                    return Ok(false);
                }
                let Some((record, answer)) = attempt(method, &parts, bench, task, rules, before, interrupted)? else {
                    return Ok(false);
                };
                let keep_episode = rules.reveal || !bench.benchmark.is_secret();
                let episode = if keep_episode { named(answer, &record) } else { Vec::new() };
                store.push(record.clone(), &episode)?;
                observe(&Progress::Attempt { record: &record, last: rules.is_final(Some(&record)) });
            }
        }
    }
    Ok(true)
}

impl Rules {
    /// Whether no attempt follows `last`.
    fn is_final(&self, last: Option<&Record>) -> bool {
        last.is_some_and(|record| !self.retry.on.contains(&record.state) || record.attempt + 1 >= self.retry.attempts)
    }
}

fn all_bench_parts(benches: &[Bench]) -> impl Iterator<Item = (String, Map<String, Value>)> {
    benches.iter().map(|bench| (store::benchmark_part(&bench.name), identity::bench_parts(bench)))
}

/// The records of a task so far, by attempt.
fn made<'a>(records: &'a [Record], method: &str, bench: &Bench, task: &Task) -> Vec<&'a Record> {
    records.iter().filter(|r| r.task == task.id && r.benchmark == bench.name && r.method == method).collect()
}

fn check_task(
    made: &[&Record],
    parts: &Map<String, Value>,
    bench: &Bench,
    task: &Task,
    rules: &Rules,
    store: &Store,
) -> Result<()> {
    let mut before: Option<&Record> = None;
    for (number, record) in made.iter().enumerate() {
        if record.attempt != number {
            let why = format!("{} of {} on {}: attempts are not numbered from 0", task.id, record.method, bench.name);
            return Err(Error::Other(why));
        }
        let graded_again = before.filter(|_| record.is_graded_again());
        let seed = graded_again.map_or_else(|| attempt_seed(rules.seed, &task.id, number), |before| before.seed);
        if record.identity != identity::digest(parts, &bench.name, bench.grader.id(), task, seed) {
            let what = if record.seed == seed { "its question, its gold or weact itself" } else { "the seed" };
            let why = format!(
                "task {} of {} was answered by {} under other conditions: {what} changed; use another out, or --overwrite",
                task.id, bench.name, record.method
            );
            return Err(Error::RunDirectory { path: store.dir().to_owned(), why });
        }
        before = Some(record);
    }
    Ok(())
}

/// One attempt, graded. `None` if it was interrupted.
fn attempt(
    method: &dyn Method,
    parts: &Map<String, Value>,
    bench: &Bench,
    task: &Task,
    rules: &Rules,
    before: Option<&Record>,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<(Record, Answer)>> {
    let number = before.map_or(0, |record| record.attempt + 1);
    // Only the judge failed: the same answer is graded again.
    let again = before.filter(|record| record.state == State::JudgeError);
    let seed = again.map_or_else(|| attempt_seed(rules.seed, &task.id, number), |record| record.seed);
    let begun = Instant::now();
    let (answer, error) = match again {
        Some(record) => (given(record, bench)?, None),
        None => match method.attempt(&bench.name, task, seed, interrupted) {
            Ok(answer) => (answer, None),
            Err(Error::Infer(weact_infer::Error::Interrupted)) => return Ok(None),
            Err(error) => (Answer::default(), Some(error.to_string())),
        },
    };
    let wall_s = if again.is_some() { 0.0 } else { begun.elapsed().as_secs_f64() };
    let graded = grade(bench, task, answer.prediction.as_deref(), answer.report.as_deref());
    let state = match State::from(graded.verdict) {
        _ if error.is_some() => State::Error,
        State::NoAnswer if answer.length => State::Length,
        state => state,
    };
    let mut record = Record {
        v: record::VERSION,
        method: method.name().to_owned(),
        benchmark: bench.name.clone(),
        task: task.id.clone(),
        attempt: number,
        cause: before.map(|record| record.state),
        seed,
        identity: identity::digest(parts, &bench.name, bench.grader.id(), task, seed),
        state,
        prediction: answer.prediction.clone(),
        report: answer.report.clone().filter(|report| Some(report) != answer.prediction.as_ref()),
        score: graded.score.filter(|_| error.is_none()),
        scores: if error.is_none() { graded.scores } else { Default::default() },
        grader: bench.grader.id().to_owned(),
        graded_text: graded.graded_text,
        detail: graded.detail,
        error,
        termination: answer.termination.clone(),
        n_turns: answer.n_turns,
        n_tool_calls: answer.n_tool_calls,
        cost: if again.is_some() { Cost::default() } else { answer.cost.clone() },
        wall_s,
        canary: None,
    };
    if !rules.reveal {
        conceal(&mut record, bench.benchmark, task)?;
    }
    Ok(Some((record, answer)))
}

/// The grade of an answer. Where the grader fails, the answer is kept without one.
fn grade(bench: &Bench, task: &Task, prediction: Option<&str>, report: Option<&str>) -> Graded {
    // A run that ended without an answer has no report either, whatever it wrote on the way.
    let report = report.filter(|_| prediction.is_some()).or(prediction);
    let text = if bench.grader.reads_report() { report } else { prediction };
    bench.grader.grade(task, text).unwrap_or_else(|error| Graded {
        verdict: Verdict::JudgeError,
        score: None,
        scores: Default::default(),
        graded_text: None,
        detail: Some(error.to_string()),
    })
}

/// The answer of an earlier attempt.
fn given(record: &Record, bench: &Bench) -> Result<Answer> {
    let plain = revealed(record, bench.benchmark)?;
    Ok(Answer {
        report: plain.report,
        prediction: plain.prediction,
        termination: plain.termination,
        n_turns: plain.n_turns,
        n_tool_calls: plain.n_tool_calls,
        ..Answer::default()
    })
}

/// What became of stored answers that were graded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regraded {
    /// Records.
    pub n: usize,
    /// Of them, those whose task has another question or other gold answers than when it was answered.
    pub n_changed: usize,
}

/// Grades the stored answers again, without running anything. The records get the new grader's id and their identity under it, so
/// that the run can be resumed with it.
///
/// # Errors
/// If there are no records, a record's benchmark or task is not among `benches`, or the disk is full: nothing has been touched then.
pub fn regrade(benches: &[Bench], rules: &Rules, store: &mut Store) -> Result<Regraded> {
    if store.records().is_empty() {
        return Err(Error::RunDirectory { path: store.dir().to_owned(), why: "has no records to grade".to_owned() });
    }
    let mut records = Vec::new();
    let mut n_changed = 0;
    for record in store.records() {
        let known = benches.iter().find(|bench| bench.name == record.benchmark);
        let task = known.and_then(|bench| Some((bench, bench.tasks.iter().find(|task| task.id == record.task)?)));
        let Some((bench, task)) = task else {
            return Err(Error::Other(format!(
                "record of task {:?} of {}: it is not in the configuration's files",
                record.task, record.benchmark
            )));
        };
        let parts = store.parts(&store::method_part(&record.method))?;
        let identity = |grader: &str| identity::digest(parts, &bench.name, grader, task, record.seed);
        n_changed += usize::from(record.identity != identity(&record.grader));
        let mut plain = revealed(record, bench.benchmark)?;
        if record.state != State::Error {
            let graded = grade(bench, task, plain.prediction.as_deref(), plain.report.as_deref());
            plain.state = match State::from(graded.verdict) {
                State::NoAnswer if record.state == State::Length => State::Length,
                state => state,
            };
            plain.score = graded.score;
            plain.scores = graded.scores;
            plain.graded_text = graded.graded_text;
            plain.detail = graded.detail;
        }
        bench.grader.id().clone_into(&mut plain.grader);
        plain.identity = identity(bench.grader.id());
        if !rules.reveal {
            conceal(&mut plain, bench.benchmark, task)?;
        }
        records.push(plain);
    }
    let n = records.len();
    store.replace(records)?;
    store.accept(all_bench_parts(benches))?;
    Ok(Regraded { n, n_changed })
}

/// Obfuscates the texts of a record whose benchmark is.
fn conceal(record: &mut Record, benchmark: Benchmark, task: &Task) -> Result<()> {
    let Some(cipher) = Cipher::of(benchmark) else { return Ok(()) };
    let canary = task.more.get("canary").and_then(Value::as_str).filter(|canary| !canary.is_empty());
    let canary =
        canary.ok_or_else(|| Error::Other(format!("task {}: it has no canary to obfuscate its records with", task.id)))?;
    for text in record.texts_mut() {
        *text = cipher.conceal(text, canary);
    }
    record.canary = Some(canary.to_owned());
    Ok(())
}

/// A record with its texts in plain.
///
/// # Errors
/// If they can't be decoded with the record's canary.
pub fn revealed(record: &Record, benchmark: Benchmark) -> Result<Record> {
    let mut plain = record.clone();
    let (Some(cipher), Some(canary)) = (Cipher::of(benchmark), plain.canary.take()) else { return Ok(plain) };
    for text in plain.texts_mut() {
        *text = cipher
            .reveal(text, &canary)
            .map_err(|why| Error::Other(format!("record of task {}: its text {why}", record.task)))?;
    }
    Ok(plain)
}

/// The episode under the record's name for it.
fn named(answer: Answer, record: &Record) -> Vec<weact_core::episode::Line> {
    let id = record.episode_id();
    answer.episode.into_iter().map(|line| weact_core::episode::Line { episode: id.clone(), ..line }).collect()
}

#[cfg(test)]
mod tests;
