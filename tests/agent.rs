//! The agent from outside: what an episode says of a run, to the last event.
//!
//! Where a test needs certain turns their tokens are given, and everything else is as in any run: context, weights, caches, tools,
//! record. Where it needs a policy that acts by itself, three adapters are trained over the toy backbone.

mod common;
#[path = "common/trained.rs"]
mod trained;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs,
    path::Path,
    process::Command,
    rc::Rc,
    sync::Arc,
};

use burn::tensor::{DType, Device};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use tempfile::TempDir;
use weact::{
    core::{
        Adapter, Capability, Trajectory,
        adapter::{LoraConfig, PlainFactors},
        chat::{Chat, ToolProtocol},
        context::Retention,
        episode::{Author, Cause, Event, Interval, MessageEvent, Usage},
        io::checkpoint::{self, Checkpoint},
        lora::{Module, Projection},
        message::Role,
        registry::{Entry, Registry},
        sample::{self, Rules, Sample},
        trajectory,
    },
    eval::world::{self, World, WorldConfig, question::Split},
    infer::{
        self,
        agent::{Finished, Parts, Run, Settings},
        controller::{
            hard::{self, Hard},
            plain,
        },
        engine::{AdapterHandle, Engine},
        record::Recorder,
        sampler::Choose,
        tools::{
            ToolSet,
            corpus::{Corpus, Page},
        },
    },
};

/// A tiny model, three adapters of random weights, and the toy world's tools.
struct Scene {
    folder: TempDir,
    chat: Chat,
    engine: Engine,
    registry: Registry,
    tools: ToolSet,
    gold: Vec<Trajectory>,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        common::toy(folder.path());
        let checkpoint = Checkpoint::open(&folder.path().join("model"), false).expect("a checkpoint");
        let chat = Chat::open(&checkpoint.dir, ToolProtocol::Template).expect("template and tokenizer");
        let backbone = checkpoint.load(&Device::flex(), DType::F32).expect("loadable");
        let engine = Engine::new(Arc::new(backbone), checkpoint.digest());
        let mut registry = Registry::default();
        for (seed, stage) in (0..).zip(world::stages()) {
            let adapter = Arc::new(random_adapter(&engine, seed));
            registry.register(Entry { stage, adapter, card: None }).expect("another alias");
        }
        let tools = World::new(&WorldConfig::default()).and_then(|world| world.tools()).expect("tools");
        let gold = trajectory::read(&folder.path().join("train.jsonl")).expect("trajectories");
        Self { folder, chat, engine, registry, tools, gold }
    }

    /// The same with these pages, by url and text.
    fn with_pages(pages: &[(&str, &str)]) -> Self {
        let page = |(url, text): &(&str, &str)| Page { url: (*url).into(), title: String::new(), text: (*text).into() };
        let corpus = Arc::new(Corpus::from_pages(pages.iter().map(page).collect()).expect("pages"));
        Self { tools: ToolSet::new(corpus.tools()).expect("two tools"), ..Self::new() }
    }

    fn begin<'a>(&'a self, policy: &str, settings: Settings, recorder: Recorder, tokens: impl Choose + 'a) -> Run<'a> {
        let parts = Parts { engine: &self.engine, chat: &self.chat, registry: &self.registry, tools: &self.tools };
        let observe = Box::leak(Box::new(|_: &Event| {})); // of no size
        let run = Run::begin(parts, settings, policy, &question(&self.gold[0]), recorder, observe, &|| false);
        run.expect("a fitting run").choosing(tokens)
    }

    /// The tokens of these turns, each through its end.
    fn script<S: AsRef<str>>(&self, turns: &[S]) -> Script {
        let ids = |turn: &S| self.chat.tokenizer.encode(turn.as_ref()).expect("ids");
        Script(turns.iter().flat_map(|turn| ids(turn).into_iter().chain([self.chat.end_of_turn()])).collect())
    }

    /// The tokens of a trajectory's labelled turns.
    fn gold_script(&self, gold: &Trajectory) -> Script {
        let in_span = |i: usize| gold.spans().iter().any(|span| (span.start..span.end).contains(&i));
        let pieces = self.chat.pieces(gold.messages(), &gold.tools, false).expect("pieces");
        let turns = pieces.iter().filter(|piece| piece.is_turn && in_span(piece.messages.start));
        Script(turns.flat_map(|turn| self.chat.encode(turn).expect("ids")).collect())
    }

    fn samples(&self, row: &Trajectory, retention: Retention) -> BTreeMap<Capability, Sample> {
        let rules = Rules { retention, max_length: 1024, require_exit: true };
        let one = |alias: Capability| {
            let samples = sample::samples(&self.chat, std::slice::from_ref(row), &alias, rules).expect("samples");
            let [sample] = &samples.kept[..] else { panic!("one sample of {alias}, {:?} dropped", samples.dropped) };
            (alias, sample.clone())
        };
        world::stages().into_iter().map(|stage| one(stage.alias)).collect()
    }
}

