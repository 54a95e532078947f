//! Trains the toy world's backbone from nothing: the recipe of `datasets/toy/backbone`.
//!
//! ```text
//! cargo run --release --example toy_backbone -- datasets/toy/backbone
//! ```
//!
//! Every batch is sixteen fresh documents of the toy world: made-up facts, half of them with relation words and half with a code map
//! of the document's own. Every token is supervised. What it learns is the format and copying from the history; it never sees
//! the world's facts nor the three dialects that the adapters are trained on.
#![allow(clippy::print_stdout)]

use std::{env, fs, path::Path, time::Instant};

use anyhow::{Context, Result};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use weact::{
    core::{
        Backbone,
        chat::{Chat, ToolProtocol},
        io::{checkpoint, checkpoint::Checkpoint, hf_config, tensors},
        message::Role,
        nll::{self, Targets},
        sample::Sample,
    },
    eval::world::{self, World, WorldConfig},
    train::{
        config::{Schedule, Train},
        gradient::{Plan, batch_gradient},
        optim::{self, AdamW},
        schedule::learning_rate,
        trainable::{Policy, Trainable},
    },
};

const SEED: u64 = 1;
const BATCH: usize = 16;
const VALIDATION_SEED: u64 = 2;

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let out = arguments.next().context("usage: toy_backbone OUT_DIR [STEPS]")?;
    let n_steps = arguments.next().map_or(Ok(2000), |n| n.parse())?;
    let out = Path::new(&out);
    fs::create_dir_all(out)?;
    world::checkpoint::write_checkpoint_files(out)?;
    write_initial_weights(out)?;

    let device = burn::tensor::Device::flex();
    let chat = Chat::open(out, ToolProtocol::Template)?;
    let backbone = Checkpoint::open(out, false)?.load(&device, burn::tensor::DType::F32)?;
    let tools = world::gold::schemas(&World::new(&WorldConfig::default())?.tools()?);
    let (trainable, mut parameters) = Trainable::full(&backbone);
    let train = Train { lr: 2e-3, schedule: Schedule::Cosine, warmup: 100.0, ..Train::default() };
    let adam = AdamW { beta1: 0.9, beta2: 0.98, eps: 1e-8, weight_decay: 0.0 };
    let plan = Plan { micro_rows: None, recompute: Some(false) };

    let begun = Instant::now();
    let mut n_tokens = 0;
    for step in 1..=n_steps {
        let first = ((step - 1) * BATCH) as u64;
        let batch = (first..first + BATCH as u64).map(|i| document(&chat, &tools, SEED, i)).collect::<Result<Vec<Document>>>()?;
        let samples: Vec<&Sample> = batch.iter().map(|d| &d.all).collect();
        let values: Vec<_> = parameters.iter().map(|p| p.value.clone()).collect();
        let result = batch_gradient(&trainable, &backbone, &values, &samples, plan)?.context("every token is supervised")?;
        let gradients = result.gradients.into_iter().collect::<Option<Vec<_>>>().context("every weight has a gradient")?;
        drop(values);
        let scale = optim::clip_scale(optim::global_norm(&gradients), 1.0);
        adam.update(&mut parameters, gradients, (scale, learning_rate(&train, step, n_steps)), step);
        n_tokens += result.n_supervised;
        if step % 250 == 0 || step == n_steps {
            let values: Vec<_> = parameters.iter().map(|p| p.value.clone()).collect();
            let policy = trainable.policy(&backbone, &values);
            let right = share_all_right(&chat, &tools, &policy)?;
            checkpoint::write_like(out, out, &policy.backbone)?;
            let seconds = begun.elapsed().as_secs_f64();
            println!("step {step}, {n_tokens} tokens, loss {:.3}, all right {right:.3}, {seconds:.0} s", result.loss);
        }
    }
    println!("digest {}", Checkpoint::open(out, false)?.digest());
    Ok(())
}

/// Embedding and matrices uniform with standard deviation 0.05, norms one.
fn write_initial_weights(dir: &Path) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let bound = 0.05 * 3f32.sqrt();
    let shapes = checkpoint::shapes(&hf_config::read(dir)?);
    let values: Vec<(String, Vec<usize>, Vec<f32>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let n = shape.iter().product();
            let values = if shape.len() == 1 { vec![1.0; n] } else { (0..n).map(|_| rng.random_range(-bound..bound)).collect() };
            (name, shape, values)
        })
        .collect();
    let named: Vec<tensors::Named<'_>> = values.iter().map(|(n, s, v)| (n.clone(), s.clone(), v.as_slice())).collect();
    Ok(tensors::write(&dir.join("model.safetensors"), &named)?)
}

/// One document with every token supervised, and with the policy's turns only.
struct Document {
    all: Sample,
    turns: Vec<bool>,
    neutral: bool,
}

fn document(chat: &Chat, tools: &[serde_json::Value], seed: u64, index: u64) -> Result<Document> {
    let trajectory = world::document::document(seed, index, tools);
    let (mut ids, mut turns) = (Vec::new(), Vec::new());
    for piece in chat.pieces(trajectory.messages(), tools, false)? {
        let piece_ids = chat.encode(&piece)?;
        turns.resize(turns.len() + piece_ids.len(), piece.is_turn);
        ids.extend(piece_ids);
    }
    let is_coded = |text: &str| world::dialect::CODES.iter().any(|code| text.contains(code));
    let neutral = !trajectory.messages().iter().any(|m| m.role == Role::Assistant && is_coded(&m.content));
    let capability = trajectory.spans()[0].capability.clone();
    let all = Sample {
        id: trajectory.id,
        capability,
        mask: vec![true; ids.len()],
        ids,
        left_out: Default::default(),
        dropped_exchanges: 0,
    };
    Ok(Document { all, turns, neutral })
}

/// Of 64 unseen documents in relation words, the share in which every token of the policy's turns is the most likely one.
fn share_all_right(chat: &Chat, tools: &[serde_json::Value], policy: &Policy<'_>) -> Result<f64> {
    let backbone: &Backbone = &policy.backbone;
    let documents = (0..).map(|i| document(chat, tools, VALIDATION_SEED, i)).filter(|d| d.as_ref().map_or(true, |d| d.neutral));
    let mut n_right = 0;
    for document in documents.take(64) {
        let document = document?;
        let tokens = backbone.tokens(&[&document.all.ids])?;
        let targets = Targets::new(&[(&document.all.ids, &document.turns)], &backbone.device()).context("turns")?;
        let scored = nll::per_token(backbone, None, backbone.hidden(&tokens, None, None), &targets);
        n_right += usize::from(scored.n_top1() == targets.len());
    }
    Ok(n_right as f64 / 64.0)
}
