//! Five updates of an adapter against PEFT and torch.optim.AdamW, and the promise that how a batch is computed does not change it.
//!
//! Reference: `weact-core/tests/golden` (transformers 5.24, peft 0.21.2, torch 2.15, f32 on a CPU).

use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, Tensor};
use safetensors::SafeTensors;
use weact_core::{
    Backbone, Capability,
    io::{checkpoint::Checkpoint, peft},
    sample::Sample,
};
use weact_train::{
    gradient::{BatchGradient, Plan, batch_gradient},
    optim::{self, AdamW},
    trainable::{Trainable, values_of},
};

const CASES: [&str; 6] = ["qwen3-tied", "qwen3-sharded-bf16", "qwen3-yarn", "qwen2-bias", "llama", "llama3-rope"];

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../weact-core/tests/golden").join(case)
}

fn backbone(case: &str) -> Backbone {
    Checkpoint::open(&folder(case), false).expect("whole").load(&Device::flex(), DType::F32).expect("loadable")
}

fn golden(case: &str) -> (Vec<Sample>, Vec<f32>, Vec<f32>) {
    let bytes = std::fs::read(folder(case).join("golden.safetensors")).expect("golden values");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let ints = |name: &str| -> Vec<i64> {
        let data = tensors.tensor(name).expect(name).data();
        data.chunks_exact(8).map(|c| i64::from_le_bytes(c.try_into().expect("8 bytes"))).collect()
    };
    let floats = |name: &str| -> Vec<f32> {
        let data = tensors.tensor(name).expect(name).data();
        data.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().expect("4 bytes"))).collect()
    };
    let (ids, labels) = (ints("input_ids"), ints("labels"));
    let row = |(ids, labels): (&[i64], &[i64])| {
        sample(ids.iter().map(|id| *id as u32).collect(), labels.iter().map(|l| *l != -100).collect())
    };
    let samples = ids.chunks(40).zip(labels.chunks(40)).map(row).collect();
    (samples, floats("adamw.losses"), floats("adamw.grad_norms"))
}

fn sample(ids: Vec<u32>, mask: Vec<bool>) -> Sample {
    let capability = Capability::new("plan").expect("legal");
    Sample { id: "row".to_owned(), capability, ids, mask, left_out: Default::default(), dropped_exchanges: 0 }
}

const WHOLE: Plan = Plan { micro_rows: Some(5), recompute: Some(false) };

#[test]
fn five_adamw_updates_equal_torch_and_peft() {
    for case in CASES {
        let backbone = backbone(case);
        let (samples, losses, norms) = golden(case);
        let batch: Vec<&Sample> = samples.iter().collect();
        let adapter = peft::read(&folder(case).join("adapter")).expect("an adapter");
        let (trainable, mut parameters) = Trainable::from_adapter(&adapter, &Device::flex());
        let adam = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        for (i, (expected_loss, expected_norm)) in losses.iter().zip(norms).enumerate() {
            let values: Vec<_> = parameters.iter().map(|p| p.value.clone()).collect();
            let result = batch_gradient(&trainable, &backbone, &values, &batch, WHOLE).expect("it runs").expect("tokens");
            let gradients: Vec<Tensor<1>> = result.gradients.into_iter().map(|g| g.expect("a gradient")).collect();
            let norm = optim::global_norm(&gradients);
            adam.update(&mut parameters, gradients, (optim::clip_scale(norm, 1.0), 1e-2), i + 1);
            let close = |a: f64, b: f32| (a - f64::from(b)).abs() <= 1e-3 * f64::from(b).abs();
            assert!(close(result.loss, *expected_loss), "{case}, update {}: loss {} and {expected_loss}", i + 1, result.loss);
            assert!(close(norm, expected_norm), "{case}, update {}: norm {norm} and {expected_norm}", i + 1);
        }
    }
}

/// Rows of 30, 3, 1, 0 and 8 supervised tokens: the mean is over tokens, however the batch is cut, and recomputing blocks gives
/// the same gradient. Both kinds of training.
#[test]
fn a_batch_has_one_gradient_whatever_the_micro_batches() {
    let backbone = backbone("qwen3-tied");
    let adapter = peft::read(&folder("qwen3-tied").join("adapter")).expect("an adapter");
    let row = |len: u32, n: u32| sample((0..len).map(|i| 3 + i * 7 % 190).collect(), (0..len).map(|i| i >= len - n).collect());
    let samples = [row(40, 30), row(9, 3), row(17, 1), row(25, 0), row(33, 8)];
    let batch: Vec<&Sample> = samples.iter().collect();
    for (trainable, parameters) in [Trainable::from_adapter(&adapter, &Device::flex()), Trainable::full(&backbone)] {
        let values: Vec<_> = parameters.iter().map(|p| p.value.clone()).collect();
        let run = |micro_rows, recompute| -> BatchGradient {
            let plan = Plan { micro_rows: Some(micro_rows), recompute: Some(recompute) };
            batch_gradient(&trainable, &backbone, &values, &batch, plan).expect("it runs").expect("tokens")
        };
        let whole = run(5, false);
        assert_eq!(whole.n_supervised, 42);
        for (micro_rows, recompute) in [(1, false), (2, false), (5, true), (2, true)] {
            let cut = run(micro_rows, recompute);
            assert!((cut.loss - whole.loss).abs() < 1e-5, "{micro_rows} {recompute}");
            for (p, (a, b)) in parameters.iter().zip(cut.gradients.iter().zip(&whole.gradients)) {
                let (a, b) = (values_of(a.as_ref().expect("cut")), values_of(b.as_ref().expect("whole")));
                let difference = a.iter().zip(&b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
                assert!(difference < 1e-5, "{}: {difference:e} with {micro_rows} rows, recompute {recompute}", p.name);
            }
        }
    }
}

#[test]
fn the_same_batch_twice_gives_the_same_bits() {
    let backbone = backbone("llama");
    let adapter = peft::read(&folder("llama").join("adapter")).expect("an adapter");
    let (samples, ..) = golden("llama");
    let batch: Vec<&Sample> = samples.iter().collect();
    let (trainable, parameters) = Trainable::from_adapter(&adapter, &Device::flex());
    let values: Vec<_> = parameters.iter().map(|p| p.value.clone()).collect();
    for recompute in [false, true] {
        let plan = Plan { micro_rows: Some(1), recompute: Some(recompute) };
        let run = || batch_gradient(&trainable, &backbone, &values, &batch, plan).expect("it runs").expect("tokens");
        let (a, b) = (run(), run());
        assert_eq!(a.loss.to_bits(), b.loss.to_bits());
        for (a, b) in a.gradients.iter().zip(&b.gradients) {
            assert_eq!(values_of(a.as_ref().expect("one")), values_of(b.as_ref().expect("one")));
        }
    }
}

#[test]
fn a_batch_without_supervised_tokens_has_no_gradient() {
    let backbone = backbone("llama");
    let (trainable, parameters) = Trainable::full(&backbone);
    let values: Vec<_> = parameters.iter().map(|p| p.value.clone()).collect();
    let empty = sample(vec![3, 4, 5], vec![true, false, false]);
    assert!(batch_gradient(&trainable, &backbone, &values, &[&empty], WHOLE).expect("it runs").is_none());
}
