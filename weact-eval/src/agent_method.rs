//! A method made of a model, adapters, tools and a controller.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use burn::tensor::{DType, Device};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use weact_core::{
    chat::Chat,
    context::Retention,
    episode::{Author, Event, Line},
    io::{checkpoint::Checkpoint, tensors::hex},
    message::Role,
    registry::{self, Against, Registry},
};
use weact_infer::{
    agent::{Finished, Parts, Run, Settings},
    controller::{hard, hard::Hard, plain},
    engine::Engine,
    record::Recorder,
    tools::{self, ToolSet, corpus::Corpus},
};

use crate::{
    Error, Result,
    config::{self, Policy},
    method::{Answer, Cost, Method},
    suite,
    task::Task,
    world::{World, WorldConfig, tools::Library},
};

/// Where an attempt's tools come from: some have a state of their own, so that every attempt gets fresh ones.
#[derive(Clone, Debug)]
pub enum ToolSource {
    /// None.
    None,
    /// `search` and `visit` over a corpus.
    Corpus(Arc<Corpus>, String),
    /// The toy world's.
    World(Library, WorldConfig),
}

impl ToolSource {
    /// The source that `spec` names; `world` is the toy world's configuration, where there is one.
    ///
    /// # Errors
    /// If it can't be opened, or is not known.
    pub fn open(spec: &str, world: Option<&WorldConfig>) -> Result<Self> {
        match (spec, spec.strip_prefix("corpus:")) {
            ("none", _) => Ok(Self::None),
            ("world", _) => {
                let config = world.cloned().unwrap_or_default();
                Ok(Self::World(World::new(&config)?.library()?, config))
            }
            (_, Some(file)) => {
                let corpus = Corpus::open(Path::new(file))?;
                let mut hash = Sha256::new();
                for page in corpus.pages() {
                    hash.update(json!(page).to_string());
                }
                Ok(Self::Corpus(Arc::new(corpus), hex(&hash.finalize())))
            }
            _ => Err(tools::open(spec).err().map_or_else(|| Error::Other(format!("unknown tools {spec:?}")), Error::from)),
        }
    }

    fn tools(&self) -> Result<ToolSet> {
        match self {
            Self::None => Ok(ToolSet::default()),
            Self::Corpus(corpus, _) => Ok(ToolSet::new(Arc::clone(corpus).tools())?),
            Self::World(library, _) => library.tools(),
        }
    }

    fn identity(&self) -> Value {
        match self {
            Self::None => json!("none"),
            Self::Corpus(_, digest) => json!({"corpus": digest}),
            Self::World(_, config) => json!({"world": config}),
        }
    }
}

/// A method whose files are read, but not its weights.
#[derive(Debug)]
pub struct Prepared {
    method: config::Method,
    agent: config::Agent,
    checkpoint: Checkpoint,
    base: String,
    registry: Registry,
    chat: Chat,
    retention: Retention,
    stages: Hard,
    /// By benchmark.
    tools: BTreeMap<String, ToolSource>,
    /// What a look at the files had to say.
    pub warnings: Vec<String>,
    /// What the headers of episodes say beside what decides them, such as the device.
    pub about: Map<String, Value>,
}

