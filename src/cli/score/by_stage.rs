//! `weact score --by-stage`: the stages of recorded trajectories or episodes, replayed under chosen weights.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::ExitCode,
    str::FromStr,
    sync::Arc,
};

use serde::Serialize;
use serde_json::{Map, Value, json};
use weact::{
    core::{
        Adapter, Backbone, Capability, Error, Trajectory,
        card::Card,
        chat::{Chat, ToolProtocol},
        context::Retention,
        io::checkpoint::Checkpoint,
        registry::Registry,
        sample::{Reason, Rules, Sample, samples},
        trajectory::{self, Exit},
    },
    train::config,
};

use super::{Scorable, batches, token_scores};
use crate::cli::{Common, Say, exit::Usage, lines, model};

/// How stages are cut and under which weights they are scored.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Score each stage of `--input`, which holds trajectories or episodes, on the tokens that training would supervise
    #[arg(long)]
    pub(super) by_stage: bool,
    /// The adapters that `--route` chooses from
    #[arg(long, value_name = "DIR", requires = "by_stage", conflicts_with = "adapter")]
    adapters: Option<PathBuf>,
    /// own (each stage under its capability's adapter; the default with --adapters), base (no adapter), or ALIAS (all under one)
    #[arg(long, requires = "by_stage", conflicts_with = "adapter")]
    route: Option<Route>,
    /// How many of the tool results before a stage stay; the default is what the adapters' cards say, or 5
    #[arg(long, value_name = "N", requires = "by_stage")]
    keep_tool_result: Option<usize>,
    /// Longest tool result in tokens; without it, what the cards say, or whole
    #[arg(long, value_name = "N", requires = "by_stage")]
    clip_tool_result: Option<usize>,
    /// Longest sample in tokens, at most the model's positions
    #[arg(long, value_name = "N", requires = "by_stage", default_value_t = config::Train::default().max_length)]
    max_length: usize,
    /// Score stages too that did not end with the policy's own exit call
    #[arg(long, requires = "by_stage")]
    any_exit: bool,
}

/// Which weights score a stage.
#[derive(Clone, Debug, PartialEq)]
enum Route {
    /// The adapter of the stage's own capability.
    Own,
    /// None.
    Base,
    /// One of the library, whatever the stage.
    Alias(Capability),
}

impl FromStr for Route {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "own" => Ok(Self::Own),
            "base" => Ok(Self::Base),
            _ => Capability::new(name).map(Self::Alias).map_err(|e| e.to_string()),
        }
    }
}

/// One stage and where it stands.
struct Stage {
    id: String,
    index: usize,
    exit: Exit,
    sample: Sample,
}

/// Stages that are scored under the same weights.
struct Group {
    adapter: Option<Arc<Adapter>>,
    members: Vec<usize>,
}

/// Adapters, and what their cards say of the samples that they were trained on.
struct Weights {
    /// What `route` is in the output.
    name: String,
    route: Route,
    registry: Registry,
    /// The one of `--adapter`.
    merged: Option<Arc<Adapter>>,
    cards: Vec<Card>,
}

impl Weights {
    fn open(args: &super::Args, checkpoint: &Checkpoint, say: Say) -> anyhow::Result<Self> {
        if let Some(dir) = &args.adapter {
            let merged = Some(Arc::new(model::adapter(dir, checkpoint, say)?));
            let cards = Card::read(dir)?.into_iter().collect();
            return Ok(Self { name: "adapter".to_owned(), route: Route::Base, registry: Registry::default(), merged, cards });
        }
        let default = if args.stages.adapters.is_some() { Route::Own } else { Route::Base };
        let route = args.stages.route.clone().unwrap_or(default);
        let name = match &route {
            Route::Own => "own".to_owned(),
            Route::Base => "base".to_owned(),
            Route::Alias(alias) => alias.to_string(),
        };
        let Some(dir) = &args.stages.adapters else {
            if route != Route::Base {
                return Err(Usage(format!("--route {name} needs --adapters DIR")).into());
            }
            return Ok(Self { name, route, registry: Registry::default(), merged: None, cards: Vec::new() });
        };
        let (registry, warnings) = Registry::open(dir, &model::against(checkpoint)?)?;
        warnings.iter().for_each(|warning| say.warn(warning));
        registry.entries().iter().try_for_each(|entry| entry.adapter.check_fits(&checkpoint.config))?;
        if let Route::Alias(alias) = &route {
            registry.need(alias)?;
        }
        let cards = registry.entries().iter().filter_map(|entry| entry.card.clone()).collect();
        Ok(Self { name, route, registry, merged: None, cards })
    }

