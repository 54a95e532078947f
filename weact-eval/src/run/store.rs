//! A run directory: `records.jsonl`, `episodes/`, and what the records were made with.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use weact_core::{
    Error as CoreError,
    episode::Line,
    io::{atomic, tensors::hex},
};

use crate::{
    Error, Result,
    record::{self, Record},
};

/// The resolved configuration.
const CONFIG: &str = "config.toml";
/// One record a line.
const RECORDS: &str = "records.jsonl";
/// What a regrading replaced.
const BEFORE_REGRADE: &str = "records.before-regrade.jsonl";
/// What methods and benchmarks are, so that a change is named.
const PARTS: &str = "parts.json";
/// Where episodes go, one file a method.
const EPISODES: &str = "episodes";

/// What to do with a directory that holds something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Refuse.
    Refuse,
    /// Make what is missing.
    Resume,
    /// Remove what an earlier evaluation wrote and start again.
    Overwrite,
}

/// An open run directory. While it is open no other process can write into it.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    _lock: File,
    records: Vec<Record>,
    file: File,
    /// By method and by benchmark.
    parts: BTreeMap<String, Map<String, Value>>,
    /// The configuration of a resumed run, until it is known that the records are its own.
    config: Option<String>,
}

/// Reads a run directory's records. A last line that was not finished is left out and counted.
///
/// # Errors
/// If the file can't be read, or a line is no record: `path:line: why`.
pub fn read(dir: &Path) -> Result<(Vec<Record>, usize)> {
    let path = dir.join(RECORDS);
    let bytes = fs::read(&path).map_err(|e| CoreError::io("can't read", &path, e))?;
    let (records, whole) = parse(&path, &bytes)?;
    Ok((records, usize::from(whole < bytes.len())))
}

/// The records in `bytes`, and how many of the bytes are theirs: a torn line may end within a letter.
fn parse(path: &Path, bytes: &[u8]) -> Result<(Vec<Record>, usize)> {
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let mut records = Vec::new();
    for (number, line) in (1..).zip(bytes[..whole].split(|byte| *byte == b'\n')) {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let wrong = |why: String| CoreError::Line { path: path.to_owned(), line: number, why };
        let record: Record = serde_json::from_slice(line).map_err(|e| wrong(e.to_string()))?;
        if record.v != record::VERSION {
            return Err(wrong(format!("a record of version {}: this weact reads version {}", record.v, record::VERSION)).into());
        }
        records.push(record);
    }
    Ok((records, whole))
}

impl Store {
    /// Whether an evaluation may use `dir`; changes nothing.
    ///
    /// # Errors
    /// [`Error::RunDirectory`] if it holds something and may not be used, or is no evaluation's.
    pub fn check(dir: &Path, existing: Existing) -> Result<()> {
        let refuse = |why: &str| Err(Error::RunDirectory { path: dir.to_owned(), why: why.to_owned() });
        if !dir.exists() || names(dir)?.iter().all(|name| atomic::is_leftover(name)) {
            return Ok(());
        }
        if existing == Existing::Refuse {
            return refuse("is not empty: --resume makes what is missing, --overwrite starts again");
        }
        match fs::read_to_string(dir.join(CONFIG)) {
            Ok(config) if config.contains("kind = \"eval\"") => Ok(()),
            _ => refuse("holds files but no evaluation's config.toml: it is no run directory"),
        }
    }

