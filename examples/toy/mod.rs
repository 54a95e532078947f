//! What the toy's examples share: how its adapters and baselines are trained, with the budgets of the paper (§4.1, App. F) scaled to
//! the toy, and how they are evaluated.
#![allow(dead_code, reason = "each example uses a part of it")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use burn::tensor::{DType, Device};
use indicatif::ProgressBar;
use weact::{
    core::{
        Adapter, Backbone, Capability,
        chat::{Chat, ToolProtocol},
        context::Retention,
        io::{atomic, checkpoint::Checkpoint, peft},
        sample,
    },
    diagnose::{Fusion, Specialist, Subjects, subjects},
    eval::{
        self,
        record::Record,
        run::{Existing, Progress, Rules, Selection, Store},
        world::{
            World,
            gold::{AGENT, Form},
            question::Split,
        },
    },
    train::{
        config::{self, Kind},
        log::Event,
        merge::{self, Method, Preset, Source},
        run_directory,
        sft::{self, Options, Outcome},
    },
};

/// The shipped backbone.
pub(crate) const BACKBONE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/datasets/toy/backbone");
/// Training questions, each told in stages and without.
pub(crate) const N_TRAIN: usize = 1200;

/// What is trained, and on what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipe {
    /// The directory, below the one of all.
    pub(crate) dir: &'static str,
    /// Whose tokens are supervised.
    pub(crate) capability: &'static str,
    /// The adapter's rank; all weights are trained where there is none.
    pub(crate) rank: Option<usize>,
    /// Passes over the data.
    pub(crate) epochs: usize,
    /// Peak learning rate.
    pub(crate) lr: f64,
}

/// Ranks stand in the paper's ratio of 32:64:32 and 128; epochs are the paper's.
pub(crate) const RECIPES: [Recipe; 5] = [
    Recipe { dir: "adapters/plan", capability: "plan", rank: Some(8), epochs: 2, lr: 5e-3 },
    Recipe { dir: "adapters/search", capability: "search", rank: Some(16), epochs: 3, lr: 5e-3 },
    Recipe { dir: "adapters/write", capability: "write", rank: Some(8), epochs: 3, lr: 5e-3 },
    Recipe { dir: "single/agent", capability: AGENT, rank: Some(32), epochs: 3, lr: 5e-3 },
    Recipe { dir: "full", capability: AGENT, rank: None, epochs: 5, lr: 1e-3 },
];

/// The training files of a world.
#[derive(Debug)]
pub(crate) struct Data {
    staged: PathBuf,
    plain: PathBuf,
}

/// Writes the gold trajectories of the first `n` training questions into `dir`.
pub(crate) fn write_gold(world: &World, n: usize, dir: &Path) -> Result<Data> {
    let library = world.library()?;
    let questions = world.questions(Split::Train, n);
    let write = |name: &str, form| -> Result<PathBuf> {
        let mut lines = String::new();
        for question in &questions {
            let gold = world.gold(question, form, &library.tools()?)?;
            lines += &(serde_json::to_string(&gold)? + "\n");
        }
        let path = dir.join(name);
        atomic::write_text(&path, &lines)?;
        Ok(path)
    };
    Ok(Data { staged: write("staged.jsonl", Form::Staged)?, plain: write("plain.jsonl", Form::Plain)? })
}

/// The run of a recipe, as `weact train` takes it.
pub(crate) fn run(recipe: &Recipe, data: &Data, out: &Path) -> Result<config::Run> {
    let capability = Capability::new(recipe.capability)?;
    let staged = recipe.capability != AGENT;
    let lora = recipe.rank.map(|rank| config::Lora { rank, alpha: 2.0 * rank as f64, ..Default::default() });
    Ok(config::Run {
        kind: if lora.is_some() { Kind::Lora } else { Kind::Full },
        model: PathBuf::from(BACKBONE),
        data: vec![if staged { data.staged.clone() } else { data.plain.clone() }],
        capability: lora.is_some().then(|| capability.clone()),
        capabilities: if lora.is_some() { Vec::new() } else { vec![capability] },
        out: out.join(recipe.dir),
        lora: lora.unwrap_or_default(),
        train: config::Train {
            epochs: Some(recipe.epochs),
            batch_rows: 16,
            max_length: 768,
            lr: recipe.lr,
            warmup: 10.0,
            save_every: 1000,
            ..Default::default()
        },
        // The paper keeps 5; three hops with retries and visits have more, and the toy's words for an omitted one are bytes.
        context: config::Context { keep_tool_result: 16, require_exit: staged, ..Default::default() },
        valid: None,
    })
}

