//! The first token after a switch, by the length of the history: `cold`, where the new weights have computed none of it, and
//! `cached`, where they have computed all but its last token.

mod fresh_lora;
mod random_model;

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use burn::tensor::{DType, Device};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use weact::{
    core::{Adapter, Backbone, Capability},
    infer::engine::Engine,
};

use fresh_lora::fresh_lora;
use random_model::{qwen3, random_model};

fn main() -> Result<()> {
    let backbone = Arc::new(random_model(qwen3((8, 256, 768), (8, 4, 32), 4096), DType::F32, &Device::flex()));
    let engine = Engine::new(backbone.clone(), "random".to_owned());
    let aliases: [Capability; 2] = ["search".parse()?, "write".parse()?];
    let handles = [engine.make_resident(&adapter(&backbone, 0)?)?, engine.make_resident(&adapter(&backbone, 1)?)?];

    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("prefill_after_switch");
    group
        .sampling_mode(SamplingMode::Flat)
        .sample_size(10)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3));
    for n_history in [128, 512, 2048] {
        let history = (0..n_history as u32).map(|i| i * 7919 % 4096).collect::<Vec<_>>();
        group.throughput(Throughput::Elements(n_history as u64));
        let mut session = engine.session();
        session.append(&history);
        let mut turn = 0;
        group.bench_function(BenchmarkId::new("cold", n_history), |b| {
            b.iter(|| {
                turn = 1 - turn;
                session.switch(Some((aliases[turn].clone(), handles[turn].clone())));
                session.next_logits().expect("finite logits")
            });
        });
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("cached", n_history), |b| {
            b.iter(|| {
                session.switch(Some((aliases[turn].clone(), handles[turn].clone())));
                session.next_logits().expect("finite logits")
            });
        });
    }
    group.finish();
    criterion.final_summary();
    Ok(())
}

fn adapter(backbone: &Backbone, seed: u64) -> Result<Adapter> {
    let (trainable, parameters) = fresh_lora(backbone, seed)?;
    Ok(trainable.adapter(&backbone.config, &parameters)?)
}
