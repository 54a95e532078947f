//! Table 5 on trajectories of yours: how much two labelling policies differ on the same messages.
//!
//! ```text
//! cargo run --release --example table5_labels [-- FILE.jsonl [BEFORE.toml AFTER.toml]]
//! cargo run --release --example table5_labels -- FILE.jsonl BEFORE.toml URL MODEL [KEY_VARIABLE]
//! ```
//!
//! FILE holds trajectories; without it, the recorded conversations of `datasets/webdancer` are imported. The policies are files as
//! `weact data label --rules` takes them; without them: retrieval by `search` alone, and by `search` and `visit`. A URL in the second's
//! place is an OpenAI-compatible endpoint, whose model labels with the names of the first; its key is in an environment variable.
#![allow(clippy::print_stdout)]

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use weact::{
    core::{
        Trajectory,
        message::{Message, Role},
        trajectory,
    },
    eval::report::{Cell, Format, Table, paper},
    infer::remote::{Client, Settings},
    train::data::{self, Rules, annotate},
};

/// Who labels.
enum Policy {
    Rules(Rules),
    /// A model, and the rules whose names it uses.
    Model(Client, Rules),
}

impl Policy {
    fn label(&self, row: Trajectory) -> Result<Trajectory, String> {
        match self {
            Self::Rules(rules) => data::label(row, rules),
            Self::Model(client, rules) => annotate::annotate(row, rules, &mut |prompt| {
                client.complete(None, prompt, Some(0)).map(|reply| reply.text).map_err(|error| error.to_string())
            }),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Rules(rules) => format!("retrieval by {}", rules.retrieval_tools.join(", ")),
            Self::Model(client, _) => client.model().to_owned(),
        }
    }
}

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
        let text = match &path {
            Some(path) => fs::read_to_string(path).with_context(|| path.clone())?,
            None => default.to_owned(),
        };
        toml::from_str(&text).with_context(|| path.unwrap_or_default())
    };
    let before = read(arguments.next(), "retrieval_tools = [\"search\"]\nretrieval_prefixes = []\n")?;
    let after = match arguments.next() {
        Some(url) if url.contains("://") => {
            let model = arguments.next().context("a URL needs the name of a MODEL after it")?;
            let settings = Settings { key_env: arguments.next(), ..Settings::new(&url, &model) };
            Policy::Model(Client::new(settings)?, before.clone())
        }
        path => Policy::Rules(read(path, "retrieval_tools = [\"search\", \"visit\"]\nretrieval_prefixes = []\n")?),
    };
    let before = Policy::Rules(before);

    let (mut changed, mut total, mut left_out) = (0, 0, 0);
    let mut spans: [BTreeMap<String, usize>; 2] = Default::default();
    for row in &rows {
        let (first, second) = match [&before, &after].map(|policy| policy.label(row.clone())) {
            [Ok(first), Ok(second)] => (first, second),
            [first, second] => {
                left_out += 1;
                first.err().into_iter().chain(second.err()).for_each(|why| println!("{} is left out: {why}", row.id));
                continue;
            }
        };
        for (counts, labelled) in spans.iter_mut().zip([&first, &second]) {
            for span in labelled.spans() {
                *counts.entry(span.capability.to_string()).or_default() += 1;
            }
        }
        let labels = [&first, &second].map(labels);
        ensure!(labels[0].len() == labels[1].len(), "{}: the policies label other messages", row.id);
        total += labels[0].len();
        changed += labels[0].iter().zip(&labels[1]).filter(|(a, b)| a != b).count();
    }
    let names: BTreeSet<&String> = spans.iter().flat_map(BTreeMap::keys).collect();
    let of = |counts: &BTreeMap<String, usize>, name: &String| counts.get(name).copied().unwrap_or(0);
    let text: Vec<String> =
        names.into_iter().map(|name| format!("{name} {}→{}", of(&spans[0], name), of(&spans[1], name))).collect();
    let table = Table {
        name: "table5".to_owned(),
        title: "Policy sensitivity on fixed inputs".to_owned(),
        caption: format!("{} trajectories; {left_out} of them one of the policies can't label.", rows.len()),
        header: ["Policy change", "Changed", "Spans (before→after)"].map(str::to_owned).into(),
        rows: vec![vec![
            Cell::of(format!("{} → {}", before.name(), after.name())),
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
