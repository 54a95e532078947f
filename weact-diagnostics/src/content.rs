//! Which supervised tokens are content (§3.1): what the policy says, not the form in which it must say it.
//!
//! The paper names "content tokens" and its Appendix C has no source text. Our reading: a token is scaffolding where it is special to
//! the tokenizer (turn marks), blank, a tag of thinking or of a call, or belongs to a call's JSON: braces, brackets, quotes, colons,
//! commas, and the keys `name` and `arguments`. Everything else is content: text, the names of tools, the names and values of
//! arguments. A token that holds a letter of content beside scaffolding, as `{"a`, is content. Thinking is told apart, so that
//! accuracy can be reported with and without it.

use std::ops::Range;

use weact_core::{sample::Sample, tokenizer::Tokenizer};

use crate::Result;

/// What a supervised token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Part of the form.
    Scaffolding,
    /// Content within a block of thinking; a call there is thinking too.
    Thinking,
    /// Content outside thinking.
    Content,
}

use TokenKind::{Content, Scaffolding, Thinking};

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";

/// The kind of each supervised token of `sample`, in the order of [`Scored`](crate::teacher_forced::Scored): token 0 has no prediction and
/// no entry.
///
/// # Errors
/// If the tokenizer can't decode the ids.
pub fn kinds(tokenizer: &Tokenizer, sample: &Sample) -> Result<Vec<TokenKind>> {
    let mut kinds = Vec::new();
    for run in runs(&sample.mask) {
        let ids = &sample.ids[run.clone()];
        let of_run = kinds_of_turn(&tokenizer.pieces(ids)?);
        let is_special = |id: u32| tokenizer.controls().iter().any(|control| control.special && control.id == id);
        let unpredicted = usize::from(run.start == 0);
        let of_ids = ids.iter().zip(of_run).map(|(id, kind)| if is_special(*id) { Scaffolding } else { kind });
        kinds.extend(of_ids.skip(unpredicted));
    }
    Ok(kinds)
}

/// The stretches of supervised tokens: the policy's turns.
fn runs(mask: &[bool]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (i, _) in mask.iter().enumerate().filter(|(_, counts)| **counts) {
        match runs.last_mut() {
            Some(run) if run.end == i => run.end += 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// The kind of each of the tokens whose texts are `pieces`.
fn kinds_of_turn(pieces: &[String]) -> Vec<TokenKind> {
    let of_bytes = kinds_of_bytes(&pieces.concat());
    let mut at = 0;
    let kind = |piece: &String| {
        // A token without text is the beginning of the next character.
        let own = at..(at + piece.len().max(1)).min(of_bytes.len());
        at += piece.len();
        let has = |kind: TokenKind| of_bytes[own.clone()].contains(&kind);
        [Content, Thinking].into_iter().find(|kind| has(*kind)).unwrap_or(Scaffolding)
    };
    pieces.iter().map(kind).collect()
}

fn kinds_of_bytes(text: &str) -> Vec<TokenKind> {
    let mut kinds = vec![Scaffolding; text.len()];
    // Some templates open the block in the prompt.
    let mut thinking = text.find(END_THINK).is_some_and(|end| text.find(THINK).is_none_or(|start| end < start));
    let mut at = 0;
    while let Some(next) = text[at..].chars().next() {
        let Some(tag) = tag_at(text, at) else {
            if !next.is_whitespace() {
                kinds[at..at + next.len_utf8()].fill(if thinking { Thinking } else { Content });
            }
            at += next.len_utf8();
            continue;
        };
        at += tag.len();
        match tag {
            THINK => thinking = true,
            END_THINK => thinking = false,
            CALL if !thinking => at = mark_call(text, at, &mut kinds),
            _ => {}
        }
    }
    kinds
}

fn tag_at(text: &str, at: usize) -> Option<&'static str> {
    [THINK, END_THINK, CALL, END_CALL].into_iter().find(|tag| text[at..].starts_with(tag))
}

/// Marks the content of the call that begins at `at`, as far as there is no tag outside its strings, and gives where that is. What is no
/// JSON gets a reading too: a policy's own text is not refused.
fn mark_call(text: &str, mut at: usize, kinds: &mut [TokenKind]) -> usize {
    let bytes = text.as_bytes();
    let mut depth = 0_usize;
    while at < bytes.len() && !(bytes[at] == b'<' && tag_at(text, at).is_some()) {
        match bytes[at] {
            b'"' => {
                let string = string_at(bytes, at);
                let is_key = text[string.end..].strip_prefix('"').is_some_and(|rest| rest.trim_start().starts_with(':'));
                let is_form = is_key && depth == 1 && ["name", "arguments"].contains(&&text[string.clone()]);
                if !is_form {
                    let of_string = bytes[string.clone()].iter().zip(&mut kinds[string.clone()]);
                    of_string.filter(|(byte, _)| !byte.is_ascii_whitespace()).for_each(|(_, kind)| *kind = Content);
                }
                at = string.end;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' | b':' => {}
            byte if byte.is_ascii_whitespace() => {}
            _ => kinds[at] = Content,
        }
        at = (at + 1).min(bytes.len());
    }
    at
}

/// The inside of the string whose quote is at `at`, to the closing quote or the text's end.
fn string_at(bytes: &[u8], at: usize) -> Range<usize> {
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != b'"' {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    at + 1..end.min(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is content of `text`, and what is thinking, letter by letter.
    #[track_caller]
    fn check(text: &str, expected: [&str; 2]) {
        let pieces: Vec<String> = text.chars().map(String::from).collect();
        let kinds = kinds_of_turn(&pieces);
        let of = |kind| pieces.iter().zip(&kinds).filter(|(_, k)| **k == kind).map(|(p, _)| p.as_str()).collect::<String>();
        assert_eq!([of(Content), of(Thinking)], expected, "{text}");
    }

    #[test]
    fn text_is_content_and_blanks_and_tags_are_not() {
        check("Ada, é\n", ["Ada,é", ""]);
        check("<think>\nab <tool_call>{}</tool_call> c\n</think>\n\nd", ["d", "ab{}c"]);
        check("ab</think>c", ["c", "ab"]);
        check("", ["", ""]);
    }

    #[test]
    fn of_a_call_names_and_values_are_content() {
        let call = r#"{"name": "go", "arguments": {"q": "a \"}é", "n": 12, "name": [true, "x"]}}"#;
        check(&format!("so\n<tool_call>\n{call}\n</tool_call>z"), [r#"sogoqa\"}én12nametruexz"#, ""]);
        check("<tool_call>{\"name\": \"name\", </tool_call>z", ["namez", ""]);
        check("<tool_call>{\"q\": \"a</tool_call>", ["qa</tool_call>", ""]); // strings are opaque
    }

    #[test]
    fn a_token_across_a_border_is_content_and_a_half_character_is_what_its_whole_is() {
        let pieces = ["<tool_call>", "{\"", "name\":", " \"go", "", "é", "\"}}"].map(str::to_owned);
        assert_eq!(kinds_of_turn(&pieces), [Scaffolding, Scaffolding, Scaffolding, Content, Content, Content, Scaffolding]);
        let unfinished = ["a", ""].map(str::to_owned);
        assert_eq!(kinds_of_turn(&unfinished), [Content, Scaffolding]);
    }

    #[test]
    fn turns_are_read_one_by_one() {
        assert_eq!(runs(&[true, true, false, true]), [0..2, 3..4]);
        assert_eq!(runs(&[false]), [0..0; 0]);
    }
}
