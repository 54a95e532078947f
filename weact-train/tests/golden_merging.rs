//! Merges against PEFT 0.21.2, and against a numpy implementation that was checked against the code of mergekit, TIES and KnOTS.
//!
//! The values in `golden/merging` were made with the versions that `golden.json` names. Products are compared, since factors of equal
//! products differ. Tolerances: 1e-6 absolute for full updates (f32; no decision is closer than 1.1e-5), 1e-4 relative in Frobenius
//! norm for truncated ones, whose spectral gaps are as narrow as 1.009.

use std::{collections::BTreeMap, fs, path::PathBuf};

use burn::tensor::{DType, Device};
use serde_json::Value;
use weact_core::{
    Adapter,
    adapter::PlainFactors,
    io::{checkpoint::Checkpoint, peft, tensors::Tensors},
    lora::Module,
    ops::{PlainMatrix, product},
};
use weact_train::merge::{
    Merge, Method, Preset, Rank, Recipe, Source, Space,
    elect::{self, Ballot},
    mask::{self, Stream},
    merge,
    recipe::{Consensus, Drop, Election, Lambda, Scope, Trim, Vote},
    trim,
};

const NAMES: [&str; 3] = ["plan", "search", "write"];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/merging")
}

fn json(file: &str) -> Value {
    let text = fs::read_to_string(folder().join(file)).expect("kept beside the test");
    serde_json::from_str(&text).expect("JSON")
}

struct Golden {
    tensors: Tensors,
    adapters: Vec<Adapter>,
}

impl Golden {
    fn open() -> Self {
        let tensors = Tensors::open(&folder().join("golden.safetensors")).expect("kept beside the test");
        let read = |name| peft::read(&folder().join("adapters").join(name)).expect("PEFT's own files");
        Self { tensors, adapters: NAMES.map(read).into() }
    }

    fn sources(&self, names: &[&'static str]) -> Vec<Source<'_>> {
        let place = |name: &str| NAMES.iter().position(|n| *n == name).expect("known");
        names.iter().map(|name| Source::memory(name, &self.adapters[place(name)])).collect()
    }

    fn modules(&self) -> Vec<Module> {
        self.adapters[0].plain().keys().copied().collect()
    }

    /// Every module's values below `prefix`.
    fn values(&self, prefix: &str) -> BTreeMap<Module, Vec<f32>> {
        let read = |m: Module| self.tensors.f32(&format!("{prefix}/{}", m.path())).expect("it is there");
        self.modules().into_iter().map(|m| (m, read(m))).collect()
    }

    /// Every module's product of the golden factors.
    fn products(&self, method: &str) -> BTreeMap<Module, Vec<f32>> {
        let read = |m: Module| {
            let name = |half: &str| format!("fac/{method}/{}/{half}", m.path());
            let shape = |half: &str| self.tensors.entries()[&name(half)].shape.clone();
            let (a, b) = (self.tensors.f32(&name("A")).expect("there"), self.tensors.f32(&name("B")).expect("there"));
            product(PlainMatrix::new(&b, shape("B")[0], shape("B")[1]), PlainMatrix::new(&a, shape("A")[0], shape("A")[1]))
        };
        self.modules().into_iter().map(|m| (m, read(m))).collect()
    }
}

fn update(f: &PlainFactors, scale: f64) -> Vec<f32> {
    let b: Vec<f32> = f.b.iter().map(|x| (f64::from(*x) * scale) as f32).collect();
    product(PlainMatrix::new(&b, f.rank, f.d_out).transposed(), PlainMatrix::new(&f.a, f.d_in, f.rank).transposed())
}

fn products(adapter: &Adapter) -> BTreeMap<Module, Vec<f32>> {
    adapter.plain().iter().map(|(m, f)| (*m, update(f, adapter.config().scale_of(*m)))).collect()
}

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied())
}

fn ties(preset: Preset) -> Recipe {
    Method::Ties.recipe(preset)
}

