//! Each operator's two bodies side by side, forward and backward, at the widths of a model of 135 million parameters: what the
//! fused body saves over Burn's operations. The sum that makes a scalar of the output is timed with both.

use std::{hint::black_box, sync::Arc, time::Duration};

use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput, measurement::WallTime};
use weact::core::{
    lora::Factors,
    ops::{self, Heads, Operators, Sequence},
};

const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const VOCABULARY: usize = 49_152;
const HEADS: Heads = Heads { n_heads: 9, n_kv_heads: 3, head_dim: 64 };
const BODIES: [(&str, Operators); 2] = [("fused", Operators::Fused), ("composed", Operators::Composed)];

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("operators");
    group
        .sampling_mode(SamplingMode::Flat)
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    for n in [256, 2048] {
        linear(&mut group, n);
    }
    attention(&mut group, 1024);
    cross_entropy(&mut group, 256);
    rms_norm(&mut group, 2048);
    group.finish();
    criterion.final_summary();
}

/// The up-projection of `n` rows over a frozen weight, with an update of rank 16.
fn linear(group: &mut BenchmarkGroup<'_, WallTime>, n: usize) {
    let weight = plain([INTERMEDIATE, HIDDEN]).transpose(); // lies as in a file
    let (x, a, b) = (plain([n, HIDDEN]), plain([HIDDEN, 16]), plain([16, INTERMEDIATE]));
    compare(group, "linear", n, |operators| {
        let (x, a, b) = (leaf(&x), leaf(&a), leaf(&b));
        let factors = Factors { a: a.clone(), b: b.clone(), scale: 2.0 };
        let gradients = ops::linear(operators, x.clone(), &weight, Some(&factors), None).sum().backward();
        black_box((x.grad(&gradients), a.grad(&gradients), b.grad(&gradients)));
    });
}

/// One sequence of `n` positions.
fn attention(group: &mut BenchmarkGroup<'_, WallTime>, n: usize) {
    let (of_queries, of_keys) = (HEADS.n_heads * HEADS.head_dim, HEADS.n_kv_heads * HEADS.head_dim);
    let qkv = [plain([n, of_queries]), plain([n, of_keys]), plain([n, of_keys])];
    let sequences: Arc<[Sequence]> = [Sequence { n_new: n, n_keys: n }].into();
    compare(group, "attention", n, |operators| {
        let qkv = qkv.each_ref().map(leaf);
        let gradients = ops::attention(operators, qkv.clone(), HEADS, &sequences).sum().backward();
        black_box(qkv.map(|x| x.grad(&gradients)));
    });
}

/// The loss of `n` supervised positions under a frozen head.
fn cross_entropy(group: &mut BenchmarkGroup<'_, WallTime>, n: usize) {
    let head = plain([VOCABULARY, HIDDEN]).transpose(); // lies as in a file
    let hidden = plain([n, HIDDEN]);
    let ids: Vec<i64> = (0..n).map(|i| (i * 7919 % VOCABULARY) as i64).collect();
    let targets = Tensor::<1, Int>::from_data(TensorData::new(ids, [n]), &Device::flex());
    compare(group, "cross_entropy", n, |operators| {
        let hidden = leaf(&hidden);
        let gradients = ops::token_nll(operators, hidden.clone(), &head, None, targets.clone()).sum().backward();
        black_box(hidden.grad(&gradients));
    });
}

/// The norm of `n` rows under a frozen weight.
fn rms_norm(group: &mut BenchmarkGroup<'_, WallTime>, n: usize) {
    let x = plain([n, HIDDEN]);
    let weight = Tensor::<1>::ones([HIDDEN], &Device::flex());
    compare(group, "rms_norm", n, |operators| {
        let x = leaf(&x);
        let gradients = ops::rms_norm(operators, x.clone(), &weight, 1e-6).sum().backward();
        black_box(x.grad(&gradients));
    });
}

/// Times both bodies on the threads that a model's forward pass runs on.
fn compare(group: &mut BenchmarkGroup<'_, WallTime>, operator: &str, n: usize, run: impl Fn(Operators) + Sync) {
    group.throughput(Throughput::Elements(n as u64));
    for (body, operators) in BODIES {
        let id = BenchmarkId::new(format!("{operator}/{body}"), n);
        group.bench_function(id, |b| b.iter(|| ops::on_workers(operators, || run(operators))));
    }
}

fn plain(shape: [usize; 2]) -> Tensor<2> {
    Tensor::random(shape, Distribution::Normal(0.0, 0.1), &Device::flex())
}

fn leaf(values: &Tensor<2>) -> Tensor<2> {
    values.clone().autodiff().require_grad()
}
