//! `config.json` of a Hugging Face checkpoint, in both spellings (`rope_theta` + `rope_scaling`, and `rope_parameters`). Every
//! key is applied, known not to matter for inference, or refused by name. A null counts as absent; absent keys take the
//! defaults of transformers' `Qwen3Config`, `Qwen2Config` and `LlamaConfig`.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

use crate::{
    Error, Result,
    model::config::{Config, Family, Rope, Scaling},
};

/// Keys that change nothing here: bookkeeping, training-time settings, token ids (the tokenizer's own files say those).
const IGNORED: [&str; 30] = [
    "architectures",
    "auto_mapping",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "dtype",
    "torch_dtype",
    "initializer_range",
    "transformers_version",
    "use_cache",
    "_name_or_path",
    "name_or_path",
    "pretraining_tp",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "max_window_layers",
    "is_llama_config",
    "transformers.js_config",
    "_attn_implementation_autoset",
    "attn_implementation",
    "id2label",
    "label2id",
    "problem_type",
    "is_encoder_decoder",
    "task_specific_params",
    "model_type",
];

/// Keys that are accepted only with the one value under which they change nothing.
fn neutral(key: &str) -> Option<Value> {
    Some(match key {
        "hidden_act" => json!("silu"),
        "attention_dropout" | "resid_dropout" | "embd_dropout" | "hidden_dropout" => json!(0.0),
        "rope_interleaved" | "use_bidirectional_attention" => json!(false),
        "partial_rotary_factor" => json!(1.0),
        _ => return None,
    })
}

fn is_neutral(key: &str, value: &Value) -> bool {
    neutral(key).is_some_and(|only| *value == only || (value.is_number() && value.as_f64() == only.as_f64()))
}

struct Reader<'a> {
    path: &'a Path,
    map: Map<String, Value>,
}

impl Reader<'_> {
    fn bad(&self, why: impl Into<String>) -> Error {
        Error::file(self.path, why)
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.map.shift_remove(key).filter(|v| !v.is_null())
    }

    fn size(&mut self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let size = value.as_u64().filter(|n| *n > 0 && *n < 1 << 32);
        size.map(|n| Some(n as usize)).ok_or_else(|| self.bad(format!("{key} must be a positive whole number, not {value}")))
    }

    fn required(&mut self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.bad(format!("the key {key} is missing")))
    }

    fn number(&mut self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let number = value.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        number.map(Some).ok_or_else(|| self.bad(format!("{key} must be a positive number, not {value}")))
    }

    fn flag(&mut self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.take(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.bad(format!("{key} must be true or false, not {value}")))
    }
}

