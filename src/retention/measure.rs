//! The records of a study: every point scored on the validation trajectories, with each adapter's tokens scored once.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use burn::tensor::Device;
use weact_core::{
    Backbone, Capability, Error as CoreError,
    chat::Chat,
    io::{atomic, checkpoint::Checkpoint, peft},
    sample::Sample,
};
use weact_diagnostics::{
    content::{self, TokenKind},
    retention::{Counts, Measurement, Set, Tokens},
    teacher_forced::score,
};
use weact_train::{Error, Result, sft};

use super::{Study, of_diagnostics, plan};
use crate::retention::Arm;

/// The file of the records in a study's directory.
pub const RECORDS: &str = "records.jsonl";

/// What is measured on: samples, and the set that each trajectory is in.
#[derive(Debug)]
pub(super) struct Scenes {
    pub(super) samples: Vec<Sample>,
    pub(super) sets: BTreeMap<String, Set>,
}

/// Reads a study's records. A last line that was not finished is left out.
///
/// # Errors
/// If the file can't be read, or a line is no record: `path:line: why`.
pub fn read(dir: &Path) -> Result<Vec<Measurement>> {
    let path = dir.join(RECORDS);
    let text = fs::read_to_string(&path).map_err(|e| CoreError::io("can't read", &path, e))?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |(i, line): (usize, &str)| {
        let wrong = |e: serde_json::Error| CoreError::Line { path: path.clone(), line: i + 1, why: e.to_string() };
        serde_json::from_str(line).map_err(|e| wrong(e).into())
    };
    whole.lines().enumerate().map(parse).collect()
}

/// Scores every point and appends its records; points that are recorded under the same weights stay. `measured` hears how many of how many
/// points are done. False where it was interrupted.
///
/// # Errors
/// If an adapter is missing, broken or does not fit; if a score is not finite; if a record can't be written.
pub(super) fn measure(
    study: &Study,
    chat: &Chat,
    scenes: &Scenes,
    device: &Device,
    measured: &mut dyn FnMut(usize, usize),
    interrupted: &dyn Fn() -> bool,
) -> Result<bool> {
    let old = if study.out.join(RECORDS).exists() { read(&study.out)? } else { Vec::new() };
    let points: Vec<(Arm, Vec<Capability>)> = Arm::ALL
        .into_iter()
        .flat_map(|arm| plan::points(&study.capabilities).into_iter().map(move |point| (arm, point)))
        .collect();
    let mut scorer = Scorer::new(study, chat, scenes, device)?;
    let mut stay: Vec<Measurement> = Vec::new();
    let mut todo = Vec::new();
    for (arm, after) in &points {
        let own: Vec<&Measurement> = old.iter().filter(|m| m.arm == arm.name() && m.after == *after).collect();
        if scorer.is_whole(*arm, after, &own)? { stay.extend(own.into_iter().cloned()) } else { todo.push((*arm, after)) }
    }
    let path = study.out.join(RECORDS);
    atomic::write_text(&path, &lines(&stay))?;
    let mut file = OpenOptions::new().append(true).open(&path).map_err(|e| CoreError::io("can't open", &path, e))?;
    for (i, (arm, after)) in todo.iter().enumerate() {
        if interrupted() {
            return Ok(false);
        }
        let lines = lines(&scorer.point(*arm, after)?);
        let failed = |e| CoreError::io("can't write", &path, atomic::with_free_space(e, &path, Some(lines.len() as u64)));
        file.write_all(lines.as_bytes()).and_then(|()| file.sync_data()).map_err(failed)?;
        measured(points.len() - todo.len() + i + 1, points.len());
    }
    Ok(true)
}

fn lines(records: &[Measurement]) -> String {
    records.iter().map(|record| serde_json::to_string(record).expect("a record serialises") + "\n").collect()
}

/// The trajectory of a sample: its id without the number of the span.
pub(super) fn trajectory_of(sample: &Sample) -> &str {
    sample.id.rsplit_once('#').expect("a sample's id names its span").0
}

struct Scorer<'a> {
    study: &'a Study,
    scenes: &'a Scenes,
    backbone: Backbone,
    kinds: Vec<Vec<TokenKind>>, // of each sample
    /// By digest of the adapter, then by sample: what was scored already.
    known: HashMap<Option<String>, HashMap<usize, [Counts; 3]>>,
    digests: HashMap<PathBuf, String>,
}

impl<'a> Scorer<'a> {
    fn new(study: &'a Study, chat: &Chat, scenes: &'a Scenes, device: &Device) -> Result<Self> {
        let backbone = Checkpoint::open(&study.model, false)?.load(device, sft::dtype(&study.train.dtype)?)?;
        let kinds = scenes.samples.iter().map(|sample| content::kinds(&chat.tokenizer, sample).map_err(of_diagnostics));
        let kinds = kinds.collect::<Result<_>>()?;
        Ok(Self { study, scenes, backbone, kinds, known: HashMap::new(), digests: HashMap::new() })
    }

