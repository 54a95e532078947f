//! Thinking is not part of an answer.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// `text` without its thinking, and then without blanks around what is left; a text without thinking stays as it is. `None` where
/// nothing is left, or where thinking does not end. Some templates open the thinking in the prompt: what stands before a `</think>` of
/// its own is thinking too.
pub fn strip(text: &str) -> Option<String> {
    let mut kept = String::new();
    let (mut start, mut is_open) = (0, false);
    for (i, _) in text.match_indices('<') {
        if !is_open && text[i..].starts_with(OPEN) {
            kept.push_str(&text[start..i]);
            is_open = true;
        } else if text[i..].starts_with(CLOSE) {
            if !is_open {
                kept.clear();
            }
            (start, is_open) = (i + CLOSE.len(), false);
        }
    }
    if is_open {
        return None;
    }
    let answer = if start > 0 { (kept + &text[start..]).trim().to_owned() } else { text.to_owned() };
    (!answer.trim().is_empty()).then_some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_the_answer() {
        for (text, expected) in [
            ("42", Some("42")),
            (" a < b\n", Some(" a < b\n")),
            (" <think>6 * 7</think>\n\n42 ", Some("42")),
            ("6 * 7</think>42", Some("42")),
            ("<think></think>4<think>more</think>2", Some("42")),
            ("so </think> or <think>no</think>42", Some("or 42")),
            ("<think>6 * 7", None),
            ("42 <think>or is it", None),
            ("<think>a</think><think>b", None),
            ("<think>42</think>\n", None),
            ("", None),
            (" \n", None),
        ] {
            assert_eq!(strip(text).as_deref(), expected, "{text:?}");
        }
    }
}
