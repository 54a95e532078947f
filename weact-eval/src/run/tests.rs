use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use serde_json::json;
use weact_core::episode::{Event, Line, Notice};

use super::*;
use crate::grade::{self, Graded, Options};

/// Answers right but for the tasks that its name tells: `wrong`, `none`, `long`, `fail` after which attempts.
struct Fake {
    name: &'static str,
    model: &'static str,
    max_new: usize,
    tools: &'static str,
    n_asked: AtomicUsize,
}

impl Fake {
    fn new(name: &'static str) -> Self {
        Self { name, model: "m1", max_new: 64, tools: "none", n_asked: AtomicUsize::new(0) }
    }
}

impl Method for Fake {
    fn name(&self) -> &str {
        self.name
    }

    fn identity(&self, _: &str) -> Map<String, Value> {
        let agent = json!({"max_turns": 2, "max_new": self.max_new});
        json!({"model": self.model, "agent": agent, "tools": self.tools}).as_object().cloned().expect("an object")
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
    go_with("kind = \"eval\"\n", method, benches, rules, dir, existing)
}

fn go_with(config: &str, method: &Fake, benches: &[Bench], rules: &Rules, dir: &Path, existing: Existing) -> Result<Vec<Record>> {
    let mut store = Store::open(dir, config, existing)?;
    assert!(run(method, benches, rules, &mut store, &mut |_| {}, &|| false)?);
    Ok(store.records().to_vec())
}

/// Every file of a run directory.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => files.extend(self::files(&path)),
            false => drop(files.insert(path.clone(), fs::read(&path).expect("readable"))),
        }
    }
    files
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
    let seeds: BTreeSet<u64> = records.iter().map(|r| r.seed).collect();
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
        let orphan =
            b"{\"episode\":\"Bamboogle/x#0\",\"event\":\"notice\",\"kind\":\"x\",\"detail\":\"y\"}\n{\"episode\":\"\xe4\xbd";
        // Within a letter of several bytes, too.
        for (path, torn) in [(parts.join("records.jsonl"), &b"{\"v\":1,\"method\":\"\xc3"[..]), (episodes, &orphan[..])] {
            let mut bytes = fs::read(&path).expect("readable");
            bytes.extend_from_slice(torn);
            fs::write(&path, bytes).expect("writable");
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
    go(&Fake::new("fake"), &two(), &rules(1), &out, Existing::Refuse).expect("a run");
    let untouched = files(&out);
    let refused = |method: &Fake, benches: &[Bench], rules: &Rules, existing, why: &str| {
        let error = go_with("kind = \"eval\"\nseed = 9\n", method, benches, rules, &out, existing).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(method.n_asked.load(Ordering::Relaxed), 0, "nothing was run");
        assert_eq!(files(&out), untouched, "nothing was touched");
    };
    refused(&fake, &two(), &rules(1), Existing::Refuse, "is not empty: --resume");
    refused(
        &Fake { model: "m2", ..Fake::new("fake") },
        &two(),
        &rules(1),
        Existing::Resume,
        "another method fake: model changed",
    );
    refused(&Fake { max_new: 65, ..Fake::new("fake") }, &two(), &rules(1), Existing::Resume, "agent.max_new changed");
    refused(&Fake { tools: "other", ..Fake::new("fake") }, &two(), &rules(1), Existing::Resume, "tools on Bamboogle changed");
    refused(&fake, &two(), &Rules { seed: 8, ..rules(1) }, Existing::Resume, "the seed changed");
    let mut other = two();
    other[0].tasks[1].question.push('!');
    refused(&fake, &other, &rules(1), Existing::Resume, "task b of Bamboogle");
    // Of two benchmarks the second does not fit: the first is not begun.
    let [changed] = other;
    let both = [bench(Benchmark::Frames, &["a"]), changed];
    refused(&Fake::new("fake"), &both, &rules(1), Existing::Resume, "its question, its gold or weact itself changed");
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
    let counts = regrade(&other, &Rules { reveal: false, ..rules }, &mut store).expect("graded");
    assert_eq!((counts.n, counts.n_changed), (2, 1), "one has another gold answer");
    assert!(store.records().iter().all(|record| record.state == State::Correct));
    assert!(quiet.join("records.before-regrade.jsonl").exists());
    assert!(!fs::read_to_string(quiet.join("records.jsonl")).expect("readable").contains("the a"));
}

/// Can't decide until it was asked a few times.
struct Moody {
    n_failures: usize,
    n_asked: AtomicUsize,
}

impl Grader for Moody {
    fn id(&self) -> &str {
        "moody@1"
    }

