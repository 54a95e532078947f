//! The public benchmarks' files as [`Task`]s, and the toy world's tasks in the same formats.
//!
//! What a row holds beyond id, question and answer stays in [`Task::more`] under the row's own names: graders and reports know it by
//! them. Several public forms of a benchmark are read: the original one, and those in which its rows are passed on with other names
//! for the same columns. The questions of WebDancer and WebShaper have WebWalkerQA's columns and its judge, and are read as that
//! benchmark's. Nothing is skipped: a row that can't be read is an error with its place.

pub mod cipher;
mod complete;
mod gold;
mod parquet;
mod rows;
mod write;

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{Result, benchmark::Benchmark, task::Task};
use cipher::Cipher;
use rows::Row;
pub use write::write;

/// The names under which the public forms of a benchmark hold the same thing, the original's first.
struct Columns {
    id: &'static [&'static str],
    question: &'static [&'static str],
    /// Empty where answers are judged without a reference.
    answer: &'static [&'static str],
    /// What is obfuscated beside question and answer where the benchmark is.
    secret: &'static [&'static str],
}

const fn columns(benchmark: Benchmark) -> Columns {
    let (id, question, answer): (&[&str], &[&str], &[&str]) = match benchmark {
        Benchmark::Gaia => (&["task_id", "id"], &["Question", "question"], &["Final answer", "answer"]),
        Benchmark::TwoWiki => (&["_id", "id", "idx"], &["question", "Question"], &["answer"]),
        Benchmark::Bamboogle => (&["id", "idx"], &["Question", "question"], &["Answer", "answer"]),
        Benchmark::MuSiQue => (&["id", "idx"], &["question", "Question"], &["answer"]),
        Benchmark::WebWalkerQa => (&["id"], &["question", "Question"], &["answer", "Answer"]),
        Benchmark::XbenchDeepSearch => (&["id"], &["prompt"], &["answer"]),
        Benchmark::BrowseComp => (&["id"], &["problem", "Question"], &["answer", "Answer"]),
        Benchmark::Frames => (&["", "id"], &["Prompt", "Question", "question"], &["Answer", "answer"]),
        Benchmark::MegaScience => (&["id"], &["question"], &["reference_answer", "answer"]),
        Benchmark::SciBench => (&[], &["problem_text"], &["answer_number"]),
        Benchmark::Ds1000 => (&["problem_id"], &["prompt"], &[]),
        Benchmark::ResearchQa => (&["id"], &["query"], &[]),
        Benchmark::DeepResearchBench => (&["id"], &["prompt"], &[]),
        Benchmark::MmluPro => (&["question_id"], &["question"], &["answer"]),
        Benchmark::IfEval => (&["key"], &["prompt"], &[]),
    };
    let secret: &[&str] = if matches!(benchmark, Benchmark::XbenchDeepSearch) { &["reference_steps"] } else { &[] };
    Columns { id, question, answer, secret }
}

/// Reads a benchmark's file, or the folder where it is several: `dev.json` with `id_aliases.json` (2Wiki), `metadata.jsonl` or
/// `metadata.parquet` with attachments (GAIA), the subjects (SciBench), `query.jsonl` with `criteria.jsonl` and, where it is there,
/// `reference.jsonl` (DeepResearch Bench). The same files beside a single one are read with it.
///
/// # Errors
/// If a file can't be read or holds no row, a row lacks what its benchmark needs, an id occurs twice, or an attachment is missing: each
/// with its place. The messages hold no plain text of an obfuscated benchmark.
pub fn read(benchmark: Benchmark, path: &Path) -> Result<Vec<Task>> {
    let read = |file: PathBuf| rows::read(&file).map(|rows| (file, rows));
    let files = files(benchmark, path)?.into_iter().map(read).collect::<Result<Vec<_>>>()?;
    tasks(benchmark, path, files)
}