/// Reads what a method is made of: digests are computed, cards are checked against the model and each other. `tools` are each benchmark's.
///
/// # Errors
/// If a file can't be read or is broken, an adapter was made for another model or is missing, or cards differ in how tools reach
/// the model. Where `agent` says otherwise than the cards, theirs stands, and a warning says so.
pub fn prepare(method: &config::Method, agent: &config::Agent, tools: BTreeMap<String, ToolSource>) -> Result<Prepared> {
    let checkpoint = Checkpoint::open(&method.model, false)?;
    let plain = Chat::open(&checkpoint.dir, Default::default())?;
    let base = checkpoint.digest();
    let against =
        Against { base: base.clone(), tokenizer: plain.tokenizer.digest().to_owned(), template: plain.template_digest() };
    let (mut registry, mut warnings) = match &method.adapters {
        Some(dir) => Registry::open(dir, &against)?,
        None => (Registry::default(), Vec::new()),
    };
    if let Some(dir) = &method.fused {
        if method.policy != Policy::Hard || registry.entries().is_empty() {
            let why = "fused stands for the adapters of stages: it needs policy = \"hard\" and adapters";
            return Err(Error::Other(why.to_owned()));
        }
        let (fused, warning) = registry::read_entry(dir, &against)?;
        warnings.extend(warning);
        registry.fuse(&fused.adapter);
    }
    for entry in registry.entries() {
        entry.adapter.check_fits(&checkpoint.config)?;
    }
    let stages = agent.stages().map_err(|why| Error::Other(format!("[agent] {why}")))?;
    match &method.policy {
        Policy::Hard => stages.workflow.iter().try_for_each(|rule| registry.need(&rule.capability).map(drop))?,
        Policy::Single(alias) => drop(registry.need(alias)?),
        Policy::Base => {}
    }
    let own = Retention {
        keep_tool_result: agent.keep_tool_result.unwrap_or(Retention::default().keep_tool_result),
        clip_tool_result: agent.clip_tool_result,
    };
    let mut settings = registry.entries().iter().filter_map(|e| e.card.as_ref()).map(|c| (c.tool_protocol, c.retention));
    let (protocol, retention) = settings.next().unwrap_or((agent.tool_protocol.unwrap_or_default(), own));
    if settings.any(|other| other != (protocol, retention)) {
        let why = "its adapters were trained with other tool protocols or retention: they can't share a history";
        return Err(Error::Other(format!("method {:?}: {why}", method.name)));
    }
    let agrees = agent.tool_protocol.unwrap_or(protocol) == protocol
        && agent.keep_tool_result.unwrap_or(retention.keep_tool_result) == retention.keep_tool_result
        && (agent.clip_tool_result.is_none() || agent.clip_tool_result == retention.clip_tool_result);
    if !agrees {
        let stands = format!("{protocol:?}, keep {}, clip {:?}", retention.keep_tool_result, retention.clip_tool_result);
        warnings.push(format!("method {:?}: its cards say {stands}; what [agent] says otherwise is left aside", method.name));
    }
    let chat = Chat::open(&checkpoint.dir, protocol)?;
    Ok(Prepared {
        method: method.clone(),
        agent: agent.clone(),
        checkpoint,
        base,
        registry,
        chat,
        retention,
        stages,
        tools,
        warnings,
        about: Map::new(),
    })
}

impl Prepared {
    /// The name in tables.
    pub fn name(&self) -> &str {
        &self.method.name
    }

    /// The identity of the [`AgentMethod`] that it will be with weights of `dtype`.
    pub fn identity(&self, benchmark: &str, dtype: DType) -> Map<String, Value> {
        let Self { method, agent, base, registry, chat, retention, tools, .. } = self;
        let adapters: Vec<String> =
            registry.entries().iter().map(|e| format!("{}@{}", e.stage.alias, e.adapter.digest())).collect();
        let value = json!({
            "model": base, "tokenizer": chat.tokenizer.digest(), "template": chat.template_digest(),
            "tool_protocol": chat.protocol, "policy": method.policy, "adapters": adapters, "retention": retention, "agent": agent,
            "system": method.system, "dtype": format!("{dtype:?}").to_lowercase(), "version": env!("CARGO_PKG_VERSION"),
            "tools": tools.get(benchmark).map(ToolSource::identity),
        });
        value.as_object().cloned().expect("an object")
    }

    /// Loads the weights.
    ///
    /// # Errors
    /// If they can't be read, or don't fit the device.
    pub fn load(self, device: &Device, dtype: DType) -> Result<AgentMethod> {
        let engine = Engine::new(Arc::new(self.checkpoint.load(device, dtype)?), self.base.clone());
        Ok(AgentMethod { prepared: self, engine, dtype })
    }
}

