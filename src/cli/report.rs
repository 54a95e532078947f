//! `weact report`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde_json::{Value, json};
use weact::eval::{
    record::Record,
    report::{Format, Report, evaluation},
    run,
};

use super::{Common, exit::Usage};

/// Makes tables, figures and one page of evaluations
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Run directories of weact eval; several make one report
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// Where report.html, report.md, tables and figures go; without it, tables go to stdout
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Of the tables on stdout: terminal, markdown, csv or latex
    #[arg(long, default_value = "terminal", value_parser = format)]
    format: Format,
    /// The report's title
    #[arg(long, default_value = "Evaluation")]
    title: String,
}

fn format(name: &str) -> Result<Format, String> {
    match name {
        "terminal" => Ok(Format::Terminal),
        "markdown" => Ok(Format::Markdown),
        "csv" => Ok(Format::Csv),
        "latex" => Ok(Format::Latex),
        _ => Err("use terminal, markdown, csv or latex".to_owned()),
    }
}

/// Runs it.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let say = common.say;
    let mut records: Vec<Record> = Vec::new();
    let mut provenance = Vec::new();
    for dir in &args.runs {
        if !dir.is_dir() {
            return Err(Usage(format!("{}: is no run directory", dir.display())).into());
        }
        let (of_run, torn) = run::read(dir)?;
        if torn > 0 {
            say.warn(&format!("{}: the last line is not finished and left out", dir.display()));
        }
        let config = dir.join("config.toml");
        let text = fs::read_to_string(&config).map_err(|e| weact::core::Error::io("can't read", &config, e))?;
        provenance.push((format!("{}", dir.display()), text.split_whitespace().collect::<Vec<_>>().join(" ")));
        provenance.extend(parts(dir)?);
        records.extend(of_run);
    }
    if records.is_empty() {
        return Err(weact::core::Error::file(&args.runs[0], "has no records").into());
    }
    provenance.push(("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned()));
    let report: Report = evaluation(&args.title, &records, provenance)?;
    match &args.out {
        Some(dir) => {
            report.write(dir)?;
            let page = dir.join("report.html");
            let (n_tables, n_figures) = (report.tables.len(), report.figures.len());
            let text = format!("{n_tables} tables and {n_figures} figures: {}", page.display());
            say.summary(&text, &json!({"records": records.len(), "page": page, "tables": n_tables, "figures": n_figures}))?;
        }
        None => {
            let text: Vec<String> =
                report.tables.iter().map(|table| format!("{}\n{}", table.title, table.render(args.format))).collect();
            let tables: Vec<_> = report.tables.iter().map(|t| json!({"name": t.name, "csv": t.render(Format::Csv)})).collect();
            say.result(&text.join("\n"), &json!({"records": records.len(), "tables": tables}))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What the methods and benchmarks of a run were: digests, policies, graders.
fn parts(dir: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let path = dir.join("parts.json");
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(&path).map_err(|e| weact::core::Error::io("can't read", &path, e))?;
    let parts: BTreeMap<String, Value> =
        serde_json::from_str(&text).map_err(|e| weact::core::Error::file(&path, e.to_string()))?;
    Ok(parts.into_iter().map(|(name, value)| (name, value.to_string())).collect())
}
