//! Diagnostics of finished adapters: over random adapters of a tiny checkpoint, and from the command line over the toy's.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use burn::tensor::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tempfile::TempDir;
use weact::{
    core::{
        Adapter,
        adapter::{LoraConfig, PlainFactors},
        io::{
            checkpoint::{Checkpoint, dims},
            peft,
        },
        lora::{FactorMap, Module, Projection},
        model::Config,
    },
    diagnostics::mismatch::relative_mismatch,
    eval::world::{World, gold::Form, question::Split},
    train::merge::{self, Source},
};

/// An adapter of all seven projections, with its own rank and scale.
fn random(config: &Config, rank: usize, alpha: f64) -> Adapter {
    let mut rng = ChaCha8Rng::seed_from_u64(rank as u64);
    let lora = LoraConfig {
        rank,
        alpha,
        rank_pattern: BTreeMap::new(),
        alpha_pattern: BTreeMap::new(),
        rslora: false,
        targets: Projection::BLOCK.to_vec(),
    };
    let modules = lora.modules(config).expect("targets and rank");
    let factors = modules.into_iter().map(|module| {
        let (d_in, d_out) = dims(config, module.projection);
        let mut draw = |n: usize| (0..n).map(|_| rng.random_range(-0.2..0.2)).collect::<Vec<f32>>();
        (module, PlainFactors { a: draw(d_in * rank), b: draw(rank * d_out), d_in, rank, d_out })
    });
    Adapter::new(lora.clone(), factors.collect()).expect("an adapter")
}

fn sum(adapters: &[Adapter; 3]) -> Adapter {
    let [plan, search, write] = adapters;
    let sources = [Source::memory("plan", plan), Source::memory("search", search), Source::memory("write", write)];
    merge::additive(&sources).expect("a sum")
}

fn norms(rows: Tensor<2>) -> Vec<f64> {
    let width = rows.dims()[1];
    let values: Vec<f64> = rows.into_data().iter::<f32>().map(f64::from).collect();
    values.chunks(width).map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt()).collect()
}

/// `rho_k |dW_k h| = |(dW_1 + dW_2 + dW_3 - dW_k) h|`: the updates of the others.
#[test]
fn full_additive_mismatch_is_the_sum_of_the_others() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("weact-core/tests/golden/qwen3-tied");
    let backbone = Checkpoint::open(&golden, false).and_then(|c| c.load(&Device::flex(), DType::F32)).expect("a tiny checkpoint");
    let adapters = [(4, 8.0), (2, 1.0), (3, 6.0)].map(|(rank, alpha)| random(&backbone.config, rank, alpha));
    let on_device = |adapter: &Adapter| adapter.to_device(&backbone.config, &backbone.device()).expect("it fits");
    let merged = on_device(&sum(&adapters));
    let factors: [FactorMap; 3] = adapters.each_ref().map(on_device);
    let ids: Vec<u32> = (0..24).map(|i| (i * 7 + 3) % backbone.config.vocab_size as u32).collect();
    let tokens = backbone.tokens(&[&ids]).expect("legal ids");
    for k in 0..3 {
        let mut seen: Vec<(Module, Tensor<2>)> = Vec::new();
        let mut look = |module: Module, h: &Tensor<2>| seen.push((module, h.clone()));
        let _hidden = backbone.hidden_observed(&tokens, Some(&factors[k]), &mut look);
        assert_eq!(seen.len(), 7 * backbone.config.n_layers);
        for (module, h) in seen {
            let update = |j: usize| factors[j][&module].apply(h.clone());
            let others = norms(update((k + 1) % 3) + update((k + 2) % 3));
            let rho = relative_mismatch(merged.get(&module), &factors[k][&module], h.clone());
            for ((rho, own), others) in rho.iter().zip(norms(update(k))).zip(others) {
                let own = rho * own;
                assert!((own - others).abs() <= 1e-4 * others, "{}, adapter {k}: {own}, expected {others}", module.path());
            }
        }
    }
}

fn toy(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("datasets/toy").join(part)
}

