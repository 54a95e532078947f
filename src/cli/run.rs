//! `weact run`.

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, atomic::Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::json;
use weact::{
    core::{
        Capability,
        chat::{Chat, ToolProtocol},
        context::Retention,
        episode::{Author, Cause, Event},
        registry::Registry,
    },
    infer::{
        Error as InferError,
        agent::{Budget, Finished, Parts, Run, Settings},
        controller::{hard, hard::Hard, plain},
        engine::Engine,
        record::Recorder,
        sampler::Sampling,
        tools,
    },
};

use super::{
    Common, Say,
    exit::Usage,
    model::{self, ModelArgs},
    train::interrupt_flag,
};

/// Lets an agent answer a question
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The question
    question: String,
    #[command(flatten)]
    model: ModelArgs,
    /// A folder of adapters; their cards say how tools reach the model and what a stage keeps of tool results
    #[arg(long, value_name = "DIR")]
    adapters: Option<PathBuf>,
    /// hard (prescribed stages), base (no adapter), or single:ALIAS
    #[arg(long, default_value = "hard")]
    policy: Policy,
    /// Tools, comma-separated: corpus:FILE
    #[arg(long, value_name = "SPEC")]
    tools: String,
    /// Append the episode to this file
    #[arg(long, value_name = "FILE.jsonl")]
    out: Option<PathBuf>,
    /// The system message
    #[arg(long)]
    system: Option<String>,
    /// Turns of the whole run
    #[arg(long, default_value_t = 60, value_name = "N")]
    max_turns: usize,
    /// Turns of one stage; may be given several times
    #[arg(long, value_name = "ALIAS=N")]
    stage_turns: Vec<StageTurns>,
    /// Tokens of one turn
    #[arg(long, default_value_t = 8192, value_name = "N")]
    max_new: usize,
    /// Seconds of the whole run
    #[arg(long, value_name = "S")]
    max_seconds: Option<f64>,
    /// How tools reach the model, where no card says it: template or text
    #[arg(long)]
    tool_protocol: Option<ToolProtocol>,
    /// Tool results that a stage keeps, where no card says it
    #[arg(long, value_name = "N")]
    keep_tool_result: Option<usize>,
    /// Longest tool result in tokens, where no card says it
    #[arg(long, value_name = "N")]
    clip_tool_result: Option<usize>,
    /// 0 is greedy
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    temperature: f64,
    /// Draw from the most likely tokens whose probabilities reach P
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Draw from the K most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
}

#[derive(Clone, Debug)]
enum Policy {
    Hard,
    Base,
    Single(Capability),
}

impl std::str::FromStr for Policy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match (name, name.strip_prefix("single:")) {
            ("hard", _) => Ok(Self::Hard),
            ("base", _) => Ok(Self::Base),
            (_, Some(alias)) => Capability::new(alias).map(Self::Single).map_err(|e| e.to_string()),
            _ => Err("this version runs hard, base and single:ALIAS".to_owned()),
        }
    }
}

#[derive(Clone, Debug)]
struct StageTurns(Capability, usize);

impl std::str::FromStr for StageTurns {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (alias, n) = text.split_once('=').ok_or("use ALIAS=N, as search=6")?;
        let turns = n.parse().ok().filter(|n| *n > 0).ok_or("N must be a positive whole number")?;
        Ok(Self(Capability::new(alias).map_err(|e| e.to_string())?, turns))
    }
}