    /// Whose weights score a stage of `capability`; the outer `None` if the library has none for it.
    fn of(&self, capability: &Capability) -> Option<Option<Arc<Adapter>>> {
        let adapter = |alias| self.registry.get(alias).map(|entry| entry.adapter.clone());
        match &self.route {
            Route::Base => Some(self.merged.clone()),
            Route::Own => adapter(capability).map(Some),
            Route::Alias(alias) => adapter(alias).map(Some),
        }
    }

    /// Tool protocol and retention: the flags, else what the cards agree on, else the defaults.
    fn context(&self, args: &super::Args) -> anyhow::Result<(ToolProtocol, Retention)> {
        let said = |card: &Card| (card.tool_protocol, card.retention);
        let (protocol, retention) = self.cards.first().map_or_else(Default::default, said);
        if let Some(other) = self.cards.iter().find(|card| said(card) != (protocol, retention)) {
            let first = &self.cards[0].alias;
            let why = "were trained with other tool protocols or retention: score them apart";
            anyhow::bail!("adapters {first} and {} {why}", other.alias);
        }
        let keep_tool_result = args.stages.keep_tool_result.unwrap_or(retention.keep_tool_result);
        let clip_tool_result = args.stages.clip_tool_result.or(retention.clip_tool_result);
        Ok((args.tool_protocol.unwrap_or(protocol), Retention { keep_tool_result, clip_tool_result }))
    }
}

/// One line of the output.
#[derive(Debug, Serialize)]
struct Scored {
    id: String,
    stage: usize,
    capability: Capability,
    route: String,
    adapter: Option<String>,
    n_tokens: usize,
    nll: Vec<f32>,
    top1: Vec<u8>,
    nll_nats_mean: f64,
    exit: Option<ScoredExit>,
}

/// The exit call within a stage.
#[derive(Debug, Serialize)]
struct ScoredExit {
    n_tokens: usize,
    nll_nats_mean: f64,
    top1_all: bool,
}

