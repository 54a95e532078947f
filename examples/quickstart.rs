//! The whole of WeAct on a laptop: trains three adapters over the shipped toy backbone, lets an agent that switches between them and
//! the backbone alone answer the same questions, and makes the table and the page.
//!
//! ```text
//! cargo run --release --example quickstart
//! ```
//!
//! Records, tables, figures and `report.html` go to `target/quickstart`. Exits with status 1 unless WeAct-hard is clearly better than the base.
#![allow(clippy::print_stdout)]

mod toy;

use std::{fs, path::Path, process::ExitCode, time::Instant};

use anyhow::{Context, Result};
use burn::tensor::Device;
use weact::{
    core::{
        episode::{Event, Line},
        message::Role,
    },
    eval::{
        config::Policy,
        report::{self, Format},
        run::episode_file,
        score,
        world::World,
    },
};

/// Training questions; the shipped adapters have more.
const N_TRAIN: usize = 600;
/// How much better, in points, the average has to be.
const CLEARLY: f64 = 30.0;

fn main() -> Result<ExitCode> {
    let begun = Instant::now();
    let out = Path::new("target/quickstart");
    let work = tempfile::tempdir()?;

    println!("1. Gold trajectories of {N_TRAIN} training questions.");
    let world = World::new(&Default::default())?;
    let data = toy::write_gold(&world, N_TRAIN, work.path())?;

    println!("2. One adapter per capability, each trained on its own tokens and its exit call.");
    for recipe in toy::RECIPES.iter().filter(|recipe| recipe.dir.starts_with("adapters/")) {
        let (loss, seconds) = toy::train(&toy::run(recipe, &data, work.path())?, &Device::flex())?;
        let rank = recipe.rank.context("an adapter has a rank")?;
        println!("   {:<7} rank {rank:>2}, loss {loss:.4} nats per token, {seconds:.0} s", recipe.capability);
    }

    println!("3. Questions about unseen combinations, in the formats of eight benchmarks, for the base and for WeAct-hard.");
    let weights = toy::Weights { dir: work.path().to_owned() };
    let mut config = weights.configuration("table1.toml")?;
    config.methods.retain(|method| method.name == "Base" || method.policy == Policy::Hard);
    config.benchmarks.iter_mut().for_each(|benchmark| benchmark.limit = Some(20));
    let records = toy::evaluate(&config, &out.join("run"), false)?;
    show(out, &config.methods.last().context("two methods")?.name)?;

    let report = report::evaluation("Quickstart: switching weights in the toy world", &records, toy::provenance(&config))?;
    report.write(out)?;
    let table = &report.tables[0];
    println!("{}\n{}{}", table.title, table.render(Format::Terminal), table.caption);
    println!("\n{} has all tables and figures; {:.0} s in all", out.join("report.html").display(), begun.elapsed().as_secs_f64());

    let scores = score::scores(&records)?;
    let names: Vec<String> = config.benchmarks.iter().map(|benchmark| benchmark.name()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let average =
        |method: &str| score::average(&scores, method, &names).map(|mean| 100.0 * mean.mean).context("every task was asked");
    let passed = average("WeAct-hard")? >= average("Base")? + CLEARLY;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints one run of a method: who wrote what.
fn show(out: &Path, method: &str) -> Result<()> {
    let text = fs::read_to_string(out.join("run/episodes").join(episode_file(method)))?;
    let lines: Vec<Line> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let first = &lines.first().context("an episode")?.episode;
    println!();
    for line in lines.iter().filter(|line| line.episode == *first) {
        let Event::Message(m) = &line.event else { continue };
        let calls: Vec<String> =
            m.message.tool_calls.iter().map(|c| format!("{}{}", c.name, serde_json::json!(c.arguments))).collect();
        let who = match (m.message.role, &m.route) {
            (Role::Assistant, Some(route)) => route.split('@').next().unwrap_or(route).to_owned(),
            (Role::Assistant, None) => "harness".to_owned(),
            (Role::Tool, _) if m.message.name.as_deref().is_some_and(|name| name.ends_with("_lora")) => continue,
            (role, _) => format!("{role:?}").to_lowercase(),
        };
        let text = format!("{} {}", m.message.content, calls.join(" "));
        let short: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(100).collect();
        println!("   {who:<8} {short}");
    }
    println!();
    Ok(())
}
