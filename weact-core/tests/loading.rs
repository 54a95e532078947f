//! Checkpoints that are broken, edited by hand or spelled otherwise: applied, or refused by name before a weight is read.

mod common;

use std::{fs, path::Path};

use burn::tensor::{DType, Device};
use common::{
    SHARDS, Weights, assert_names, edit_json, edit_weights, hidden, load, logits, max_difference, rename, tiny, values, weights,
    write_checkpoint, write_sharded, write_weights,
};
use serde_json::{Value, json};
use weact_core::{
    io::{
        checkpoint::{self, Checkpoint, dims},
        hf_config,
    },
    lora::Projection,
    model::{
        Config,
        config::{Family, Rope, Scaling},
    },
};

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const Q_PROJ: &str = "model.layers.0.self_attn.q_proj.weight";

/// Writes a checkpoint of `config`, changes the folder, opens it: an error that names everything in `expected`, or, where that is
/// empty, a checkpoint.
fn check(config: &Config, write: fn(&Path, &Config), change: impl FnOnce(&Path), expected: &[&str]) {
    let dir = tempfile::tempdir().expect("a folder");
    write(dir.path(), config);
    change(dir.path());
    match Checkpoint::open(dir.path(), false) {
        Ok(_) => assert!(expected.is_empty(), "opened, though it should name {expected:?}"),
        Err(error) if expected.is_empty() => panic!("{error}"),
        Err(error) => assert_names(&error, expected),
    }
}

fn check_tensors(config: &Config, edit: fn(&mut Weights), expected: &[&str]) {
    check(config, write_checkpoint, |dir| edit_weights(&dir.join(FILE), edit), expected);
}

fn check_config(key: &str, value: Value, expected: &[&str]) {
    let change = |dir: &Path| {
        edit_json(&dir.join("config.json"), |config| {
            config.insert(key.to_owned(), value);
        })
    };
    check(&tiny(), write_checkpoint, change, expected);
}

#[test]
fn index_and_shards_are_compared_and_all_differences_named_at_once() {
    let remove = |dir: &Path| fs::remove_file(dir.join(SHARDS[1])).expect("it is there");
    let renamed = "model.layers.0.mlp.down_proj.weight";
    let rename = |dir: &Path| edit_weights(&dir.join(SHARDS[0]), |w| rename(w, renamed, "other"));
    let both = |dir: &Path| {
        remove(dir);
        rename(dir);
    };
    check(&tiny(), write_sharded, |_| {}, &[]);
    check(&tiny(), write_sharded, remove, &[SHARDS[1], "incomplete download?"]);
    check(&tiny(), write_sharded, rename, &[renamed, "other"]);
    check(&tiny(), write_sharded, both, &[SHARDS[1], renamed, "other"]);
    let in_wrong_shard = |dir: &Path| edit_json(&dir.join(INDEX), |i| i["weight_map"][renamed] = json!(SHARDS[1]));
    check(&tiny(), write_sharded, in_wrong_shard, &[renamed, SHARDS[0], SHARDS[1]]);
    let twice = |dir: &Path| edit_weights(&dir.join(SHARDS[1]), |w| w.extend(weights(&tiny()).remove_entry(Q_PROJ)));
    check(&tiny(), write_sharded, twice, &[Q_PROJ, SHARDS[0], SHARDS[1]]);
    for path in ["../model.safetensors", "/etc/passwd", "sub/shard.safetensors", "", ".."] {
        let names_a_path = |dir: &Path| edit_json(&dir.join(INDEX), |i| i["weight_map"][renamed] = json!(path));
        check(&tiny(), write_sharded, names_a_path, &[INDEX, "no plain file name"]);
    }
    let stale_single = |dir: &Path| write_weights(&dir.join(FILE), &weights(&tiny()));
    check(&tiny(), write_sharded, stale_single, &[INDEX, "remove one of the two"]);
    check(&tiny(), write_sharded, |dir| fs::write(dir.join(INDEX), "{}").expect("writable"), &[INDEX, "weight_map"]);
    check(&tiny(), write_checkpoint, |dir| fs::remove_file(dir.join(FILE)).expect("it is there"), &["neither"]);
}

