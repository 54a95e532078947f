//! The interference study (Eq. 3, App. D): gradients of a shared adapter on each capability's mini-batches, their products and cosines, and the
//! first-order prediction against what a step really does.

mod report;

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};
use weact_core::{
    Backbone, Capability, Error as CoreError,
    adapter::LoraConfig,
    chat::Chat,
    io::{atomic, checkpoint::Checkpoint, peft, toml_text},
    lora::Module,
    sample::Sample,
};
use weact_diagnostics::{
    interference::{FirstOrder, Gradient, Pair, dot, interference},
    teacher_forced::score,
};
use weact_train::{
    Error, Result, batch,
    config::{Context, Kind, Lora, Run, Train},
    dataset::{self, Tolerance},
    gradient::{Plan, batch_gradient},
    optim::Parameter,
    sft,
    trainable::{Trainable, flat, values_of},
};

pub use report::report;

/// A study's TOML file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Study {
    /// A Hugging Face folder.
    pub model: PathBuf,
    /// The shared adapter. Without it a fresh one is drawn: its `B` is zero, so that only `B` has a gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
    /// Trajectory files.
    pub data: Vec<PathBuf>,
    /// Whose stages, at least two.
    pub capabilities: Vec<Capability>,
    /// Mini-batches of each capability: half of them give the steps of the first-order check, the other half its losses.
    #[serde(default = "batches")]
    pub batches: usize,
    /// Samples of a mini-batch.
    #[serde(default = "batch_rows")]
    pub batch_rows: usize,
    /// Lengths of the steps, in units of the gradient.
    #[serde(default = "etas")]
    pub etas: Vec<f64>,
    /// Longest sample in tokens.
    #[serde(default = "max_length")]
    pub max_length: usize,
    /// Decides the fresh adapter, the mini-batches and the resamples.
    #[serde(default)]
    pub seed: u64,
    /// The study's directory.
    pub out: PathBuf,
    /// The fresh adapter's shape; not with `adapter`, which has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// What a stage sees of the history.
    #[serde(default)]
    pub context: Context,
}

fn batches() -> usize {
    8
}

fn batch_rows() -> usize {
    8
}

fn etas() -> Vec<f64> {
    vec![0.016, 0.008, 0.004]
}

fn max_length() -> usize {
    Train::default().max_length
}

impl Study {
    /// Reads a study's TOML file.
    ///
    /// # Errors
    /// [`Error::Config`], with the line and the nearest known key, if it can't be read or is not what it should be.
    pub fn read(path: &Path) -> Result<Self> {
        let bad = |why: String| Error::Config { path: path.to_owned(), why };
        let text = fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        let study: Self = toml_text::parse(&text).map_err(bad)?;
        study.check().map_err(bad)?;
        Ok(study)
    }

    /// Whether the keys' values fit each other.
    ///
    /// # Errors
    /// What is wrong, by its key.
    pub fn check(&self) -> std::result::Result<(), String> {
        let mut names = self.capabilities.clone();
        names.sort();
        names.dedup();
        let wrong = match () {
            () if names.len() != self.capabilities.len() => "capabilities has a name twice",
            () if names.len() < 2 => "capabilities must be at least two",
            () if self.batches < 2 => "batches must be at least 2: no mini-batch meets itself",
            () if !self.etas.iter().all(|eta| eta.is_finite() && *eta > 0.0) => {
                "etas must be positive: a step of no length changes no loss"
            }
            () if self.adapter.is_some() && self.lora.is_some() => {
                "[lora] is the shape of a fresh adapter, and adapter names one"
            }
            () if self.lora.as_ref().is_some_and(|lora| lora.continue_from.is_some()) => {
                "[lora] continue_from: name the adapter by the key adapter"
            }
            () => return self.as_run().check(),
        };
        Err(wrong.to_owned())
    }

    /// What the keys that a training has too would mean there.
    fn as_run(&self) -> Run {
        Run {
            kind: Kind::Lora,
            model: self.model.clone(),
            data: self.data.clone(),
            capability: self.capabilities.first().cloned(),
            capabilities: Vec::new(),
            out: self.out.clone(),
            lora: self.lora.clone().unwrap_or_default(),
            train: Train { batch_rows: self.batch_rows, max_length: self.max_length, seed: self.seed, ..Train::default() },
            context: self.context.clone(),
            valid: None,
        }
    }

    /// The resolved configuration as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a study serialises")
    }
}

/// What a study found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// Digest of the adapter at whose weights the gradients are; absent for a fresh one.
    pub adapter: Option<String>,
    /// Products and cosines, in all, by layer and by projection.
    pub pairs: Vec<Pair>,
    /// Eq. 3 for every ordered pair of capabilities and every step: the steps are made of the first half of the mini-batches, the losses are
    /// those of the second half, so that no mini-batch meets itself here either.
    pub first_order: Vec<FirstOrder>,
}

