//! The toy's Table 1: eight task files by every method that there is, with intervals, beside the paper's.
//!
//! ```text
//! cargo run --release --example table1                  # from the shipped weights
//! cargo run --release --example table1 -- --train DIR   # trains them first, into DIR
//! ```
//!
//! Records, tables, figures and `report.html` go to `target/toy/table1`.
#![allow(clippy::print_stdout)]

mod toy;

use std::{path::Path, time::Instant};

use anyhow::Result;
use weact::eval::report::{self, Format};

fn main() -> Result<()> {
    let weights = toy::Weights::from_arguments()?;
    let begun = Instant::now();
    let config = weights.configuration("table1.toml")?;
    let out = Path::new("target/toy/table1");
    let records = toy::evaluate(&config, &out.join("run"), false)?;
    let report = report::evaluation("The toy's Table 1", &records, toy::provenance(&config))?;
    report.write(out)?;
    for name in ["table1", "score-answer", "paired", "paper-table1"] {
        let table = report.tables.iter().find(|table| table.name == name).expect("the report has it");
        println!("{}\n{}{}\n", table.title, table.render(Format::Terminal), table.caption);
    }
    println!("{} attempts in {:.0} s; {}", records.len(), begun.elapsed().as_secs_f64(), out.join("report.html").display());
    Ok(())
}