#[test]
fn a_broken_file_is_refused_whole() {
    let with_header = |header: &str, n_data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; n_data]);
        bytes
    };
    let tensor = |shape: &str, offsets: &str| {
        with_header(&format!(r#"{{"x":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#), 4)
    };
    let broken = [
        Vec::new(),
        b"garbage".to_vec(),
        vec![0xff; 4096],
        (1_u64 << 40).to_le_bytes().to_vec(),
        with_header("{}", 4),
        with_header("[1]", 0),
        tensor("[1]", "[-4,0]"),
        tensor("[1]", "[4,0]"),
        tensor("[1]", "[4,8]"),
        tensor("[2]", "[0,4]"),
        tensor("[-1]", "[0,4]"),
        tensor("[1]", "[0,18446744073709551615]"),
        tensor("[18446744073709551615,2]", "[0,4]"),
        tensor("[4294967296,4294967296]", "[0,4]"),
    ];
    for bytes in broken {
        let replace = |dir: &Path| fs::write(dir.join(FILE), &bytes).expect("writable");
        check(&tiny(), write_checkpoint, replace, &[FILE, "no whole safetensors file"]);
    }
    for n_lost in [1, 4, 1000] {
        let cut = |dir: &Path| {
            let bytes = fs::read(dir.join(FILE)).expect("readable");
            fs::write(dir.join(FILE), &bytes[..bytes.len() - n_lost]).expect("writable");
        };
        check(&tiny(), write_checkpoint, cut, &[FILE, "incomplete download?"]);
    }
}

#[test]
fn tensors_that_are_missing_left_over_or_misshapen_are_named() {
    let wrong = |w: &mut Weights| {
        w.remove("model.norm.weight").expect("a norm");
        rename(w, Q_PROJ, "model.layers.7.self_attn.q_proj.weight");
        w.get_mut("model.layers.1.mlp.up_proj.weight").expect("a tensor").0 = vec![32, 48];
    };
    let expected = [
        "4 tensors",
        "model.norm.weight is missing",
        "q_proj.weight is missing",
        "model.layers.7.self_attn.q_proj.weight is in the file",
        "up_proj.weight has the shape [32, 48], config.json makes it [48, 32]",
    ];
    check_tensors(&tiny(), wrong, &expected);
    let stray: fn(&mut Weights) = |w| {
        w.insert("model.layers.0.mlp.gate_proj.bias".to_owned(), (vec![48], vec![0.0; 48]));
    };
    check_tensors(&tiny(), stray, &["model.layers.0.mlp.gate_proj.bias"]);
    let old_llama: fn(&mut Weights) = |w| {
        w.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), (vec![8], vec![0.0; 8]));
    };
    check_tensors(&tiny(), old_llama, &[]);
    check_config("num_hidden_layers", json!(4_000_000_000_u32), &["num_hidden_layers"]);
}

#[test]
fn an_element_type_that_is_not_read_is_named_when_the_checkpoint_is_opened() {
    let as_integers = |dir: &Path| {
        let bytes = fs::read(dir.join(FILE)).expect("readable");
        let len = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let header = String::from_utf8(bytes[8..len].to_vec()).expect("text").replace("F32", "I32");
        fs::write(dir.join(FILE), [&bytes[..8], header.as_bytes(), &bytes[len..]].concat()).expect("writable");
    };
    check(&tiny(), write_checkpoint, as_integers, &["I32", "f32, f16 and bf16 are read"]);
}

#[test]
fn biases_follow_the_family_and_none_is_dropped() {
    let qwen2 = Config { family: Family::Qwen2, qkv_bias: true, ..tiny() };
    let qwen3 = Config { qkv_bias: true, o_bias: true, ..tiny() };
    let llama = Config { family: Family::Llama, mlp_bias: true, ..tiny() };
    for (config, bias) in [
        (&qwen2, "model.layers.1.self_attn.k_proj.bias"),
        (&qwen3, "model.layers.1.self_attn.o_proj.bias"),
        (&llama, "model.layers.0.mlp.down_proj.bias"),
    ] {
        check(config, write_checkpoint, |_| {}, &[]);
        let without = |dir: &Path| edit_weights(&dir.join(FILE), |w| drop(w.remove(bias)));
        check(config, write_checkpoint, without, &[bias, "is missing"]);
    }
    let dir = tempfile::tempdir().expect("a folder");
    write_checkpoint(dir.path(), &qwen2);
    let with = logits(&load(&Checkpoint::open(dir.path(), false).expect("whole")), None);
    edit_weights(&dir.path().join(FILE), |w| w.get_mut("model.layers.1.self_attn.v_proj.bias").expect("a bias").1.fill(0.0));
    let without = logits(&load(&Checkpoint::open(dir.path(), false).expect("whole")), None);
    assert!(max_difference(&with, &without) > 1e-3);
}