fn random_adapter(engine: &Engine, seed: u64) -> Adapter {
    let model = &engine.backbone().config;
    let targets = vec![Projection::QProj, Projection::VProj, Projection::DownProj];
    let config = LoraConfig {
        rank: 2,
        alpha: 4.0,
        rank_pattern: BTreeMap::new(),
        alpha_pattern: BTreeMap::new(),
        rslora: false,
        targets,
    };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = |n: usize| (0..n).map(|_| rng.random_range(-0.3_f32..0.3)).collect::<Vec<_>>();
    let mut factors = |module: Module| {
        let (d_in, d_out) = checkpoint::dims(model, module.projection);
        (module, PlainFactors { a: draw(d_in * 2), b: draw(2 * d_out), d_in, rank: 2, d_out })
    };
    let modules = config.modules(model).expect("modules");
    let plain = modules.into_iter().map(&mut factors).collect();
    Adapter::new(config, plain).expect("finite factors")
}

fn question(gold: &Trajectory) -> String {
    gold.question.clone().expect("a question")
}

/// Tokens that are given.
struct Script(VecDeque<u32>);

impl Choose for Script {
    fn next(&mut self, _: &[f32]) -> infer::Result<u32> {
        self.0.pop_front().ok_or_else(|| infer::Error::Other("the script has ended".to_owned()))
    }
}

fn settings() -> Settings {
    let mut settings = Settings { system: Some(world::SYSTEM.to_owned()), ..Settings::default() };
    settings.budget.max_new = 200;
    settings
}

fn recorder() -> Recorder {
    Recorder::new("e".to_owned())
}

fn capability(name: &str) -> Capability {
    name.parse().expect("a legal name")
}

fn call(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
}

fn load(alias: &str) -> String {
    call("load_lora", &format!("{{\"adapter\": \"{alias}\"}}"))
}

fn exit(alias: &str) -> String {
    call("offload_lora", &format!("{{\"adapter\": \"{alias}\"}}"))
}

fn search(query: &str) -> String {
    call("search", &format!("{{\"query\": [\"{query}\"]}}"))
}

fn messages(events: &[Event]) -> impl Iterator<Item = &MessageEvent> {
    events.iter().filter_map(|event| if let Event::Message(message) = event { Some(message) } else { None })
}

fn notices(events: &[Event]) -> Vec<&str> {
    events.iter().filter_map(|event| if let Event::Notice(notice) = event { Some(notice.kind.as_str()) } else { None }).collect()
}

fn intervals(events: &[Event]) -> Vec<&Interval> {
    events.iter().filter_map(|event| if let Event::Time(interval) = event { Some(interval) } else { None }).collect()
}

/// What a stage did: its alias, and after each of its turns the context and the number of tokens that were sampled.
type Walked = Vec<(Capability, Vec<u32>, usize)>;

/// The three stages without a controller, each until its exit call.
fn walk_stages(run: &mut Run<'_>) -> Walked {
    let mut walked = Vec::new();
    for stage in world::stages() {
        run.load(&stage.alias).expect("no adapter is active");
        loop {
            let before = run.messages().len();
            let exited = run.turn().expect("a turn").exited;
            assert!(run.messages().len() > before, "the turn joined the history");
            walked.push((stage.alias.clone(), run.context().to_vec()));
            if exited {
                break;
            }
        }
    }
    walked
}
