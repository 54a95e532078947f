//! Greedy decoding of one sequence with weights in f32 and in bf16. They are larger than a processor's caches, so
//! that a token's time is that of reading them.

mod random_model;

use std::time::Duration;

use anyhow::Result;
use burn::tensor::{DType, Device};
use criterion::{Criterion, SamplingMode, Throughput};
use weact::core::{Backbone, model::KvCache};

use random_model::{qwen3, random_model};

const PROMPT: usize = 64;
const N_TOKENS: usize = 8;

fn main() -> Result<()> {
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("decode");
    group
        .sampling_mode(SamplingMode::Flat)
        .sample_size(10)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(5));
    group.throughput(Throughput::Elements(N_TOKENS as u64));
    for dtype in [DType::F32, DType::BF16] {
        let model = random_model(qwen3((12, 576, 1536), (9, 3, 64), 16_384), dtype, &Device::flex());
        let mut cache = KvCache::new(&model.config, PROMPT + N_TOKENS);
        let prompt: Vec<u32> = (0..PROMPT as u32).collect();
        next_token(&model, &prompt, &mut cache)?;
        group.bench_function(dtype.name(), |b| {
            b.iter(|| {
                cache.truncate(PROMPT);
                (0..N_TOKENS).fold(7, |token, _| next_token(&model, &[token], &mut cache).expect("ids of the vocabulary"))
            });
        });
    }
    group.finish();
    criterion.final_summary();
    Ok(())
}

fn next_token(model: &Backbone, ids: &[u32], cache: &mut KvCache) -> Result<u32> {
    let hidden = model.hidden(&model.tokens(&[ids])?, None, Some(cache)); // [n, hidden]
    let last = model.logits(hidden.narrow(0, ids.len() - 1, 1), None); // [1, vocab]
    Ok(u32::try_from(last.argmax(1).into_scalar::<i64>())?)
}