/// Runs it.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let say = common.say;
    let tools = tools::open(&args.tools).map_err(|error| match error {
        InferError::Other(why) => anyhow::Error::from(Usage(why)),
        of_a_file => of_a_file.into(),
    })?;
    let checkpoint = args.model.open()?;
    let base = checkpoint.digest();
    let registry = registry(args, &checkpoint, say)?;
    let (protocol, retention) = card_settings(args, &registry)?;
    let chat = Chat::open(&args.model.model, protocol)?;
    let rules = stages(args)?;
    match &args.policy {
        Policy::Hard => rules.workflow.iter().try_for_each(|rule| registry.need(&rule.capability).map(drop))?,
        Policy::Single(alias) => drop(registry.need(alias)?),
        Policy::Base => {}
    }
    let (device_name, device) = common.device.open()?;
    let engine = Engine::new(Arc::new(checkpoint.load(&device, args.model.dtype)?), base);
    let settings = Settings {
        system: args.system.clone(),
        retention,
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: common.seed.unwrap_or(0),
        },
        budget: Budget { max_turns: args.max_turns, max_new: args.max_new, max_seconds: args.max_seconds, ..Budget::default() },
        about: about(args, &rules, &device_name),
    };
    settings.budget.check().and_then(|()| settings.sampling.check()).map_err(|e| Usage(e.to_string()))?;
    let episode = episode_id();
    let recorder = match &args.out {
        Some(path) => Recorder::append_to(path, episode)?,
        None => Recorder::new(episode),
    };
    say.note(&format!("running on {device_name}"));
    let stop = interrupt_flag()?;
    let interrupted = || stop.load(Ordering::Relaxed);
    let mut show = |event: &Event| show(event, say);
    let parts = Parts { engine: &engine, chat: &chat, registry: &registry, tools: &tools };
    let name = match &args.policy {
        Policy::Hard => "hard".to_owned(),
        Policy::Base => "base".to_owned(),
        Policy::Single(alias) => format!("single:{alias}"),
    };
    let begun = Run::begin(parts, settings, &name, &args.question, recorder, &mut show, &interrupted)?;
    let finished = match &args.policy {
        Policy::Hard => hard::run(begun, &rules),
        Policy::Base => plain::run(begun, None),
        Policy::Single(alias) => plain::run(begun, Some(alias)),
    };
    match finished {
        Ok(finished) => {
            report(&finished, say)?;
            Ok(ExitCode::SUCCESS)
        }
        Err(InferError::Interrupted) => {
            let kept = args.out.as_ref().map_or_else(String::new, |f| format!("; what happened so far is in {}", f.display()));
            say.warn(&format!("interrupted{kept}"));
            Ok(ExitCode::from(130))
        }
        Err(error) => Err(error.into()),
    }
}

fn registry(args: &Args, checkpoint: &weact::core::io::checkpoint::Checkpoint, say: Say) -> anyhow::Result<Registry> {
    let Some(dir) = &args.adapters else {
        return match args.policy {
            Policy::Base => Ok(Registry::default()),
            _ => Err(Usage("--policy needs --adapters DIR, unless it is base".to_owned()).into()),
        };
    };
    let (registry, warnings) = Registry::open(dir, &model::against(checkpoint)?)?;
    warnings.iter().for_each(|w| say.warn(w));
    for entry in registry.entries() {
        entry.adapter.check_fits(&checkpoint.config)?;
        let (n_modules, digest) = (entry.adapter.plain().len(), entry.adapter.digest());
        say.note(&format!("adapter {}: {n_modules} modules, digest {}", entry.stage.alias, &digest[..12]));
    }
    Ok(registry)
}

/// Protocol and retention that the adapters were trained with. Cards must agree with each other and with the flags.
fn card_settings(args: &Args, registry: &Registry) -> anyhow::Result<(ToolProtocol, Retention)> {
    let cards: Vec<_> = registry.entries().iter().filter_map(|e| e.card.as_ref()).collect();
    let flagged = Retention {
        keep_tool_result: args.keep_tool_result.unwrap_or(Retention::default().keep_tool_result),
        clip_tool_result: args.clip_tool_result,
    };
    let Some(first) = cards.first() else { return Ok((args.tool_protocol.unwrap_or_default(), flagged)) };
    let (protocol, retention) = (first.tool_protocol, first.retention);
    if let Some(other) = cards.iter().find(|c| c.tool_protocol != protocol || c.retention != retention) {
        let what = "were trained with other tool protocols or retention";
        return Err(anyhow::anyhow!("adapters {} and {} {what}: they can't share a history", first.alias, other.alias));
    }
    let protocol_differs = args.tool_protocol.is_some_and(|p| p != protocol);
    let keep_differs = args.keep_tool_result.is_some_and(|k| k != retention.keep_tool_result);
    let clip_differs = args.clip_tool_result.is_some_and(|c| Some(c) != retention.clip_tool_result);
    if protocol_differs || keep_differs || clip_differs {
        let trained =
            format!("tool protocol {protocol:?}, keep {}, clip {:?}", retention.keep_tool_result, retention.clip_tool_result);
        return Err(Usage(format!("the adapters were trained with {trained}; leave the flags away")).into());
    }
    Ok((protocol, retention))
}

