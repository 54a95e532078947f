//! Records to scores: what tables and figures are made of.

use std::collections::BTreeMap;

use serde::Serialize;
use weact_core::stats::{self, Mean, Outcome, Paired, Z95};

use crate::{
    Error, Result,
    record::{Record, State},
};

/// One method on one benchmark. Shares are in [0, 1]; an unknown number is `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Score {
    /// The method's name.
    pub method: String,
    /// The benchmark's name.
    pub benchmark: String,
    /// Tasks.
    pub n: usize,
    /// Tasks by the state of their last attempt.
    pub states: BTreeMap<State, usize>,
    /// Share of right answers among all tasks, errors and judge errors counted as not right.
    pub accuracy: Option<f64>,
    /// Its binomial standard error, as Table 1 prints it.
    pub se: Option<f64>,
    /// Its 95 % Wilson interval.
    pub wilson: Option<(f64, f64)>,
    /// Share of right answers among the tasks that were graded: without errors and judge errors.
    pub accuracy_graded: Option<f64>,
    /// Share of right answers after the first attempt, as last graded; `None` where a task's first attempt is missing.
    pub first_accuracy: Option<f64>,
    /// Share of tasks with a retry (Table 6). Grading the same answer again after a judge's failure is none.
    pub retry_share: Option<f64>,
    /// Mean of each further score over the tasks whose last attempt has it.
    pub scores: BTreeMap<String, f64>,
    /// Seconds of each task, all its attempts together, in ascending order.
    pub wall_s: Vec<f64>,
    /// Seconds by category, summed over tasks and attempts; the model's are split by its active weights' alias.
    pub seconds: BTreeMap<String, f64>,
    /// Tokens computed before sampling, all attempts together.
    pub prefilled: usize,
    /// Of them, recomputed after a switch.
    pub recomputed: usize,
    /// Tokens sampled.
    pub sampled: usize,
}

/// The records of one task of one method and benchmark, by attempt.
type Attempts<'a> = BTreeMap<usize, &'a Record>;

/// Attempts by task.
type Tasks<'a> = BTreeMap<&'a str, Attempts<'a>>;

/// The scores of `records`, in the order in which methods and benchmarks first occur.
///
/// # Errors
/// If an attempt stands twice, or tokens can't be counted.
pub fn scores(records: &[Record]) -> Result<Vec<Score>> {
    let mut groups: Vec<((&str, &str), Tasks<'_>)> = Vec::new();
    for record in records {
        let key = (record.method.as_str(), record.benchmark.as_str());
        let at = groups.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            groups.push((key, BTreeMap::new()));
            groups.len() - 1
        });
        if groups[at].1.entry(&record.task).or_default().insert(record.attempt, record).is_some() {
            let Record { method, benchmark, task, attempt, .. } = record;
            return Err(Error::Other(format!("attempt {attempt} of task {task:?} of {benchmark} by {method} stands twice")));
        }
    }
    groups.iter().map(|((method, benchmark), tasks)| score(method, benchmark, tasks)).collect()
}

/// The first attempt as last graded.
fn first<'a>(attempts: &Attempts<'a>) -> Option<&'a Record> {
    let first = attempts.get(&0).copied();
    first.and(attempts.values().copied().take_while(|record| record.attempt == 0 || record.is_graded_again()).last())
}

