//! PEFT adapters: `adapter_config.json` and `adapter_model.safetensors`, both ways. PEFT's `lora_A` is `[r, d_in]` and its
//! `lora_B` `[d_out, r]`; [`Factors`](crate::lora::Factors) hold their transposes. This is where they are turned.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Map, Value, json};

use super::{
    atomic,
    tensors::{self, Tensors},
};
use crate::{
    Error, Result,
    adapter::{Adapter, LoraConfig, PlainFactors},
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

/// Reads the adapter in `dir`.
///
/// # Errors
/// If a file is missing or broken; if the config asks for what is not applied here (dora, modules_to_save, lora_bias, ...), by
/// name; if tensors are missing, unknown, or of another shape than the config's ranks make them, with counts and examples.
pub fn read(dir: &Path) -> Result<Adapter> {
    let path = dir.join(CONFIG);
    let text = fs::read_to_string(&path).map_err(|e| Error::io("can't read", &path, e))?;
    let config = parse_config(&path, &text)?;
    let tensors = Tensors::open(&dir.join(TENSORS))?;
    let plain = parse_tensors(&dir.join(TENSORS), &config, &tensors)?;
    let found: Vec<Projection> = plain.keys().map(|m| m.projection).collect();
    if let Some(absent) = config.targets.iter().find(|t| !found.contains(t)) {
        return Err(Error::file(&path, format!("target {absent} has no tensors in {TENSORS}")));
    }
    if let Some(module) = plain.keys().find(|m| !config.targets.contains(&m.projection)) {
        return Err(Error::file(&path, format!("{TENSORS} holds {}, which is no target", module.path())));
    }
    Adapter::new(config, plain).map_err(|e| Error::file(dir, e.to_string()))
}

fn parse_config(path: &Path, text: &str) -> Result<LoraConfig> {
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
    if let Some((key, value)) = map.iter().find(|(k, v)| !neutral(k, v)) {
        return Err(bad(format!("{key} = {value} changes what the adapter computes and is not supported")));
    }
    let mut targets = targets;
    targets.sort();
    targets.dedup();
    Ok(LoraConfig { rank: rank as usize, alpha, rank_pattern, alpha_pattern, rslora, targets })
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

fn parse_tensors(path: &Path, config: &LoraConfig, tensors: &Tensors) -> Result<BTreeMap<Module, PlainFactors>> {
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
    let mut plain = BTreeMap::new();
    let mut misshapen = Vec::new();
    for (module, half) in halves {
        let [a, b] = half.map(|h| h.expect("both halves are there"));
        let (a_shape, b_shape) = (&tensors.entries()[a].shape, &tensors.entries()[b].shape);
        let rank = config.rank_of(module);
        let [ra, d_in] = a_shape[..] else {
            misshapen.push(format!("{a} {a_shape:?}"));
            continue;
        };
        let [d_out, rb] = b_shape[..] else {
            misshapen.push(format!("{b} {b_shape:?}"));
            continue;
        };
        if ra != rank || rb != rank {
            misshapen.push(format!("{} A {a_shape:?} B {b_shape:?} (rank {rank} by the config)", module.path()));
            continue;
        }
        let factors = PlainFactors {
            a: transposed(&tensors.f32(a)?, rank, d_in),
            b: transposed(&tensors.f32(b)?, d_out, rank),
            d_in,
            rank,
            d_out,
        };
        plain.insert(module, factors);
    }
    complain(path, "have another shape than the config makes them", &misshapen)?;
    if plain.is_empty() {
        return Err(Error::file(path, "holds no LoRA factors: nothing would be applied"));
    }
    Ok(plain)
}

fn complain(path: &Path, what: &str, names: &[String]) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let examples = names.iter().take(2).cloned().collect::<Vec<_>>().join(", ");
    Err(Error::file(path, format!("{} tensors {what}, as {examples}", names.len())))
}

/// The transpose of a row-major `[rows, columns]` matrix.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}

/// Writes `adapter` into the existing folder `dir` as PEFT 0.21 reads it. `base` goes into `base_model_name_or_path`.
///
/// # Errors
/// If a file can't be written.
pub fn write(dir: &Path, adapter: &Adapter, base: &str) -> Result<()> {
    let c = adapter.config();
    let plain_alpha = |alpha: f64| if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) };
    let alphas: Map<String, Value> = c.alpha_pattern.iter().map(|(k, v)| (k.clone(), plain_alpha(*v))).collect();
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true, "lora_dropout": 0.0, "modules_to_save": null, "use_dora": false,
        "lora_bias": false, "r": c.rank, "lora_alpha": plain_alpha(c.alpha), "rank_pattern": c.rank_pattern, "alpha_pattern": alphas,
        "use_rslora": c.rslora, "target_modules": c.targets.iter().map(|p| p.name()).collect::<Vec<_>>(),
    });
    let mut owned = Vec::new();
    for (module, f) in adapter.plain() {
        let name = |half: &str| format!("{PREFIX}{}.lora_{half}.weight", module.path());
        owned.push((name("A"), vec![f.rank, f.d_in], transposed(&f.a, f.d_in, f.rank)));
        owned.push((name("B"), vec![f.d_out, f.rank], transposed(&f.b, f.rank, f.d_out)));
    }
    let named: Vec<tensors::Named<'_>> = owned.iter().map(|(n, s, v)| (n.clone(), s.clone(), v.as_slice())).collect();
    tensors::write(&dir.join(TENSORS), &named)?;
    atomic::write_text(&dir.join(CONFIG), &format!("{config:#}\n"))
}
