//! The toy's Fig. 14: how much worse fusions predict each capability's recorded text than its specialist (App. E.3), record by record.
//!
//! ```text
//! cargo run --release --example fig14_nll_gap [-- --train DIR]
//! ```
//!
//! For a real model the same is `weact diagnose nll-gap`. Records and the report go to `target/toy/fig14`.
#![allow(clippy::print_stdout)]

mod toy;

use std::{fs, path::Path};

use anyhow::Result;
use weact::{
    core::io::atomic,
    diagnose::{config::Bootstrap, nll_gap},
    eval::report::{Format, Report},
};

fn main() -> Result<()> {
    let (backbone, subjects) = toy::subjects(&toy::Weights::from_arguments()?)?;
    let records = nll_gap::measure(&backbone, &subjects, &mut |what| println!("{what}"))?;
    let out = Path::new("target/toy/fig14");
    fs::create_dir_all(out)?;
    let lines = records.iter().map(|r| Ok(serde_json::to_string(r)? + "\n")).collect::<Result<String>>()?;
    atomic::write_text(&out.join("nll_gap.jsonl"), &lines)?;
    let (table, figure) = nll_gap::report(&nll_gap::gaps(&records, Bootstrap::default().resampling()));
    println!("{}\n{}{}", table.title, table.render(Format::Terminal), table.caption);
    let provenance = vec![("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
    let report = Report {
        title: "The toy's Fig. 14".to_owned(),
        notes: Vec::new(),
        provenance,
        tables: vec![table],
        figures: vec![figure],
    };
    report.write(out)?;
    println!("{}", out.join("report.html").display());
    Ok(())
}
