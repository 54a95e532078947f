//! PEFT adapters, their cards and the registry: applied whole, or refused by name.

mod common;

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use burn::tensor::{Device, Tensor, TensorData};
use common::{
    Weights, adapter, assert_names, capability, edit_json, edit_weights, hidden, load, logits, lora, max_difference, rename,
    tiny, values, write_checkpoint,
};
use serde_json::{Value, json};
use weact_core::{
    Adapter,
    adapter::LoraConfig,
    card::{Card, Think},
    chat::ToolProtocol,
    context::Retention,
    io::{checkpoint::Checkpoint, peft},
    lora::{Module, Projection},
    model::Config,
    registry::{Against, Entry, Registry},
    stage::Stage,
};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

fn seven() -> Adapter {
    adapter(&lora(4, 8.0, &Projection::BLOCK), &tiny(), 1)
}

/// Writes an adapter for TINY, changes its folder, reads it and fits it to TINY: an error that names everything in `expected`, or,
/// where that is empty, an adapter.
fn check(change: impl FnOnce(&Path), expected: &[&str]) {
    let dir = tempfile::tempdir().expect("a folder");
    peft::write(dir.path(), &seven(), "tiny").expect("writable");
    change(dir.path());
    match peft::read(dir.path()).and_then(|adapter| adapter.check_fits(&tiny())) {
        Ok(()) => assert!(expected.is_empty(), "accepted, though it should name {expected:?}"),
        Err(error) if expected.is_empty() => panic!("{error}"),
        Err(error) => assert_names(&error, expected),
    }
}

fn check_tensors(edit: impl FnOnce(&mut Weights), expected: &[&str]) {
    check(|dir| edit_weights(&dir.join(TENSORS), edit), expected);
}

fn check_config(key: &str, value: Value, expected: &[&str]) {
    let change = |dir: &Path| edit_json(&dir.join(CONFIG), |config| drop(config.insert(key.to_owned(), value)));
    check(change, expected);
}

fn factor(layer: usize, part: &str, half: &str) -> String {
    format!("base_model.model.model.layers.{layer}.{part}.lora_{half}.weight")
}

#[test]
fn every_target_matches_or_is_named_with_the_near_one() {
    assert_eq!(seven().config().modules(&tiny()).expect("targets").len(), 14);
    check_config("target_modules", json!(["q_proj", "qproj"]), &["qproj", "did you mean q_proj?"]);
    check_config("target_modules", json!(["q_proj"]), &["no target"]);
    check_config("target_modules", json!([]), &["no target"]);
    check_config("target_modules", json!("all-linear"), &[]);
    let mut with_head: Vec<&str> = Projection::BLOCK.iter().map(|p| p.name()).collect();
    with_head.push("lm_head");
    check_config("target_modules", json!(with_head), &["lm_head", "no tensors"]);
}

