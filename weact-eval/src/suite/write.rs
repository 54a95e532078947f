//! Tasks in the formats of the eight benchmarks of the paper's main table.

use std::{io::Write, path::Path};

use serde_json::{Map, Value};
use weact_core::io::atomic;

use super::{cipher::Cipher, columns, gold, rows};
use crate::{Error, Result, benchmark::Benchmark, task::Task};

/// Writes `tasks` as the benchmark's file: [reading](super::read) it gives the same tasks, which is checked first. Attachments
/// (GAIA) must lie in the file's folder already.
///
/// # Errors
/// If the file can't be written, the benchmark is none of the eight, there is no task, or the format can't hold one of them: several
/// answers, a missing canary, a value that is no text in a table.
pub fn write(benchmark: Benchmark, path: &Path, tasks: &[Task]) -> Result<()> {
    let rows = || tasks.iter().map(|task| row(benchmark, task)).collect::<Result<Vec<_>>>();
    let text = match benchmark {
        Benchmark::Gaia | Benchmark::MuSiQue | Benchmark::WebWalkerQa => {
            rows()?.into_iter().map(|row| format!("{}\n", Value::Object(row))).collect()
        }
        Benchmark::TwoWiki => format!("{:#}\n", Value::Array(rows()?.into_iter().map(Value::Object).collect())),
        Benchmark::Bamboogle | Benchmark::XbenchDeepSearch | Benchmark::BrowseComp => table(&rows()?, b',')?,
        Benchmark::Frames => table(&rows()?, b'\t')?,
        other => return Err(Error::Other(format!("{other}: tasks are written in the formats of Table 1's benchmarks only"))),
    };
    reads_back(benchmark, path, &text, tasks)?;
    Ok(atomic::write(path, |file| file.write_all(text.as_bytes()))?)
}

/// The row of a task under the original's names.
fn row(benchmark: Benchmark, task: &Task) -> Result<Map<String, Value>> {
    let wrong = |why: &str| Error::Other(format!("task {:?} {why}", task.id));
    let answer = task.gold.first().ok_or_else(|| wrong("has no answer"))?;
    let columns = columns(benchmark);
    let own = [(columns.id[0], &task.id), (columns.question[0], &task.question), (columns.answer[0], answer)];
    let mut row: Map<String, Value> = own.into_iter().map(|(key, text)| (key.to_owned(), text.as_str().into())).collect();
    row.extend(task.more.clone());
    if let Some(cipher) = Cipher::of(benchmark) {
        let canary = task.more.get("canary").and_then(Value::as_str).filter(|canary| !canary.is_empty());
        let canary = canary.ok_or_else(|| wrong("has no canary to obfuscate it with"))?;
        for key in [columns.question[0], columns.answer[0]].iter().chain(columns.secret) {
            if let Some(value) = row.get_mut(*key) {
                let text = value.as_str().ok_or_else(|| wrong(&format!("needs text under {key:?}")))?;
                *value = cipher.conceal(text, canary).into();
            }
        }
    }
    if let (Benchmark::Frames, Some(Value::Array(links))) = (benchmark, row.get("wiki_links")) {
        let links: Option<Vec<&str>> = links.iter().map(Value::as_str).collect();
        let links = gold::as_python_list(&links.ok_or_else(|| wrong("needs a list of texts under \"wiki_links\""))?);
        row.insert("wiki_links".to_owned(), links.into());
    }
    Ok(row)
}

/// A table whose columns are the first row's keys.
fn table(rows: &[Map<String, Value>], delimiter: u8) -> Result<String> {
    let wrong = |e: &dyn std::fmt::Display| Error::Other(format!("can't write a table: {e}"));
    let mut writer = csv::WriterBuilder::new().delimiter(delimiter).from_writer(Vec::new());
    let header: Vec<&String> = rows.first().into_iter().flat_map(Map::keys).collect();
    writer.write_record(&header).map_err(|e| wrong(&e))?;
    for (number, row) in (1..).zip(rows) {
        let cell = |key: &&String| row.get(key.as_str()).and_then(Value::as_str);
        let cells = header.iter().map(cell).collect::<Option<Vec<_>>>().filter(|cells| cells.len() == row.len());
        let cells = cells.ok_or_else(|| wrong(&format!("row {number} does not have exactly the texts {header:?}")))?;
        writer.write_record(cells).map_err(|e| wrong(&e))?;
    }
    let bytes = writer.into_inner().map_err(|e| wrong(&e))?;
    Ok(String::from_utf8(bytes).expect("cells are text"))
}

/// Whether `text` as the content of `path` gives `tasks`. The messages hold no text of a task.
fn reads_back(benchmark: Benchmark, path: &Path, text: &str, tasks: &[Task]) -> Result<()> {
    let wrong = |why: &str| Error::Other(format!("tasks can't be written in the format of {benchmark}: {why}"));
    let rows = rows::parse(path, text).map_err(|e| wrong(&e.to_string()))?;
    let read = super::tasks(benchmark, path, vec![(path.to_owned(), rows)]).map_err(|e| wrong(&e.to_string()))?;
    if read.len() != tasks.len() {
        return Err(wrong(&format!("{} of {} would come back", read.len(), tasks.len())));
    }
    let Some((task, read)) = tasks.iter().zip(&read).find(|(task, read)| task != read) else { return Ok(()) };
    let what = match task {
        _ if task.id != read.id => "id",
        _ if task.question != read.question => "question",
        _ if task.gold != read.gold => "answers",
        _ if task.files != read.files => "files",
        _ => "further values",
    };
    Err(wrong(&format!("the {what} of task {:?} would come back changed", task.id)))
}