#[test]
fn a_missing_head_is_never_made_up() {
    let dir = tempfile::tempdir().expect("a folder");
    write_checkpoint(dir.path(), &tiny());
    let tied = logits(&load(&Checkpoint::open(dir.path(), false).expect("whole")), None);
    edit_json(&dir.path().join("config.json"), |c| c["tie_word_embeddings"] = json!(false));
    let error = Checkpoint::open(dir.path(), false).expect_err("no head");
    assert_names(&error, &["tie_word_embeddings", "lm_head.weight", "--tie-embeddings"]);
    let backbone = load(&Checkpoint::open(dir.path(), true).expect("the override"));
    assert_eq!(logits(&backbone, None), tied);
    let by_hand = values(hidden(&backbone, None).matmul(backbone.embedding.clone().transpose()));
    assert!(max_difference(&by_hand, &tied) < 1e-4);
}

#[test]
fn a_head_beside_a_tied_embedding_must_equal_it() {
    let copy: fn(&mut Weights) = |w| {
        let embedding = w["model.embed_tokens.weight"].clone();
        w.insert("lm_head.weight".to_owned(), embedding);
    };
    let other: fn(&mut Weights) = |w| {
        let (shape, values) = w["model.embed_tokens.weight"].clone();
        w.insert("lm_head.weight".to_owned(), (shape, values.iter().map(|x| x + 0.1).collect()));
    };
    check_tensors(&tiny(), copy, &[]);
    check_tensors(&tiny(), other, &["tie_word_embeddings", "lm_head.weight", "differs"]);
    check_tensors(&Config { tied: false, ..tiny() }, |_| {}, &[]);
}

#[test]
fn an_explicit_head_dim_wins_everywhere() {
    let config = tiny();
    assert_ne!(config.head_dim, config.hidden_size / config.n_heads);
    assert_eq!(
        [Projection::QProj, Projection::KProj, Projection::OProj].map(|p| dims(&config, p)),
        [(32, 64), (32, 32), (64, 32)]
    );
    assert_eq!(config.n_parameters(), weights(&config).values().map(|(_, values)| values.len()).sum::<usize>());
    let derived = |dir: &Path| edit_json(&dir.join("config.json"), |c| drop(c.insert("head_dim".to_owned(), json!(8))));
    check(&config, write_checkpoint, derived, &[Q_PROJ, "[64, 32]", "[32, 32]"]);
}

#[test]
fn what_is_written_reads_back_the_same_and_writes_the_same_bytes() {
    let yarn = Scaling::Yarn {
        factor: 4.0,
        original_max: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 1.25,
        truncate: false,
    };
    let llama3 = Scaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max: 64.0 };
    let rope = |scaling| Rope { theta: 500_000.0, scaling };
    for config in [
        tiny(),
        Config { rope: rope(yarn), tied: false, ..tiny() },
        Config { family: Family::Llama, rope: rope(llama3), qkv_bias: true, o_bias: true, mlp_bias: true, ..tiny() },
        Config { family: Family::Qwen2, qkv_bias: true, ..tiny() },
    ] {
        let (first, second) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        write_checkpoint(first.path(), &config);
        let checkpoint = Checkpoint::open(first.path(), false).expect("whole");
        assert_eq!(checkpoint.config, config);
        checkpoint::write(second.path(), &load(&checkpoint)).expect("writable");
        let again = Checkpoint::open(second.path(), false).expect("whole");
        assert_eq!(again.digest(), checkpoint.digest());
        for file in ["config.json", FILE] {
            let bytes = fs::read(second.path().join(file)).expect("readable");
            checkpoint::write(second.path(), &load(&again)).expect("writable");
            assert_eq!(fs::read(second.path().join(file)).expect("readable"), bytes, "{file}");
        }
    }
}

