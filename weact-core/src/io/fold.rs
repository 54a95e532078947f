//! An adapter folded into its checkpoint: `W + scale A B` in every adapted map, as a Hugging Face folder that needs no adapter.
//!
//! Sums are made in f32 and rounded once, to the element type that is written. Tensors go from file to file one at a time, so that
//! memory holds one of them and not the model. What no factor touches is copied byte for byte.

use std::{
    borrow::Cow,
    cmp::Reverse,
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::Path,
};

use burn::tensor::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{
    atomic,
    checkpoint::{self, Checkpoint, EMBEDDING, HEAD},
    hf_config, peft,
    tensors::{self, Planned},
};
use crate::{Adapter, Error, Result, adapter::PlainFactors, lora::Module};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";

/// What a fold did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folded {
    /// Tensors that were added to.
    pub n_folded: usize,
    /// Of these, how many are the checkpoint's own after rounding: their update is zero, or too small for the element type.
    pub n_unchanged: usize,
    /// Whether a tied checkpoint got a head of its own, because the adapter changes the head.
    pub untied: bool,
    /// Bytes of the weights that were written.
    pub bytes: u64,
    /// Files that were copied as they are, by name.
    pub copied: Vec<String>,
    /// What else is in the checkpoint's folder, by name: neither read as weights nor copied.
    pub left_out: Vec<String>,
}

/// Folds `adapter` into `checkpoint` and writes the result into the existing folder `dir`: weights in files of the same names as
/// the checkpoint's, `config.json` with all its keys, and the files of tokenizer, template, generation and licence. `dtype` (f32,
/// bf16 or f16) is the element type of all weights; by default each tensor keeps its own.
///
/// On a tied checkpoint an update of the head applies to the head alone, as in a run: the head becomes a tensor of its own, in the
/// file of the embedding, which stays as it is, and the configuration says that they are no longer tied.
///
/// # Errors
/// If the adapter does not fit, a number is not finite (the tensor is named), the disk is full, or a file can't be read or written.
pub fn fold(checkpoint: &Checkpoint, adapter: &Adapter, dtype: Option<DType>, dir: &Path) -> Result<Folded> {
    adapter.check_fits(&checkpoint.config)?;
    let plan = Plan::new(checkpoint, adapter, dtype.map(on_disk).transpose()?);
    let bytes = plan.tensors().map(|tensor| tensor.bytes() as u64).sum();
    atomic::need_space(dir, bytes)?;
    let mut n_unchanged = 0;
    for (file, tensors) in &plan.files {
        tensors::write_one_by_one(&dir.join(file), tensors, |tensor| {
            let (data, is_unchanged) = plan.data(tensor)?;
            n_unchanged += usize::from(is_unchanged);
            Ok(data)
        })?;
    }
    plan.write_index(dir, bytes)?;
    plan.write_config(dir)?;
    let (copied, left_out) = plan.copy_the_rest(dir)?;
    Ok(Folded { n_folded: plan.updates.len(), n_unchanged, untied: plan.untied, bytes, copied, left_out })
}

fn on_disk(dtype: DType) -> Result<Dtype> {
    match dtype {
        DType::F32 => Ok(Dtype::F32),
        DType::BF16 => Ok(Dtype::BF16),
        DType::F16 => Ok(Dtype::F16),
        other => Err(Error::Model(format!("a checkpoint is not written in {other:?}: use f32, bf16 or f16"))),
    }
}

/// What is added to one tensor.
struct Update<'a> {
    factors: &'a PlainFactors,
    scale: f32,
}

/// What is written, and from what.
struct Plan<'a> {
    checkpoint: &'a Checkpoint,
    dtype: Option<Dtype>,
    updates: BTreeMap<String, Update<'a>>, // by the tensor's name
    untied: bool,
    files: Vec<(String, Vec<Planned>)>,
}