/// Reads `DIR/config.json`.
///
/// # Errors
/// If it can't be read, a needed key is missing, or a key asks for something that is not applied here; the key is named.
pub fn read(dir: &Path) -> Result<Config> {
    let path = dir.join("config.json");
    let text = fs::read_to_string(&path).map_err(|e| Error::io("can't read", &path, e))?;
    let map: Map<String, Value> = serde_json::from_str(&text).map_err(|e| Error::file(&path, e.to_string()))?;
    let mut r = Reader { path: &path, map };

    let family = match r.take("model_type").as_ref().and_then(Value::as_str) {
        Some("qwen3") => Family::Qwen3,
        Some("qwen2") => Family::Qwen2,
        Some("llama") => Family::Llama,
        Some(other) => return Err(r.bad(format!("model_type {other:?} is not supported (qwen3, qwen2, llama are)"))),
        None => return Err(r.bad("the key model_type is missing (qwen3, qwen2 or llama)")),
    };
    let vocab_size = r.required("vocab_size")?;
    let hidden_size = r.required("hidden_size")?;
    let intermediate_size = r.required("intermediate_size")?;
    let n_layers = r.required("num_hidden_layers")?;
    let n_heads = r.required("num_attention_heads")?;
    let kv_is_null = r.map.get("num_key_value_heads").is_some_and(Value::is_null);
    let kv_default = if family == Family::Llama || kv_is_null { n_heads } else { 32 };
    let n_kv_heads = r.size("num_key_value_heads")?.unwrap_or(kv_default);
    let head_dim_is_null = r.map.get("head_dim").is_some_and(Value::is_null);
    let head_dim_default = if family == Family::Qwen3 && !head_dim_is_null { 128 } else { hidden_size / n_heads };
    let head_dim = r.size("head_dim")?.unwrap_or(head_dim_default);
    if n_heads % n_kv_heads != 0 {
        return Err(r.bad(format!("num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}")));
    }
    if head_dim == 0 || head_dim % 2 != 0 {
        return Err(r.bad(format!("head_dim {head_dim} must be even and positive")));
    }
    let rms_norm_eps = r.number("rms_norm_eps")?.unwrap_or(1e-6);
    let max_positions = r.size("max_position_embeddings")?.unwrap_or(if family == Family::Llama { 2048 } else { 32768 });
    let tied = r.flag("tie_word_embeddings", false)?;
    let (qkv_bias, o_bias) = match family {
        Family::Qwen2 => (true, false),
        Family::Qwen3 | Family::Llama => {
            let bias = r.flag("attention_bias", false)?;
            (bias, bias)
        }
    };
    let mlp_bias = if family == Family::Llama { r.flag("mlp_bias", false)? } else { false };
    refuse_sliding_window(&mut r, family)?;
    let rope = rope(&mut r, max_positions)?;
    refuse_the_rest(&r)?;
    Ok(Config {
        family,
        vocab_size,
        hidden_size,
        intermediate_size,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        rms_norm_eps,
        rope,
        max_positions,
        tied,
        qkv_bias,
        o_bias,
        mlp_bias,
    })
}

fn refuse_sliding_window(r: &mut Reader<'_>, family: Family) -> Result<()> {
    let given = r.map.contains_key("sliding_window");
    let window = r.take("sliding_window");
    let used = r.flag("use_sliding_window", false)?;
    // Where the key is absent, transformers' Qwen configs set 4096; Llama's know neither key.
    let window = if used && !given { Some(json!(4096)) } else { window };
    if let (Some(window), true) = (&window, used || family == Family::Llama) {
        return Err(
            r.bad(format!("sliding_window {window} is active and is not supported: every position here sees all before it"))
        );
    }
    let kinds = match r.take("layer_types") {
        None => Vec::new(),
        Some(Value::Array(kinds)) => kinds,
        Some(other) => return Err(r.bad(format!("layer_types must be a list, not {other}"))),
    };
    match kinds.into_iter().find(|kind| kind != "full_attention") {
        Some(kind) => {
            Err(r.bad(format!("layer_types asks for {kind} (a sliding window or another attention), which is not supported")))
        }
        None => Ok(()),
    }
}

