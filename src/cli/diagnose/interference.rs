//! `weact diagnose interference`.

use std::{fs, io::IsTerminal, path::PathBuf, process::ExitCode, sync::atomic::Ordering};

use indicatif::ProgressBar;
use serde_json::json;
use weact::{
    eval::report::Format,
    interference::{self, Study},
};

use crate::cli::{Common, exit::Usage, train::interrupt_flag};

/// Products and cosines of capabilities' gradients, and Eq. 3 against what a step does
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct Args {
    /// The study's configuration
    #[arg(value_name = "RUN.toml")]
    run: PathBuf,
    /// Replace what an earlier study left in its directory
    #[arg(long)]
    overwrite: bool,
}

/// Runs it.
pub(in crate::cli) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let mut study = Study::read(&args.run)?;
    study.seed = common.seed.unwrap_or(study.seed);
    let out = study.out.display();
    let is_used = fs::read_dir(&study.out).is_ok_and(|mut entries| entries.next().is_some());
    if is_used && !args.overwrite {
        return Err(Usage(format!("{out}: is not empty: --overwrite replaces what an earlier study left")).into());
    }
    if is_used && !study.out.join(interference::FOUND).exists() {
        return Err(Usage(format!("{out}: holds files but no {}: it is no study's directory", interference::FOUND)).into());
    }
    let say = common.say;
    let (name, device) = common.device.open()?;
    let stop = interrupt_flag()?;
    say.note(&format!("taking gradients on {name}"));
    let bar = (std::io::stderr().is_terminal() && !say.quiet).then(|| ProgressBar::new(0));
    let mut observe = |n_done: usize, n: usize| {
        if let Some(bar) = &bar {
            bar.set_length(n as u64);
            bar.set_position(n_done as u64);
        }
    };
    let found = interference::run(&study, &device, &mut observe, &|| stop.load(Ordering::Relaxed));
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let Some(found) = found? else {
        say.warn("interrupted; nothing was written");
        return Ok(ExitCode::from(130));
    };
    interference::write(&study, &found)?;
    let report = interference::report(&study, &found);
    let text: String =
        report.tables.iter().map(|t| format!("{}\n{}{}\n", t.title, t.render(Format::Terminal), t.caption)).collect();
    say.result(&text, &json!({"out": study.out, "found": found}))?;
    Ok(ExitCode::SUCCESS)
}
