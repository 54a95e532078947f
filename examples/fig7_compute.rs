//! The toy's Figure 7: nominal training compute of the recipes (App. B.1), with 95 % intervals over the samples' lengths.
//!
//! ```text
//! cargo run --release --example fig7_compute
//! ```
//!
//! The report goes to `target/toy/fig7`. Nothing is trained.
#![allow(clippy::print_stdout)]

mod toy;

use std::path::Path;

use anyhow::Result;
use weact::{
    core::{
        chat::{Chat, ToolProtocol},
        io::hf_config,
        lora::Projection,
        sample, trajectory,
    },
    eval::{
        report::{Bar, Cell, Drawing, Figure, Format, Group, Report, Table, paper},
        world::World,
    },
    train::flops::{self, Compute, Exposure, Model, Trained},
};

/// A run's compute with the interval of its total.
type Computed = (Compute, (f64, f64));

fn main() -> Result<()> {
    let work = tempfile::tempdir()?;
    let data = toy::write_gold(&World::new(&Default::default())?, toy::N_TRAIN, work.path())?;
    let config = hf_config::read(Path::new(toy::BACKBONE))?;
    let model = Model::of(&config);
    let chat = Chat::open(Path::new(toy::BACKBONE), ToolProtocol::Template)?;
    let mut runs: Vec<(&str, Trained, Exposure)> = Vec::new();
    for recipe in &toy::RECIPES {
        let run = toy::run(recipe, &data, work.path())?;
        let rows = trajectory::read(&run.data[0])?;
        let samples = sample::samples(&chat, &rows, &run.supervised()[0], run.rules())?;
        // Samples are packed without padding here.
        let exposure =
            Exposure { lengths: samples.kept.iter().map(|s| s.ids.len()).collect(), epochs: recipe.epochs, padding: 0 };
        let trained =
            recipe.rank.map_or(Trained::Full, |rank| Trained::Lora(flops::adapter_parameters(&config, &Projection::BLOCK, rank)));
        runs.push((recipe.dir, trained, exposure));
    }
    let computed = |prefix: &str| -> Vec<Computed> {
        let own = runs.iter().filter(|(dir, ..)| dir.starts_with(prefix));
        own.map(|(_, trained, exposure)| {
            (flops::compute(&model, *trained, exposure), flops::interval(&model, *trained, exposure, 0))
        })
        .collect()
    };
    let methods = [("WeAct", "adapters/"), ("Single LoRA", "single/"), ("Full SFT", "full")].map(|(name, prefix)| {
        let parts = computed(prefix);
        let sum = |of: fn(&Computed) -> f64| parts.iter().map(of).sum::<f64>();
        // Of several adapters the bounds are summed, as in the paper.
        let interval = (sum(|p| p.1.0), sum(|p| p.1.1));
        (name, sum(|p| p.0.tokens), sum(|p| p.0.dense), sum(|p| p.0.attention), interval)
    });
    let full = methods[2];
    let total = |m: &(&str, f64, f64, f64, (f64, f64))| m.2 + m.3;
    let row = |m: &(&str, f64, f64, f64, (f64, f64))| {
        let tera = |x: f64| Cell::of(format!("{:.3}", x / 1e12));
        vec![
            Cell::of(m.0),
            Cell::of(format!("{:.2}", m.1 / 1e6)),
            tera(m.2),
            tera(m.3),
            tera(total(m)),
            Cell::of(format!("[{:.3}, {:.3}]", m.4.0 / 1e12, m.4.1 / 1e12)),
            Cell::of(format!("{:.2}", m.1 / full.1)),
            Cell::of(format!("{:.2}", total(m) / total(&full))),
        ]
    };
    let header = [
        "Method",
        "tokens (M)",
        "dense (TFLOP)",
        "attention (TFLOP)",
        "total (TFLOP)",
        "95 % interval",
        "tokens / Full",
        "compute / Full",
    ];
    let table = Table {
        name: "fig7".to_owned(),
        title: "Nominal training compute".to_owned(),
        caption: format!("P = {:.0}, L = {}, a = {}; App. B.1.", model.p, model.layers, model.attention_width),
        header: header.map(str::to_owned).into(),
        rows: methods.iter().map(row).collect(),
    };
    let bar = |value: f64| Bar { value: Some(value / 1e12), error: None };
    let figure = Figure {
        name: "fig7".to_owned(),
        title: "Nominal training compute".to_owned(),
        caption: "Dense operations and causal attention, over all passes.".to_owned(),
        x_label: String::new(),
        y_label: "TFLOP".to_owned(),
        drawing: Drawing::Stacked {
            series: vec!["dense".to_owned(), "attention".to_owned()],
            groups: methods.iter().map(|m| Group { name: m.0.to_owned(), bars: vec![bar(m.2), bar(m.3)] }).collect(),
        },
    };
    println!("{}\n{}{}", table.title, table.render(Format::Terminal), table.caption);
    let report = Report {
        title: "The toy's Figure 7".to_owned(),
        notes: Vec::new(),
        provenance: vec![("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned())],
        tables: [vec![table], paper::printed("paper-fig7").into_iter().collect()].concat(),
        figures: vec![figure],
    };
    let out = Path::new("target/toy/fig7");
    report.write(out)?;
    println!("{}", out.join("report.html").display());
    Ok(())
}
