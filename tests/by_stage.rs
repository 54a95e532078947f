//! Stages of recorded trajectories scored under chosen weights, on the shipped toy.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use tempfile::TempDir;
use weact::{
    core::{Trajectory, io::peft},
    eval::world::{World, gold::Form, question::Split},
};

const N_ROWS: usize = 6;

fn toy(part: &str) -> String {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("datasets/toy").join(part);
    path.to_str().expect("a path").to_owned()
}

struct Outcome {
    status: i32,
    stdout: String,
    stderr: String,
}

fn weact(arguments: &[&str], folder: &TempDir) -> Outcome {
    let output = Command::new(env!("CARGO_BIN_EXE_weact")).args(arguments).current_dir(folder).output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Outcome { status: output.status.code().expect("no signal"), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Gold trajectories of questions that no adapter was trained on, in `gold.jsonl`.
fn gold(folder: &TempDir) -> Vec<Trajectory> {
    let world = World::new(&Default::default()).expect("a world");
    let library = world.library().expect("a library");
    let rows: Vec<Trajectory> = world
        .questions(Split::Val, N_ROWS)
        .iter()
        .map(|question| world.gold(question, Form::Staged, &library.tools().expect("tools")).expect("a gold trajectory"))
        .collect();
    let lines: String = rows.iter().map(|row| serde_json::to_string(row).expect("JSON") + "\n").collect();
    fs::write(folder.path().join("gold.jsonl"), lines).expect("writable");
    rows
}

/// Lines and summary of a run that has to succeed.
fn score(folder: &TempDir, input: &str, more: &[&str]) -> (Vec<Value>, Value) {
    let backbone = toy("backbone");
    let start = ["score", "--by-stage", "--json", "--model", &backbone, "--input", input, "--out", "out.jsonl"];
    let outcome = weact(&[&start, more].concat(), folder);
    assert_eq!(outcome.status, 0, "{more:?}: {}", outcome.stderr);
    let text = fs::read_to_string(folder.path().join("out.jsonl")).expect("written");
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    (lines, serde_json::from_str(&outcome.stdout).expect("JSON"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn each_stage_is_likelier_under_its_own_adapter_than_under_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let rows = gold(&folder);
    let adapters = toy("adapters");
    let (own, summary) = score(&folder, "gold.jsonl", &["--adapters", &adapters]);
    let (base, _) = score(&folder, "gold.jsonl", &["--adapters", &adapters, "--route", "base"]);
    assert_eq!((own.len(), base.len()), (3 * N_ROWS, 3 * N_ROWS));
    assert_eq!((&summary["route"], &summary["left_out"], &summary["keep_tool_result"]), (&json!("own"), &json!(0), &json!(16)));
    // Numbers of f32 in JSON have as many digits as f32 needs: 1e-6 for means of them.
    let places: Vec<(&str, usize)> = rows.iter().flat_map(|row| (0..3).map(|stage| (row.id.as_str(), stage))).collect();
    for ((own, base), (id, stage)) in own.iter().zip(&base).zip(places) {
        assert_eq!((&own["id"], &own["stage"]), (&json!(id), &json!(stage)));
        for key in ["id", "stage", "capability", "n_tokens"] {
            assert_eq!(own[key], base[key]);
        }
        let capability = own["capability"].as_str().expect("a name");
        let digest = peft::read(Path::new(&toy("adapters")).join(capability).as_path()).expect("an adapter").digest().to_owned();
        assert_eq!((&own["adapter"], &base["adapter"]), (&json!(digest), &Value::Null));
        // One question has a retry that neither can foresee, and both are equally sure of the rest: there they tie.
        assert!(number(&own["nll_nats_mean"]) < number(&base["nll_nats_mean"]) + 0.01, "{id}#{stage}: {own} {base}");

        let nll: Vec<f64> = own["nll"].as_array().expect("a list").iter().map(number).collect();
        assert_eq!(own["n_tokens"], nll.len());
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        assert!((number(&own["nll_nats_mean"]) - mean(&nll)).abs() < 1e-6);
        let n_exit = own["exit"]["n_tokens"].as_u64().expect("a call") as usize;
        assert!(n_exit > 1 && (n_exit < nll.len() || capability == "plan"), "{own}");
        assert!((number(&own["exit"]["nll_nats_mean"]) - mean(&nll[nll.len() - n_exit..])).abs() < 1e-6);
    }
    let mean = |lines: &[Value], capability: &str| {
        let of = |line: &&Value| line["capability"] == capability;
        let means: Vec<f64> = lines.iter().filter(of).map(|line| number(&line["nll_nats_mean"])).collect();
        means.iter().sum::<f64>() / means.len() as f64
    };
    for capability in ["plan", "search", "write"] {
        let (own, base) = (mean(&own, capability), mean(&base, capability));
        assert!(5.0 * own < base, "{capability}: {own} {base}");
        assert!((number(&summary["capabilities"][capability]["nll_nats_mean"]) - own).abs() < 1e-6);
    }
}

/// The tokens are those of `data check`, and values those of the same ids under plain `score` with the sample's mask.
#[test]
fn the_tokens_scored_are_those_that_training_supervises() {
    let folder = tempfile::tempdir().expect("a folder");
    gold(&folder);
    let (backbone, search) = (toy("backbone"), toy("adapters/search"));
    let check = ["data", "check", "gold.jsonl", "--model", &backbone, "--json", "--keep-tool-result", "16"];
    let checked: Value = serde_json::from_str(&weact(&check, &folder).stdout).expect("JSON");
    let (lines, summary) = score(&folder, "gold.jsonl", &["--adapter", &search]);
    for capability in ["plan", "search", "write"] {
        let found = &summary["capabilities"][capability];
        assert_eq!(found["n_tokens"], checked["capabilities"][capability]["supervised_tokens"], "{capability}");
    }
    assert!(lines.iter().all(|line| line["route"] == "adapter"));
    // All under the one alias is the same as under that adapter, to the bit.
    let (routed, _) = score(&folder, "gold.jsonl", &["--adapters", &toy("adapters"), "--route", "search"]);
    for (one, other) in lines.iter().zip(&routed) {
        assert_eq!((&one["nll"], &one["adapter"]), (&other["nll"], &other["adapter"]));
    }
}

#[test]
fn stages_that_are_not_scored_are_counted_by_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut rows: Vec<Value> = gold(&folder).iter().map(|row| serde_json::to_value(row).expect("JSON")).collect();
    rows[0]["spans"] = json!([]);
    rows[1]["spans"][1]["exit"] = json!("harness");
    rows[2]["spans"][2]["capability"] = json!("verify");
    rows[2]["spans"][2]["exit"] = json!("none");
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(folder.path().join("mixed.jsonl"), &text).expect("writable");
    let adapters = toy("adapters");
    let (lines, summary) = score(&folder, "mixed.jsonl", &["--adapters", &adapters]);
    assert_eq!(lines.len(), 3 * N_ROWS - 5);
    assert_eq!(summary["reasons"], json!({"no exit call": 2, "no stage": 1}));
    let (lines, summary) = score(&folder, "mixed.jsonl", &["--adapters", &adapters, "--any-exit"]);
    assert_eq!(summary["reasons"], json!({"no adapter verify": 1, "no stage": 1}));
    let harness = lines.iter().find(|line| line["id"] == rows[1]["id"] && line["stage"] == 1).expect("scored");
    assert_eq!(harness["exit"], Value::Null);
    let (lines, summary) = score(&folder, "mixed.jsonl", &["--max-length", "40", "--any-exit"]);
    let long = summary["reasons"]["longer than 40 tokens"].as_u64().expect("some are long") as usize;
    assert_eq!((long > 0, lines.len() + long), (true, 3 * N_ROWS - 3), "{summary}");
}

#[test]
fn what_is_asked_wrongly_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let rows = gold(&folder);
    let one = serde_json::to_string(&rows[0]).expect("JSON") + "\n";
    fs::write(folder.path().join("twice.jsonl"), one.repeat(2)).expect("writable");
    fs::write(folder.path().join("empty.jsonl"), "").expect("writable");
    let (backbone, adapters, search) = (toy("backbone"), toy("adapters"), toy("adapters/search"));
    for (input, more, status, said) in [
        ("gold.jsonl", vec!["--by-stage", "--route", "own"], 2, "--route own needs --adapters"),
        ("gold.jsonl", vec!["--by-stage", "--adapters", &adapters, "--route", "verify"], 1, "no adapter has the alias verify"),
        ("gold.jsonl", vec!["--by-stage", "--adapters", &adapters, "--adapter", &search], 2, "cannot be used with"),
        ("gold.jsonl", vec!["--adapters", &adapters], 2, "--by-stage"),
        ("gold.jsonl", vec!["--any-exit"], 2, "--by-stage"),
        ("gold.jsonl", vec!["--by-stage", "--logits", "l.safetensors"], 2, "cannot be used with"),
        ("gold.jsonl", vec!["--by-stage", "--max-length", "3"], 1, "no stage can be scored: 18 longer than 3 tokens"),
        ("empty.jsonl", vec!["--by-stage"], 1, "no stage can be scored: the file has no rows"),
        ("twice.jsonl", vec!["--by-stage"], 1, "occurs twice"),
    ] {
        let start = ["score", "--quiet", "--model", &backbone, "--input", input, "--out", "o.jsonl"];
        let outcome = weact(&[start.as_slice(), &more].concat(), &folder);
        assert_eq!((outcome.status, outcome.stdout.as_str()), (status, ""), "{more:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(said), "{more:?}: {}", outcome.stderr);
        assert!(!folder.path().join("o.jsonl").exists());
    }
}
