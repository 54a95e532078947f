//! The harness: methods and tasks to records, each attempt one durable line, so that a run that was killed loses at most the attempt
//! it was in.

mod plan;
mod setup;
mod store;

use std::time::Instant;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use weact_core::io::tensors::hex;

pub use plan::{Selection, select};
pub use setup::{benches, methods};
pub use store::{Existing, Store, benchmark_part, episode_file, method_part, read};

use crate::{
    Error, Result,
    benchmark::Benchmark,
    config::Retry,
    grade::Grader,
    method::{Answer, Cost, Method},
    record::{Record, State},
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

/// Runs what is missing of one method on all benchmarks. `false` if it was interrupted: what was finished is on disk.
///
/// # Errors
/// If the directory holds records of another method or benchmark of this name, a record of this plan under another identity, a grader can't grade, or the
/// disk is full.
pub fn run(
    method: &dyn Method,
    benches: &[Bench],
    rules: &Rules,
    store: &mut Store,
    observe: &mut dyn FnMut(&Progress<'_>),
    interrupted: &dyn Fn() -> bool,
) -> Result<bool> {
    for bench in benches {
        let identity = method.identity(&bench.name);
        store.same_parts(&method_part(method.name()), &shared_parts(&identity))?;
        store.same_parts(&benchmark_part(&bench.name), &bench.parts())?;
        let mut todo = Vec::new();
        for task in &bench.tasks {
            let made = made(store.records(), method.name(), bench, task);
            check_identity(&made, method, &identity, bench, task, rules, store)?;
            if !rules.is_final(made.last().copied()) {
                todo.push(task);
            }
        }
        let done = bench.tasks.len() - todo.len();
        observe(&Progress::Begin { method: method.name(), benchmark: &bench.name, todo: todo.len(), done });
        for task in todo {
            loop {
                let made = made(store.records(), method.name(), bench, task);
                let before = made.last().copied();
                if rules.is_final(before) {
                    break;
                }
                if interrupted() {
                    return Ok(false);
                }
                let Some((record, answer)) = attempt(method, &identity, bench, task, rules, before, interrupted)? else {
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

impl Bench {
    /// What its grades depend on.
    fn parts(&self) -> Map<String, Value> {
        let parts = json!({"benchmark": self.benchmark, "grader": self.grader.id()});
        parts.as_object().cloned().expect("an object")
    }
}

/// What is the same on every benchmark: tools may differ between them.
fn shared_parts(identity: &Map<String, Value>) -> Map<String, Value> {
    identity.iter().filter(|(key, _)| *key != "tools").map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// The records of a task so far, by attempt.
fn made<'a>(records: &'a [Record], method: &str, bench: &Bench, task: &Task) -> Vec<&'a Record> {
    records.iter().filter(|r| r.task == task.id && r.benchmark == bench.name && r.method == method).collect()
}

fn check_identity(
    made: &[&Record],
    method: &dyn Method,
    identity: &Map<String, Value>,
    bench: &Bench,
    task: &Task,
    rules: &Rules,
    store: &Store,
) -> Result<()> {
    for (number, record) in made.iter().enumerate() {
        if record.attempt != number {
            let why = format!("{} of {} on {}: attempts are not numbered from 0", task.id, method.name(), bench.name);
            return Err(Error::Other(why));
        }
        let seed = attempt_seed(rules.seed, &task.id, record.attempt);
        if record.identity != digest(identity, bench, task, seed) {
            let what = if record.seed == seed { "its question, answer, tools or grader" } else { "the seed" };
            let why = format!(
                "task {} of {} was answered by {} under other conditions: {what} changed; use another out, or --overwrite",
                task.id, bench.name, record.method
            );
            return Err(Error::RunDirectory { path: store.dir().to_owned(), why });
        }
    }
    Ok(())
}

/// One attempt, graded. `None` if it was interrupted.
fn attempt(
    method: &dyn Method,
    identity: &Map<String, Value>,
    bench: &Bench,
    task: &Task,
    rules: &Rules,
    before: Option<&Record>,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<(Record, Answer)>> {
    let number = before.map_or(0, |record| record.attempt + 1);
    let seed = attempt_seed(rules.seed, &task.id, number);
    let begun = Instant::now();
    // Only the judge failed: the same answer is graded again.
    let again = before.filter(|record| record.state == State::JudgeError);
    let (answer, error) = match again {
        Some(record) => (given(record, bench)?, None),
        None => match method.attempt(&bench.name, task, seed, interrupted) {
            Ok(answer) => (answer, None),
            Err(Error::Infer(weact_infer::Error::Interrupted)) => return Ok(None),
            Err(error) => (Answer::default(), Some(error.to_string())),
        },
    };
    let wall_s = if again.is_some() { 0.0 } else { begun.elapsed().as_secs_f64() };
    // A run that ended without an answer has no report either, whatever it wrote on the way.
    let report = answer.report.as_deref().filter(|_| answer.prediction.is_some());
    let text = if bench.grader.reads_report() { report } else { answer.prediction.as_deref() };
    let graded = bench.grader.grade(task, text)?;
    let state = match State::from(graded.verdict) {
        _ if error.is_some() => State::Error,
        State::NoAnswer if answer.length => State::Length,
        state => state,
    };
    let mut record = Record {
        v: 1,
        method: method.name().to_owned(),
        benchmark: bench.name.clone(),
        task: task.id.clone(),
        attempt: number,
        cause: before.map(|record| record.state),
        seed,
        identity: digest(identity, bench, task, seed),
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

/// The answer of an earlier attempt.
fn given(record: &Record, bench: &Bench) -> Result<Answer> {
    let plain = revealed(record, bench.benchmark)?;
    Ok(Answer {
        report: plain.report.or_else(|| plain.prediction.clone()),
        prediction: plain.prediction,
        termination: plain.termination,
        n_turns: plain.n_turns,
        n_tool_calls: plain.n_tool_calls,
        ..Answer::default()
    })
}

/// Grades the stored answers again, without running anything.
///
/// # Errors
/// If a record's benchmark or task is not among `benches`, a grader can't grade, or the disk is full.
pub fn regrade(benches: &[Bench], rules: &Rules, store: &mut Store) -> Result<usize> {
    let mut records = Vec::new();
    for record in store.records() {
        let known = benches.iter().find(|bench| bench.name == record.benchmark);
        let task = known.and_then(|bench| Some((bench, bench.tasks.iter().find(|task| task.id == record.task)?)));
        let Some((bench, task)) = task else {
            return Err(Error::Other(format!(
                "record of task {:?} of {}: it is not in the configuration's files",
                record.task, record.benchmark
            )));
        };
        let mut plain = revealed(record, bench.benchmark)?;
        if record.state != State::Error {
            let report = plain.report.as_deref().filter(|_| plain.prediction.is_some()).or(plain.prediction.as_deref());
            let text = if bench.grader.reads_report() { report } else { plain.prediction.as_deref() };
            let graded = bench.grader.grade(task, text)?;
            let was_long = record.state == State::Length;
            plain.state = match State::from(graded.verdict) {
                State::NoAnswer if was_long => State::Length,
                state => state,
            };
            plain.score = graded.score;
            plain.scores = graded.scores;
            plain.graded_text = graded.graded_text;
            plain.detail = graded.detail;
        }
        bench.grader.id().clone_into(&mut plain.grader);
        if !rules.reveal {
            conceal(&mut plain, bench.benchmark, task)?;
        }
        records.push(plain);
    }
    let n = records.len();
    store.replace(records)?;
    Ok(n)
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

/// Seed of an attempt: it follows from the run's seed, the task and the attempt's number, whatever was asked before.
fn attempt_seed(seed: u64, task: &str, attempt: usize) -> u64 {
    let hash =
        Sha256::new().chain_update(seed.to_le_bytes()).chain_update((attempt as u64).to_le_bytes()).chain_update(task).finalize();
    u64::from_le_bytes(hash[..8].try_into().expect("a hash has 32 bytes"))
}

/// SHA-256 over all that decides an answer and its grade.
fn digest(identity: &Map<String, Value>, bench: &Bench, task: &Task, seed: u64) -> String {
    let all = json!({"method": identity, "question": task.question, "task": task.id, "gold": task.gold, "seed": seed, "grader": bench.grader.id()});
    hex(&Sha256::digest(all.to_string()))
}

/// The episode under the record's name for it.
fn named(answer: Answer, record: &Record) -> Vec<weact_core::episode::Line> {
    let id = record.episode_id();
    answer.episode.into_iter().map(|line| weact_core::episode::Line { episode: id.clone(), ..line }).collect()
}

#[cfg(test)]
mod tests;
