//! One job on our side of the comparison with PyTorch, driven by `compare.py` over stdin and stdout. `torch_worker.py` is the
//! same in Python, and its usage says what the jobs and the lines are.

use std::{
    env, fs,
    io::{self, BufRead, Write},
    path::Path,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{DType, Device};
use serde_json::{Value, json};
use weact::{
    core::{
        Backbone, Capability,
        context::LeftOut,
        io::{checkpoint::Checkpoint, peft},
        model::KvCache,
        sample::Sample,
    },
    train::{
        gradient::{Plan, batch_gradient},
        optim::{self, AdamW, Parameter},
        trainable::Trainable,
    },
};

const PROMPT: usize = 64;
const USAGE: &str =
    "usage: versus JOB MODEL_DIR [ADAPTER_DIR], where JOB is lora-BxS, full-BxS, prefill-N, decode-N or decodebf16-N";

/// What one round takes and gives.
struct Round {
    s: f64,
    loss: Option<f64>,
    tokens: Option<Vec<u32>>,
}

/// One round of a job.
type Step = Box<dyn FnMut() -> Result<Round>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (job, model_dir) = match arguments.as_slice() {
        [job, model_dir] | [job, model_dir, _] => (job, Path::new(model_dir)),
        _ => bail!(USAGE),
    };
    let start_bytes = peak_bytes()?;
    let (kind, size) = job.split_once('-').context(USAGE)?;
    let dtype = if kind == "decodebf16" { DType::BF16 } else { DType::F32 };
    let backbone = Checkpoint::open(model_dir, false)?.load(&Device::flex(), dtype)?;
    let rows_and_length = || -> Result<(usize, usize)> {
        let (rows, length) = size.split_once('x').context(USAGE)?;
        Ok((rows.parse()?, length.parse()?))
    };
    let mut step = match kind {
        "lora" => {
            let adapter = peft::read(Path::new(arguments.get(2).context("a lora job needs ADAPTER_DIR")?))?;
            adapter.check_fits(&backbone.config)?;
            let trained = Trainable::from_adapter(&adapter, &backbone.device());
            training(backbone, trained, rows_and_length()?)?
        }
        "full" => {
            let trained = Trainable::full(&backbone);
            training(backbone, trained, rows_and_length()?)?
        }
        "prefill" => prefill(backbone, size.parse()?),
        "decode" | "decodebf16" => decode(backbone, size.parse()?),
        _ => bail!(USAGE),
    };
    let load_peak_bytes = peak_bytes()?;
    for line in io::stdin().lock().lines() {
        if line?.trim() == "end" {
            let versions = json!({"weact": env!("CARGO_PKG_VERSION")});
            let (start, load, peak) = (start_bytes, load_peak_bytes, peak_bytes()?);
            answer(&json!({"start_bytes": start, "load_peak_bytes": load, "peak_bytes": peak, "versions": versions}))?;
            break;
        }
        let Round { s, loss, tokens } = step()?;
        answer(&json!({"s": s, "loss": loss, "tokens": tokens}))?;
    }
    Ok(())
}

/// The same ids on both sides.
fn token_ids(backbone: &Backbone, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 7919 + 13) % backbone.config.vocab_size) as u32).collect()
}

/// Updates on one batch, every token supervised, with what `weact train` takes where its configuration is silent.
fn training(backbone: Backbone, trained: (Trainable, Vec<Parameter>), (n_rows, length): (usize, usize)) -> Result<Step> {
    let (trainable, mut parameters) = trained;
    let capability: Capability = "versus".parse()?;
    let sample = |ids: &[u32]| Sample {
        id: String::new(),
        capability: capability.clone(),
        ids: ids.to_vec(),
        mask: vec![true; ids.len()],
        left_out: LeftOut::default(),
        dropped_exchanges: 0,
    };
    let samples: Vec<Sample> = token_ids(&backbone, n_rows * length).chunks(length).map(sample).collect();
    let adam = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let plan = Plan { micro_rows: None, recompute: None };
    let mut n_updates = 0;
    Ok(Box::new(move || {
        let begun = Instant::now();
        let values: Vec<_> = parameters.iter().map(|p| p.value.clone()).collect();
        let batch: Vec<&Sample> = samples.iter().collect();
        let result = batch_gradient(&trainable, &backbone, &values, &batch, plan)?.context("no token is supervised")?;
        let gradients = result.gradients.into_iter().collect::<Option<Vec<_>>>().context("a parameter has no gradient")?;
        drop(values);
        let norm = optim::global_norm(&gradients);
        ensure!(norm.is_finite(), "the gradient is not finite");
        n_updates += 1;
        adam.update(&mut parameters, gradients, (optim::clip_scale(norm, 1.0), 1e-4), n_updates);
        Ok(Round { s: begun.elapsed().as_secs_f64(), loss: Some(result.loss), tokens: None })
    }))
}

/// The most likely next id once `cache` holds `ids` too.
fn last_token(backbone: &Backbone, ids: &[u32], cache: &mut KvCache) -> Result<u32> {
    let hidden = backbone.hidden(&backbone.tokens(&[ids])?, None, Some(cache)); // [n, hidden]
    let last = hidden.narrow(0, ids.len() - 1, 1);
    let best = backbone.logits(last, None).argmax(1); // [1, 1]
    Ok(u32::try_from(best.into_scalar::<i64>())?)
}

fn prefill(backbone: Backbone, n: usize) -> Step {
    let ids = token_ids(&backbone, n);
    Box::new(move || {
        let begun = Instant::now();
        let token = last_token(&backbone, &ids, &mut KvCache::new(&backbone.config, n))?;
        Ok(Round { s: begun.elapsed().as_secs_f64(), loss: None, tokens: Some(vec![token]) })
    })
}

/// Greedy decoding after a prompt, which is not timed.
fn decode(backbone: Backbone, n_steps: usize) -> Step {
    let prompt = token_ids(&backbone, PROMPT);
    Box::new(move || {
        let mut cache = KvCache::new(&backbone.config, PROMPT + n_steps);
        let mut token = last_token(&backbone, &prompt, &mut cache)?;
        let mut tokens = Vec::with_capacity(n_steps);
        let begun = Instant::now();
        for _ in 0..n_steps {
            token = last_token(&backbone, &[token], &mut cache)?;
            tokens.push(token);
        }
        Ok(Round { s: begun.elapsed().as_secs_f64(), loss: None, tokens: Some(tokens) })
    })
}

/// The largest resident memory of this process so far.
fn peak_bytes() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("memory is read from /proc/self/status, which Linux has")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("/proc/self/status has no VmHWM")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

fn answer(line: &Value) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
