//! Whether a device computes what the reference and the CPU compute, how fast it is, and what memory it takes: in five minutes,
//! without a network.
//!
//! ```text
//! cargo run --release --example device_check -- --device cpu --small
//! ```
//!
//! One JSON object per part on stdout, a readable line of each on stderr. Exits with status 1 if a part finds a mismatch, fails or
//! was not reached in time.
#![allow(clippy::print_stderr)]

#[path = "../benches/fresh_lora/mod.rs"]
mod fresh_lora;
#[path = "../benches/random_model/mod.rs"]
mod random_model;
#[path = "../benches/update/mod.rs"]
mod update;

use std::{
    any::Any,
    collections::BTreeMap,
    fs,
    io::{self, Write},
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    process::{self, Command, ExitCode},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::{DType, Device, Tensor, TensorData};
use clap::Parser;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use weact::core::{
    Backbone,
    io::{checkpoint::Checkpoint, peft},
    lora::FactorMap,
    model::{Config, KvCache},
    nll::{self, Targets},
    ops::SelfCheck,
};

use fresh_lora::fresh_lora;
use random_model::{qwen3, random_model};
use update::{Training, token_ids};

/// What transformers and PEFT computed on a CPU in f32, and `weact-core/tests/golden_model.rs` compares with.
const CASES: [&str; 6] = ["qwen3-sharded-bf16", "qwen3-tied", "qwen3-yarn", "qwen2-bias", "llama", "llama3-rope"];
/// Largest difference of a logit, and of the loss in nats: logits are of size 1, f32 sums of a few hundred terms are good to 1e-5.
const LOGITS: f64 = 1e-4;
/// Largest difference of a factor's gradient as a part of the gradient, both as Euclidean norms.
const GRADIENTS: f64 = 1e-3;

/// Checks a device against stored values and the CPU, and measures it
#[derive(Debug, Parser)]
struct Args {
    /// cpu, cuda or cuda:N
    #[arg(long)]
    device: String,
    /// The folder with the golden checkpoints
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/weact-core/tests/golden"))]
    golden: PathBuf,
    /// All parts together; what is not done by then has failed
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// Weights of the random model: f32 or bf16
    #[arg(long, default_value = "bf16", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// A small random model instead of one of Qwen3-0.6B's shape
    #[arg(long)]
    small: bool,
}

/// The random model and how much it is given to do.
struct Size {
    config: Config,
    n_train: usize,
    n_prefill: usize,
    n_decode: usize,
    /// What a measurement may take; each has one round at least.
    measure_s: f64,
}

/// What a part found. It passed where nothing is wrong.
struct Outcome {
    text: String,
    numbers: Value,
    wrong: Vec<String>,
}

/// The parts that are still to come, and how many of the others passed or did not.
struct Report {
    pending: Vec<String>,
    n_passed: usize,
    n_wrong: usize,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let deadline = Instant::now() + Duration::from_secs(args.seconds);
    let device = open(&args.device)?;
    let dtype = if args.dtype == "bf16" { DType::BF16 } else { DType::F32 };
    let measure_s = args.seconds as f64 / 15.0;
    let size = if args.small {
        Size { config: qwen3((4, 256, 768), (8, 4, 32), 4096), n_train: 256, n_prefill: 256, n_decode: 16, measure_s }
    } else {
        Size { config: qwen3((28, 1024, 3072), (16, 8, 128), 151_936), n_train: 1024, n_prefill: 1024, n_decode: 64, measure_s }
    };

    let names = ["device".to_owned()].into_iter().chain(CASES.map(|case| format!("parity {case}")));
    let names =
        names.chain(["operators", "model", "training", "training, nothing recomputed", "prefill", "decode"].map(str::to_owned));
    let report = Arc::new(Mutex::new(Report { pending: names.collect(), n_passed: 0, n_wrong: 0 }));
    end_in_time(deadline, report.clone());

    part(&report, || about(&args.device, &device));
    for case in CASES {
        part(&report, || parity(&args.golden.join(case), &device));
    }
    part(&report, || operators(&device));
    let mut model = None;
    part(&report, || {
        let (drawn, outcome) = draw(&args.device, &size, dtype, &device)?;
        model = Some(drawn);
        Ok(outcome)
    });
    let model = || model.as_ref().context("there is no model");
    part(&report, || training(model()?, &args.device, &size, None));
    part(&report, || training(model()?, &args.device, &size, Some(false)));
    let mut cache = None;
    part(&report, || prefill(model()?, &size, &mut cache));
    part(&report, || decode(model()?, &args.device, &size, cache.as_mut().context("there is no prefilled cache")?));

    let report = report.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(report.pending.is_empty(), "every part is announced and done");
    eprintln!("{}: {} parts passed, {} did not", args.device, report.n_passed, report.n_wrong);
    Ok(ExitCode::from(u8::from(report.n_wrong > 0)))
}

/// The device of this name, asked for in a way that gives an error where there is none, and not Burn's panic.
fn open(name: &str) -> Result<Device> {
    if name == "cpu" {
        return Ok(Device::flex());
    }
    let index = match name.split_once(':') {
        None if name == "cuda" => 0,
        Some(("cuda", index)) => index.parse().with_context(|| format!("--device {name}: use cpu, cuda or cuda:N"))?,
        _ => bail!("--device {name}: use cpu, cuda or cuda:N"),
    };
    cuda(index)
}

#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<Device> {
    let mut devices = Device::enumerate(burn::tensor::DeviceType::Cuda).into_vec();
    ensure!(index < devices.len(), "--device cuda:{index}: this machine shows {} CUDA devices", devices.len());
    Ok(devices.swap_remove(index))
}

