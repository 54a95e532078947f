//! The whole of WeAct on a laptop: trains three adapters over the shipped toy backbone, lets an agent switch between them, and
//! compares that with the backbone alone and with the plain sum of the adapters.
//!
//! ```text
//! cargo run --release --example quickstart
//! ```
//!
//! Exits with status 1 unless WeAct-hard answers at least twelve of the twenty questions and clearly more than the other two.
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Instant,
};

use anyhow::Result;
use burn::tensor::{DType, Device};
use indicatif::ProgressBar;
use weact::{
    core::{
        Adapter, Capability,
        adapter::PlainFactors,
        chat::{Chat, ToolProtocol},
        episode::{Author, Event},
        io::{atomic, checkpoint::Checkpoint, peft},
        lora::Module,
        message::Role,
        registry::{Entry, Registry},
        stage::Stage,
    },
    eval::world::{
        self, World, WorldConfig,
        gold::Form,
        question::{Question, Split},
    },
    infer::{
        agent::{Finished, Parts, Run, Settings},
        controller::hard::{self, Hard},
        engine::Engine,
        record::Recorder,
    },
    train::{
        config,
        log::Event as TrainingEvent,
        merge,
        run_directory::Existing,
        sft::{self, Options},
    },
};

const BACKBONE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/datasets/toy/backbone");
const N_TRAIN: usize = 480;
const N_QUESTIONS: usize = 20;
const ENOUGH: usize = 12;
const CLEARLY_MORE: usize = 6;