impl<'a> Plan<'a> {
    fn new(checkpoint: &'a Checkpoint, adapter: &'a Adapter, dtype: Option<Dtype>) -> Self {
        let update = |(module, factors): (&Module, &'a PlainFactors)| {
            (format!("{}.weight", module.path()), Update { factors, scale: adapter.config().scale_of(*module) as f32 })
        };
        let updates: BTreeMap<String, Update<'a>> = adapter.plain().iter().map(update).collect();
        let untied = checkpoint.config.tied && updates.contains_key(HEAD);
        let mut plan = Self { checkpoint, dtype, updates, untied, files: Vec::new() };
        let adds_head = untied && !checkpoint.tensors.entries().contains_key(HEAD);
        let known = checkpoint::shapes(&checkpoint.config);
        let is_weight = |name: &str| name == HEAD || known.contains_key(name);
        for (path, names) in checkpoint.tensors.by_file() {
            let head = (adds_head && names.contains(&EMBEDDING)).then_some(HEAD);
            let mut tensors: Vec<Planned> =
                names.into_iter().chain(head).map(|name| plan.tensor(name, is_weight(name))).collect();
            // Wide elements first: then every tensor begins at a multiple of its element's size.
            tensors.sort_by_key(|tensor| Reverse(tensor.dtype.bitsize()));
            let file = path.file_name().expect("a file of weights has a name").to_string_lossy().into_owned();
            plan.files.push((file, tensors));
        }
        plan
    }

    /// The tensor that holds `name`'s values in the checkpoint: a tied head has the embedding's.
    fn source<'n>(&self, name: &'n str) -> &'n str {
        if name == HEAD && self.checkpoint.config.tied { EMBEDDING } else { name }
    }

    fn tensor(&self, name: &str, is_weight: bool) -> Planned {
        let entry = &self.checkpoint.tensors.entries()[self.source(name)];
        // What is in the file but not in the model, as old rotary frequencies, keeps its precision.
        let dtype = self.dtype.filter(|_| is_weight).unwrap_or(entry.dtype);
        Planned { name: name.to_owned(), dtype, shape: entry.shape.clone() }
    }

    fn tensors(&self) -> impl Iterator<Item = &Planned> {
        self.files.iter().flat_map(|(_, tensors)| tensors)
    }

    /// A tensor's bytes, and whether it has an update that left them as they would be without it.
    fn data(&self, tensor: &Planned) -> Result<(Cow<'a, [u8]>, bool)> {
        let source = self.source(&tensor.name);
        let stored: &'a [u8] = self.checkpoint.tensors.bytes(source);
        let types = (self.checkpoint.tensors.entries()[source].dtype, tensor.dtype);
        let n_columns = tensor.shape.last().copied().unwrap_or(1);
        let as_it_is = || match types {
            (from, to) if from == to => Cow::Borrowed(stored),
            _ => Cow::Owned(rounded(stored, types, n_columns, |_, _| {})),
        };
        let (data, is_unchanged) = match self.updates.get(&tensor.name) {
            None => (as_it_is(), false),
            Some(update) => {
                let f = update.factors;
                let a = peft::transposed(&f.a, f.d_in, f.rank); // [r, d_in]: a row of W on disk is one output
                let add = |output: usize, row: &mut [f32]| {
                    let mut sum = vec![0.0; row.len()];
                    for (k, a) in a.chunks_exact(f.d_in).enumerate() {
                        let b = f.b[k * f.d_out + output];
                        sum.iter_mut().zip(a).for_each(|(sum, a)| *sum += a * b);
                    }
                    row.iter_mut().zip(sum).for_each(|(w, sum)| *w += update.scale * sum);
                };
                let data = rounded(stored, types, n_columns, add);
                let is_unchanged = data == *as_it_is();
                (Cow::Owned(data), is_unchanged)
            }
        };
        if !is_finite(&data, tensor.dtype) {
            let (place, dtype) = (format!(" in {}", tensor.name), format!("{:?}", tensor.dtype).to_lowercase());
            return Err(Error::NonFinite { what: "weights", place, dtype });
        }
        Ok((data, is_unchanged))
    }

    fn write_index(&self, dir: &Path, bytes: u64) -> Result<()> {
        let path = self.checkpoint.dir.join(INDEX);
        if !path.exists() {
            return Ok(());
        }
        let mut index = read_object(&path)?;
        let files = self.files.iter();
        let map: BTreeMap<&str, &str> =
            files.flat_map(|(file, tensors)| tensors.iter().map(move |t| (t.name.as_str(), file.as_str()))).collect();
        let mut metadata = index.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default();
        if metadata.contains_key("total_parameters") {
            let n: usize = self.tensors().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
            metadata.insert("total_parameters".to_owned(), json!(n));
        }
        metadata.insert("total_size".to_owned(), json!(bytes));
        index.insert("metadata".to_owned(), Value::Object(metadata));
        index.insert("weight_map".to_owned(), json!(map));
        write_object(&dir.join(INDEX), &index)
    }

    /// The configuration: byte for byte, unless element type or tying are others.
    fn write_config(&self, dir: &Path) -> Result<()> {
        let path = self.checkpoint.dir.join(CONFIG);
        let tied = self.checkpoint.config.tied && !self.untied;
        let is_said = hf_config::read(&self.checkpoint.dir)?.tied == tied;
        if self.dtype.is_none() && is_said {
            return copy(&path, &dir.join(CONFIG));
        }
        let mut config = read_object(&path)?;
        if !is_said {
            config.insert("tie_word_embeddings".to_owned(), json!(tied));
        }
        if let Some(dtype) = self.dtype {
            let name = match dtype {
                Dtype::BF16 => "bfloat16",
                Dtype::F16 => "float16",
                _ => "float32",
            };
            // Both spellings are in use; a file keeps its own.
            let given: Vec<&str> = ["dtype", "torch_dtype"].into_iter().filter(|key| config.contains_key(*key)).collect();
            for key in if given.is_empty() { vec!["torch_dtype"] } else { given } {
                config.insert(key.to_owned(), json!(name));
            }
        }
        write_object(&dir.join(CONFIG), &config)
    }

    /// Copies what a user of the model needs beside weights and configuration; names of what was copied, and of what was not.
    fn copy_the_rest(&self, dir: &Path) -> Result<(Vec<String>, Vec<String>)> {
        let from = &self.checkpoint.dir;
        let unreadable = |e| Error::io("can't read", from, e);
        let (mut copied, mut left_out) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(from).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if [CONFIG, INDEX].contains(&name.as_str()) || self.files.iter().any(|(file, _)| *file == name) {
                continue;
            }
            if goes_along(&name) && entry.path().is_file() {
                copy(&entry.path(), &dir.join(&name))?;
                copied.push(name);
            } else {
                left_out.push(name);
            }
        }
        copied.sort();
        left_out.sort();
        Ok((copied, left_out))
    }
}

