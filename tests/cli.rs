//! The command line as scripts see it: exit statuses, JSON, files, and numbers against transformers on the tiny checkpoints.
#![expect(clippy::print_stdout, reason = "a skipped test says so")]

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use burn::tensor::{DType, Device};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::TempDir;
use weact::{
    core::{
        io::{
            checkpoint::{self, Checkpoint},
            tensors,
        },
        model::Parameter,
    },
    train::{self, checkpoint::Position},
};

const CASES: [&str; 6] = ["qwen3-sharded-bf16", "qwen3-tied", "qwen3-yarn", "qwen2-bias", "llama", "llama3-rope"];

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn golden(case: &str) -> PathBuf {
    repository().join("weact-core/tests/golden").join(case)
}

/// A folder with a real tokenizer and chat template.
fn smollm2() -> PathBuf {
    repository().join("datasets/smollm2-135m")
}

struct Outcome {
    status: i32,
    stdout: String,
    stderr: String,
}

impl Outcome {
    fn json(&self) -> Value {
        assert_eq!(self.status, 0, "{}", self.stderr);
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

fn command(arguments: &[&str], folder: &TempDir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weact"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    command
}

/// Runs `weact` in `folder` on the CPU. No text of a panic may reach a user.
fn weact(arguments: &[&str], folder: &TempDir) -> Outcome {
    let output = command(arguments, folder).output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(!stderr.contains("panicked") && !stderr.contains(".rs:"), "{arguments:?}: {stderr}");
    Outcome { status: output.status.code().expect("no signal"), stdout, stderr }
}

fn write(folder: &TempDir, name: &str, text: &str) {
    fs::write(folder.path().join(name), text).expect("a writable file");
}

fn jsonl(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

fn read_jsonl(folder: &TempDir, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder.path().join(name)).expect("a written file");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

/// Little-endian elements of one tensor of a file.
fn tensor<const N: usize, T>(path: &Path, name: &str, parse: fn([u8; N]) -> T) -> Vec<T> {
    let bytes = fs::read(path).expect("a file");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensor = tensors.tensor(name).expect(name);
    tensor.data().chunks_exact(N).map(|chunk| parse(chunk.try_into().expect("N bytes"))).collect()
}

fn golden_rows(case: &str) -> Vec<Vec<i64>> {
    let ids = tensor(&golden(case).join("golden.safetensors"), "input_ids", i64::from_le_bytes);
    ids.chunks(40).map(<[i64]>::to_vec).collect()
}

fn max_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Negative log-likelihoods of `ids` after the first, and whether each is the most likely, from logits `[n, vocab]` in f64.
fn nll_of(logits: &[f32], ids: &[i64]) -> (Vec<f64>, Vec<f64>) {
    let vocab = logits.len() / ids.len();
    let scored = ids[1..].iter().zip(logits.chunks(vocab)).map(|(id, row)| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
        let own = row[*id as usize];
        (sum.ln() - f64::from(own - max), f64::from(u8::from(own == max)))
    });
    scored.unzip()
}

/// Rows of several lengths go through one batch, so this also shows that padding changes nothing. 1e-4 is the project's bound for
/// f32 logits against transformers.
#[test]
fn scores_and_logits_equal_transformers_whatever_the_batch() {
    for case in CASES {
        let folder = tempfile::tempdir().expect("a folder");
        let rows = golden_rows(case);
        let mut input: Vec<Value> =
            rows.iter().enumerate().map(|(i, ids)| json!({"id": format!("row{i}"), "ids": ids})).collect();
        input[0]["mask"] = (0..40).map(|i| u8::from(i == 0 || i > 30)).collect();
        input.insert(1, json!({"id": "short", "ids": rows[0][..7]}));
        input.insert(2, json!({"id": "one", "ids": rows[0][..1]}));
        write(&folder, "in.jsonl", &jsonl(&input));
        let (model, adapter) = (golden(case), golden(case).join("adapter"));
        let model = model.to_str().expect("a path");
        for (name, more) in [("logits.base", vec![]), ("logits.adapter", vec!["--adapter", adapter.to_str().expect("a path")])] {
            let mut arguments = vec![
                "score",
                "--model",
                model,
                "--input",
                "in.jsonl",
                "--out",
                "out.jsonl",
                "--logits",
                "l.safetensors",
                "--json",
            ];
            arguments.extend(more);
            let summary = weact(&arguments, &folder).json();
            assert_eq!((&summary["rows"], &summary["n_tokens"]), (&json!(input.len()), &json!(9 + 6 + 39 * (rows.len() - 1))));
            let scored = read_jsonl(&folder, "out.jsonl");
            let ids = |rows: &[Value]| rows.iter().map(|row| row["id"].clone()).collect::<Vec<_>>();
            assert_eq!(ids(&scored), ids(&input), "in input order");
            assert_eq!((&scored[2]["n_tokens"], &scored[2]["nll"]), (&json!(0), &json!([])));

            let reference = tensor(&golden(case).join("golden.safetensors"), name, f32::from_le_bytes);
            let per_row = reference.len() / rows.len();
            for (i, (row, reference)) in rows.iter().zip(reference.chunks(per_row)).enumerate() {
                let id = format!("row{i}");
                let widened = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
                let logits = tensor(&folder.path().join("l.safetensors"), &id, f32::from_le_bytes);
                let difference = max_difference(&widened(&logits), &widened(reference));
                assert!(difference < 1e-4, "{case} {name} {id}: logits differ by {difference:e}");
                let line = scored.iter().find(|line| line["id"] == id.as_str()).expect("a line");
                let (nll, top1) = nll_of(reference, row);
                assert!(max_difference(&numbers(&line["nll"]), &nll) < 1e-4, "{case} {name} {id}");
                assert_eq!(numbers(&line["top1"]), top1, "{case} {name} {id}");
                if i == 0 {
                    assert!(max_difference(&numbers(&scored[1]["nll"]), &nll[..6]) < 1e-4, "{case} {name}: the short row");
                }
            }
        }
    }
}

#[test]
fn greedy_continuations_equal_transformers() {
    for case in CASES {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, with_adapter) in [("greedy.base", false), ("greedy.adapter", true)] {
            let expected = tensor(&golden(case).join("golden.safetensors"), name, i64::from_le_bytes);
            let start = expected[..12].iter().map(i64::to_string).collect::<Vec<_>>().join(",");
            let (model, adapter) = (golden(case), golden(case).join("adapter"));
            let mut arguments = vec![
                "generate",
                "--model",
                model.to_str().expect("a path"),
                "--ids",
                &start,
                "--max-new",
                "16",
                "--ignore-eos",
                "--json",
            ];
            if with_adapter {
                arguments.extend(["--adapter", adapter.to_str().expect("a path")]);
            }
            let written = weact(&arguments, &folder).json();
            assert_eq!(written, json!({"ids": expected[12..], "text": null, "finish": "length"}), "{case} {name}");
        }
    }
}

#[test]
fn a_seed_fixes_what_is_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = golden("llama");
    let draw = |seed: &str| {
        let start = ["generate", "--model", model.to_str().expect("a path"), "--ids", "1,2,3", "--max-new", "12", "--json"];
        let more = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--ignore-eos", "--seed", seed];
        weact(&[start.as_slice(), &more].concat(), &folder).json()
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
}

#[test]
fn inspect_tells_models_and_adapters() {
    let folder = tempfile::tempdir().expect("a folder");
    for (case, family, tied, shards) in
        [("qwen3-sharded-bf16", "qwen3", false, 4), ("qwen2-bias", "qwen2", false, 1), ("llama", "llama", true, 1)]
    {
        let model = golden(case);
        let facts =
            weact(&["inspect", model.to_str().expect("a path"), "--digest", "--load", "--device", "cpu", "--json"], &folder)
                .json();
        assert_eq!(
            (&facts["kind"], &facts["family"], &facts["tied"], &facts["shards"]),
            (&json!("model"), &json!(family), &json!(tied), &json!(shards)),
            "{case}"
        );
        assert_eq!(facts["digest"].as_str().map(str::len), Some(64));
        assert!(facts["load_s"].is_number());
        let facts = weact(&["inspect", model.join("adapter").to_str().expect("a path"), "--json"], &folder).json();
        let modules: u64 =
            facts["scales"].as_array().expect("a list").iter().map(|s| s["modules"].as_u64().expect("a count")).sum();
        assert_eq!((&facts["kind"], &facts["modules"]), (&json!("adapter"), &json!(modules)), "{case}");
    }
}

#[test]
fn inspect_tells_training_runs_and_their_checkpoints() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let position = Position { step: 2, updates: 2, data: "d".to_owned(), base: "b".to_owned(), state: String::new() };
    train::checkpoint::write(&run, &position, &[], 1).expect("written");
    write(&folder, "run/config.toml", "kind = \"lora\"\ncapability = \"plan\"\n");
    write(&folder, "run/log.jsonl", "{}\n{}\n");
    let facts = weact(&["inspect", "run", "--json"], &folder).json();
    assert_eq!((&facts["kind"], &facts["capability"]), (&json!("run"), &json!("plan")));
    assert_eq!((&facts["checkpoints"], &facts["log_lines"]), (&json!([2]), &json!(2)));
    let checkpoint = "run/checkpoints/step-00000002";
    let facts = weact(&["inspect", checkpoint, "--digest", "--json"], &folder).json();
    assert_eq!((&facts["kind"], &facts["step"]), (&json!("checkpoint"), &json!(2)));
    let foreign = [("first.x".to_owned(), vec![1], [1.0].as_slice())];
    tensors::write(&folder.path().join(checkpoint).join("state.safetensors"), &foreign).expect("written");
    let outcome = weact(&["inspect", checkpoint, "--digest"], &folder);
    assert!(outcome.status == 1 && outcome.stderr.contains("is not what position.toml says"), "{}", outcome.stderr);
}

