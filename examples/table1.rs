//! The toy's Table 1: eight task files by every method that there is, with intervals, beside the paper's. A merge acts in every stage of
//! the workflow that WeAct-hard prescribes: what differs between them is the weights alone.
//!
//! ```text
//! cargo run --release --example table1                  # from the shipped weights
//! cargo run --release --example table1 -- --train DIR   # trains them first, into DIR
//! ```
//!
//! Records, tables, figures and `report.html` go to `target/toy/table1`. Exits with status 1 unless WeAct-hard answers at least 30 points more than
//! the base and at most 95 % in all, so that a table has room in both directions.
#![allow(clippy::print_stdout)]

mod toy;

use std::{path::Path, process::ExitCode, time::Instant};

use anyhow::{Context, Result};
use weact::eval::{
    report::{self, Format},
    score,
};

fn main() -> Result<ExitCode> {
    let weights = toy::Weights::from_arguments()?;
    let begun = Instant::now();
    let mut config = weights.configuration("table1.toml")?;
    let out = Path::new("target/toy/table1");
    toy::add_fusions(&mut config, "WeAct-hard", &out.join("merged"))?;
    let records = toy::evaluate(&config, &out.join("run"), false)?;
    let report = report::evaluation("The toy's Table 1", &records, toy::provenance(&config))?;
    report.write(out)?;
    for name in ["table1", "score-answer", "paired", "paper-table1"] {
        let table = report.tables.iter().find(|table| table.name == name).expect("the report has it");
        println!("{}\n{}{}\n", table.title, table.render(Format::Terminal), table.caption);
    }
    println!("{} attempts in {:.0} s; {}", records.len(), begun.elapsed().as_secs_f64(), out.join("report.html").display());
    let scores = score::scores(&records)?;
    let names: Vec<String> = config.benchmarks.iter().map(|benchmark| benchmark.name()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let average =
        |method: &str| score::average(&scores, method, &names).map(|mean| 100.0 * mean.mean).context("every task was asked");
    let (base, switching) = (average("Base")?, average("WeAct-hard")?);
    Ok(if switching >= base + 30.0 && switching <= 95.0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
