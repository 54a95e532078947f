//! Writes the toy world's eight task files and its exercises: the recipe of `datasets/toy/bench`.
//!
//! ```text
//! cargo run --release --example toy_bench -- datasets/toy/bench
//! ```

use std::{env, fs, path::Path};

use anyhow::{Context, Result};
use weact::{
    core::io::atomic,
    eval::{
        benchmark::Benchmark,
        suite,
        task::Task,
        world::{World, WorldConfig, general, tasks::BENCHMARKS},
    },
};

/// Questions of each file.
const N: usize = 40;
/// Exercises.
const N_EXERCISES: usize = 100;

fn main() -> Result<()> {
    let out = env::args().nth(1).context("usage: toy_bench OUT_DIR")?;
    let world = World::new(&WorldConfig::default())?;
    for (benchmark, file) in BENCHMARKS {
        let path = Path::new(&out).join(file);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        suite::write(benchmark, &path, &world.tasks(benchmark, N)?)?;
    }
    let exercise = |(i, exercise): (usize, general::Exercise)| Task {
        id: format!("exercise-{i}"),
        question: exercise.question,
        gold: vec![exercise.answer.trim().to_owned()],
        files: Vec::new(),
        more: Default::default(),
    };
    let exercises: Vec<Task> = general::exercises(1, N_EXERCISES).into_iter().enumerate().map(exercise).collect();
    let path = Path::new(&out).join("general/exercises.csv");
    fs::create_dir_all(path.parent().context("a folder")?)?;
    suite::write(Benchmark::Bamboogle, &path, &exercises)?;
    let readme = "Questions about the toy research world in the formats of public benchmarks, and exercises of general skill. Our own work, CC0.\n\
                  Recipe: `cargo run --release --example toy_bench -- datasets/toy/bench`.\n";
    Ok(atomic::write_text(&Path::new(&out).join("README.md"), readme)?)
}
