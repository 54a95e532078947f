//! Merges of adapter folders: what today's tools merge wrongly without a word is right here, or refused by adapter and module.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use tempfile::TempDir;
use weact_core::{
    Adapter,
    adapter::PlainFactors,
    card::Card,
    io::peft,
    lora::Module,
    ops::{PlainMatrix, product},
};
use weact_train::{
    Result,
    merge::{
        Method, Preset, Rank, Recipe, Record,
        files::{self, Existing},
    },
};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

/// PEFT's own adapters `plan`, `search` and `write`, copied.
fn library() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["plan", "search", "write"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/merging/adapters").join(name);
        fs::create_dir(folder.path().join(name)).expect("writable");
        for file in [CONFIG, TENSORS] {
            fs::write(folder.path().join(name).join(file), fs::read(from.join(file)).expect("kept")).expect("writable");
        }
    }
    folder
}

fn dirs(folder: &TempDir, names: &[&str]) -> Vec<PathBuf> {
    names.iter().map(|name| folder.path().join(name)).collect()
}

fn merge(folder: &TempDir, names: &[&str], recipe: &Recipe) -> Result<(Adapter, Record)> {
    let inputs = files::open(&dirs(folder, names), false)?;
    let out = folder.path().join("merged");
    let record = files::to_files(&out, &inputs, recipe, None, Existing::Overwrite)?;
    Ok((peft::read(&out)?, record))
}

fn refused(folder: &TempDir, names: &[&str], recipe: &Recipe, parts: &[&str]) {
    let error = merge(folder, names, recipe).expect_err("it is refused").to_string();
    assert!(parts.iter().all(|part| error.contains(part)), "{error} should say {parts:?}");
    assert!(!folder.path().join("merged").exists(), "nothing is left of it: {error}");
}

fn recipe(method: Method) -> Recipe {
    method.recipe(Preset::Peft)
}

fn edit(folder: &TempDir, name: &str, change: impl FnOnce(&mut Value)) {
    let path = folder.path().join(name).join(CONFIG);
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).expect("there")).expect("JSON");
    change(&mut config);
    fs::write(path, config.to_string()).expect("writable");
}

fn update(f: &PlainFactors, scale: f64) -> Vec<f32> {
    let b: Vec<f32> = f.b.iter().map(|x| (f64::from(*x) * scale) as f32).collect();
    product(PlainMatrix::new(&b, f.rank, f.d_out).transposed(), PlainMatrix::new(&f.a, f.d_in, f.rank).transposed())
}

fn products(adapter: &Adapter) -> BTreeMap<Module, Vec<f32>> {
    adapter.plain().iter().map(|(m, f)| (*m, update(f, adapter.config().scale_of(*m)))).collect()
}

fn check_equal(found: &Adapter, expected: &BTreeMap<Module, Vec<f32>>) {
    assert_eq!(found.plain().len(), expected.len());
    for (module, found) in products(found) {
        let (mut apart, mut norm) = (0.0, 0.0);
        for (x, y) in found.iter().zip(&expected[&module]) {
            apart += f64::from(x - y).powi(2);
            norm += f64::from(*y).powi(2);
        }
        assert!(apart.sqrt() <= 1e-5 * norm.sqrt(), "{}: {:.2e}", module.path(), (apart / norm).sqrt());
    }
}

fn is_plain(adapter: &Adapter) {
    let config = adapter.config();
    assert!(!config.rslora && config.rank_pattern.is_empty() && config.alpha_pattern.is_empty());
    assert!(adapter.plain().iter().all(|(m, f)| f.rank == config.rank && config.scale_of(*m) == 1.0));
}

/// huggingface/peft#3449, #3737: a merge took over `use_rslora` and the first adapter's patterns.
#[test]
fn scales_and_patterns_of_sources_act_and_are_not_inherited() {
    let folder = library();
    edit(&folder, "search", |c| c["use_rslora"] = json!(true));
    edit(&folder, "plan", |c| {
        c["r"] = json!(9);
        c["rank_pattern"] =
            json!({"q_proj": 4, "k_proj": 4, "v_proj": 4, "o_proj": 4, "gate_proj": 4, "up_proj": 4, "down_proj": 4});
        c["alpha_pattern"] = json!({"layers.1.self_attn.q_proj": 1.0});
    });
    let sources = dirs(&folder, &["plan", "search"]).iter().map(|dir| peft::read(dir).expect("readable")).collect::<Vec<_>>();
    let mut sum = products(&sources[0]);
    for (module, other) in products(&sources[1]) {
        sum.get_mut(&module).expect("the same targets").iter_mut().zip(other).for_each(|(a, b)| *a += b);
    }
    let (merged, _) = merge(&folder, &["plan", "search"], &recipe(Method::Additive)).expect("they fit");
    is_plain(&merged);
    check_equal(&merged, &sum);
    for method in Method::ALL {
        let (merged, _) = merge(&folder, &["plan", "search", "write"], &recipe(method)).expect("they fit");
        is_plain(&merged);
    }
}

