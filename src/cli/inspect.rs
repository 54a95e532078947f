//! `weact inspect`

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use burn::tensor::DType;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use weact::{
    core::{
        Error,
        card::Card,
        chat::{Chat, ToolProtocol},
        io::{checkpoint::Checkpoint, peft, tensors::Tensors},
        model::config::Scaling,
        template::Template,
        tokenizer::Tokenizer,
    },
    train,
};

use super::{Common, memory};

/// Says what a model, adapter, training run or checkpoint is and whether it is whole
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Its folder
    path: PathBuf,
    /// Hash the tensors too
    #[arg(long)]
    digest: bool,
    /// Load a model in f32 and say how long it took and how much memory
    #[arg(long)]
    load: bool,
    /// Use the embedding as the output head where the checkpoint has none
    #[arg(long)]
    tie_embeddings: bool,
}

/// Fails where something is missing, left over or of another shape.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let dir = &args.path;
    if !dir.is_dir() {
        return Err(Error::file(dir, "is no folder").into());
    }
    let has = |name: &str| dir.join(name).exists();
    let [is_run, is_checkpoint] = ["config.toml", "position.toml"].map(has);
    let [is_adapter, is_model] = ["adapter_config.json", "config.json"].map(has);
    let kinds = [("run", is_run), ("checkpoint", is_checkpoint), ("adapter", is_adapter), ("model", is_model)];
    let Some((kind, _)) = kinds.into_iter().find(|(_, is)| *is) else {
        let why = "is no model (config.json), adapter (adapter_config.json), run (config.toml) or checkpoint (position.toml)";
        return Err(Error::file(dir, why).into());
    };
    let mut facts = Map::from_iter([("path".to_owned(), json!(dir)), ("kind".to_owned(), json!(kind))]);
    if is_run {
        facts.extend(training_run(dir)?);
    }
    if is_checkpoint {
        facts.extend(training_checkpoint(args)?);
    }
    if is_adapter {
        facts.extend(adapter(dir)?);
    }
    if is_model {
        facts.extend(model(args, common)?);
    }
    common.say.result(&listing(&facts), &Value::Object(facts))?;
    Ok(ExitCode::SUCCESS)
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => unreachable!("{other} is written as an object"),
    }
}

fn model(args: &Args, common: &Common) -> anyhow::Result<Map<String, Value>> {
    let dir = &args.path;
    let checkpoint = Checkpoint::open(dir, args.tie_embeddings)?;
    let config = &checkpoint.config;
    let mut dtypes: BTreeMap<String, usize> = BTreeMap::new();
    for entry in checkpoint.tensors.entries().values() {
        *dtypes.entry(format!("{:?}", entry.dtype).to_lowercase()).or_insert(0) += 1;
    }
    if config.tied && checkpoint.tensors.entries().contains_key("lm_head.weight") {
        common.say.note("lm_head.weight equals the embedding, which is the output head");
    }
    let rope = match &config.rope.scaling {
        Scaling::Default => format!("theta {}", config.rope.theta),
        Scaling::Yarn { factor, original_max, .. } => {
            format!("theta {}, yarn x{factor} from {original_max} positions", config.rope.theta)
        }
        Scaling::Llama3 { factor, original_max, .. } => {
            format!("theta {}, llama3 x{factor} from {original_max} positions", config.rope.theta)
        }
    };
    let tokenizer = Tokenizer::open(dir)?;
    let template = Template::open(dir)?;
    let biases = [("q k v", config.qkv_bias), ("o", config.o_bias), ("mlp", config.mlp_bias)];
    let mut facts = object(json!({
        "family": format!("{:?}", config.family).to_lowercase(), "parameters": config.n_parameters(), "dtypes": dtypes,
        "shards": checkpoint.tensors.paths().count(), "tensors": checkpoint.tensors.entries().len(), "vocabulary": config.vocab_size,
        "hidden": config.hidden_size, "intermediate": config.intermediate_size, "layers": config.n_layers, "heads": config.n_heads,
        "kv_heads": config.n_kv_heads, "head_dim": config.head_dim, "tied": config.tied, "rope": rope, "positions": config.max_positions,
        "biases": biases.iter().filter(|(_, is)| *is).map(|(name, _)| *name).collect::<Vec<_>>(),
        "tokenizer": tokenizer.as_ref().map(Tokenizer::vocab_size), "template_knows_tools": template.as_ref().map(Template::knows_tools),
    }));
    if let (Some(tokenizer), true) = (tokenizer, args.digest) {
        facts.insert("tokenizer_digest".to_owned(), json!(tokenizer.digest()));
        if let Some(template) = template {
            let digest = Chat::new(tokenizer, template, ToolProtocol::default())?.template_digest();
            facts.insert("template_digest".to_owned(), json!(digest));
        }
    }
    if args.digest {
        facts.insert("digest".to_owned(), json!(checkpoint.digest()));
    }
    if args.load {
        let (_, device) = common.device.open()?;
        let start = Instant::now();
        let (backbone, peak) = memory::peak(|| checkpoint.load(&device, DType::F32));
        let seconds = start.elapsed().as_secs_f64();
        backbone?;
        let in_f32 = 4 * config.n_parameters() as u64;
        let ratio = peak.map(|peak| peak as f64 / in_f32 as f64);
        facts.extend(object(json!({
            "load_s": seconds, "weights_f32_bytes": in_f32, "peak_anonymous_bytes": peak, "peak_to_weights": ratio})));
    }
    Ok(facts)
}

