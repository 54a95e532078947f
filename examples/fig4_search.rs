//! The toy's Figure 4: how much of the search supports the answer, on graphs that are exact.
//!
//! ```text
//! cargo run --release --example fig4_search [-- --train DIR]
//! ```
//!
//! Episodes of the toy's Table 1 become evidential query graphs; graphs, figure and report go to `target/toy/fig4`.
#![allow(clippy::print_stdout)]

mod toy;

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, Result};
use weact::{
    core::{io::atomic, trajectory},
    eval::{
        report::{Bar, Cell, Drawing, Figure, Format, Group, Report, Table, paper},
        run::episode_file,
        search_graph::{self, Case, Metrics},
        world::{World, graph::BUILDER},
    },
};

/// The metric, its name in the paper, and whether more is better.
const METRICS: [(&str, &str); 3] = [
    ("query_efficiency", "query utilization (up)"),
    ("answer_graph_coverage", "constraint coverage (up)"),
    ("pk_answer_edge", "PK to answer (down)"),
];

fn main() -> Result<()> {
    let config = toy::Weights::from_arguments()?.configuration("table1.toml")?;
    let out = Path::new("target/toy/fig4");
    let run = out.join("run");
    let records = toy::evaluate(&config, &run, true)?;
    let world = World::new(&config.tools.world.clone().context("a toy world")?)?;
    let mut by_method: Vec<(String, Vec<Metrics>)> = Vec::new();
    for method in &config.methods {
        let episodes = trajectory::read(&run.join("episodes").join(episode_file(&method.name)))?;
        let answers: BTreeMap<String, Option<String>> =
            records.iter().filter(|r| r.method == method.name).map(|r| (r.episode_id(), r.prediction.clone())).collect();
        let mut cases: Vec<Case> = Vec::new();
        for episode in &episodes {
            let question =
                episode.question.as_deref().and_then(|text| world.question(text)).context("a question of the world")?;
            let answer = answers.get(&episode.id).context("an episode has its record")?;
            cases.push(world.search_graph(&question, episode, answer.as_deref())?);
        }
        let lines: Vec<String> = cases.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        atomic::write_text(&out.join(format!("graphs-{}", episode_file(&method.name))), &(lines.join("\n") + "\n"))?;
        let metrics = cases.iter().map(|case| search_graph::metrics(&case.graph, case.annotation.as_ref())).collect();
        by_method.push((method.name.clone(), metrics));
    }
    let means: Vec<_> = by_method.iter().map(|(name, metrics)| (name, search_graph::means(metrics))).collect();
    let mut header = vec!["Method".to_owned(), "graphs".to_owned()];
    header.extend(METRICS.map(|(_, name)| name.to_owned()));
    let row = |(name, means): &(&String, search_graph::Means)| {
        let mut cells = vec![Cell::of(*name), Cell::of(means.n.to_string())];
        cells.extend(METRICS.map(|(metric, _)| Cell::number(means.means[metric], 3)));
        cells
    };
    let table = Table {
        name: "search".to_owned(),
        title: "Search effectiveness".to_owned(),
        caption: format!(
            "Means over tasks; graphs: {BUILDER}. The other SearchAtlas metrics: weact search-graph on the graph files."
        ),
        header,
        rows: means.iter().map(row).collect(),
    };
    let group = |(metric, name): &(&'static str, &str)| Group {
        name: (*name).to_owned(),
        bars: means.iter().map(|(_, means)| Bar { value: means.means[metric], error: None }).collect(),
    };
    let figure = Figure {
        name: "fig4".to_owned(),
        title: "Search effectiveness".to_owned(),
        caption: "As Figure 4 of the paper, on the toy's task files.".to_owned(),
        x_label: String::new(),
        y_label: "share".to_owned(),
        drawing: Drawing::Bars {
            series: means.iter().map(|(name, _)| (*name).clone()).collect(),
            groups: METRICS.iter().map(group).collect(),
        },
    };
    println!("{}\n{}{}", table.title, table.render(Format::Terminal), table.caption);
    let report = Report {
        title: "The toy's Figure 4".to_owned(),
        notes: Vec::new(),
        provenance: toy::provenance(&config),
        tables: [vec![table], paper::printed("paper-fig4").into_iter().collect()].concat(),
        figures: vec![figure],
    };
    report.write(out)?;
    println!("{}", out.join("report.html").display());
    Ok(())
}
