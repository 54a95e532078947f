//! `weact merge`.

use std::{path::PathBuf, process::ExitCode};

use clap::ValueEnum;
use serde_json::json;
use weact::{
    core::{
        Adapter, Capability,
        chat::{Chat, ToolProtocol},
        context::Retention,
        sample::{Rules, Sample},
    },
    diagnostics::teacher_forced,
    train::{
        dataset::{self, Tolerance},
        merge::{
            Method, Preset, Rank, Recipe, Record, Source, Space,
            files::{self, Existing, Input},
            lorahub,
            recipe::{Consensus, Lambda, Vote},
        },
    },
};

use super::{Common, exit::Usage, model};

/// Merges adapters into one: an ordinary PEFT adapter of one rank and scale 1, with a record of what was done
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// additive, average, linear, svd, magnitude-prune, ties, dare-ties, dare-ties-single, dare-linear, knots, knots-ties, tspa or
    /// lorahub
    #[arg(long, value_name = "M")]
    method: Method,
    /// Whose rules hold where implementations differ: peft, mergekit or original
    #[arg(long, default_value = "peft", value_name = "P")]
    preset: Preset,
    /// Rank of the result (default: the largest of the adapters'; for additive, the sum of them, which is exact)
    #[arg(long, value_name = "R")]
    rank: Option<usize>,
    /// Share of the entries that a trim leaves, in (0, 1] (default 0.2)
    #[arg(long, value_name = "D")]
    density: Option<f64>,
    /// Probability with which DARE drops an entry (default 0.5); --seed seeds its masks
    #[arg(long, value_name = "P")]
    drop_rate: Option<f64>,
    /// One weight for each adapter, with commas between them; they are not normalised (default 1 each)
    #[arg(long, value_name = "W,..", value_delimiter = ',', allow_hyphen_values = true)]
    weights: Vec<f64>,
    /// What the result is multiplied by (default 1; for tspa, what fits the mean of the updates best)
    #[arg(long, value_name = "L", allow_hyphen_values = true)]
    lambda: Option<f64>,
    /// What counts in the election of signs
    #[arg(long, value_name = "V")]
    vote: Option<VoteBy>,
    /// Merge A and B apart, as PEFT does without `_svd`: the result holds products of different adapters' factors
    #[arg(long)]
    factor_wise: bool,
    /// An adapter may lack modules that another has; it adds nothing there
    #[arg(long)]
    union: bool,
    /// Merge adapters without cards although their configurations name different bases
    #[arg(long)]
    any_base: bool,
    /// The merged adapter's alias (default: the name of its folder)
    #[arg(long, value_name = "NAME")]
    alias: Option<Capability>,
    /// The merged adapter's folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Replace an earlier merge
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    search: SearchArgs,
    /// The adapters' folders
    #[arg(required = true, value_name = "ADAPTER")]
    adapters: Vec<PathBuf>,
}