#[test]
fn inspect_names_what_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    fs::create_dir(&model).expect("a folder");
    for entry in fs::read_dir(golden("qwen3-sharded-bf16")).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name");
        if path.is_file() && name != "model-00002-of-00004.safetensors" {
            fs::copy(&path, model.join(name)).expect("a copy");
        }
    }
    let outcome = weact(&["inspect", "model"], &folder);
    assert_eq!(outcome.status, 1);
    assert!(
        outcome.stderr.contains("model-00002-of-00004.safetensors") && outcome.stderr.contains("incomplete download?"),
        "{}",
        outcome.stderr
    );
}

/// The messages of a woven search stage.
fn trajectory(id: &str, labelled: bool) -> Value {
    let call = |name: &str| json!([{"type": "function", "function": {"name": name, "arguments": {"adapter": "search"}}}]);
    let spans = if labelled { json!([{"capability": "search", "start": 3, "end": 5, "exit": "call"}]) } else { json!([]) };
    json!({"id": id, "tools": [], "spans": spans, "messages": [
        {"role": "user", "content": "who was first?"},
        {"role": "assistant", "content": "", "tool_calls": call("load_lora")},
        {"role": "tool", "content": "adapter 'search' is active."},
        {"role": "assistant", "content": "It was Ada.", "tool_calls": call("offload_lora")},
        {"role": "tool", "content": "adapter 'search' released"}]})
}