#[test]
fn missing_foreign_and_misshapen_tensors_are_counted_with_two_examples() {
    let (k0, q0, q1) = ("self_attn.k_proj", factor(0, "self_attn.q_proj", "B"), factor(1, "self_attn.q_proj", "B"));
    check_tensors(|_| {}, &[]);
    check_tensors(|w| drop(w.remove(&q0)), &["1 tensors are missing", "model.layers.0.self_attn.q_proj.lora_B"]);
    let three = |w: &mut Weights| [&q0, &q1, &factor(0, k0, "A")].into_iter().for_each(|name| drop(w.remove(name)));
    check_tensors(three, &["3 tensors are missing", "q_proj.lora_B", "k_proj.lora_A"]);
    let whole_module = |w: &mut Weights| w.retain(|name, _| !name.contains("layers.1.mlp.up_proj"));
    check_tensors(whole_module, &["lacks 1 of the 14 modules", "model.layers.1.mlp.up_proj"]);
    for prefix in ["base_model.model.language_model.model.layers", "model.layers", "base_model.model.layers"] {
        let other_prefix = |w: &mut Weights| {
            let names: Vec<String> = w.keys().cloned().collect();
            names.iter().for_each(|name| rename(w, name, &name.replace("base_model.model.model.layers", prefix)));
        };
        let example = format!("{prefix}.0.mlp.down_proj.lora_A.weight");
        check_tensors(other_prefix, &["28 tensors", &example, "lora_B.weight"]);
    }
    let foreign = |w: &mut Weights| {
        w.insert("base_model.model.model.embed_tokens.lora_embedding_A".to_owned(), (vec![4, 300], vec![0.0; 1200]));
        w.insert("base_model.model.lm_head.modules_to_save.weight".to_owned(), (vec![1], vec![0.0]));
    };
    check_tensors(foreign, &["2 tensors", "lora_embedding_A", "modules_to_save"]);
    let out_of_range = |w: &mut Weights| {
        for half in ["A", "B"] {
            rename(w, &factor(1, "mlp.up_proj", half), &factor(9, "mlp.up_proj", half));
        }
    };
    check_tensors(out_of_range, &["1 of the adapter's 14 modules", "model.layers.9.mlp.up_proj"]);
    check_config("r", json!(8), &["14 tensors", "rank 8 by the config", "q_proj"]);
    let flat = |w: &mut Weights| w.get_mut(&q0).expect("a factor").0 = vec![256];
    check_tensors(flat, &["1 tensors", "another shape", "[256]"]);
    check_tensors(Weights::clear, &["no LoRA factors"]);
}

#[test]
fn a_factor_that_is_not_finite_is_refused_with_its_module() {
    for value in [f32::NAN, f32::INFINITY] {
        let name = factor(1, "mlp.gate_proj", "B");
        check_tensors(|w| w.get_mut(&name).expect("a factor").1[5] = value, &["model.layers.1.mlp.gate_proj", "not finite"]);
    }
}

#[test]
fn what_would_change_the_function_is_refused_by_name() {
    for (key, value) in [
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("lora_bias", json!(true)),
        ("bias", json!("all")),
        ("fan_in_fan_out", json!(true)),
        ("layers_to_transform", json!([0])),
        ("layer_replication", json!([[0, 1]])),
        ("exclude_modules", json!(["q_proj"])),
        ("trainable_token_indices", json!([1])),
        ("ensure_weight_tying", json!(true)),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("use_rslora", json!("yes")),
        ("peft_type", json!("LOHA")),
        ("target_modules", json!(".*q_proj")),
        ("r", json!("8")),
        ("r", json!(-1)),
        ("lora_alpha", Value::Null),
        ("a_key_of_tomorrow", json!(1)),
    ] {
        check_config(key, value, &[key, CONFIG]);
    }
    for (key, pattern) in
        [("rank_pattern", "^model\\.layers\\.0"), ("alpha_pattern", "q_proj|k_proj"), ("rank_pattern", ".*q_proj")]
    {
        check_config(key, json!({pattern: 4}), &["regular expression"]);
    }
    check_config("rank_pattern", json!({"q_proj": 4.5}), &["q_proj", "whole number"]);
    check_config("rank_pattern", json!([4]), &["rank_pattern"]);
    check_config("alpha_pattern", json!({"q_proj": 1, "layers.1.self_attn.q_proj": 2}), &["q_proj", "two patterns"]);
    for (key, value) in
        [("init_lora_weights", json!("gaussian")), ("lora_dropout", json!(0.1)), ("a_key_of_tomorrow", Value::Null)]
    {
        check_config(key, value, &[]);
    }
    for text in ["", "{", "[]", "null"] {
        check(|dir| fs::write(dir.join(CONFIG), text).expect("writable"), &[CONFIG]);
    }
    check(|dir| fs::write(dir.join(TENSORS), [0xff; 64]).expect("writable"), &[TENSORS, "incomplete download?"]);
    check(|dir| fs::remove_file(dir.join(TENSORS)).expect("it is there"), &[TENSORS]);
    let rank_zero = |dir: &Path| {
        edit_json(&dir.join(CONFIG), |c| c["r"] = json!(0));
        edit_weights(&dir.join(TENSORS), |w| {
            for (name, (shape, values)) in w {
                *shape = if name.contains("lora_A") { vec![0, shape[1]] } else { vec![shape[0], 0] };
                values.clear();
            }
        });
    };
    check(rank_zero, &["rank"]);
}

