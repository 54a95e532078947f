//! Folding an adapter into its checkpoint, on the tiny checkpoints and from the command line.
#![expect(clippy::print_stdout, reason = "what rounding to bf16 costs is shown")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use burn::tensor::{DType, Device};
use serde_json::Value;
use tempfile::TempDir;
use weact::{
    core::{
        Adapter,
        adapter::{LoraConfig, PlainFactors},
        io::{
            checkpoint::{Checkpoint, dims},
            fold::{Folded, fold},
            peft,
        },
        lora::{Module, Projection},
    },
    diagnostics::logit_gap::{LogitGap, logit_gap, record},
};

const CASES: [&str; 6] = ["qwen3-sharded-bf16", "qwen3-tied", "qwen3-yarn", "qwen2-bias", "llama", "llama3-rope"];

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("weact-core/tests/golden").join(case)
}

fn open(case: &str) -> (Checkpoint, Adapter) {
    let checkpoint = Checkpoint::open(&golden(case), false).expect("a whole checkpoint");
    (checkpoint, peft::read(&golden(case).join("adapter")).expect("an adapter"))
}

/// The bytes of every file of a folder, folders in it too.
fn bytes(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(bytes(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).expect("a file"));
        }
    }
    found
}

fn folded(checkpoint: &Checkpoint, adapter: &Adapter, dtype: Option<DType>) -> (TempDir, Checkpoint, Folded) {
    let out = tempfile::tempdir().expect("a folder");
    let done = fold(checkpoint, adapter, dtype, out.path()).expect("it folds");
    let result = Checkpoint::open(out.path(), false).expect("a whole checkpoint");
    (out, result, done)
}

/// Between the adapter beside its checkpoint and the folded one as it is on disk, in f32.
fn gap(checkpoint: &Checkpoint, adapter: &Adapter, result: &Checkpoint) -> LogitGap {
    let device = Device::flex();
    let rows: Vec<Vec<u32>> =
        [40, 7].iter().map(|n| (0..*n).map(|i| (i * 37 + n) % checkpoint.config.vocab_size as u32).collect()).collect();
    let backbone = checkpoint.load(&device, DType::F32).expect("loadable");
    let factors = adapter.to_device(&backbone.config, &device).expect("it fits");
    let beside = record(&backbone, Some(&factors), &rows).expect("legal ids");
    let welded = record(&result.load(&device, DType::F32).expect("loadable"), None, &rows).expect("legal ids");
    logit_gap(&beside, &welded)
}

/// Factors that change logits by about one, on every module that `targets` name.
fn adapter(checkpoint: &Checkpoint, targets: &[Projection], size: f32) -> Adapter {
    let config = LoraConfig {
        rank: 2,
        alpha: 3.0,
        rank_pattern: BTreeMap::new(),
        alpha_pattern: BTreeMap::new(),
        rslora: false,
        targets: targets.to_vec(),
    };
    let values = |n: usize, phase: f32| (0..n).map(|i| size * (i as f32 * 1.7 + phase).sin()).collect();
    let factors = |module: Module| {
        let (d_in, d_out) = dims(&checkpoint.config, module.projection);
        (module, PlainFactors { a: values(d_in * 2, 0.0), b: values(d_out * 2, 1.0), d_in, rank: 2, d_out })
    };
    let modules = config.modules(&checkpoint.config).expect("targets");
    let plain = modules.into_iter().map(factors).collect();
    Adapter::new(config, plain).expect("finite factors")
}

/// 1e-4 is the project's bound for f32 logits that should be equal. In bf16 the gap is that of rounding, which is shown.
#[test]
fn folding_changes_no_logit_beyond_rounding_and_nothing_of_its_source() {
    for case in CASES {
        let before = bytes(&golden(case));
        let (checkpoint, adapter) = open(case);
        let (_out, result, done) = folded(&checkpoint, &adapter, None);
        assert_eq!((done.n_folded, done.n_unchanged, done.untied), (adapter.plain().len(), 0, false), "{case}");
        let gap = gap(&checkpoint, &adapter, &result);
        let is_bf16 = case == "qwen3-sharded-bf16";
        if is_bf16 {
            println!("{case}: {gap:?}");
        }
        let bound = if is_bf16 { 0.25 } else { 1e-4 };
        assert!(gap.max_difference < bound, "{case}: {gap:?}");
        assert!(gap.top1_agreement >= Some(0.8), "{case}: {gap:?}");

        let files = |c: &Checkpoint| {
            c.tensors.by_file().into_iter().map(|(p, n)| (p.file_name().expect("a name").to_owned(), n.len())).collect::<Vec<_>>()
        };
        assert_eq!(files(&checkpoint), files(&result), "{case}: the files of weights");
        for (name, entry) in checkpoint.tensors.entries() {
            let is_target = adapter.plain().keys().any(|module| *name == format!("{}.weight", module.path()));
            let written = &result.tensors.entries()[name];
            assert_eq!((&entry.dtype, &entry.shape), (&written.dtype, &written.shape), "{case}: {name}");
            assert_eq!(checkpoint.tensors.bytes(name) == result.tensors.bytes(name), !is_target, "{case}: {name}");
        }
        drop(checkpoint);
        assert!(before == bytes(&golden(case)), "{case}: the source is as it was");
    }
}

