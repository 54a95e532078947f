//! The command line: one file per command. A command parses its arguments, calls a library and says what came of it.

mod device;
mod say;
mod exit;
mod lines;
mod rows;
mod model;
mod memory;

mod inspect;
mod data;
mod check;
mod render;
mod score;
mod generate;
mod fold;
mod train;
mod merge;
mod run;
mod grade;
mod eval;
mod report;
mod stats;
mod search_graph;
mod diagnose;
mod doctor;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use say::Say;

/// Trains one LoRA adapter per capability and lets an agent switch between them by tool calls.
#[derive(Debug, Parser)]
#[command(name = "weact", version, propagate_version = true, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// What every command takes.
#[derive(Debug, clap::Args)]
struct Common {
    /// Where tensors are computed: cpu, cuda, cuda:N, or auto (cuda where built in and present)
    #[arg(long, global = true, default_value = "auto", value_name = "DEVICE")]
    device: device::Choice,
    /// Seed of every random draw (default 0; for train, what the configuration says)
    #[arg(long, global = true, value_name = "N")]
    seed: Option<u64>,
    #[command(flatten)]
    say: Say,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::Args),
    #[command(subcommand)]
    Data(data::Command),
    Render(render::Args),
    Score(score::Args),
    Generate(generate::Args),
    Fold(fold::Args),
    Train(train::Args),
    Merge(merge::Args),
    Run(run::Args),
    Grade(grade::Args),
    Eval(eval::Args),
    Report(report::Args),
    #[command(subcommand)]
    Stats(stats::Command),
    SearchGraph(search_graph::Args),
    #[command(subcommand)]
    Diagnose(diagnose::Command),
    Doctor(doctor::Args),
}

/// Parses the command line and runs the command.
pub(super) fn main() -> ExitCode {
    let Cli { common, command } = Cli::parse();
    exit::status(|| match command {
        Command::Inspect(args) => inspect::run(&args, &common),
        Command::Data(command) => data::run(&command, &common),
        Command::Render(args) => render::run(&args, &common),
        Command::Score(args) => score::run(&args, &common),
        Command::Generate(args) => generate::run(&args, &common),
        Command::Fold(args) => fold::run(&args, &common),
        Command::Train(args) => train::run(&args, &common),
        Command::Merge(args) => merge::run(&args, &common),
        Command::Run(args) => run::run(&args, &common),
        Command::Grade(args) => grade::run(&args, &common),
        Command::Eval(args) => eval::run(&args, &common),
        Command::Report(args) => report::run(&args, &common),
        Command::Stats(command) => stats::run(&command, &common),
        Command::SearchGraph(args) => search_graph::run(&args, &common),
        Command::Diagnose(command) => diagnose::run(&command, &common),
        Command::Doctor(args) => doctor::run(&args, &common),
    })
}
