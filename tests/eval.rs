//! `weact eval` as a user runs it: the toy world, the shipped weights, and a process that dies.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

fn toy(part: &str) -> String {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "datasets", "toy", part].iter().collect();
    path.display().to_string()
}

/// A configuration with two methods and two task files, `limit` tasks each.
fn config(dir: &Path, out: &str, limit: usize) -> PathBuf {
    let text = format!(
        "kind = \"eval\"\nout = \"{}\"\n[agent]\nsystem = \"research\"\nmax_turns = 20\nmax_new = 64\n\
         stage_turns = {{ search = 12 }}\n[tools]\nspec = \"world\"\nworld = {{}}\n[retry]\nattempts = 2\n\
         [[method]]\nname = \"Base\"\nmodel = \"{}\"\npolicy = \"base\"\n\
         [[method]]\nname = \"WeAct-hard\"\nmodel = \"{}\"\nadapters = \"{}\"\npolicy = \"hard\"\n\
         [[benchmark]]\nbenchmark = \"gaia\"\nfile = \"{}\"\ngrader = \"world\"\nlimit = {limit}\n\
         [[benchmark]]\nbenchmark = \"xbench\"\nfile = \"{}\"\ngrader = \"world\"\nlimit = {limit}\n",
        dir.join(out).display(),
        toy("backbone"),
        toy("backbone"),
        toy("adapters"),
        toy("bench/gaia/metadata.jsonl"),
        toy("bench/xbench/DeepSearch.csv"),
    );
    let path = dir.join(format!("{out}.toml"));
    fs::write(&path, text).expect("a writable folder");
    path
}

fn eval(config: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weact"));
    command.arg("eval").arg(config).args(flags).args(["--device", "cpu"]).stdin(Stdio::null());
    command
}

