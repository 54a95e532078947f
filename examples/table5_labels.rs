//! Table 5 on trajectories of yours: how much two labelling policies differ on the same messages.
//!
//! ```text
//! cargo run --release --example table5_labels [-- FILE.jsonl [BEFORE.toml AFTER.toml]]
//! ```
//!
//! FILE holds trajectories; without it, the recorded conversations of `datasets/webdancer` are imported. The policies are files as
//! `weact data label --rules` takes them; without them: retrieval by `search` alone, and by `search` and `visit`.
#![allow(clippy::print_stdout)]

use std::{collections::BTreeMap, env, fs, path::Path};

use anyhow::{Context, Result};
use weact::{
    core::{
        Trajectory,
        message::{Message, Role},
        trajectory,
    },
    eval::report::{Cell, Format, Table, paper},
    train::data::{self, Rules},
};

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let rows = match arguments.next() {
        Some(file) => trajectory::read(Path::new(&file))?,
        None => {
            let file = concat!(env!("CARGO_MANIFEST_DIR"), "/datasets/webdancer/sample_traj.jsonl");
            data::import(Path::new(file), data::Format::Hermes)?.trajectories
        }
    };
    let read = |path: Option<String>, default: &str| -> Result<Rules> {
        let text = path.map_or_else(|| Ok(default.to_owned()), fs::read_to_string)?;
        toml::from_str(&text).context("a labelling policy")
    };
    let before = read(arguments.next(), "retrieval_tools = [\"search\"]\nretrieval_prefixes = []\n")?;
    let after = read(arguments.next(), "retrieval_tools = [\"search\", \"visit\"]\nretrieval_prefixes = []\n")?;

    let (mut changed, mut total, mut left_out) = (0, 0, 0);
    let mut spans: [BTreeMap<String, usize>; 2] = Default::default();
    for row in &rows {
        let labelled = [&before, &after].map(|rules| data::label(row.clone(), rules));
        let [Ok(first), Ok(second)] = &labelled else {
            left_out += 1;
            continue;
        };
        for (counts, labelled) in spans.iter_mut().zip([first, second]) {
            for span in labelled.spans() {
                *counts.entry(span.capability.to_string()).or_default() += 1;
            }
        }
        let labels = [first, second].map(labels);
        total += labels[0].len();
        changed += labels[0].iter().zip(&labels[1]).filter(|(a, b)| a != b).count();
    }
    let names: Vec<&String> =
        spans.iter().flat_map(BTreeMap::keys).collect::<std::collections::BTreeSet<_>>().into_iter().collect();
    let of = |counts: &BTreeMap<String, usize>, name: &String| counts.get(name).copied().unwrap_or(0);
    let text: Vec<String> = names.iter().map(|name| format!("{name} {}→{}", of(&spans[0], name), of(&spans[1], name))).collect();
    let table = Table {
        name: "table5".to_owned(),
        title: "Policy sensitivity on fixed inputs".to_owned(),
        caption: format!("{} trajectories; {left_out} of them one of the policies can't label.", rows.len()),
        header: ["Policy change", "Changed", "Spans (before→after)"].map(str::to_owned).into(),
        rows: vec![vec![
            Cell::of(format!("retrieval by {} → {}", before.retrieval_tools.join(", "), after.retrieval_tools.join(", "))),
            Cell::of(format!("{changed}/{total}")),
            Cell::of(text.join("; ")),
        ]],
    };
    println!("{}\n{}{}\n", table.title, table.render(Format::Terminal), table.caption);
    let printed = paper::printed("paper-table5").context("it is shipped")?;
    println!("{}\n{}", printed.title, printed.render(Format::Terminal));
    Ok(())
}

/// The label of each assistant message, so that a shifted boundary within one label changes nothing.
fn labels(row: &Trajectory) -> Vec<Option<String>> {
    let assistant = |(i, message): (usize, &Message)| {
        let span = row.spans().iter().find(|span| (span.start..span.end).contains(&i));
        (message.role == Role::Assistant).then(|| span.map(|span| span.capability.to_string()))
    };
    row.messages().iter().enumerate().filter_map(assistant).collect()
}