#[cfg(not(feature = "cuda"))]
fn cuda(index: usize) -> Result<Device> {
    bail!("--device cuda:{index}: CUDA is not built in; build with --features cuda")
}

/// Ends the process at `deadline` even where the device hangs: the parts that are not done are said to be so.
fn end_in_time(deadline: Instant, report: Arc<Mutex<Report>>) {
    thread::spawn(move || {
        thread::sleep(deadline.saturating_duration_since(Instant::now()));
        let report = report.lock().unwrap_or_else(PoisonError::into_inner);
        for name in &report.pending {
            say(name, "not run", 0.0, &Outcome { text: "out of time".to_owned(), numbers: json!({}), wrong: Vec::new() });
        }
        eprintln!("out of time: {} parts passed, {} did not", report.n_passed, report.n_wrong + report.pending.len());
        process::exit(1);
    });
}

/// Runs the next part. A failure or a panic of one part leaves the others to run.
fn part(report: &Mutex<Report>, run: impl FnOnce() -> Result<Outcome>) {
    let begun = Instant::now();
    let result =
        panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(anyhow!("panicked: {}", message(&*panic))));
    let outcome =
        result.unwrap_or_else(|error| Outcome { text: String::new(), numbers: json!({}), wrong: vec![format!("{error:#}")] });
    let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
    let name = report.pending.remove(0);
    let passed = outcome.wrong.is_empty();
    say(&name, if passed { "passed" } else { "failed" }, begun.elapsed().as_secs_f64(), &outcome);
    *if passed { &mut report.n_passed } else { &mut report.n_wrong } += 1;
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("without a message").to_owned()
}

