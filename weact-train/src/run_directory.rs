//! A run's directory: who may write into it, and what is in it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use weact_core::{Error as CoreError, io::atomic};

use crate::{Error, Result, checkpoint, config::Run, log};

/// What to do with a directory that holds something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Refuse.
    Refuse,
    /// Go on from its newest checkpoint.
    Resume,
    /// Remove what an earlier run wrote and start again.
    Overwrite,
}

const CONFIG: &str = "config.toml";

/// Makes `run.out` ready and saves the resolved configuration in it.
///
/// # Errors
/// [`Error::RunDirectory`] if it holds something and may not be used, is no run directory, or is resumed under another
/// configuration; nothing has been touched then.
pub fn prepare(run: &Run, existing: Existing) -> Result<()> {
    let out = &run.out;
    let refuse = |why: String| Error::RunDirectory { path: out.clone(), why };
    let io = |what: &'static str| move |e| CoreError::io(what, out, e);
    let is_empty = !out.exists() || fs::read_dir(out).map_err(io("can't read"))?.next().is_none();
    let config_path = out.join(CONFIG);
    if !is_empty {
        match existing {
            Existing::Refuse => {
                return Err(refuse("is not empty: --resume goes on with the run in it, --overwrite starts again".to_owned()));
            }
            _ if !config_path.exists() => return Err(refuse(format!("holds files but no {CONFIG}: it is no run directory"))),
            Existing::Resume => {
                let differences = run.differences(&Run::read(&config_path)?);
                if !differences.is_empty() {
                    return Err(refuse(format!(
                        "was begun with other values of {}: change them back, or --overwrite",
                        differences.join(", ")
                    )));
                }
                return Ok(());
            }
            Existing::Overwrite => {
                for file in [
                    log::FILE,
                    CONFIG,
                    "adapter_config.json",
                    "adapter_model.safetensors",
                    "card.toml",
                    "config.json",
                    "model.safetensors",
                ] {
                    remove_if_there(&out.join(file))?;
                }
                let checkpoints = out.join("checkpoints");
                if checkpoints.exists() {
                    fs::remove_dir_all(&checkpoints).map_err(|e| CoreError::io("can't remove", &checkpoints, e))?;
                }
            }
        }
    }
    fs::create_dir_all(out).map_err(io("can't make"))?;
    atomic::write_text(&config_path, &run.to_toml())?;
    Ok(())
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(CoreError::io("can't remove", path, e).into()),
        _ => Ok(()),
    }
}

/// Whether `dir` holds a training run, and the steps of its checkpoints.
///
/// # Errors
/// If the folder can't be read.
pub fn recognise(dir: &Path) -> Result<Option<Vec<usize>>> {
    if !dir.join(CONFIG).exists() { Ok(None) } else { checkpoint::steps(dir).map(Some) }
}

/// Adapters beside the run directory: their tensor files, by folder.
///
/// # Errors
/// If the parent folder can't be read.
pub fn neighbours(out: &Path) -> Result<Vec<PathBuf>> {
    let Some(parent) = out.parent().filter(|p| p.exists()) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in fs::read_dir(parent).map_err(|e| CoreError::io("can't read", parent, e))? {
        let folder = entry.map_err(|e| CoreError::io("can't read", parent, e))?.path();
        let file = folder.join("adapter_model.safetensors");
        if folder != out && file.exists() {
            found.push(file);
        }
    }
    found.sort();
    Ok(found)
}
