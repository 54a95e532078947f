//! What is looked at: specialists with their held-out records, and what is compared with them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use weact_core::{
    Adapter, Capability, Trajectory,
    card::Card,
    chat::Chat,
    io::{checkpoint::Checkpoint, peft},
    registry::{self, Against},
    sample::{self, Rules, Sample, Samples},
    split, trajectory,
};

use super::{
    Error, Result,
    config::{Records, Run},
};

/// A specialist and its capability's records.
#[derive(Clone, Debug)]
pub struct Specialist {
    /// Whose stages it was trained on.
    pub capability: Capability,
    /// Its weights.
    pub adapter: Adapter,
    /// Stages of that capability.
    pub records: Vec<Sample>,
    /// How many stages gave no record, by reason.
    pub dropped: BTreeMap<String, usize>,
}

/// Several specialists made into one adapter.
#[derive(Clone, Debug)]
pub struct Fusion {
    /// The name in tables.
    pub name: String,
    /// Its weights.
    pub adapter: Adapter,
}

/// All of them.
#[derive(Clone, Debug)]
pub struct Subjects {
    /// In the order of tables.
    pub specialists: Vec<Specialist>,
    /// In the order of tables.
    pub fusions: Vec<Fusion>,
}

impl Subjects {
    /// Opens what a configuration names. Returns warnings about adapters whose origin is not known.
    ///
    /// # Errors
    /// If a file is broken, an adapter or a fusion was made for another base, tokenizer or template, or does not fit, an id occurs
    /// twice, or a capability has no record.
    pub fn open(run: &Run, checkpoint: &Checkpoint) -> Result<(Self, Vec<String>)> {
        let chat = Chat::open(&run.model, run.context.tool_protocol)?;
        let against = Against {
            base: checkpoint.digest(),
            tokenizer: chat.tokenizer.digest().to_owned(),
            template: chat.template_digest(),
        };
        let mut warnings = Vec::new();
        let mut open = |path: &Path| adapter(path, checkpoint, &against, &mut warnings);
        let adapters = run.adapters.iter().map(|a| open(&a.path)).collect::<Result<Vec<_>>>()?;
        let of_fusion = |f: &super::config::FusionPath| Ok(Fusion { name: f.name.clone(), adapter: open(&f.path)? });
        let fusions = run.fusions.iter().map(of_fusion).collect::<Result<Vec<_>>>()?;

        let rows = rows(run)?;
        let rules = run.rules(checkpoint.config.max_positions);
        let mut specialists = Vec::new();
        for (named, adapter) in run.adapters.iter().zip(adapters) {
            let samples = records(&rows, &chat, &named.capability, rules, &run.records)?;
            let dropped = samples.dropped_by_reason();
            if !dropped.is_empty() {
                warnings.push(format!("{}: {} stages give no record: {dropped:?}", named.capability, samples.dropped.len()));
            }
            specialists.push(Specialist { capability: named.capability.clone(), adapter, records: samples.kept, dropped });
        }
        Ok((Self { specialists, fusions }, warnings))
    }
}

fn rows(run: &Run) -> Result<Vec<Trajectory>> {
    let mut rows = Vec::new();
    let mut seen = BTreeSet::new();
    for file in &run.data {
        for row in trajectory::read(file)? {
            if !seen.insert(row.id.clone()) {
                let why = format!("the id {:?} occurs in an earlier file of data as well", row.id);
                return Err(weact_core::Error::file(file, why).into());
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

fn adapter(dir: &Path, checkpoint: &Checkpoint, against: &Against, warnings: &mut Vec<String>) -> Result<Adapter> {
    let adapter = if Card::read(dir)?.is_some() {
        (*registry::read_entry(dir, against)?.0.adapter).clone()
    } else {
        warnings.push(format!("{}: no card.toml; which base it was trained over is not known", dir.display()));
        peft::read(dir)?
    };
    adapter.check_fits(&checkpoint.config).map_err(|e| weact_core::Error::file(dir, e.to_string()))?;
    Ok(adapter)
}

/// The held-out records of `capability` (App. E.1): of the trajectories that have a stage of it, shuffled, the first so many; each
/// stage is a record.
///
/// # Errors
/// If a conversation can't be rendered or encoded, or no record is left.
pub fn records(rows: &[Trajectory], chat: &Chat, capability: &Capability, rules: Rules, held: &Records) -> Result<Samples> {
    let has_stage = |row: &&Trajectory| row.spans().iter().any(|span| span.capability == *capability);
    let of_capability: Vec<&Trajectory> = rows.iter().filter(has_stage).collect();
    let n = of_capability.len();
    let (held, _) = split::split(of_capability, held.per_capability, held.shuffle_seed);
    let held: Vec<Trajectory> = held.into_iter().cloned().collect();
    let samples = sample::samples(chat, &held, capability, rules)?;
    if samples.kept.is_empty() {
        let why =
            if n == 0 { "no trajectory has a stage of it".to_owned() } else { format!("{:?}", samples.dropped_by_reason()) };
        return Err(Error::Other(format!("{capability} has no record to look at: {why}")));
    }
    Ok(samples)
}
