//! PEFT adapters: `adapter_config.json` and `adapter_model.safetensors`, both ways. PEFT's `lora_A` is `[r, d_in]` and its
//! `lora_B` `[d_out, r]`; [`Factors`](crate::lora::Factors) hold their transposes. This is where they are turned.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{
    atomic,
    tensors::{self, Planned, Tensors},
};
use crate::{
    Error, Result,
    adapter::{self, Adapter, LoraConfig, PlainFactors},
    lora::{Module, Projection},
};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

/// Keys that must have one of these values: anything else changes the function and is not applied here.
fn neutral(key: &str, value: &Value) -> bool {
    let empty = value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty);
    match key {
        "peft_type" => value == "LORA",
        "bias" => value == "none",
        // pissa, olora, corda, loftq and lora_ga change the base weights when they begin.
        "init_lora_weights" => {
            value.is_null() || value.is_boolean() || ["gaussian", "orthogonal", "eva"].iter().any(|harmless| value == harmless)
        }
        // Known not to change the forward pass.
        "task_type"
        | "base_model_name_or_path"
        | "revision"
        | "inference_mode"
        | "lora_dropout"
        | "peft_version"
        | "auto_mapping"
        | "megatron_core"
        | "qalora_group_size"
        | "layers_pattern"
        | "runtime_config" => true,
        _ => value.is_null() || value == &Value::Bool(false) || empty,
    }
}

/// An adapter's files, their headers checked: factors are read when they are asked for.
#[derive(Debug)]
pub struct AdapterFile {
    /// Shapes and scales.
    pub config: LoraConfig,
    /// `base_model_name_or_path`: what the trainer called the base; informative only.
    pub base_name: Option<String>,
    dir: PathBuf,
    tensors: Tensors,
    names: BTreeMap<Module, [String; 2]>, // A's and B's
}

impl AdapterFile {
    /// Opens the adapter in `dir` and reads headers only.
    ///
    /// # Errors
    /// If a file is missing or broken; if the config asks for what is not applied here (dora, modules_to_save, lora_bias, ...), by
    /// name; if tensors are missing, unknown, or of another shape than the config's ranks make them, with counts and examples.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG);
        let text = fs::read_to_string(&path).map_err(|e| Error::io("can't read", &path, e))?;
        let (config, base_name) = parse_config(&path, &text)?;
        let tensors = Tensors::open(&dir.join(TENSORS))?;
        let names = parse_names(&dir.join(TENSORS), &config, &tensors)?;
        let found: Vec<Projection> = names.keys().map(|m| m.projection).collect();
        if let Some(absent) = config.targets.iter().find(|t| !found.contains(t)) {
            return Err(Error::file(&path, format!("target {absent} has no tensors in {TENSORS}")));
        }
        if let Some(module) = names.keys().find(|m| !config.targets.contains(&m.projection)) {
            return Err(Error::file(&path, format!("{TENSORS} holds {}, which is no target", module.path())));
        }
        let file = Self { config, base_name, dir: dir.to_owned(), tensors, names };
        for module in file.modules() {
            let (_, rank, _) = file.dims(module).expect("one of its modules");
            file.config.check_rank(module, rank).map_err(|e| Error::file(dir, e.to_string()))?;
        }
        Ok(file)
    }

    /// The adapted modules, in order.
    pub fn modules(&self) -> impl Iterator<Item = Module> {
        self.names.keys().copied()
    }

    /// `(d_in, r, d_out)` of a module; `None` where the adapter has no factors for it.
    pub fn dims(&self, module: Module) -> Option<(usize, usize, usize)> {
        let [a, b] = self.names.get(&module)?;
        let shape = |name: &String| &self.tensors.entries()[name].shape;
        Some((shape(a)[1], shape(a)[0], shape(b)[0]))
    }

    /// A module's factors; `None` where the adapter has none.
    ///
    /// # Errors
    /// If the element type is not read, or a number is not finite.
    pub fn factors(&self, module: Module) -> Result<Option<PlainFactors>> {
        let (Some([a, b]), Some((d_in, rank, d_out))) = (self.names.get(&module), self.dims(module)) else { return Ok(None) };
        let read = |name: &String| {
            let values = self.tensors.f32(name)?;
            match values.iter().all(|x| x.is_finite()) {
                true => Ok(values),
                false => Err(Error::file(&self.dir.join(TENSORS), format!("{name} holds a number that is not finite"))),
            }
        };
        let (a, b) = (transposed(&read(a)?, rank, d_in), transposed(&read(b)?, d_out, rank));
        Ok(Some(PlainFactors { a, b, d_in, rank, d_out }))
    }

    /// The whole adapter in memory.
    ///
    /// # Errors
    /// As [`AdapterFile::factors`].
    pub fn load(&self) -> Result<Adapter> {
        let factors = |module: Module| Ok((module, self.factors(module)?.expect("one of its modules")));
        let plain = self.modules().map(factors).collect::<Result<BTreeMap<_, _>>>()?;
        Adapter::new(self.config.clone(), plain).map_err(|e| Error::file(&self.dir, e.to_string()))
    }

    /// [`Adapter::digest`] of the adapter, one module in memory at a time.
    ///
    /// # Errors
    /// As [`AdapterFile::factors`].
    pub fn digest(&self) -> Result<String> {
        let mut digest = adapter::Identity::new(&self.config);
        for module in self.modules() {
            digest.add(module, &self.factors(module)?.expect("one of its modules"));
        }
        Ok(digest.finish())
    }
}

