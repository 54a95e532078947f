//! From files to samples, with every row accounted for.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use sha2::{Digest, Sha256};
use weact_core::{
    Capability, Trajectory,
    chat::Chat,
    control,
    io::tensors::hex,
    sample::{self, Reason, Rules, Sample, Samples},
    stage::Stage,
    trajectory,
};

use crate::{Error, Result};

/// Samples of one data set, and where the stages' texts came from.
#[derive(Debug)]
pub struct Dataset {
    /// In file order, capability by capability.
    pub samples: Vec<Sample>,
    /// Stages and rows that gave no sample.
    pub dropped: Vec<(String, Reason)>,
    /// What the rows tell the model about each supervised capability.
    pub stages: Vec<Stage>,
    /// SHA-256 over all ids and masks.
    pub digest: String,
}

/// What may be left out.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Largest share of stages that may be too long.
    pub max_lost: f64,
    /// Rows without any labelled stage are left out instead of refused.
    pub allow_empty: bool,
}

impl Dataset {
    /// Supervised tokens of all samples.
    pub fn n_supervised(&self) -> usize {
        self.samples.iter().map(Sample::n_supervised).sum()
    }

    /// Tokens of all samples.
    pub fn n_tokens(&self) -> usize {
        self.samples.iter().map(|s| s.ids.len()).sum()
    }

    /// How many stages and rows gave no sample, by reason.
    pub fn dropped_by_reason(&self) -> BTreeMap<String, usize> {
        Samples { kept: Vec::new(), dropped: self.dropped.clone() }.dropped_by_reason()
    }
}

/// Reads `files` and cuts the samples of `capabilities`.
///
/// # Errors
/// If a file is broken, no sample is left, a row has no labelled stage at all (unless allowed), or more than the allowed share is
/// too long; the message names rows and lengths.
pub fn load(files: &[PathBuf], chat: &Chat, capabilities: &[Capability], rules: Rules, tolerance: Tolerance) -> Result<Dataset> {
    let mut rows: Vec<Trajectory> = Vec::new();
    for file in files {
        rows.extend(trajectory::read(file)?);
    }
    let unlabelled: Vec<&str> = rows.iter().filter(|r| r.spans().is_empty()).map(|r| r.id.as_str()).collect();
    if !unlabelled.is_empty() && !tolerance.allow_empty {
        let why = "have no labelled stage and would train nothing; label them, or leave them out with --allow-empty";
        return Err(Error::Other(format!("{} of {} rows {why}: {}", unlabelled.len(), rows.len(), examples(&unlabelled))));
    }
    let mut dataset = Dataset { samples: Vec::new(), dropped: Vec::new(), stages: Vec::new(), digest: String::new() };
    for capability in capabilities {
        let samples = sample::samples(chat, &rows, capability, rules)?;
        dataset.samples.extend(samples.kept);
        dataset.dropped.extend(samples.dropped);
        dataset.stages.push(stage_of(&rows, capability)?);
    }
    refuse_loss(&dataset, tolerance)?;
    if dataset.samples.is_empty() {
        return Err(Error::Other(format!("no sample is left to train on: {:?}", dataset.dropped_by_reason())));
    }
    dataset.digest = digest(&dataset.samples);
    Ok(dataset)
}

fn refuse_loss(dataset: &Dataset, tolerance: Tolerance) -> Result<()> {
    let too_long: Vec<String> =
        dataset.dropped.iter().filter(|(_, r)| matches!(r, Reason::TooLong { .. })).map(|(id, r)| format!("{id} {r}")).collect();
    let stages = dataset.samples.len() + too_long.len();
    let share = too_long.len() as f64 / stages.max(1) as f64;
    if share <= tolerance.max_lost {
        return Ok(());
    }
    let allowed = tolerance.max_lost * 100.0;
    let what =
        format!("{} of {stages} stages are too long, more than the {allowed}% that [train] max_lost allows", too_long.len());
    Err(Error::Other(format!("{what}: {}; raise max_length, set clip_tool_result or allow the loss", examples(&too_long))))
}

fn examples<S: AsRef<str>>(ids: &[S]) -> String {
    let shown: Vec<&str> = ids.iter().take(5).map(AsRef::as_ref).collect();
    let more = if ids.len() > 5 { format!(" and {} more", ids.len() - 5) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// Description and activation text of a capability as the rows have them: the adapter's card must say what it was trained with.
fn stage_of(rows: &[Trajectory], capability: &Capability) -> Result<Stage> {
    let mut activations = BTreeSet::new();
    let mut descriptions = BTreeSet::new();
    for row in rows {
        let messages = row.messages();
        for span in row.spans().iter().filter(|s| s.capability == *capability) {
            let loads = |i: usize| messages[i].tool_calls.last().is_some_and(|c| c.name == control::LOAD);
            if span.start >= 2 && loads(span.start - 2) {
                activations.insert(messages[span.start - 1].content.clone());
                descriptions.extend(description_in(&row.tools, capability));
            }
        }
    }
    let builtin = Stage::builtin(capability);
    let one = |what: &str, texts: BTreeSet<String>, default: String| {
        if texts.len() > 1 {
            let shown: Vec<&String> = texts.iter().take(2).collect();
            return Err(Error::Other(format!("the rows give {capability} several {what}s, as {shown:?}; an adapter has one")));
        }
        Ok(texts.into_iter().next().unwrap_or(default))
    };
    Ok(Stage {
        alias: capability.clone(),
        description: one("description", descriptions, builtin.description)?,
        activation: one("activation text", activations, builtin.activation)?,
    })
}

/// The description of `capability` in a row's tool list.
fn description_in(tools: &[serde_json::Value], capability: &Capability) -> Option<String> {
    let load = tools.iter().find(|t| t["function"]["name"] == control::LOAD)?;
    control::listed_description(load, capability)
}

fn digest(samples: &[Sample]) -> String {
    let mut hash = Sha256::new();
    for sample in samples {
        hash.update(format!("{}\0{}\0", sample.id, sample.capability));
        for (id, counts) in sample.ids.iter().zip(&sample.mask) {
            hash.update(id.to_le_bytes());
            hash.update([u8::from(*counts)]);
        }
    }
    hex(&hash.finalize())
}