/// What lorahub's search needs.
#[derive(Debug, clap::Args)]
struct SearchArgs {
    /// lorahub: the checkpoint under the adapters
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// lorahub: trajectories on whose stages the weights are found
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,
    /// lorahub: longest sample in tokens
    #[arg(long, default_value_t = 4096, value_name = "N")]
    max_length: usize,
    /// lorahub: evaluations of the loss
    #[arg(long, default_value_t = 40, value_name = "N")]
    evaluations: usize,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum VoteBy {
    /// The sum of the entries
    Mass,
    /// The sum of their signs
    Frequency,
}

/// Checks the adapters, merges them, and says what the rank keeps.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let mut recipe = recipe(args, common.seed)?;
    let inputs = files::open(&args.adapters, args.any_base)?;
    for input in inputs.iter().filter(|input| input.card.is_none()) {
        common.say.warn(&format!("{}: no card.toml; which base it was trained over is not known", input.dir.display()));
    }
    let found = match args.method {
        Method::Lorahub => {
            let found = find_weights(args, common, &inputs)?;
            recipe.weights.clone_from(&found.weights);
            Some(found)
        }
        _ => None,
    };
    let existing = if args.overwrite { Existing::Overwrite } else { Existing::Refuse };
    let record = files::to_files(&args.out, &inputs, &recipe, args.alias.as_ref(), existing)?;
    let kept = kept(&record);
    if inputs.iter().any(|input| input.card.is_none()) {
        common.say.warn("the result has no card.toml, since an adapter has none: it is known by its folder's name alone");
    }
    if record.modules.iter().all(|module| module.norm == 0.0) {
        common.say.warn("the merged update is zero everywhere: the result changes nothing");
    }
    let least = record.modules.iter().min_by(|a, b| a.kept.total_cmp(&b.kept)).expect("a merge has a module");
    let ids: Vec<&str> = record.sources.iter().map(|s| s.id.as_str()).collect();
    let (apart, rank) = (if args.factor_wise { ", factor by factor" } else { "" }, record.rank);
    let text = format!(
        "{} of {} by {}{apart}: {} modules of rank {rank}, which keeps {:.2} % of the squared norm (least {:.2} % in {})\n{}-> {}",
        if record.sources.len() == 1 { "merge" } else { "a merge" },
        ids.join(", "),
        args.method,
        record.modules.len(),
        100.0 * kept,
        100.0 * least.kept,
        least.module,
        engines(rank),
        args.out.display(),
    );
    let digest = weact::core::io::peft::AdapterFile::open(&args.out)?.digest()?;
    let summary = json!({
        "out": args.out, "digest": digest, "method": args.method, "rank": rank, "n_modules": record.modules.len(), "kept": kept,
        "kept_least": least.kept, "recipe": record.recipe, "sources": record.sources, "search": found,
    });
    common.say.summary(&text, &summary)?;
    Ok(ExitCode::SUCCESS)
}

fn recipe(args: &Args, seed: Option<u64>) -> anyhow::Result<Recipe> {
    let method = args.method;
    let unused = |flag: &str, why: &str| Usage(format!("{flag} means nothing for --method {method}: {why}"));
    let mut recipe = method.recipe(args.preset);
    recipe.weights.clone_from(&args.weights);
    recipe.union = args.union;
    if let Some(rank) = args.rank {
        recipe.rank = Rank::At(rank);
    }
    match (&mut recipe.trim, args.density) {
        (Some(trim), Some(density)) => trim.density = density,
        (None, Some(_)) => return Err(unused("--density", "nothing is trimmed").into()),
        _ => {}
    }
    match (&mut recipe.drop, args.drop_rate, seed) {
        (Some(drop), rate, seed) => {
            drop.rate = rate.unwrap_or(drop.rate);
            drop.seed = seed.unwrap_or(drop.seed);
        }
        (None, Some(_), _) => return Err(unused("--drop-rate", "nothing is dropped").into()),
        _ => {}
    }
    match (&mut recipe.consensus, args.vote) {
        (Consensus::Elect(election), Some(vote)) => {
            election.vote = match vote {
                VoteBy::Mass => Vote::Mass,
                VoteBy::Frequency => Vote::Frequency,
            }
        }
        (_, Some(_)) => return Err(unused("--vote", "no signs are elected").into()),
        _ => {}
    }
    if let Some(lambda) = args.lambda {
        recipe.lambda = Lambda::Fixed(lambda);
    }
    if args.factor_wise {
        if recipe.space != Space::Update || method == Method::Additive || method == Method::Lorahub {
            return Err(unused("--factor-wise", "it is not defined on A and B apart").into());
        }
        recipe.space = Space::Factors;
    }
    match (method == Method::Lorahub, &args.search.model, args.search.data.is_empty(), args.weights.is_empty()) {
        (true, Some(_), false, true) | (false, None, true, _) => Ok(recipe),
        (true, .., false) => Err(unused("--weights", "they are what is searched").into()),
        (true, ..) => {
            Err(Usage("--method lorahub finds the weights on samples: give --model DIR and --data FILE".to_owned()).into())
        }
        (false, ..) => Err(unused("--model and --data", "only lorahub looks at samples").into()),
    }
}

