use std::{
    cell::Cell,
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

use weact_core::episode::{Event, Line, Notice};

use super::*;
use crate::grade::{self, Options};

/// Answers right but for the tasks that its name tells: `wrong`, `none`, `long`, `fail` after which attempts.
struct Fake {
    name: &'static str,
    model: &'static str,
    n_asked: AtomicUsize,
}

impl Fake {
    fn new(name: &'static str) -> Self {
        Self { name, model: "m1", n_asked: AtomicUsize::new(0) }
    }
}

impl Method for Fake {
    fn name(&self) -> &str {
        self.name
    }

    fn identity(&self, _: &str) -> Map<String, Value> {
        json!({"model": self.model, "tools": "none"}).as_object().cloned().expect("an object")
    }

    fn attempt(&self, _: &str, task: &Task, seed: u64, interrupted: &dyn Fn() -> bool) -> Result<Answer> {
        self.n_asked.fetch_add(1, Ordering::Relaxed);
        if interrupted() {
            return Err(weact_infer::Error::Interrupted.into());
        }
        let prediction = match task.id.as_str() {
            "wrong" => Some("no".to_owned()),
            "none" | "long" => None,
            "fail" => return Err(Error::Other("the tool broke".to_owned())),
            "later" if seed.is_multiple_of(2) => None,
            _ => task.gold.first().cloned(),
        };
        let notice = Event::Notice(Notice { kind: "x".to_owned(), detail: seed.to_string() });
        Ok(Answer {
            length: task.id == "long",
            report: prediction.clone(),
            prediction,
            termination: "answered".to_owned(),
            n_turns: 1,
            episode: vec![Line { episode: task.id.clone(), event: notice }],
            ..Answer::default()
        })
    }
}

fn task(id: &str, canary: Option<&str>) -> Task {
    let mut more = Map::new();
    more.extend(canary.map(|canary| ("canary".to_owned(), json!(canary))));
    Task { id: id.to_owned(), question: format!("{id}?"), gold: vec![format!("the {id}")], files: Vec::new(), more }
}

fn bench(benchmark: Benchmark, ids: &[&str]) -> Bench {
    let canary = benchmark.is_secret().then_some("canary of the test");
    let grader = grade::grader(benchmark, None, Options::default()).expect("a rule");
    Bench { name: benchmark.title().to_owned(), benchmark, tasks: ids.iter().map(|id| task(id, canary)).collect(), grader }
}

fn rules(attempts: usize) -> Rules {
    Rules { seed: 7, retry: Retry { attempts, ..Retry::default() }, reveal: false }
}

fn go(method: &Fake, benches: &[Bench], rules: &Rules, dir: &Path, existing: Existing) -> Result<Vec<Record>> {
    let mut store = Store::open(dir, "kind = \"eval\"\n", existing)?;
    assert!(run(method, benches, rules, &mut store, &mut |_| {}, &|| false)?);
    Ok(store.records().to_vec())
}

/// But for times.
fn timeless(records: &[Record]) -> Vec<Record> {
    let mut records: Vec<Record> = records.iter().map(|r| Record { wall_s: 0.0, ..r.clone() }).collect();
    records.sort_by(|a, b| (&a.benchmark, &a.task, a.attempt).cmp(&(&b.benchmark, &b.task, b.attempt)));
    records
}

const IDS: [&str; 7] = ["a", "b", "wrong", "none", "long", "fail", "later"];

#[test]
fn every_attempt_has_its_state_and_retries_have_their_cause() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("run");
    let records = go(&Fake::new("fake"), &[bench(Benchmark::Bamboogle, &IDS)], &rules(3), &out, Existing::Refuse).expect("a run");
    let of = |id: &str| -> Vec<(State, Option<State>)> {
        records.iter().filter(|r| r.task == id).map(|r| (r.state, r.cause)).collect()
    };
    assert_eq!(of("a"), [(State::Correct, None)]);
    assert_eq!(of("wrong"), [(State::Wrong, None)], "a graded answer is final");
    for (id, state) in [("none", State::NoAnswer), ("long", State::Length), ("fail", State::Error)] {
        assert_eq!(of(id), [(state, None), (state, Some(state)), (state, Some(state))], "{id}");
    }
    let failed = records.iter().find(|r| r.task == "fail").expect("a record");
    assert_eq!((failed.error.as_deref(), failed.score), (Some("the tool broke"), None));
    let seeds: std::collections::BTreeSet<u64> = records.iter().map(|r| r.seed).collect();
    assert_eq!(seeds.len(), records.len(), "each attempt has its own seed");
    assert_eq!(read(&out).expect("readable"), (records, 0));
}

#[test]
fn the_order_of_questions_changes_no_record() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut reversed = IDS;
    reversed.reverse();
    let [a, b] = [("a", IDS), ("b", reversed)].map(|(name, ids)| {
        go(&Fake::new("fake"), &[bench(Benchmark::Bamboogle, &ids)], &rules(2), &dir.path().join(name), Existing::Refuse)
            .expect("a run")
    });
    assert_eq!(timeless(&a), timeless(&b));
}