fn rope(r: &mut Reader<'_>, max_positions: usize) -> Result<Rope> {
    let (new, old) = (r.take("rope_parameters"), r.take("rope_scaling"));
    if new.is_some() && old.is_some() && new != old {
        return Err(r.bad("rope_parameters and rope_scaling are both given and differ"));
    }
    let outer_theta = r.number("rope_theta")?;
    let spelling = if new.is_some() { "rope_parameters" } else { "rope_scaling" };
    let map = match new.or(old) {
        None => Map::new(),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(r.bad(format!("{spelling} must be an object, not {other}"))),
    };
    let mut inner = Reader { path: r.path, map };
    let inner_theta = inner.number("rope_theta")?;
    if let (Some(a), Some(b)) = (outer_theta, inner_theta)
        && a != b
    {
        return Err(r.bad(format!("rope_theta is given twice, as {a} and {b}")));
    }
    let theta = inner_theta.or(outer_theta).unwrap_or(10000.0);
    let kinds = (inner.take("rope_type"), inner.take("type"));
    if let (Some(a), Some(b)) = &kinds
        && a != b
    {
        return Err(r.bad(format!("rope_type {a} and type {b} differ")));
    }
    let kind = kinds.0.or(kinds.1).unwrap_or_else(|| json!("default"));
    let scaling = match kind.as_str() {
        Some("default") => match inner.number("factor")? {
            Some(factor) if factor != 1.0 => {
                return Err(r.bad(format!("factor {factor} is given without a rope_type that applies it")));
            }
            _ => Scaling::Default,
        },
        Some("yarn") => yarn(&mut inner, max_positions)?,
        Some("llama3") => {
            let mut need =
                |key: &str| inner.number(key)?.ok_or_else(|| inner.bad(format!("the key {key} of rope_type llama3 is missing")));
            Scaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max: need("original_max_position_embeddings")?,
            }
        }
        _ => return Err(r.bad(format!("rope_type {kind} is not supported (default, yarn, llama3 are)"))),
    };
    match inner.map.iter().find(|(key, value)| !value.is_null() && !is_neutral(key, value)) {
        Some((key, value)) => Err(r.bad(format!("the key {key} = {value} of {spelling} is not applied here"))),
        None => Ok(Rope { theta, scaling }),
    }
}

/// As `_compute_yarn_parameters` of transformers.
fn yarn(r: &mut Reader<'_>, max_positions: usize) -> Result<Scaling> {
    let original_max = r.number("original_max_position_embeddings")?.unwrap_or(max_positions as f64);
    let factor = r.number("factor")?.unwrap_or(max_positions as f64 / original_max);
    let stretch = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let by_default = match (r.number("mscale")?, r.number("mscale_all_dim")?) {
        (Some(mscale), Some(all)) => stretch(mscale) / stretch(all),
        _ => stretch(1.0),
    };
    Ok(Scaling::Yarn {
        factor,
        original_max,
        beta_fast: r.number("beta_fast")?.unwrap_or(32.0),
        beta_slow: r.number("beta_slow")?.unwrap_or(1.0),
        attention_factor: r.number("attention_factor")?.unwrap_or(by_default),
        truncate: r.flag("truncate", true)?,
    })
}

fn refuse_the_rest(r: &Reader<'_>) -> Result<()> {
    let unknown =
        r.map.iter().find(|(key, value)| !value.is_null() && !IGNORED.contains(&key.as_str()) && !is_neutral(key, value));
    match unknown {
        None => Ok(()),
        Some((key, value)) => {
            let hint = neutral(key).map_or_else(
                || "remove it if it does not change the model".to_owned(),
                |only| format!("only {only} is supported"),
            );
            Err(r.bad(format!("the key {key} = {value} is not applied here: {hint}")))
        }
    }
}

/// The config as transformers reads it: what a full fine-tuning writes beside its weights.
pub fn write_value(config: &Config, dtype: &str) -> Value {
    let (model_type, architecture) = match config.family {
        Family::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
        Family::Llama => ("llama", "LlamaForCausalLM"),
    };
    let mut value = json!({
        "architectures": [architecture], "model_type": model_type, "hidden_act": "silu", "torch_dtype": dtype,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied, "rope_theta": config.rope.theta,
    });
    let scaling = match &config.rope.scaling {
        Scaling::Default => None,
        Scaling::Yarn { factor, original_max, beta_fast, beta_slow, attention_factor, truncate } => Some(json!({
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_max, "beta_fast": beta_fast,
            "beta_slow": beta_slow, "attention_factor": attention_factor, "truncate": truncate})),
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max } => Some(json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max})),
    };
    if let Some(scaling) = scaling {
        value["rope_scaling"] = scaling;
    }
    if config.family != Family::Qwen2 {
        value["attention_bias"] = json!(config.qkv_bias);
    }
    if config.family == Family::Llama {
        value["mlp_bias"] = json!(config.mlp_bias);
    }
    value
}