    fn digest(&mut self, dir: &Path) -> Result<String> {
        if let Some(digest) = self.digests.get(dir) {
            return Ok(digest.clone());
        }
        let digest = peft::read(dir)?.digest().to_owned();
        self.digests.insert(dir.to_owned(), digest.clone());
        Ok(digest)
    }

    /// The samples of each capability and trajectory.
    fn cells(&self) -> BTreeMap<(&'a Capability, &'a str), Vec<usize>> {
        let mut cells: BTreeMap<(&Capability, &str), Vec<usize>> = BTreeMap::new();
        for (i, sample) in self.scenes.samples.iter().enumerate() {
            cells.entry((&sample.capability, trajectory_of(sample))).or_default().push(i);
        }
        cells
    }

    /// Whether `own` are the records that this point would give, by their weights and tokens.
    fn is_whole(&mut self, arm: Arm, after: &[Capability], own: &[&Measurement]) -> Result<bool> {
        let cells = self.cells();
        let found: BTreeSet<(&Capability, &str)> = own.iter().map(|m| (&m.capability, m.trajectory.as_str())).collect();
        if own.len() != cells.len() || found != cells.keys().copied().collect() {
            return Ok(false);
        }
        for record in own {
            let Measurement { capability, trajectory, .. } = record;
            let dir = plan::weights(self.study, arm, after, capability, trajectory);
            let weights = dir.map(|dir| self.digest(&dir)).transpose()?;
            let n_tokens: usize =
                cells[&(capability, trajectory.as_str())].iter().map(|i| self.scenes.samples[*i].n_supervised()).sum();
            if (&record.weights, record.supervised.n_tokens) != (&weights, n_tokens as u64)
                || record.set != self.scenes.sets[trajectory]
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn point(&mut self, arm: Arm, after: &[Capability]) -> Result<Vec<Measurement>> {
        let cells = self.cells();
        let mut of_weights: BTreeMap<Option<PathBuf>, Vec<usize>> = BTreeMap::new();
        for ((capability, trajectory), samples) in &cells {
            let dir = plan::weights(self.study, arm, after, capability, trajectory);
            of_weights.entry(dir).or_default().extend(samples);
        }
        for (dir, samples) in of_weights {
            // What is scored together is the same in every run, wherever it was interrupted: so is the rounding.
            let samples = if dir.is_none() { (0..self.scenes.samples.len()).collect() } else { samples };
            self.score(dir.as_deref(), &samples)?;
        }
        let mut records = Vec::new();
        for ((capability, trajectory), samples) in cells {
            let dir = plan::weights(self.study, arm, after, capability, trajectory);
            let weights = dir.map(|dir| self.digest(&dir)).transpose()?;
            let known = &self.known[&weights];
            let mut sums = [Counts::default(); 3];
            for sample in samples {
                sums.iter_mut().zip(known[&sample]).for_each(|(sum, counts)| *sum += counts);
            }
            let [supervised, content, content_without_thinking] = sums;
            records.push(Measurement {
                arm: arm.name().to_owned(),
                after: after.to_vec(),
                capability: capability.clone(),
                set: self.scenes.sets[trajectory],
                trajectory: trajectory.to_owned(),
                weights,
                supervised,
                content,
                content_without_thinking,
            });
        }
        Ok(records)
    }

    fn score(&mut self, dir: Option<&Path>, samples: &[usize]) -> Result<()> {
        let weights = dir.map(|dir| self.digest(dir)).transpose()?;
        let known = self.known.entry(weights).or_default();
        let new: Vec<usize> = samples.iter().copied().filter(|sample| !known.contains_key(sample)).collect();
        if new.is_empty() {
            return Ok(());
        }
        let factors = match dir {
            None => None,
            Some(dir) => {
                let adapter = peft::read(dir)?;
                adapter.check_fits(&self.backbone.config)?;
                Some(adapter.to_device(&self.backbone.config, &self.backbone.device())?)
            }
        };
        let rows: Vec<&Sample> = new.iter().map(|i| &self.scenes.samples[*i]).collect();
        let scored = score(&self.backbone, factors.as_ref(), &rows).map_err(of_diagnostics)?;
        for (sample, scored) in new.into_iter().zip(scored) {
            if scored.nll_nats.len() != self.kinds[sample].len() {
                return Err(Error::Other(format!("{}: its tokens were scored otherwise than they were read", scored.id)));
            }
            known.insert(sample, Tokens::ALL.map(|tokens| Counts::of(&scored, &self.kinds[sample], tokens)));
        }
        Ok(())
    }
}
