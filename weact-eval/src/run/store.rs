//! A run directory: `records.jsonl`, `episodes/`, and what the records were made with.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions, TryLockError},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};
use weact_core::{Error as CoreError, episode::Line, io::atomic};

use crate::{Error, Result, record::Record};

/// The resolved configuration.
pub(super) const CONFIG: &str = "config.toml";
/// One record a line.
pub(super) const RECORDS: &str = "records.jsonl";
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
}

/// Reads a run directory's records. A last line that was not finished is left out and counted.
///
/// # Errors
/// If the file can't be read, or a line is no record: `path:line: why`.
pub fn read(dir: &Path) -> Result<(Vec<Record>, usize)> {
    let path = dir.join(RECORDS);
    let text = fs::read_to_string(&path).map_err(|e| CoreError::io("can't read", &path, e))?;
    let (records, whole) = parse(&path, &text)?;
    Ok((records, usize::from(whole < text.len())))
}

/// The records of `text`, and how many of its bytes they are.
fn parse(path: &Path, text: &str) -> Result<(Vec<Record>, usize)> {
    let mut records = Vec::new();
    let mut whole = 0;
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        match serde_json::from_str(line.trim_end()) {
            Ok(record) if line.ends_with('\n') => records.push(record),
            _ if !line.ends_with('\n') => break,
            _ if line.trim().is_empty() => {}
            Ok(_) => unreachable!("a line either ends or not"),
            Err(e) => return Err(CoreError::Line { path: path.to_owned(), line: number, why: e.to_string() }.into()),
        }
        whole += line.len();
    }
    Ok((records, whole))
}

