//! The decoder, its adapters and their gradients against transformers and PEFT on six tiny checkpoints.
//!
//! The reference values were made with transformers 5.24, peft 0.21.2 and torch 2.15 in f32 on a CPU; each folder's
//! `golden.json` says what each tensor is.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, Device, Tensor, TensorData};
use safetensors::SafeTensors;
use weact_core::{
    Adapter, Backbone,
    io::{checkpoint::Checkpoint, peft},
    lora::FactorMap,
    model::KvCache,
    nll::{self, Targets},
};

const CASES: [&str; 6] = ["qwen3-sharded-bf16", "qwen3-tied", "qwen3-yarn", "qwen2-bias", "llama", "llama3-rope"];

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case)
}

struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    fn open(case: &str) -> Self {
        Self { bytes: std::fs::read(folder(case).join("golden.safetensors")).expect("golden values") }
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        let tensors = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        tensors
            .tensor(name)
            .expect(name)
            .data()
            .chunks_exact(4)
            .map(|c| f32::from_le_bytes(c.try_into().expect("4 bytes")))
            .collect()
    }

    fn ids(&self, name: &str) -> Vec<i64> {
        let tensors = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        tensors
            .tensor(name)
            .expect(name)
            .data()
            .chunks_exact(8)
            .map(|c| i64::from_le_bytes(c.try_into().expect("8 bytes")))
            .collect()
    }

    fn rows(&self) -> Vec<Vec<u32>> {
        self.ids("input_ids").chunks(40).map(|row| row.iter().map(|id| *id as u32).collect()).collect()
    }
}

fn load(case: &str) -> (Backbone, Adapter) {
    let checkpoint = Checkpoint::open(&folder(case), false).expect("a whole checkpoint");
    let backbone = checkpoint.load(&Device::flex(), DType::F32).expect("loadable");
    (backbone, peft::read(&folder(case).join("adapter")).expect("an adapter"))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec::<f32>().expect("f32")
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

fn logits(backbone: &Backbone, factors: Option<&FactorMap>, rows: &[Vec<u32>]) -> Vec<f32> {
    let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
    let hidden = backbone.hidden(&backbone.tokens(&rows).expect("legal ids"), factors, None);
    values(backbone.logits(hidden, factors))
}

#[test]
fn logits_equal_transformers_with_and_without_adapter() {
    for case in CASES {
        let (backbone, adapter) = load(case);
        let golden = Golden::open(case);
        let factors = adapter.to_device(&backbone.config, &backbone.device()).expect("it fits");
        let base = max_difference(&logits(&backbone, None, &golden.rows()), &golden.f32("logits.base"));
        let active = max_difference(&logits(&backbone, Some(&factors), &golden.rows()), &golden.f32("logits.adapter"));
        assert!(base < 1e-4 && active < 1e-4, "{case}: base {base:e}, adapter {active:e}");
    }
}

#[test]
fn greedy_continuations_equal_with_a_cache_fed_token_by_token() {
    for case in CASES {
        let (backbone, adapter) = load(case);
        let golden = Golden::open(case);
        let factors = adapter.to_device(&backbone.config, &backbone.device()).expect("it fits");
        for (name, factors) in [("greedy.base", None), ("greedy.adapter", Some(&factors))] {
            let expected: Vec<u32> = golden.ids(name).iter().map(|id| *id as u32).collect();
            let mut ids = expected[..12].to_vec();
            let mut cache = KvCache::new(&backbone.config, 4);
            let mut new = ids.clone();
            while ids.len() < expected.len() {
                let hidden = backbone.hidden(&backbone.tokens(&[&new]).expect("legal ids"), factors, Some(&mut cache));
                let last = backbone.logits(hidden.narrow(0, new.len() - 1, 1), factors);
                let next = last.argmax(1).into_scalar::<i64>() as u32;
                ids.push(next);
                new = vec![next];
            }
            assert_eq!(ids, expected, "{case}, {name}");
        }
    }
}

#[test]
fn gradients_of_every_factor_equal_pefts() {
    for case in CASES {
        let (backbone, adapter) = load(case);
        let golden = Golden::open(case);
        let device = backbone.device().autodiff();
        let leaf =
            |v: &[f32], shape: [usize; 2]| Tensor::<2>::from_data(TensorData::new(v.to_vec(), shape), &device).require_grad();
        let mut factors: FactorMap = adapter.to_device(&backbone.config, &backbone.device()).expect("it fits");
        for (module, f) in &mut factors {
            let plain = &adapter.plain()[module];
            f.a = leaf(&plain.a, [plain.d_in, plain.rank]);
            f.b = leaf(&plain.b, [plain.rank, plain.d_out]);
        }
        let rows = golden.rows();
        let masks: Vec<Vec<bool>> = golden.ids("labels").chunks(40).map(|r| r.iter().map(|l| *l != -100).collect()).collect();
        let paired: Vec<(&[u32], &[bool])> = rows.iter().zip(&masks).map(|(r, m)| (r.as_slice(), m.as_slice())).collect();
        let targets = Targets::new(&paired, &backbone.device()).expect("supervised tokens");
        let ids: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
        let tokens = backbone.tokens(&ids).expect("legal ids");
        let loss = nll::masked_sum(&backbone, Some(&factors), backbone.hidden(&tokens, Some(&factors), None), &targets)
            / targets.len() as f64;
        let expected = golden.f32("loss.adapter")[0];
        assert!((loss.clone().into_scalar::<f32>() - expected).abs() < 1e-4, "{case}: loss");
        let gradients = loss.backward();
        let mut worst: BTreeMap<String, f32> = BTreeMap::new();
        for (module, f) in &factors {
            for (half, leaf) in [("A", &f.a), ("B", &f.b)] {
                let name = format!("grad.{}.lora_{half}.weight", module.path());
                let reference = golden.f32(&name);
                let gradient = values(leaf.grad(&gradients).expect("a gradient").transpose());
                let norm = reference.iter().map(|x| x * x).sum::<f32>().sqrt();
                let error = reference.iter().zip(&gradient).map(|(x, y)| (x - y) * (x - y)).sum::<f32>().sqrt();
                worst.insert(name, error / norm);
            }
        }
        let (name, error) = worst.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("factors");
        assert!(error < 1e-3, "{case}: {name} differs by {error:e} relative");
    }
}
