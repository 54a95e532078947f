//! Runs a study: prepares the data, trains what is missing, measures what is missing.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
};

use burn::tensor::Device;
use weact_core::{
    Capability, Error as CoreError, Trajectory,
    chat::Chat,
    io::{atomic, hf_config, peft, toml_text},
    trajectory,
};
use weact_diagnostics::retention::Set;
use weact_train::{
    Error, Result,
    dataset::{self, Dataset, Tolerance},
    log::{Done, Event},
    partition,
    run_directory::Existing,
    sft::{self, Options},
};

use super::{
    Study,
    measure::{self, RECORDS, Scenes, trajectory_of},
    plan::{self, STAGES},
};

const CONFIG: &str = "config.toml";
/// The training data's parts.
const DATA: &str = "data";
/// What the samples that are measured on are, so that a change is seen.
const MEASURED: &str = "measured.sha256";

/// How a study ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every point is measured.
    Done,
    /// It was interrupted; what is finished stays.
    Interrupted,
}

/// What a study is doing.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A stage is trained.
    Stage {
        /// From 1.
        number: usize,
        /// Of how many.
        n: usize,
        /// Its folder in the study's directory.
        name: &'a str,
        /// What its training reports.
        event: &'a Event,
    },
    /// A point is measured.
    Measured {
        /// How many are.
        number: usize,
        /// Of how many.
        n: usize,
    },
}

