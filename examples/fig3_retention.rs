//! The toy's Table 7 and Figure 3: what sequential training leaves of each capability, in all six orders, with shared and separate adapters.
//!
//! ```text
//! cargo run --release --example fig3_retention
//! ```
//!
//! The study goes into `target/toy/fig3`, the report into the folder `report` there. Exits with 1 unless the shared adapter of the total rank
//! forgets more than a nat per content token: negative log-likelihood at the end less that right after a capability's own stage, averaged
//! over capabilities and the orders in which another stage follows.
#![allow(clippy::print_stdout)]

mod toy;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context, Result};
use burn::tensor::Device;
use indicatif::ProgressBar;
use weact::{
    core::{Capability, io::atomic},
    eval::{
        report::Format,
        world::{World, gold::Form, question::Split},
    },
    retention::{self, Progress, Study},
    train::{
        config::{self, Lora},
        run_directory::Existing,
    },
};

/// Training questions.
const N_TRAIN: usize = 300;
/// Validation questions, and how many of them are the monitoring subset.
const N_VALID: usize = 48;
const N_MONITOR: usize = 8;
/// Rank of the active adapter; three of them together have the parameters of one of rank 24, as in the paper 32 and 96.
const RANK: usize = 8;
/// What the shared adapter of the total rank has to forget, in nats per content token.
const LEAST_NATS: f64 = 1.0;

fn main() -> Result<ExitCode> {
    let begun = Instant::now();
    let out = Path::new("target/toy/fig3");
    let work = tempfile::tempdir()?;
    let world = World::new(&Default::default())?;
    let study = Study {
        model: PathBuf::from(toy::BACKBONE),
        data: vec![write_gold(&world, Split::Train, N_TRAIN, work.path())?],
        valid: vec![write_gold(&world, Split::Val, N_VALID, work.path())?],
        monitor: N_MONITOR,
        capabilities: ["plan", "search", "write"].map(Capability::new).into_iter().collect::<Result<_, _>>()?,
        rank_active: RANK,
        rank_total: 3 * RANK,
        alpha_per_rank: 2.0,
        targets: Lora::default().targets,
        seed: 0,
        out: out.to_owned(),
        train: config::Train {
            epochs: Some(3),
            batch_rows: 16,
            max_length: 768,
            lr: 5e-3,
            save_every: 1000,
            ..Default::default()
        },
        context: config::Context { keep_tool_result: 16, ..Default::default() },
    };
    // Anew, because the questions' file is.
    let existing = if out.exists() { Existing::Overwrite } else { Existing::Refuse };
    let bar = ProgressBar::new(0);
    let mut observe = |progress: Progress<'_>| match progress {
        Progress::Stage { number, n, name, .. } => {
            bar.set_length(n as u64);
            bar.set_position(number as u64);
            bar.set_message(name.to_owned());
        }
        Progress::Measured { number, n } => {
            bar.set_length(n as u64);
            bar.set_position(number as u64);
        }
    };
    retention::run(&study, existing, &Device::flex(), &mut observe, &|| false)?;
    bar.finish_and_clear();
    let trained_s = begun.elapsed().as_secs_f64();
    let (report, numbers) = retention::report(&study, &retention::read(out)?)?;
    let dir = out.join("report");
    report.write(&dir)?;
    for table in report.tables.iter().filter(|table| table.name != "orders") {
        println!("{}\n{}{}\n", table.title, table.render(Format::Terminal), table.caption);
    }
    println!(
        "{trained_s:.0} s of training and measuring, {:.0} s in all; {}",
        begun.elapsed().as_secs_f64(),
        dir.join("report.html").display()
    );
    let shared = numbers.iter().find(|n| n.arm == "shared-total").context("the study has it")?;
    let forgotten = shared.mean_forgotten_nats.context("another stage follows")?.value;
    if forgotten > LEAST_NATS {
        return Ok(ExitCode::SUCCESS);
    }
    println!("the shared adapter forgets {forgotten:.3} nats per token, not more than {LEAST_NATS}");
    Ok(ExitCode::from(1))
}

/// Writes the staged gold trajectories of the first questions of a split.
fn write_gold(world: &World, split: Split, n: usize, dir: &Path) -> Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let library = world.library()?;
    let mut lines = String::new();
    for question in &world.questions(split, n) {
        lines += &(serde_json::to_string(&world.gold(question, Form::Staged, &library.tools()?)?)? + "\n");
    }
    let path = dir.join(if split == Split::Train { "train.jsonl" } else { "valid.jsonl" });
    atomic::write_text(&path, &lines)?;
    Ok(path)
}
