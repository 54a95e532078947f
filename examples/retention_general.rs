//! What training costs in general skill (App. H), on the toy: exercises with the external tools off, and trajectories in plain words.
//!
//! ```text
//! cargo run --release --example retention_general [-- --train DIR]
//! ```
//!
//! For a real model the same comparison is `weact eval` with the benchmarks mmlu-pro and ifeval and `[tools] spec = "none"`; the report has the
//! same tables. The report goes to `target/toy/retention`.
#![allow(clippy::print_stdout)]

mod toy;

use std::path::Path;

use anyhow::Result;
use burn::tensor::{DType, Device};
use weact::{
    core::{
        Backbone,
        chat::{Chat, ToolProtocol},
        io::{checkpoint::Checkpoint, peft},
        stats,
    },
    eval::{
        report::{Bar, Cell, Drawing, Figure, Format, Group, Report, Table},
        world::{
            World,
            document::Tools,
            gold::{self, Form},
            skill::{self, Skill},
        },
    },
};

/// Documents of each kind.
const N: usize = 200;

fn main() -> Result<()> {
    let weights = toy::Weights::from_arguments()?;
    let device = Device::flex();
    let load = |dir: &Path| -> Result<Backbone> { Ok(Checkpoint::open(dir, false)?.load(&device, DType::F32)?) };
    let base = load(Path::new(toy::BACKBONE))?;
    let full = load(&weights.dir.join("full"))?;
    let chat = Chat::open(Path::new(toy::BACKBONE), ToolProtocol::Template)?;
    let of_a_run = World::new(&Default::default())?.library()?.tools()?;
    let schemas = |form| gold::schemas(form, &of_a_run);
    let tools = Tools { staged: schemas(Form::Staged), plain: schemas(Form::Plain) };

    let mut measured: Vec<(String, [Skill; 2])> = vec![("Base".to_owned(), skill::measure(&base, None, &chat, &tools, N)?)];
    measured.push(("Full SFT".to_owned(), skill::measure(&full, None, &chat, &tools, N)?));
    for (name, dir) in [
        ("Single LoRA on", "single/agent"),
        ("WeAct, plan on", "adapters/plan"),
        ("WeAct, search on", "adapters/search"),
        ("WeAct, write on", "adapters/write"),
    ] {
        let factors = peft::read(&weights.dir.join(dir))?.to_device(&base.config, &device)?;
        measured.push((name.to_owned(), skill::measure(&base, Some(&factors), &chat, &tools, N)?));
    }
    // After all of them were in use.
    measured.push(("WeAct and Single LoRA, off".to_owned(), skill::measure(&base, None, &chat, &tools, N)?));

    let before = measured[0].1.clone();
    let row = |(name, skills): &(String, [Skill; 2])| {
        let mut cells = vec![Cell::of(name)];
        for (skill, base) in skills.iter().zip(&before) {
            let lost: Vec<f64> = skill.nll_nats.iter().zip(&base.nll_nats).map(|(x, y)| x - y).collect();
            let mean = lost.iter().sum::<f64>() / lost.len() as f64;
            cells.push(Cell::percent(Some(skill.n_right as f64 / N as f64), stats::binomial_se(skill.n_right, N)));
            cells.push(Cell::number(Some(skill.mean_nll_nats()), 4));
            cells.push(stats::sample_se(&lost).map_or_else(Cell::unknown, |se| Cell::of(format!("{mean:+.4}±{se:.4}"))));
        }
        cells.push(Cell::of(if *skills == before { "yes" } else { "no" }));
        cells
    };
    let mut header = vec!["Weights".to_owned()];
    for suite in before.each_ref().map(|skill| skill.suite) {
        header.extend([format!("{suite}: right (%)"), "NLL (nats)".to_owned(), "lost (nats)".to_owned()]);
    }
    header.push("bit-equal to the base".to_owned());
    let table = Table {
        name: "retention".to_owned(),
        title: "General skill after training".to_owned(),
        caption: format!("{N} documents of each kind; the loss is paired by document, with its standard error."),
        header,
        rows: measured.iter().map(row).collect(),
    };
    let bar = |skill: &Skill| Bar {
        value: Some(100.0 * skill.n_right as f64 / N as f64),
        error: stats::binomial_se(skill.n_right, N).map(|se| 100.0 * se),
    };
    let figure = Figure {
        name: "retention".to_owned(),
        title: "General skill after training".to_owned(),
        caption: "Documents solved by greedy decoding; whiskers are one standard error.".to_owned(),
        x_label: String::new(),
        y_label: "solved (%)".to_owned(),
        drawing: Drawing::Bars {
            series: before.each_ref().map(|skill| skill.suite.to_owned()).to_vec(),
            groups: measured
                .iter()
                .map(|(name, skills)| Group { name: name.clone(), bars: skills.iter().map(bar).collect() })
                .collect(),
        },
    };
    println!("{}\n{}{}", table.title, table.render(Format::Terminal), table.caption);
    let report = Report {
        title: "Retention of general skill in the toy".to_owned(),
        notes: vec!["External tools are off: exercises have none, and in trajectories the results are given.".to_owned()],
        provenance: vec![("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned())],
        tables: vec![table],
        figures: vec![figure],
    };
    let out = Path::new("target/toy/retention");
    report.write(out)?;
    println!("{}", out.join("report.html").display());
    Ok(())
}