/// Ranks, alphas and scales of an adapter with patterns.
fn patterned(rslora: bool) -> Adapter {
    let targets = Projection::BLOCK.into_iter().chain([Projection::LmHead]).collect();
    let rank_pattern = BTreeMap::from([("down_proj".to_owned(), 2), ("model.layers.1.self_attn.q_proj".to_owned(), 5)]);
    let alpha_pattern = BTreeMap::from([("layers.0.mlp.up_proj".to_owned(), 0.5), ("lm_head".to_owned(), 3.0)]);
    adapter(&LoraConfig { rank: 4, alpha: 8.0, rank_pattern, alpha_pattern, rslora, targets }, &tiny(), 2)
}

#[test]
fn an_adapter_survives_its_files_and_writes_the_same_bytes_again() {
    let golden = |case: &str| {
        peft::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case).join("adapter"))
            .expect("PEFT's own files")
    };
    let of_peft = ["qwen3-sharded-bf16", "qwen3-tied", "qwen3-yarn", "qwen2-bias", "llama", "llama3-rope"].map(golden);
    for adapter in [seven(), patterned(false), patterned(true)].into_iter().chain(of_peft) {
        let dirs = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
        peft::write(dirs[0].path(), &adapter, "base").expect("writable");
        let again = peft::read(dirs[0].path()).expect("readable");
        assert_eq!((again.digest(), again.config(), again.plain()), (adapter.digest(), adapter.config(), adapter.plain()));
        peft::write(dirs[1].path(), &again, "base").expect("writable");
        for file in [CONFIG, TENSORS] {
            let [first, second] = dirs.each_ref().map(|dir| fs::read(dir.path().join(file)).expect("readable"));
            assert_eq!(first, second, "{file}");
        }
    }
}

#[test]
fn the_digest_tells_every_change_of_content() {
    let base = adapter(&lora(2, 4.0, &[Projection::QProj]), &tiny(), 1);
    let mut digests = vec![base.digest().to_owned()];
    for changed in [
        Adapter::new(LoraConfig { alpha: 5.0, ..base.config().clone() }, base.plain().clone()),
        Adapter::new(LoraConfig { rslora: true, ..base.config().clone() }, base.plain().clone()),
        Ok(adapter(base.config(), &tiny(), 3)),
    ] {
        digests.push(changed.expect("an adapter").digest().to_owned());
    }
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), 4);
}

/// `scale * B A x` in f64 beside the forward pass, for alpha = r = 16: the scale is 1, or 4 where rank-stabilised.
#[test]
fn the_scale_in_files_is_the_one_that_acts() {
    let module = Module { layer: Some(0), projection: Projection::QProj };
    for (rslora, scale) in [(false, 1.0), (true, 4.0)] {
        let dir = tempfile::tempdir().expect("a folder");
        let config = LoraConfig { rslora, ..lora(16, 16.0, &[Projection::QProj]) };
        peft::write(dir.path(), &adapter(&config, &tiny(), 4), "tiny").expect("writable");
        let read = peft::read(dir.path()).expect("readable");
        assert_eq!(read.config().scale_of(module), scale);
        let plain = &read.plain()[&module];
        let x: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) / 20.0).collect();
        let a_x = |r: usize| (0..32).map(|i| f64::from(x[i]) * f64::from(plain.a[i * 16 + r])).sum::<f64>();
        let by_hand = |o: usize| (scale * (0..16).map(|r| a_x(r) * f64::from(plain.b[r * plain.d_out + o])).sum::<f64>()) as f32;
        let expected: Vec<f32> = (0..plain.d_out).map(by_hand).collect();
        let device = Device::flex();
        let x = Tensor::<2>::from_data(TensorData::new(x, [1, 32]), &device);
        let factors = read.to_device(&tiny(), &device).expect("it fits");
        assert!(max_difference(&values(factors[&module].apply(x)), &expected) < 1e-6);
    }
}