/// Trains, with a progress bar; the last loss in nats per supervised token, and the seconds.
pub(crate) fn train(run: &config::Run, device: &Device) -> Result<(f64, f64)> {
    let begun = Instant::now();
    let bar = ProgressBar::new_spinner();
    let mut last = f64::NAN;
    let mut observe = |event: &Event| {
        if let Event::Step(step) = event {
            last = step.loss.unwrap_or(last);
            bar.set_message(format!("{}: step {}, loss {last:.4}", run.out.display(), step.step));
            bar.inc(1);
        }
    };
    let options = Options { existing: run_directory::Existing::Refuse, allow_empty: false, tie_embeddings: false };
    let outcome = sft::train(run, options, device, &mut observe, &|| false)?;
    bar.finish_and_clear();
    match outcome {
        Outcome::Done(_) => Ok((last, begun.elapsed().as_secs_f64())),
        Outcome::Interrupted { step } => bail!("interrupted after step {step}"),
    }
}

/// Copies what a training leaves to users, an adapter's files or a model's, from its run directory.
pub(crate) fn ship(run: &config::Run, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(&run.out)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a file's name")?;
        if path.is_file() && !["config.toml", "log.jsonl"].contains(&name) && !name.starts_with('.') {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// Where the weights of a table are.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    /// With `adapters/`, `single/` and `full/`.
    pub(crate) dir: PathBuf,
}

impl Weights {
    /// Those that are shipped.
    pub(crate) fn shipped() -> Self {
        Self { dir: Path::new(env!("CARGO_MANIFEST_DIR")).join("datasets/toy") }
    }

    /// Trains them anew into `dir`, and says how long each took.
    #[allow(clippy::print_stdout)]
    pub(crate) fn trained(dir: &Path) -> Result<Self> {
        let world = World::new(&Default::default())?;
        let work = tempfile::tempdir()?;
        let data = write_gold(&world, N_TRAIN, work.path())?;
        for recipe in &RECIPES {
            let run = run(recipe, &data, work.path())?;
            let (loss, seconds) = train(&run, &Device::flex())?;
            println!("trained {:<16} loss {loss:.4} nats per token, {seconds:.0} s", recipe.dir);
            ship(&run, &dir.join(recipe.dir))?;
        }
        Ok(Self { dir: dir.to_owned() })
    }

    /// The adapters of another world, trained on its first `n` questions into `dir`.
    pub(crate) fn of_world(world: &World, n: usize, dir: &Path) -> Result<Self> {
        let data = write_gold(world, n, dir)?;
        for recipe in RECIPES.iter().filter(|recipe| recipe.dir.starts_with("adapters/")) {
            train(&run(recipe, &data, dir)?, &Device::flex())?;
        }
        Ok(Self { dir: dir.to_owned() })
    }

    /// From `--train [DIR]` on the command line: trained anew, into DIR or a folder in the target folder; else the shipped ones.
    pub(crate) fn from_arguments() -> Result<Self> {
        let mut arguments = std::env::args().skip_while(|argument| argument != "--train");
        match (arguments.next(), arguments.next()) {
            (None, _) => Ok(Self::shipped()),
            (Some(_), dir) => Self::trained(Path::new(&dir.unwrap_or_else(|| "target/toy-weights".to_owned()))),
        }
    }

    /// The configuration `datasets/toy/NAME` with these weights and its files where they are.
    pub(crate) fn configuration(&self, name: &str) -> Result<eval::config::Run> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut config = eval::config::Run::read(&root.join("datasets/toy").join(name))?;
        let moved = |path: &Path| match path.strip_prefix("datasets/toy") {
            Ok(part) if part.starts_with("adapters") || part.starts_with("single") || part.starts_with("full") => {
                self.dir.join(part)
            }
            _ => root.join(path),
        };
        for method in &mut config.methods {
            method.model = moved(&method.model);
            method.adapters = method.adapters.as_deref().map(moved);
        }
        for benchmark in &mut config.benchmarks {
            benchmark.file = root.join(&benchmark.file);
        }
        Ok(config)
    }
}

/// Adds a row for each of the paper's fusions of the adapters of `like`, the method that switches, before it. The merged adapters go
/// into `out`.
pub(crate) fn add_fusions(config: &mut eval::config::Run, like: &str, out: &Path) -> Result<()> {
    let at = config.methods.iter().position(|method| method.name == like).context("the table has the method that switches")?;
    let switching = config.methods[at].clone();
    let library = switching.adapters.clone().context("it has adapters")?;
    let dirs = ["plan", "search", "write"].map(|alias| library.join(alias));
    let inputs = merge::files::open(&dirs, false)?;
    for (name, method) in FUSIONS.iter().take(4).rev() {
        let dir = out.join(method.name());
        merge::files::to_files(&dir, &inputs, &method.recipe(Preset::Peft), None, merge::files::Existing::Overwrite)?;
        let fused = eval::config::Method { name: (*name).to_owned(), fused: Some(dir), ..switching.clone() };
        config.methods.insert(at, fused);
    }
    Ok(())
}

