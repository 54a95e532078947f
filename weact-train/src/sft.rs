//! Supervised training of one adapter (Eq. 5) or of the whole backbone: one trainer, resumable to the bit.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Instant,
};

use burn::tensor::{DType, Device, Tensor};
use serde::Serialize;
use sha2::{Digest, Sha256};
use weact_core::{
    Adapter, Backbone, Error as CoreError,
    adapter::LoraConfig,
    card::{Card, TrainingRecord},
    chat::Chat,
    io::{
        atomic,
        checkpoint::{Checkpoint, dims, write_like},
        peft,
        tensors::hex,
    },
    model::Parameter as Weight,
    nll,
    ops::Operators,
    sample::Sample,
};

use crate::{
    Error, Result, batch,
    checkpoint::{self, Position},
    config::{Body, Kind, Run},
    dataset::{self, Dataset, Tolerance},
    gradient::{BatchGradient, Plan, batch_gradient, inputs, micro_batches},
    log::{Data, Done, Event, Log, Step, Validation},
    memory::{self, MicroBatch, Parts, Prediction},
    optim::{self, AdamW, Parameter},
    run_directory::{self, Existing},
    schedule::learning_rate,
    trainable::{Trainable, values_of},
};

/// Files of the source model that a full training hands on as they are.
pub(crate) const COPIED: [&str; 5] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json"];

/// How to run it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What to do with a run directory that holds something.
    pub existing: Existing,
    /// Leave out rows without any labelled stage instead of refusing them.
    pub allow_empty: bool,
    /// Use the embedding as output head where the checkpoint has none.
    pub tie_embeddings: bool,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All updates are done and the adapter or model is written.
    Done(Done),
    /// It was interrupted; a checkpoint after this batch is on disk.
    Interrupted {
        /// Batches done.
        step: usize,
    },
}

/// What a run would do.
#[derive(Clone, Debug, Serialize)]
pub struct Preview {
    /// The data.
    #[serde(flatten)]
    pub data: Data,
    /// Names of the trained tensors' modules, or of the weights.
    pub modules: Vec<String>,
    /// Ids of the first sample.
    pub first_ids: Vec<u32>,
    /// Which of them are supervised.
    pub first_mask: Vec<bool>,
    /// What it would take of memory.
    pub memory: Prediction,
}

/// Everything that a run needs, checked and loaded.
struct Prepared {
    chat: Chat,
    base: String,
    base_bytes: usize, // of its weights on disk
    backbone: Backbone,
    data: Dataset,
    valid: Option<Dataset>,
    trainable: Trainable,
    parameters: Vec<Parameter>,
    n_steps: usize,
}

/// Checks a run and says what it would do, without writing anything.
///
/// # Errors
/// As [`train`], before its first update.
pub fn preview(run: &Run, options: Options, device: &Device) -> Result<Preview> {
    run_directory::check(run, options.existing)?;
    let prepared = Prepared::new(run, options, device)?;
    let names = prepared.parameters.iter().map(|p| p.name.clone());
    let mut modules: Vec<String> = names.map(|n| n.trim_end_matches(".lora_A").trim_end_matches(".lora_B").to_owned()).collect();
    modules.dedup();
    let first = &prepared.data.samples[0];
    Ok(Preview {
        data: prepared.data_event(),
        modules,
        first_ids: first.ids.clone(),
        first_mask: first.mask.clone(),
        memory: prepared.predict_memory(run),
    })
}