fn main() -> Result<ExitCode> {
    let begun = Instant::now();
    let out = tempfile::tempdir()?;
    let world = World::new(&WorldConfig::default())?;
    let library = world.library()?;

    println!("1. Gold trajectories of {N_TRAIN} training questions.");
    let data = out.path().join("train.jsonl");
    let gold: Vec<_> = balanced(&world, Split::Train, N_TRAIN)
        .iter()
        .map(|q| world.gold(q, Form::Staged, &library.tools()?))
        .collect::<Result<_, _>>()?;
    let lines: Vec<String> = gold.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    atomic::write_text(&data, &(lines.join("\n") + "\n"))?;

    println!("2. One adapter per capability, each trained on its own tokens and its exit call.");
    let device = Device::flex();
    let mut adapters = Vec::new();
    for (stage, rank) in world::stages().into_iter().zip([8, 16, 8]) {
        let adapter = train(&stage, rank, &data, out.path(), &device)?;
        adapters.push((stage, adapter));
    }

    println!("3. {N_QUESTIONS} questions about unseen combinations, one agent, three sets of weights.\n");
    let checkpoint = Checkpoint::open(Path::new(BACKBONE), false)?;
    let chat = Chat::open(&checkpoint.dir, ToolProtocol::Template)?;
    let engine = Engine::new(Arc::new(checkpoint.load(&device, DType::F32)?), checkpoint.digest());
    let sum = merge::additive(&adapters.iter().map(|(_, a)| a).collect::<Vec<_>>())?;
    let registry_of = |weights: &dyn Fn(&Adapter) -> Result<Adapter>| -> Result<Registry> {
        let mut registry = Registry::default();
        for (stage, adapter) in &adapters {
            registry.register(Entry { stage: stage.clone(), adapter: Arc::new(weights(adapter)?), card: None })?;
        }
        Ok(registry)
    };
    let methods = [
        ("base", registry_of(&|a| without_effect(a))?),
        ("sum of adapters", registry_of(&|_| Ok(sum.clone()))?),
        ("WeAct-hard", registry_of(&|a| Ok(a.clone()))?),
    ];
    let questions = balanced(&world, Split::Test, N_QUESTIONS);
    let mut right = BTreeMap::new();
    for (name, registry) in &methods {
        let bar = ProgressBar::new(N_QUESTIONS as u64);
        for (i, question) in questions.iter().enumerate() {
            let tools = library.tools()?;
            let parts = Parts { engine: &engine, chat: &chat, registry, tools: &tools };
            let finished = answer(parts, question)?;
            let report = report(&finished);
            let grade = world.grade(question, &report);
            *right.entry(*name).or_insert(0) += usize::from(grade.right);
            if i == 1 {
                bar.suspend(|| show(name, question, &finished, grade.right));
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
    }
    println!("{:<18}answered right (value, and relations cited in the writer's dialect)", "");
    for (name, _) in &methods {
        println!("{name:<18}{:>2} of {N_QUESTIONS}", right[name]);
    }
    println!("\n{:.0} s in all", begun.elapsed().as_secs_f64());
    let switching = right["WeAct-hard"];
    let passed = switching >= ENOUGH && [right["base"], right["sum of adapters"]].iter().all(|r| switching >= r + CLEARLY_MORE);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The first `n` questions of a split.
fn balanced(world: &World, split: Split, n: usize) -> Vec<Question> {
    world.questions(split, n)
}

/// Trains one adapter as `weact train` does, with a progress bar.
fn train(stage: &Stage, rank: usize, data: &Path, out: &Path, device: &Device) -> Result<Adapter> {
    let begun = Instant::now();
    let dir = out.join(stage.alias.as_str());
    let run = config::Run {
        kind: config::Kind::Lora,
        model: PathBuf::from(BACKBONE),
        data: vec![data.to_owned()],
        capability: Some(stage.alias.clone()),
        capabilities: Vec::new(),
        out: dir.clone(),
        lora: config::Lora { rank, alpha: 2.0 * rank as f64, ..Default::default() },
        train: config::Train { steps: Some(120), batch_rows: 16, max_length: 512, lr: 5e-3, warmup: 10.0, ..Default::default() },
        context: Default::default(),
        valid: None,
    };
    let bar = ProgressBar::new(120);
    let mut last = 0.0;
    let mut observe = |event: &TrainingEvent| {
        if let TrainingEvent::Step(step) = event {
            last = step.loss.unwrap_or(last);
            bar.inc(1);
        }
    };
    let options = Options { existing: Existing::Refuse, allow_empty: false, tie_embeddings: false };
    sft::train(&run, options, device, &mut observe, &|| false)?;
    bar.finish_and_clear();
    println!(
        "   {:<7} rank {rank:>2}, loss {last:.4} nats per token, {:.0} s",
        stage.alias.as_str(),
        begun.elapsed().as_secs_f64()
    );
    Ok(peft::read(&dir)?)
}

/// The same adapter with `B = 0`: under it every token is the backbone's.
fn without_effect(adapter: &Adapter) -> Result<Adapter> {
    let silent = |(module, f): (&Module, &PlainFactors)| (*module, PlainFactors { b: vec![0.0; f.b.len()], ..f.clone() });
    Ok(Adapter::new(adapter.config().clone(), adapter.plain().iter().map(silent).collect())?)
}

fn answer(parts: Parts<'_>, question: &Question) -> Result<Finished> {
    let mut settings = Settings { system: Some(world::SYSTEM.to_owned()), ..Settings::default() };
    settings.budget.max_new = 64;
    let mut rules = Hard::default();
    rules.workflow[1].max_turns = 6;
    let mut observe = |_: &Event| {};
    let run = Run::begin(parts, settings, "hard", &question.text, Recorder::new(question.id.clone()), &mut observe, &|| false)?;
    Ok(hard::run(run, &rules)?)
}

/// The last text that the policy wrote.
fn report(finished: &Finished) -> String {
    let messages = finished.recorder.events().iter().rev().filter_map(|e| if let Event::Message(m) = e { Some(m) } else { None });
    let mut by_model = messages.filter(|m| m.author == Author::Model && !m.message.content.is_empty());
    by_model.next().map(|m| m.message.content.clone()).unwrap_or_default()
}

fn show(method: &str, question: &Question, finished: &Finished, right: bool) {
    println!("   {method}: {}", question.text);
    for event in finished.recorder.events() {
        match event {
            Event::Message(m) if m.message.role == Role::Assistant => {
                let route = m.route.as_deref().map_or("harness", |r| r.split('@').next().unwrap_or(r));
                let calls: Vec<String> =
                    m.message.tool_calls.iter().map(|c| format!("{}{}", c.name, serde_json::json!(c.arguments))).collect();
                println!("     {route:<8} {}", short(&format!("{} {}", m.message.content, calls.join(" "))));
            }
            Event::Message(m) if m.message.role == Role::Tool && m.message.name.as_deref() == Some("search") => {
                println!("     {:<8} {}", "", short(m.message.content.lines().next().unwrap_or_default()));
            }
            _ => {}
        }
    }
    let stages: Vec<String> =
        finished.outcome.stages.iter().map(|(k, cause): &(Capability, _)| format!("{k} {cause:?}")).collect();
    let answer = finished.outcome.answer.as_deref().unwrap_or_default();
    println!("     {}; answer {:?}, {}\n", stages.join(", "), short(answer), if right { "right" } else { "wrong" });
}

/// On one line and not too long.
fn short(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words.chars().take(90).collect()
}