/// A folder with validation trajectories, the sum of the toy's adapters, and a run of them.
fn prepared() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let world = World::new(&Default::default()).expect("a world");
    let tools = world.library().and_then(|library| library.tools()).expect("tools");
    let gold = |q| serde_json::to_string(&world.gold(q, Form::Staged, &tools).expect("a gold trajectory")).expect("JSON") + "\n";
    let rows: String = world.questions(Split::Val, 6).iter().map(gold).collect();
    fs::write(folder.path().join("valid.jsonl"), rows).expect("writable");
    let adapters = ["plan", "search", "write"].map(|alias| peft::read(&toy("adapters").join(alias)).expect("a toy adapter"));
    write_adapter(&folder, "sum", &sum(&adapters));
    fs::write(folder.path().join("run.toml"), config(&["plan", "search", "write"], "")).expect("writable");
    folder
}

fn write_adapter(folder: &TempDir, name: &str, adapter: &Adapter) {
    let dir = folder.path().join(name);
    fs::create_dir_all(&dir).expect("writable");
    peft::write(&dir, adapter, "toy").expect("writable");
}

/// A run whose fusions are the sum and the plan adapter alone.
fn config(capabilities: &[&str], extra: &str) -> String {
    let model = toy("backbone").display().to_string();
    let adapters = toy("adapters").display().to_string();
    let mut text = format!("model = '{model}'\ndata = [\"valid.jsonl\"]\nout = \"out\"\nmax_length = 768\n");
    for capability in capabilities {
        text += &format!("[[adapters]]\ncapability = \"{capability}\"\npath = '{adapters}/{capability}'\n");
    }
    text +=
        &format!("[[fusions]]\nname = \"sum\"\npath = \"sum\"\n[[fusions]]\nname = \"plan alone\"\npath = '{adapters}/plan'\n");
    text + "[context]\nkeep_tool_result = 16\n[bootstrap]\nresamples = 200\n" + extra
}

/// Exit status, stdout and stderr.
fn diagnose(folder: &TempDir, what: &str) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weact"));
    command.args(["diagnose", what, "run.toml", "--json"]).current_dir(folder).stdin(Stdio::null());
    let output = command.output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(!stderr.contains("panicked") && !stderr.contains(".rs:"), "{stderr}");
    (output.status.code().expect("no signal"), stdout, stderr)
}

fn json(folder: &TempDir, what: &str) -> Value {
    let (status, stdout, stderr) = diagnose(folder, what);
    assert_eq!(status, 0, "{stderr}");
    serde_json::from_str(&stdout).expect("JSON")
}