#[test]
fn sums_are_made_in_f32_and_rounded_once() {
    let (checkpoint, adapter) = open("qwen3-tied");
    let (_wide, wide, _) = folded(&checkpoint, &adapter, None);
    let (_narrow, narrow, _) = folded(&checkpoint, &adapter, Some(DType::BF16));
    for name in checkpoint.tensors.entries().keys() {
        let rounded: Vec<f32> = wide.tensors.f32(name).expect("f32").into_iter().map(half_even).collect();
        assert_eq!(narrow.tensors.f32(name).expect("bf16"), rounded, "{name}");
    }
    assert!(fs::read_to_string(narrow.dir.join("config.json")).expect("written").contains("\"bfloat16\""));
    let gap = gap(&checkpoint, &adapter, &narrow);
    println!("f32 folded into bf16: {gap:?}");
    assert!(gap.max_difference > 1e-4, "rounding shows: {gap:?}");
}

/// The nearest number with bf16's sixteen bits; of two, the even one.
fn half_even(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

#[test]
fn a_tied_head_with_an_update_becomes_a_tensor_and_the_embedding_stays() {
    let checkpoint = Checkpoint::open(&golden("qwen3-tied"), false).expect("a whole checkpoint");
    assert!(checkpoint.config.tied);
    let adapter = adapter(&checkpoint, &[Projection::QProj, Projection::LmHead], 0.3);
    let (_out, result, done) = folded(&checkpoint, &adapter, None);
    assert!(done.untied && !result.config.tied);
    let embedding = "model.embed_tokens.weight";
    assert_eq!(checkpoint.tensors.bytes(embedding), result.tensors.bytes(embedding));
    assert_ne!(result.tensors.bytes(embedding), result.tensors.bytes("lm_head.weight"));
    let gap = gap(&checkpoint, &adapter, &result);
    assert!(gap.max_difference < 1e-4, "{gap:?}");

    let keys = |dir: &Path| -> Value {
        serde_json::from_str(&fs::read_to_string(dir.join("config.json")).expect("there")).expect("JSON")
    };
    let (mut was, is) = (keys(&checkpoint.dir), keys(&result.dir));
    was["tie_word_embeddings"] = Value::Bool(false);
    assert_eq!(was, is, "every other key stays");
}

/// Two shards, the embedding in the second: its head goes there, and the index knows it.
#[test]
fn an_untied_head_is_in_the_index_of_a_sharded_checkpoint() {
    let dir = tempfile::tempdir().expect("a folder");
    let source = dir.path();
    fs::copy(golden("qwen3-tied").join("config.json"), source.join("config.json")).expect("copied");
    let (whole, _) = open("qwen3-tied");
    let mut map = BTreeMap::new();
    for (file, is_here) in [("model-00001-of-00002.safetensors", false), ("model-00002-of-00002.safetensors", true)] {
        let names: Vec<&String> =
            whole.tensors.entries().keys().filter(|name| (*name == "model.embed_tokens.weight") == is_here).collect();
        let values: Vec<Vec<f32>> = names.iter().map(|name| whole.tensors.f32(name).expect("f32")).collect();
        let named: Vec<_> = names
            .iter()
            .zip(&values)
            .map(|(name, values)| ((*name).clone(), whole.tensors.entries()[*name].shape.clone(), values.as_slice()))
            .collect();
        weact::core::io::tensors::write(&source.join(file), &named).expect("written");
        map.extend(names.into_iter().map(|name| (name.clone(), file)));
    }
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(source.join("model.safetensors.index.json"), index.to_string()).expect("written");
    let checkpoint = Checkpoint::open(source, false).expect("a whole checkpoint");
    let adapter = adapter(&checkpoint, &[Projection::DownProj, Projection::LmHead], 0.3);
    let (_out, result, done) = folded(&checkpoint, &adapter, None);
    let text = fs::read_to_string(result.dir.join("model.safetensors.index.json")).expect("written");
    let index: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(index["weight_map"]["lm_head.weight"], "model-00002-of-00002.safetensors");
    assert_eq!(index["metadata"]["total_size"], done.bytes);
    assert!(gap(&checkpoint, &adapter, &result).max_difference < 1e-4);
}

fn weact(line: &str, folder: &TempDir) -> (i32, String, String) {
    let arguments: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
    let output =
        Command::new(env!("CARGO_BIN_EXE_weact")).args(&arguments).current_dir(folder).output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.code().expect("no signal"), text(output.stdout), text(output.stderr))
}