/// Checks all input, then loads the model.
pub(super) fn run(args: &super::Args, common: &Common) -> anyhow::Result<ExitCode> {
    let (_, device) = common.device.open()?;
    let checkpoint = args.model.open()?;
    let weights = Weights::open(args, &checkpoint, common.say)?;
    let (protocol, retention) = weights.context(args)?;
    let chat = Chat::open(&args.model.model, protocol)?;
    let max_length = args.stages.max_length.min(checkpoint.config.max_positions);
    let rules = Rules { retention, max_length, require_exit: !args.stages.any_exit };
    let rows = trajectory::read(&args.input)?;
    let (stages, left_out) = stages(&chat, &rows, rules, &weights)?;
    left_out.iter().for_each(|(id, why)| common.say.note(&format!("left out: {id}: {why}")));
    if stages.is_empty() {
        let why = format!("no stage can be scored: {}", reasons_text(&left_out));
        return Err(Error::file(&args.input, why).into());
    }

    let backbone = checkpoint.load(&device, args.model.dtype)?;
    let mut groups: BTreeMap<Option<String>, Group> = BTreeMap::new();
    for (i, stage) in stages.iter().enumerate() {
        let adapter = weights.of(&stage.sample.capability).expect("stages without weights are left out");
        let digest = adapter.as_ref().map(|adapter| adapter.digest().to_owned());
        groups.entry(digest).or_insert_with(|| Group { adapter, members: Vec::new() }).members.push(i);
    }
    let mut scored: Vec<Option<Scored>> = stages.iter().map(|_| None).collect();
    for Group { adapter, members } in groups.into_values() {
        for (i, result) in score(&backbone, adapter.as_deref(), &members, &stages, &weights.name, &chat)? {
            scored[i] = Some(result);
        }
    }
    let scored: Vec<Scored> = scored.into_iter().map(|s| s.expect("every stage is in one group")).collect();
    lines::write(&args.out, &scored)?;

    let means = means(&scored);
    let mut text = format!("{} stages scored under {} -> {}\n", scored.len(), weights.name, args.out.display());
    for (capability, mean) in &means {
        text += &format!("{capability}: {} stages, {:.6} nats a token\n", mean["stages"], mean["nll_nats_mean"]);
    }
    if !left_out.is_empty() {
        text += &format!("{} left out: {}\n", left_out.len(), reasons_text(&left_out));
    }
    let thinned = |count: fn(&Sample) -> usize| stages.iter().map(|stage| count(&stage.sample)).sum::<usize>();
    let summary = json!({
        "rows": rows.len(), "stages": scored.len(), "route": weights.name, "capabilities": means, "left_out": left_out.len(),
        "reasons": reasons(&left_out), "left_out_stages": left_out.iter().map(|(id, why)| json!({"id": id, "why": why})).collect::<Vec<_>>(),
        "max_length": max_length, "keep_tool_result": retention.keep_tool_result, "clip_tool_result": retention.clip_tool_result,
        "tool_protocol": protocol, "tool_results_omitted": thinned(|s| s.left_out.omitted),
        "tool_results_clipped": thinned(|s| s.left_out.clipped), "exchanges_left_out": thinned(|s| s.dropped_exchanges), "out": args.out,
    });
    common.say.summary(&text, &summary)?;
    Ok(ExitCode::SUCCESS)
}

/// A stage's or row's name, and why it is not scored.
type LeftOut = Vec<(String, String)>;

/// The stages of `rows` in their order, and what gives none.
fn stages(chat: &Chat, rows: &[Trajectory], rules: Rules, weights: &Weights) -> anyhow::Result<(Vec<Stage>, LeftOut)> {
    let (mut stages, mut left_out) = (Vec::new(), LeftOut::new());
    for row in rows {
        if row.spans().is_empty() {
            left_out.push((row.id.clone(), "no stage".to_owned()));
        }
        let capabilities: BTreeSet<&Capability> = row.spans().iter().map(|span| &span.capability).collect();
        let mut of_row = Vec::new();
        for capability in capabilities {
            let found = samples(chat, std::slice::from_ref(row), capability, rules)?;
            let dropped = found.dropped.into_iter().map(|(id, why)| (id, reason(&why)));
            left_out.extend(dropped);
            let has_weights = weights.of(capability).is_some();
            for sample in found.kept {
                if !has_weights {
                    left_out.push((sample.id, format!("no adapter {capability}")));
                    continue;
                }
                let index = sample.id.rsplit_once('#').and_then(|(_, index)| index.parse().ok());
                let index: usize = index.expect("a sample's id ends with its stage");
                of_row.push(Stage { id: row.id.clone(), index, exit: row.spans()[index].exit, sample });
            }
        }
        of_row.sort_by_key(|stage| stage.index);
        stages.extend(of_row);
    }
    Ok((stages, left_out))
}

fn reason(why: &Reason) -> String {
    match why {
        Reason::TooLong { limit, .. } => format!("longer than {limit} tokens"),
        other => other.to_string(),
    }
}

fn reasons(left_out: &LeftOut) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    left_out.iter().for_each(|(_, why)| *counts.entry(why.as_str()).or_insert(0) += 1);
    counts
}

fn reasons_text(left_out: &LeftOut) -> String {
    let counts = reasons(left_out);
    if counts.is_empty() {
        return "the file has no rows".to_owned();
    }
    counts.iter().map(|(why, n)| format!("{n} {why}")).collect::<Vec<_>>().join(", ")
}