/// Reads the adapter in `dir`.
///
/// # Errors
/// As [`AdapterFile::open`] and [`AdapterFile::factors`].
pub fn read(dir: &Path) -> Result<Adapter> {
    AdapterFile::open(dir)?.load()
}

fn parse_config(path: &Path, text: &str) -> Result<(LoraConfig, Option<String>)> {
    let bad = |why: String| Error::file(path, why);
    let mut map: Map<String, Value> = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    let mut take = |key: &str| map.shift_remove(key).filter(|v| !v.is_null());
    let rank =
        take("r").and_then(|v| v.as_u64()).ok_or_else(|| bad("the key r (the rank) is missing or no number".to_owned()))?;
    let alpha = take("lora_alpha")
        .and_then(|v| v.as_f64())
        .ok_or_else(|| bad("the key lora_alpha is missing or no number".to_owned()))?;
    let parse = |key: &str, value: Option<Value>| match value {
        None => Ok(Map::new()),
        Some(Value::Object(map)) => Ok(map),
        Some(other) => Err(bad(format!("{key} must be an object, not {other}"))),
    };
    let ranks = parse("rank_pattern", take("rank_pattern"))?;
    let alphas = parse("alpha_pattern", take("alpha_pattern"))?;
    let number = |key: &str, v: &Value| v.as_f64().ok_or_else(|| bad(format!("{key} must be a number, not {v}")));
    if let Some(key) =
        ranks.keys().chain(alphas.keys()).find(|k| k.chars().any(|c| !(c.is_alphanumeric() || c == '_' || c == '.')))
    {
        return Err(bad(format!("the pattern {key:?} is a regular expression; whole paths and their ends are matched here")));
    }
    let whole =
        |key: &str, v: &Value| v.as_u64().ok_or_else(|| bad(format!("the rank of {key} must be a whole number, not {v}")));
    let rank_pattern = ranks.iter().map(|(k, v)| Ok((k.clone(), whole(k, v)? as usize))).collect::<Result<_>>()?;
    let alpha_pattern = alphas.iter().map(|(k, v)| Ok((k.clone(), number(k, v)?))).collect::<Result<_>>()?;
    let rslora = match take("use_rslora") {
        None => false,
        Some(Value::Bool(rslora)) => rslora,
        Some(other) => return Err(bad(format!("use_rslora must be true or false, not {other}"))),
    };
    let targets = match take("target_modules") {
        Some(Value::Array(names)) => {
            let parse = |v: &Value| {
                v.as_str().map_or_else(
                    || Err(bad(format!("target {v} is no name"))),
                    |s| last_part(s).parse().map_err(|e: Error| bad(e.to_string())),
                )
            };
            names.iter().map(parse).collect::<Result<Vec<Projection>>>()?
        }
        Some(Value::String(name)) if name == "all-linear" => Projection::BLOCK.to_vec(),
        other => return Err(bad(format!("target_modules must be a list of names, not {}", other.unwrap_or(Value::Null)))),
    };
    let base_name = map.get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned);
    if let Some((key, value)) = map.iter().find(|(k, v)| !neutral(k, v)) {
        return Err(bad(format!("{key} = {value} changes what the adapter computes and is not supported")));
    }
    let mut targets = targets;
    targets.sort();
    targets.dedup();
    Ok((LoraConfig { rank: rank as usize, alpha, rank_pattern, alpha_pattern, rslora, targets }, base_name))
}

