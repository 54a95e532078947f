//! Text as Python sees it: the public graders are Python programs, and their numbers depend on its `float`, `lower`, `split` and `\w`.

/// The 32 marks of Python's `string.punctuation`.
pub fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation()
}

/// Whether Python's `str.isspace` and `\s` hold for `c`: Unicode's white space and the four ASCII separators.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Whether `c` is part of a word, Python's `\w`: a letter, a digit of any kind, or `_`. Python counts a few hundred vowel signs of
/// Indic and other scripts out that are letters here; no rule of this crate meets them.
pub fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

/// The zeros of the scripts with decimal digits; each is followed by its one to nine.
#[rustfmt::skip]
const ZEROS: [u32; 66] = [
    0x30, 0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xde6, 0xe50, 0xed0, 0xf20, 0x1040,
    0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90, 0x1b50, 0x1bb0, 0x1c40, 0x1c50, 0xa620, 0xa8d0, 0xa900, 0xa9d0, 0xa9f0,
    0xaa50, 0xabf0, 0xff10, 0x104a0, 0x10d30, 0x11066, 0x110f0, 0x11136, 0x111d0, 0x112f0, 0x11450, 0x114d0, 0x11650, 0x116c0,
    0x11730, 0x118e0, 0x11950, 0x11c50, 0x11d50, 0x11da0, 0x16a60, 0x16ac0, 0x16b50, 0x1d7ce, 0x1d7d8, 0x1d7e2, 0x1d7ec, 0x1d7f6,
    0x1e140, 0x1e2f0, 0x1e950, 0x1fbf0,
];

/// Python's `float(text)`: blanks around it, underscores between digits, digits of any script, `inf` and `nan` are taken. `None`
/// where Python raises.
pub fn float(text: &str) -> Option<f64> {
    let chars: Vec<char> = text.trim_matches(is_space).chars().map(|c| ascii_digit(c).unwrap_or(c)).collect();
    let is_digit = |i: Option<usize>| i.and_then(|i| chars.get(i)).is_some_and(char::is_ascii_digit);
    let joins = |i: usize| is_digit(i.checked_sub(1)) && is_digit(Some(i + 1));
    if chars.iter().enumerate().any(|(i, c)| *c == '_' && !joins(i)) {
        return None;
    }
    chars.into_iter().filter(|c| *c != '_').collect::<String>().parse().ok()
}

fn ascii_digit(c: char) -> Option<char> {
    let zero = ZEROS.iter().find(|zero| (**zero..**zero + 10).contains(&c.into()))?;
    char::from_digit(u32::from(c) - zero, 10)
}

/// Python's `text.split()`, joined by single blanks.
pub fn squeeze(text: &str) -> String {
    text.split(is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Python's `text.isupper()`: some letter has a case, and none is lower-case.
pub fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Python's `text.islower()`.
pub fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

/// Whether `math.isclose(a, b, rel_tol=tolerance)` holds.
pub fn is_close(a: f64, b: f64, tolerance: f64) -> bool {
    a == b || (a.is_finite() && b.is_finite() && (a - b).abs() <= tolerance * a.abs().max(b.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float_is_pythons() {
        for (text, expected) in [
            ("17", Some(17.0)),
            (" 42\u{1f}\n", Some(42.0)),
            ("+5.", Some(5.0)),
            (".5e-1", Some(0.05)),
            ("1_000.2_5", Some(1000.25)),
            ("１７", Some(17.0)),
            ("٣.٥", Some(3.5)),
            ("-Infinity", Some(f64::NEG_INFINITY)),
            ("1e999", Some(f64::INFINITY)),
            ("", None),
            (".", None),
            ("_1", None),
            ("1_", None),
            ("1__0", None),
            ("1_.5", None),
            ("1 0", None),
            ("1,000", None),
            ("0x10", None),
            ("½", None),
        ] {
            assert_eq!(float(text), expected, "{text:?}");
        }
        assert!(float("NaN").is_some_and(f64::is_nan));
    }

    #[test]
    fn blanks_and_cases_are_pythons() {
        assert_eq!(squeeze(" a\u{1c}b \u{a0}c\n"), "a b c");
        assert!(is_upper("A 1!") && !is_upper("Aa") && !is_upper("1") && is_lower("a1") && !is_lower(""));
        assert!(is_close(95.0, 100.0, 0.05) && !is_close(94.9, 100.0, 0.05) && !is_close(f64::INFINITY, 1.0, 0.05));
    }
}