    /// Opens `dir`. The resolved configuration, as `config`, is written into it: into that of an earlier run when it goes on.
    ///
    /// # Errors
    /// As [`check`](Self::check), or [`Error::RunDirectory`] if another process writes into it; or if it can't be read or written.
    pub fn open(dir: &Path, config: &str, existing: Existing) -> Result<Self> {
        let io = |what| move |e| CoreError::io(what, dir, e);
        fs::create_dir_all(dir).map_err(io("can't make"))?;
        let lock = File::open(dir).map_err(io("can't open"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let why = "another process is evaluating into it".to_owned();
                return Err(Error::RunDirectory { path: dir.to_owned(), why });
            }
            Err(TryLockError::Error(e)) => return Err(io("can't lock")(e).into()),
        }
        Self::check(dir, existing)?;
        sweep(dir)?;
        if existing == Existing::Overwrite {
            clear(dir)?;
        }
        let goes_on = existing == Existing::Resume && dir.join(CONFIG).exists();
        if !goes_on {
            atomic::write_text(&dir.join(CONFIG), config)?;
        }
        let path = dir.join(RECORDS);
        let file = OpenOptions::new().append(true).create(true).open(&path).map_err(|e| CoreError::io("can't open", &path, e))?;
        let bytes = fs::read(&path).map_err(|e| CoreError::io("can't read", &path, e))?;
        let (records, whole) = parse(&path, &bytes)?;
        if whole < bytes.len() {
            file.set_len(whole as u64).map_err(|e| CoreError::io("can't cut", &path, e))?;
        }
        let parts = read_parts(&dir.join(PARTS))?;
        let config = goes_on.then(|| config.to_owned());
        let store = Self { dir: dir.to_owned(), _lock: lock, records, file, parts, config };
        store.remove_orphans()?;
        Ok(store)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The records so far.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// What `name`, a method or a benchmark, was.
    ///
    /// # Errors
    /// [`Error::RunDirectory`] if the directory does not say.
    pub(super) fn parts(&self, name: &str) -> Result<&Map<String, Value>> {
        let why = || format!("holds records of {name}, but {PARTS} does not say what it was; use another out, or --overwrite");
        self.parts.get(name).ok_or_else(|| Error::RunDirectory { path: self.dir.clone(), why: why() })
    }

    /// Whether `name`, a method or a benchmark, is what it was when earlier records were made. What nothing was said of before, such
    /// as tools on another benchmark, is no difference.
    ///
    /// # Errors
    /// [`Error::RunDirectory`] if it is not: the message names the keys.
    pub(super) fn check_parts(&self, name: &str, parts: &Map<String, Value>) -> Result<()> {
        if !self.has_records(name) {
            return Ok(());
        }
        let before = self.parts(name)?;
        let mut changed = Vec::new();
        for (key, value) in parts {
            if let Some(before) = before.get(key) {
                differences(key, before, value, &mut changed);
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        let why = format!("holds records of another {name}: {} changed; use another out, or --overwrite", changed.join(", "));
        Err(Error::RunDirectory { path: self.dir.clone(), why })
    }

    /// Writes down what methods and benchmarks are, and the configuration: the records that follow are theirs.
    ///
    /// # Errors
    /// If the disk does not take it.
    pub(super) fn accept(&mut self, parts: impl Iterator<Item = (String, Map<String, Value>)>) -> Result<()> {
        for (name, parts) in parts {
            if !self.has_records(&name) {
                self.parts.remove(&name);
            }
            self.parts.entry(name).or_default().extend(parts);
        }
        let text = serde_json::to_string_pretty(&self.parts).expect("parts serialise");
        atomic::write_text(&self.dir.join(PARTS), &(text + "\n"))?;
        if let Some(config) = self.config.take() {
            atomic::write_text(&self.dir.join(CONFIG), &config)?;
        }
        Ok(())
    }

    fn has_records(&self, name: &str) -> bool {
        self.records.iter().any(|r| name == method_part(&r.method) || name == benchmark_part(&r.benchmark))
    }

    /// Writes a record down, after its episode, so that it survives whatever comes.
    ///
    /// # Errors
    /// If the disk does not take it.
    pub(super) fn push(&mut self, record: Record, episode: &[Line]) -> Result<()> {
        if !episode.is_empty() {
            let path = self.episodes_of(&record.method)?;
            let text: String = episode.iter().map(|line| serde_json::to_string(line).expect("events serialise") + "\n").collect();
            append(&path, &text)?;
        }
        let line = serde_json::to_string(&record).expect("records serialise") + "\n";
        let path = self.dir.join(RECORDS);
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|e| CoreError::io("can't write", &path, atomic::with_free_space(e, &path, Some(line.len() as u64))))?;
        self.records.push(record);
        Ok(())
    }

    /// Replaces the records, keeping the old ones beside them as `records.before-regrade.jsonl`.
    ///
    /// # Errors
    /// If the disk does not take them.
    pub(super) fn replace(&mut self, records: Vec<Record>) -> Result<()> {
        let path = self.dir.join(RECORDS);
        let before = self.dir.join(BEFORE_REGRADE);
        let lines = |records: &[Record]| -> String {
            records.iter().map(|r| serde_json::to_string(r).expect("records serialise") + "\n").collect()
        };
        atomic::write_text(&before, &lines(&self.records))?;
        atomic::write_text(&path, &lines(&records))?;
        self.file = OpenOptions::new().append(true).open(&path).map_err(|e| CoreError::io("can't open", &path, e))?;
        self.records = records;
        Ok(())
    }

    fn episodes_of(&self, method: &str) -> Result<PathBuf> {
        let dir = self.dir.join(EPISODES);
        fs::create_dir_all(&dir).map_err(|e| CoreError::io("can't make", &dir, e))?;
        Ok(dir.join(episode_file(method)))
    }

    /// Removes episodes whose record was not written any more, as after a kill between the two: their attempts are made again.
    fn remove_orphans(&self) -> Result<()> {
        let mut known: BTreeMap<&str, HashSet<String>> = BTreeMap::new();
        for name in self.parts.keys() {
            known.extend(name.strip_prefix(METHOD).map(|method| (method, HashSet::new())));
        }
        for record in &self.records {
            known.entry(&record.method).or_default().insert(record.episode_id());
        }
        for (method, ids) in known {
            let path = self.dir.join(EPISODES).join(episode_file(method));
            let bytes = match fs::read(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                read => read.map_err(|e| CoreError::io("can't read", &path, e))?,
            };
            let is_known = |line: &&[u8]| {
                line.ends_with(b"\n") && serde_json::from_slice::<Head>(line).is_ok_and(|head| ids.contains(&head.episode))
            };
            let kept: Vec<&[u8]> = bytes.split_inclusive(|byte| *byte == b'\n').filter(is_known).collect();
            if kept.iter().map(|line| line.len()).sum::<usize>() < bytes.len() {
                atomic::write(&path, |out| kept.iter().try_for_each(|line| out.write_all(line)))?;
            }
        }
        Ok(())
    }
}

/// The part of an episode's line that says whose it is.
#[derive(Deserialize)]
struct Head {
    episode: String,
}

const METHOD: &str = "method ";

/// The name under which a method's parts are kept.
pub(super) fn method_part(method: &str) -> String {
    format!("{METHOD}{method}")
}

/// The name under which a benchmark's parts are kept.
pub(super) fn benchmark_part(benchmark: &str) -> String {
    format!("benchmark {benchmark}")
}

/// The file of a method's episodes: its name in letters that every file system takes.
pub fn episode_file(method: &str) -> String {
    let safe: String = method.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
    let digest = hex(&Sha256::digest(method)[..3]);
    format!("{safe}-{digest}.jsonl")
}

/// The keys at which two values differ, as `agent.max_new`; what is absent is null.
fn differences(key: &str, before: &Value, now: &Value, found: &mut Vec<String>) {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            let keys: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
            for inner in keys {
                let of = |map: &Map<String, Value>| map.get(inner).cloned().unwrap_or_default();
                differences(&format!("{key}.{inner}"), &of(before), &of(now), found);
            }
        }
        _ if before != now => found.push(key.to_owned()),
        _ => {}
    }
}

