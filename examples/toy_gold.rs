//! Writes gold trajectories of the toy world: `staged.jsonl`, which the toy's adapters are trained on, and `plain.jsonl`, the same
//! without stages.
//!
//! ```text
//! cargo run --release --example toy_gold -- OUT_DIR [QUESTIONS]
//! ```

mod toy;

use std::{env, fs, path::Path};

use anyhow::{Context, Result};
use weact::eval::world::World;

fn main() -> Result<()> {
    let out = env::args().nth(1).context("usage: toy_gold OUT_DIR [QUESTIONS]")?;
    let n = env::args().nth(2).map_or(Ok(toy::N_TRAIN), |n| n.parse().context("QUESTIONS must be a whole number"))?;
    fs::create_dir_all(&out)?;
    toy::write_gold(&World::new(&Default::default())?, n, Path::new(&out)).map(drop)
}
