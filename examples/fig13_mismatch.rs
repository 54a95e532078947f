//! The toy's Fig. 13: how far fusions' updates are from the specialist's own on its activations (App. E.2), layer by layer.
//!
//! ```text
//! cargo run --release --example fig13_mismatch [-- --train DIR]
//! ```
//!
//! For a real model the same is `weact diagnose mismatch`. Records and the report go to `target/toy/fig13`.
#![allow(clippy::print_stdout)]

mod toy;

use std::{fs, path::Path};

use anyhow::Result;
use weact::{
    core::io::atomic,
    diagnose::{config::Bootstrap, mismatch},
    diagnostics::mismatch::Positions,
    eval::{
        report::{Format, Report},
        world::World,
    },
};

fn main() -> Result<()> {
    let (backbone, subjects) = toy::subjects(&toy::Weights::from_arguments()?, &World::new(&Default::default())?)?;
    let positions = Positions::default();
    let measured = mismatch::measure(&backbone, &subjects, &positions, &mut |what| println!("{what}"))?;
    for (capability, ids) in measured.left_out.iter().filter(|(_, ids)| !ids.is_empty()) {
        println!("{capability}: {} records have no eligible position", ids.len());
    }
    let out = Path::new("target/toy/fig13");
    fs::create_dir_all(out)?;
    let lines = measured.records.iter().map(|r| Ok(serde_json::to_string(r)? + "\n")).collect::<Result<String>>()?;
    atomic::write_text(&out.join("mismatch.jsonl"), &lines)?;
    let averages = mismatch::averages(&measured.records, positions.per_record, Bootstrap::default().resampling());
    let (tables, figure) = mismatch::report(&averages);
    for table in &tables {
        println!("{}\n{}{}", table.title, table.render(Format::Terminal), table.caption);
    }
    let provenance = vec![("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
    let report = Report { title: "The toy's Fig. 13".to_owned(), notes: Vec::new(), provenance, tables, figures: vec![figure] };
    report.write(out)?;
    println!("{}", out.join("report.html").display());
    Ok(())
}
