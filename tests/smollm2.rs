//! A real checkpoint, end to end: SmolLM2-135M-Instruct against transformers, and the walk-through of the README in small.
//!
//! `WEACT_SMOLLM2` names the folder that `scripts/make_smollm2.py` makes. The reference values (`tests/golden/smollm2.json`) come
//! from transformers 5.24 on the same weights, f32 on a CPU.
#![expect(clippy::print_stdout, reason = "a skipped test says so")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use tempfile::TempDir;

fn model() -> Option<PathBuf> {
    let path = std::env::var_os("WEACT_SMOLLM2").map(PathBuf::from);
    if path.is_none() {
        println!("skipped: needs WEACT_SMOLLM2, the folder that scripts/make_smollm2.py makes");
    }
    path
}

fn weact(folder: &TempDir, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_weact")).args(arguments).current_dir(folder).output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.code().expect("no signal"), text(output.stdout), text(output.stderr))
}

fn ok(folder: &TempDir, arguments: &[&str]) -> String {
    let (status, stdout, stderr) = weact(folder, arguments);
    assert_eq!(status, 0, "{arguments:?}: {stderr}");
    stdout
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a readable path")
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().expect("numbers").iter().map(|x| x.as_f64().expect("a number")).collect()
}

#[test]
fn likelihoods_top_logits_and_greedy_text_equal_transformers() {
    let Some(model) = model() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let golden: Value = serde_json::from_str(include_str!("golden/smollm2.json")).expect("JSON");
    let rows: Vec<String> = golden["texts"]
        .as_array()
        .expect("texts")
        .iter()
        .enumerate()
        .map(|(i, t)| json!({"id": i.to_string(), "text": t["text"]}).to_string())
        .collect();
    fs::write(folder.path().join("in.jsonl"), rows.join("\n")).expect("writable");
    ok(
        &folder,
        &["score", "--model", text(&model), "--input", "in.jsonl", "--out", "out.jsonl", "--logits", "logits.safetensors"],
    );
    let scored = fs::read_to_string(folder.path().join("out.jsonl")).expect("scores");
    let logits = fs::read(folder.path().join("logits.safetensors")).expect("logits");
    let logits = safetensors::SafeTensors::deserialize(&logits).expect("safetensors");
    for (i, (line, expected)) in scored.lines().zip(golden["texts"].as_array().expect("texts")).enumerate() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        for (nll, reference) in floats(&line["nll"]).iter().zip(floats(&expected["nll"])) {
            assert!((nll - reference).abs() < 2e-3, "text {i}: nll {nll} and {reference}");
        }
        let tensor = logits.tensor(&i.to_string()).expect("logits of the row");
        let vocab = tensor.shape()[1];
        let last: Vec<f32> = tensor.data()[(tensor.shape()[0] - 1) * vocab * 4..]
            .chunks_exact(4)
            .map(|c| f32::from_le_bytes(c.try_into().expect("4 bytes")))
            .collect();
        for (id, reference) in floats(&expected["top10_ids"]).iter().zip(floats(&expected["top10_logits"])) {
            let logit = f64::from(last[*id as usize]);
            assert!((logit - reference).abs() < 1e-2, "text {i}: logit of {id} is {logit}, not {reference}");
        }
    }
    for (i, chat) in golden["chats"].as_array().expect("chats").iter().enumerate() {
        let file = format!("chat{i}.json");
        fs::write(folder.path().join(&file), chat["messages"].to_string()).expect("writable");
        let out: Value = serde_json::from_str(&ok(
            &folder,
            &["generate", "--model", text(&model), "--messages", &file, "--max-new", "24", "--json"],
        ))
        .expect("JSON");
        assert_eq!(out["ids"], chat["greedy_ids"], "chat {i}");
    }
}

#[test]
fn loading_takes_little_more_memory_than_the_weights() {
    let Some(model) = model() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let report: Value = serde_json::from_str(&ok(&folder, &["inspect", text(&model), "--load", "--json"])).expect("JSON");
    let ratio = report["peak_to_weights"].as_f64().unwrap_or_else(|| panic!("{report}"));
    assert!(ratio <= 1.15, "{report}");
}

/// The README's walk-through with two updates of one adapter and one of the others, then a run that has to end whatever so small
/// a model says.
#[test]
fn trajectories_train_adapters_that_run_and_give_trajectories_again() {
    let Some(model) = model() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let before = fs::read(model.join("model.safetensors")).expect("weights");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("datasets/webdancer/sample_traj.jsonl");
    ok(&folder, &["data", "import", "--from", "hermes", text(&source), "--out", "imported.jsonl"]);
    ok(&folder, &["data", "label", "imported.jsonl", "--weave", "--out", "train.jsonl"]);
    for (capability, steps) in [("plan", 2), ("search", 1), ("write", 1)] {
        let run = format!(
            "kind = \"lora\"\nmodel = {model:?}\ndata = [\"train.jsonl\"]\ncapability = \"{capability}\"\nout = \"adapters/{capability}\"\n\
             [lora]\nrank = 16\nalpha = 32\n[train]\nsteps = {steps}\nbatch_rows = 1\nmax_length = 2048\nmax_lost = 0.3\nlr = 5e-4\nseed = 1\n\
             [context]\nclip_tool_result = 128\ntool_protocol = \"text\"\n"
        );
        fs::write(folder.path().join("run.toml"), run).expect("writable");
        ok(&folder, &["train", "run.toml"]);
        let log = fs::read_to_string(folder.path().join(format!("adapters/{capability}/log.jsonl"))).expect("a log");
        assert_eq!(log.lines().filter(|l| l.contains("\"event\":\"step\"")).count(), steps);
    }
    assert!(before == fs::read(model.join("model.safetensors")).expect("weights"), "the backbone's file changed");

    let pages: Vec<String> = (0..20)
        .map(|i| json!({"url": format!("page://{i}"), "title": format!("Bridge {i}"), "text": format!("Bridge {i} was opened in {} and is {} metres long.", 1880 + i, 100 * i)}).to_string())
        .collect();
    fs::write(folder.path().join("corpus.jsonl"), pages.join("\n")).expect("writable");
    let out = ok(
        &folder,
        &[
            "run",
            "--model",
            text(&model),
            "--adapters",
            "adapters",
            "--policy",
            "hard",
            "--tools",
            "corpus:corpus.jsonl",
            "--max-new",
            "96",
            "--max-turns",
            "5",
            "--stage-turns",
            "search=2",
            "--out",
            "episodes.jsonl",
            "--json",
            "When was bridge 7 opened?",
        ],
    );
    let outcome: Value = serde_json::from_str(&out).expect("JSON");
    let stages: Vec<&str> =
        outcome["stages"].as_array().expect("stages").iter().map(|s| s[0].as_str().expect("a name")).collect();
    assert_eq!(stages, ["plan", "search", "write"], "{outcome}");
    let checked = ok(&folder, &["data", "check", "episodes.jsonl", "--model", text(&model), "--tool-protocol", "text"]);
    assert!(checked.contains("1 rows"), "{checked}");
}
