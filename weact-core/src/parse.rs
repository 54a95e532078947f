//! Reads one sampled assistant turn: reasoning, content and tool calls in the form that Qwen's templates teach
//! (`<think>`, `<tool_call>`).
//!
//! A call is opened by its tag and ended by a JSON scanner for which strings are opaque, so that a tag inside a string is
//! data. A call that is not JSON is repaired in the few ways that [`Repair`] lists, or reported as malformed; a control call is
//! never repaired, since a guess could activate the wrong weights.
//!
//! ```
//! use weact_core::parse::{Outcome, parse_turn};
//! let turn = parse_turn("<think>\nwho?\n</think>\n\n<tool_call>\n{\"name\": \"search\", \"arguments\": {}}\n</tool_call>");
//! assert_eq!(turn.reasoning.as_deref(), Some("who?"));
//! assert!(matches!(&turn.calls[0].outcome, Outcome::Valid(call) if call.name == "search"));
//! ```

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{control, message::ToolCall};

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
pub(crate) const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";
const RESPONSE: &str = "<tool_response>";
/// Outside a JSON string each of these ends a call.
const TAGS: [&str; 4] = [THINK, CALL, END_CALL, RESPONSE];

/// One assistant turn, read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    /// The text between a leading `<think>` and `</think>`, without the line break that the template puts at either end.
    /// `Some("")` is an empty block, `None` no block.
    pub reasoning: Option<String>,
    /// The text before the first call, without the one line break that the template puts there. Text between and after calls
    /// follows on lines of its own, without white space around it.
    pub content: String,
    /// The calls outside thinking, in order.
    pub calls: Vec<Call>,
    /// How many calls were opened inside thinking. They are not in `calls` and must not run; who accepts the calls of an
    /// unclosed block reads them by `parse_turn(reasoning)`.
    pub in_thinking: usize,
    /// Whether the turn ended inside thinking.
    pub unclosed_thinking: bool,
    /// Whether the policy wrote a tool's answer itself: the turn was cut before `<tool_response>`.
    pub cut: bool,
}

/// A call as it was written and as it was understood.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What was written, without the tags.
    pub raw: String,
    /// What it means.
    pub outcome: Outcome,
}

/// What a call means.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It was JSON of the right form.
    Valid(ToolCall),
    /// It became JSON of the right form.
    Repaired {
        /// The call.
        call: ToolCall,
        /// What was repaired, each kind once. A turn that ended at its length limit with a [`Repair::MissingCloser`] in the
        /// last call may have lost arguments.
        repairs: Vec<Repair>,
    },
    /// It can't be run.
    Malformed {
        /// What is wrong, for the policy to read.
        why: String,
    },
}

/// A kind of repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Repair {
    /// A comma before a closing bracket was dropped.
    TrailingComma,
    /// Brackets that were open at the end were closed.
    MissingCloser,
    /// A line break or other control character in a string was escaped.
    ControlCharacter,
    /// `True`, `False` or `None` was read as JSON's.
    PythonLiteral,
    /// The call stood in a list of one, in a second pair of braces, or under the key `function`.
    Wrapper,
    /// The arguments stood under the key `parameters`.
    ParametersAlias,
}

/// Reads the decoded text of one turn, control tokens visible, the end-of-turn token left out. Where the prompt already opens
/// the thinking block, the caller puts its `<think>` in front.
///
/// - A call inside a thinking block, leading or later, is counted and not read. A later block stays in the content.
/// - Arguments may be an object, an object as a JSON string, or absent.
/// - Several objects between one pair of tags are several calls. A missing closing tag is forgiven; other text before a closing
///   tag makes the call malformed.
/// - A call whose brackets or strings don't match is malformed up to the next closing tag: a call that it may quote must not run.
pub fn parse_turn(text: &str) -> Turn {
    let mut turn = Turn::default();
    let mut body = text;
    if let Some(thinking) = text.trim_start().strip_prefix(THINK) {
        let (reasoning, rest) = thinking.split_once(END_THINK).unwrap_or_else(|| {
            turn.unclosed_thinking = true;
            (thinking, "")
        });
        turn.in_thinking = n_calls(reasoning);
        let reasoning = reasoning.strip_prefix('\n').unwrap_or(reasoning);
        turn.reasoning = Some(reasoning.strip_suffix('\n').unwrap_or(reasoning).to_owned());
        body = rest.strip_prefix("\n\n").or_else(|| rest.strip_prefix('\n')).unwrap_or(rest);
    }
    let mut piece = 0; // where the text starts that no call has taken
    let mut at = 0; // where to look for the next tag
    while let Some((tag, start)) = first_tag(&body[at..], &[THINK, CALL, RESPONSE]) {
        let inner = at + start + tag.len();
        if tag == THINK {
            let end = body[inner..].find(END_THINK);
            turn.unclosed_thinking |= end.is_none();
            at = end.map_or(body.len(), |n_bytes| inner + n_bytes);
            turn.in_thinking += n_calls(&body[inner..at]);
            continue;
        }
        push_content(&mut turn, &body[piece..at + start]);
        if tag == RESPONSE {
            turn.cut = true;
            return turn;
        }
        at = inner + read_calls(&body[inner..], &mut turn.calls);
        piece = at;
    }
    if turn.calls.is_empty() {
        turn.content = body.to_owned();
    } else {
        push_content(&mut turn, &body[piece..]);
    }
    turn
}