fn last_part(path: &str) -> &str {
    path.rsplit('.').next().expect("a split has a part")
}

/// `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` -> the module and whether it is A.
fn parse_name(name: &str) -> Option<(Module, bool)> {
    let rest = name.strip_prefix(PREFIX)?;
    let (path, is_a) = match (rest.strip_suffix(".lora_A.weight"), rest.strip_suffix(".lora_B.weight")) {
        (Some(path), _) => (path, true),
        (_, Some(path)) => (path, false),
        _ => return None,
    };
    let projection: Projection = last_part(path).parse().ok()?;
    let layer = path.strip_prefix("model.layers.").and_then(|p| p.split('.').next()).and_then(|n| n.parse().ok());
    if layer.is_none() && projection != Projection::LmHead {
        return None;
    }
    let module = Module { layer, projection };
    (module.path() == path).then_some((module, is_a))
}

/// The names of each module's factors, their shapes checked.
fn parse_names(path: &Path, config: &LoraConfig, tensors: &Tensors) -> Result<BTreeMap<Module, [String; 2]>> {
    let mut halves: BTreeMap<Module, [Option<&str>; 2]> = BTreeMap::new();
    let mut unknown = Vec::new();
    for name in tensors.entries().keys() {
        match parse_name(name) {
            None => unknown.push(name.clone()),
            Some((module, is_a)) => halves.entry(module).or_default()[usize::from(!is_a)] = Some(name),
        }
    }
    complain(path, "are no LoRA factors of a known module (another prefix or a foreign tensor)", &unknown)?;
    let lone: Vec<String> = halves
        .iter()
        .filter(|(_, h)| h.iter().any(Option::is_none))
        .map(|(m, h)| format!("{}.lora_{}", m.path(), if h[0].is_none() { "A" } else { "B" }))
        .collect();
    complain(path, "are missing", &lone)?;
    let mut names = BTreeMap::new();
    let mut misshapen = Vec::new();
    for (module, half) in halves {
        let [a, b] = half.map(|h| h.expect("both halves are there").to_owned());
        let (a_shape, b_shape) = (&tensors.entries()[&a].shape, &tensors.entries()[&b].shape);
        let rank = config.rank_of(module);
        match (&a_shape[..], &b_shape[..]) {
            ([ra, _], [_, rb]) if (*ra, *rb) == (rank, rank) => {}
            ([_, _], [_, _]) => {
                misshapen.push(format!("{} A {a_shape:?} B {b_shape:?} (rank {rank} by the config)", module.path()))
            }
            ([_, _], _) => misshapen.push(format!("{b} {b_shape:?}")),
            _ => misshapen.push(format!("{a} {a_shape:?}")),
        }
        names.insert(module, [a, b]);
    }
    complain(path, "have another shape than the config makes them", &misshapen)?;
    if names.is_empty() {
        return Err(Error::file(path, "holds no LoRA factors: nothing would be applied"));
    }
    Ok(names)
}

