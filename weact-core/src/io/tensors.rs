//! Safetensors files, memory-mapped: one or many shards behind one list of names.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::{Error, Result, io::atomic};

/// Where one tensor stands.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Element type on disk.
    pub dtype: Dtype,
    /// Shape on disk.
    pub shape: Vec<usize>,
    file: usize,
    start: usize,
    end: usize,
}

/// Open safetensors files. Only headers have been read; data is paged in when a tensor is asked for.
#[derive(Debug)]
pub struct Tensors {
    files: Vec<(PathBuf, Mmap)>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Tensors {
    /// Opens the single file `path`.
    ///
    /// # Errors
    /// If it can't be read, or is cut short or otherwise no safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let mut tensors = Self { files: Vec::new(), entries: BTreeMap::new() };
        tensors.add(path)?;
        Ok(tensors)
    }

    /// Opens `DIR/model.safetensors`, or all shards that `DIR/model.safetensors.index.json` names. The index must agree with the
    /// shards' headers: every named shard on disk, every tensor in the shard that the index says, no others.
    ///
    /// # Errors
    /// One error lists all missing shards and all tensors that are not where they should be.
    pub fn open_model(dir: &Path) -> Result<Self> {
        let single = dir.join("model.safetensors");
        let index_path = dir.join("model.safetensors.index.json");
        if !index_path.exists() {
            if !single.exists() {
                return Err(Error::file(dir, "holds neither model.safetensors nor model.safetensors.index.json"));
            }
            return Self::open(&single);
        }
        let text = fs::read_to_string(&index_path).map_err(|e| Error::io("can't read", &index_path, e))?;
        let index: Index = serde_json::from_str(&text).map_err(|e| Error::file(&index_path, e.to_string()))?;
        let mut shards: Vec<&String> = index.weight_map.values().collect();
        shards.sort();
        shards.dedup();
        let unsafe_name = |s: &&&String| Path::new(s.as_str()).file_name().is_none_or(|name| name != s.as_str());
        if let Some(shard) = shards.iter().find(unsafe_name) {
            return Err(Error::file(&index_path, format!("names the shard {shard:?}, which is no plain file name")));
        }
        if single.exists() && !shards.iter().any(|s| s.as_str() == "model.safetensors") {
            return Err(Error::file(
                &index_path,
                "names other files than model.safetensors, which is there too: remove one of the two",
            ));
        }
        let (present, missing): (Vec<&String>, Vec<&String>) = shards.into_iter().partition(|s| dir.join(s).exists());
        let mut tensors = Self { files: Vec::new(), entries: BTreeMap::new() };
        for shard in present {
            tensors.add(&dir.join(shard))?;
        }
        tensors.check_index(&index_path, &index, &missing)?;
        Ok(tensors)
    }

    fn check_index(&self, path: &Path, index: &Index, missing: &[&String]) -> Result<()> {
        let mut wrong: Vec<String> = missing.iter().map(|shard| format!("the shard {shard} is not there")).collect();
        for (name, shard) in index.weight_map.iter().filter(|(_, shard)| !missing.contains(shard)) {
            match self.entries.get(name) {
                None => wrong.push(format!("{name} is in no shard, the index says {shard}")),
                Some(entry) if !self.files[entry.file].0.ends_with(shard) => {
                    wrong.push(format!("{name} is in {}, the index says {shard}", self.files[entry.file].0.display()));
                }
                Some(_) => {}
            }
        }
        wrong.extend(
            self.entries
                .keys()
                .filter(|n| !index.weight_map.contains_key(*n))
                .map(|n| format!("{n} is in a shard but not in the index")),
        );
        if wrong.is_empty() {
            return Ok(());
        }
        Err(Error::file(path, format!("index and shards disagree (incomplete download?): {}", wrong.join("; "))))
    }