fn say(name: &str, state: &str, s: f64, outcome: &Outcome) {
    let mut line = json!({"part": name, "state": state, "s": s, "wrong": outcome.wrong});
    if let (Value::Object(line), Value::Object(numbers)) = (&mut line, outcome.numbers.clone()) {
        line.extend(numbers);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("stdout takes the report");
    let texts = [outcome.text.as_str()].into_iter().chain(outcome.wrong.iter().map(String::as_str));
    eprintln!("{name:<28} {state:<7} {s:>6.1} s  {}", texts.filter(|t| !t.is_empty()).collect::<Vec<_>>().join("; "));
}

/// Which device it is, and whether its products of f32 matrices keep f32's 24 bits or are rounded to TF32's 11.
fn about(name: &str, device: &Device) -> Result<Outcome> {
    const N: usize = 256;
    let exact = 1.0 + 2.0_f32.powi(-12);
    let x = Tensor::<2>::full([N, N], exact, device);
    let product = values(x.matmul(Tensor::eye(N, device)))?;
    let tf32 = product.iter().any(|y| *y != exact);
    let text = format!("{name}, f32 products {}", if tf32 { "rounded to TF32: expect differences of 1e-3" } else { "in f32" });
    let seen = (name != "cpu").then(|| nvidia_smi(name, "name,driver_version,memory.total")).flatten();
    let numbers = json!({"device": name, "tf32": tf32, "nvidia_smi": seen, "version": env!("CARGO_PKG_VERSION")});
    Ok(Outcome { text, numbers, wrong: Vec::new() })
}

/// What is compared of one golden case.
struct Computed {
    logits: [Vec<f32>; 2], // without and with the adapter
    greedy: [Vec<i64>; 2],
    loss: f32,
    gradients: BTreeMap<String, Vec<f32>>, // in PEFT's orientation
}

/// The golden values of one case as they are stored.
struct Golden(Vec<u8>);

impl Golden {
    fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("golden.safetensors");
        fs::read(&path).map(Self).with_context(|| format!("{}: no golden values", path.display()))
    }

    fn numbers<const N: usize, T>(&self, name: &str, from: impl Fn([u8; N]) -> T) -> Result<(Vec<usize>, Vec<T>)> {
        let tensors = SafeTensors::deserialize(&self.0)?;
        let view = tensors.tensor(name).with_context(|| format!("golden value {name}"))?;
        let (numbers, rest) = view.data().as_chunks::<N>();
        ensure!(rest.is_empty() && numbers.len() == view.shape().iter().product::<usize>(), "{name} has another element type");
        Ok((view.shape().to_vec(), numbers.iter().map(|bytes| from(*bytes)).collect()))
    }

    fn f32(&self, name: &str) -> Result<Vec<f32>> {
        Ok(self.numbers(name, f32::from_le_bytes)?.1)
    }

    fn rows(&self, name: &str) -> Result<Vec<Vec<i64>>> {
        let (shape, ids) = self.numbers(name, i64::from_le_bytes)?;
        Ok(ids.chunks(shape[1]).map(<[i64]>::to_vec).collect())
    }

    fn computed(&self, factors: &FactorMap) -> Result<Computed> {
        let names = factors.keys().flat_map(|module| [gradient_name(&module.path(), 'A'), gradient_name(&module.path(), 'B')]);
        Ok(Computed {
            logits: [self.f32("logits.base")?, self.f32("logits.adapter")?],
            greedy: [self.rows("greedy.base")?.concat(), self.rows("greedy.adapter")?.concat()],
            loss: self.f32("loss.adapter")?[0],
            gradients: names.map(|name| Ok((name.clone(), self.f32(&name)?))).collect::<Result<_>>()?,
        })
    }
}

fn gradient_name(path: &str, half: char) -> String {
    format!("grad.{path}.lora_{half}.weight")
}

/// One case on the device, in f32, against the stored values and against the CPU.
fn parity(dir: &Path, device: &Device) -> Result<Outcome> {
    let golden = Golden::open(dir)?;
    let (computed, factors) = compute(dir, &golden, device)?;
    let mut outcome = Outcome { text: String::new(), numbers: json!({}), wrong: Vec::new() };
    compare("stored", &computed, &golden.computed(&factors)?, &mut outcome)?;
    if *device != Device::flex() {
        compare("cpu", &computed, &compute(dir, &golden, &Device::flex())?.0, &mut outcome)?;
    }
    Ok(outcome)
}

