//! JSONL in and out.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use serde::{Serialize, de::DeserializeOwned};
use weact::core::{Error, Result, io::atomic};

/// Reads one `T` a line, with its line number from 1. Empty lines are passed over.
///
/// # Errors
/// If the file can't be read, or a line is no `T`: `path:line: why`.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Result<Vec<(usize, T)>> {
    let text = fs::read_to_string(path).map_err(|e| Error::io("can't read", path, e))?;
    let text = text.trim_start_matches('\u{feff}');
    let parse = |(i, line): (usize, &str)| match serde_json::from_str(line) {
        Ok(value) => Ok((i + 1, value)),
        Err(error) => Err(wrong(path, i + 1, describe(&error))),
    };
    // Strings may hold any other line break.
    text.split('\n').enumerate().filter(|(_, line)| !line.trim().is_empty()).map(parse).collect()
}

/// A fault of one line.
pub(super) fn wrong(path: &Path, line: usize, why: impl Into<String>) -> Error {
    Error::Line { path: path.to_owned(), line, why: why.into() }
}

/// serde's message, without its line number: the text that it read was one line.
fn describe(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split_once(" at line ").map_or(text.clone(), |(why, _)| format!("{why} (column {})", error.column()))
}

/// Writes one value a line, atomically.
///
/// # Errors
/// If the file can't be written.
pub(super) fn write<T: Serialize>(path: &Path, rows: &[T]) -> Result<()> {
    atomic::write(path, |out| {
        for row in rows {
            serde_json::to_writer(&mut *out, row).map_err(io::Error::from)?;
            out.write_all(b"\n")?;
        }
        Ok(())
    })
}