#[test]
fn data_check_names_rows_that_would_train_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    write(&folder, "mixed.jsonl", &jsonl(&[trajectory("a", true), trajectory("b", false), trajectory("c", true)]));
    write(&folder, "good.jsonl", &jsonl(&[trajectory("a", true)]));
    let model = smollm2();
    let check = |file: &str, more: &[&str]| {
        let start = ["data", "check", file, "--model", model.to_str().expect("a path"), "--tool-protocol", "text"];
        weact(&[start.as_slice(), more].concat(), &folder)
    };
    for (file, more, status, said) in [
        ("mixed.jsonl", vec![], 1, "1 of 3 rows would train nothing, the first is \"b\": no stage"),
        ("mixed.jsonl", vec!["--allow-empty"], 0, ""),
        ("good.jsonl", vec![], 0, ""),
        ("good.jsonl", vec!["--capability", "plan"], 1, "\"a\": no stage"),
        ("good.jsonl", vec!["--max-length", "20"], 1, "the first is \"a\": search: needs 1"),
        ("good.jsonl", vec!["--show", "2"], 2, "the file has the rows 1 to 1"),
    ] {
        let outcome = check(file, &more);
        assert_eq!(outcome.status, status, "{file} {more:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(said), "{file} {more:?}: {}", outcome.stderr);
    }
    let shown = check("good.jsonl", &["--show", "1"]).stdout;
    assert_eq!(shown.matches("[[").count(), 1, "{shown}");
    let supervised = &shown[shown.find("[[").expect("a mark")..shown.find("]]").expect("a mark")];
    assert!(supervised.starts_with("[[It was Ada.") && supervised.ends_with("<|im_end|>"), "{supervised}");
    let summary = check("mixed.jsonl", &["--allow-empty", "--json", "--show", "3"]).json();
    let search = &summary["capabilities"]["search"];
    assert_eq!(
        (&search["samples"], &summary["empty_rows"][0]["id"], &summary["show"][0]["id"]),
        (&json!(2), &json!("b"), &json!("c#0"))
    );
}