fn stages(args: &Args) -> anyhow::Result<Hard> {
    let mut rules = Hard::default();
    for StageTurns(alias, turns) in &args.stage_turns {
        let Some(rule) = rules.workflow.iter_mut().find(|r| r.capability == *alias) else {
            return Err(Usage(format!("--stage-turns {alias}={turns}: the workflow has no stage {alias}")).into());
        };
        rule.max_turns = *turns;
    }
    Ok(rules)
}

/// What the header says beside the agent's own settings.
fn about(args: &Args, rules: &Hard, device: &str) -> serde_json::Map<String, serde_json::Value> {
    let dtype = format!("{:?}", args.model.dtype).to_lowercase();
    [("workflow", json!(rules.workflow)), ("device", json!(device)), ("dtype", json!(dtype))]
        .map(|(k, v)| (k.to_owned(), v))
        .into_iter()
        .collect()
}

/// Unique among runs: the wall clock and the process.
fn episode_id() -> String {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    format!("{nanos:x}-{:x}", std::process::id())
}

/// What happens, as it happens, on stderr.
fn show(event: &Event, say: Say) {
    match event {
        Event::Message(m) => {
            let who = m.route.clone().unwrap_or_else(|| match m.author {
                Author::User => "user".to_owned(),
                Author::Harness => "harness".to_owned(),
                Author::Tool => "tool".to_owned(),
                Author::Model => "model".to_owned(),
            });
            let calls: Vec<String> = m.message.tool_calls.iter().map(|c| format!("{}({})", c.name, json!(c.arguments))).collect();
            let text = [m.message.content.as_str(), &calls.join(" ")].join(" ");
            let short: String = printable(&text).chars().take(160).collect();
            say.note(&format!("[{who}] {short}"));
        }
        Event::Transition(t) => {
            let name = |k: &Option<Capability>| k.as_ref().map_or_else(|| "base".to_owned(), Capability::to_string);
            say.note(&format!(
                "-- {} -> {} ({}), {} tokens to recompute",
                name(&t.from),
                name(&t.to),
                cause(t.cause),
                t.recomputed_tokens
            ));
        }
        Event::Notice(n) => say.note(&format!("-- {}: {}", n.kind, printable(&n.detail))),
        Event::Header(_) | Event::Time(_) | Event::Outcome(_) => {}
    }
}

/// On one line and without control characters: a page must not steer the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn cause(cause: Cause) -> String {
    serde_json::to_value(cause).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

fn report(finished: &Finished, say: Say) -> anyhow::Result<()> {
    let outcome = &finished.outcome;
    let stages: Vec<String> = outcome.stages.iter().map(|(k, c)| format!("{k} ({})", cause(*c))).collect();
    let usage = outcome.usage;
    say.note(&format!(
        "{}; stages: {}; tokens: {} prefilled, of them {} recomputed, {} sampled",
        outcome.termination,
        if stages.is_empty() { "none".to_owned() } else { stages.join(", ") },
        usage.prefilled,
        usage.recomputed,
        usage.sampled
    ));
    let json = json!({"episode": finished.recorder.episode(), "answer": outcome.answer, "termination": outcome.termination,
        "stages": outcome.stages, "usage": usage});
    say.result(outcome.answer.as_deref().unwrap_or("(no answer)"), &json)?;
    Ok(())
}