fn compute(dir: &Path, golden: &Golden, device: &Device) -> Result<(Computed, FactorMap)> {
    let backbone = Checkpoint::open(dir, false)?.load(device, DType::F32)?;
    let adapter = peft::read(&dir.join("adapter"))?;
    let factors = adapter.to_device(&backbone.config, device)?;
    let rows: Vec<Vec<u32>> = golden.rows("input_ids")?.iter().map(|row| row.iter().map(|id| *id as u32).collect()).collect();
    let ids: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
    let tokens = backbone.tokens(&ids)?;

    let logits = |factors: Option<&FactorMap>| values(backbone.logits(backbone.hidden(&tokens, factors, None), factors));
    let greedy = |name: &str, factors: Option<&FactorMap>| continuation(&backbone, factors, &golden.rows(name)?.concat());

    let tracked = device.clone().autodiff();
    let leaf = |values: &[f32], shape: [usize; 2]| {
        Tensor::<2>::from_data(TensorData::new(values.to_vec(), shape), &tracked).require_grad()
    };
    let mut leaves = factors.clone();
    for (module, f) in &mut leaves {
        let plain = &adapter.plain()[module];
        (f.a, f.b) = (leaf(&plain.a, [plain.d_in, plain.rank]), leaf(&plain.b, [plain.rank, plain.d_out]));
    }
    let masks: Vec<Vec<bool>> = golden.rows("labels")?.iter().map(|row| row.iter().map(|l| *l != -100).collect()).collect();
    let masked: Vec<(&[u32], &[bool])> = ids.iter().copied().zip(masks.iter().map(Vec::as_slice)).collect();
    let targets = Targets::new(&masked, device).context("no token is supervised")?;
    let hidden = backbone.hidden(&tokens, Some(&leaves), None);
    let loss = nll::masked_sum(&backbone, Some(&leaves), hidden, &targets) / targets.len() as f64;
    let gradients = loss.backward();
    let mut by_name = BTreeMap::new();
    for (module, f) in &leaves {
        for (half, leaf) in [('A', &f.a), ('B', &f.b)] {
            let name = gradient_name(&module.path(), half);
            let gradient = leaf.grad(&gradients).with_context(|| format!("{name}: no gradient"))?;
            by_name.insert(name, values(gradient.transpose())?);
        }
    }
    let computed = Computed {
        logits: [logits(None)?, logits(Some(&factors))?],
        greedy: [greedy("greedy.base", None)?, greedy("greedy.adapter", Some(&factors))?],
        loss: values(loss.inner())?[0],
        gradients: by_name,
    };
    Ok((computed, factors))
}

/// The first twelve ids of `expected` and their greedy continuation to the same length, with a cache fed token by token.
fn continuation(backbone: &Backbone, factors: Option<&FactorMap>, expected: &[i64]) -> Result<Vec<i64>> {
    let mut ids: Vec<i64> = expected[..12].to_vec();
    let mut cache = KvCache::new(&backbone.config, 4);
    let mut new: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
    while ids.len() < expected.len() {
        let next = next_token(backbone, factors, &new, &mut cache)?;
        ids.push(i64::from(next));
        new = vec![next];
    }
    Ok(ids)
}