/// An adapter's shapes, with the scale that each module's update really gets.
fn adapter(dir: &Path) -> anyhow::Result<Map<String, Value>> {
    let adapter = peft::read(dir)?;
    let card = Card::read(dir)?;
    if let Some(card) = &card
        && card.digest != adapter.digest()
    {
        return Err(
            Error::file(dir, format!("the card says adapter tensors {}, here are {}", card.digest, adapter.digest())).into()
        );
    }
    let config = adapter.config();
    let mut scales: BTreeMap<(usize, String), usize> = BTreeMap::new();
    for module in adapter.plain().keys() {
        *scales.entry((config.rank_of(*module), config.scale_of(*module).to_string())).or_insert(0) += 1;
    }
    let scales: Vec<Value> = scales
        .into_iter()
        .map(|((rank, scale), modules)| json!({"rank": rank, "scale": scale.parse::<f64>().ok(), "modules": modules}))
        .collect();
    let mut facts = object(json!({
        "targets": config.targets.iter().map(|t| t.name()).collect::<Vec<_>>(), "rank": config.rank, "alpha": config.alpha,
        "rslora": config.rslora, "scales": scales, "modules": adapter.plain().len(), "parameters": adapter.n_parameters(),
        "digest": adapter.digest(),
    }));
    if !config.alpha_pattern.is_empty() {
        facts.insert("alpha_pattern".to_owned(), json!(config.alpha_pattern));
    }
    facts.insert("card".to_owned(), serde_json::to_value(card)?);
    Ok(facts)
}

/// What is there of a training run.
fn training_run(dir: &Path) -> anyhow::Result<Map<String, Value>> {
    let config: toml::Table = read_toml(&dir.join("config.toml"))?;
    let log = dir.join("log.jsonl");
    let log_lines = if log.exists() { Some(read(&log)?.lines().count()) } else { None };
    Ok(object(json!({
        "trains": config.get("kind"), "capability": config.get("capability"), "base": config.get("model"), "log_lines": log_lines,
        "checkpoints": train::checkpoint::steps(dir)?, "files": names(dir)?,
    })))
}

/// Where a checkpoint of a training run stands; with `--digest`, whether its state is the one that it names.
fn training_checkpoint(args: &Args) -> anyhow::Result<Map<String, Value>> {
    let dir = &args.path;
    let position: train::checkpoint::Position = read_toml(&dir.join("position.toml"))?;
    let state = Tensors::open(&dir.join("state.safetensors"))?;
    if args.digest && state.digest() != position.state {
        return Err(Error::file(dir, "state.safetensors is not what position.toml says it is").into());
    }
    Ok(object(json!({
        "step": position.step, "updates": position.updates, "data_digest": position.data, "base_digest": position.base,
        "tensors": state.entries().len(), "files": names(dir)?,
    })))
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|e| Error::io("can't read", path, e))
}

fn read_toml<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    toml::from_str(&read(path)?).map_err(|e| Error::file(path, e.message()))
}

fn names(dir: &Path) -> Result<Vec<String>, Error> {
    let io = |e| Error::io("can't read", dir, e);
    let entries = fs::read_dir(dir).map_err(io)?.collect::<Result<Vec<_>, _>>().map_err(io)?;
    let mut names: Vec<String> = entries.iter().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// One fact a line.
fn listing(facts: &Map<String, Value>) -> String {
    let shown = |value: &Value| match value {
        Value::Null => "none".to_owned(),
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Bool(is) => if *is { "yes" } else { "no" }.to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) if items.iter().all(Value::is_string) => {
            items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    };
    facts.iter().map(|(key, value)| format!("{:<22}{}\n", key.replace('_', " "), shown(value))).collect()
}