fn score(method: &str, benchmark: &str, tasks: &Tasks<'_>) -> Result<Score> {
    let last: Vec<&Record> = tasks.values().map(|attempts| *attempts.values().next_back().expect("an attempt")).collect();
    let n = tasks.len();
    let count = |state: State| last.iter().filter(|record| record.state == state).count();
    let states: BTreeMap<State, usize> =
        State::ALL.into_iter().map(|state| (state, count(state))).filter(|(_, n)| *n > 0).collect();
    let n_right = count(State::Correct);
    let n_graded = n - count(State::Error) - count(State::JudgeError);
    let share = |part: usize, whole: usize| (whole > 0).then(|| part as f64 / whole as f64);
    let first_right = tasks.values().filter(|attempts| first(attempts).is_some_and(|r| r.state == State::Correct)).count();
    let all_begun = tasks.values().all(|attempts| attempts.contains_key(&0));
    let is_retry = |record: &&Record| record.attempt > 0 && !record.is_graded_again();
    let n_retried = tasks.values().filter(|attempts| attempts.values().any(is_retry)).count();
    let mut named: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
    for (name, value) in last.iter().flat_map(|record| &record.scores) {
        named.entry(name).or_default().push(*value);
    }
    let all = || tasks.values().flat_map(|attempts| attempts.values());
    let mut seconds: BTreeMap<String, f64> = BTreeMap::new();
    for (category, s) in all().flat_map(|record| &record.cost.seconds) {
        // `model:plan@0123` is the time of the adapter `plan`.
        *seconds.entry(category.split('@').next().unwrap_or(category).to_owned()).or_default() += s;
    }
    let tokens = |of: fn(&Record) -> usize| {
        let sum = all().try_fold(0_usize, |sum, record| sum.checked_add(of(record)));
        sum.ok_or_else(|| Error::Other(format!("{benchmark} by {method}: its numbers of tokens are too large to add up")))
    };
    let mut wall_s: Vec<f64> = tasks.values().map(|attempts| attempts.values().map(|r| r.wall_s).sum()).collect();
    wall_s.sort_by(f64::total_cmp);
    Ok(Score {
        method: method.to_owned(),
        benchmark: benchmark.to_owned(),
        n,
        states,
        accuracy: share(n_right, n),
        se: stats::binomial_se(n_right, n),
        wilson: stats::wilson(n_right, n, Z95),
        accuracy_graded: share(n_right, n_graded),
        first_accuracy: share(first_right, n).filter(|_| all_begun),
        retry_share: share(n_retried, n),
        scores: named
            .into_iter()
            .map(|(name, values)| (name.clone(), values.iter().sum::<f64>() / values.len() as f64))
            .collect(),
        wall_s,
        seconds,
        prefilled: tokens(|record| record.cost.prefilled)?,
        recomputed: tokens(|record| record.cost.recomputed)?,
        sampled: tokens(|record| record.cost.sampled)?,
    })
}

/// The unweighted mean of a method's accuracies, in [0, 1], with its standard error, over `benchmarks`; `None` where one is missing.
pub fn average(scores: &[Score], method: &str, benchmarks: &[&str]) -> Option<Mean> {
    let of = |benchmark: &&str| {
        let score = scores.iter().find(|score| score.method == method && score.benchmark == **benchmark)?;
        Some(Mean { mean: score.accuracy?, se: score.se? })
    };
    stats::mean_of_benchmarks(&benchmarks.iter().map(of).collect::<Option<Vec<Mean>>>()?)
}

/// Compares method `b` with method `a` on the tasks that both have answered, clustered by benchmark and task: final attempts, by success. `margin` in [0, 1].
///
/// # Errors
/// If they share no task.
pub fn compare(records: &[Record], a: &str, b: &str, margin: f64) -> Result<Paired> {
    let last = |method: &str| {
        let mut last: BTreeMap<(&str, &str), &Record> = BTreeMap::new();
        for record in records.iter().filter(|record| record.method == method) {
            let newest = last.entry((&record.benchmark, &record.task)).or_insert(record);
            if record.attempt > newest.attempt {
                *newest = record;
            }
        }
        last
    };
    let (first, second) = (last(a), last(b));
    let shared: Vec<&(&str, &str)> = first.keys().filter(|key| second.contains_key(*key)).collect();
    // By number: names joined by whatever may themselves hold it.
    let of = |last: &BTreeMap<(&str, &str), &Record>| -> Vec<Outcome> {
        let outcome = |(i, key): (usize, &&(&str, &str))| {
            let id = format!("{i:010}");
            Outcome { task: id.clone(), id, seed: 0, success: last[*key].state == State::Correct }
        };
        shared.iter().enumerate().map(outcome).collect()
    };
    Ok(stats::paired(&of(&first), &of(&second), margin, 0)?)
}

