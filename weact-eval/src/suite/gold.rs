//! Accepted answers and lists as rows write them.

use serde_json::Value;

use super::rows::Row;
use crate::Result;

/// The accepted answers under the first of `keys` that holds one: a text, a number, or lists of these, however deep.
pub(super) fn answers(row: &Row, keys: &[&str]) -> Result<Vec<String>> {
    let mut answers = Vec::new();
    for value in keys.iter().filter_map(|key| row.fields.get(*key)) {
        collect(value, &mut answers);
        if !answers.is_empty() {
            answers.dedup();
            return Ok(answers);
        }
    }
    Err(row.error(format!("no answer: expected a text, a number or a list of them under {}", keys.join(" or "))))
}

fn collect(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::String(text) if text.trim().is_empty() => {}
        Value::String(text) => into.push(text.clone()),
        Value::Number(number) => into.push(number.to_string()),
        Value::Bool(yes) => into.push(if *yes { "yes" } else { "no" }.to_owned()),
        Value::Array(items) => items.iter().for_each(|item| collect(item, into)),
        Value::Null | Value::Object(_) => {}
    }
}

/// A list of texts as Python writes it: `['a', "b's"]`.
pub(super) fn python_list(text: &str) -> std::result::Result<Vec<String>, String> {
    let wrong = || "is no list of texts as Python writes it".to_owned();
    let inner = text.trim().strip_prefix('[').and_then(|t| t.strip_suffix(']')).ok_or_else(wrong)?;
    let mut items = Vec::new();
    let mut chars = inner.chars().peekable();
    loop {
        while chars.next_if(|c| c.is_whitespace() || *c == ',').is_some() {}
        let Some(quote) = chars.next() else { return Ok(items) };
        if !matches!(quote, '\'' | '"') {
            return Err(wrong());
        }
        let mut item = String::new();
        loop {
            match chars.next().ok_or_else(wrong)? {
                '\\' => item.push(match chars.next().ok_or_else(wrong)? {
                    'n' => '\n',
                    't' => '\t',
                    c @ ('\\' | '\'' | '"') => c,
                    _ => return Err(wrong()),
                }),
                c if c == quote => break,
                c => item.push(c),
            }
        }
        items.push(item);
    }
}