/// Writes the model into `folder/model`, and adapters whose effect is none, plain, and beyond f16.
fn prepare(folder: &TempDir) {
    let model = folder.path().join("model");
    fs::create_dir(&model).expect("a folder");
    for file in ["config.json", "model.safetensors", "generation_config.json"] {
        fs::copy(golden("qwen3-tied").join(file), model.join(file)).expect("copied");
    }
    let checkpoint = Checkpoint::open(&model, false).expect("a whole checkpoint");
    for (name, size) in [("none", 0.0), ("plain", 0.2), ("huge", 500.0)] {
        let dir = folder.path().join(name);
        fs::create_dir(&dir).expect("a folder");
        peft::write(&dir, &adapter(&checkpoint, &[Projection::UpProj], size), "model").expect("written");
    }
}

#[test]
fn what_is_asked_wrongly_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    prepare(&folder);
    fs::create_dir(folder.path().join("full")).expect("a folder");
    fs::write(folder.path().join("full/mine.txt"), "mine").expect("written");
    let before = bytes(folder.path());
    let foreign = golden("llama").join("adapter");
    let fold = |rest: &str| format!("fold --model model {rest}");
    for (line, status, said) in [
        (fold("--adapter plain --out model"), 2, "only read"),
        (fold("--adapter plain --out model/folded"), 2, "only read"),
        (fold("--adapter plain --out plain --overwrite"), 2, "only read"),
        (fold("--adapter plain --out ./x/../model --overwrite"), 2, "only read"),
        (fold("--adapter plain --out full"), 2, "--overwrite replaces"),
        (fold("--adapter plain --out full --overwrite"), 2, "no fold wrote it"),
        (fold("--adapter plain --out .. --overwrite"), 2, "no name of its own"),
        (fold("--adapter absent --out o"), 1, "absent"),
        (fold(&format!("--adapter {} --out o", foreign.display())), 1, "don't fit the model"),
        (fold("--adapter huge --out o --dtype f16"), 1, "non-finite weights in model.layers.0.mlp.up_proj.weight, dtype f16"),
        (fold("--adapter plain --out o --dtype int8"), 2, "use f32, bf16 or f16, or same"),
        (fold("--adapter plain --out o --input absent.jsonl"), 1, "absent.jsonl"),
        (fold("--adapter plain --out /proc/o"), 1, "can't write /proc/o"),
    ] {
        let (found, stdout, stderr) = weact(&line, &folder);
        assert_eq!((found, stdout.as_str()), (status, ""), "{line}: {stderr}");
        assert!(stderr.contains(said), "{line}: {stderr}");
        assert!(before == bytes(folder.path()), "{line} changed a file");
    }
}

#[test]
fn the_record_beside_the_result_says_what_was_folded_and_what_it_cost() {
    let folder = tempfile::tempdir().expect("a folder");
    prepare(&folder);
    fs::write(folder.path().join("rows.jsonl"), "{\"id\": \"a\", \"ids\": [1, 2, 3]}\n{\"id\": \"b\", \"ids\": [5, 6]}\n")
        .expect("written");
    let (status, stdout, stderr) = weact("fold --model model --adapter plain --out o --input rows.jsonl --json", &folder);
    assert_eq!(status, 0, "{stderr}");
    let summary: Value = serde_json::from_str(&stdout).expect("JSON");
    let out = folder.path().join("o");
    let record: Value = serde_json::from_str(&fs::read_to_string(out.join("fold.json")).expect("written")).expect("JSON");
    for (dir, key) in [("model", "base"), ("o", "result")] {
        let digest = Checkpoint::open(&folder.path().join(dir), false).expect("whole").digest();
        assert_eq!((&record[key], &summary[key]), (&digest.clone().into(), &digest.into()));
    }
    assert_eq!(record["adapter"], peft::read(&folder.path().join("plain")).expect("an adapter").digest());
    assert_eq!((&record["gap"]["rows"], &record["gap"]["n_tokens"]), (&2.into(), &5.into()));
    assert!(record["gap"]["max_logit_difference"].as_f64().expect("measured") < 1e-4, "{record}");
    assert_eq!(record["copied"], serde_json::json!(["generation_config.json"]));

    let (status, _, stderr) = weact("fold --model model --adapter none --out o --no-gap --overwrite", &folder);
    assert!(status == 0 && stderr.contains("3 of 3 tensors are the checkpoint's own"), "{stderr}");
    let weights = |dir: &str| fs::read(folder.path().join(dir).join("model.safetensors")).expect("written");
    let [model, same] = ["model", "o"].map(|dir| Checkpoint::open(&folder.path().join(dir), false).expect("whole").digest());
    assert_eq!(model, same, "an update of zero gives the checkpoint back");
    assert_eq!(weights("o").len(), weights("model").len());
    let record: Value = serde_json::from_str(&fs::read_to_string(out.join("fold.json")).expect("written")).expect("JSON");
    assert_eq!(record["gap"], Value::Null, "what was not measured is unknown");
}