/// Against f32, relative in norm, within four units of rounding of the dtype. The largest measured on `flex` over the golden
/// checkpoints are 2.7 (bf16, 2.1e-2) and 2.5 (f16, 2.5e-3): activations are stored in the dtype, sums run in f32.
#[test]
fn a_narrow_dtype_works_or_is_refused_with_the_one_to_use() {
    let norm = |values: &[f32]| values.iter().map(|x| x * x).sum::<f32>().sqrt();
    let dir = tempfile::tempdir().expect("a folder");
    write_checkpoint(dir.path(), &tiny());
    let checkpoint = Checkpoint::open(dir.path(), false).expect("whole");
    let exact = logits(&load(&checkpoint), None);
    for (dtype, unit) in [(DType::BF16, 2_f32.powi(-7)), (DType::F16, 2_f32.powi(-10))] {
        match checkpoint.load(&Device::flex(), dtype) {
            Ok(backbone) => {
                let difference: Vec<f32> = logits(&backbone, None).iter().zip(&exact).map(|(a, b)| a - b).collect();
                let error = norm(&difference) / norm(&exact);
                assert!(error > 0.0 && error < 4.0 * unit, "{dtype:?}: {error}");
            }
            Err(error) => assert_names(&error, &["--dtype f32"]),
        }
    }
}

/// The configuration of a golden checkpoint in the older spelling, with the kind of scaling under `key`.
fn respelled(case: &str, key: &str) -> (Config, Config) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case);
    let dir = tempfile::tempdir().expect("a folder");
    fs::copy(golden.join("config.json"), dir.path().join("config.json")).expect("a config");
    edit_json(&dir.path().join("config.json"), |config| {
        let Some(Value::Object(mut rope)) = config.remove("rope_parameters") else { panic!("{case} has rope_parameters") };
        config.insert("rope_theta".to_owned(), rope.remove("rope_theta").expect("a theta"));
        let kind = rope.remove("rope_type").expect("a kind");
        let scaling = if kind == "default" {
            Value::Null
        } else {
            rope.insert(key.to_owned(), kind);
            Value::Object(rope)
        };
        config.insert("rope_scaling".to_owned(), scaling);
    });
    (hf_config::read(&golden).expect("the newer spelling"), hf_config::read(dir.path()).expect("the older spelling"))
}

#[test]
fn both_spellings_of_rotary_settings_give_the_same_model() {
    for case in ["qwen3-sharded-bf16", "qwen3-tied", "qwen3-yarn", "qwen2-bias", "llama", "llama3-rope"] {
        for key in ["rope_type", "type"] {
            let (newer, older) = respelled(case, key);
            assert_eq!(newer, older, "{case} with {key}");
        }
    }
}

#[test]
fn rotary_scaling_is_applied_or_refused_by_name() {
    let dir = tempfile::tempdir().expect("a folder");
    write_checkpoint(dir.path(), &tiny());
    let mut runs = Vec::new();
    for scaling in [json!(null), json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})] {
        edit_json(&dir.path().join("config.json"), |c| drop(c.insert("rope_scaling".to_owned(), scaling)));
        runs.push(logits(&load(&Checkpoint::open(dir.path(), false).expect("whole")), None));
    }
    assert!(max_difference(&runs[0][64 * 300..], &runs[1][64 * 300..]) > 1e-2);
    for (scaling, expected) in [
        (json!({"rope_type": "foo"}), ["rope_type", "foo"]),
        (json!({"type": "linear", "factor": 2.0}), ["rope_type", "linear"]),
        (json!({"type": "yarn", "rope_type": "linear", "factor": 2.0}), ["yarn", "linear"]),
        (json!({"factor": 4.0}), ["factor", "rope_type"]),
        (json!({"rope_type": "yarn", "factor": 4.0, "mystery": 1}), ["mystery", "rope_scaling"]),
        (json!({"rope_type": "yarn", "factor": "4"}), ["factor", "number"]),
        (json!({"rope_type": "llama3", "factor": 8.0}), ["low_freq_factor", "missing"]),
        (json!({"rope_theta": 5.0}), ["rope_theta", "twice"]),
        (json!("yarn"), ["rope_scaling", "yarn"]),
    ] {
        check_config("rope_scaling", scaling, &expected);
    }
    check_config("rope_scaling", json!({"rope_type": "default", "factor": 1}), &[]);
    check_config("rope_parameters", json!({"rope_theta": 10000, "partial_rotary_factor": 1}), &[]);
    check_config("rope_parameters", json!({"partial_rotary_factor": 0.5}), &["partial_rotary_factor"]);
}