/// Trains. `observe` gets every event of the log; `interrupted` is asked between updates.
///
/// # Errors
/// If configuration, data, checkpoint or run directory are not what they should be; if loss or gradient become non-finite; if a
/// trained tensor gets no gradient; if a file can't be written (the last good checkpoint stays).
pub fn train(
    run: &Run,
    options: Options,
    device: &Device,
    observe: &mut dyn FnMut(&Event),
    interrupted: &dyn Fn() -> bool,
) -> Result<Outcome> {
    run_directory::check(run, options.existing)?;
    let mut prepared = Prepared::new(run, options, device)?;
    let _held = run_directory::prepare(run, options.existing)?;
    let others = neighbour_digests(&run.out)?;
    let frozen = weights_digest(&prepared.backbone);

    let mut position =
        Position { step: 0, updates: 0, data: prepared.data.digest.clone(), base: prepared.base.clone(), state: String::new() };
    let (mut saved, mut passed_over) = (None, Vec::new());
    if options.existing == Existing::Resume
        && let Some(restored) = prepared.restore(run, &position, device)?
    {
        (position, passed_over) = restored;
        saved = Some(position.step);
    }
    let mut log = Log::open(&run.out, position.step)?;
    let mut report = |log: &mut Log, event: Event| -> Result<()> {
        log.push(&event)?;
        observe(&event);
        Ok(())
    };
    if saved.is_some() {
        report(&mut log, Event::Resumed { step: position.step, steps: prepared.n_steps, passed_over })?;
    }
    if position.step == 0 {
        report(&mut log, Event::Data(prepared.data_event()))?;
        if let Some(validation) = prepared.validate(run, 0)? {
            report(&mut log, Event::Valid(validation))?;
        }
    }
    while position.step < prepared.n_steps {
        if interrupted() {
            if saved != Some(position.step) {
                checkpoint::write(&run.out, &position, &prepared.parameters, run.train.keep)?;
                report(&mut log, Event::Checkpoint { step: position.step })?;
            }
            return Ok(Outcome::Interrupted { step: position.step });
        }
        let step = prepared.step(run, &mut position)?;
        report(&mut log, Event::Step(step))?;
        let (step, last) = (position.step, position.step == prepared.n_steps);
        if let Some(valid) = &run.valid
            && (step.is_multiple_of(valid.every) || last)
            && let Some(validation) = prepared.validate(run, step)?
        {
            report(&mut log, Event::Valid(validation))?;
        }
        if step.is_multiple_of(run.train.save_every) || last {
            checkpoint::write(&run.out, &position, &prepared.parameters, run.train.keep)?;
            saved = Some(step);
            report(&mut log, Event::Checkpoint { step })?;
        }
    }
    prepared.prove_the_rest_is_untouched(run, &frozen, &others)?;
    let digest = prepared.write_result(run, position.updates)?;
    let peak_bytes = memory::of_process("VmHWM");
    let done = Done { step: position.step, digest, base: prepared.base.clone(), others, peak_bytes };
    report(&mut log, Event::Done(done.clone()))?;
    Ok(Outcome::Done(done))
}

impl Prepared {
    fn new(run: &Run, options: Options, device: &Device) -> Result<Self> {
        let dtype = dtype(&run.train.dtype)?;
        let checkpoint = Checkpoint::open(&run.model, options.tie_embeddings)?;
        let chat = Chat::open(&run.model, run.context.tool_protocol)?;
        let limit = checkpoint.config.max_positions;
        let mut rules = run.rules();
        rules.max_length = rules.max_length.min(limit);
        let supervised = run.supervised();
        let data = dataset::load(
            &run.data,
            &chat,
            &supervised,
            rules,
            Tolerance { max_lost: run.train.max_lost, allow_empty: options.allow_empty },
        )?;
        let everything = Tolerance { max_lost: 1.0, allow_empty: true };
        let valid = run.valid.as_ref().map(|v| dataset::load(&v.data, &chat, &supervised, rules, everything)).transpose()?;
        let mut backbone = checkpoint.load(device, dtype)?;
        backbone.operators = operators(run.train.operators, device, dtype)?;
        let (trainable, parameters) = trainable(run, &backbone, device)?;
        let per_epoch = data.samples.len().div_ceil(run.train.batch_rows);
        let n_steps = run.train.steps.unwrap_or_else(|| per_epoch * run.train.epochs.unwrap_or(2));
        let base = checkpoint.digest();
        let base_bytes = checkpoint.tensors.entries().keys().map(|name| checkpoint.tensors.bytes(name).len()).sum();
        Ok(Self { chat, base, base_bytes, backbone, data, valid, trainable, parameters, n_steps })
    }

    fn data_event(&self) -> Data {
        Data {
            samples: self.data.samples.len(),
            tokens: self.data.n_tokens(),
            supervised_tokens: self.data.n_supervised(),
            dropped: self.data.dropped_by_reason(),
            valid_samples: self.valid.as_ref().map(|v| v.samples.len()),
            valid_dropped: self.valid.as_ref().map(Dataset::dropped_by_reason).unwrap_or_default(),
            trained_tensors: self.parameters.len(),
            trained_parameters: self.parameters.iter().map(|p| p.value.dims()[0]).sum(),
            steps: self.n_steps,
        }
    }