/// Trains and measures, and leaves the records in `study.out`. Every stage is a run directory of its own, so that an interrupted study goes on
/// within the stage; a finished stage is trained no further. `observe` hears what happens; `interrupted` is asked between updates and points.
///
/// # Errors
/// If the configuration, a file or the directory is not what it should be; if a capability has no sample to train or to measure on; if a
/// trajectory is in both; if a training fails; if the adapter of a capability was changed by another stage.
pub fn run(
    study: &Study,
    existing: Existing,
    device: &Device,
    observe: &mut dyn FnMut(Progress<'_>),
    interrupted: &dyn Fn() -> bool,
) -> Result<Outcome> {
    study.check().map_err(|why| Error::Config { path: study.out.clone(), why })?;
    check_directory(study, existing)?;
    let chat = Chat::open(&study.model, study.context.tool_protocol)?;
    let prepared = Prepared::new(study, &chat)?;
    let _held = open_directory(study, existing)?;
    keep(&study.out.join(MEASURED), &prepared.digest)?;
    let part_files = prepared.write_parts(study)?;
    let stages = plan::stages(study, &part_files);
    let n = stages.len();
    let mut finished: Vec<(PathBuf, Done)> = Vec::new();
    for (number, stage) in (1..).zip(&stages) {
        let options = Options { existing: Existing::Resume, allow_empty: false, tie_embeddings: false };
        let mut observe = |event: &Event| observe(Progress::Stage { number, n, name: &stage.name, event });
        match sft::train(&stage.run, options, device, &mut observe, interrupted)? {
            sft::Outcome::Interrupted { .. } => return Ok(Outcome::Interrupted),
            sft::Outcome::Done(done) => finished.push((stage.run.out.clone(), done)),
        }
    }
    // A stage goes on from an adapter and writes another one: each is still what its own training wrote.
    for (out, done) in &finished {
        if peft::read(out)?.digest() != done.digest {
            return Err(Error::Other(format!("{}: the adapter changed after its stage was trained", out.display())));
        }
    }
    let mut measured = |number, n| observe(Progress::Measured { number, n });
    let whole = measure::measure(study, &chat, &prepared.scenes, device, &mut measured, interrupted)?;
    Ok(if whole { Outcome::Done } else { Outcome::Interrupted })
}

/// The data of a study, checked.
struct Prepared {
    rows: Vec<Trajectory>,
    scenes: Scenes,
    digest: String, // of the samples that are measured on
}

impl Prepared {
    fn new(study: &Study, chat: &Chat) -> Result<Self> {
        let (rows, valid) = (read_all(&study.data, "data")?, read_all(&study.valid, "valid")?);
        let trained: BTreeMap<&str, &Trajectory> = rows.iter().map(|row| (row.id.as_str(), row)).collect();
        if let Some(row) = valid.iter().find(|row| trained.get(row.id.as_str()).is_some_and(|t| t.messages() == row.messages())) {
            return Err(Error::Other(format!(
                "the trajectory {:?} is in data and in valid: what was trained on is not held back",
                row.id
            )));
        }
        if study.monitor >= valid.len() {
            let why = format!("monitor = {} leaves nothing of the {} trajectories of valid", study.monitor, valid.len());
            return Err(Error::Config { path: study.out.clone(), why });
        }
        let mut rules = study.stage(&study.capabilities[0], study.rank_active, study.data.clone()).rules();
        rules.max_length = rules.max_length.min(hf_config::read(&study.model)?.max_positions);
        let all = |files: &[PathBuf], max_lost: f64, allow_empty: bool| {
            dataset::load(files, chat, &study.capabilities, rules, Tolerance { max_lost, allow_empty })
        };
        let training = all(&study.data, study.train.max_lost, false)?;
        let measured = all(&study.valid, 1.0, true)?;
        let ids: Vec<&str> = valid.iter().map(|row| row.id.as_str()).collect();
        let held = partition::held_apart(study.seed, &ids, study.monitor);
        let set = |held: &bool| if *held { Set::Monitor } else { Set::Valid };
        let sets: BTreeMap<String, Set> = valid.iter().zip(&held).map(|(row, held)| (row.id.clone(), set(held))).collect();
        check_samples(study, &training, &measured, &sets)?;
        let Dataset { samples, digest, .. } = measured;
        Ok(Self { rows, scenes: Scenes { samples, sets }, digest })
    }

    /// Writes the parts of random partition into the study's directory.
    fn write_parts(&self, study: &Study) -> Result<Vec<PathBuf>> {
        let data = study.out.join(DATA);
        fs::create_dir_all(&data).map_err(|e| CoreError::io("can't make", &data, e))?;
        let n_parts = study.capabilities.len();
        let write = |part: usize| {
            let own = self.rows.iter().filter(|row| partition::part(study.seed, &row.id, n_parts) == part);
            let text: String = own.map(|row| serde_json::to_string(row).expect("a trajectory serialises") + "\n").collect();
            let path = plan::part_file(&data, part);
            atomic::write_text(&path, &text)?;
            Ok(path)
        };
        (0..n_parts).map(write).collect()
    }
}

/// Trajectories of several files; their ids tell them apart in parts and records.
fn read_all(files: &[PathBuf], key: &str) -> Result<Vec<Trajectory>> {
    let mut rows = Vec::new();
    for file in files {
        rows.extend(trajectory::read(file)?);
    }
    let mut seen = BTreeSet::new();
    match rows.iter().find(|row| !seen.insert(row.id.as_str())) {
        Some(row) => {
            Err(Error::Other(format!("two trajectories of {key} have the id {:?}; a study tells them apart by it", row.id)))
        }
        None => Ok(rows),
    }
}

/// Every capability has something to train on, in every part, and to measure on, in both sets.
fn check_samples(study: &Study, training: &Dataset, measured: &Dataset, sets: &BTreeMap<String, Set>) -> Result<()> {
    for capability in &study.capabilities {
        let of = |data: &'_ Dataset| -> Vec<String> {
            let own = data.samples.iter().filter(|sample| sample.capability == *capability);
            own.map(|sample| trajectory_of(sample).to_owned()).collect()
        };
        let (trained, held_back) = (of(training), of(measured));
        let dropped = |data: &Dataset| format!("left out: {:?}", data.dropped_by_reason());
        if trained.is_empty() {
            return Err(Error::Other(format!("{capability} has no sample in data ({})", dropped(training))));
        }
        let n_parts = study.capabilities.len();
        let parts: BTreeSet<usize> = trained.iter().map(|id| partition::part(study.seed, id, n_parts)).collect();
        if let Some(part) = (0..n_parts).find(|part| !parts.contains(part)) {
            return Err(Error::Other(format!(
                "random part {part} has no sample of {capability}: there are {} of it for {n_parts} parts; give more data",
                trained.len()
            )));
        }
        let sets: BTreeSet<Set> = held_back.iter().map(|id| sets[id]).collect();
        for (set, key) in [(Set::Valid, "valid without its monitoring subset"), (Set::Monitor, "the monitoring subset")] {
            if !sets.contains(&set) && (set == Set::Valid || study.monitor > 0) {
                return Err(Error::Other(format!("{capability} has no sample in {key} ({})", dropped(measured))));
            }
        }
    }
    Ok(())
}