/// Computes a study. `observe` hears how many gradients and steps of how many are done; where `interrupted` says so between two, there is nothing.
///
/// # Errors
/// If a file is not what it should be, a capability has fewer samples than its mini-batches need, or a gradient is missing or not finite.
pub fn run(
    study: &Study,
    device: &Device,
    observe: &mut dyn FnMut(usize, usize),
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Found>> {
    study.check().map_err(|why| Error::Config { path: study.out.clone(), why })?;
    let chat = Chat::open(&study.model, study.context.tool_protocol)?;
    let checkpoint = Checkpoint::open(&study.model, false)?;
    let mut rules = study.as_run().rules();
    rules.max_length = rules.max_length.min(checkpoint.config.max_positions);
    let tolerance = Tolerance { max_lost: study.as_run().train.max_lost, allow_empty: false };
    let samples = dataset::load(&study.data, &chat, &study.capabilities, rules, tolerance)?.samples;
    let batches =
        study.capabilities.iter().map(|capability| mini_batches(study, capability, &samples)).collect::<Result<Vec<_>>>()?;
    let backbone = checkpoint.load(device, sft::dtype("f32")?)?;
    let (digest, trainable, parameters) = shared_adapter(study, &backbone, device)?;
    let point = WeightPoint::new(&backbone, &trainable, &parameters);

    let n = study.capabilities.len();
    let n_steps = n * study.batches + n * study.etas.len() + 1;
    let mut n_done = 0;
    let mut goes_on = |n_more: usize| {
        n_done += n_more;
        observe(n_done, n_steps);
        !interrupted()
    };
    let mut gradients: Vec<Vec<Gradient>> = Vec::new();
    for (capability, batches) in study.capabilities.iter().zip(&batches) {
        let mut own = Vec::new();
        for batch in batches {
            own.push(point.gradient(capability, batch)?);
            if !goes_on(1) {
                return Ok(None);
            }
        }
        gradients.push(own);
    }
    let pairs = interference(&point.modules, &gradients.concat(), study.seed).map_err(crate::retention::of_diagnostics)?;

    let half = study.batches / 2;
    let [steps, felt]: [Vec<Vec<Vec<f32>>>; 2] =
        [0..half, half..study.batches].map(|part| gradients.iter().map(|own| mean(&own[part.clone()])).collect());
    let losses = |values: &[Tensor<1>]| {
        batches.iter().map(|batches| point.mean_loss(values, &batches[half..])).collect::<Result<Vec<f64>>>()
    };
    let before = losses(&point.values)?;
    if !goes_on(1) {
        return Ok(None);
    }
    let mut first_order = Vec::new();
    for (k, step) in steps.iter().enumerate() {
        for eta in &study.etas {
            let after = losses(&point.moved(step, *eta, device))?;
            for (j, own) in felt.iter().enumerate() {
                let product: f64 = own.iter().zip(step).map(|(x, y)| dot(x, y)).sum();
                first_order.push(FirstOrder {
                    j: study.capabilities[j].clone(),
                    k: study.capabilities[k].clone(),
                    eta: *eta,
                    predicted_nats: -eta * product,
                    measured_nats: after[j] - before[j],
                });
            }
            if !goes_on(1) {
                return Ok(None);
            }
        }
    }
    Ok(Some(Found { adapter: digest, pairs, first_order }))
}

/// The file of what was found in a study's directory.
pub const FOUND: &str = "interference.json";

/// Writes configuration, numbers and report into the study's directory.
///
/// # Errors
/// If a file can't be written or a figure can't be drawn.
pub fn write(study: &Study, found: &Found) -> Result<()> {
    fs::create_dir_all(&study.out).map_err(|e| CoreError::io("can't make", &study.out, e))?;
    atomic::write_text(&study.out.join("config.toml"), &study.to_toml())?;
    let text = serde_json::to_string_pretty(found).expect("numbers and names") + "\n";
    atomic::write_text(&study.out.join(FOUND), &text)?;
    report(study, found).write(&study.out.join("report")).map_err(|e| Error::Other(e.to_string()))
}

/// The mini-batches of a capability, each whole, no sample in two.
fn mini_batches<'a>(study: &Study, capability: &Capability, samples: &'a [Sample]) -> Result<Vec<Vec<&'a Sample>>> {
    let own: Vec<&Sample> = samples.iter().filter(|sample| sample.capability == *capability).collect();
    let needed = study.batches * study.batch_rows;
    if own.len() < needed {
        let have = own.len();
        let why = format!("{} mini-batches of {} samples need {needed}", study.batches, study.batch_rows);
        return Err(Error::Other(format!("{capability} has {have} samples in data: {why}; give more data, or fewer of them")));
    }
    let lengths: Vec<usize> = own.iter().map(|sample| sample.ids.len()).collect();
    let whole =
        batch::epoch(&lengths, study.batch_rows, study.seed, 0).into_iter().filter(|batch| batch.len() == study.batch_rows);
    Ok(whole.take(study.batches).map(|batch| batch.into_iter().map(|i| own[i]).collect()).collect())
}