    /// Of all micro-batches that this run computes, the one that takes most.
    fn predict_memory(&self, run: &Run) -> Prediction {
        let t = &run.train;
        let lengths: Vec<usize> = self.data.samples.iter().map(|s| s.ids.len()).collect();
        let of_batch = |indices: Vec<usize>| {
            let batch: Vec<&Sample> = indices.iter().map(|i| &self.data.samples[*i]).collect();
            plan(run).micro_batches(&self.backbone, &self.trainable, &batch)
        };
        let micros: Vec<MicroBatch> = batch::of_steps(&lengths, t.batch_rows, t.seed, self.n_steps).flat_map(of_batch).collect();
        let valid = self.valid.as_ref().map(by_length).unwrap_or_default();
        let n_tokens = |rows: &[&Sample]| rows.iter().map(|s| s.ids.len()).sum();
        let n_valid = micro_batches(&valid, t.micro_rows).into_iter().map(n_tokens).max().unwrap_or(0);
        let parts = |micro: &MicroBatch| Parts::new(&self.backbone, &self.trainable, micro, self.base_bytes, n_valid);
        let largest = micros.iter().max_by_key(|micro| parts(micro).total).expect("each sample has a supervised token");
        Prediction {
            bytes: parts(largest),
            largest: largest.clone(),
            micro_batches: micros.len(),
            recomputed: micros.iter().filter(|micro| micro.recompute).count(),
        }
    }

    fn restore(&mut self, run: &Run, start: &Position, device: &Device) -> Result<Option<(Position, Vec<String>)>> {
        let Some((position, broken)) = checkpoint::restore(&run.out, &mut self.parameters, device)? else { return Ok(None) };
        let changed = [("training data", &position.data, &start.data), ("base model", &position.base, &start.base)];
        if let Some((what, then, now)) = changed.into_iter().find(|(_, a, b)| a != b) {
            let why = format!(
                "was begun with another {what} (digest {then}, now {now}): a resumed run would differ from an unbroken one"
            );
            return Err(Error::RunDirectory { path: run.out.clone(), why });
        }
        Ok(Some((position, broken)))
    }

    fn values(&self) -> Vec<Tensor<1>> {
        self.parameters.iter().map(|p| p.value.clone()).collect()
    }

    /// One batch: gradient, clipping, update.
    fn step(&mut self, run: &Run, position: &mut Position) -> Result<Step> {
        let begun = Instant::now();
        let t = &run.train;
        let step = position.step + 1;
        let lengths: Vec<usize> = self.data.samples.iter().map(|s| s.ids.len()).collect();
        let indices = batch::of_step(&lengths, t.batch_rows, t.seed, step);
        let batch: Vec<&Sample> = indices.iter().map(|i| &self.data.samples[*i]).collect();
        let lr = learning_rate(t, step, self.n_steps);
        let tokens: usize = batch.iter().map(|s| s.ids.len()).sum();
        let result = batch_gradient(&self.trainable, &self.backbone, &self.values(), &batch, plan(run))?;
        let (mut loss, mut grad_norm, mut padding, mut trained_tokens) = (None, None, None, 0);
        if let Some(result) = result {
            (loss, padding, trained_tokens) = (Some(result.loss), Some(result.padding), result.n_supervised);
            let (gradients, norm) = self.checked(result, step, position.updates == 0)?;
            grad_norm = Some(norm);
            position.updates += 1;
            let adam = AdamW { beta1: t.beta1, beta2: t.beta2, eps: 1e-8, weight_decay: t.weight_decay };
            adam.update(&mut self.parameters, gradients, (optim::clip_scale(norm, t.clip), lr), position.updates);
        }
        position.step = step;
        let (wall_s, peak_bytes) = (begun.elapsed().as_secs_f64(), memory::of_process("VmHWM"));
        Ok(Step { step, loss, trained_tokens, tokens, padding, lr, grad_norm, wall_s, peak_bytes })
    }

