//! Files of rows: JSON, JSONL, CSV, TSV and parquet.

use std::{fs, path::Path};

use serde_json::{Map, Value};

use super::parquet;
use crate::{Error, Result};

/// One row with its place.
#[derive(Debug)]
pub(super) struct Row {
    /// `path:line` where the format has lines, else `path: row N`.
    pub(super) place: String,
    /// Its columns or keys.
    pub(super) fields: Map<String, Value>,
}

impl Row {
    /// An error at this row.
    pub(super) fn error(&self, why: impl std::fmt::Display) -> Error {
        Error::Other(format!("{}: {why}", self.place))
    }

    /// The first of `keys` that the row has with a value, as text; numbers as they are written.
    pub(super) fn text(&self, keys: &[&str]) -> Option<String> {
        keys.iter().find_map(|key| match self.fields.get(*key)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        })
    }

    /// [`Row::text`] of a key without which the row is none.
    pub(super) fn need(&self, what: &str, keys: &[&str]) -> Result<String> {
        self.text(keys).ok_or_else(|| {
            let known: Vec<&str> = self.fields.keys().map(String::as_str).collect();
            let wanted = keys.iter().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(" or ");
            self.error(format!("no {what}: expected text or a number under {wanted}, the keys are {}", known.join(", ")))
        })
    }
}

/// Reads all rows of a file; its name says the format.
pub(super) fn read(path: &Path) -> Result<Vec<Row>> {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase();
    if extension == "parquet" {
        return parquet::read(path);
    }
    let bytes = fs::read(path).map_err(|e| weact_core::Error::io("can't read", path, e))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let line = 1 + e.as_bytes()[..e.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count();
        at(path, line, "is not UTF-8")
    })?;
    let text = text.trim_start_matches('\u{feff}');
    let rows = match extension.as_str() {
        "json" if text.trim_start().starts_with('[') => array(path, text),
        "json" | "jsonl" => lines(path, text),
        "csv" => table(path, text, b','),
        "tsv" => table(path, text, b'\t'),
        _ => {
            let name = path.display();
            Err(Error::Other(format!("{name}: unknown format: use .json, .jsonl, .csv, .tsv or .parquet (unpack .gz first)")))
        }
    }?;
    if rows.is_empty() {
        return Err(weact_core::Error::file(path, "has no rows").into());
    }
    Ok(rows)
}

fn at(path: &Path, line: usize, why: impl std::fmt::Display) -> Error {
    Error::Other(format!("{}:{line}: {why}", path.display()))
}

fn array(path: &Path, text: &str) -> Result<Vec<Row>> {
    let rows: Vec<Value> = serde_json::from_str(text).map_err(|e| at(path, e.line(), e))?;
    let row = |(number, value): (usize, Value)| {
        let place = format!("{}: row {number}", path.display());
        object(value, &place).map(|fields| Row { place, fields })
    };
    (1..).zip(rows).map(row).collect()
}

/// Split at line feeds only: other separators may stand inside a string.
fn lines(path: &Path, text: &str) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (number, line) in (1..).zip(text.split('\n')).filter(|(_, line)| !line.trim().is_empty()) {
        let value = serde_json::from_str(line).map_err(|e| at(path, number, e))?;
        let place = format!("{}:{number}", path.display());
        rows.push(Row { fields: object(value, &place)?, place });
    }
    Ok(rows)
}

fn object(value: Value, place: &str) -> Result<Map<String, Value>> {
    match value {
        Value::Object(fields) => Ok(fields),
        other => {
            let short: String = other.to_string().chars().take(40).collect();
            Err(Error::Other(format!("{place}: expected an object, found {short}")))
        }
    }
}

fn table(path: &Path, text: &str, delimiter: u8) -> Result<Vec<Row>> {
    if text.matches('"').count() % 2 == 1 && delimiter == b',' {
        let line = text.lines().count();
        return Err(at(path, line, "a quotation mark is not closed: is the file cut off?"));
    }
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).quoting(delimiter == b',').from_reader(text.as_bytes());
    let describe = |e: csv::Error| {
        let line = e.position().map_or(1, csv::Position::line);
        at(path, usize::try_from(line).unwrap_or(usize::MAX), e)
    };
    let header = reader.headers().map_err(describe)?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(describe)?;
        let line = record.position().map_or(0, csv::Position::line);
        let fields = header.iter().zip(&record).map(|(key, value)| (key.to_owned(), Value::from(value))).collect();
        rows.push(Row { place: format!("{}:{line}", path.display()), fields });
    }
    Ok(rows)
}