    fn grade(&self, task: &Task, prediction: Option<&str>) -> Result<Graded> {
        if self.n_asked.fetch_add(1, Ordering::Relaxed) < self.n_failures {
            return Err(Error::Other("the judge is out".to_owned()));
        }
        grade::grader(Benchmark::Bamboogle, None, Options::default())?.grade(task, prediction)
    }

    fn known(&self) -> Option<(Task, String, String)> {
        None
    }
}

#[test]
fn an_answer_that_could_not_be_judged_is_graded_again_and_not_made_again() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("run");
    let moody = |n_failures| {
        let grader = Box::new(Moody { n_failures, n_asked: AtomicUsize::new(0) });
        [Bench { grader, ..bench(Benchmark::Bamboogle, &["a"]) }]
    };
    let method = Fake::new("fake");
    let records = go(&method, &moody(2), &rules(2), &out, Existing::Refuse).expect("a run");
    let [first, second] = &records[..] else { panic!("{records:?}") };
    assert_eq!((first.state, first.detail.as_deref(), first.score), (State::JudgeError, Some("the judge is out"), None));
    assert_eq!((second.state, second.cause, second.wall_s), (State::JudgeError, Some(State::JudgeError), 0.0));
    // A later run may try once more. The answer, and the seed that it came of, are the first attempt's.
    let records = go(&method, &moody(0), &rules(3), &out, Existing::Resume).expect("a run");
    assert_eq!((records.len(), records[2].state), (3, State::Correct));
    assert!(records.iter().all(|r| r.seed == first.seed && r.prediction.as_deref() == Some("the a")));
    assert_eq!(method.n_asked.load(Ordering::Relaxed), 1, "one answer was made");
    assert_eq!(go(&method, &moody(0), &rules(3), &out, Existing::Resume).expect("nothing to do").len(), 3);
}

#[test]
fn a_regraded_run_goes_on_under_its_new_grader() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("run");
    go(&Fake::new("fake"), &[bench(Benchmark::Bamboogle, &["a", "wrong"])], &rules(1), &out, Existing::Refuse).expect("a run");
    let with_gaia = |ids: &[&str]| {
        let grader = grade::grader(Benchmark::Gaia, None, Options::default()).expect("a rule");
        [Bench { grader, ..bench(Benchmark::Bamboogle, ids) }]
    };
    let mut store = Store::open(&out, "kind = \"eval\"\n", Existing::Resume).expect("open");
    let counts = regrade(&with_gaia(&["a", "wrong"]), &rules(1), &mut store).expect("graded");
    assert_eq!((counts.n, counts.n_changed), (2, 0));
    drop(store);
    let error = go(&Fake::new("fake"), &[bench(Benchmark::Bamboogle, &["a"])], &rules(1), &out, Existing::Resume);
    assert!(error.expect_err("the old grader").to_string().contains("grader changed"));
    let method = Fake::new("fake");
    let records = go(&method, &with_gaia(&["a", "wrong", "b"]), &rules(1), &out, Existing::Resume).expect("one more");
    assert_eq!((records.len(), method.n_asked.load(Ordering::Relaxed)), (3, 1));
    assert!(records.iter().all(|record| record.grader == records[2].grader));
    // As if that grader had graded from the beginning.
    let fresh = dir.path().join("fresh");
    let expected = go(&Fake::new("fake"), &with_gaia(&["a", "wrong", "b"]), &rules(1), &fresh, Existing::Refuse).expect("a run");
    assert_eq!(timeless(&records), timeless(&expected));
    // There is nothing to grade where nothing was answered.
    let mut store = Store::open(&dir.path().join("empty"), "kind = \"eval\"\n", Existing::Refuse).expect("open");
    assert!(regrade(&with_gaia(&["a"]), &rules(1), &mut store).expect_err("empty").to_string().contains("no records"));
}

#[test]
fn an_episode_without_a_record_is_removed_wherever_it_stands() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("run");
    let benches = [bench(Benchmark::Bamboogle, &["a", "b", "c"])];
    let expected = go(&Fake::new("fake"), &benches, &rules(1), &out, Existing::Refuse).expect("a run");
    let text = fs::read_to_string(out.join("records.jsonl")).expect("readable");
    let kept: String = text.split_inclusive('\n').filter(|line| !line.contains("\"task\":\"b\"")).collect();
    fs::write(out.join("records.jsonl"), kept).expect("writable");
    fs::write(out.join(".config.toml.1.part"), "half").expect("writable");
    let records = go(&Fake::new("fake"), &benches, &rules(1), &out, Existing::Resume).expect("a run");
    assert_eq!(timeless(&records), timeless(&expected));
    let episodes = fs::read_to_string(out.join("episodes").join(episode_file("fake"))).expect("readable");
    assert_eq!(episodes.lines().count(), 3, "{episodes}");
    assert!(!out.join(".config.toml.1.part").exists(), "what an interrupted write left is swept");
}