/// huggingface/peft#1155: weights 1, 0, 0 did not give the first adapter.
#[test]
fn one_hot_weights_give_that_adapter() {
    let folder = library();
    for method in [Method::Linear, Method::Svd] {
        let one_hot = Recipe { weights: vec![0.0, 1.0, 0.0], ..recipe(method) };
        let (merged, _) = merge(&folder, &["plan", "search", "write"], &one_hot).expect("they fit");
        check_equal(&merged, &products(&peft::read(&folder.path().join("search")).expect("readable")));
    }
}

/// PEFT 0.21.2 merges a single adapter linearly at its own rank, whatever was asked for.
#[test]
fn a_single_adapter_is_trimmed_and_truncated_like_several() {
    let folder = library();
    let (merged, record) = merge(&folder, &["search"], &Recipe { rank: Rank::At(2), ..recipe(Method::Ties) }).expect("it fits");
    assert_eq!(merged.config().rank, 2);
    assert!(record.modules.iter().all(|m| m.kept < 0.9 && m.trim_margin.is_some()));
}

/// huggingface/peft#654: making a merge changed its sources.
#[test]
fn sources_are_left_as_they_are_and_the_same_merge_gives_the_same_bytes() {
    let folder = library();
    let bytes = |name: &str| [CONFIG, TENSORS].map(|file| fs::read(folder.path().join(name).join(file)).expect("there"));
    let before = ["plan", "search", "write"].map(bytes);
    let mut made = Vec::new();
    for names in [["plan", "search", "write"], ["write", "plan", "search"]] {
        merge(&folder, &names, &recipe(Method::DareTies)).expect("they fit");
        made.push((bytes("merged"), fs::read(folder.path().join("merged").join(files::FILE)).expect("there")));
    }
    assert!(made[0] == made[1]);
    assert!(before == ["plan", "search", "write"].map(bytes));
    let other = Recipe {
        drop: recipe(Method::DareTies).drop.map(|d| weact_train::merge::recipe::Drop { seed: 1, ..d }),
        ..recipe(Method::DareTies)
    };
    merge(&folder, &["plan", "search", "write"], &other).expect("they fit");
    assert!(made[0].0 != bytes("merged"), "another seed, another mask");
}