/// Adds the text before a tag or after the last call.
fn push_content(turn: &mut Turn, piece: &str) {
    if turn.calls.is_empty() {
        piece.strip_suffix('\n').unwrap_or(piece).clone_into(&mut turn.content);
    } else if !piece.trim().is_empty() {
        if !turn.content.is_empty() {
            turn.content.push('\n');
        }
        turn.content.push_str(piece.trim());
    }
}

fn n_calls(thinking: &str) -> usize {
    let mut calls = Vec::new();
    let mut rest = thinking;
    while let Some((_, inner)) = rest.split_once(CALL) {
        rest = &inner[read_calls(inner, &mut calls)..];
    }
    calls.len()
}

fn first_tag(text: &str, tags: &[&'static str]) -> Option<(&'static str, usize)> {
    tags.iter().filter_map(|tag| Some((*tag, text.find(tag)?))).min_by_key(|&(_, at)| at)
}

/// Reads the calls behind one opening tag and says how many bytes of `body` they take, the closing tag included.
fn read_calls(body: &str, calls: &mut Vec<Call>) -> usize {
    let mut rest = body;
    loop {
        let text = rest.trim_start();
        let scan = scan(text);
        let call = read_call(&scan);
        let at_end = |after: &str| after.is_empty() || after.starts_with('{') || starts_with_tag(after);
        let n_bytes = match &call {
            Ok(_) => scan.n_bytes,
            Err(_) if scan.n_bytes == 0 => first_tag(text, &TAGS).map_or(text.len(), |(_, at)| at),
            Err(_) if scan.closed && at_end(text[scan.n_bytes..].trim_start()) => scan.n_bytes,
            Err(_) => first_tag(text, &[END_CALL, RESPONSE]).map_or(text.len(), |(_, at)| at),
        };
        let (raw, after) = text.split_at(n_bytes);
        let mut push = |raw: &str, outcome| calls.push(Call { raw: raw.trim_end().to_owned(), outcome });
        if let Some((END_CALL, extra)) = first_tag(after, &TAGS)
            && !after[..extra].trim().is_empty()
            && !at_end(after.trim_start())
        {
            let why = format!("text stands after the JSON object; expected {EXPECTED}");
            push(&text[..n_bytes + extra], Outcome::Malformed { why });
            return body.len() - (after.len() - extra - END_CALL.len());
        }
        push(raw, call.unwrap_or_else(|why| Outcome::Malformed { why }));
        match after.trim_start() {
            next if next.starts_with('{') => rest = next,
            next => return body.len() - next.strip_prefix(END_CALL).unwrap_or(after).len(),
        }
    }
}

fn starts_with_tag(text: &str) -> bool {
    TAGS.iter().any(|tag| text.starts_with(tag))
}

const EXPECTED: &str = r#"{"name": TOOL, "arguments": {..}} as JSON"#;

/// The call in a scanned object, or what is wrong with it.
fn read_call(scan: &Scan) -> Result<Outcome, String> {
    let malformed = |why: &str| format!("{why}; expected {EXPECTED}");
    if scan.n_bytes == 0 {
        return Err(malformed("the call does not start with a JSON object"));
    }
    if scan.in_string {
        return Err(malformed("a string in the call does not end"));
    }
    let mut repairs = scan.repairs.clone();
    let braced = scan.json.trim_end().strip_prefix('{').and_then(|text| text.strip_suffix('}')).map(str::trim);
    let doubled = braced.filter(|text| text.starts_with('{'));
    let mut value: Value = serde_json::from_str(doubled.unwrap_or(&scan.json)).map_err(|e| {
        // The position is one in the repaired text, which nobody has seen.
        let error = e.to_string();
        malformed(&format!("the call is no JSON: {}", error.split(" at line ").next().unwrap_or(&error)))
    })?;
    let inner = match &mut value {
        Value::Array(values) if values.len() == 1 => Some(values[0].take()),
        Value::Object(map) if !map.contains_key("name") => map.get_mut("function").filter(|f| f.is_object()).map(Value::take),
        _ => None,
    };
    if inner.is_some() || doubled.is_some() {
        repairs.push(Repair::Wrapper);
    }
    let Value::Object(mut function) = inner.unwrap_or(value) else {
        return Err(malformed("the call is no object"));
    };
    if !function.contains_key("arguments")
        && let Some(arguments) = function.remove("parameters")
    {
        function.insert("arguments".to_owned(), arguments);
        repairs.push(Repair::ParametersAlias);
    }
    let call: ToolCall = serde_json::from_value(json!({"function": function})).map_err(|e| malformed(&e.to_string()))?;
    if repairs.is_empty() {
        Ok(Outcome::Valid(call))
    } else if control::is_control(&call.name) {
        Err(malformed(&format!("a call of {} is not repaired", call.name)))
    } else {
        Ok(Outcome::Repaired { call, repairs })
    }
}

/// The object or list at the start of a text.
#[derive(Default)]
struct Scan {
    /// How much of the text it takes: nothing where the text starts with something else.
    n_bytes: usize,
    /// It, with repairs.
    json: String,
    /// What was repaired.
    repairs: Vec<Repair>,
    /// Whether the text ended inside a string.
    in_string: bool,
    /// Whether the bracket was closed by the text itself.
    closed: bool,
}

/// Scans to the bracket that closes the first one, or to a tag outside strings, or to the end. Knows brackets, strings and
/// words; whether the result is JSON is the parser's to say.
fn scan(text: &str) -> Scan {
    let mut scan = Scan::default();
    if !text.starts_with(['{', '[']) {
        return scan;
    }
    let mut closers = Vec::new();
    let mut comma = None; // where in the JSON, as long as only white space follows
    while let Some(c) = text[scan.n_bytes..].chars().next() {
        let rest = &text[scan.n_bytes..];
        let mut n_bytes = c.len_utf8();
        if scan.in_string {
            match c {
                '\\' => n_bytes += rest[1..].chars().next().map_or(0, char::len_utf8),
                '"' => scan.in_string = false,
                _ => {}
            }
            if c < ' ' {
                write!(scan.json, "\\u{:04x}", u32::from(c)).expect("writing to a string succeeds");
                scan.repaired(Repair::ControlCharacter);
            } else {
                scan.json.push_str(&rest[..n_bytes]);
            }
            scan.n_bytes += n_bytes;
            continue;
        }
        match c {
            '<' if starts_with_tag(rest) => break,
            '"' => scan.in_string = true,
            '{' => closers.push('}'),
            '[' => closers.push(']'),
            '}' | ']' => {
                scan.drop_comma(comma);
                closers.pop();
            }
            _ if c.is_alphabetic() => n_bytes = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len()),
            _ => {}
        }
        if !c.is_whitespace() {
            comma = (c == ',').then_some(scan.json.len());
        }
        let word = &rest[..n_bytes];
        let literal = match word {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            _ => word,
        };
        if literal != word {
            scan.repaired(Repair::PythonLiteral);
        }
        scan.json.push_str(literal);
        scan.n_bytes += n_bytes;
        if closers.is_empty() {
            scan.closed = true;
            return scan;
        }
    }
    // A tag that opens something is no end: a broken string may have let it out.
    if !scan.in_string && ![CALL, THINK].iter().any(|tag| text[scan.n_bytes..].starts_with(tag)) {
        scan.drop_comma(comma);
        scan.json.extend(closers.into_iter().rev());
        scan.repaired(Repair::MissingCloser);
    }
    scan
}

