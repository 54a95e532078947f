//! `weact search-graph`.

use std::{path::PathBuf, process::ExitCode};

use serde_json::{Value, json};
use weact::{
    core::trajectory,
    eval::search_graph::{Case, METRICS, MatchRule, lexical_case, means, metrics},
};

use super::{Common, lines};

/// Measures how queries support answers (SearchAtlas)
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// {"case_id", "graph", "annotation"} a line
    file: PathBuf,
    /// The file holds trajectories or episodes: make their graphs first, by their words
    #[arg(long)]
    from_episodes: bool,
    /// How constraints are matched with queries where an annotation has no query_unit_ids
    #[arg(long, value_name = "RULE")]
    match_rule: Option<Rule>,
    /// Where the metrics of each case go; without it, to stdout
    #[arg(long, value_name = "FILE.jsonl")]
    out: Option<PathBuf>,
}

/// Names of the rules.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Rule {
    TokenCoverage,
    DistinctiveTerms,
}

/// Runs it.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let cases = if args.from_episodes { built(args)? } else { read(args)? };
    if cases.is_empty() {
        return Err(weact::core::Error::file(&args.file, "has no cases").into());
    }
    let builder = builder(&cases).map_err(|why| weact::core::Error::file(&args.file, why))?;
    let values: Vec<_> = cases.iter().map(|case| metrics(&case.graph, case.annotation.as_ref())).collect();
    let rows: Vec<Value> = cases
        .iter()
        .zip(&values)
        .map(|(case, values)| {
            let mut row = values.to_map();
            row.shift_insert(0, "case_id".to_owned(), json!(case.case_id));
            if let Some(builder) = &case.builder {
                row.insert("builder".to_owned(), json!(builder));
            }
            Value::Object(row)
        })
        .collect();
    let means = means(&values);
    let mut summary = json!(means);
    summary["builder"] = json!(builder);
    match &args.out {
        Some(path) => lines::write(path, &rows)?,
        None if common.say.json => {}
        None => rows.iter().try_for_each(|row| common.say.result(&row.to_string(), row))?,
    }
    let line = |name: &str| {
        let mean = means.means[name].map_or_else(|| "unknown".to_owned(), |mean| format!("{mean:.3}"));
        let undefined = means.undefined.get(name).map_or_else(String::new, |n| format!(", undefined in {n}"));
        format!("{name}: {mean}{undefined}")
    };
    let text = METRICS.map(line).join("\n");
    match &args.out {
        None if !common.say.json => common.say.note(&format!("means over {} cases\n{text}", cases.len())),
        _ => common.say.summary(&format!("means over {} cases\n{text}", cases.len()), &summary)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn read(args: &Args) -> anyhow::Result<Vec<Case>> {
    let rule = args.match_rule.map(|rule| match rule {
        Rule::TokenCoverage => MatchRule::TokenCoverage,
        Rule::DistinctiveTerms => MatchRule::DistinctiveTerms,
    });
    let mut cases: Vec<Case> = Vec::new();
    for (number, record) in lines::read::<Value>(&args.file)? {
        let case = Case::read(&record, rule).map_err(|why| lines::wrong(&args.file, number, why.to_string()))?;
        if cases.iter().any(|other| other.case_id == case.case_id) {
            return Err(lines::wrong(&args.file, number, format!("case {:?} stands above already", case.case_id)).into());
        }
        cases.push(case);
    }
    Ok(cases)
}

fn built(args: &Args) -> anyhow::Result<Vec<Case>> {
    Ok(trajectory::read(&args.file)?.iter().map(lexical_case).collect::<Result<_, _>>()?)
}

/// What made the graphs: the same for all, since means over graphs made in different ways compare the ways.
fn builder(cases: &[Case]) -> Result<Option<&str>, String> {
    let first = &cases[0];
    match cases.iter().find(|case| case.builder != first.builder) {
        None => Ok(first.builder.as_deref()),
        Some(other) => {
            let made =
                |case: &Case| case.builder.as_ref().map_or_else(|| "no builder".to_owned(), |name| format!("builder {name:?}"));
            let (a, b) = (made(first), made(other));
            Err(format!("case {:?} has {a} and case {:?} has {b}: measure them apart", first.case_id, other.case_id))
        }
    }
}
