//! What makes training fast changes nothing in what it computes, and its memory does not grow.
#![expect(clippy::print_stdout, reason = "a skipped test says so")]

use std::{env, path::Path, process::Command};

use burn::tensor::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use weact::{
    core::{
        Backbone, Capability,
        context::LeftOut,
        io::{checkpoint::Checkpoint, peft},
        nll::{self, Targets},
        sample::Sample,
    },
    train::{
        gradient::{Plan, batch_gradient},
        memory,
        optim::{self, AdamW},
        trainable::{Trainable, values_of},
    },
};

/// A golden model of two layers, and an adapter of it.
fn golden(case: &str) -> (Backbone, (Trainable, Vec<optim::Parameter>)) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("weact-core/tests/golden").join(case);
    let checkpoint = Checkpoint::open(&folder, false).expect("whole");
    let backbone = checkpoint.load(&Device::flex(), DType::F32).expect("loadable");
    let adapter = peft::read(&folder.join("adapter")).expect("an adapter");
    (backbone, Trainable::from_adapter(&adapter, &Device::flex()))
}

/// A sample of random ids of which about half are supervised; the last one is.
fn sample(rng: &mut ChaCha8Rng, len: usize) -> Sample {
    let capability: Capability = "plan".parse().expect("legal");
    let ids = (0..len).map(|_| rng.random_range(3..190)).collect();
    let mask = (1..=len).map(|i| i == len || rng.random()).collect();
    Sample { id: String::new(), capability, ids, mask, left_out: LeftOut::default(), dropped_exchanges: 0 }
}

fn values(parameters: &[optim::Parameter]) -> Vec<Tensor<1>> {
    parameters.iter().map(|p| p.value.clone()).collect()
}

/// 1e-5 is a few hundred roundings of sums of about one.
fn check(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}");
    let largest = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-5, "{what}: {largest:e}");
}

#[test]
fn packed_equals_unpacked() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let samples = [40, 9, 17, 2, 33].map(|len| sample(&mut rng, len));
    let batch: Vec<&Sample> = samples.iter().collect();
    for case in ["qwen3-tied", "qwen2-bias", "llama"] {
        let (backbone, adapter) = golden(case);
        for (trainable, parameters) in [adapter, Trainable::full(&backbone)] {
            let values = values(&parameters);
            let [packed, unpacked] = [None, Some(1)].map(|micro_rows| {
                let plan = Plan { micro_rows, recompute: None };
                batch_gradient(&trainable, &backbone, &values, &batch, plan).expect("it runs").expect("supervised tokens")
            });
            assert_eq!(packed.n_supervised, unpacked.n_supervised);
            assert_eq!((packed.padding, unpacked.padding), (0.0, 0.0));
            check(case, &[packed.loss as f32], &[unpacked.loss as f32]);
            for (parameter, gradients) in parameters.iter().zip(packed.gradients.into_iter().zip(unpacked.gradients)) {
                let (a, b) = (gradients.0.expect("packed"), gradients.1.expect("unpacked"));
                check(&format!("{case}, gradient of {}", parameter.name), &values_of(&a), &values_of(&b));
            }

            let policy = trainable.policy(&backbone, &values);
            let nll = |rows: &[&Sample]| -> Vec<f32> {
                let ids: Vec<&[u32]> = rows.iter().map(|s| &*s.ids).collect();
                let masked: Vec<(&[u32], &[bool])> = rows.iter().map(|s| (&*s.ids, &*s.mask)).collect();
                let targets = Targets::new(&masked, &backbone.device()).expect("supervised tokens");
                let hidden = policy.backbone.hidden(&backbone.tokens(&ids).expect("legal ids"), policy.factors.as_ref(), None);
                values_of(&nll::per_token(&policy.backbone, policy.factors.as_ref(), hidden, &targets).nll)
            };
            let one_by_one: Vec<f32> = batch.chunks(1).flat_map(nll).collect();
            check(&format!("{case}, likelihoods"), &nll(&batch), &one_by_one);
        }
    }
}

/// In a process of its own, as the memory of other tests would be measured too, and with one heap whose large pieces go back to
/// the system: what an allocator keeps for later is more than a model of this size takes.
#[test]
fn memory_stays_flat_over_mixed_lengths() {
    const ALONE: &str = "WEACT_TEST_ALONE";
    if env::var_os(ALONE).is_none() {
        let mut alone = Command::new(env::current_exe().expect("a path"));
        alone.args(["memory_stays_flat_over_mixed_lengths", "--exact", "--nocapture"]).env(ALONE, "");
        alone.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_THRESHOLD_", "65536");
        let output = alone.output().expect("it runs");
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(output.status.success(), "{said}");
        return;
    }
    let (backbone, (trainable, mut parameters)) = golden("llama");
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let adam = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let mut resident = Vec::new();
    for update in 1..=200 {
        let samples = [0, 1].map(|i| sample(&mut rng, 10 + (2 * update + i) * 19 % 191)); // from 10 to 200, short and long in turn
        let plan = Plan { micro_rows: None, recompute: None };
        let result = batch_gradient(&trainable, &backbone, &values(&parameters), &samples.each_ref(), plan);
        let gradients = result.expect("it runs").expect("supervised tokens").gradients;
        let gradients = gradients.into_iter().map(|g| g.expect("a gradient")).collect();
        adam.update(&mut parameters, gradients, (1.0, 1e-3), update);
        resident.push(memory::of_process("VmRSS"));
    }
    let (Some(early), Some(late)) = (resident[49], resident[199]) else {
        println!("skipped: the system does not tell a process its memory");
        return;
    };
    println!("{early} bytes after 50 updates, {late} after 200");
    // Two mebibytes come and go. Keeping the gradients of each batch would take six.
    assert!(late as f64 <= 1.05 * early as f64 + f64::from(2 << 20), "{early} bytes after 50 updates, {late} after 200");
}