/// Runs an evaluation into `out`, anew, with a progress bar, and gives its records; `reveal` keeps the episodes of obfuscated files too.
pub(crate) fn evaluate(config: &eval::config::Run, out: &Path, reveal: bool) -> Result<Vec<Record>> {
    let benches = eval::run::benches(config, &Selection::default())?;
    let mut store = Store::open(out, &config.to_toml(), Existing::Overwrite)?;
    let rules = Rules { seed: config.seed, retry: config.retry.clone(), reveal };
    for prepared in eval::run::methods(config)? {
        let method = prepared.load(&Device::flex(), DType::F32)?;
        let bar = ProgressBar::new(benches.iter().map(|bench| bench.tasks.len() as u64).sum());
        let mut observe = |progress: &Progress<'_>| {
            if let Progress::Attempt { record, last } = progress {
                bar.set_message(record.method.clone());
                bar.inc(u64::from(*last));
            }
        };
        eval::run::run(&method, &benches, &rules, &mut store, &mut observe, &|| false)?;
        bar.finish_and_clear();
    }
    Ok(store.records().to_vec())
}

/// Says what a report is made of.
pub(crate) fn provenance(config: &eval::config::Run) -> Vec<(String, String)> {
    let text = config.to_toml().replace(env!("CARGO_MANIFEST_DIR"), ".");
    vec![
        ("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("configuration".to_owned(), text.split_whitespace().collect::<Vec<_>>().join(" ")),
    ]
}

/// Validation questions of the diagnostics, as many as the paper has records of each capability (App. E.1); the world has some fewer.
pub(crate) const N_VALID: usize = 200;

/// The static merges of the toy's adapters, by the name in tables: those of the paper, then the others. Each has the rank that the
/// largest adapter has, as the paper's 64 is, but for the first, which is exact.
pub(crate) const FUSIONS: [(&str, Method); 8] = [
    ("Full Additive", Method::Additive),
    ("TIES-Merging", Method::Ties),
    ("DARE-TIES", Method::DareTies),
    ("TSPA", Method::Tspa),
    ("Average", Method::Average),
    ("Additive, truncated", Method::Linear),
    ("KnOTS-TIES", Method::KnotsTies),
    ("DARE-linear", Method::DareLinear),
];

/// Those of [`FUSIONS`].
pub(crate) fn fusions(adapters: &[(&str, &Adapter)]) -> Result<Vec<(String, Adapter)>> {
    let sources: Vec<Source<'_>> = adapters.iter().map(|(id, adapter)| Source::memory(id, adapter)).collect();
    let fusion = |(name, method): &(&str, Method)| {
        let (adapter, _) = merge::merge(&sources, &method.recipe(Preset::Peft))?;
        Ok(((*name).to_owned(), adapter))
    };
    FUSIONS.iter().map(fusion).collect()
}

/// The backbone, and its three specialists with their fusions and validation records.
pub(crate) fn subjects(weights: &Weights, world: &World) -> Result<(Backbone, Subjects)> {
    let backbone = Checkpoint::open(Path::new(BACKBONE), false)?.load(&Device::flex(), DType::F32)?;
    let chat = Chat::open(Path::new(BACKBONE), ToolProtocol::Template)?;
    let tools = world.library()?.tools()?;
    let gold = world
        .questions(Split::Val, N_VALID)
        .iter()
        .map(|q| world.gold(q, Form::Staged, &tools))
        .collect::<Result<Vec<_>, _>>()?;
    let rules = sample::Rules {
        retention: Retention { keep_tool_result: 16, clip_tool_result: None },
        max_length: 768,
        require_exit: true,
    };
    let mut specialists = Vec::new();
    for recipe in RECIPES.iter().filter(|recipe| recipe.dir.starts_with("adapters/")) {
        let capability = Capability::new(recipe.capability)?;
        let adapter = peft::read(&weights.dir.join(recipe.dir))?;
        let samples = subjects::records(&gold, &chat, &capability, rules, &Default::default())?;
        let dropped = samples.dropped_by_reason();
        specialists.push(Specialist { capability, adapter, records: samples.kept, dropped });
    }
    let adapters: Vec<(&str, &Adapter)> = specialists.iter().map(|s| (s.capability.as_str(), &s.adapter)).collect();
    let fusions = fusions(&adapters)?.into_iter().map(|(name, adapter)| Fusion { name, adapter }).collect();
    Ok((backbone, Subjects { specialists, fusions }))
}
