//! A run's directory: who may write into it, and what is in it.

use std::{
    fs::{self, File, TryLockError},
    iter,
    path::{Path, PathBuf},
};

use weact_core::{Error as CoreError, card, io::atomic};

use crate::{Error, Result, checkpoint, config::Run, log, sft};

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

/// Whether a run may use `run.out`; changes nothing.
///
/// # Errors
/// [`Error::RunDirectory`] if it holds something and may not be used, is no run directory, is resumed under another
/// configuration, or would be overwritten although the run starts from it.
pub fn check(run: &Run, existing: Existing) -> Result<()> {
    let out = &run.out;
    let refuse = |why: String| Err(Error::RunDirectory { path: out.clone(), why });
    if is_empty(out)? {
        return Ok(());
    }
    if existing == Existing::Refuse {
        return refuse("is not empty: --resume goes on with the run in it, --overwrite starts again".to_owned());
    }
    if !out.join(CONFIG).exists() {
        return refuse(format!("holds files but no {CONFIG}: it is no run directory"));
    }
    if existing == Existing::Resume {
        let differences = run.differences(&Run::read(&out.join(CONFIG))?);
        if !differences.is_empty() {
            let keys = differences.join(", ");
            return refuse(format!("was begun with other values of {keys}: change them back, or --overwrite"));
        }
        return Ok(());
    }
    if Run::read(&out.join(CONFIG)).is_err() {
        return refuse(format!("holds a {CONFIG} that is no training run's: it is no run directory"));
    }
    let is_out = |source: &PathBuf| matches!((fs::canonicalize(source), fs::canonicalize(out)), (Ok(a), Ok(b)) if a == b);
    match iter::once(&run.model).chain(&run.lora.continue_from).find(|source| is_out(source)) {
        Some(source) => refuse(format!("would be overwritten, but the run starts from {}: choose another out", source.display())),
        None => Ok(()),
    }
}

/// Makes `run.out` ready and saves the resolved configuration in it. While the returned handle is open, no other process can
/// train into the directory.
///
/// # Errors
/// As [`check`], or [`Error::RunDirectory`] if another process is training into it; nothing has been touched then.
pub fn prepare(run: &Run, existing: Existing) -> Result<File> {
    let out = &run.out;
    fs::create_dir_all(out).map_err(|e| CoreError::io("can't make", out, e))?;
    let held = File::open(out).map_err(|e| CoreError::io("can't open", out, e))?;
    match held.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(Error::RunDirectory { path: out.clone(), why: "another process is training into it".to_owned() });
        }
        Err(TryLockError::Error(e)) => return Err(CoreError::io("can't lock", out, e).into()),
    }
    check(run, existing)?;
    sweep(out)?;
    if existing == Existing::Overwrite {
        clear(out)?;
    }
    // Last, so that a kill on the way here leaves a directory that can be resumed or overwritten.
    if existing != Existing::Resume || is_empty(out)? {
        atomic::write_text(&out.join(CONFIG), &run.to_toml())?;
    }
    Ok(held)
}

fn is_empty(out: &Path) -> Result<bool> {
    if !out.exists() {
        return Ok(true);
    }
    for entry in fs::read_dir(out).map_err(|e| CoreError::io("can't read", out, e))? {
        let name = entry.map_err(|e| CoreError::io("can't read", out, e))?.file_name();
        if !atomic::is_leftover(&name) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes what interrupted writes left.
fn sweep(out: &Path) -> Result<()> {
    for entry in fs::read_dir(out).map_err(|e| CoreError::io("can't read", out, e))? {
        let entry = entry.map_err(|e| CoreError::io("can't read", out, e))?;
        if atomic::is_leftover(&entry.file_name()) && entry.path().is_file() {
            remove_if_there(&entry.path())?;
        }
    }
    Ok(())
}

/// Removes what an earlier run wrote, but for the configuration: the new one replaces it.
fn clear(out: &Path) -> Result<()> {
    checkpoint::remove_all(out)?;
    let results = [log::FILE, card::FILE, "adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"];
    for file in results.into_iter().chain(sft::COPIED) {
        remove_if_there(&out.join(file))?;
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(CoreError::io("can't remove", path, e).into()),
        _ => Ok(()),
    }
}

/// Adapters beside the run directory: their tensor files, by folder.
///
/// # Errors
/// If the parent folder can't be read.
pub fn neighbours(out: &Path) -> Result<Vec<PathBuf>> {
    let parent = match out.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) if parent.exists() => parent,
        _ => return Ok(Vec::new()),
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(parent).map_err(|e| CoreError::io("can't read", parent, e))? {
        let folder = entry.map_err(|e| CoreError::io("can't read", parent, e))?.path();
        let file = folder.join("adapter_model.safetensors");
        if folder.file_name() != out.file_name() && file.exists() {
            found.push(file);
        }
    }
    found.sort();
    Ok(found)
}