/// The most likely next id once `cache` holds `ids` too.
fn next_token(backbone: &Backbone, factors: Option<&FactorMap>, ids: &[u32], cache: &mut KvCache) -> Result<u32> {
    let hidden = backbone.hidden(&backbone.tokens(&[ids])?, factors, Some(cache)); // [n, hidden]
    let last = backbone.logits(hidden.narrow(0, ids.len() - 1, 1), factors); // [1, vocab]
    Ok(u32::try_from(last.argmax(1).try_into_scalar::<i64>()?)?)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>> {
    Ok(tensor.try_into_data()?.try_to_vec::<f32>()?)
}

/// Adds to `outcome` how far `computed` is from `expected`, whose values `from` names.
fn compare(from: &str, computed: &Computed, expected: &Computed, outcome: &mut Outcome) -> Result<()> {
    let [base, adapter] = [0, 1].map(|i| largest_difference(&computed.logits[i], &expected.logits[i]));
    let loss = largest_difference(&[computed.loss], &[expected.loss])?;
    let (base, adapter) = (base?, adapter?);
    let mut worst = (0.0, "none");
    for (name, reference) in &expected.gradients {
        let gradient = computed.gradients.get(name).with_context(|| format!("{name}: no gradient"))?;
        let difference = relative_difference(gradient, reference)?;
        if difference >= worst.0 {
            worst = (difference, name);
        }
    }
    let limits = [("logits", base, LOGITS), ("logits under the adapter", adapter, LOGITS), ("loss", loss, LOGITS)];
    for (what, difference, limit) in limits.into_iter().chain([(worst.1, worst.0, GRADIENTS)]) {
        if difference > limit {
            outcome.wrong.push(format!("{what} differ by {difference:.1e} from {from} values, more than {limit:.0e}"));
        }
    }
    for (what, i) in [("greedy ids", 0), ("greedy ids under the adapter", 1)] {
        if computed.greedy[i] != expected.greedy[i] {
            outcome.wrong.push(format!("{what} differ from {from} values"));
        }
    }
    let text = format!("{from}: logits within {:.1e}, gradients within {:.1e}", base.max(adapter), worst.0);
    outcome.text = [outcome.text.as_str(), &text].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join("; ");
    outcome.numbers[from] = json!({
        "logits_base": base,
        "logits_adapter": adapter,
        "loss": loss,
        "gradient_relative": worst.0,
        "worst_gradient": worst.1,
    });
    Ok(())
}

/// Infinite where a number is not one.
fn largest_difference(a: &[f32], b: &[f32]) -> Result<f64> {
    ensure!(a.len() == b.len(), "{} values where {} are expected", a.len(), b.len());
    let differences = a.iter().zip(b).map(|(x, y)| f64::from((x - y).abs()));
    Ok(differences.map(|d| if d.is_nan() { f64::INFINITY } else { d }).fold(0.0, f64::max))
}

/// `|a - b| / |b|`, infinite where a number is not one.
fn relative_difference(a: &[f32], b: &[f32]) -> Result<f64> {
    ensure!(a.len() == b.len(), "{} values where {} are expected", a.len(), b.len());
    let norm = |square: &mut dyn Iterator<Item = f32>| square.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let relative = norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied()).max(1e-12);
    Ok(if relative.is_nan() { f64::INFINITY } else { relative })
}

/// The bodies of the operators that models use on the device, against the composed bodies on the CPU.
fn operators(device: &Device) -> Result<Outcome> {
    let mut outcome = Outcome { text: format!("{} operators", SelfCheck::ALL.len()), numbers: json!({}), wrong: Vec::new() };
    for check in SelfCheck::ALL {
        let agreement = check.run(device, &|result| result);
        outcome.numbers[check.operator] = agreement.to_string().into();
        if !agreement.holds() {
            outcome.wrong.push(format!("{}: {agreement}", check.operator));
        }
    }
    Ok(outcome)
}

/// Draws the random model.
fn draw(name: &str, size: &Size, dtype: DType, device: &Device) -> Result<(Backbone, Outcome)> {
    let model = random_model(size.config.clone(), dtype, device);
    device.sync().context("the device failed")?;
    let n_parameters = size.config.n_parameters();
    let text = format!("{:.1} million parameters in {}", n_parameters as f64 / 1e6, dtype.name());
    let numbers = json!({"parameters": n_parameters, "dtype": dtype.name(), "memory": memory(name, device)});
    Ok((model, Outcome { text, numbers, wrong: Vec::new() }))
}

/// Updates of an adapter of rank 16 on seven projections, on one sample.
fn training(model: &Backbone, name: &str, size: &Size, recompute: Option<bool>) -> Result<Outcome> {
    let mut training = Training::new(model, fresh_lora(model, 0)?, (1, size.n_train), recompute)?;
    let mut losses = Vec::new();
    let (warm_up_s, s) = rounds(5, size.measure_s, || {
        losses.push(training.update(model)?);
        Ok(())
    })?;
    let (median_s, rate) = (median(&s), size.n_train as f64 / median(&s));
    let text =
        format!("{median_s:.3} s a step of 1 x {}, {rate:.0} tokens/s, loss {:.4}", size.n_train, losses[losses.len() - 1]);
    let numbers = json!({
        "tokens": size.n_train,
        "median_s": median_s,
        "tokens_per_s": rate,
        "rounds_s": s,
        "warm_up_s": warm_up_s,
        "losses": losses,
        "memory": memory(name, &model.device()),
    });
    Ok(Outcome { text, numbers, wrong: Vec::new() })
}