fn complain(path: &Path, what: &str, names: &[String]) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let examples = names.iter().take(2).cloned().collect::<Vec<_>>().join(", ");
    Err(Error::file(path, format!("{} tensors {what}, as {examples}", names.len())))
}

/// The transpose of a row-major `[rows, columns]` matrix.
pub(super) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}

/// Writes `adapter` into the existing folder `dir` as PEFT 0.21 reads it. `base` goes into `base_model_name_or_path`.
///
/// # Errors
/// If a file can't be written.
pub fn write(dir: &Path, adapter: &Adapter, base: &str) -> Result<()> {
    let shapes = adapter.plain().iter().map(|(module, f)| (*module, (f.d_in, f.rank, f.d_out))).collect();
    write_module_by_module(dir, adapter.config(), &shapes, base, |module| Ok(Cow::Borrowed(&adapter.plain()[&module])))
}

/// As [`write()`], for an adapter that is not in memory as a whole: `factors` makes each module's when its turn comes, in the order
/// of [`in_file_order`]. `shapes` are `(d_in, r, d_out)`.
///
/// # Errors
/// If a file can't be written; the error of `factors` is passed on, and no tensor file is left then.
///
/// # Panics
/// If `factors` gives another shape than `shapes` says.
pub fn write_module_by_module<'a, E: From<Error>>(
    dir: &Path,
    config: &LoraConfig,
    shapes: &BTreeMap<Module, (usize, usize, usize)>,
    base: &str,
    mut factors: impl FnMut(Module) -> std::result::Result<Cow<'a, PlainFactors>, E>,
) -> std::result::Result<(), E> {
    let order = in_file_order(shapes.keys().copied());
    let planned = |module: &Module| {
        let (d_in, rank, d_out) = shapes[module];
        let half = |half: &str, shape: [usize; 2]| Planned {
            name: format!("{PREFIX}{}.lora_{half}.weight", module.path()),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
        };
        [half("A", [rank, d_in]), half("B", [d_out, rank])]
    };
    let plan: Vec<Planned> = order.iter().flat_map(planned).collect();
    let mut modules = order.iter();
    let mut b_of_last = None; // a module's A and B follow each other
    tensors::write_one_by_one(&dir.join(TENSORS), &plan, |tensor| -> std::result::Result<_, E> {
        if let Some(b) = b_of_last.take() {
            return Ok(Cow::Owned(b));
        }
        let module = *modules.next().expect("two tensors a module");
        let f = factors(module)?;
        assert_eq!((f.d_in, f.rank, f.d_out), shapes[&module], "{} has the planned shape", tensor.name);
        b_of_last = Some(bytes(&transposed(&f.b, f.rank, f.d_out)));
        Ok(Cow::Owned(bytes(&transposed(&f.a, f.d_in, f.rank))))
    })?;
    Ok(atomic::write_text(&dir.join(CONFIG), &format!("{:#}\n", config_value(config, base)))?)
}

/// Modules in the order in which an adapter file has them: that of their tensors' names.
pub fn in_file_order(modules: impl IntoIterator<Item = Module>) -> Vec<Module> {
    let mut order: Vec<Module> = modules.into_iter().collect();
    order.sort_by_cached_key(|module| module.path());
    order
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// `adapter_config.json`.
fn config_value(c: &LoraConfig, base: &str) -> Value {
    let plain_alpha = |alpha: f64| if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) };
    let alphas: Map<String, Value> = c.alpha_pattern.iter().map(|(k, v)| (k.clone(), plain_alpha(*v))).collect();
    json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true, "lora_dropout": 0.0, "modules_to_save": null, "use_dora": false,
        "lora_bias": false, "r": c.rank, "lora_alpha": plain_alpha(c.alpha), "rank_pattern": c.rank_pattern, "alpha_pattern": alphas,
        "use_rslora": c.rslora, "target_modules": c.targets.iter().map(|p| p.name()).collect::<Vec<_>>(),
    })
}
