//! Updates of the toy backbone, of an adapter and of all weights, with one to eight samples of 256 tokens: at a fixed length a
//! step's time grows with the tokens and no faster, so tokens per second must not fall.

mod fresh_lora;
mod update;

use std::{path::Path, time::Duration};

use anyhow::Result;
use burn::tensor::{DType, Device};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use weact::{core::io::checkpoint::Checkpoint, train::trainable::Trainable};

use fresh_lora::fresh_lora;
use update::Training;

const BACKBONE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/datasets/toy/backbone");
const LENGTH: usize = 256;

fn main() -> Result<()> {
    let backbone = Checkpoint::open(Path::new(BACKBONE), false)?.load(&Device::flex(), DType::F32)?;
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("training_step");
    group
        .sampling_mode(SamplingMode::Flat)
        .sample_size(10)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3));
    for n_samples in [1, 2, 4, 8] {
        group.throughput(Throughput::Elements((n_samples * LENGTH) as u64));
        for (kind, trained) in [("lora", fresh_lora(&backbone, 0)?), ("full", Trainable::full(&backbone))] {
            let mut training = Training::new(&backbone, trained, (n_samples, LENGTH), None)?;
            let id = BenchmarkId::new(kind, n_samples * LENGTH);
            group.bench_function(id, |b| b.iter(|| training.update(&backbone).expect("a finite update")));
        }
    }
    group.finish();
    criterion.final_summary();
    Ok(())
}