/// LoRAHub's search on the stages of all capabilities in the data, each sample weighing the same.
fn find_weights(args: &Args, common: &Common, inputs: &[Input]) -> anyhow::Result<lorahub::Found> {
    let (_, device) = common.device.open()?;
    let dir = args.search.model.as_ref().expect("checked with the flags");
    let checkpoint = weact::core::io::checkpoint::Checkpoint::open(dir, false)?;
    let adapters: Vec<Adapter> =
        inputs.iter().map(|input| model::adapter(&input.dir, &checkpoint, common.say)).collect::<Result<_, _>>()?;
    let card = inputs.iter().find_map(|input| input.card.as_ref());
    let chat = Chat::open(dir, card.map_or(ToolProtocol::default(), |card| card.tool_protocol))?;
    let rules = Rules {
        retention: card.map_or_else(Retention::default, |card| card.retention),
        max_length: args.search.max_length,
        require_exit: false,
    };
    let capabilities = capabilities(&args.search.data)?;
    let data = dataset::load(&args.search.data, &chat, &capabilities, rules, Tolerance { max_lost: 1.0, allow_empty: true })?;
    for (reason, n) in data.dropped_by_reason() {
        common.say.warn(&format!("left out: {n} {reason}"));
    }
    let backbone = checkpoint.load(&device, burn::tensor::DType::F32)?;
    let samples: Vec<&Sample> = data.samples.iter().collect();
    let mut n = 0;
    let mut loss = |adapter: Option<&Adapter>| -> weact::train::Result<f64> {
        let factors = adapter.map(|a| a.to_device(&backbone.config, &device)).transpose()?;
        let scored = teacher_forced::score(&backbone, factors.as_ref(), &samples)
            .map_err(|e| weact::train::Error::Other(e.to_string()))?;
        let means = scored.iter().map(|s| s.nll_nats.iter().sum::<f64>() / s.nll_nats.len() as f64);
        let mean = means.sum::<f64>() / scored.len() as f64;
        n += 1;
        common.say.note(&format!("evaluation {n}: {mean:.4} nats a token"));
        Ok(mean)
    };
    let sources: Vec<Source<'_>> =
        inputs.iter().zip(&adapters).map(|(input, adapter)| Source::memory(&input.id, adapter)).collect();
    let search = lorahub::Search { evaluations: args.search.evaluations, seed: common.seed.unwrap_or(42) };
    Ok(lorahub::search(&sources, search, &mut loss)?)
}

/// Every capability that the trajectories have a stage of.
fn capabilities(files: &[PathBuf]) -> anyhow::Result<Vec<Capability>> {
    let mut found = std::collections::BTreeSet::new();
    for file in files {
        for row in weact::core::trajectory::read(file)? {
            found.extend(row.spans().iter().map(|span| span.capability.clone()));
        }
    }
    Ok(found.into_iter().collect())
}

/// The share of the squared norm that the rank keeps, over all modules.
fn kept(record: &Record) -> f64 {
    let total: f64 = record.modules.iter().map(|m| m.norm.powi(2)).sum();
    let kept: f64 = record.modules.iter().map(|m| m.kept * m.norm.powi(2)).sum();
    if total > 0.0 { kept / total } else { 1.0 }
}

/// What a serving engine has to be told about a rank.
fn engines(rank: usize) -> String {
    const VLLM: [usize; 8] = [8, 16, 32, 64, 128, 256, 320, 512];
    match VLLM.iter().find(|r| **r >= rank) {
        Some(_) if rank <= 16 => String::new(),
        Some(most) => format!("vLLM serves it with --max-lora-rank {most}\n"),
        None => "vLLM serves ranks up to 512 only\n".to_owned(),
    }
}
