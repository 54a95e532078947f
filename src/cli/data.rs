//! `weact data`: what stands between real conversations and training.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::bail;
use clap::Subcommand;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use weact::{
    core::{Error, Trajectory, stage::Stage, trajectory},
    infer::remote::{Client, Settings},
    train::data::{self, Format, Rules, annotate},
};

use super::{Common, check, exit::Usage};

/// Prepares training data
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    Import(Import),
    Label(Label),
    Check(check::Args),
    Export(Export),
}

/// Writes the samples of one capability for other trainers
#[derive(Debug, clap::Args)]
pub(super) struct Export {
    #[command(flatten)]
    samples: check::Args,
    /// A parquet file with the columns input_ids, labels and id
    #[arg(long, value_name = "FILE.parquet")]
    out: PathBuf,
}

/// Reads conversations of another format into trajectories
#[derive(Debug, clap::Args)]
pub(super) struct Import {
    /// openai, hermes, sharegpt, mcp-xml, dr-tulu or swe-agent
    #[arg(long, value_name = "FORMAT")]
    from: Format,
    /// A JSON array, a JSONL file, or a file of one object
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// One trajectory a line
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Write the file even if no row is kept
    #[arg(long)]
    allow_empty: bool,
}

/// Marks on trajectories which messages planned, searched and wrote
#[derive(Debug, clap::Args)]
pub(super) struct Label {
    /// Trajectories or episodes
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// One trajectory a line
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// A TOML file that says which tools retrieve and what the stages are called
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Who labels: rules, or the model behind an OpenAI-compatible endpoint
    #[arg(long, default_value = "rules", value_name = "rules|URL")]
    annotator: String,
    /// The annotator's model
    #[arg(long, value_name = "M")]
    annotator_model: Option<String>,
    /// The environment variable that holds the annotator's API key
    #[arg(long, value_name = "VAR")]
    annotator_key_env: Option<String>,
    /// Insert the load and offload calls around each stage
    #[arg(long)]
    weave: bool,
    /// A TOML file of `[[stages]]` with alias, description and activation: the texts that `--weave` inserts
    #[arg(long, value_name = "FILE", requires = "weave")]
    stages: Option<PathBuf>,
    /// Write the file even if no row is kept
    #[arg(long)]
    allow_empty: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stages {
    stages: Vec<Stage>,
}

/// Runs one of them.
pub(super) fn run(command: &Command, common: &Common) -> anyhow::Result<ExitCode> {
    match command {
        Command::Import(args) => import(args, common),
        Command::Label(args) => label(args, common),
        Command::Check(args) => check::run(args, common),
        Command::Export(args) => check::export(&args.samples, &args.out, common),
    }
}

fn import(args: &Import, common: &Common) -> anyhow::Result<ExitCode> {
    let imported = data::import(&args.input, args.from)?;
    let dropped = imported.dropped.into_iter().map(|d| Dropped { row: Some(d.row), id: d.id, reason: d.reason }).collect();
    let account = Account { input: &args.input, out: &args.out, kept: imported.trajectories, dropped, labeller: None };
    account.write(args.allow_empty, common)
}

fn label(args: &Label, common: &Common) -> anyhow::Result<ExitCode> {
    let annotator = annotator(args)?;
    let rules: Rules = args.rules.as_deref().map(read_toml).transpose()?.unwrap_or_default();
    let stages = match args.stages.as_deref().map(read_toml::<Stages>).transpose()? {
        Some(file) => file.stages,
        None => [&rules.plan, &rules.search, &rules.write].map(Stage::builtin).into(),
    };
    let labeller = match &annotator {
        Some(client) => json!({"annotator": client.model(), "policy": annotate::policy_digest(&rules)}),
        None => json!({"annotator": "rules"}),
    };
    let labeller = Some(labeller);
    let mut account = Account { input: &args.input, out: &args.out, kept: Vec::new(), dropped: Vec::new(), labeller };
    for row in trajectory::read(&args.input)? {
        let id = row.id.clone();
        let labelled = match &annotator {
            Some(client) => annotate::annotate(row, &rules, &mut |prompt| {
                client.complete(None, prompt, common.seed).map(|reply| reply.text).map_err(|error| error.to_string())
            }),
            None => data::label(row, &rules),
        };
        let made =
            labelled.and_then(|row| if args.weave { data::weave(row, &stages).map_err(|e| e.to_string()) } else { Ok(row) });
        match made {
            Ok(row) => account.kept.push(row),
            Err(reason) => account.dropped.push(Dropped { row: None, id: Some(id), reason }),
        }
    }
    account.write(args.allow_empty, common)
}

/// The client of `--annotator URL`.
fn annotator(args: &Label) -> anyhow::Result<Option<Client>> {
    if args.annotator == "rules" {
        if args.annotator_model.is_some() || args.annotator_key_env.is_some() {
            return Err(Usage("--annotator-model and --annotator-key-env go with --annotator URL".to_owned()).into());
        }
        return Ok(None);
    }
    if !args.annotator.contains("://") {
        return Err(Usage(format!("--annotator {}: use rules or the URL of an endpoint", args.annotator)).into());
    }
    let Some(model) = &args.annotator_model else {
        return Err(Usage("--annotator URL needs --annotator-model M".to_owned()).into());
    };
    let settings = Settings { key_env: args.annotator_key_env.clone(), ..Settings::new(&args.annotator, model) };
    Ok(Some(Client::new(settings).map_err(|error| Usage(error.to_string()))?))
}

/// A configuration in TOML; what is wrong with it is the command line's fault.
fn read_toml<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = fs::read_to_string(path).map_err(|e| Usage(Error::io("can't read", path, e).to_string()))?;
    toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        Usage(format!("{}:{line}: {}", path.display(), error.message())).into()
    })
}

