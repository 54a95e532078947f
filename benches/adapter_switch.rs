//! What the weight switch itself costs: an adapter that is resident becomes active, whatever the length of the history. What its
//! first token costs is `prefill_after_switch`'s.

mod fresh_lora;
mod random_model;

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use burn::tensor::{DType, Device};
use criterion::{BatchSize, BenchmarkId, Criterion};
use weact::{
    core::{Adapter, Backbone, Capability},
    infer::engine::Engine,
};

use fresh_lora::fresh_lora;
use random_model::{qwen3, random_model};

fn main() -> Result<()> {
    let backbone = Arc::new(random_model(qwen3((8, 256, 768), (8, 4, 32), 4096), DType::F32, &Device::flex()));
    let adapters = [adapter(&backbone, 0)?, adapter(&backbone, 1)?];
    let engine = Engine::new(backbone.clone(), "random".to_owned());
    let aliases: [Capability; 2] = ["search".parse()?, "write".parse()?];
    let handles = [engine.make_resident(&adapters[0])?, engine.make_resident(&adapters[1])?];

    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("adapter_switch");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for n_history in [64, 512] {
        let history = (0..n_history as u32).map(|i| i * 7919 % 4096).collect::<Vec<_>>();
        let mut turn = 0;
        // The caches of the weights before the switch are dropped with it, so each switch needs a session that holds one.
        let computed = || {
            let mut session = engine.session();
            session.append(&history);
            session.next_logits().map(|_| session)
        };
        computed().context("the history runs")?;
        group.bench_function(BenchmarkId::new("resident", n_history), |b| {
            b.iter_batched_ref(
                || computed().expect("the history ran before"),
                |session| {
                    turn = 1 - turn;
                    session.switch(Some((aliases[turn].clone(), handles[turn].clone())));
                },
                BatchSize::PerIteration,
            );
        });
    }
    drop(handles);
    // Its factors are copied to the device, and dropped with the handle.
    group.bench_function("not_resident", |b| b.iter(|| engine.make_resident(&adapters[0]).expect("it fits")));
    group.finish();
    criterion.final_summary();
    Ok(())
}

fn adapter(backbone: &Backbone, seed: u64) -> Result<Adapter> {
    let (trainable, parameters) = fresh_lora(backbone, seed)?;
    Ok(trainable.adapter(&backbone.config, &parameters)?)
}
