//! The calculator of the toy world: whole numbers, `+ - * /` and parentheses.

use std::{iter::Peekable, str::Chars};

/// How deep parentheses may stand in each other.
const MAX_DEPTH: usize = 64;

/// The value of `expression`.
///
/// # Errors
/// What is wrong with it, in words for the policy.
pub(super) fn evaluate(expression: &str) -> Result<i64, String> {
    let mut parser = Parser { chars: expression.chars().peekable(), depth: 0 };
    let value = parser.sum()?;
    match parser.next_sign() {
        None => Ok(value),
        Some(c) => Err(format!("unexpected {c:?}")),
    }
}

struct Parser<'a> {
    chars: Peekable<Chars<'a>>,
    depth: usize,
}

impl Parser<'_> {
    fn sum(&mut self) -> Result<i64, String> {
        let mut value = self.product()?;
        while let Some(sign @ ('+' | '-')) = self.next_sign() {
            self.chars.next();
            let right = self.product()?;
            value = if sign == '+' { value.checked_add(right) } else { value.checked_sub(right) }.ok_or("too large")?;
        }
        Ok(value)
    }

    fn product(&mut self) -> Result<i64, String> {
        let mut value = self.atom()?;
        while let Some(sign @ ('*' | '/')) = self.next_sign() {
            self.chars.next();
            let right = self.atom()?;
            value = match sign {
                '*' => value.checked_mul(right).ok_or("too large")?,
                _ if right != 0 && value.checked_rem(right) == Some(0) => value / right,
                _ => return Err(format!("{value} / {right} is no whole number")),
            };
        }
        Ok(value)
    }

    fn atom(&mut self) -> Result<i64, String> {
        match self.next_sign() {
            Some('(') if self.depth < MAX_DEPTH => {
                self.chars.next();
                self.depth += 1;
                let value = self.sum()?;
                self.depth -= 1;
                match self.next_sign() {
                    Some(')') => self.chars.next(),
                    _ => return Err("a parenthesis is not closed".to_owned()),
                };
                Ok(value)
            }
            Some('(') => Err("too many parentheses".to_owned()),
            Some(c) if c.is_ascii_digit() => {
                let mut digits = String::new();
                while let Some(c) = self.chars.next_if(char::is_ascii_digit) {
                    digits.push(c);
                }
                digits.parse().map_err(|_| "too large".to_owned())
            }
            Some(c) => Err(format!("expected a number, not {c:?}")),
            None => Err("expected a number".to_owned()),
        }
    }

    /// The next character that is no white space; it is not consumed.
    fn next_sign(&mut self) -> Option<char> {
        while self.chars.next_if(|c| c.is_whitespace()).is_some() {}
        self.chars.peek().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_have_their_value_or_say_what_is_wrong() {
        for (expression, expected) in [
            (" 1755 - 1742", Ok(13)),
            ("1742-1755", Ok(-13)),
            ("2 + 3 * (4 - 1) / 9", Ok(3)),
            ("10 - 2 - 3", Ok(5)),
            ("", Err("expected a number")),
            ("1 -", Err("expected a number")),
            ("7 / 2", Err("7 / 2 is no whole number")),
            ("7 / 0", Err("7 / 0 is no whole number")),
            ("(1", Err("a parenthesis is not closed")),
            ("1 1", Err("unexpected '1'")),
            ("x", Err("expected a number, not 'x'")),
            ("9223372036854775807 + 1", Err("too large")),
            ("99999999999999999999", Err("too large")),
        ] {
            assert_eq!(evaluate(expression), expected.map_err(str::to_owned), "{expression:?}");
        }
        assert_eq!(evaluate(&"(".repeat(100_000)), Err("too many parentheses".to_owned()));
    }
}