    // A map of a file that another process cuts short can fault; a copy of every checkpoint in memory would double the footprint.
    #[allow(unsafe_code)]
    fn add(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path).map_err(|e| Error::io("can't open", path, e))?;
        // SAFETY: the map is read-only and private to this struct; the file is a checkpoint, which nobody edits in place.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io("can't map", path, e))?;
        let broken = |e: safetensors::SafeTensorError| {
            Error::file(path, format!("is no whole safetensors file (incomplete download?): {e}"))
        };
        let (header_len, header) = SafeTensors::read_metadata(&map).map_err(broken)?;
        SafeTensors::deserialize(&map).map_err(broken)?;
        for (name, info) in header.tensors() {
            let start = 8 + header_len + info.data_offsets.0;
            let end = 8 + header_len + info.data_offsets.1;
            let entry = Entry { dtype: info.dtype, shape: info.shape.clone(), file: self.files.len(), start, end };
            if let Some(other) = self.entries.insert(name.clone(), entry) {
                let other = self.files[other.file].0.display();
                return Err(Error::file(path, format!("holds {name}, which is in {other} too")));
            }
        }
        self.files.push((path.to_owned(), map));
        Ok(())
    }

    /// All tensors by name.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The files' paths.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// Each file with the names of its tensors, in the order in which their bytes stand.
    pub fn by_file(&self) -> Vec<(&Path, Vec<&str>)> {
        let mut files: Vec<(&Path, Vec<&str>)> = self.paths().map(|path| (path, Vec::new())).collect();
        let mut entries: Vec<(&String, &Entry)> = self.entries.iter().collect();
        entries.sort_by_key(|(_, entry)| (entry.file, entry.start));
        entries.into_iter().for_each(|(name, entry)| files[entry.file].1.push(name));
        files
    }

    /// The tensor's raw little-endian bytes.
    ///
    /// # Panics
    /// If there is no tensor of this name.
    pub fn bytes(&self, name: &str) -> &[u8] {
        let entry = &self.entries[name];
        &self.files[entry.file].1[entry.start..entry.end]
    }

    /// The tensor's elements in f32, exactly (f16 and bf16 widen without loss).
    ///
    /// # Errors
    /// If the element type is not f32, f16 or bf16.
    ///
    /// # Panics
    /// If there is no tensor of this name.
    pub fn f32(&self, name: &str) -> Result<Vec<f32>> {
        let bytes = self.bytes(name);
        let entry = &self.entries[name];
        let pair = |c: &[u8]| [c[0], c[1]];
        Ok(match entry.dtype {
            Dtype::F32 => bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect(),
            Dtype::BF16 => bytes.chunks_exact(2).map(|c| bf16::from_le_bytes(pair(c)).to_f32()).collect(),
            Dtype::F16 => bytes.chunks_exact(2).map(|c| f16::from_le_bytes(pair(c)).to_f32()).collect(),
            other => {
                let why = format!("{name} has the element type {other:?}; f32, f16 and bf16 are read");
                return Err(Error::file(&self.files[entry.file].0, why));
            }
        })
    }

    /// SHA-256 over the canonical form: for each tensor in name order its name, element type, shape and bytes.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for (name, entry) in &self.entries {
            hash.update(format!("{name}\0{:?}\0{:?}\0", entry.dtype, entry.shape));
            hash.update(self.bytes(name));
        }
        hex(&hash.finalize())
    }
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A tensor to write: name, shape, elements.
pub type Named<'a> = (String, Vec<usize>, &'a [f32]);

/// A tensor that is about to be written.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
}

impl Planned {
    /// How long its data is.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Writes the tensors of `plan` in its order with `{"format": "pt"}` as metadata, atomically and one at a time: `data` makes the
/// little-endian bytes of each when its turn comes.
///
/// # Errors
/// If the file can't be written; `data`'s own error is passed on, and nothing is left of the file then.
pub fn write_one_by_one<'a, E: From<Error>>(
    path: &Path,
    plan: &'a [Planned],
    mut data: impl FnMut(&'a Planned) -> std::result::Result<Cow<'a, [u8]>, E>,
) -> std::result::Result<(), E> {
    let header = header(plan);
    let bytes = 8 + header.len() + plan.iter().map(Planned::bytes).sum::<usize>();
    let mut failed = None;
    let written = atomic::write_sized(path, Some(bytes as u64), |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for tensor in plan {
            let bytes = data(tensor).map_err(|error| {
                failed = Some(error);
                io::Error::other("its data could not be made")
            })?;
            assert_eq!(bytes.len(), tensor.bytes(), "{} has as many bytes as its shape says", tensor.name);
            out.write_all(&bytes)?;
        }
        Ok(())
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(written?),
    }
}

/// The header of a file, padded so that data begins at a multiple of 8 bytes.
fn header(plan: &[Planned]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), serde_json::json!({"format": "pt"}));
    let mut offset = 0;
    for tensor in plan {
        let end = offset + tensor.bytes();
        let place = serde_json::json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]});
        header.insert(tensor.name.clone(), place);
        offset = end;
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

/// Writes f32 tensors in name order with `{"format": "pt"}` as metadata, atomically: equal input gives equal bytes.
///
/// # Errors
/// If the file can't be written.
pub fn write(path: &Path, tensors: &[Named<'_>]) -> Result<()> {
    let mut sorted: Vec<&Named<'_>> = tensors.iter().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    let planned = |(name, shape, values): &&Named<'_>| {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{name} has as many elements as its shape says");
        Planned { name: name.clone(), dtype: Dtype::F32, shape: shape.clone() }
    };
    let header = header(&sorted.iter().map(planned).collect::<Vec<_>>());
    let bytes = 8 + header.len() + sorted.iter().map(|(_, _, values)| values.len() * 4).sum::<usize>();
    atomic::write_sized(path, Some(bytes as u64), |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (_, _, values) in &sorted {
            for value in *values {
                out.write_all(&value.to_le_bytes())?;
            }
        }
        Ok(())
    })
}
