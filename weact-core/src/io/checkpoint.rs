//! Hugging Face checkpoints: `config.json` and safetensors, checked whole before a weight is allocated, cast tensor by tensor.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, Device, Tensor, TensorData};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{
    atomic, hf_config,
    tensors::{self, Entry, Tensors, hex},
};
use crate::{
    Error, Result,
    lora::{Module, Projection},
    model::{
        Backbone, Config, Parameter,
        block::{Block, Linear},
        config::Family,
    },
    ops::Operators,
};

pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(super) const HEAD: &str = "lm_head.weight";

/// A checkpoint whose headers have been checked against its config: every weight is there with its shape, nothing is left over.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder.
    pub dir: PathBuf,
    /// The architecture.
    pub config: Config,
    /// The weights on disk.
    pub tensors: Tensors,
}

impl Checkpoint {
    /// Opens `dir` and checks config, index, shards and shapes, reading headers only. `tie_embeddings` uses the embedding as
    /// head where the config says otherwise but no head is there.
    ///
    /// # Errors
    /// One error names all tensors that are missing, left over, of another shape, or of an element type that is not read.
    pub fn open(dir: &Path, tie_embeddings: bool) -> Result<Self> {
        let mut config = hf_config::read(dir)?;
        let tensors = Tensors::open_model(dir)?;
        let has_head = tensors.entries().contains_key(HEAD);
        if !config.tied && !has_head {
            if !tie_embeddings {
                let why =
                    format!("tie_word_embeddings is false but there is no {HEAD}; --tie-embeddings uses {EMBEDDING} as the head");
                return Err(Error::file(dir, why));
            }
            config.tied = true;
        }
        let checkpoint = Self { dir: dir.to_owned(), config, tensors };
        checkpoint.check_shapes()?;
        if checkpoint.config.tied && has_head && checkpoint.tensors.bytes(HEAD) != checkpoint.tensors.bytes(EMBEDDING) {
            let why = format!(
                "tie_word_embeddings is true but {HEAD} differs from {EMBEDDING}: set the flag to false or remove the tensor"
            );
            return Err(Error::file(dir, why));
        }
        Ok(checkpoint)
    }

    fn check_shapes(&self) -> Result<()> {
        let (n_layers, n_tensors) = (self.config.n_layers, self.tensors.entries().len());
        if n_layers > n_tensors {
            let why = format!("num_hidden_layers is {n_layers} in config.json, but there are only {n_tensors} tensors");
            return Err(Error::file(&self.dir, why));
        }
        let expected = shapes(&self.config);
        let mut wrong = Vec::new();
        for (name, shape) in &expected {
            match self.tensors.entries().get(name) {
                None => wrong.push(format!("{name} is missing")),
                Some(entry) if entry.shape != *shape => {
                    wrong.push(format!("{name} has the shape {:?}, config.json makes it {shape:?}", entry.shape))
                }
                Some(Entry { dtype: Dtype::F32 | Dtype::F16 | Dtype::BF16, .. }) => {}
                Some(entry) => wrong.push(format!("{name} has the element type {:?}; f32, f16 and bf16 are read", entry.dtype)),
            }
        }
        // Old Llama files carry the rotary frequencies, which the config determines.
        let harmless = |name: &str| name.ends_with(".rotary_emb.inv_freq") || (name == HEAD && self.config.tied);
        let left_over = self.tensors.entries().keys().filter(|name| !expected.contains_key(*name) && !harmless(name));
        wrong.extend(left_over.map(|name| format!("{name} is in the file but not in the model")));
        if wrong.is_empty() {
            return Ok(());
        }
        let shown = wrong.iter().take(8).cloned().collect::<Vec<_>>().join("; ");
        let more = if wrong.len() > 8 { format!("; and {} more", wrong.len() - 8) } else { String::new() };
        Err(Error::file(&self.dir, format!("{} tensors don't fit: {shown}{more}", wrong.len())))
    }

    /// SHA-256 over the config's canonical form and all tensors (names, element types, shapes, bytes): what adapters are made for.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(hf_config::write_value(&self.config, "").to_string());
        hash.update(self.tensors.digest());
        hex(&hash.finalize())
    }

    /// Loads the weights onto `device` as `dtype` (f32, bf16 or f16), one tensor at a time.
    ///
    /// # Errors
    /// If the device has no such element type, which is said before anything is read.
    pub fn load(&self, device: &Device, dtype: DType) -> Result<Backbone> {
        if !device.supports_dtype(dtype) {
            return Err(Error::Model(format!("the device does not compute in {dtype:?}: use --dtype f32")));
        }
        let vector = |name: &str| -> Result<Tensor<1>> {
            let values = self.tensors.f32(name)?;
            let len = values.len();
            Ok(Tensor::<1>::from_data(TensorData::new(values, [len]), device).cast(dtype))
        };
        let stored = |name: &str| -> Result<Tensor<2>> {
            let shape = &self.tensors.entries()[name].shape;
            Ok(Tensor::<2>::from_data(TensorData::new(self.tensors.f32(name)?, [shape[0], shape[1]]), device).cast(dtype))
        };
        let linear = |layer: usize, projection: Projection| -> Result<Linear> {
            let path = Module { layer: Some(layer), projection }.path();
            let bias = has_bias(&self.config, projection).then(|| vector(&format!("{path}.bias"))).transpose()?;
            // Files hold [d_out, d_in]; the transposed view acts on the right.
            Ok(Linear { weight: stored(&format!("{path}.weight"))?.transpose(), bias })
        };
        let block = |layer: usize| -> Result<Block> {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let linears: Vec<Linear> = Projection::BLOCK.into_iter().map(|p| linear(layer, p)).collect::<Result<_>>()?;
            let head_norms = match self.config.family {
                Family::Qwen3 => Some((vector(&name("self_attn.q_norm"))?, vector(&name("self_attn.k_norm"))?)),
                Family::Qwen2 | Family::Llama => None,
            };
            Ok(Block {
                input_norm: vector(&name("input_layernorm"))?,
                post_attention_norm: vector(&name("post_attention_layernorm"))?,
                head_norms,
                linears: linears.try_into().expect("seven projections"),
            })
        };
        let embedding = stored(EMBEDDING)?;
        let head = if self.config.tied { embedding.clone() } else { stored(HEAD)? };
        Ok(Backbone {
            config: self.config.clone(),
            operators: Operators::best_for(device, dtype),
            blocks: (0..self.config.n_layers).map(block).collect::<Result<_>>()?,
            norm: vector("model.norm.weight")?,
            head: head.transpose(),
            embedding,
        })
    }
}

