//! Trains the toy world's backbone from nothing: the recipe of `datasets/toy/backbone`.
//!
//! ```text
//! cargo run --release --example toy_backbone -- datasets/toy/backbone
//! ```
//!
//! Every batch is sixteen fresh documents of the toy world: trajectories about made-up facts, half of them with relation words and
//! half with a code map of the document's own, in stages and without; and exercises in copying, reversing and sorting. The
//! policy's turns are supervised, and every fourth document whole. What it learns is the format and copying from the history; it never sees the world's facts nor the three dialects
//! that the adapters are trained on.
#![allow(clippy::print_stdout)]

use std::{env, fs, path::Path, time::Instant};

use anyhow::{Context, Result};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use weact::{
    core::{
        Capability,
        chat::{Chat, ToolProtocol},
        io::{checkpoint, checkpoint::Checkpoint, hf_config, tensors},
        sample::Sample,
    },
    eval::world::{self, World, WorldConfig, document::Tools, gold::Form, skill},
    train::{
        config::{Schedule, Train},
        gradient::{Plan, batch_gradient},
        optim::{self, AdamW},
        schedule::learning_rate,
        trainable::Trainable,
    },
};

const SEED: u64 = 1;
const BATCH: usize = 16;
/// Of so many documents one is supervised in every token: copying within results is learned early, and helps.
const WHOLE_EVERY: u64 = 4;
const N_MEASURED: usize = 96;

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let out = arguments.next().context("usage: toy_backbone OUT_DIR [STEPS]")?;
    let n_steps = arguments.next().map_or(Ok(7000), |n| n.parse())?;
    let out = Path::new(&out);
    fs::create_dir_all(out)?;
    world::checkpoint::write_checkpoint_files(out)?;
    write_initial_weights(out)?;

    let device = burn::tensor::Device::flex();
    let chat = Chat::open(out, ToolProtocol::Template)?;
    let backbone = Checkpoint::open(out, false)?.load(&device, burn::tensor::DType::F32)?;
    let of_a_run = World::new(&WorldConfig::default())?.library()?.tools()?;
    let schemas = |form| world::gold::schemas(form, &of_a_run);
    let tools = Tools { staged: schemas(Form::Staged), plain: schemas(Form::Plain) };
    let (trainable, mut parameters) = Trainable::full(&backbone);
    let train = Train { lr: 2e-3, schedule: Schedule::Cosine, warmup: 100.0, ..Train::default() };
    let adam = AdamW { beta1: 0.9, beta2: 0.98, eps: 1e-8, weight_decay: 0.0 };
    let plan = Plan { micro_rows: None, recompute: Some(false) };

    let begun = Instant::now();
    let mut n_tokens = 0;
    for step in 1..=n_steps {
        let first = ((step - 1) * BATCH) as u64;
        let batch = (first..first + BATCH as u64).map(|i| sample(&chat, &tools, i)).collect::<Result<Vec<Sample>>>()?;
        let samples: Vec<&Sample> = batch.iter().collect();
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
            let [exercises, trajectories] = skill::measure(&policy.backbone, None, &chat, &tools, N_MEASURED)?;
            checkpoint::write_like(out, out, &policy.backbone)?;
            let seconds = begun.elapsed().as_secs_f64();
            println!(
                "step {step}, {n_tokens} tokens, loss {:.3}, all right: {} exercises and {} trajectories of {N_MEASURED}, {seconds:.0} s",
                result.loss, exercises.n_right, trajectories.n_right
            );
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

/// One document with every token supervised.
fn sample(chat: &Chat, tools: &Tools, index: u64) -> Result<Sample> {
    let document = world::document::document(SEED, index, tools);
    let (mut ids, mut mask) = (Vec::new(), Vec::new());
    for piece in chat.pieces(&document.messages, &document.tools, false)? {
        let piece_ids = chat.encode(&piece)?;
        mask.resize(mask.len() + piece_ids.len(), piece.is_turn || index.is_multiple_of(WHOLE_EVERY));
        ids.extend(piece_ids);
    }
    Ok(Sample {
        id: document.id,
        capability: Capability::new(world::gold::AGENT)?,
        mask,
        ids,
        left_out: Default::default(),
        dropped_exchanges: 0,
    })
}