/// Interrupted after each attempt, torn at its end, resumed: the same records, each asked once.
#[test]
fn a_resumed_run_is_the_unbroken_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let benches = || [bench(Benchmark::Bamboogle, &IDS), bench(Benchmark::Frames, &["a", "c"])];
    let unbroken = go(&Fake::new("fake"), &benches(), &rules(2), &whole, Existing::Refuse).expect("a run");
    let mut n_asked = 0;
    for round in 0.. {
        let method = Fake::new("fake");
        let mut store =
            Store::open(&parts, "kind = \"eval\"\n", if round == 0 { Existing::Refuse } else { Existing::Resume }).expect("open");
        let n_made = Cell::new(0);
        let mut count = |progress: &Progress<'_>| {
            if let Progress::Attempt { .. } = progress {
                n_made.set(n_made.get() + 1);
            }
        };
        let done = run(&method, &benches(), &rules(2), &mut store, &mut count, &|| n_made.get() >= 2).expect("a run");
        n_asked += method.n_asked.load(Ordering::Relaxed);
        drop(store);
        if done {
            break;
        }
        // A kill in the middle of a line, and one between an episode and its record.
        let episodes = parts.join("episodes").join(episode_file("fake"));
        for (path, torn) in [
            (parts.join("records.jsonl"), "{\"v\":1,\"meth"),
            (episodes, "{\"episode\":\"Bamboogle/x#0\",\"event\":\"notice\",\"kind\":\"x\",\"detail\":\"y\"}\n{\"epis"),
        ] {
            let text = fs::read_to_string(&path).expect("readable");
            fs::write(&path, text + torn).expect("writable");
        }
        assert_eq!(read(&parts).expect("readable").1, 1);
    }
    let (resumed, torn) = read(&parts).expect("readable");
    assert_eq!((timeless(&resumed), torn, n_asked), (timeless(&unbroken), 0, unbroken.len()));
    let episodes = |dir: &Path| fs::read_to_string(dir.join("episodes").join(episode_file("fake"))).expect("readable");
    assert_eq!(episodes(&parts), episodes(&whole));
}

#[test]
fn records_of_another_method_grader_seed_or_question_are_not_taken_for_this_ones() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("run");
    let two = || [bench(Benchmark::Bamboogle, &["a", "b"])];
    let fake = Fake::new("fake");
    let before = go(&fake, &two(), &rules(1), &out, Existing::Refuse).expect("a run");
    let refused = |method: &Fake, benches: &[Bench], rules: &Rules, existing, why: &str| {
        let error = go(method, benches, rules, &out, existing).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(read(&out).expect("readable").0, before, "nothing was touched");
    };
    refused(&fake, &two(), &rules(1), Existing::Refuse, "is not empty: --resume");
    refused(
        &Fake { model: "m2", ..Fake::new("fake") },
        &two(),
        &rules(1),
        Existing::Resume,
        "another method fake: model changed",
    );
    refused(&fake, &two(), &Rules { seed: 8, ..rules(1) }, Existing::Resume, "the seed changed");
    let mut other = two();
    other[0].tasks[1].question.push('!');
    refused(&fake, &other, &rules(1), Existing::Resume, "task b of Bamboogle");
    let mut other = two();
    other[0].grader = grade::grader(Benchmark::Gaia, None, Options::default()).expect("a rule");
    refused(&fake, &other, &rules(1), Existing::Resume, "another benchmark Bamboogle: grader changed");
    // More tasks only add; another method joins.
    let more = [bench(Benchmark::Bamboogle, &["a", "b", "wrong"])];
    assert_eq!(go(&fake, &more, &rules(1), &out, Existing::Resume).expect("a run").len(), 3);
    assert_eq!(go(&Fake::new("second"), &more, &rules(1), &out, Existing::Resume).expect("a run").len(), 6);
    // Only one process at a time; what is no evaluation is left alone.
    let _held = Store::open(&out, "kind = \"eval\"\n", Existing::Resume).expect("open");
    assert!(Store::open(&out, "", Existing::Overwrite).expect_err("held").to_string().contains("another process"));
    let foreign = dir.path().join("foreign");
    fs::create_dir(&foreign).expect("a folder");
    fs::write(foreign.join("thesis.tex"), "years of work").expect("writable");
    assert!(Store::open(&foreign, "", Existing::Overwrite).expect_err("foreign").to_string().contains("no run directory"));
    assert!(foreign.join("thesis.tex").exists());
}

#[test]
fn texts_of_an_obfuscated_benchmark_stand_nowhere_in_plain_unless_asked_for() {
    let dir = tempfile::tempdir().expect("a folder");
    let benches = || [bench(Benchmark::BrowseComp, &["a", "wrong"])];
    let (quiet, open) = (dir.path().join("quiet"), dir.path().join("open"));
    let records = go(&Fake::new("fake"), &benches(), &rules(1), &quiet, Existing::Refuse).expect("a run");
    let text = fs::read_to_string(quiet.join("records.jsonl")).expect("readable");
    assert!(!text.contains("the a") && !quiet.join("episodes").exists());
    let plain = revealed(&records[0], Benchmark::BrowseComp).expect("its canary");
    assert_eq!((plain.prediction.as_deref(), plain.canary), (Some("the a"), None));
    let rules = Rules { reveal: true, ..rules(1) };
    go(&Fake::new("fake"), &benches(), &rules, &open, Existing::Refuse).expect("a run");
    assert!(fs::read_to_string(open.join("records.jsonl")).expect("readable").contains("the a"));
    // Graded again from what is stored.
    let mut store = Store::open(&quiet, "kind = \"eval\"\n", Existing::Resume).expect("open");
    let mut other = benches();
    other[0].tasks[1].gold = vec!["no".to_owned()];
    assert_eq!(regrade(&other, &Rules { reveal: false, ..rules }, &mut store).expect("graded"), 2);
    assert!(store.records().iter().all(|record| record.state == State::Correct));
    assert!(quiet.join("records.before-regrade.jsonl").exists());
    assert!(!fs::read_to_string(quiet.join("records.jsonl")).expect("readable").contains("the a"));
}
