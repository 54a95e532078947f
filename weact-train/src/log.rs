//! `log.jsonl`: one line per event, flushed as it happens. A resumed run continues the file where its checkpoint stands.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use weact_core::{Error as CoreError, io::atomic};

use crate::Result;

/// The file's name in a run directory.
pub const FILE: &str = "log.jsonl";

/// What a run reports. Observers get the same events as the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The data, before the first update.
    Data(Data),
    /// The run goes on from a checkpoint.
    Resumed {
        /// Batches done before.
        step: usize,
        /// Batches of the whole run.
        steps: usize,
        /// Newer checkpoints that are broken; their batches are done again.
        passed_over: Vec<String>,
    },
    /// One batch.
    Step(Step),
    /// An evaluation on held-back data.
    Valid(Validation),
    /// A checkpoint is on disk.
    Checkpoint {
        /// After this batch.
        step: usize,
    },
    /// The end, with the proof that nothing else changed.
    Done(Done),
}

/// The data of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Data {
    /// Samples.
    pub samples: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Their supervised tokens.
    pub supervised_tokens: usize,
    /// Stages and rows that gave no sample, by reason.
    pub dropped: std::collections::BTreeMap<String, usize>,
    /// Samples of the held-back data.
    pub valid_samples: Option<usize>,
    /// Stages and rows of the held-back data that gave no sample, by reason.
    #[serde(default)]
    pub valid_dropped: std::collections::BTreeMap<String, usize>,
    /// Trained tensors: two factors per module, or every weight in a full training.
    pub trained_tensors: usize,
    /// Trained numbers.
    pub trained_parameters: usize,
    /// Updates of the whole run.
    pub steps: usize,
}

/// One batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// From 1.
    pub step: usize,
    /// Mean negative log-likelihood per supervised token before the update, nats; absent where no token was supervised.
    pub loss: Option<f64>,
    /// Supervised tokens.
    pub trained_tokens: usize,
    /// All tokens.
    pub tokens: usize,
    /// Share of the computed positions that held no token of a sample; absent where nothing was computed.
    pub padding: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Norm of the whole gradient before clipping.
    pub grad_norm: Option<f64>,
    /// Seconds that the batch took.
    pub wall_s: f64,
    /// The most memory of the process that was resident so far, mapped files included; absent where the system does not tell.
    pub peak_bytes: Option<u64>,
}

/// An evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// After this many batches.
    pub step: usize,
    /// Mean negative log-likelihood per supervised token, nats.
    pub nll: f64,
    /// Share of supervised tokens that are the most likely one.
    pub top1: f64,
    /// Supervised tokens.
    pub tokens: usize,
}

/// The end of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Batches.
    pub step: usize,
    /// Digest of the adapter, or of the new model.
    pub digest: String,
    /// Digest of the backbone on disk after the run; equal to that before.
    pub base: String,
    /// Other adapters beside the run, unchanged: folder and digest.
    pub others: Vec<(String, String)>,
    /// The most memory of the process that was resident, mapped files included; absent where the system does not tell.
    pub peak_bytes: Option<u64>,
}

/// An open log.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Opens the log of a run that goes on after `step` (0: from the start). Later lines, and a torn last one, are dropped.
    ///
    /// # Errors
    /// If the file can't be read or written.
    pub fn open(run: &Path, step: usize) -> Result<Self> {
        let path = run.join(FILE);
        let old = if path.exists() {
            fs::read_to_string(&path).map_err(|e| CoreError::io("can't read", &path, e))?
        } else {
            String::new()
        };
        let stays = |line: &&str| match serde_json::from_str::<Event>(line) {
            Ok(Event::Data(_)) => step > 0,
            Ok(Event::Step(Step { step: s, .. }) | Event::Checkpoint { step: s } | Event::Resumed { step: s, .. }) => s <= step,
            Ok(Event::Valid(Validation { step: s, .. })) => s <= step && step > 0,
            Ok(Event::Done(_)) | Err(_) => false,
        };
        let kept: String = old.lines().filter(stays).map(|line| format!("{line}\n")).collect();
        atomic::write_text(&path, &kept)?;
        let file = OpenOptions::new().append(true).open(&path).map_err(|e| CoreError::io("can't open", &path, e))?;
        Ok(Self { path, file })
    }

    /// Appends one event.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn push(&mut self, event: &Event) -> Result<()> {
        let line = format!("{}\n", serde_json::to_string(event).expect("events serialise"));
        let failed =
            |e| CoreError::io("can't write", &self.path, atomic::with_free_space(e, &self.path, Some(line.len() as u64)));
        Ok(self.file.write_all(line.as_bytes()).map_err(failed)?)
    }

    /// The events of a run directory's log.
    ///
    /// # Errors
    /// If it can't be read or a line is no event.
    pub fn read(run: &Path) -> Result<Vec<Event>> {
        let path = run.join(FILE);
        let text = fs::read_to_string(&path).map_err(|e| CoreError::io("can't read", &path, e))?;
        let parse = |(i, line): (usize, &str)| {
            serde_json::from_str(line).map_err(|e| CoreError::Line { path: path.clone(), line: i + 1, why: e.to_string() }.into())
        };
        text.lines().enumerate().map(parse).collect()
    }
}