fn lines(folder: &TempDir, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(folder.path().join("out").join(name)).expect("it was written");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_fusion_is_measured_against_every_specialist_and_a_specialist_against_itself_is_zero() {
    let folder = prepared();
    let gaps = json(&folder, "nll-gap");
    let gaps = gaps["gaps"].as_array().expect("rows");
    assert_eq!(gaps.len(), 6);
    let of = |rows: &[Value], fusion: &str, capability: &str| -> Value {
        rows.iter().find(|r| r["fusion"] == fusion && r["capability"] == capability).expect("a row").clone()
    };
    assert_eq!(of(gaps, "plan alone", "plan")["bootstrap95"], serde_json::json!([0.0, 0.0]));
    assert!(of(gaps, "plan alone", "search")["mean_nats"].as_f64().expect("a mean") > 0.0);
    assert_eq!(lines(&folder, "nll_gap.jsonl").len(), 2 * 3 * 6);

    let mismatches = json(&folder, "mismatch");
    let mismatches = mismatches["mismatches"].as_array().expect("rows");
    let layers = |fusion: &str, capability: &str| -> Vec<f64> {
        let layers = of(mismatches, fusion, capability)["mismatch"]["layers"].clone();
        layers.as_array().expect("layers").iter().map(|l| l["mean"].as_f64().expect("a mean")).collect()
    };
    assert_eq!(layers("plan alone", "plan"), [0.0; 4]);
    assert!(layers("sum", "plan").iter().chain(&layers("plan alone", "write")).all(|rho| *rho > 0.1));
    assert_eq!(lines(&folder, "mismatch.jsonl").len(), 2 * 3 * 6);

    let lint = json(&folder, "lint");
    let adapters = lint["adapters"].as_array().expect("adapters");
    assert_eq!((adapters.len(), &lint["errors"]), (5, &Value::Bool(false)));
    assert!(adapters[..3].iter().all(|a| a["exit_calls"]["n_right"].as_u64() > Some(0)), "specialists leave: {lint}");
    for file in ["config.toml", "lint.jsonl", "nll-gap/report.html", "nll-gap/figures/fig14.svg", "nll-gap/figures/fig14.png"] {
        assert!(folder.path().join("out").join(file).exists(), "{file}");
    }
    for file in ["mismatch/figures/fig13.svg", "mismatch/figures/fig13.csv", "mismatch/tables/mismatch-layers.csv"] {
        assert!(folder.path().join("out").join(file).exists(), "{file}");
    }
}

#[test]
fn an_adapter_without_effect_fails_the_lint() {
    let folder = prepared();
    let plan = peft::read(&toy("adapters/plan")).expect("a toy adapter");
    let zero = |f: &PlainFactors| PlainFactors { b: vec![0.0; f.b.len()], ..f.clone() };
    let plain = plan.plain().iter().map(|(module, f)| (*module, zero(f))).collect();
    write_adapter(&folder, "zero", &Adapter::new(plan.config().clone(), plain).expect("finite"));
    let text = config(&["plan"], "").replace("path = \"sum\"", "path = \"zero\"");
    fs::write(folder.path().join("run.toml"), text).expect("writable");
    let (status, stdout, stderr) = diagnose(&folder, "lint");
    assert_eq!(status, 1, "{stderr}");
    assert!(stdout.contains("no_update") && stdout.contains("no_effect"), "{stdout}");
    // Its update is zero everywhere: all of the specialist's is missing.
    let rho = json(&folder, "mismatch")["mismatches"][0]["mismatch"]["overall"]["mean"].as_f64();
    assert_eq!(rho, Some(1.0));
}

#[test]
fn what_can_t_be_measured_is_refused_with_its_reason() {
    let folder = prepared();
    let check = |text: &str, status: i32, expected: &str| {
        fs::write(folder.path().join("run.toml"), text).expect("writable");
        let (own, _, stderr) = diagnose(&folder, "nll-gap");
        assert!(own == status && stderr.contains(expected), "{own}: {stderr}, expected {status}: {expected}");
    };
    let whole = config(&["plan"], "");
    check(&config(&["plan"], "[mismatch]\nprefix = 3\n"), 2, "prefix");
    check(&config(&["plan", "plan"], ""), 2, "the same capability");
    check(&whole.replace("plan alone", "sum"), 2, "the same name");
    check(whole.split("[[fusions]]").next().expect("a part"), 2, "no [[fusions]]");
    check(&whole.replace("\"plan\"", "\"review\""), 1, "review has no record to look at: no trajectory has a stage of it");
    check(&whole.replace("max_length = 768", "max_length = 20"), 1, "longer than 20 tokens");
    check(&whole.replace("[\"valid.jsonl\"]", "[\"valid.jsonl\", \"valid.jsonl\"]"), 1, "occurs in an earlier file");
    fs::write(folder.path().join("empty.jsonl"), "").expect("writable");
    check(&whole.replace("valid.jsonl", "empty.jsonl"), 1, "plan has no record to look at");
    let foreign = folder.path().join("sum");
    let card = fs::read_to_string(toy("adapters/plan/card.toml")).expect("a card");
    fs::write(foreign.join("card.toml"), card).expect("writable");
    check(&whole, 1, "the card says adapter tensors");
    fs::remove_file(foreign.join("card.toml")).expect("it was written");
    let tiny = Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("weact-core/tests/golden/qwen3-tied"), false);
    write_adapter(&folder, "sum", &random(&tiny.expect("a checkpoint").config, 4, 8.0));
    check(&whole, 1, "don't fit the model");
}