    /// The gradients and their norm, once they are known to be there and finite. Before the first update every trained tensor must get one: `A`
    /// has a zero gradient while `B` is zero, `B` and everything else must not.
    fn checked(&self, result: BatchGradient, step: usize, first: bool) -> Result<(Vec<Tensor<1>>, f64)> {
        if !result.loss.is_finite() {
            return Err(Error::Other(format!(
                "the loss of batch {step} is {}: lower lr, or check data and weights",
                result.loss
            )));
        }
        let mut gradients = Vec::with_capacity(self.parameters.len());
        let mut without = Vec::new();
        for (parameter, gradient) in self.parameters.iter().zip(result.gradients) {
            let Some(gradient) = gradient else {
                without.push(parameter.name.as_str());
                continue;
            };
            if first && !parameter.name.ends_with(".lora_A") && optim::global_norm(std::slice::from_ref(&gradient)) == 0.0 {
                without.push(&parameter.name);
            }
            gradients.push(gradient);
        }
        if !without.is_empty() {
            let shown = without.iter().take(3).copied().collect::<Vec<_>>().join(", ");
            return Err(Error::Other(format!(
                "{} of {} trained tensors get no gradient, as {shown}",
                without.len(),
                self.parameters.len()
            )));
        }
        let norm = optim::global_norm(&gradients);
        if !norm.is_finite() {
            return Err(Error::Other(format!("the gradient of batch {step} is not finite: lower lr, or check data and weights")));
        }
        Ok((gradients, norm))
    }

    fn validate(&self, run: &Run, step: usize) -> Result<Option<Validation>> {
        let Some(valid) = &self.valid else { return Ok(None) };
        let values = self.values();
        let policy = self.trainable.policy(&self.backbone, &values);
        let (mut sum, mut hits, mut tokens) = (0.0, 0, 0);
        for rows in micro_batches(&by_length(valid), run.train.micro_rows) {
            let (tokens_of_rows, targets) = inputs(&self.backbone, rows)?;
            let hidden = policy.backbone.hidden(&tokens_of_rows, policy.factors.as_ref(), None);
            let scored = nll::per_token(&policy.backbone, policy.factors.as_ref(), hidden, &targets);
            let nll = scored.nll.clone().into_data().try_to_vec::<f32>().expect("f32");
            sum += nll.iter().map(|x| f64::from(*x)).sum::<f64>();
            hits += scored.n_top1();
            tokens += targets.len();
        }
        let share = |x: f64| x / tokens as f64;
        Ok((tokens > 0).then(|| Validation { step, nll: share(sum), top1: share(hits as f64), tokens }))
    }

    /// Writes the adapter or the model into the run directory and returns its digest.
    fn write_result(&self, run: &Run, updates: usize) -> Result<String> {
        match run.kind {
            Kind::Lora => {
                let adapter = self.trainable.adapter(&self.backbone.config, &self.parameters)?;
                self.write_adapter(run, &adapter, updates)?;
                Ok(adapter.digest().to_owned())
            }
            Kind::Full => {
                let policy = self.trainable.policy(&self.backbone, &self.values()).backbone.into_owned();
                write_model(&run.model, &policy, &run.out)?;
                Ok(Checkpoint::open(&run.out, false)?.digest())
            }
        }
    }

    fn write_adapter(&self, run: &Run, adapter: &Adapter, updates: usize) -> Result<()> {
        let [stage] = self.data.stages.as_slice() else { panic!("an adapter has one capability") };
        let card = Card {
            alias: stage.alias.clone(),
            description: stage.description.clone(),
            activation: stage.activation.clone(),
            digest: adapter.digest().to_owned(),
            base: self.base.clone(),
            tokenizer: self.chat.tokenizer.digest().to_owned(),
            template: self.chat.template_digest(),
            tool_protocol: run.context.tool_protocol,
            think: run.context.think,
            retention: run.retention(),
            training: Some(TrainingRecord {
                steps: updates,
                samples: self.data.samples.len(),
                supervised_tokens: self.data.n_supervised(),
                seed: run.train.seed,
                data: self.data.digest.clone(),
            }),
            merge: None,
        };
        peft::write(&run.out, adapter, &run.model.to_string_lossy())?;
        Ok(card.write(&run.out)?)
    }

    fn prove_the_rest_is_untouched(&self, run: &Run, frozen: &str, others: &[(String, String)]) -> Result<()> {
        if weights_digest(&self.backbone) != frozen {
            return Err(Error::Other("the frozen backbone changed in memory: this is a bug, don't use the result".to_owned()));
        }
        if Checkpoint::open(&run.model, self.backbone.config.tied)?.digest() != self.base {
            return Err(Error::Other(format!(
                "{} changed on disk during the run: the result belongs to what was loaded",
                run.model.display()
            )));
        }
        // Others may appear meanwhile: capabilities can be trained at the same time.
        let now = neighbour_digests(&run.out)?;
        if let Some((name, _)) = others.iter().find(|other| !now.contains(other)) {
            return Err(Error::Other(format!("the adapter {name} beside the run directory changed during the run")));
        }
        Ok(())
    }
}