/// huggingface/peft#3761, #3775, #1615: dora, kasa, biases and saved modules were merged silently wrong, or lost.
#[test]
fn what_a_merge_would_lose_is_refused_by_name() {
    let cases = [
        ("use_dora", json!(true)),
        ("lora_bias", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("kasa_config", json!({"beta": 1})),
        ("init_lora_weights", json!("pissa")),
        ("peft_type", json!("LOHA")),
    ];
    for (key, value) in cases {
        let folder = library();
        edit(&folder, "search", |c| c[key] = value);
        refused(&folder, &["plan", "search"], &recipe(Method::Ties), &["search", key]);
    }
}

#[test]
fn bad_numbers_are_refused() {
    let folder = library();
    let all = ["plan", "search", "write"];
    let with = |change: &dyn Fn(&mut Recipe)| {
        let mut changed = recipe(Method::DareTies);
        change(&mut changed);
        changed
    };
    refused(&folder, &all, &with(&|r| r.weights = vec![1.0, 2.0]), &["2 weights for 3 adapters (plan, search, write)"]);
    refused(&folder, &all, &with(&|r| r.weights = vec![0.0; 3]), &["all weights are zero"]);
    refused(&folder, &all, &with(&|r| r.weights = vec![1.0, f64::NAN, 1.0]), &["adapter search"]);
    for density in [0.0, -0.5, 1.5, f64::NAN] {
        refused(&folder, &all, &with(&|r| r.trim.as_mut().expect("it trims").density = density), &["the density is"]);
    }
    for rate in [-0.1, 1.1, f64::NAN] {
        refused(&folder, &all, &with(&|r| r.drop.as_mut().expect("it drops").rate = rate), &["the drop rate is"]);
    }
    refused(&folder, &all, &with(&|r| r.rank = Rank::At(0)), &["at least 1"]);
    refused(&folder, &all, &with(&|r| r.rank = Rank::At(17)), &["rank 17", "k_proj", "adapter plan", "at most 16"]);
    refused(&folder, &all, &with(&|r| r.rank = Rank::Exact), &["no exact low rank"]);
    let mergekit = Recipe { weights: vec![1.0, -1.0, 1.0], ..Method::Ties.recipe(Preset::Mergekit) };
    refused(&folder, &all, &mergekit, &["turn the sign"]);
    refused(&folder, &["plan", "plan"], &recipe(Method::Ties), &["two adapters are called plan"]);
}

#[test]
fn adapters_that_do_not_fit_each_other_are_refused_by_adapter_and_module() {
    let folder = library();
    // A rank of 8 where the others have 4.
    let apart = Recipe { space: weact_train::merge::Space::Factors, ..recipe(Method::Linear) };
    refused(&folder, &["plan", "search"], &apart, &["adapter plan has rank 4", "adapter search 8"]);

    let write = peft::read(&folder.path().join("write")).expect("readable");
    let mut fewer = write.plain().clone();
    fewer.retain(|m, _| m.projection.name() != "up_proj");
    let mut config = write.config().clone();
    config.targets.retain(|p| p.name() != "up_proj");
    fs::create_dir(folder.path().join("fewer")).expect("writable");
    peft::write(&folder.path().join("fewer"), &Adapter::new(config, fewer).expect("whole"), "tiny-qwen3").expect("writable");
    refused(
        &folder,
        &["plan", "fewer"],
        &recipe(Method::Ties),
        &["adapter fewer has no factors for model.layers.0.mlp.up_proj", "adapter plan"],
    );
    let union = Recipe { union: true, ..recipe(Method::Ties) };
    let (merged, _) = merge(&folder, &["plan", "fewer"], &union).expect("a union");
    assert_eq!(merged.plain().len(), write.plain().len());
    fs::remove_dir_all(folder.path().join("merged")).expect("there");

    let mut wider = write.plain().clone();
    for f in wider.values_mut() {
        f.d_in += 1;
        f.a.extend(vec![0.0; f.rank]);
    }
    fs::create_dir(folder.path().join("wider")).expect("writable");
    let wider = Adapter::new(write.config().clone(), wider).expect("whole");
    peft::write(&folder.path().join("wider"), &wider, "tiny-qwen3").expect("writable");
    refused(&folder, &["plan", "wider"], &recipe(Method::Ties), &["adapter plan has [", "adapter wider ["]);

    edit(&folder, "write", |c| c["base_model_name_or_path"] = json!("another"));
    refused(&folder, &["plan", "write"], &recipe(Method::Ties), &["\"tiny-qwen3\"", "\"another\"", "--any-base"]);
}

/// arcee-ai/mergekit#73: broken numbers went through.
#[test]
fn a_number_that_is_not_finite_stops_the_merge_with_adapter_and_tensor() {
    let folder = library();
    let path = folder.path().join("search").join(TENSORS);
    let mut bytes = fs::read(&path).expect("there");
    let n = bytes.len();
    bytes[n - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).expect("writable");
    refused(&folder, &["plan", "search"], &recipe(Method::Ties), &["adapter search", "lora_", "not finite"]);
}

fn card(base: &str, tokenizer: &str, dir: &Path) {
    let text = format!(
        "alias = \"{}\"\ndescription = \"d\"\nactivation = \"a\"\ndigest = \"{}\"\nbase = \"{base}\"\ntokenizer = \"{tokenizer}\"\n\
         template = \"t\"\ntool_protocol = \"text\"\nthink = \"preserve\"\n[retention]\nkeep_tool_result = 5\n",
        dir.file_name().expect("a name").to_str().expect("text"),
        peft::read(dir).expect("readable").digest(),
    );
    fs::write(dir.join("card.toml"), text).expect("writable");
}

#[test]
fn cards_of_other_bases_or_tokenizers_are_refused_and_agreeing_ones_give_a_card() {
    let folder = library();
    let [plan, search] = ["plan", "search"].map(|name| folder.path().join(name));
    card("base-1", "tokenizer-1", &plan);
    for (base, tokenizer) in [("base-2", "tokenizer-1"), ("base-1", "tokenizer-2")] {
        card(base, tokenizer, &search);
        refused(&folder, &["plan", "search"], &recipe(Method::Ties), &["adapter plan", "adapter search", "-1", "-2"]);
    }
    card("base-1", "tokenizer-1", &search);
    let (merged, record) = merge(&folder, &["plan", "search"], &recipe(Method::Ties)).expect("they agree");
    let card = Card::read(&folder.path().join("merged")).expect("readable").expect("both have one");
    assert_eq!((card.alias.as_str(), card.digest.as_str(), card.base.as_str()), ("merged", merged.digest(), "base-1"));
    let told = card.merge.expect("a merge");
    assert_eq!(
        told.sources.iter().map(|s| s.digest.clone()).collect::<Vec<_>>(),
        record.sources.iter().map(|s| s.digest.clone()).collect::<Vec<_>>()
    );
    assert!(told.kept > 0.0 && told.kept_least <= told.kept && told.trim_margin.is_some() && told.sign_margin.is_some());
}

#[test]
fn nothing_but_an_earlier_merge_is_replaced() {
    let folder = library();
    let inputs = files::open(&dirs(&folder, &["plan", "search"]), false).expect("they agree");
    let to = |out: &Path, existing| files::to_files(out, &inputs, &recipe(Method::Ties), None, existing).map(drop);
    let out = folder.path().join("merged");
    to(&out, Existing::Refuse).expect("new");
    assert!(to(&out, Existing::Refuse).expect_err("there is one").to_string().contains("--overwrite"));
    to(&out, Existing::Overwrite).expect("an earlier merge");
    let foreign = folder.path().join("write");
    assert!(to(&foreign, Existing::Overwrite).expect_err("no merge").to_string().contains("no merge.json"));
    for source in [folder.path().join("plan"), folder.path().to_owned(), folder.path().join("merged/../search")] {
        assert!(to(&source, Existing::Overwrite).expect_err("a source").to_string().contains("choose another"));
    }
}

/// huggingface/peft#3013: `A` and `B` merged apart give (A1 - A2)(B1 + B2), not A1 B1 - A2 B2. By hand, in PEFT's orientation: A1 = [1
/// 2], B1 = [3 4]^T, A2 = [5 6], B2 = [7 8]^T, weights 1 and -1.
#[test]
fn the_exact_family_has_no_cross_terms_and_the_other_is_named() {
    use weact_core::{adapter::LoraConfig, lora::Projection};
    use weact_train::merge::{Source, Space, merge};
    let module = Module { layer: Some(0), projection: Projection::QProj };
    let adapter = |a: [f32; 2], b: [f32; 2]| {
        let factors = PlainFactors { a: a.to_vec(), b: b.to_vec(), d_in: 2, rank: 1, d_out: 2 };
        let config = LoraConfig {
            rank: 1,
            alpha: 1.0,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            rslora: false,
            targets: vec![Projection::QProj],
        };
        Adapter::new(config, BTreeMap::from([(module, factors)])).expect("finite")
    };
    let (one, two) = (adapter([1.0, 2.0], [3.0, 4.0]), adapter([5.0, 6.0], [7.0, 8.0]));
    let sources = [Source::memory("one", &one), Source::memory("two", &two)];
    let made = |space| {
        let rank = if space == Space::Update { Rank::Exact } else { Rank::LargestSource };
        let recipe = Recipe { weights: vec![1.0, -1.0], space, rank, ..recipe(Method::Linear) };
        let (adapter, record) = merge(&sources, &recipe).expect("they fit");
        (products(&adapter)[&module].clone(), serde_json::to_value(record.recipe.space).expect("JSON"))
    };
    // B1 A1 - B2 A2, row-major: [3 6; 4 8] - [35 42; 40 48].
    assert_eq!(made(Space::Update), (vec![-32.0, -36.0, -36.0, -40.0], json!("update")));
    // (B1 + B2)(A1 - A2) = [10 12]^T [-4 -4].
    assert_eq!(made(Space::Factors), (vec![-40.0, -40.0, -48.0, -48.0], json!("factors")));
}
