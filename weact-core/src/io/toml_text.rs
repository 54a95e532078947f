//! TOML written by people: what is wrong is said with its line, its section, and the nearest known key.

use serde::de::DeserializeOwned;

/// Reads `text`.
///
/// # Errors
/// The parser's message on one line, as `line 3 in [train]: unknown field ...; did you mean ...?`
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| describe(&error, text))
}

/// The parser's message on one line, with the line number, the section and the nearest known key.
fn describe(error: &toml::de::Error, text: &str) -> String {
    let before = error.span().map_or("", |span| &text[..span.start.min(text.len())]);
    let line = before.matches('\n').count() + 1;
    let section = before.lines().rev().find(|l| l.trim_start().starts_with('[')).map_or("", str::trim);
    let message = error.message().replace('\n', " ");
    let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let hint = match names.split_first() {
        Some((unknown, known)) if message.starts_with("unknown field") => {
            let distance = |k: &&&str| strsim::damerau_levenshtein(unknown, k);
            let near =
                known.iter().filter(|k| distance(k) <= 3 || unknown.contains(**k) || k.contains(unknown)).min_by_key(distance);
            near.map_or_else(String::new, |k| format!("; did you mean `{k}`?"))
        }
        _ => String::new(),
    };
    let place = if section.is_empty() { String::new() } else { format!(" in {section}") };
    format!("line {line}{place}: {message}{hint}")
}
