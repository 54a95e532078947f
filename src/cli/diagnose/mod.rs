//! `weact diagnose`: one file per diagnostic.

mod nll_gap;
mod mismatch;
mod lint;
mod retention;
mod interference;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use burn::tensor::{DType, Device};
use weact::{
    core::{Backbone, Error, Result, io::atomic, io::checkpoint::Checkpoint},
    diagnose::{Subjects, config::Run},
    eval::report::{Figure, Report, Table},
};

use super::{Common, exit::Usage};

/// Explains a result: what separates specialists from their fusions, and what is odd about an adapter
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// How much worse fusions predict each capability's text than its specialist (App. E.3)
    NllGap(Args),
    /// How far fusions' updates are from the specialist's on its own activations (App. E.2)
    Mismatch(Args),
    /// What is odd about adapters and fusions; exit status 1 if one of them has no effect
    Lint(Args),
    Retention(retention::Args),
    Interference(interference::Args),
}

/// What every diagnostic takes.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The run's configuration
    #[arg(value_name = "RUN.toml")]
    run: PathBuf,
    /// Where the results go, instead of the configuration's out
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Element type of the weights in memory: f32, bf16 or f16
    #[arg(long, default_value = "f32", value_parser = super::model::dtype)]
    dtype: DType,
    /// Use the embedding as the output head where the checkpoint has none
    #[arg(long)]
    tie_embeddings: bool,
}

/// Runs it.
pub(super) fn run(command: &Command, common: &Common) -> anyhow::Result<ExitCode> {
    match command {
        Command::NllGap(args) => nll_gap::run(args, common),
        Command::Mismatch(args) => mismatch::run(args, common),
        Command::Lint(args) => lint::run(args, common),
        Command::Retention(args) => retention::run(args, common),
        Command::Interference(args) => interference::run(args, common),
    }
}

/// What a configuration names, opened.
struct Opened {
    run: Run,
    subjects: Subjects,
    backbone: Backbone,
    /// What results are made of.
    provenance: Vec<(String, String)>,
}

/// Checks all input, then loads the model and makes the directory of the results.
fn open(args: &Args, common: &Common) -> anyhow::Result<Opened> {
    let mut run = Run::read(&args.run)?;
    run.bootstrap.seed = common.seed.unwrap_or(run.bootstrap.seed);
    run.out = args.out.clone().unwrap_or(run.out);
    let (device_name, device): (String, Device) = common.device.open()?;
    let checkpoint = Checkpoint::open(&run.model, args.tie_embeddings)?;
    let (subjects, warnings) = Subjects::open(&run, &checkpoint)?;
    warnings.iter().for_each(|warning| common.say.warn(warning));
    let backbone = checkpoint.load(&device, args.dtype)?;
    fs::create_dir_all(&run.out).map_err(|e| Error::io("can't make", &run.out, e))?;
    atomic::write_text(&run.out.join("config.toml"), &run.to_toml())?;
    common.say.note(&format!("running on {device_name}"));
    let mut provenance = vec![
        ("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("configuration".to_owned(), run.to_toml().split_whitespace().collect::<Vec<_>>().join(" ")),
        ("device".to_owned(), device_name),
        ("base".to_owned(), checkpoint.digest()),
    ];
    provenance.extend(subjects.specialists.iter().map(|s| (s.capability.to_string(), s.adapter.digest().to_owned())));
    provenance.extend(subjects.fusions.iter().map(|f| (f.name.clone(), f.adapter.digest().to_owned())));
    Ok(Opened { run, subjects, backbone, provenance })
}

/// For the diagnostics that compare.
fn need_fusions(args: &Args) -> anyhow::Result<()> {
    if Run::read(&args.run)?.fusions.is_empty() {
        let why = "there is no [[fusions]] to compare with the adapters";
        return Err(Usage(format!("{}: {why}", args.run.display())).into());
    }
    Ok(())
}

/// Writes a report into the folder `name` of the results, and gives its page.
fn report(opened: &Opened, name: &str, title: &str, tables: Vec<Table>, figure: Figure) -> anyhow::Result<PathBuf> {
    let dir: &Path = &opened.run.out.join(name);
    let provenance = opened.provenance.clone();
    Report { title: title.to_owned(), notes: Vec::new(), provenance, tables, figures: vec![figure] }.write(dir)?;
    Ok(dir.join("report.html"))
}

/// One record a line, as the file `name` of the results.
fn write<T: serde::Serialize>(opened: &Opened, name: &str, records: &[T]) -> Result<()> {
    super::lines::write(&opened.run.out.join(name), records)
}