/// The value below which the share `level` of `sorted` lies, by nearest rank. `None` without values.
pub fn quantile(sorted: &[f64], level: f64) -> Option<f64> {
    let rank = (level * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A record with what matters here.
    pub(crate) fn record(method: &str, benchmark: &str, task: &str, attempt: usize, state: State) -> Record {
        let record = serde_json::json!({
            "v": 1, "method": method, "benchmark": benchmark, "task": task, "attempt": attempt, "seed": 0, "identity": "0",
            "state": state, "grader": "g@1", "termination": "answered", "n_turns": 1, "n_tool_calls": 0,
            "cost": {"prefilled": 10, "recomputed": 4, "sampled": 2, "seconds": {"model:plan@0123": 1.5, "tool": 0.5}},
            "wall_s": 2.0, "scores": {"em": 0.5}});
        serde_json::from_value(record).expect("a record")
    }

    #[test]
    fn a_score_counts_errors_as_not_right_and_says_what_was_graded() {
        let records = [
            record("m", "b", "1", 0, State::Correct),
            record("m", "b", "2", 0, State::NoAnswer),
            record("m", "b", "2", 1, State::Correct),
            record("m", "b", "3", 0, State::Wrong),
            record("m", "b", "4", 0, State::JudgeError),
        ];
        let score = &scores(&records).expect("scores")[0];
        assert_eq!((score.n, score.accuracy, score.accuracy_graded), (4, Some(0.5), Some(2.0 / 3.0)));
        assert_eq!((score.first_accuracy, score.retry_share, score.se), (Some(0.25), Some(0.25), Some(0.25)));
        assert_eq!(score.wall_s, [2.0, 2.0, 2.0, 4.0]);
        assert_eq!((score.seconds["model:plan"], score.prefilled, score.scores["em"]), (7.5, 50, 0.5));
        assert_eq!(
            (quantile(&score.wall_s, 0.5), quantile(&score.wall_s, 0.99), quantile(&[], 0.5)),
            (Some(2.0), Some(4.0), None)
        );
        let twice = [records[0].clone(), records[0].clone()];
        assert!(scores(&twice).expect_err("twice").to_string().contains("stands twice"));
        assert_eq!(scores(&[]).expect("nothing"), []);
    }

    #[test]
    fn an_answer_graded_again_is_no_retry() {
        let again =
            |state: State, attempt: usize, cause: State| Record { cause: Some(cause), ..record("m", "b", "1", attempt, state) };
        let mut records = vec![
            record("m", "b", "1", 0, State::JudgeError),
            again(State::JudgeError, 1, State::JudgeError),
            again(State::Correct, 2, State::JudgeError),
        ];
        let score = scores(&records).expect("scores").remove(0);
        assert_eq!((score.first_accuracy, score.retry_share, score.accuracy), (Some(1.0), Some(0.0), Some(1.0)));
        records[2].state = State::NoAnswer;
        records.push(again(State::Correct, 3, State::NoAnswer));
        let score = scores(&records).expect("scores").remove(0);
        assert_eq!((score.first_accuracy, score.retry_share, score.accuracy), (Some(0.0), Some(1.0), Some(1.0)));
    }

    #[test]
    fn averages_need_every_benchmark_and_comparisons_only_shared_tasks() {
        let mut records: Vec<Record> = (0..10).map(|i| record("a", "x", &i.to_string(), 0, State::Wrong)).collect();
        records.extend((0..12).map(|i| record("b", "x", &i.to_string(), 0, if i < 8 { State::Correct } else { State::Wrong })));
        records.push(record("b", "y", "0", 0, State::Correct));
        let all = scores(&records).expect("scores");
        assert_eq!(average(&all, "a", &["x", "y"]), None);
        assert!(average(&all, "b", &["x", "y"]).is_some_and(|mean| (mean.mean - (8.0 / 12.0 + 1.0) / 2.0).abs() < 1e-12));
        let paired = compare(&records, "a", "b", 0.05).expect("shared tasks");
        assert_eq!((paired.n, paired.b, paired.c), (10, 0, 8));
        assert!(compare(&records, "a", "nobody", 0.05).is_err());
    }

    #[test]
    fn names_that_look_alike_when_joined_stay_apart() {
        let all = [
            record("A", "a/b", "c", 0, State::Correct),
            record("A", "a", "b/c", 0, State::Wrong),
            record("B", "a/b", "c", 0, State::Wrong),
            record("B", "a", "b/c", 0, State::Wrong),
        ];
        let paired = compare(&all, "A", "B", 0.05).expect("shared tasks");
        assert_eq!((paired.n, paired.b, paired.c), (2, 1, 0));
    }

    #[test]
    fn a_missing_first_attempt_is_unknown_and_tokens_never_wrap() {
        let mut records = [record("m", "b", "1", 0, State::Correct), record("m", "b", "2", 1, State::Correct)];
        let score = scores(&records).expect("scores").remove(0);
        assert_eq!((score.first_accuracy, score.retry_share, score.accuracy), (None, Some(0.5), Some(1.0)));
        records[0].cost.prefilled = usize::MAX;
        assert!(scores(&records).expect_err("too many").to_string().contains("too large to add up"));
    }
}