/// The scores of the stages `members`, with their indices.
fn score(
    backbone: &Backbone,
    adapter: Option<&Adapter>,
    members: &[usize],
    stages: &[Stage],
    route: &str,
    chat: &Chat,
) -> anyhow::Result<Vec<(usize, Scored)>> {
    let factors = adapter.map(|adapter| adapter.to_device(&backbone.config, &backbone.device())).transpose()?;
    let lengths: Vec<usize> = members.iter().map(|i| stages[*i].sample.ids.len()).collect();
    let mut scored = Vec::new();
    for batch in batches(&lengths) {
        let batch: Vec<usize> = batch.into_iter().map(|place| members[place]).collect();
        let rows: Vec<Scorable<'_>> =
            batch.iter().map(|i| (stages[*i].sample.ids.as_slice(), stages[*i].sample.mask.as_slice())).collect();
        let ids: Vec<&[u32]> = rows.iter().map(|(ids, _)| *ids).collect();
        let hidden = backbone.hidden(&backbone.tokens(&ids)?, factors.as_ref(), None); // [positions of all rows, d]
        let scores = token_scores(backbone, factors.as_ref(), &hidden, &rows, |row| stages[batch[row]].sample.id.clone())?;
        for (i, tokens) in batch.iter().zip(scores) {
            let stage = &stages[*i];
            let (nll, top1) = tokens.iter().copied().unzip();
            let line = Scored {
                id: stage.id.clone(),
                stage: stage.index,
                capability: stage.sample.capability.clone(),
                route: route.to_owned(),
                adapter: adapter.map(|adapter| adapter.digest().to_owned()),
                n_tokens: tokens.len(),
                nll,
                top1,
                nll_nats_mean: mean(tokens.iter().map(|(nll, _)| *nll)).expect("a sample has supervised tokens"),
                exit: exit(stage, &tokens, chat)?,
            };
            scored.push((*i, line));
        }
    }
    Ok(scored)
}

/// The scores of the exit call, which are the stage's last.
fn exit(stage: &Stage, tokens: &[(f32, u8)], chat: &Chat) -> anyhow::Result<Option<ScoredExit>> {
    if stage.exit != Exit::Call {
        return Ok(None);
    }
    let Some(call) = stage.sample.exit_call(&chat.tokenizer)? else { return Ok(None) };
    let tokens = &tokens[tokens.len() - call.len()..];
    let nll_nats_mean = mean(tokens.iter().map(|(nll, _)| *nll)).expect("a call has tokens");
    Ok(Some(ScoredExit { n_tokens: tokens.len(), nll_nats_mean, top1_all: tokens.iter().all(|(_, top1)| *top1 == 1) }))
}

fn mean(values: impl ExactSizeIterator<Item = f32>) -> Option<f64> {
    let n = values.len();
    (n > 0).then(|| values.map(f64::from).sum::<f64>() / n as f64)
}

/// Means by capability: over stages, each weighing the same, as Appendix E.3 has it.
fn means(scored: &[Scored]) -> Map<String, Value> {
    let capabilities: BTreeSet<&Capability> = scored.iter().map(|s| &s.capability).collect();
    let of = |capability: &Capability| {
        let stages: Vec<&Scored> = scored.iter().filter(|s| s.capability == *capability).collect();
        let exits: Vec<&ScoredExit> = stages.iter().filter_map(|s| s.exit.as_ref()).collect();
        let over = |values: Vec<f64>| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        json!({
            "stages": stages.len(), "n_tokens": stages.iter().map(|s| s.n_tokens).sum::<usize>(),
            "nll_nats_mean": over(stages.iter().map(|s| s.nll_nats_mean).collect()),
            "exit": {"stages": exits.len(), "nll_nats_mean": over(exits.iter().map(|e| e.nll_nats_mean).collect()),
                "top1_all": over(exits.iter().map(|e| f64::from(u8::from(e.top1_all))).collect())},
        })
    };
    capabilities.into_iter().map(|capability| (capability.to_string(), of(capability))).collect()
}