#[test]
fn the_adapters_updates_are_those_of_peft() {
    let golden = Golden::open();
    for (name, adapter) in NAMES.iter().zip(&golden.adapters) {
        for (module, expected) in golden.values(&format!("delta/{name}")) {
            let found = update(&adapter.plain()[&module], adapter.config().scale_of(module));
            assert!(max_abs(&found, &expected) <= 1e-6, "{name} {}", module.path());
        }
    }
}

#[test]
fn full_updates_are_equal_decision_by_decision() {
    let golden = Golden::open();
    let weights = vec![0.5, 1.0, 2.0];
    let frequency = |recipe: Recipe| match recipe.consensus {
        Consensus::Elect(election) => {
            Recipe { consensus: Consensus::Elect(Election { vote: Vote::Frequency, ..election }), ..recipe }
        }
        _ => unreachable!("TIES elects"),
    };
    let cases = [
        ("full/ties", ties(Preset::Peft)),
        ("full/ties_freq_w", frequency(Recipe { weights: weights.clone(), ..ties(Preset::Peft) })),
        ("full/ties_mergekit_w", Recipe { weights, ..ties(Preset::Mergekit) }),
        ("full/ties_original_global", ties(Preset::Original)),
        ("full/dare_ties", Method::DareTies.recipe(Preset::Peft)),
    ];
    for (name, recipe) in cases {
        let sources = golden.sources(&NAMES);
        let merge = Merge::new(&sources, &recipe).expect("they fit");
        for (module, expected) in golden.values(name) {
            let found = merge.update(module).expect("finite");
            let worst = max_abs(&found, &expected);
            assert!(worst <= 1e-6, "{name} {}: {worst}", module.path());
            let sign = |x: f32| if x == 0.0 { 0 } else { x.signum() as i32 };
            assert!(found.iter().zip(&expected).all(|(x, y)| sign(*x) == sign(*y)), "{name} {}", module.path());
        }
    }
}