fn done(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// The records by method, benchmark, task and attempt, without their times. None stands twice.
fn records(out: &Path) -> BTreeMap<String, Value> {
    let text = fs::read_to_string(out.join("records.jsonl")).expect("records");
    let mut records = BTreeMap::new();
    for line in text.lines() {
        let mut record: Value = serde_json::from_str(line).expect("a record");
        record["wall_s"] = Value::Null;
        record["cost"]["seconds"] = Value::Null;
        let key = format!("{} {} {} {}", record["method"], record["benchmark"], record["task"], record["attempt"]);
        assert!(records.insert(key, record).is_none(), "a record stands twice");
    }
    records
}

#[test]
fn killed_twenty_times_and_resumed_gives_the_records_of_an_unbroken_run() {
    let dir = tempfile::tempdir().expect("a folder");
    let whole = config(dir.path(), "whole", 8);
    done(&eval(&whole, &["--quiet"]).output().expect("the binary runs"));
    let expected = records(&dir.path().join("whole"));
    assert!(expected.len() >= 32);

    let parts = config(dir.path(), "parts", 8);
    let out = dir.path().join("parts");
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let mut kills = 0;
    while kills < 20 {
        let flags: &[&str] = if out.exists() { &["--resume", "--quiet"] } else { &["--quiet"] };
        let mut child = eval(&parts, flags).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary runs");
        let started = Instant::now();
        let life = Duration::from_millis(rng.random_range(20..700));
        while started.elapsed() < life && child.try_wait().expect("a child").is_none() {
            thread::sleep(Duration::from_millis(2));
        }
        if child.try_wait().expect("a child").is_some() {
            // It was done: take the last records away, so that there is something left to do.
            let path = out.join("records.jsonl");
            let text = fs::read_to_string(&path).expect("records");
            let keep: Vec<&str> = text.lines().collect();
            fs::write(&path, keep[..keep.len() * 2 / 3].join("\n") + "\n").expect("writable");
            continue;
        }
        child.kill().expect("killed");
        child.wait().expect("gone");
        kills += 1;
    }
    done(&eval(&parts, &["--resume", "--quiet"]).output().expect("the binary runs"));
    assert_eq!(records(&out), expected);
    // Episodes are whole, and each belongs to a record.
    for file in fs::read_dir(out.join("episodes")).expect("episodes") {
        let text = fs::read_to_string(file.expect("a file").path()).expect("text");
        for line in text.lines() {
            let event: Value = serde_json::from_str(line).expect("an event");
            assert!(event["episode"].as_str().is_some_and(|id| id.starts_with("GAIA/")), "obfuscated benchmarks leave none");
        }
    }
}

#[test]
fn the_harness_answers_selects_and_refuses_as_it_says() {
    let dir = tempfile::tempdir().expect("a folder");
    let toml = config(dir.path(), "run", 4);
    let summary = done(&eval(&toml, &["--json"]).output().expect("the binary runs"));
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    let score = |method: &str, benchmark: &str| {
        let scores = summary["scores"].as_array().expect("scores").iter();
        scores.clone().find(|s| s["method"] == method && s["benchmark"] == benchmark).expect("a score").clone()
    };
    assert_eq!(score("Base", "GAIA")["n"], 4);
    assert!(score("WeAct-hard", "xbench-DS")["accuracy"].as_f64() > score("Base", "xbench-DS")["accuracy"].as_f64());

    // A plain text of an obfuscated benchmark stands nowhere.
    let text = fs::read_to_string(dir.path().join("run/records.jsonl")).expect("records");
    let secret: Vec<&str> = text.lines().filter(|line| line.contains("xbench-DS")).collect();
    assert!(!secret.is_empty() && secret.iter().all(|line| !line.contains("<answer>")));
    assert!(text.lines().any(|line| line.contains("GAIA") && line.contains("<answer>")));

    let refused = |toml: &Path, flags: &[&str], status: i32, why: &str| {
        let output = eval(toml, flags).output().expect("the binary runs");
        let stderr = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(status), "{flags:?}: {stderr}");
        assert!(stderr.contains(why), "{flags:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    };
    refused(&toml, &[], 2, "is not empty: --resume");
    refused(&toml, &["--resume", "--seed", "9"], 2, "the seed changed");
    refused(&toml, &["--resume", "--shard", "3/2"], 2, "use I/N");
    refused(&toml, &["--resume", "--limit", "2.5"], 2, "a share below 1");
    refused(&toml, &["--regrade", "--limit", "2"], 2, "cannot be used with");
    let ids = dir.path().join("ids.txt");
    fs::write(&ids, "nobody\n").expect("writable");
    refused(&toml, &["--resume", "--ids", &ids.display().to_string()], 1, "no benchmark has the task \"nobody\"");
    // A run that is refused says so before anything is done, and what it would have changed stays.
    let saved = fs::read_to_string(dir.path().join("run/config.toml")).expect("text");
    let edited = dir.path().join("edited.toml");
    fs::write(&edited, fs::read_to_string(&toml).expect("text").replace("max_new = 64", "max_new = 65")).expect("writable");
    refused(&edited, &["--resume"], 2, "agent.max_new changed");
    assert_eq!(fs::read_to_string(dir.path().join("run/config.toml")).expect("text"), saved);
    let broken = dir.path().join("broken.toml");
    let text = fs::read_to_string(&toml).expect("text");
    for (from, to, why) in [
        ("limit = 4", "limt = 4", "did you mean `limit`?"),
        ("policy = \"hard\"", "policy = \"soft\"", "unknown policy"),
        ("kind = \"eval\"", "kind = \"lora\"", "line 1"),
        ("max_turns = 20", "max_turns = 0", "[agent] turns"),
        ("search = 12", "serch = 12", "no stage serch"),
    ] {
        fs::write(&broken, text.replace(from, to)).expect("writable");
        refused(&broken, &["--overwrite"], 2, why);
    }
    fs::write(&broken, text.replace("adapters\"\npolicy", "nothing\"\npolicy")).expect("writable");
    refused(&broken, &["--resume"], 1, "WeAct-hard");

    // Shards are parts of the whole, and a larger limit only adds.
    let before = records(&dir.path().join("run")).len();
    done(&eval(&config(dir.path(), "run", 6), &["--resume", "--quiet"]).output().expect("the binary runs"));
    assert!(records(&dir.path().join("run")).len() >= before + 8);
    for (i, n) in [(1, 2), (2, 2)] {
        let flags = ["--resume", "--quiet", "--shard", &format!("{i}/{n}")].map(str::to_owned);
        let flags: Vec<&str> = flags
            .iter()
            .map(String::as_str)
            .take(if i == 1 { 0 } else { 1 })
            .chain(flags[1..].iter().map(String::as_str))
            .collect();
        done(&eval(&config(dir.path(), "shards", 6), &flags).output().expect("the binary runs"));
    }
    assert_eq!(records(&dir.path().join("shards")), records(&dir.path().join("run")));

    // Graded again: the same answers, the same verdicts, whatever the configuration selects; and the run can go on.
    let before = records(&dir.path().join("run"));
    done(&eval(&config(dir.path(), "run", 2), &["--regrade", "--quiet"]).output().expect("the binary runs"));
    done(&eval(&config(dir.path(), "run", 6), &["--resume", "--quiet"]).output().expect("the binary runs"));
    assert_eq!(records(&dir.path().join("run")), before);
    refused(&config(dir.path(), "nowhere", 2), &["--regrade"], 2, "nowhere/config.toml");
    assert!(!dir.path().join("nowhere").exists());

    // And a report of it.
    let report = Command::new(env!("CARGO_BIN_EXE_weact"))
        .args([
            "report",
            &dir.path().join("run").display().to_string(),
            "--out",
            &dir.path().join("report").display().to_string(),
        ])
        .output()
        .expect("the binary runs");
    done(&report);
    assert!(fs::read_to_string(dir.path().join("report/report.html")).expect("a page").contains("WeAct-hard"));
}

#[test]
fn ctrl_c_keeps_what_is_finished_and_says_how_to_go_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let flags = ["--seed", "3", "--quiet"];
    done(&eval(&config(dir.path(), "whole", 20), &flags).output().expect("the binary runs"));
    let (out, stderr) = (dir.path().join("it's"), dir.path().join("stderr"));
    let mut command = eval(&config(dir.path(), "it's", 20), &flags);
    command.stdout(Stdio::null()).stderr(fs::File::create(&stderr).expect("a file"));
    let mut child = command.spawn().expect("the binary runs");
    let began = Instant::now();
    while fs::metadata(out.join("records.jsonl")).map_or(0, |file| file.len()) == 0 {
        assert!(began.elapsed() < Duration::from_secs(60) && child.try_wait().expect("a child").is_none(), "no record came");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs").success());
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    let said = fs::read_to_string(&stderr).expect("text");
    let (_, line) = said.trim_end().rsplit_once("Go on with: ").expect("the command to go on with");
    assert!(line.contains("--seed 3") && line.matches("--resume").count() == 1, "{line}");
    assert!(records(&out).len() < records(&dir.path().join("whole")).len(), "it was interrupted");
    done(&Command::new("sh").args(["-c", &format!("exec {line}")]).output().expect("the binary runs"));
    assert_eq!(records(&out), records(&dir.path().join("whole")));
}