/// The tasks of `files` and their rows; `path` is what was asked for.
fn tasks(benchmark: Benchmark, path: &Path, files: Vec<(PathBuf, Vec<Row>)>) -> Result<Vec<Task>> {
    let mut tasks = Vec::new();
    let mut seen = HashMap::new();
    for (file, rows) in files {
        for row in rows {
            let task = task(benchmark, &file, &row)?;
            if let Some(before) = seen.insert(task.id.clone(), row.place.clone()) {
                return Err(row.error(format!("id {:?} stands at {before} already", task.id)));
            }
            tasks.push(task);
        }
    }
    complete::complete_from_folder(benchmark, path, &mut tasks)?;
    Ok(tasks)
}

/// What the official prompt adds to a question.
pub fn question_suffix(benchmark: Benchmark) -> Option<&'static str> {
    match benchmark {
        Benchmark::BrowseComp => Some(
            "\n\nYour response should be in the following format:\nExplanation: {your explanation for your final answer}\n\
             Exact Answer: {your succinct, final answer}\nConfidence: {your confidence score between 0% and 100% for your answer}",
        ),
        _ => None,
    }
}

/// The files of rows.
fn files(benchmark: Benchmark, path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let name = match benchmark {
        Benchmark::Gaia if path.join("metadata.parquet").is_file() && !path.join("metadata.jsonl").is_file() => {
            "metadata.parquet"
        }
        Benchmark::Gaia => "metadata.jsonl",
        Benchmark::TwoWiki => "dev.json",
        Benchmark::DeepResearchBench => "query.jsonl",
        Benchmark::SciBench => return subjects(path),
        _ => return Err(weact_core::Error::file(path, format!("is a folder: {benchmark} is one file")).into()),
    };
    Ok(vec![path.join(name)])
}

/// SciBench's problem files. Those with solutions hold other problems, which the official evaluation shows as examples: they are no
/// tasks unless asked for by name.
fn subjects(dir: &Path) -> Result<Vec<PathBuf>> {
    let io = |e| weact_core::Error::io("can't read", dir, e);
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(".json") && !name.ends_with("_sol.json") {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(weact_core::Error::file(dir, "holds no .json file of problems").into());
    }
    Ok(files)
}

fn task(benchmark: Benchmark, file: &Path, row: &Row) -> Result<Task> {
    let columns = columns(benchmark);
    let question = plain(benchmark, row, "the question", &row.need("question", columns.question)?)?;
    let gold = match columns.answer {
        [] => Vec::new(),
        keys => gold::answers(row, keys)?,
    };
    let gold = gold.iter().map(|answer| plain(benchmark, row, "the answer", answer)).collect::<Result<Vec<_>>>()?;
    let used = [columns.id, columns.question, columns.answer].concat();
    let mut more: Map<String, Value> =
        row.fields.iter().filter(|(key, _)| !used.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect();
    for key in columns.secret {
        if let Some(field) = row.text(&[key])? {
            more.insert((*key).to_owned(), plain(benchmark, row, key, &field)?.into());
        }
    }
    let id = row.text(columns.id)?.map(|id| id.trim().to_owned()).filter(|id| !id.is_empty());
    let mut task = Task { id: id.unwrap_or_else(|| digest(&question)), question, gold, files: Vec::new(), more };
    if task.question.trim().is_empty() {
        return Err(row.error("the question is empty"));
    }
    complete::complete(benchmark, file, row, &mut task)?;
    Ok(task)
}

/// The id of a question that has none: the first 16 digits of its SHA-256.
fn digest(question: &str) -> String {
    weact_core::io::tensors::hex(&Sha256::digest(question)[..8])
}

/// The text of a field that is obfuscated where the benchmark is.
fn plain(benchmark: Benchmark, row: &Row, what: &str, field: &str) -> Result<String> {
    let Some(cipher) = Cipher::of(benchmark) else { return Ok(field.to_owned()) };
    let canary = row.need("canary", &["canary"])?;
    let text = cipher.reveal(field, &canary).map_err(|why| row.error(format!("{what} {why}")))?;
    // With a wrong key, text may come out of text: but hardly without control characters.
    if text.chars().any(|c| c.is_ascii_control() && !matches!(c, '\n' | '\r' | '\t')) {
        return Err(row.error(format!("{what} can't be decoded with this row's canary")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
