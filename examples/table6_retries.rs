//! The toy's Table 6: which share of the tasks was tried again, and what that changed.
//!
//! ```text
//! cargo run --release --example table6_retries [-- --train DIR]
//! ```
//!
//! Every method answers by sampling, and tries again where no answer came of it. Records and the report go to `target/toy/table6`.
#![allow(clippy::print_stdout)]

mod toy;

use std::path::Path;

use anyhow::Result;
use weact::eval::{
    report::{self, Format, paper},
    score,
};

fn main() -> Result<()> {
    let mut config = toy::Weights::from_arguments()?.configuration("table1.toml")?;
    config.benchmarks.retain(|task| ["gaia", "2wiki", "webwalkerqa"].contains(&task.benchmark.name()));
    config.agent.temperature = 1.0;
    config.agent.max_turns = 5;
    config.retry.attempts = 4;
    let out = Path::new("target/toy/table6");
    let records = toy::evaluate(&config, &out.join("run"), false)?;
    report::evaluation("The toy's Table 6", &records, toy::provenance(&config))?.write(out)?;
    let own = report::table6(&score::scores(&records)?);
    println!("{}\n{}", own.title, own.render(Format::Terminal));
    let paper = paper::printed("paper-table6").expect("it is shipped");
    println!("{}\n{}", paper.title, paper.render(Format::Terminal));
    println!("{}", out.join("report.html").display());
    Ok(())
}