impl Scan {
    fn repaired(&mut self, repair: Repair) {
        if !self.repairs.contains(&repair) {
            self.repairs.push(repair);
        }
    }

    fn drop_comma(&mut self, comma: Option<usize>) {
        if let Some(at) = comma {
            self.json.remove(at);
            self.repaired(Repair::TrailingComma);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Map;

    use super::*;

    fn tool_call(name: &str, arguments: Value) -> ToolCall {
        let Value::Object(arguments) = arguments else { unreachable!("objects only") };
        ToolCall::new(name, arguments)
    }

    fn valid(name: &str, arguments: Value) -> Outcome {
        Outcome::Valid(tool_call(name, arguments))
    }

    fn outcomes(text: &str) -> Vec<Outcome> {
        parse_turn(text).calls.into_iter().map(|call| call.outcome).collect()
    }

    /// The outcomes in short: `name arguments`, then the repairs; or `malformed: WHY` without what is expected.
    fn summary(text: &str) -> Vec<String> {
        let short = |outcome| match outcome {
            Outcome::Valid(call) => format!("{} {}", call.name, Value::Object(call.arguments)),
            Outcome::Repaired { call, repairs } => format!("{} {} {repairs:?}", call.name, Value::Object(call.arguments)),
            Outcome::Malformed { why } => format!("malformed: {}", why.split_once(';').expect("what is expected").0),
        };
        outcomes(text).into_iter().map(short).collect()
    }

    #[test]
    fn every_malformation_has_its_outcome() {
        let table: &[(&str, &[&str])] = &[
            // Valid.
            (r#"{"name": "search", "arguments": {"query": ["a"]}}"#, &[r#"search {"query":["a"]}"#]),
            (r#"{"name": "search", "arguments": "{\"query\": \"a\"}"}"#, &[r#"search {"query":"a"}"#]),
            (r#"{"name": "search"}"#, &["search {}"]),
            (r#"{"name": "search", "arguments": null}"#, &["search {}"]),
            (r#"{"name": "a"} {"name": "b"}"#, &["a {}", "b {}"]),
            (r#"{"name": "load_lora", "arguments": {"adapter": "plan"}}"#, &[r#"load_lora {"adapter":"plan"}"#]),
            // Repaired.
            (r#"{"name": "search", "arguments": {"query": ["a",], },}"#, &[r#"search {"query":["a"]} [TrailingComma]"#]),
            (r#"{"name": "search", "arguments": {"query": ["a"]"#, &[r#"search {"query":["a"]} [MissingCloser]"#]),
            (r#"{"name": "search", "arguments": {"q": 1,"#, &[r#"search {"q":1} [TrailingComma, MissingCloser]"#]),
            ("{\"name\": \"a\", \"arguments\": {\"q\": \"x\ny\tz\0\"}}", &[r#"a {"q":"x\ny\tz\u0000"} [ControlCharacter]"#]),
            (
                r#"{"name": "a", "arguments": {"x": True, "y": [False, None]}}"#,
                &[r#"a {"x":true,"y":[false,null]} [PythonLiteral]"#],
            ),
            (r#"[{"name": "a", "arguments": {}}]"#, &["a {} [Wrapper]"]),
            (r#"{{"name": "a", "arguments": {}}}"#, &["a {} [Wrapper]"]),
            (r#"{"type": "function", "function": {"name": "a"}}"#, &["a {} [Wrapper]"]),
            (r#"{"name": "a", "parameters": {"q": "None, }"}}"#, &[r#"a {"q":"None, }"} [ParametersAlias]"#]),
            // Refused, whatever could be guessed.
            ("", &["malformed: the call does not start with a JSON object"]),
            ("search(a)", &["malformed: the call does not start with a JSON object"]),
            ("\"search\"", &["malformed: the call does not start with a JSON object"]),
            ("{}", &["malformed: missing field `name`"]),
            ("[]", &["malformed: the call is no object"]),
            (r#"[{"name": "a"}, {"name": "b"}]"#, &["malformed: the call is no object"]),
            ("{'name': 'a'}", &["malformed: the call is no JSON: key must be a string"]),
            (r#"{"name": 3}"#, &["malformed: invalid type: integer `3`, expected a string"]),
            (r#"{"name": "a", "arguments": [1]}"#, &["malformed: tool call arguments must be an object, not [1]"]),
            (
                r#"{"name": "a", "arguments": "q"}"#,
                &["malformed: tool call arguments are no JSON: expected value at line 1 column 1: q"],
            ),
            (r#"{"name": "a", "arguments": {"q": "say "hi""}}"#, &["malformed: the call is no JSON: expected `,` or `}`"]),
            (r#"{"name": "a", "arguments": {"q": ["x"}}"#, &["malformed: the call is no JSON: expected `,` or `]`"]),
            (r#"{"name": "a", "arguments": {"q": "x}}"#, &["malformed: a string in the call does not end"]),
            (r#"{"name": "a", "arguments": {"q":"#, &["malformed: the call is no JSON: expected value"]),
            (r#"{"name": "a"}}"#, &["malformed: text stands after the JSON object"]),
            (r#"{"name": "a"} and more"#, &["malformed: text stands after the JSON object"]),
            (r#"{"name": "a"}, {"name": "b"}"#, &["malformed: text stands after the JSON object"]),
            (r#"{"name": "load_lora", "arguments": {"adapter": "plan"}"#, &["malformed: a call of load_lora is not repaired"]),
            (r#"{"name": "load_lora", "arguments": {"adapter": "plan",}}"#, &["malformed: a call of load_lora is not repaired"]),
            (
                r#"{"name": "offload_lora", "parameters": {"adapter": "plan"}}"#,
                &["malformed: a call of offload_lora is not repaired"],
            ),
            (
                r#"[{"name": "offload_lora", "arguments": {"adapter": "plan"}}]"#,
                &["malformed: a call of offload_lora is not repaired"],
            ),
        ];
        for &(body, expected) in table {
            assert_eq!(summary(&format!("<tool_call>\n{body}\n</tool_call>")), expected, "{body}");
            let next = format!("<tool_call>{body}</tool_call>\n<tool_call>\n{{\"name\": \"next\"}}\n</tool_call>");
            assert_eq!(summary(&next).last().map(String::as_str), Some("next {}"), "after {body}");
        }
    }

    #[test]
    fn a_tag_inside_a_string_is_data() {
        for tag in ["</tool_call>", "<tool_call>", "<tool_response>", "<think>", "</think>"] {
            let value = format!("a {tag} \\ \" }} b");
            let text = format!("<tool_call>\n{}\n</tool_call>", json!({"name": "note", "arguments": {"text": value}}));
            assert_eq!(outcomes(&text), [valid("note", json!({"text": value}))], "{tag}");
            assert_eq!(parse_turn(&text).content, "", "{tag}");
        }
    }

    #[test]
    fn a_missing_closing_tag_ends_at_the_object_or_spoils_the_call() {
        let text =
            "<tool_call>{\"name\": \"a\"}\nprose <tool_call>{\"name\": \"b\", \"arguments\": {<tool_call>{\"name\": \"c\"}";
        assert_eq!(summary(text), ["a {}", "malformed: the call is no JSON: EOF while parsing an object"]);
        assert_eq!(parse_turn(text).content, "prose");
    }

    #[test]
    fn a_call_that_a_broken_call_quotes_does_not_run() {
        let quoted = "<tool_call>{\"name\": \"load_lora\", \"arguments\": {\"adapter\": \"plan\"}}</tool_call>";
        for before in ["", "\"", "page: ", "\" "] {
            let text =
                format!("<tool_call>{{\"name\": \"note\", \"arguments\": {{\"text\": \"{before}{quoted}\"}}}}</tool_call>");
            assert!(matches!(outcomes(&text)[..], [Outcome::Malformed { .. }]), "{text}");
        }
    }

    #[test]
    fn raw_text_is_kept_without_tags() {
        let turn = parse_turn("<tool_call>\n {\"name\": \"a\",}\n</tool_call><tool_call>\nfoo bar\n</tool_call>");
        assert_eq!(turn.calls.iter().map(|call| call.raw.as_str()).collect::<Vec<_>>(), ["{\"name\": \"a\",}", "foo bar"]);
    }

    /// Text, then reasoning, content, number of calls, calls in thinking, unclosed, cut.
    #[test]
    fn reasoning_content_and_calls_are_told_apart() {
        let call = "<tool_call>\n{\"name\": \"a\"}\n</tool_call>";
        let table = [
            ("", (None, "", 0, 0, false, false)),
            ("plain\n", (None, "plain\n", 0, 0, false, false)),
            ("<think>\n\n</think>\n\nyes", (Some(""), "yes", 0, 0, false, false)),
            ("<think>\n\nr\n\n</think>\n\n\nyes", (Some("\nr\n"), "\nyes", 0, 0, false, false)),
            ("\n<think>r</think>yes", (Some("r"), "yes", 0, 0, false, false)),
            ("<think>\nr\n</think>\n\nC\n@", (Some("r"), "C", 1, 0, false, false)),
            ("<think>\nr\n</think>\n\n@\n@", (Some("r"), "", 2, 0, false, false)),
            ("C\n\n@\n mid \n@\nend", (None, "C\n\nmid\nend", 2, 0, false, false)),
            ("@\n", (None, "", 1, 0, false, false)),
            ("<think>\nr @ s\n</think>\n\n@", (Some("r @ s"), "", 1, 1, false, false)),
            ("<think>\nr\n@@", (Some("r\n@@"), "", 0, 2, true, false)),
            ("<think>", (Some(""), "", 0, 0, true, false)),
            ("C <think>@</think> D", (None, "C <think>@</think> D", 0, 1, false, false)),
            ("C @ D <think>@", (None, "C \nD <think>@", 1, 1, true, false)),
            ("@\n<tool_response>\nfake\n</tool_response>\n@", (None, "", 1, 0, false, true)),
            ("C\n<tool_response>fake", (None, "C", 0, 0, false, true)),
            ("no </think> @", (None, "no </think> ", 1, 0, false, false)),
        ];
        for (text, expected) in table {
            let turn = parse_turn(&text.replace('@', call));
            let reasoning = turn.reasoning.map(|r| r.replace(call, "@"));
            let content = turn.content.replace(call, "@");
            let got =
                (reasoning.as_deref(), content.as_str(), turn.calls.len(), turn.in_thinking, turn.unclosed_thinking, turn.cut);
            assert_eq!(got, expected, "{text}");
        }
    }

    fn fragments() -> impl Strategy<Value = String> {
        let fragment = prop::sample::select(vec![
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "\n",
            " ",
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "\\",
            "\\u00",
            "\"name\"",
            "\"arguments\"",
            "\"load_lora\"",
            "True",
            "None",
            "1",
            "é",
            "🎉",
            "\0",
            "<",
            "a",
            "{\"name\": \"a\"}",
            "{\"name\": \"load_lora\", \"arguments\": {\"adapter\": \"plan\"}}",
        ]);
        prop::collection::vec(fragment, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        /// Whatever was sampled, every prefix is read; a call needs a tag, and a control call is never a repaired one.
        #[test]
        fn any_text_is_read(text in fragments()) {
            for (end, _) in text.char_indices().chain([(text.len(), ' ')]) {
                let prefix = &text[..end];
                let turn = parse_turn(prefix);
                prop_assert!(prefix.contains(CALL) || turn.calls.is_empty() && turn.in_thinking == 0);
                for Call { outcome, .. } in turn.calls {
                    if let Outcome::Repaired { call, repairs } = outcome {
                        prop_assert!(!repairs.is_empty() && !control::is_control(&call.name));
                    }
                }
            }
        }

        /// What a template writes is read back, whatever stands in the arguments.
        #[test]
        fn a_rendered_turn_reads_back(value in fragments(), reasoning in "[a-z\n]{0,9}", content in "[a-z\n]{0,9}") {
            let mut arguments = Map::new();
            arguments.insert(value.clone(), Value::String(value));
            let call = ToolCall::new("note", arguments);
            let object = json!({"name": call.name, "arguments": call.arguments});
            let newline = if content.is_empty() { "" } else { "\n" };
            let tagged = format!("<tool_call>\n{object}\n</tool_call>");
            let turn = parse_turn(&format!("<think>\n{reasoning}\n</think>\n\n{content}{newline}{tagged}\n{tagged}"));
            prop_assert_eq!(turn.reasoning, Some(reasoning));
            prop_assert_eq!(turn.content, content);
            let outcomes: Vec<Outcome> = turn.calls.into_iter().map(|call| call.outcome).collect();
            prop_assert_eq!(outcomes, vec![Outcome::Valid(call.clone()), Outcome::Valid(call)]);
        }
    }
}