/// A row that was left out.
struct Dropped {
    row: Option<usize>,
    id: Option<String>,
    reason: String,
}

/// Where every row of a file went.
struct Account<'a> {
    input: &'a Path,
    out: &'a Path,
    kept: Vec<Trajectory>,
    dropped: Vec<Dropped>,
    /// Who labelled, where someone did.
    labeller: Option<Value>,
}

impl Account<'_> {
    /// Writes what was kept and says what was not.
    fn write(self, allow_empty: bool, common: &Common) -> anyhow::Result<ExitCode> {
        let Self { input, out, kept, dropped, labeller } = self;
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        for row in &dropped {
            *reasons.entry(kind(&row.reason)).or_insert(0) += 1;
        }
        let n_rows = kept.len() + dropped.len();
        let counted: String = reasons.iter().map(|(reason, n)| format!("\n{n:>6}  {reason}")).collect();
        if kept.is_empty() && !allow_empty {
            bail!(
                "{}: none of its {n_rows} rows can be kept, nothing written (--allow-empty writes an empty file){counted}",
                input.display()
            );
        }
        data::write_jsonl(out, &kept)?;
        let mut spans: BTreeMap<&str, usize> = BTreeMap::new();
        for span in kept.iter().flat_map(Trajectory::spans) {
            *spans.entry(span.capability.as_str()).or_insert(0) += 1;
        }
        let rows: Vec<Value> = dropped.iter().map(|d| json!({"row": d.row, "id": d.id, "reason": d.reason})).collect();
        let stages: Vec<String> = spans.iter().map(|(capability, n)| format!("{n} {capability}")).collect();
        let stages = if stages.is_empty() { String::new() } else { format!(", stages: {}", stages.join(", ")) };
        let text =
            format!("{} of {n_rows} rows kept, {} dropped{stages} -> {}{counted}", kept.len(), dropped.len(), out.display());
        let summary = json!({"rows": n_rows, "kept": kept.len(), "dropped": dropped.len(), "reasons": reasons, "spans": spans,
            "dropped_rows": rows, "labeller": labeller, "out": out});
        common.say.summary(&text, &summary)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// A reason without the numbers that differ from row to row.
fn kind(reason: &str) -> String {
    let mut kind = String::new();
    for c in reason.chars() {
        match c {
            '0'..='9' if kind.ends_with('N') => {}
            '0'..='9' => kind.push('N'),
            other => kind.push(other),
        }
    }
    kind
}