/// A method that is ready to answer.
#[derive(Debug)]
pub struct AgentMethod {
    prepared: Prepared,
    engine: Engine,
    dtype: DType,
}

impl AgentMethod {
    fn settings(&self, seed: u64) -> Settings {
        let Prepared { method, agent, retention, stages, about, .. } = &self.prepared;
        let mut about = about.clone();
        about.insert("workflow".to_owned(), json!(stages.workflow));
        about.insert("dtype".to_owned(), json!(format!("{:?}", self.dtype).to_lowercase()));
        Settings {
            system: method.system.clone().or_else(|| agent.system.clone()),
            retention: *retention,
            sampling: agent.sampling(seed),
            budget: agent.budget(),
            about,
        }
    }

    fn tools(&self, benchmark: &str) -> Result<&ToolSource> {
        self.prepared.tools.get(benchmark).ok_or_else(|| Error::Other(format!("no tools for benchmark {benchmark:?}")))
    }
}

impl Method for AgentMethod {
    fn name(&self) -> &str {
        self.prepared.name()
    }

    fn identity(&self, benchmark: &str) -> Map<String, Value> {
        self.prepared.identity(benchmark, self.dtype)
    }

    fn attempt(&self, benchmark: &str, task: &Task, seed: u64, interrupted: &dyn Fn() -> bool) -> Result<Answer> {
        let Prepared { method, registry, chat, stages, .. } = &self.prepared;
        let tools = self.tools(benchmark)?.tools()?;
        let parts = Parts { engine: &self.engine, chat, registry, tools: &tools };
        let policy = String::from(method.policy.clone());
        let recorder = Recorder::new(task.id.clone());
        let mut unheard = |_: &Event| {};
        let run = Run::begin(parts, self.settings(seed), &policy, &task.question, recorder, &mut unheard, interrupted)?;
        let finished = match &method.policy {
            Policy::Hard => hard::run(run, stages)?,
            Policy::Base => plain::run(run, None)?,
            Policy::Single(alias) => plain::run(run, Some(alias))?,
        };
        Ok(answer(&finished))
    }
}

/// The question as the policy is asked it: with what the official prompt adds.
pub fn asked(benchmark: crate::benchmark::Benchmark, tasks: Vec<Task>) -> Vec<Task> {
    let suffix = suite::question_suffix(benchmark).unwrap_or_default();
    tasks.into_iter().map(|task| Task { question: task.question.clone() + suffix, ..task }).collect()
}

/// What a finished run gave and cost.
fn answer(finished: &Finished) -> Answer {
    let events = finished.recorder.events();
    let messages = || events.iter().filter_map(|event| if let Event::Message(m) = event { Some(m) } else { None });
    let by_model = || messages().filter(|m| m.author == Author::Model);
    let mut cost = Cost {
        prefilled: finished.outcome.usage.prefilled,
        recomputed: finished.outcome.usage.recomputed,
        sampled: finished.outcome.usage.sampled,
        seconds: BTreeMap::new(),
    };
    for event in events {
        if let Event::Time(interval) = event {
            *cost.seconds.entry(interval.category.clone()).or_default() += (interval.end_ns - interval.start_ns) as f64 * 1e-9;
        }
    }
    let prediction = finished.outcome.answer.clone();
    Answer {
        report: by_model().rfind(|m| !m.message.content.trim().is_empty()).map(|m| m.message.content.clone()),
        length: prediction.is_none() && by_model().any(|m| m.finish.as_deref() == Some("length")),
        prediction,
        termination: finished.outcome.termination.clone(),
        n_turns: by_model().count(),
        n_tool_calls: messages().filter(|m| m.author == Author::Tool && m.message.role == Role::Tool).count(),
        cost,
        episode: events
            .iter()
            .map(|event| Line { episode: finished.recorder.episode().to_owned(), event: event.clone() })
            .collect(),
    }
}
