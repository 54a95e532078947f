//! Accepted answers, and lists of texts as Python writes them.

use std::fmt::Write;

use serde_json::Value;

use super::rows::{Row, kind, written};
use crate::Result;

/// The accepted answers under the first of `keys` that holds one: a text, a number, or lists of these, however deep.
pub(super) fn answers(row: &Row, keys: &[&str]) -> Result<Vec<String>> {
    let mut answers = Vec::new();
    for key in keys {
        let Some(value) = row.fields.get(*key) else { continue };
        collect(value, &mut answers).map_err(|why| row.error(format!("the answer under {key:?} {why}")))?;
        if !answers.is_empty() {
            return Ok(answers);
        }
    }
    Err(row.error(format!("no answer: expected a text, a number or a list of them under {}", keys.join(" or "))))
}

/// Null, which some forms write for "none", and blank texts are no answers.
fn collect(value: &Value, into: &mut Vec<String>) -> std::result::Result<(), String> {
    let answer = match value {
        Value::Null => return Ok(()),
        Value::Array(items) => return items.iter().try_for_each(|item| collect(item, into)),
        Value::String(text) => text.clone(),
        Value::Number(number) => written(number)?,
        other => return Err(format!("is {}: expected a text, a number or a list of them", kind(other))),
    };
    if !answer.trim().is_empty() && !into.contains(&answer) {
        into.push(answer);
    }
    Ok(())
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
                '\\' => item.push(escaped(&mut chars).ok_or_else(wrong)?),
                c if c == quote => break,
                c => item.push(c),
            }
        }
        items.push(item);
    }
}

/// The character of an escape sequence after its backslash.
fn escaped(chars: &mut impl Iterator<Item = char>) -> Option<char> {
    let n_digits = match chars.next()? {
        'n' => return Some('\n'),
        'r' => return Some('\r'),
        't' => return Some('\t'),
        c @ ('\\' | '\'' | '"') => return Some(c),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => return None,
    };
    let digits: String = chars.take(n_digits).collect();
    let is_code = digits.len() == n_digits && digits.chars().all(|c| c.is_ascii_hexdigit());
    char::from_u32(u32::from_str_radix(&digits, 16).ok().filter(|_| is_code)?)
}

/// The way back: single quotation marks, unless a text has such marks itself and no double ones.
pub(super) fn as_python_list(items: &[&str]) -> String {
    let quoted = |text: &&str| {
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        let mut quoted = String::from(quote);
        for c in text.chars() {
            match c {
                '\n' => quoted.push_str("\\n"),
                '\r' => quoted.push_str("\\r"),
                '\t' => quoted.push_str("\\t"),
                c if c == '\\' || c == quote => write!(quoted, "\\{c}").expect("a String takes all"),
                c => quoted.push(c),
            }
        }
        quoted.push(quote);
        quoted
    };
    format!("[{}]", items.iter().map(quoted).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_lists_are_read_and_written_and_others_refused() {
        for (text, expected, is_as_written) in [
            ("['https://a', \"b's\"]", Some(vec!["https://a", "b's"]), true),
            ("[]", Some(vec![]), true),
            (" [ \"a\",] ", Some(vec!["a"]), false),
            (r#"['a\'b"c', 'x\\y\n']"#, Some(vec!["a'b\"c", "x\\y\n"]), true),
            (r"['caf\xe9 \u2019 \U0001f600']", Some(vec!["café ’ 😀"]), false),
            (r"['\ud800']", None, false),
            (r"['\x+1']", None, false),
            (r"['\q']", None, false),
            ("['a'", None, false),
            ("['a", None, false),
            ("[a]", None, false),
            ("a", None, false),
        ] {
            let items = python_list(text).ok();
            assert_eq!(items.as_deref().map(|items| items.iter().map(String::as_str).collect()), expected, "{text}");
            if let Some(expected) = expected.filter(|_| is_as_written) {
                assert_eq!(as_python_list(&expected), text);
            }
        }
    }
}