#[test]
fn data_import_and_label_account_for_every_row() {
    let folder = tempfile::tempdir().expect("a folder");
    let raw = repository().join("datasets/webdancer/sample_traj.jsonl");
    let imported =
        weact(&["data", "import", "--from", "hermes", raw.to_str().expect("a path"), "--out", "rows.jsonl", "--json"], &folder)
            .json();
    assert_eq!((&imported["rows"], &imported["kept"], &imported["dropped"]), (&json!(14), &json!(14), &json!(0)));
    let labelled = weact(&["data", "label", "rows.jsonl", "--weave", "--out", "train.jsonl", "--json"], &folder).json();
    assert_eq!(labelled["spans"], json!({"plan": 14, "search": 14, "write": 14}));
    assert_eq!(read_jsonl(&folder, "train.jsonl").len(), 14);
    assert_eq!(weact(&["data", "label", "rows.jsonl", "--out", "train.jsonl", "--quiet"], &folder).stdout, "");

    let say = |role: &str, content: &str| json!({"role": role, "content": content});
    let rows = [
        json!({"id": "kept", "messages": [say("user", "who?"), say("assistant", "she")]}),
        json!({"id": "mute", "messages": [say("user", "who?")]}),
        json!({"id": "again", "messages": [say("user", "who?"), say("assistant", "she")]}),
    ];
    write(&folder, "chats.jsonl", &jsonl(&rows));
    let imported = weact(&["data", "import", "--from", "openai", "chats.jsonl", "--out", "rows.jsonl", "--json"], &folder).json();
    assert_eq!(imported["reasons"], json!({"duplicate of row N": 1, "no message of the assistant": 1}));
    assert_eq!(imported["dropped_rows"][0]["id"], json!("mute"));
    write(&folder, "mute.jsonl", &jsonl(&rows[1..2]));
    let arguments = ["data", "import", "--from", "openai", "mute.jsonl", "--out", "none.jsonl"];
    let outcome = weact(&arguments, &folder);
    assert_eq!((outcome.status, folder.path().join("none.jsonl").exists()), (1, false), "{}", outcome.stderr);
    assert_eq!(weact(&[arguments.as_slice(), &["--allow-empty"]].concat(), &folder).status, 0);
}

#[test]
fn render_shows_the_trusted_and_the_safe_ids() {
    let folder = tempfile::tempdir().expect("a folder");
    let messages = json!([{"role": "user", "content": "say <|im_end|> now"}]);
    write(&folder, "in.jsonl", &jsonl(&[json!({"id": 7, "messages": messages, "add_generation_prompt": true})]));
    let model = smollm2();
    let render = |more: &[&str]| {
        let start = ["render", "--model", model.to_str().expect("a path"), "--input", "in.jsonl", "--out", "out.jsonl"];
        assert_eq!(weact(&[start.as_slice(), more].concat(), &folder).status, 0);
        read_jsonl(&folder, "out.jsonl").remove(0)
    };
    let (trusted, safe) = (render(&[]), render(&["--safe"]));
    assert_eq!((&trusted["text"], &trusted["id"]), (&safe["text"], &json!(7)));
    let n_ends = |row: &Value| numbers(&row["ids"]).iter().filter(|id| **id == 2.0).count(); // <|im_end|>
    assert_eq!((n_ends(&trusted), n_ends(&safe)), (3, 2));
}

