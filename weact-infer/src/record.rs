//! The record of a run: events as JSON lines, each flushed as it happens, so that a crash leaves a valid prefix.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde::de::IgnoredAny;
use weact_core::{
    Error as CoreError, Trajectory,
    episode::{self, Event, Line},
};

use crate::Result;

/// Collects one episode's events, and appends them to a file where there is one.
#[derive(Debug)]
pub struct Recorder {
    episode: String,
    file: Option<(PathBuf, File)>,
    events: Vec<Event>,
}

impl Recorder {
    /// A record in memory.
    pub fn new(episode: String) -> Self {
        Self { episode, file: None, events: Vec::new() }
    }

    /// A record that is appended to `path`. An event that an earlier crash left unfinished at the end of the file is cut off; a line
    /// that lacks nothing but its line break gets it.
    ///
    /// # Errors
    /// If the file can't be opened or written, or ends in the middle of something else than an event.
    pub fn append_to(path: &Path, episode: String) -> Result<Self> {
        let io = |what: &'static str| move |e| CoreError::io(what, path, e);
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(io("can't open"))?;
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut text)).map_err(io("can't read"))?;
        let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        let rest = &text[whole..];
        if serde_json::from_slice::<IgnoredAny>(rest).is_ok() {
            file.write_all(b"\n").map_err(io("can't write"))?;
        } else if !rest.is_empty() {
            if !rest.starts_with(b"{\"episode\":") {
                return Err(CoreError::file(path, "ends in the middle of a line that is no event: is it an episode file?").into());
            }
            file.set_len(whole as u64).map_err(io("can't cut"))?;
        }
        Ok(Self { episode, file: Some((path.to_owned(), file)), events: Vec::new() })
    }

    /// The episode's id.
    pub fn episode(&self) -> &str {
        &self.episode
    }

    /// Writes one event down.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn push(&mut self, event: Event) -> Result<()> {
        if let Some((path, file)) = &mut self.file {
            let line = Line { episode: self.episode.clone(), event: event.clone() };
            let text = format!("{}\n", serde_json::to_string(&line).expect("events serialise"));
            file.write_all(text.as_bytes()).map_err(|e| CoreError::io("can't write", path, e))?;
        }
        self.events.push(event);
        Ok(())
    }

    /// What has happened.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The trajectory that training reads.
    ///
    /// # Errors
    /// If transitions contradict messages.
    pub fn trajectory(&self) -> Result<Trajectory> {
        Ok(episode::view(&self.episode, &self.events)?)
    }
}
