//! Files of rows: JSON, JSONL, CSV, TSV and parquet.

use std::{collections::HashSet, fs, path::Path};

use serde_json::{Map, Number, Value};

use super::parquet;
use crate::{Error, Result};

/// From here on not every whole number has a float of its own, and JSON's larger numbers are read as floats.
const FIRST_INEXACT: f64 = 9_007_199_254_740_992.0;

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

    /// The first of `keys` that the row has with a value other than null, as text.
    pub(super) fn text(&self, keys: &[&str]) -> Result<Option<String>> {
        let found = keys.iter().find_map(|key| Some((key, self.fields.get(*key).filter(|value| !value.is_null())?)));
        let Some((key, value)) = found else { return Ok(None) };
        let text = match value {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => written(number),
            other => Err(format!("is {}: expected text or a number", kind(other))),
        };
        text.map(Some).map_err(|why| self.error(format!("{key:?} {why}")))
    }

    /// [`Row::text`] of a key without which the row is none.
    pub(super) fn need(&self, what: &str, keys: &[&str]) -> Result<String> {
        self.text(keys)?.ok_or_else(|| {
            let known: Vec<&str> = self.fields.keys().map(String::as_str).collect();
            let wanted = keys.iter().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(" or ");
            self.error(format!("no {what}: expected text or a number under {wanted}, the keys are {}", known.join(", ")))
        })
    }

    /// A list of texts; empty where the row has none.
    pub(super) fn texts(&self, key: &str) -> Result<Vec<&str>> {
        let items = match self.fields.get(key) {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::Array(items)) => items.iter().map(Value::as_str).collect(),
            Some(_) => None,
        };
        items.ok_or_else(|| self.error(format!("{key:?} must be a list of texts")))
    }
}

/// A number as text, or why that would be another number.
pub(super) fn written(number: &Number) -> std::result::Result<String, String> {
    let is_exact = !number.is_f64() || number.as_f64().is_some_and(|x| x.abs() < FIRST_INEXACT);
    if is_exact { Ok(number.to_string()) } else { Err("is a number too large to be read exactly: write it as text".to_owned()) }
}

/// What a value is, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Reads all rows of a file; its name says the format.
pub(super) fn read(path: &Path) -> Result<Vec<Row>> {
    if extension(path) == "parquet" {
        return parquet::read(path);
    }
    let bytes = fs::read(path).map_err(|e| weact_core::Error::io("can't read", path, e))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let line = line_of(e.as_bytes(), e.utf8_error().valid_up_to());
        at(path, line, "is not UTF-8")
    })?;
    parse(path, &text)
}

/// The rows of `text`, the content of `path`.
pub(super) fn parse(path: &Path, text: &str) -> Result<Vec<Row>> {
    if let Some(position) = text.find('\0') {
        return Err(at(path, line_of(text.as_bytes(), position), "holds a NUL character: is the file damaged, or UTF-16?"));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let rows = match extension(path).as_str() {
        "json" if text.trim_start().starts_with('[') => array(path, text),
        "json" | "jsonl" => lines(path, text),
        "csv" => table(path, text, ','),
        "tsv" => table(path, text, '\t'),
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

fn extension(path: &Path) -> String {
    path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase()
}

fn line_of(bytes: &[u8], position: usize) -> usize {
    1 + bytes[..position].iter().filter(|b| **b == b'\n').count()
}

fn at(path: &Path, line: usize, why: impl std::fmt::Display) -> Error {
    weact_core::Error::Line { path: path.to_owned(), line, why: why.to_string() }.into()
}

fn array(path: &Path, text: &str) -> Result<Vec<Row>> {
    let rows: Vec<Value> = serde_json::from_str(text).map_err(|e| at(path, e.line(), described(&e)))?;
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
        let value = serde_json::from_str(line).map_err(|e| at(path, number, described(&e)))?;
        let place = format!("{}:{number}", path.display());
        rows.push(Row { fields: object(value, &place)?, place });
    }
    Ok(rows)
}

/// A JSON error without its own line, which in JSONL is always 1.
fn described(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    let cut_off = if error.is_eof() { ": is the file cut off?" } else { "" };
    format!("{what} at column {}{cut_off}", error.column())
}

fn object(value: Value, place: &str) -> Result<Map<String, Value>> {
    match value {
        Value::Object(fields) => Ok(fields),
        other => Err(Error::Other(format!("{place}: expected an object, found {}", kind(&other)))),
    }
}

fn table(path: &Path, text: &str, delimiter: char) -> Result<Vec<Row>> {
    check_quotes(path, text, delimiter)?;
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter as u8).from_reader(text.as_bytes());
    let describe = |e: csv::Error| {
        let line = e.position().map_or(1, csv::Position::line);
        at(path, usize::try_from(line).unwrap_or(usize::MAX), e)
    };
    let header = reader.headers().map_err(describe)?.clone();
    let mut names = HashSet::new();
    if let Some(name) = header.iter().find(|name| !names.insert(*name)) {
        return Err(at(path, 1, format!("two columns are named {name:?}")));
    }
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(describe)?;
        let line = record.position().map_or(0, csv::Position::line);
        let fields = header.iter().zip(&record).map(|(key, value)| (key.to_owned(), Value::from(value))).collect();
        rows.push(Row { place: format!("{}:{line}", path.display()), fields });
    }
    Ok(rows)
}

/// Refuses what a lenient reader takes for a part of the field before: a quotation mark that is not closed, and text after one that
/// is. Inside a field that doesn't begin with one, a mark is a character as any other.
fn check_quotes(path: &Path, text: &str, delimiter: char) -> Result<()> {
    let is_end = |c: char| c == delimiter || c == '\n' || c == '\r';
    let (mut line, mut opened_at, mut is_start) = (1, None, true);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match opened_at {
            Some(_) if c == '"' && chars.next_if_eq(&'"').is_none() => {
                opened_at = None;
                if chars.peek().is_some_and(|next| !is_end(*next)) {
                    return Err(at(path, line, "text after a closing quotation mark: inside a quoted field, marks are doubled"));
                }
            }
            None if c == '"' && is_start => opened_at = Some(line),
            _ => {}
        }
        is_start = is_end(c);
        line += usize::from(c == '\n');
    }
    opened_at.map_or(Ok(()), |line| Err(at(path, line, "a quotation mark is not closed: is the file cut off?")))
}