#[test]
fn truncated_products_are_equal() {
    let golden = Golden::open();
    let at_8 = |method: Method| Recipe { rank: Rank::At(8), ..method.recipe(Preset::Peft) };
    let weighted = |weights: &[f64], recipe: Recipe| Recipe { weights: weights.to_vec(), ..recipe };
    let apart = |recipe: Recipe| Recipe { space: Space::Factors, rank: Rank::LargestSource, ..recipe };
    let whole = |recipe: Recipe, density, scope| Recipe { trim: Some(Trim { density, scope }), ..recipe };
    let linear = Recipe { rank: Rank::Exact, ..Method::Linear.recipe(Preset::Peft) };
    let two = ["plan", "write"];
    let cases: [(&str, &[&'static str], Recipe); 13] = [
        ("additive_r8", &NAMES, at_8(Method::Additive)),
        ("ties_r8", &NAMES, at_8(Method::Ties)),
        ("dare_ties_r8", &NAMES, at_8(Method::DareTies)),
        ("knots_ties_module_r8", &NAMES, at_8(Method::KnotsTies)),
        ("knots_ties_global_r8", &NAMES, Recipe { rank: Rank::At(8), ..Method::KnotsTies.recipe(Preset::Original) }),
        ("knots_ties_d1", &NAMES, Recipe { rank: Rank::Exact, ..whole(at_8(Method::KnotsTies), 1.0, Scope::Module) }),
        ("peft_svd", &NAMES, at_8(Method::Svd)),
        ("peft_svd_w", &NAMES, weighted(&[1.0, -0.5, 0.25], at_8(Method::Svd))),
        ("peft_ties_svd", &NAMES, at_8(Method::Ties)),
        ("peft_magnitude_prune_svd", &NAMES, at_8(Method::MagnitudePrune)),
        ("peft_cat", &NAMES, weighted(&[1.0, 0.5, 2.0], linear.clone())),
        ("peft_linear_plan_write", &two, weighted(&[0.7, 0.3], apart(linear))),
        ("peft_ties_plan_write", &two, apart(Method::Ties.recipe(Preset::Peft))),
    ];
    for (name, names, recipe) in cases {
        let (adapter, record) = merge(&golden.sources(names), &recipe).expect("they fit");
        assert_eq!(adapter.config().scale_of(golden.modules()[0]), 1.0);
        let expected = golden.products(name);
        for (module, found) in products(&adapter) {
            let error = relative(&found, &expected[&module]);
            assert!(error <= 1e-4, "{name} {}: {error:.2e}", module.path());
        }
        assert!(record.modules.iter().all(|m| m.kept > 0.0 && m.kept <= 1.0), "{name}");
    }
}

#[test]
fn the_closest_decisions_are_reported() {
    let golden = Golden::open();
    let expected = &json("golden.json")["min_relative_margin"];
    for (name, method) in [("ties", Method::Ties), ("dare_ties", Method::DareTies)] {
        let (_, record) = merge(&golden.sources(&NAMES), &method.recipe(Preset::Peft)).expect("they fit");
        let trim = record.modules.iter().filter_map(|m| m.trim_margin).fold(f64::INFINITY, f64::min);
        let sign = record.modules.iter().filter_map(|m| m.sign_margin).fold(f64::INFINITY, f64::min);
        let told = |what: &str| expected[format!("{name}_{what}")].as_f64().expect("a number");
        assert!((trim / told("trim") - 1.0).abs() < 0.02, "{name}: {trim} against {}", told("trim"));
        assert!(sign > 1e-5 && sign < 0.05, "{name}: {sign} ({})", told("sign"));
    }
}

#[test]
fn masks_are_equal_bit_by_bit() {
    let golden = Golden::open();
    for name in NAMES {
        for module in golden.modules() {
            let path = module.path();
            let stream = Stream::new(0, name, &path);
            let drop = mask::threshold(0.5);
            for (i, kept) in golden.tensors.bytes(&format!("mask/{name}/{path}")).iter().enumerate() {
                assert_eq!((stream.bits(i as u64) >> 11) >= drop, *kept == 1, "{name} {path} {i}");
            }
        }
    }
    let rng = json("rng.json");
    let number = |v: &Value| u64::from_str_radix(v.as_str().expect("text").trim_start_matches("0x"), 16).expect("hexadecimal");
    for (text, hash) in rng["fnv1a64"].as_object().expect("a map") {
        assert_eq!(mask::fnv1a64(text.bytes()), number(hash));
    }
    for (z, mixed) in rng["mix64"].as_object().expect("a map") {
        assert_eq!(mask::mix64(z.parse().expect("a number")), number(mixed));
    }
    let dare = &rng["dare"];
    let stream = Stream::new(0, "plan", dare["module"].as_str().expect("a path"));
    assert_eq!(stream.key(), number(&dare["key"]));
    for (i, bits) in dare["u"].as_array().expect("a list").iter().enumerate() {
        assert_eq!(stream.bits(i as u64), number(bits));
    }
    let keep: String = (0..64).map(|i| if (stream.bits(i) >> 11) >= mask::threshold(0.5) { '1' } else { '0' }).collect();
    assert_eq!(keep, dare["keep64_drop_half"].as_str().expect("bits"));
    for (rate, threshold) in rng["threshold_floor_drop_2p53"].as_object().expect("a map") {
        assert_eq!(mask::threshold(rate.parse().expect("a number")), threshold.as_u64().expect("a number"));
    }
}

/// TIES on vectors by a preset's rules.
fn ties_of(tensors: &[Vec<f32>], weights: &[f64], density: f64, recipe: &Recipe) -> Vec<f32> {
    let ballots: Vec<Ballot<'_>> = tensors
        .iter()
        .zip(weights)
        .map(|(values, weight)| Ballot { values, cut: trim::of_module(values, density, false).0, weight: *weight })
        .collect();
    elect::merge(&ballots, recipe.consensus, true, 1.0).values
}

#[test]
fn edge_cases_are_equal() {
    let floats =
        |v: &Value| v.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number") as f32).collect::<Vec<f32>>();
    for case in json("edge_cases.json").as_array().expect("a list") {
        let name = case["name"].as_str().expect("text");
        let tensors: Vec<Vec<f32>> = case["tensors"].as_array().expect("a list").iter().map(floats).collect();
        let weights: Vec<f64> =
            case["weights"].as_array().expect("a list").iter().map(|w| w.as_f64().expect("a number")).collect();
        let density = case["density"].as_f64().expect("a number");
        let vote = if case["sign_method"] == "frequency" { Vote::Frequency } else { Vote::Mass };
        let with_vote = |mut recipe: Recipe, vote| {
            if let Consensus::Elect(election) = &mut recipe.consensus {
                election.vote = vote;
            }
            recipe
        };
        let peft = with_vote(ties(Preset::Peft), vote);
        assert_eq!(ties_of(&tensors, &weights, density, &peft), floats(&case["peft_ties"]), "{name}");
        // mergekit knows no vote by frequency; it asserts that something stays.
        if case["mergekit_ties_normalize"].is_array() {
            let found = ties_of(&tensors, &weights, density, &ties(Preset::Mergekit));
            assert_eq!(found, floats(&case["mergekit_ties_normalize"]), "{name}");
        }
    }
}

#[test]
fn logits_of_merged_adapters_are_those_of_peft() {
    let golden = Golden::open();
    let backbone =
        Checkpoint::open(&folder().join("base"), false).expect("whole").load(&Device::flex(), DType::F32).expect("loadable");
    let ids: Vec<u32> = json("golden.json")["input_ids"][0]
        .as_array()
        .expect("a row")
        .iter()
        .map(|i| i.as_u64().expect("an id") as u32)
        .collect();
    let made = |recipe: Recipe| merge(&golden.sources(&NAMES), &recipe).expect("they fit").0;
    let at_8 = |method: Method| Recipe { rank: Rank::At(8), ..method.recipe(Preset::Peft) };
    let knots = Recipe {
        rank: Rank::Exact,
        trim: Some(Trim { density: 1.0, scope: Scope::Module }),
        ..Method::KnotsTies.recipe(Preset::Peft)
    };
    let cases = [
        ("base", None),
        ("plan", Some(golden.adapters[0].clone())),
        ("search", Some(golden.adapters[1].clone())),
        ("write", Some(golden.adapters[2].clone())),
        ("full_additive", Some(made(Method::Additive.recipe(Preset::Peft)))),
        ("full_knots_ties_d1", Some(made(knots))),
        ("peft_ties_svd", Some(made(at_8(Method::Ties)))),
    ];
    for (name, adapter) in cases {
        let factors = adapter.map(|a| a.to_device(&backbone.config, &Device::flex()).expect("it fits"));
        let hidden = backbone.hidden(&backbone.tokens(&[&ids]).expect("in the vocabulary"), factors.as_ref(), None);
        let found = backbone.logits(hidden, factors.as_ref()).into_data().try_to_vec::<f32>().expect("f32");
        let expected = golden.tensors.f32(&format!("logits/{name}")).expect("it is there");
        assert!(max_abs(&found, &expected) <= 1e-4, "{name}: {}", max_abs(&found, &expected));
    }
}

#[test]
fn one_adapter_of_weight_1_is_itself() {
    let golden = Golden::open();
    let full = |recipe: Recipe| Recipe { trim: recipe.trim.map(|t| Trim { density: 1.0, ..t }), drop: None, ..recipe };
    for method in Method::ALL {
        for preset in [Preset::Peft, Preset::Mergekit, Preset::Original] {
            let (adapter, _) = merge(&golden.sources(&["search"]), &full(method.recipe(preset))).expect("they fit");
            for (module, found) in products(&adapter) {
                let expected = &products(&golden.adapters[1])[&module];
                let error = relative(&found, expected);
                assert!(error < 2e-6, "{method} {preset:?} {}: {error:.2e}", module.path());
            }
        }
    }
}

#[test]
fn the_order_of_adapters_changes_nothing() {
    let golden = Golden::open();
    for method in Method::ALL {
        let recipe = |weights: [f64; 3]| Recipe { weights: weights.to_vec(), ..method.recipe(Preset::Peft) };
        let weights = if method == Method::Tspa { [1.0; 3] } else { [0.5, 1.0, 2.0] };
        let (first, _) = merge(&golden.sources(&NAMES), &recipe(weights)).expect("they fit");
        let turned = [weights[2], weights[0], weights[1]];
        let (second, _) = merge(&golden.sources(&["write", "plan", "search"]), &recipe(turned)).expect("they fit");
        assert_eq!(first.digest(), second.digest(), "{method}");
    }
}

#[test]
fn dare_that_drops_nothing_is_ties_bit_for_bit() {
    let golden = Golden::open();
    for preset in [Preset::Peft, Preset::Mergekit, Preset::Original] {
        let ties = Method::Ties.recipe(preset);
        let none = ties.drop.unwrap_or(Drop {
            rate: 0.0,
            seed: 3,
            rescale: Method::DareTies.recipe(preset).drop.expect("it drops").rescale,
        });
        let (a, _) = merge(&golden.sources(&NAMES), &ties).expect("they fit");
        let (b, _) = merge(&golden.sources(&NAMES), &Recipe { drop: Some(none), ..ties }).expect("they fit");
        assert_eq!(a.digest(), b.digest(), "{preset:?}");
    }
    let gone = Recipe {
        drop: Some(Drop { rate: 1.0, ..Method::DareTies.recipe(Preset::Peft).drop.expect("it drops") }),
        ..ties(Preset::Peft)
    };
    let (zero, _) = merge(&golden.sources(&NAMES), &gone).expect("they fit");
    assert!(products(&zero).values().flatten().all(|x| *x == 0.0), "dropping everything leaves zeros, not NaN");
}

#[test]
fn a_linear_merge_of_negative_weight_is_the_negative() {
    let golden = Golden::open();
    for space in [Space::Update, Space::Factors] {
        for method in [Method::Linear, Method::Svd, Method::MagnitudePrune, Method::DareLinear] {
            let of = |w: f64| {
                let recipe = Recipe { weights: vec![w, 0.3 * w], space, ..method.recipe(Preset::Peft) };
                products(&merge(&golden.sources(&["plan", "write"]), &recipe).expect("they fit").0)
            };
            let (plus, minus) = (of(0.7), of(-0.7));
            for (module, plus) in plus {
                let negative: Vec<f32> = minus[&module].iter().map(|x| -x).collect();
                assert!(relative(&negative, &plus) < 2e-6, "{method} {space:?} {}", module.path());
            }
        }
    }
}

#[test]
fn tspa_comes_nearer_to_the_mean_than_plain_padding_and_identical_adapters_are_kept() {
    let golden = Golden::open();
    let recipe = Method::Tspa.recipe(Preset::Peft);
    let (_, record) = merge(&golden.sources(&NAMES), &recipe).expect("they fit");
    for module in &record.modules {
        let alignment = module.alignment.as_ref().expect("factors were aligned");
        // The reference reaches 0.46 to 0.62 with both stages on these random adapters; unaligned averages are 0.65 to 0.82 away.
        assert!(alignment.distance_to_mean < 0.65, "{}: {}", module.module, alignment.distance_to_mean);
        let (before, after) = alignment.micro.expect("both stages ran");
        assert!(after < before);
    }
    let twins: Vec<Source<'_>> = ["a", "b", "c"].iter().map(|id| Source::memory(id, &golden.adapters[1])).collect();
    for lambda in [Lambda::Fixed(1.0), Lambda::LeastSquares] {
        let (same, _) = merge(&twins, &Recipe { lambda, ..recipe.clone() }).expect("they fit");
        for (module, found) in products(&same) {
            assert!(relative(&found, &products(&golden.adapters[1])[&module]) < 1e-5, "{}", module.path());
        }
    }
}
