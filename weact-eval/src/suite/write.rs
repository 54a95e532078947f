//! Tasks in the formats of the eight benchmarks of the paper's main table.

use std::{io::Write, path::Path};

use serde_json::{Map, Value, json};
use weact_core::io::atomic;

use super::cipher::Cipher;
use crate::{Error, Result, benchmark::Benchmark, task::Task};

/// Writes `tasks` as the benchmark's file: reading it gives the same tasks.
///
/// # Errors
/// If the file can't be written, the benchmark is none of the eight, or a task has not exactly one answer or lacks its canary.
pub fn write(benchmark: Benchmark, path: &Path, tasks: &[Task]) -> Result<()> {
    let text = match benchmark {
        Benchmark::Gaia => lines(tasks, |task| row(task, "task_id", "Question", "Final answer"))?,
        Benchmark::MuSiQue => lines(tasks, |task| row(task, "id", "question", "answer"))?,
        Benchmark::WebWalkerQa => lines(tasks, |task| row(task, "id", "question", "answer"))?,
        Benchmark::TwoWiki => {
            let rows = tasks.iter().map(|task| row(task, "_id", "question", "answer")).collect::<Result<Vec<_>>>()?;
            format!("{:#}\n", Value::Array(rows.into_iter().map(Value::Object).collect()))
        }
        Benchmark::Bamboogle => {
            let cells = |task: &Task| Ok(vec![task.id.clone(), task.question.clone(), answer(task)?]);
            table(&["id", "Question", "Answer"], b',', tasks, cells)?
        }
        Benchmark::XbenchDeepSearch => {
            let cells = |task: &Task| {
                let conceal = concealer(benchmark, task)?;
                let steps = text_of(task, "reference_steps")?;
                Ok(vec![
                    task.id.clone(),
                    conceal(&task.question),
                    conceal(&answer(task)?),
                    conceal(steps),
                    canary(task)?.to_owned(),
                ])
            };
            table(&["id", "prompt", "answer", "reference_steps", "canary"], b',', tasks, cells)?
        }
        Benchmark::BrowseComp => {
            let cells = |task: &Task| {
                let conceal = concealer(benchmark, task)?;
                let topic = text_of(task, "problem_topic")?.to_owned();
                Ok(vec![task.id.clone(), conceal(&task.question), conceal(&answer(task)?), topic, canary(task)?.to_owned()])
            };
            table(&["id", "problem", "answer", "problem_topic", "canary"], b',', tasks, cells)?
        }
        Benchmark::Frames => {
            let cells = |task: &Task| {
                let links: Vec<&str> = task
                    .more
                    .get("wiki_links")
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten()
                    .filter_map(Value::as_str)
                    .collect();
                let quoted = links.iter().map(|link| format!("'{link}'")).collect::<Vec<_>>().join(", ");
                let reasoning = text_of(task, "reasoning_types")?.to_owned();
                Ok(vec![task.id.clone(), task.question.clone(), answer(task)?, reasoning, format!("[{quoted}]")])
            };
            table(&["", "Prompt", "Answer", "reasoning_types", "wiki_links"], b'\t', tasks, cells)?
        }
        other => return Err(Error::Other(format!("{other}: tasks are written in the formats of Table 1's benchmarks only"))),
    };
    Ok(atomic::write(path, |file| file.write_all(text.as_bytes()))?)
}

fn answer(task: &Task) -> Result<String> {
    match &task.gold[..] {
        [answer] => Ok(answer.clone()),
        others => Err(Error::Other(format!("task {:?} has {} answers: the format holds one", task.id, others.len()))),
    }
}

fn text_of<'a>(task: &'a Task, key: &str) -> Result<&'a str> {
    task.more.get(key).and_then(Value::as_str).ok_or_else(|| Error::Other(format!("task {:?} has no text {key:?}", task.id)))
}

fn canary(task: &Task) -> Result<&str> {
    text_of(task, "canary")
}

fn concealer(benchmark: Benchmark, task: &Task) -> Result<impl Fn(&str) -> String> {
    let cipher = Cipher::of(benchmark).expect("only obfuscated benchmarks come here");
    let canary = canary(task)?.to_owned();
    Ok(move |text: &str| cipher.conceal(text, &canary))
}

fn row(task: &Task, id: &str, question: &str, gold: &str) -> Result<Map<String, Value>> {
    let Value::Object(mut row) = json!({id: task.id, question: task.question, gold: answer(task)?}) else {
        unreachable!("an object")
    };
    row.extend(task.more.clone());
    Ok(row)
}

fn lines(tasks: &[Task], row: impl Fn(&Task) -> Result<Map<String, Value>>) -> Result<String> {
    tasks.iter().map(|task| Ok(format!("{}\n", Value::Object(row(task)?)))).collect()
}

fn table(header: &[&str], delimiter: u8, tasks: &[Task], cells: impl Fn(&Task) -> Result<Vec<String>>) -> Result<String> {
    let csv = |e: csv::Error| Error::Other(format!("can't write a table: {e}"));
    let quotes = if delimiter == b',' { csv::QuoteStyle::Necessary } else { csv::QuoteStyle::Never };
    let mut writer = csv::WriterBuilder::new().delimiter(delimiter).quote_style(quotes).from_writer(Vec::new());
    writer.write_record(header).map_err(csv)?;
    for task in tasks {
        let cells = cells(task)?;
        if delimiter == b'\t' && cells.iter().any(|cell| cell.contains(['\t', '\n', '\r'])) {
            return Err(Error::Other(format!("task {:?} has a tab or a line break: the format can't hold it", task.id)));
        }
        writer.write_record(&cells).map_err(csv)?;
    }
    let bytes = writer.into_inner().map_err(|e| Error::Other(format!("can't write a table: {e}")))?;
    Ok(String::from_utf8(bytes).expect("cells are text"))
}