impl Store {
    /// Opens `dir` and writes the resolved configuration, as `config`, into it.
    ///
    /// # Errors
    /// [`Error::RunDirectory`] if it holds something and may not be used, is no evaluation's, or another process writes into it; or if it can't be
    /// read or written.
    pub fn open(dir: &Path, config: &str, existing: Existing) -> Result<Self> {
        let refuse = |why: &str| Err(Error::RunDirectory { path: dir.to_owned(), why: why.to_owned() });
        let io = |what| move |e| CoreError::io(what, dir, e);
        fs::create_dir_all(dir).map_err(io("can't make"))?;
        let lock = File::open(dir).map_err(io("can't open"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return refuse("another process is evaluating into it"),
            Err(TryLockError::Error(e)) => return Err(CoreError::io("can't lock", dir, e).into()),
        }
        let names = fs::read_dir(dir).map_err(io("can't read"))?;
        let names: Vec<_> =
            names.map(|entry| entry.map(|e| e.file_name())).collect::<std::io::Result<_>>().map_err(io("can't read"))?;
        let is_used = names.iter().any(|name| !atomic::is_leftover(name));
        let is_run =
            dir.join(CONFIG).exists() && fs::read_to_string(dir.join(CONFIG)).is_ok_and(|t| t.contains("kind = \"eval\""));
        match existing {
            _ if !is_used => {}
            Existing::Refuse => return refuse("is not empty: --resume makes what is missing, --overwrite starts again"),
            _ if !is_run => return refuse("holds files but no evaluation's config.toml: it is no run directory"),
            Existing::Resume => {}
            Existing::Overwrite => clear(dir)?,
        }
        atomic::write_text(&dir.join(CONFIG), config)?;
        let path = dir.join(RECORDS);
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(|e| CoreError::io("can't open", &path, e))?;
        let mut text = String::new();
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.read_to_string(&mut text))
            .map_err(|e| CoreError::io("can't read", &path, e))?;
        let (records, whole) = parse(&path, &text)?;
        if whole < text.len() {
            file.set_len(whole as u64).map_err(|e| CoreError::io("can't cut", &path, e))?;
        }
        let parts = read_parts(&dir.join(PARTS))?;
        let store = Self { dir: dir.to_owned(), _lock: lock, records, file, parts };
        store.cut_orphans()?;
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

    /// What `name`, a method or a benchmark, is made of: it must be what it was.
    ///
    /// # Errors
    /// If it differs from what earlier records were made with: the message names the keys.
    pub fn same_parts(&mut self, name: &str, parts: &Map<String, Value>) -> Result<()> {
        if let Some(before) = self.parts.get(name) {
            let mut keys: Vec<&str> =
                before.keys().chain(parts.keys()).filter(|key| before.get(*key) != parts.get(*key)).map(String::as_str).collect();
            keys.sort_unstable();
            keys.dedup();
            if !keys.is_empty()
                && self.records.iter().any(|r| name == method_part(&r.method) || name == benchmark_part(&r.benchmark))
            {
                let why =
                    format!("holds records of another {name}: {} changed; use another out, or --overwrite", keys.join(", "));
                return Err(Error::RunDirectory { path: self.dir.clone(), why });
            }
        }
        self.parts.insert(name.to_owned(), parts.clone());
        let text = serde_json::to_string_pretty(&self.parts).expect("parts serialise");
        Ok(atomic::write_text(&self.dir.join(PARTS), &(text + "\n"))?)
    }

    /// Writes a record down, after its episode, so that it survives whatever comes.
    ///
    /// # Errors
    /// If the disk does not take it.
    pub fn push(&mut self, record: Record, episode: &[Line]) -> Result<()> {
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
    pub fn replace(&mut self, records: Vec<Record>) -> Result<()> {
        let path = self.dir.join(RECORDS);
        let before = self.dir.join("records.before-regrade.jsonl");
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

    /// An episode whose record was not written any more is the last of its file: it will be made again.
    fn cut_orphans(&self) -> Result<()> {
        let methods: std::collections::BTreeSet<&str> =
            self.parts.keys().filter_map(|name| name.strip_prefix("method ")).collect();
        for method in methods {
            let path = self.dir.join(EPISODES).join(episode_file(method));
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let known = |episode: &str| self.records.iter().any(|r| r.method == method && r.episode_id() == episode);
            let mut keep = 0;
            let mut at = 0;
            for line in text.split_inclusive('\n') {
                at += line.len();
                let episode: Option<Value> = serde_json::from_str(line).ok();
                if line.ends_with('\n') && episode.as_ref().and_then(|e| e["episode"].as_str()).is_some_and(known) {
                    keep = at;
                }
            }
            if keep < text.len() {
                let file = OpenOptions::new().write(true).open(&path).map_err(|e| CoreError::io("can't open", &path, e))?;
                file.set_len(keep as u64).map_err(|e| CoreError::io("can't cut", &path, e))?;
            }
        }
        Ok(())
    }
}

/// The name under which a method's parts are kept.
pub fn method_part(method: &str) -> String {
    format!("method {method}")
}

/// The name under which a benchmark's parts are kept.
pub fn benchmark_part(benchmark: &str) -> String {
    format!("benchmark {benchmark}")
}

/// The file of a method's episodes: its name in letters that every file system takes.
pub fn episode_file(method: &str) -> String {
    let safe: String = method.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
    let digest = weact_core::io::tensors::hex(&<sha2::Sha256 as sha2::Digest>::digest(method)[..3]);
    format!("{safe}-{digest}.jsonl")
}

fn append(path: &Path, text: &str) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_data()
    };
    Ok(write().map_err(|e| CoreError::io("can't write", path, atomic::with_free_space(e, path, Some(text.len() as u64))))?)
}

fn read_parts(path: &Path) -> Result<BTreeMap<String, Map<String, Value>>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(serde_json::from_str(&text).map_err(|e| CoreError::file(path, e.to_string()))?),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(e) => Err(CoreError::io("can't read", path, e).into()),
    }
}

/// Removes what an evaluation wrote, and nothing else.
fn clear(dir: &Path) -> Result<()> {
    let remove = |path: PathBuf| match fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(CoreError::io("can't remove", &path, e)),
        _ => Ok(()),
    };
    for name in [RECORDS, PARTS, "records.before-regrade.jsonl"] {
        remove(dir.join(name))?;
    }
    let episodes = dir.join(EPISODES);
    if episodes.is_dir() {
        fs::remove_dir_all(&episodes).map_err(|e| CoreError::io("can't remove", &episodes, e))?;
    }
    Ok(())
}