fn shared_adapter(study: &Study, backbone: &Backbone, device: &Device) -> Result<(Option<String>, Trainable, Vec<Parameter>)> {
    if let Some(dir) = &study.adapter {
        let adapter = peft::read(dir)?;
        adapter.check_fits(&backbone.config)?;
        let (trainable, parameters) = Trainable::from_adapter(&adapter, device);
        return Ok((Some(adapter.digest().to_owned()), trainable, parameters));
    }
    let lora = study.lora.clone().unwrap_or_default();
    let config = LoraConfig {
        rank: lora.rank,
        alpha: lora.alpha,
        rank_pattern: Default::default(),
        alpha_pattern: Default::default(),
        rslora: lora.rslora,
        targets: lora.targets.projections()?,
    };
    let (trainable, parameters) = Trainable::fresh_lora(config, &backbone.config, study.seed, device)?;
    Ok((None, trainable, parameters))
}

/// The weights at which gradients are taken.
struct WeightPoint<'a> {
    backbone: &'a Backbone,
    trainable: &'a Trainable,
    values: Vec<Tensor<1>>,
    modules: Vec<Module>, // of each value
}

impl<'a> WeightPoint<'a> {
    fn new(backbone: &'a Backbone, trainable: &'a Trainable, parameters: &[Parameter]) -> Self {
        let Trainable::Lora { modules, .. } = trainable else { panic!("a shared adapter is trained") };
        let modules = modules.iter().flat_map(|module| [*module; 2]).collect();
        Self { backbone, trainable, values: parameters.iter().map(|p| p.value.clone()).collect(), modules }
    }

    /// The gradient of a mini-batch's mean loss.
    fn gradient(&self, capability: &Capability, batch: &[&Sample]) -> Result<Gradient> {
        let plan = Plan { micro_rows: None, recompute: None };
        let result = batch_gradient(self.trainable, self.backbone, &self.values, batch, plan)?;
        let gradients = result.map(|result| result.gradients).unwrap_or_default();
        let known: Option<Vec<Vec<f32>>> = gradients.iter().map(|gradient| gradient.as_ref().map(values_of)).collect();
        match known {
            Some(parameters) if parameters.len() == self.values.len() => {
                Ok(Gradient { capability: capability.clone(), parameters })
            }
            _ => Err(Error::Other(format!("a parameter of the adapter gets no gradient from {capability}'s tokens"))),
        }
    }

    /// The mean over mini-batches of each one's mean negative log-likelihood per token, in nats: what the mean of their gradients is the gradient
    /// of. Summed in f64, because the differences of Eq. 3 are small beside it.
    fn mean_loss(&self, values: &[Tensor<1>], batches: &[Vec<&Sample>]) -> Result<f64> {
        let policy = self.trainable.policy(self.backbone, values);
        let mut sum = 0.0;
        for batch in batches {
            let scored = score(&policy.backbone, policy.factors.as_ref(), batch).map_err(crate::retention::of_diagnostics)?;
            let nll_nats: Vec<f64> = scored.into_iter().flat_map(|scored| scored.nll_nats).collect();
            sum += nll_nats.iter().sum::<f64>() / nll_nats.len() as f64;
        }
        Ok(sum / batches.len() as f64)
    }

    /// `w - eta g`
    fn moved(&self, step: &[Vec<f32>], eta: f64, device: &Device) -> Vec<Tensor<1>> {
        let moved = |(value, step): (&Tensor<1>, &Vec<f32>)| {
            let new = values_of(value).iter().zip(step).map(|(w, g)| (f64::from(*w) - eta * f64::from(*g)) as f32).collect();
            flat(new, device)
        };
        self.values.iter().zip(step).map(moved).collect()
    }
}

/// The mean of some gradients, by parameter.
fn mean(gradients: &[Gradient]) -> Vec<Vec<f32>> {
    let n = gradients.len() as f64;
    let of_parameter = |i: usize| {
        let numbers = 0..gradients[0].parameters[i].len();
        numbers.map(|x| (gradients.iter().map(|g| f64::from(g.parameters[i][x])).sum::<f64>() / n) as f32).collect()
    };
    (0..gradients[0].parameters.len()).map(of_parameter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mistake_is_named() {
        const MINIMAL: &str = "model = \"m\"\ndata = [\"d\"]\ncapabilities = [\"plan\", \"write\"]\nout = \"o\"\n";
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("study.toml");
        let parse = |extra: &str| {
            fs::write(&path, format!("{MINIMAL}{extra}")).expect("writable");
            Study::read(&path)
        };
        assert_eq!(parse("").expect("minimal").batches, 8);
        for (extra, part) in [
            ("batchs = 8\n", "did you mean `batches`?"),
            ("batches = 1\n", "no mini-batch meets itself"),
            ("batch_rows = 0\n", "batch_rows"),
            ("etas = [0.0]\n", "etas must be positive"),
            ("etas = [0.1, -0.1]\n", "etas must be positive"),
            ("adapter = \"a\"\n[lora]\nrank = 4\n", "adapter names one"),
            ("[lora]\nrank = 0\n", "rank must be at least 1"),
            ("[lora]\ncontinue_from = \"a\"\n", "by the key adapter"),
        ] {
            let error = parse(extra).expect_err(extra).to_string();
            assert!(error.contains(part), "{extra:?} gives {error:?} without {part:?}");
        }
    }
}
