//! `weact stats`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use weact::core::stats::{self, Law, Outcome, Verdict};

use super::{Common, exit::Usage, lines};

/// Statistics of outcomes
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    Paired(Paired),
}

/// Compares two runs over the same tasks: exact McNemar, and a bootstrap over tasks
#[derive(Debug, clap::Args)]
pub(super) struct Paired {
    /// Outcomes of A: {"id", "task", "seed", "success": 0 or 1} a line
    a: PathBuf,
    /// Outcomes of B
    b: PathBuf,
    /// The key whose values are the clusters: outcomes of one are not independent
    #[arg(long, default_value = "task", value_name = "KEY")]
    cluster: String,
    /// Differences up to this many points count as none
    #[arg(long, default_value_t = 5.0, value_name = "POINTS")]
    margin: f64,
}

#[derive(Deserialize)]
struct Line {
    id: Value,
    success: Value,
    seed: u64,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Runs it.
pub(super) fn run(command: &Command, common: &Common) -> anyhow::Result<ExitCode> {
    let Command::Paired(Paired { a, b, cluster, margin }) = command;
    if !(0.0..=100.0).contains(margin) {
        return Err(Usage(format!("--margin is {margin}: points are between 0 and 100")).into());
    }
    let (first, second) = (read(a, cluster)?, read(b, cluster)?);
    let result = stats::paired(&first, &second, margin / 100.0, common.seed.unwrap_or(0))
        .map_err(|why| anyhow::anyhow!("A is {}, B is {}: {why}", a.display(), b.display()))?;
    let percent = |x: f64| format!("{:.1}", 100.0 * x);
    let interval = |(low, high): (f64, f64)| format!("[{}, {}]", percent(low), percent(high));
    let verdict = match result.verdict {
        Verdict::Better => "B is credibly better",
        Verdict::Worse => "B is credibly worse",
        Verdict::NoCredibleDifference => "no credible difference",
    };
    let law = match result.law {
        Law::Exact => "exact".to_owned(),
        Law::Sampled(n) => format!("{n}-fold"),
    };
    let p = if result.mcnemar_p < 1e-4 { "< 0.0001".to_owned() } else { format!("= {:.4}", result.mcnemar_p) };
    let text = format!(
        "{} pairs\nA        {} % {}\nB        {} % {}\nB - A    {} points; 95 % {}, 90 % {} ({law} bootstrap over {} of {cluster})\n\
         McNemar  p {} (only A {}, only B {})\n{verdict}; {} within {margin} points",
        result.n,
        percent(result.rate_a),
        interval(result.wilson_a),
        percent(result.rate_b),
        interval(result.wilson_b),
        percent(result.delta),
        interval(result.bootstrap95),
        interval(result.bootstrap90),
        result.n_clusters,
        p,
        result.b,
        result.c,
        if result.equivalent { "equivalent" } else { "not shown to be equivalent" },
    );
    if result.n_clusters < 2 {
        common.say.warn(&format!(
            "all pairs are of one {cluster}: the intervals and the verdict say nothing, --cluster names another key"
        ));
    }
    common.say.result(&text, &json!(result))?;
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path, cluster: &str) -> anyhow::Result<Vec<Outcome>> {
    let mut places = BTreeMap::new();
    let mut outcomes = Vec::new();
    for (number, line) in lines::read::<Line>(path)? {
        let wrong = |why: String| lines::wrong(path, number, why);
        let text = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Number(n) => Some(n.to_string()),
            _ => None,
        };
        let id = text(&line.id).ok_or_else(|| wrong("id must be a text or a number".to_owned()))?;
        let success = match &line.success {
            Value::Bool(yes) => *yes,
            Value::Number(n) if n.as_u64() == Some(0) => false,
            Value::Number(n) if n.as_u64() == Some(1) => true,
            other => return Err(wrong(format!("success must be 0 or 1, not {other}")).into()),
        };
        let task = match cluster {
            "id" => Some(id.clone()),
            "seed" => Some(line.seed.to_string()),
            key => line.others.get(key).and_then(text),
        };
        let task = task.ok_or_else(|| wrong(format!("no {cluster:?}: every line names its cluster (--cluster KEY)")))?;
        let seed = line.seed;
        if let Some(before) = places.insert((id.clone(), seed), number) {
            return Err(wrong(format!("id {id:?} with seed {seed} stands on line {before} already")).into());
        }
        outcomes.push(Outcome { id, task, seed, success });
    }
    if outcomes.is_empty() {
        return Err(weact::core::Error::file(path, "has no outcomes").into());
    }
    Ok(outcomes)
}