/// Whether a file belongs to a model's tokenizer, template, generation or licence.
fn goes_along(name: &str) -> bool {
    const NAMES: [&str; 8] = [
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "added_tokens.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
        "chat_template.json",
    ];
    NAMES.contains(&name) || ["tokenizer", "LICENSE", "NOTICE"].iter().any(|beginning| name.starts_with(beginning))
}

/// Rows of `n_columns` numbers in f32, each changed by `change` (which gets its index), rounded once to the second type.
fn rounded(stored: &[u8], (from, to): (Dtype, Dtype), n_columns: usize, change: impl Fn(usize, &mut [f32]) + Sync) -> Vec<u8> {
    let width = |dtype: Dtype| dtype.bitsize() / 8;
    let mut out = vec![0; stored.len() / width(from) * width(to)];
    let rows = out.par_chunks_mut(n_columns * width(to)).zip(stored.par_chunks(n_columns * width(from)));
    rows.enumerate().for_each(|(i, (out, stored))| {
        let mut row: Vec<f32> = numbers(stored, from).collect();
        change(i, &mut row);
        for (out, value) in out.chunks_exact_mut(width(to)).zip(row) {
            match to {
                Dtype::BF16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                Dtype::F16 => out.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                _ => out.copy_from_slice(&value.to_le_bytes()),
            }
        }
    });
    out
}

/// The elements in f32, exactly. Only weights are read, which a checkpoint's check keeps to these three types.
fn numbers(bytes: &[u8], dtype: Dtype) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(dtype.bitsize() / 8).map(move |c| match dtype {
        Dtype::BF16 => bf16::from_le_bytes([c[0], c[1]]).to_f32(),
        Dtype::F16 => f16::from_le_bytes([c[0], c[1]]).to_f32(),
        _ => f32::from_le_bytes([c[0], c[1], c[2], c[3]]),
    })
}

fn is_finite(bytes: &[u8], dtype: Dtype) -> bool {
    let is_read = matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
    !is_read || bytes.par_chunks(1 << 20).all(|part| numbers(part, dtype).all(f32::is_finite))
}

fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let text = fs::read_to_string(path).map_err(|e| Error::io("can't read", path, e))?;
    serde_json::from_str(&text).map_err(|e| Error::file(path, e.to_string()))
}

fn write_object(path: &Path, object: &Map<String, Value>) -> Result<()> {
    let text = serde_json::to_string_pretty(object).expect("JSON serialises");
    atomic::write_text(path, &(text + "\n"))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let mut source = File::open(from).map_err(|e| Error::io("can't open", from, e))?;
    atomic::write(to, |out| io::copy(&mut source, out).map(drop))
}