fn has_bias(config: &Config, projection: Projection) -> bool {
    match projection {
        Projection::QProj | Projection::KProj | Projection::VProj => config.qkv_bias,
        Projection::OProj => config.o_bias,
        Projection::GateProj | Projection::UpProj | Projection::DownProj => config.mlp_bias,
        Projection::LmHead => false,
    }
}

/// `(d_in, d_out)` of a projection.
pub fn dims(config: &Config, projection: Projection) -> (usize, usize) {
    let (hidden, q, kv) = (config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
    match projection {
        Projection::QProj => (hidden, q),
        Projection::KProj | Projection::VProj => (hidden, kv),
        Projection::OProj => (q, hidden),
        Projection::GateProj | Projection::UpProj => (hidden, config.intermediate_size),
        Projection::DownProj => (config.intermediate_size, hidden),
        Projection::LmHead => (hidden, config.vocab_size),
    }
}

/// Every tensor of a checkpoint with its shape on disk.
pub fn shapes(config: &Config) -> BTreeMap<String, Vec<usize>> {
    let hidden = config.hidden_size;
    let mut shapes =
        BTreeMap::from([(EMBEDDING.to_owned(), vec![config.vocab_size, hidden]), ("model.norm.weight".to_owned(), vec![hidden])]);
    if !config.tied {
        shapes.insert(HEAD.to_owned(), vec![config.vocab_size, hidden]);
    }
    for layer in 0..config.n_layers {
        let mut norm = |part: &str, len: usize| shapes.insert(format!("model.layers.{layer}.{part}.weight"), vec![len]);
        norm("input_layernorm", hidden);
        norm("post_attention_layernorm", hidden);
        if config.family == Family::Qwen3 {
            norm("self_attn.q_norm", config.head_dim);
            norm("self_attn.k_norm", config.head_dim);
        }
        for projection in Projection::BLOCK {
            let path = Module { layer: Some(layer), projection }.path();
            let (d_in, d_out) = dims(config, projection);
            shapes.insert(format!("{path}.weight"), vec![d_out, d_in]);
            if has_bias(config, projection) {
                shapes.insert(format!("{path}.bias"), vec![d_out]);
            }
        }
    }
    shapes
}

/// Each weight by its name in files, with its shape and values as files hold them.
pub fn named_weights(backbone: &Backbone) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let mut named = Vec::new();
    backbone.map(&mut |name, parameter| {
        let (shape, data) = match parameter.clone() {
            Parameter::Vector(t) => (t.dims().to_vec(), t.cast(DType::F32).into_data()),
            Parameter::Matrix(t) => {
                let on_disk = if name == EMBEDDING { t } else { t.transpose() };
                (on_disk.dims().to_vec(), on_disk.cast(DType::F32).into_data())
            }
        };
        named.push((name.to_owned(), shape, data.try_to_vec::<f32>().expect("cast to f32")));
        parameter
    });
    named
}

/// Writes `config.json` and `model.safetensors` (f32) of `backbone` into the existing folder `dir`.
///
/// # Errors
/// If a file can't be written.
pub fn write(dir: &Path, backbone: &Backbone) -> Result<()> {
    write_with(dir, backbone, &hf_config::write_value(&backbone.config, "float32"))
}

/// As [`write()`], with the `config.json` of the checkpoint in `source`: keys that this crate does not read, such as token ids,
/// stay; only element type and tying follow the weights written.
///
/// # Errors
/// If a file can't be read or written.
pub fn write_like(source: &Path, dir: &Path, backbone: &Backbone) -> Result<()> {
    let path = source.join("config.json");
    let text = fs::read_to_string(&path).map_err(|e| Error::io("can't read", &path, e))?;
    let mut config: Map<String, Value> = serde_json::from_str(&text).map_err(|e| Error::file(&path, e.to_string()))?;
    config.shift_remove("dtype");
    config.insert("torch_dtype".to_owned(), json!("float32"));
    config.insert("tie_word_embeddings".to_owned(), json!(backbone.config.tied));
    write_with(dir, backbone, &Value::Object(config))
}

fn write_with(dir: &Path, backbone: &Backbone, config: &Value) -> Result<()> {
    let weights = named_weights(backbone);
    let named: Vec<tensors::Named<'_>> = weights.iter().map(|(n, s, v)| (n.clone(), s.clone(), v.as_slice())).collect();
    tensors::write(&dir.join("model.safetensors"), &named)?;
    atomic::write_text(&dir.join("config.json"), &format!("{config:#}\n"))
}