#[test]
fn an_adapter_of_the_head_leaves_the_tied_embedding_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    write_checkpoint(dir.path(), &tiny());
    let backbone = load(&Checkpoint::open(dir.path(), false).expect("whole"));
    let head = adapter(&lora(4, 8.0, &[Projection::LmHead]), &tiny(), 5);
    let factors = head.to_device(&tiny(), &Device::flex()).expect("it fits");
    let before = values(backbone.embedding.clone());
    assert_eq!(values(hidden(&backbone, Some(&factors))), values(hidden(&backbone, None)));
    let difference = max_difference(&logits(&backbone, Some(&factors)), &logits(&backbone, None));
    assert!(difference > 1e-3, "{difference}");
    assert_eq!(values(backbone.embedding.clone()), before);
}

#[test]
fn factors_have_the_shapes_that_peft_gives_them() {
    let dir = tempfile::tempdir().expect("a folder");
    peft::write(dir.path(), &patterned(false), "tiny").expect("writable");
    let mut shapes = BTreeMap::new();
    edit_weights(&dir.path().join(TENSORS), |w| shapes = w.iter().map(|(n, (s, _))| (n.clone(), s.clone())).collect());
    for (part, [a, b]) in [
        ("self_attn.k_proj", [[4, 32], [32, 4]]),
        ("self_attn.o_proj", [[4, 64], [32, 4]]),
        ("mlp.down_proj", [[2, 48], [32, 2]]),
        ("self_attn.q_proj", [[5, 32], [64, 5]]),
    ] {
        assert_eq!([&shapes[&factor(1, part, "A")], &shapes[&factor(1, part, "B")]], [&a, &b], "{part}");
    }
    assert_eq!(shapes["base_model.model.lm_head.lora_A.weight"], [4, 32]);
    assert_eq!(shapes["base_model.model.lm_head.lora_B.weight"], [300, 4]);
    assert_names(
        &seven().check_fits(&Config { head_dim: 8, ..tiny() }).expect_err("other heads"),
        &["8 of the adapter's 14", "proj"],
    );
    assert_names(&seven().check_fits(&Config { n_layers: 3, ..tiny() }).expect_err("more layers"), &["lacks 7 of the 21"]);
}

// Cards and the registry.

fn against() -> Against {
    let [base, tokenizer, template] = ["base-1", "tokenizer-1", "template-1"].map(str::to_owned);
    Against { base, tokenizer, template }
}

fn card(alias: &str, adapter: &Adapter) -> Card {
    let Stage { alias, description, activation } = Stage::builtin(&capability(alias));
    let Against { base, tokenizer, template } = against();
    Card {
        alias,
        description,
        activation,
        digest: adapter.digest().to_owned(),
        base,
        tokenizer,
        template,
        tool_protocol: ToolProtocol::Template,
        think: Think::Preserve,
        retention: Retention::default(),
        training: None,
        merge: None,
    }
}

/// A folder with the adapters `plan` (with a card) and `search` (without).
fn library() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for alias in ["search", "plan"] {
        fs::create_dir(dir.path().join(alias)).expect("writable");
        peft::write(&dir.path().join(alias), &seven(), "tiny").expect("writable");
    }
    card("plan", &seven()).write(&dir.path().join("plan")).expect("writable");
    dir
}