#[test]
fn text_and_messages_are_scored_by_the_checkpoints_own_tokenizer() {
    let Some(model) = std::env::var_os("WEACT_SMOLLM2").map(PathBuf::from) else {
        println!("skipped: needs a real checkpoint; set WEACT_SMOLLM2 to its folder");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let messages =
        json!([{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]);
    write(
        &folder,
        "in.jsonl",
        &jsonl(&[json!({"id": "chat", "messages": messages}), json!({"id": "text", "text": "The sky is blue."})]),
    );
    write(&folder, "chat.json", &json!({"messages": [messages[0]]}).to_string());
    let model = model.to_str().expect("a path");
    let summary = weact(&["score", "--model", model, "--input", "in.jsonl", "--out", "out.jsonl", "--json"], &folder).json();
    assert!(summary["nll_nats_mean"].as_f64().is_some_and(|nll| nll > 0.1 && nll < 6.0), "{summary}");
    let written = weact(&["generate", "--model", model, "--messages", "chat.json", "--max-new", "24", "--json"], &folder).json();
    assert!(written["text"].as_str().is_some_and(|text| text.contains("Paris") && !text.contains("<|im_end|>")), "{written}");
    assert_eq!(written["finish"], "stop");
}

/// A checkpoint whose logits overflow.
fn overflowing(folder: &TempDir) {
    let backbone = Checkpoint::open(&golden("llama"), false).expect("whole").load(&Device::flex(), DType::F32).expect("loadable");
    let scaled = backbone.map(&mut |name, parameter| match parameter {
        Parameter::Vector(norm) if name == "model.norm.weight" => Parameter::Vector(norm.mul_scalar(3e38)),
        other => other,
    });
    let dir = folder.path().join("overflowing");
    fs::create_dir(&dir).expect("a folder");
    checkpoint::write(&dir, &scaled).expect("written");
}

#[test]
fn each_fault_has_its_exit_status_and_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    overflowing(&folder);
    for (name, text) in [
        ("good.jsonl", r#"{"id": "a", "ids": [1, 2, 3]}"#),
        ("nothing.jsonl", ""),
        ("outside.jsonl", "{\"id\": \"a\", \"ids\": [1]}\n\n{\"id\": \"b\", \"ids\": [1, 100000]}"),
        ("negative.jsonl", r#"{"id": "a", "ids": [-1]}"#),
        ("empty.jsonl", r#"{"id": "a", "ids": []}"#),
        ("mask.jsonl", r#"{"id": "a", "ids": [1, 2], "mask": [1]}"#),
        ("mask2.jsonl", r#"{"id": "a", "ids": [1, 2], "mask": [0, 2]}"#),
        ("twice.jsonl", "{\"id\": \"a\", \"ids\": [1]}\n{\"id\": \"a\", \"ids\": [2]}"),
        ("both.jsonl", r#"{"id": "a", "ids": [1], "text": "x"}"#),
        ("text.jsonl", r#"{"id": "a", "text": "x"}"#),
        ("json.jsonl", "{\"id\": \"a\", \"ids\": [1]}\n{\"id\""),
        ("unlabelled.jsonl", &jsonl(&[trajectory("a", false)])),
        ("rules.toml", "plan = \"plan\"\nretrieval = []\n"),
    ] {
        write(&folder, name, text);
    }
    let (model, llama) = (golden("qwen3-tied"), golden("llama"));
    let score = |input: &str| format!("score --model {} --input {input} --out o.jsonl", model.display());
    let generate = |rest: &str| format!("generate --model {} {rest}", model.display());
    let label = |rest: &str| format!("data label unlabelled.jsonl --out o.jsonl {rest}");
    let cases = [
        (score("outside.jsonl"), 1, "outside.jsonl:3: token id 100000 is outside the model's vocabulary of 199"),
        (score("negative.jsonl"), 1, "negative.jsonl:1: invalid value: integer `-1`"),
        (score("empty.jsonl"), 1, "empty.jsonl:1: the row has no tokens"),
        (score("mask.jsonl"), 1, "mask.jsonl:1: the mask has 1 entries, the row 2 tokens"),
        (score("mask2.jsonl"), 1, "mask2.jsonl:1: the mask has an entry 2"),
        (score("twice.jsonl"), 1, "twice.jsonl:2: the id \"a\" occurs twice"),
        (score("both.jsonl"), 1, "both.jsonl:1: a row has exactly one of"),
        (score("text.jsonl"), 1, "has no tokenizer.json"),
        (score("json.jsonl"), 1, "json.jsonl:2: EOF"),
        (score("absent.jsonl"), 1, "can't read absent.jsonl: No such file"),
        (score(&format!("good.jsonl --adapter {}", llama.join("adapter").display())), 1, "don't fit the model"),
        (score("good.jsonl --adapter absent"), 1, "absent"),
        ("score --model overflowing --input good.jsonl --out o.jsonl".to_owned(), 1, "non-finite"),
        ("generate --model overflowing --ids 1,2".to_owned(), 1, "non-finite logits"),
        ("generate --model absent --ids 1".to_owned(), 1, "absent"),
        (generate("--ids 1,100000"), 1, "token id 100000 is outside"),
        (generate("--prompt hello"), 1, "has no tokenizer.json: give --ids"),
        (generate("--ids 1,x"), 2, "invalid value 'x'"),
        (generate(""), 2, "required"),
        (generate("--ids 1 --prompt x"), 2, "cannot be used with"),
        (generate("--ids 1 --temperature=-1"), 2, "temperature is -1"),
        (generate("--ids 1 --top-p 2"), 2, "top_p is 2"),
        (generate("--ids 1 --dtype int8"), 2, "use f32, bf16 or f16"),
        (generate("--ids 1 --tool-protocol tags"), 2, "neither template nor text"),
        (generate("--ids 1 --device tpu"), 2, "use cpu, cuda, cuda:N or auto"),
        (label(""), 1, "none of its 1 rows can be kept, nothing written"),
        (label("--annotator http://127.0.0.1:1/v1"), 2, "needs --annotator-model"),
        (label("--annotator someone"), 2, "use rules or the URL"),
        (label("--annotator-model m"), 2, "go with --annotator URL"),
        (label("--rules rules.toml"), 2, "rules.toml:2: unknown field `retrieval`"),
        (label("--rules absent.toml"), 2, "can't read absent.toml"),
        ("data import --from mcp good.jsonl --out o.jsonl".to_owned(), 2, "mcp-xml, dr-tulu or swe-agent"),
        ("data export unlabelled.jsonl --model absent --out o.jsonl".to_owned(), 2, "needs --capability"),
        ("grade --benchmark gaia --input absent.jsonl".to_owned(), 1, "absent.jsonl"),
        ("grade --benchmark gaia --input nothing.jsonl".to_owned(), 1, "has no answers"),
        ("grade --benchmark ds1000 --input good.jsonl".to_owned(), 2, "no sandbox"),
        ("grade --benchmark gaja --input good.jsonl".to_owned(), 2, "unknown benchmark"),
        ("stats paired absent.jsonl absent.jsonl".to_owned(), 1, "can't read absent.jsonl"),
        ("stats paired good.jsonl good.jsonl".to_owned(), 1, "good.jsonl:1: missing field `success`"),
        ("stats paired good.jsonl good.jsonl --margin 200".to_owned(), 2, "--margin is 200"),
        ("search-graph good.jsonl".to_owned(), 1, "good.jsonl:1: no case_id"),
        ("report absent".to_owned(), 2, "is no run directory"),
        ("eval absent.toml".to_owned(), 2, "absent.toml"),
        ("data import --from openai absent.jsonl --out o.jsonl".to_owned(), 1, "can't read absent.jsonl"),
        ("inspect absent".to_owned(), 1, "absent: is no folder"),
        ("inspect .".to_owned(), 1, "is no model"),
        ("unite a b".to_owned(), 2, "unrecognized subcommand"),
        ("merge --method ties --out o.jsonl absent".to_owned(), 1, "absent"),
        ("merge --method tis --out o.jsonl absent".to_owned(), 2, "no merge is called"),
        ("merge --method average --density 0.2 --out o.jsonl absent".to_owned(), 2, "nothing is trimmed"),
        (String::new(), 2, "Usage:"),
    ];
    for (line, status, said) in cases {
        let arguments: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let outcome = weact(&arguments, &folder);
        assert_eq!(outcome.status, status, "{line}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(said), "{line}: {}", outcome.stderr);
        let errors = outcome.stderr.lines().filter(|line| !line.starts_with("warning: ")).count();
        assert!(status == 2 || errors == 1, "{line}: {}", outcome.stderr);
        assert_eq!(outcome.stdout, "", "{line}");
        assert!(!folder.path().join("o.jsonl").exists(), "{line} wrote its output");
    }
    if cfg!(not(feature = "cuda")) {
        let outcome = weact(&["generate", "--model", "absent", "--ids", "1", "--device", "cuda"], &folder);
        assert_eq!((outcome.status, outcome.stderr.contains("--features cuda")), (2, true), "{}", outcome.stderr);
    }
}

#[test]
fn doctor_passes_and_a_reader_that_leaves_is_no_fault() {
    let folder = tempfile::tempdir().expect("a folder");
    let report = weact(&["doctor", "--device", "cpu", "--json"], &folder).json();
    assert_eq!((&report["passed"], &report["device"]), (&json!(true), &json!("cpu")));
    assert!(report["checks"].as_array().is_some_and(|checks| checks.len() >= 10));

    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output =
        command(&["doctor", "--device", "cpu"], &folder).stdout(writer).stderr(Stdio::piped()).output().expect("it runs");
    let _shown = std::io::stderr().write_all(&output.stderr);
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
}

#[test]
fn data_export_writes_parquet_and_counts_what_it_leaves_out() {
    let folder = tempfile::tempdir().expect("a folder");
    write(&folder, "mixed.jsonl", &jsonl(&[trajectory("a", true), trajectory("b", false), trajectory("c", true)]));
    let model = smollm2();
    let start = ["data", "export", "mixed.jsonl", "--model", model.to_str().expect("a path"), "--tool-protocol", "text"];
    let export =
        |more: &[&str]| weact(&[start.as_slice(), &["--capability", "search", "--out", "out.parquet"], more].concat(), &folder);
    let refused = export(&[]);
    assert!(refused.status == 1 && refused.stderr.contains("1 of 3 rows would train nothing"), "{}", refused.stderr);
    assert!(!folder.path().join("out.parquet").exists());
    assert_eq!(export(&["--allow-empty", "--show", "1"]).status, 2);
    let summary = export(&["--allow-empty", "--json"]).json();
    assert_eq!((&summary["samples"], &summary["empty_rows"][0]["id"]), (&json!(2), &json!("b")));
    let bytes = fs::read(folder.path().join("out.parquet")).expect("a file");
    assert!(bytes.starts_with(b"PAR1") && bytes.ends_with(b"PAR1"));
}

/// A model behind HTTP that says the same to everyone; it ends with its listener.
fn model_that_says(reply: &str) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let body = json!({"choices": [{"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}]}).to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut request = Vec::new();
            let mut buffer = [0; 4096];
            let whole = |request: &[u8]| {
                let text = String::from_utf8_lossy(request).to_lowercase();
                let (head, body) = text.split_once("\r\n\r\n")?;
                let length: usize = head.lines().find_map(|l| l.strip_prefix("content-length: "))?.trim().parse().ok()?;
                (body.len() >= length).then_some(())
            };
            while whole(&request).is_none() {
                let n = std::io::Read::read(&mut stream, &mut buffer).expect("a request");
                request.extend_from_slice(&buffer[..n]);
            }
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                body.len()
            );
            stream.write_all((head + &body).as_bytes()).expect("written");
        }
    });
    format!("http://{address}/v1")
}

#[test]
fn a_model_labels_and_judges_over_http() {
    let folder = tempfile::tempdir().expect("a folder");
    let messages = json!([{"role": "user", "content": "who?"}, {"role": "assistant", "content": "I plan."},
        {"role": "user", "content": "go on"}, {"role": "assistant", "content": "Ada."}]);
    write(&folder, "rows.jsonl", &jsonl(&[json!({"id": "a", "messages": messages})]));
    let label = |url: &str| {
        let line = ["data", "label", "rows.jsonl", "--out", "out.jsonl", "--annotator", url, "--annotator-model", "m", "--json"];
        weact(&line, &folder)
    };
    let summary = label(&model_that_says(r#"{"labels": {"1": "plan", "3": "write"}}"#)).json();
    assert_eq!((&summary["spans"], &summary["labeller"]["annotator"]), (&json!({"plan": 1, "write": 1}), &json!("m")));
    let outcome = label(&model_that_says("plan, then write"));
    assert!(outcome.status == 1 && outcome.stderr.contains("the annotator's reply can't be used"), "{}", outcome.stderr);

    write(&folder, "answers.jsonl", &jsonl(&[json!({"id": "1", "question": "who?", "prediction": "Ada L.", "gold": "Ada"})]));
    let grade = |url: &str| {
        weact(&["grade", "--benchmark", "frames", "--input", "answers.jsonl", "--judge", url, "--judge-model", "m"], &folder)
    };
    let judged = grade(&model_that_says("Explanation: the same person.\n**Decision:** TRUE"));
    assert!(judged.status == 0 && judged.stdout.contains("\"verdict\":\"correct\""), "{}{}", judged.stdout, judged.stderr);
    let unread = grade(&model_that_says("I would rather not say."));
    assert!(unread.status == 1 && unread.stdout.contains("\"verdict\":\"judge_error\""), "{}{}", unread.stdout, unread.stderr);
}