fn check_directory(study: &Study, existing: Existing) -> Result<()> {
    let out = &study.out;
    let refuse = |why: String| Err(Error::RunDirectory { path: out.clone(), why });
    if is_empty(out)? {
        return Ok(());
    }
    if existing == Existing::Refuse {
        return refuse("is not empty: --resume goes on with the study in it, --overwrite starts again".to_owned());
    }
    let text = fs::read_to_string(out.join(CONFIG)).unwrap_or_default();
    let Ok(old) = toml_text::parse::<Study>(&text) else {
        return refuse(format!("holds no {CONFIG} of a study: it is no study's directory"));
    };
    let differences = study.differences(&old);
    if existing == Existing::Resume && !differences.is_empty() {
        let keys = differences.join(", ");
        return refuse(format!("was begun with other values of {keys}: change them back, or --overwrite"));
    }
    Ok(())
}

/// Makes the directory ready. While the returned handle is open, no other process can write into it.
fn open_directory(study: &Study, existing: Existing) -> Result<File> {
    let out = &study.out;
    let io = |what| move |e| CoreError::io(what, out, e);
    fs::create_dir_all(out).map_err(io("can't make"))?;
    let held = File::open(out).map_err(io("can't open"))?;
    match held.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(Error::RunDirectory { path: out.clone(), why: "another process is writing into it".to_owned() });
        }
        Err(TryLockError::Error(e)) => return Err(io("can't lock")(e).into()),
    }
    check_directory(study, existing)?;
    if existing == Existing::Overwrite {
        for folder in [STAGES, DATA, super::report::DIRECTORY] {
            remove(&out.join(folder), |path| fs::remove_dir_all(path))?;
        }
        for file in [RECORDS, MEASURED] {
            remove(&out.join(file), |path| fs::remove_file(path))?;
        }
    }
    atomic::write_text(&out.join(CONFIG), &study.to_toml())?;
    Ok(held)
}

fn remove(path: &Path, how: impl Fn(&Path) -> std::io::Result<()>) -> Result<()> {
    match how(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(CoreError::io("can't remove", path, e).into()),
        _ => Ok(()),
    }
}

fn is_empty(out: &Path) -> Result<bool> {
    if !out.exists() {
        return Ok(true);
    }
    for entry in fs::read_dir(out).map_err(|e| CoreError::io("can't read", out, e))? {
        if !atomic::is_leftover(&entry.map_err(|e| CoreError::io("can't read", out, e))?.file_name()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes `text` where nothing is; what is there must be the same.
fn keep(path: &Path, text: &str) -> Result<()> {
    match fs::read_to_string(path) {
        Ok(old) if old == text => Ok(()),
        Ok(_) => {
            let why = "was begun with other trajectories of valid: put them back, or --overwrite".to_owned();
            Err(Error::RunDirectory { path: path.parent().unwrap_or(path).to_owned(), why })
        }
        Err(_) => Ok(atomic::write_text(path, text)?),
    }
}

/// The capabilities in the words of a title.
pub(super) fn in_words(order: &[Capability]) -> String {
    order.iter().map(Capability::as_str).collect::<Vec<_>>().join(" → ")
}