fn append(path: &Path, text: &str) -> Result<()> {
    let is_new = !path.exists();
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_data()?;
        match path.parent().filter(|_| is_new) {
            // A file whose folder is not synced may be gone after a power cut; so may the folder.
            Some(folder) => [Some(folder), folder.parent()].into_iter().flatten().try_for_each(|dir| File::open(dir)?.sync_all()),
            None => Ok(()),
        }
    };
    Ok(write().map_err(|e| CoreError::io("can't write", path, atomic::with_free_space(e, path, Some(text.len() as u64))))?)
}

/// The names of what is in `dir`.
fn names(dir: &Path) -> Result<Vec<OsString>> {
    let entries = fs::read_dir(dir).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
    Ok(entries.map_err(|e| CoreError::io("can't read", dir, e))?)
}

/// Removes what interrupted writes left.
fn sweep(dir: &Path) -> Result<()> {
    for dir in [dir.to_owned(), dir.join(EPISODES)].iter().filter(|dir| dir.is_dir()) {
        for name in names(dir)?.iter().filter(|name| atomic::is_leftover(name)) {
            remove(&dir.join(name))?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(CoreError::io("can't remove", path, e).into()),
        _ => Ok(()),
    }
}

fn read_parts(path: &Path) -> Result<BTreeMap<String, Map<String, Value>>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(serde_json::from_str(&text).map_err(|e| CoreError::file(path, e.to_string()))?),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(e) => Err(CoreError::io("can't read", path, e).into()),
    }
}

/// Removes what an evaluation wrote, and nothing else.
fn clear(dir: &Path) -> Result<()> {
    for name in [RECORDS, PARTS, BEFORE_REGRADE] {
        remove(&dir.join(name))?;
    }
    let episodes = dir.join(EPISODES);
    if episodes.is_dir() {
        fs::remove_dir_all(&episodes).map_err(|e| CoreError::io("can't remove", &episodes, e))?;
    }
    Ok(())
}