/// A prompt into an empty cache, without an adapter. Leaves the cache in `filled`.
fn prefill(model: &Backbone, size: &Size, filled: &mut Option<KvCache>) -> Result<Outcome> {
    let ids = token_ids(model, size.n_prefill);
    let (warm_up_s, s) = rounds(3, size.measure_s, || {
        let mut cache = KvCache::new(&model.config, size.n_prefill + size.n_decode);
        next_token(model, None, &ids, &mut cache)?;
        *filled = Some(cache);
        Ok(())
    })?;
    Ok(rate("prefilled", size.n_prefill, warm_up_s, &s))
}

/// Greedy decoding after the prompt in `cache`, without an adapter.
fn decode(model: &Backbone, name: &str, size: &Size, cache: &mut KvCache) -> Result<Outcome> {
    let (warm_up_s, s) = rounds(3, size.measure_s, || {
        cache.truncate(size.n_prefill);
        let mut token = 13;
        for _ in 0..size.n_decode {
            token = next_token(model, None, &[token], cache)?;
        }
        Ok(())
    })?;
    let mut outcome = rate("decoded", size.n_decode, warm_up_s, &s);
    let hidden = model.hidden(&model.tokens(&[&[13]])?, None, Some(cache));
    if !values(model.logits(hidden, None))?.iter().all(|x| x.is_finite()) {
        outcome.wrong.push("logits are not finite".to_owned());
    }
    outcome.numbers["memory"] = memory(name, &model.device());
    Ok(outcome)
}

fn rate(what: &str, n_tokens: usize, warm_up_s: f64, s: &[f64]) -> Outcome {
    let (median_s, rate) = (median(s), n_tokens as f64 / median(s));
    let text = format!("{n_tokens} tokens {what} in {median_s:.3} s, {rate:.0} tokens/s");
    let numbers = json!({"tokens": n_tokens, "median_s": median_s, "tokens_per_s": rate, "rounds_s": s, "warm_up_s": warm_up_s});
    Outcome { text, numbers, wrong: Vec::new() }
}

/// The seconds of a first round, in which kernels are compiled, and of up to `n` more, at least one, within `measure_s`.
fn rounds(n: usize, measure_s: f64, mut round: impl FnMut() -> Result<()>) -> Result<(f64, Vec<f64>)> {
    let mut timed = || -> Result<f64> {
        let begun = Instant::now();
        round()?;
        Ok(begun.elapsed().as_secs_f64())
    };
    let warm_up_s = timed()?;
    let mut s = vec![timed()?];
    while s.len() < n && s.iter().sum::<f64>() < measure_s {
        s.push(timed()?);
    }
    Ok((warm_up_s, s))
}

/// The middle one; of an even number, the greater of the two.
fn median(s: &[f64]) -> f64 {
    let mut sorted = s.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Bytes in use now on the device, by its allocator and by the driver's count for all processes, and this process's most on the
/// host; null where nobody tells.
fn memory(name: &str, device: &Device) -> Value {
    let pool = device.memory_pool_usage();
    let driver_mib = (name != "cpu").then(|| nvidia_smi(name, "memory.used")).flatten();
    let driver = driver_mib.and_then(|mib| mib.parse::<u64>().ok()).map(|mib| mib << 20);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    json!({
        "pool_in_use_bytes": pool.as_ref().map(|p| p.bytes_in_use),
        "pool_reserved_bytes": pool.as_ref().map(|p| p.bytes_reserved),
        "driver_bytes": driver,
        "host_peak_bytes": peak.map(|kib| kib << 10),
    })
}

/// What `nvidia-smi` says of a CUDA device, where it is there.
fn nvidia_smi(name: &str, query: &str) -> Option<String> {
    let index = name.split_once(':').map_or("0", |(_, index)| index);
    let output = Command::new("nvidia-smi")
        .args(["-i", index, &format!("--query-gpu={query}"), "--format=csv,noheader,nounits"])
        .output()
        .ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