#[test]
fn a_card_reads_back_and_refuses_another_base_tokenizer_template_or_content() {
    let dir = library();
    let plan = dir.path().join("plan");
    let original = card("plan", &seven());
    assert_eq!(Card::read(&plan).expect("readable"), Some(original.clone()));
    for (other, expected) in [
        (Card { base: "base-2".to_owned(), ..original.clone() }, ["base model", "base-2", "base-1"]),
        (Card { tokenizer: "tokenizer-2".to_owned(), ..original.clone() }, ["tokenizer", "tokenizer-2", "tokenizer-1"]),
        (Card { template: "template-2".to_owned(), ..original.clone() }, ["template", "template-2", "template-1"]),
        (Card { digest: "digest-2".to_owned(), ..original.clone() }, ["tensors", "digest-2", seven().digest()]),
    ] {
        other.write(&plan).expect("writable");
        assert_names(&Registry::open(dir.path(), &against()).expect_err("another world"), &expected);
    }
    fs::write(plan.join("card.toml"), "alias = \"plan\"\nalais = 1").expect("writable");
    assert_names(&Registry::open(dir.path(), &against()).expect_err("a misspelt key"), &["card.toml", "alais"]);
}

#[test]
fn an_adapter_without_a_card_loads_under_its_folders_name_with_a_warning() {
    let dir = library();
    let (registry, warnings) = Registry::open(dir.path(), &against()).expect("two adapters");
    let aliases: Vec<&str> = registry.entries().iter().map(|e| e.stage.alias.as_str()).collect();
    assert_eq!(aliases, ["plan", "search"]);
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("search: no card.toml"), "{warning}");
    fs::rename(dir.path().join("search"), dir.path().join("Search!")).expect("movable");
    assert_names(&Registry::open(dir.path(), &against()).expect_err("no legal name"), &["Search!", "card.toml"]);
}

#[test]
fn an_alias_names_one_adapter() {
    let dir = library();
    card("plan", &seven()).write(&dir.path().join("search")).expect("writable");
    let error = Registry::open(dir.path(), &against()).expect_err("two plans");
    assert_names(&error, &["two adapters have the alias plan", "search"]);
    fs::remove_dir_all(dir.path().join("search")).expect("removable");
    fs::create_dir(dir.path().join(".plan.part")).expect("writable");
    peft::write(&dir.path().join(".plan.part"), &seven(), "tiny").expect("writable");
    let (registry, _) = Registry::open(dir.path(), &against()).expect("an unfinished write is none");
    assert_eq!(registry.entries().len(), 1);
    let error = registry.need(&capability("serach")).expect_err("unknown");
    assert_names(&error, &["serach", "known: plan"]);
    let nothing = tempfile::tempdir().expect("a folder");
    assert_names(&Registry::open(nothing.path(), &against()).expect_err("empty"), &["holds no adapter"]);
}

#[test]
fn a_swap_leaves_the_old_adapter_to_whoever_holds_it() {
    let entry = |alias: &str, seed| {
        let adapter = Arc::new(adapter(&lora(2, 4.0, &[Projection::VProj]), &tiny(), seed));
        Entry { stage: Stage::builtin(&capability(alias)), adapter, card: None }
    };
    let mut registry = Registry::default();
    registry.register(entry("plan", 1)).expect("a new alias");
    registry.register(entry("search", 2)).expect("a new alias");
    assert_names(&registry.register(entry("plan", 3)).expect_err("taken"), &["plan"]);
    let lease = Arc::clone(&registry.need(&capability("plan")).expect("known").adapter);
    let (held, other) = (lease.digest().to_owned(), registry.entries()[1].adapter.digest().to_owned());
    let old = registry.swap(entry("plan", 4)).expect("known");
    assert_eq!((lease.digest(), old.adapter.digest()), (held.as_str(), held.as_str()));
    assert_ne!(registry.need(&capability("plan")).expect("known").adapter.digest(), held);
    assert_eq!(registry.entries()[1].adapter.digest(), other);
    assert_names(&registry.swap(entry("write", 5)).expect_err("unknown"), &["write", "plan, search"]);
}
