//! Trains the toy's three adapters, the shared adapter and the fully trained model: the recipe of `datasets/toy/{adapters,single,full}`.
//!
//! ```text
//! cargo run --release --example toy_adapters -- datasets/toy
//! ```

mod toy;

use std::{env, path::Path};

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let out = env::args().nth(1).context("usage: toy_adapters OUT_DIR")?;
    toy::Weights::trained(Path::new(&out)).map(drop)
}