fn plan(run: &Run) -> Plan {
    Plan { micro_rows: run.train.micro_rows, recompute: run.train.recompute }
}

/// Samples that are computed together are alike.
fn by_length(data: &Dataset) -> Vec<&Sample> {
    let mut samples: Vec<&Sample> = data.samples.iter().collect();
    samples.sort_by_key(|s| s.ids.len());
    samples
}

/// The operators' body that a configuration asks for.
fn operators(wanted: Option<Body>, device: &Device, dtype: DType) -> Result<Operators> {
    match (wanted, Operators::best_for(device, dtype)) {
        (None, best) => Ok(best),
        (Some(Body::Composed), _) => Ok(Operators::Composed),
        (Some(Body::Fused), Operators::Fused) => Ok(Operators::Fused),
        (Some(Body::Fused), Operators::Composed) => Err(Error::Other(format!(
            "[train] operators = \"fused\": this device has none for {dtype:?}; leave the key away, or use \"composed\""
        ))),
    }
}

fn trainable(run: &Run, backbone: &Backbone, device: &Device) -> Result<(Trainable, Vec<Parameter>)> {
    if run.kind == Kind::Full {
        return Ok(Trainable::full(backbone));
    }
    let lora = &run.lora;
    let config = LoraConfig {
        rank: lora.rank,
        alpha: lora.alpha,
        rank_pattern: Default::default(),
        alpha_pattern: Default::default(),
        rslora: lora.rslora,
        targets: lora.targets.projections()?,
    };
    let too_wide = config.modules(&backbone.config)?.into_iter().find(|module| {
        let (d_in, d_out) = dims(&backbone.config, module.projection);
        lora.rank > d_in.min(d_out)
    });
    if let Some(module) = too_wide {
        return Err(Error::Other(format!("[lora] rank {} is more than {} can have", lora.rank, module.path())));
    }
    let Some(from) = &lora.continue_from else {
        return Trainable::fresh_lora(config, &backbone.config, run.train.seed, device);
    };
    let adapter = peft::read(from)?;
    adapter.check_fits(&backbone.config)?;
    if *adapter.config() != config {
        let why = "[lora] rank, alpha, targets and rslora must be those of the adapter that continue_from names";
        return Err(Error::Other(format!("{why}: {:?} and {:?}", config, adapter.config())));
    }
    Ok(Trainable::from_adapter(&adapter, device))
}

/// The element type by its name in configurations and on the command line.
///
/// # Errors
/// If there is no such type.
pub fn dtype(name: &str) -> Result<DType> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        other => Err(Error::Other(format!("dtype {other:?} is none of f32, bf16, f16"))),
    }
}

/// SHA-256 over every weight in memory, a few rows at a time.
fn weights_digest(backbone: &Backbone) -> String {
    const ROWS: usize = 256;
    let mut hash = Sha256::new();
    backbone.map(&mut |name, weight| {
        hash.update(name);
        let mut add = |part: Tensor<1>| {
            let bytes: Vec<u8> = values_of(&part.cast(DType::F32)).into_iter().flat_map(f32::to_le_bytes).collect();
            hash.update(bytes);
        };
        match weight.clone() {
            Weight::Vector(v) => add(v),
            Weight::Matrix(m) => {
                let n_rows = m.dims()[0];
                (0..n_rows).step_by(ROWS).for_each(|i| add(m.clone().narrow(0, i, ROWS.min(n_rows - i)).flatten(0, 1)));
            }
        }
        weight
    });
    hex(&hash.finalize())
}

fn neighbour_digests(out: &Path) -> Result<Vec<(String, String)>> {
    let digest = |file: PathBuf| {
        let bytes = fs::read(&file).map_err(|e| CoreError::io("can't read", &file, e))?;
        let folder = file.parent().and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Ok((folder, hex(&Sha256::digest(bytes))))
    };
    run_directory::neighbours(out)?.into_iter().map(digest).collect()
}

/// A Hugging Face folder with the trained weights in f32, and config and tokenizer's files of the one it came from.
fn write_model(from: &Path, backbone: &Backbone, out: &Path) -> Result<()> {
    write_like(from, out, backbone)?;
    for file in COPIED {
        let source = from.join(file);
        if source.exists() {
            let target = out.join(file);
            atomic::write(&target, |out| io::copy(&mut File::open(&source)?, out).map(drop))?;
        }
    }
    Ok(())
}
