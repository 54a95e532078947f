//! The toy's Fig. 14: how much worse fusions predict each capability's recorded text than its specialist (App. E.3), record by record,
//! and how many trajectories they get wholly right. Then the same in a world without conflict between capabilities (`gamma` 0), whose
//! adapters are trained first.
//!
//! ```text
//! cargo run --release --example fig14_nll_gap [-- --train DIR]
//! ```
//!
//! For a real model the same is `weact diagnose nll-gap`. Records and reports go to `target/toy/fig14`. Exits with status 1 unless, at
//! `gamma` 1, Full Additive, TIES and DARE-TIES each have a mean gap above 0.01 nats on all three capabilities and get at least 30 points fewer
//! trajectories wholly right than switching.
#![allow(clippy::print_stdout)]

mod toy;

use std::{fs, path::Path, process::ExitCode};

use anyhow::Result;
use weact::{
    core::io::atomic,
    diagnose::{
        config::Bootstrap,
        nll_gap::{self, WhollyRight},
    },
    diagnostics::nll_gap::NllGap,
    eval::{
        report::{Format, Report},
        world::{World, WorldConfig},
    },
};

/// The merges whose damage is asserted.
const ASSERTED: [&str; 3] = ["Full Additive", "TIES-Merging", "DARE-TIES"];
/// Least mean gap, in nats.
const GAP: f64 = 0.01;
/// Least distance to switching, in points.
const POINTS: f64 = 30.0;
/// Training questions of the world without conflict.
const N_TRAIN: usize = 600;

fn main() -> Result<ExitCode> {
    let conflict = WorldConfig::default();
    let weights = toy::Weights::from_arguments()?;
    let (gaps, counts) = measure(&weights, &conflict, "The toy's Fig. 14", Path::new("target/toy/fig14"))?;

    println!("\nThe same without conflict: three adapters of a world with gamma 0, trained on {N_TRAIN} questions.");
    let calm = WorldConfig { gamma: 0.0, ..Default::default() };
    let work = tempfile::tempdir()?;
    let weights = toy::Weights::of_world(&World::new(&calm)?, N_TRAIN, work.path())?;
    measure(&weights, &calm, "The toy's Fig. 14 at gamma 0", Path::new("target/toy/fig14-gamma0"))?;

    let hurts = |name: &str| {
        let all_positive = gaps.iter().filter(|(fusion, ..)| fusion == name).all(|(.., gap)| gap.mean.is_some_and(|m| m > GAP));
        let count = counts.iter().find(|c| c.fusion == name).expect("it was measured");
        let behind = 100.0 * (count.switching as f64 - count.fused as f64) / count.n as f64;
        println!("{name}: every mean gap above {GAP} nats: {all_positive}; {behind:.1} points behind switching");
        all_positive && behind >= POINTS
    };
    let passed = ASSERTED.map(hurts).into_iter().all(|hurt| hurt);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A fusion's gaps on a capability's records.
type Gap = (String, weact::core::Capability, NllGap);

/// Scores, prints and writes everything about one world.
fn measure(weights: &toy::Weights, world: &WorldConfig, title: &str, out: &Path) -> Result<(Vec<Gap>, Vec<WhollyRight>)> {
    let (backbone, subjects) = toy::subjects(weights, &World::new(world)?)?;
    let records = nll_gap::measure(&backbone, &subjects, &mut |_| ())?;
    fs::create_dir_all(out)?;
    let lines = records.iter().map(|r| Ok(serde_json::to_string(r)? + "\n")).collect::<Result<String>>()?;
    atomic::write_text(&out.join("nll_gap.jsonl"), &lines)?;
    let gaps = nll_gap::gaps(&records, Bootstrap::default().resampling());
    let counts = nll_gap::wholly_right(&records);
    let (table, figure) = nll_gap::report(&gaps);
    let tables = vec![table, nll_gap::right_table(&counts)];
    for table in &tables {
        println!("{}\n{}{}", table.title, table.render(Format::Terminal), table.caption);
    }
    let provenance =
        vec![("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned()), ("gamma".to_owned(), world.gamma.to_string())];
    let report = Report { title: title.to_owned(), notes: Vec::new(), provenance, tables, figures: vec![figure] };
    report.write(out)?;
    println!("{}", out.join("report.html").display());
    Ok((gaps, counts))
}
