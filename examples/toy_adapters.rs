//! Trains the toy's three adapters, the shared adapter and the fully trained model: the recipe of `datasets/toy/{adapters,single,full}`.
//!
//! ```text
//! cargo run --release --example toy_adapters -- datasets/toy
//! ```
#![allow(clippy::print_stdout)]

mod toy;

use std::{env, path::Path};

use anyhow::{Context, Result};
use burn::tensor::Device;
use weact::eval::world::{World, WorldConfig};

fn main() -> Result<()> {
    let out = env::args().nth(1).context("usage: toy_adapters OUT_DIR")?;
    let work = tempfile::tempdir()?;
    let world = World::new(&WorldConfig::default())?;
    let data = toy::write_gold(&world, toy::N_TRAIN, work.path())?;
    for recipe in &toy::RECIPES {
        let run = toy::run(recipe, &data, work.path())?;
        let (loss, seconds) = toy::train(&run, &Device::flex())?;
        println!("{:<16} loss {loss:.4} nats per token, {seconds:.0} s", recipe.dir);
        toy::ship(&run, &Path::new(&out).join(recipe.dir))?;
    }
    Ok(())
}