#[test]
fn an_active_sliding_window_is_refused_in_every_spelling_and_an_inactive_one_is_not() {
    let with = |keys: Value| {
        move |dir: &Path| edit_json(&dir.join("config.json"), |c| c.extend(keys.as_object().expect("keys").clone()))
    };
    let (qwen, llama) = (tiny(), Config { family: Family::Llama, ..tiny() });
    for (config, keys, expected) in [
        (&qwen, json!({"use_sliding_window": true, "sliding_window": 16}), "sliding_window"),
        (&qwen, json!({"use_sliding_window": true}), "sliding_window"),
        (&qwen, json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types"),
        (&qwen, json!({"layer_types": "sliding_attention"}), "layer_types"),
        (&llama, json!({"sliding_window": 16}), "sliding_window"),
        (&qwen, json!({"attention_chunk_size": 16}), "attention_chunk_size"),
    ] {
        check(config, write_checkpoint, with(keys), &[expected]);
    }
    for keys in [
        json!({"use_sliding_window": false, "sliding_window": 16, "max_window_layers": 1}),
        json!({"sliding_window": 4096}),
        json!({"use_sliding_window": true, "sliding_window": null}),
        json!({"layer_types": ["full_attention", "full_attention"], "use_sliding_window": false, "sliding_window": null}),
    ] {
        check(&qwen, write_checkpoint, with(keys), &[]);
    }
}

/// TINY's configuration with every key that real files carry.
fn full_config() -> serde_json::Map<String, Value> {
    let Value::Object(mut config) = hf_config::write_value(&tiny(), "float32") else { unreachable!("an object") };
    let Value::Object(more) = json!({
        "attention_dropout": 0.0, "bos_token_id": 3, "eos_token_id": [2], "initializer_range": 0.02, "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 2, "pad_token_id": 0, "rope_scaling": null, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": null, "transformers_version": "5.24.0", "use_cache": true, "use_sliding_window": false})
    else {
        unreachable!("an object")
    };
    config.extend(more);
    config
}

fn read_config(config: &serde_json::Map<String, Value>) -> weact_core::Result<Config> {
    let dir = tempfile::tempdir().expect("a folder");
    fs::write(dir.path().join("config.json"), Value::Object(config.clone()).to_string()).expect("writable");
    hf_config::read(dir.path())
}

#[test]
fn a_key_that_is_absent_null_or_of_another_type_takes_its_default_or_is_named() {
    let full = full_config();
    assert_eq!(read_config(&full).expect("the whole file"), tiny());
    let odd =
        [json!("x"), json!(""), json!(-1), json!(0), json!(1.5), json!(1e300), json!([]), json!({}), json!(true), json!([null])];
    let changes = odd.into_iter().map(Some).chain([Some(Value::Null), None]);
    for change in changes {
        for key in full.keys() {
            let mut config = full.clone();
            match &change {
                Some(value) => drop(config.insert(key.clone(), value.clone())),
                None => drop(config.shift_remove(key)),
            }
            if let Err(error) = read_config(&config) {
                assert_names(&error, &[key, "config.json"]);
            }
        }
    }
}

#[test]
fn absent_keys_take_the_defaults_of_transformers() {
    let without = |keys: &[&str]| {
        let mut config = full_config();
        keys.iter().for_each(|key| drop(config.shift_remove(*key)));
        read_config(&config)
    };
    let theta = |theta| Rope { theta, scaling: Scaling::Default };
    for (keys, expected) in [
        (&["head_dim"][..], Config { head_dim: 128, ..tiny() }),
        (&["rms_norm_eps"], tiny()),
        (&["max_position_embeddings"], Config { max_positions: 32768, ..tiny() }),
        (&["tie_word_embeddings"], Config { tied: false, ..tiny() }),
        (&["rope_theta", "rope_parameters"], Config { rope: theta(10000.0), ..tiny() }),
        (&["attention_bias", "hidden_act", "layer_types", "torch_dtype", "architectures", "use_cache"], tiny()),
    ] {
        assert_eq!(without(keys).expect("optional keys"), expected, "{keys:?}");
    }
    for key in ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"] {
        assert_names(&without(&[key]).expect_err("a needed key"), &[key, "missing", "config.json"]);
    }
    let mut null_heads = full_config();
    null_heads.insert("num_key_value_heads".to_owned(), Value::Null);
    assert_eq!(read_config(&null_heads).expect("null").n_kv_heads, tiny().n_heads);
}

#[test]
fn a_key_that_would_change_the_model_is_refused_by_name() {
    for (key, value) in [
        ("hidden_act", json!("gelu")),
        ("num_experts", json!(8)),
        ("quantization_config", json!({"bits": 4})),
        ("partial_rotary_factor", json!(0.5)),
        ("attention_bias", json!("yes")),
        ("model_type", json!("mistral")),
        ("head_dim", json!(15)),
        ("num_key_value_heads", json!(3)),
    ] {
        check_config(key, value, &[key, "config.json"]);
    }
}
