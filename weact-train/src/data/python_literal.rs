//! Python literals, as prompts show schemas that were printed from a dictionary: `{'type': 'object', 'required': ['q'], 'x': None}`.

use std::{iter::Peekable, str::Chars};

use serde_json::{Map, Number, Value};

/// How deep lists and dictionaries may stand in each other.
const MAX_DEPTH: usize = 64;

/// The value of `text`: strings, numbers, `True`, `False`, `None`, lists, tuples and dictionaries with strings as keys.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    let mut parser = Parser { chars: text.chars().peekable(), depth: 0 };
    let value = parser.value()?;
    match parser.next() {
        None => Ok(value),
        Some(c) => Err(format!("unexpected {c:?} after it")),
    }
}

struct Parser<'a> {
    chars: Peekable<Chars<'a>>,
    depth: usize,
}

impl Parser<'_> {
    fn value(&mut self) -> Result<Value, String> {
        match self.next().ok_or("it ends too early")? {
            '{' => self.nested('}', |parser| parser.entries()),
            '[' => self.nested(']', |parser| parser.items(']')),
            '(' => self.nested(')', |parser| parser.items(')')),
            '\'' | '"' => self.string().map(Value::String),
            _ => self.word(),
        }
    }

    fn nested(&mut self, end: char, read: impl FnOnce(&mut Self) -> Result<Value, String>) -> Result<Value, String> {
        self.chars.next();
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err("it is nested too deeply".to_owned());
        }
        let value = read(self)?;
        self.depth -= 1;
        self.expect(end)?;
        Ok(value)
    }

    fn items(&mut self, end: char) -> Result<Value, String> {
        let mut items = Vec::new();
        while self.next() != Some(end) {
            items.push(self.value()?);
            if self.next() != Some(',') {
                break;
            }
            self.chars.next();
        }
        Ok(Value::Array(items))
    }

    fn entries(&mut self) -> Result<Value, String> {
        let mut entries = Map::new();
        while self.next() != Some('}') {
            let Value::String(key) = self.value()? else { return Err("a key is no string".to_owned()) };
            self.expect(':')?;
            entries.insert(key, self.value()?);
            if self.next() != Some(',') {
                break;
            }
            self.chars.next();
        }
        Ok(Value::Object(entries))
    }

    fn string(&mut self) -> Result<String, String> {
        let quote = self.chars.next().expect("the caller saw it");
        let mut text = String::new();
        loop {
            match self.chars.next().ok_or("a string is not closed")? {
                c if c == quote => return Ok(text),
                '\\' => text.push(self.escaped()?),
                c => text.push(c),
            }
        }
    }

    fn escaped(&mut self) -> Result<char, String> {
        match self.chars.next().ok_or("a string is not closed")? {
            'n' => Ok('\n'),
            't' => Ok('\t'),
            'r' => Ok('\r'),
            'x' => self.code(2),
            'u' => self.code(4),
            'U' => self.code(8),
            c @ ('\\' | '\'' | '"') => Ok(c),
            c => Err(format!("\\{c} is no escape")),
        }
    }

    /// The character whose code stands in so many hexadecimal digits.
    fn code(&mut self, n_digits: usize) -> Result<char, String> {
        let digits: String = self.chars.by_ref().take(n_digits).collect();
        u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32).ok_or_else(|| format!("\\{digits} is no character"))
    }

    fn word(&mut self) -> Result<Value, String> {
        let mut word = String::new();
        while let Some(c) = self.chars.next_if(|c| c.is_alphanumeric() || "+-._".contains(*c)) {
            word.push(c);
        }
        match word.as_str() {
            "True" | "true" => Ok(Value::Bool(true)),
            "False" | "false" => Ok(Value::Bool(false)),
            "None" | "null" => Ok(Value::Null),
            number => number.parse::<Number>().map(Value::Number).map_err(|_| format!("{word:?} is no value")),
        }
    }

    fn expect(&mut self, wanted: char) -> Result<(), String> {
        match self.next() {
            Some(c) if c == wanted => {
                self.chars.next();
                Ok(())
            }
            found => Err(format!("expected {wanted:?}, found {found:?}")),
        }
    }

    /// The next character that is no white space; it stays.
    fn next(&mut self) -> Option<char> {
        while self.chars.next_if(|c| c.is_whitespace()).is_some() {}
        self.chars.peek().copied()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn literals_are_read_and_others_refused() {
        for (text, expected) in [
            (
                "{'type': 'object', 'required': ['q'], 'n': None, 'b': True}",
                json!({"type": "object", "required": ["q"], "n": null, "b": true}),
            ),
            ("{\"it's\": \"a\\nb\", 'x': (1, -2.5,), }", json!({"it's": "a\nb", "x": [1, -2.5]})),
            (" [] ", json!([])),
            ("'\\xe9\\u4f60'", json!("é你")),
        ] {
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
        for text in ["", "{", "{'a'}", "{'a': }", "{1: 2}", "['a'", "'a", "foo", "[1] 2", "'\\q'", &"[".repeat(10_000)] {
            assert!(parse(text).is_err(), "{text:.20}");
        }
    }
}
