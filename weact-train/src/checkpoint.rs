//! Checkpoints of a run: parameters and moments with the step, written whole or not at all and verified when read.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use weact_core::{
    Error as CoreError,
    io::{
        atomic,
        tensors::{self, Tensors},
    },
};

use crate::{
    Result,
    optim::Parameter,
    trainable::{flat, values_of},
};

/// Where a run stands. The data order is a function of seed and step, so no generator's state is needed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Batches done, those without a supervised token included.
    pub step: usize,
    /// Updates done: AdamW's step count.
    pub updates: usize,
    /// Digest of the training samples.
    pub data: String,
    /// Digest of the backbone on disk.
    pub base: String,
    /// Digest of `state.safetensors`.
    pub state: String,
}

const FOLDER: &str = "checkpoints";
const STATE: &str = "state.safetensors";
const POSITION: &str = "position.toml";

fn folder(run: &Path, step: usize) -> PathBuf {
    run.join(FOLDER).join(format!("step-{step:08}"))
}

/// Writes a checkpoint and then removes all but the `keep` newest and what interrupted writes left. If it fails, those before are
/// untouched.
///
/// # Errors
/// If it can't be written; where the disk is full, the message says how much is needed and how much is free.
pub fn write(run: &Path, position: &Position, parameters: &[Parameter], keep: usize) -> Result<()> {
    let path = folder(run, position.step);
    let parent = run.join(FOLDER);
    fs::create_dir_all(&parent).map_err(|e| CoreError::io("can't make", &parent, e))?;
    atomic::write_folder(&path, |temporary| -> weact_core::Result<()> {
        let values: Vec<[Vec<f32>; 3]> = parameters.iter().map(|p| [&p.value, &p.first, &p.second].map(values_of)).collect();
        let mut named: Vec<tensors::Named<'_>> = Vec::new();
        for (parameter, parts) in parameters.iter().zip(&values) {
            for (kind, part) in ["value", "first", "second"].iter().zip(parts) {
                named.push((format!("{kind}.{}", parameter.name), vec![part.len()], part));
            }
        }
        let state = temporary.join(STATE);
        tensors::write(&state, &named)?;
        let position = Position { state: Tensors::open(&state)?.digest(), ..position.clone() };
        atomic::write_text(&temporary.join(POSITION), &toml::to_string(&position).expect("a position serialises"))
    })?;
    let steps = steps(run)?;
    for old in &steps[..steps.len().saturating_sub(keep)] {
        let path = folder(run, *old);
        fs::remove_dir_all(&path).map_err(|e| CoreError::io("can't remove", &path, e))?;
    }
    for entry in fs::read_dir(&parent).map_err(|e| CoreError::io("can't read", &parent, e))? {
        let entry = entry.map_err(|e| CoreError::io("can't read", &parent, e))?;
        if atomic::is_leftover(&entry.file_name()) {
            fs::remove_dir_all(entry.path()).map_err(|e| CoreError::io("can't remove", &entry.path(), e))?;
        }
    }
    Ok(())
}

/// Removes all checkpoints of a run directory, and nothing else.
///
/// # Errors
/// If one can't be removed.
pub fn remove_all(run: &Path) -> Result<()> {
    for step in steps(run)? {
        let path = folder(run, step);
        fs::remove_dir_all(&path).map_err(|e| CoreError::io("can't remove", &path, e))?;
    }
    Ok(())
}

/// Steps of the checkpoints in a run directory, oldest first. Unfinished writes don't count.
///
/// # Errors
/// If the folder can't be read.
pub fn steps(run: &Path) -> Result<Vec<usize>> {
    let parent = run.join(FOLDER);
    if !parent.exists() {
        return Ok(Vec::new());
    }
    let mut steps = Vec::new();
    for entry in fs::read_dir(&parent).map_err(|e| CoreError::io("can't read", &parent, e))? {
        let name = entry.map_err(|e| CoreError::io("can't read", &parent, e))?.file_name();
        steps.extend(name.to_str().and_then(|n| n.strip_prefix("step-")).and_then(|n| n.parse::<usize>().ok()));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Restores the newest checkpoint that is whole into `parameters`. `None` if there is none at all; the second part names newer
/// ones that are broken.
///
/// # Errors
/// If checkpoints are there but none is whole or fits these parameters.
pub fn restore(run: &Path, parameters: &mut [Parameter], device: &Device) -> Result<Option<(Position, Vec<String>)>> {
    let mut broken = Vec::new();
    for step in steps(run)?.into_iter().rev() {
        match read(&folder(run, step), parameters, device) {
            Ok(position) => return Ok(Some((position, broken))),
            Err(error) => broken.push(error.to_string()),
        }
    }
    if broken.is_empty() { Ok(None) } else { Err(crate::Error::Other(format!("no checkpoint is whole: {}", broken.join("; ")))) }
}

fn read(path: &Path, parameters: &mut [Parameter], device: &Device) -> weact_core::Result<Position> {
    let file = path.join(POSITION);
    let text = fs::read_to_string(&file).map_err(|e| CoreError::io("can't read", &file, e))?;
    let position: Position = toml::from_str(&text).map_err(|e| CoreError::file(&file, e.to_string()))?;
    let state = Tensors::open(&path.join(STATE))?;
    if state.digest() != position.state {
        return Err(CoreError::file(path, "state.safetensors is not what position.toml says it is"));
    }
    let mut restored = Vec::new();
    for parameter in parameters.iter() {
        let [n] = parameter.value.dims();
        let part = |kind: &str| {
            let name = format!("{kind}.{}", parameter.name);
            match state.entries().get(&name) {
                Some(entry) if entry.shape == [n] => Ok(flat(state.f32(&name)?, device)),
                _ => Err(CoreError::file(path, format!("{name} with {n} numbers is not there"))),
            }
        };
        restored.push([part("value")?, part("first")?, part("second")?]);
    }
    for (parameter, [value, first, second]) in parameters.iter_mut().zip(restored) {
        (parameter.value, parameter.first, parameter.second) = (value, first, second);
    }
    Ok(position)
}
