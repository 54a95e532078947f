//! The one render-and-encode path: conversations to token ids for training, running, scoring and evaluation.
//!
//! A conversation is a row of *pieces*: blocks of messages that the policy did not write, each ending with the generation
//! prompt, and the policy's turns, each ending with the end-of-turn token. Pieces are encoded one by one, so that a run's prompt
//! is exactly a prefix of the training sample of its next turn, and sampled ids are never rendered again.

use std::{ops::Range, path::Path, str::FromStr};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    Error, Result,
    io::tensors::hex,
    message::{Message, Role},
    template::{Template, python_json},
    tokenizer::Tokenizer,
};

/// How tools reach the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolProtocol {
    /// The template lists tools and renders calls.
    #[default]
    Template,
    /// For templates that know no tools: the system message lists them in the Hermes form, calls are `<tool_call>` text and
    /// results are user messages with `<tool_response>`.
    Text,
}

impl FromStr for ToolProtocol {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "template" => Ok(Self::Template),
            "text" => Ok(Self::Text),
            _ => Err(Error::Model(format!("tool protocol {name:?} is neither template nor text"))),
        }
    }
}

/// A checkpoint's template and tokenizer with the tool protocol in use.
#[derive(Debug)]
pub struct Chat {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The template.
    pub template: Template,
    /// How tools reach the model.
    pub protocol: ToolProtocol,
    end_of_turn: String,
    end_of_turn_id: u32,
}

/// A stretch of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The messages it renders.
    pub messages: Range<usize>,
    /// A turn of the policy, or a block of what others wrote.
    pub is_turn: bool,
    marked: String,
    guard: char,
}

impl Chat {
    /// Opens template and tokenizer of a checkpoint.
    ///
    /// # Errors
    /// If either is missing or broken, or the template ends no turn with a control token.
    pub fn open(dir: &Path, protocol: ToolProtocol) -> Result<Self> {
        let tokenizer = Tokenizer::open(dir)?.ok_or_else(|| Error::file(dir, "has no tokenizer.json"))?;
        let template = Template::open(dir)?
            .ok_or_else(|| Error::file(dir, "has no chat template (chat_template.jinja or tokenizer_config.json)"))?;
        Self::new(tokenizer, template, protocol)
    }

    /// A path over this template and tokenizer.
    ///
    /// # Errors
    /// If the template ends no turn with a control token of the tokenizer.
    pub fn new(tokenizer: Tokenizer, template: Template, protocol: ToolProtocol) -> Result<Self> {
        const PROBE: &str = "PROBE";
        let message = |role: &str, content: &str| json!({"role": role, "content": content, "reasoning_content": ""});
        let text =
            template.render(&[message("user", "x"), message("assistant", PROBE), message("user", "y")], &[], false, None)?;
        let after = text.find(PROBE).map(|at| &text[at + PROBE.len()..]).unwrap_or_default();
        let end = tokenizer.controls().iter().find(|c| after.starts_with(&c.text));
        let Some(end) = end else {
            let shown: String = after.chars().take(20).collect();
            return Err(Error::Template(format!(
                "an assistant turn is followed by {shown:?}, which starts with no control token"
            )));
        };
        let (end_of_turn, end_of_turn_id) = (end.text.clone(), end.id);
        Ok(Self { tokenizer, template, protocol, end_of_turn, end_of_turn_id })
    }

    /// The id that ends a turn.
    pub fn end_of_turn(&self) -> u32 {
        self.end_of_turn_id
    }

    /// SHA-256 of the template's text.
    pub fn template_digest(&self) -> String {
        hex(&Sha256::digest(self.template.source()))
    }

    /// The pieces of a conversation. With `open`, the last piece ends with the generation prompt: the prompt of the next turn.
    ///
    /// # Errors
    /// If the template can't render it, knows no tools though there are some, or changes earlier text when messages are added.
    pub fn pieces(&self, messages: &[Message], tools: &[Value], open: bool) -> Result<Vec<Piece>> {
        if self.protocol == ToolProtocol::Template && !tools.is_empty() && !self.template.knows_tools() {
            return Err(Error::Template(
                "it lists no tools; tool_protocol = \"text\" writes them into the system message".to_owned(),
            ));
        }
        let guard = free_guard(&(messages, tools))?;
        let whole = if open {
            self.render_up_to_turn(messages, tools, guard)?
        } else if ends_with_turn(messages) {
            // Some templates write the last message differently; a message after it shows what it becomes.
            self.render(&followed_by(messages, [Message::text(Role::User, "")]), tools, false, guard)?
        } else {
            self.render(messages, tools, false, guard)?
        };
        let mut pieces = Vec::new();
        let (mut cursor, mut next_message) = (0, 0);
        let mut push = |messages: Range<usize>, is_turn: bool, text: Range<usize>| {
            pieces.push(Piece { messages, is_turn, marked: whole[text].to_owned(), guard });
        };
        for (i, _) in messages.iter().enumerate().filter(|(_, m)| m.role == Role::Assistant) {
            let prompt = self.render_up_to_turn(&messages[..i], tools, guard)?;
            let start = prompt.len();
            if !whole.starts_with(&prompt) || start < cursor {
                return Err(Error::Template(format!(
                    "the text before message {i} changes when messages are added: it can't be trained or continued"
                )));
            }
            let Some(len) = whole[start..].find(&self.end_of_turn) else {
                return Err(Error::Template(format!("message {i} does not end with {}", self.end_of_turn)));
            };
            let end = start + len + self.end_of_turn.len();
            push(next_message..i, false, cursor..start);
            push(i..i + 1, true, start..end);
            (cursor, next_message) = (end, i + 1);
        }
        if open || !ends_with_turn(messages) {
            push(next_message..messages.len(), false, cursor..whole.len());
        }
        Ok(pieces)
    }

    /// The ids of a piece. Control strings in what tools and users wrote, and turn marks in what anybody wrote, are encoded as
    /// plain characters.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn encode(&self, piece: &Piece) -> Result<Vec<u32>> {
        self.tokenizer.encode_guarded(&piece.marked, piece.guard)
    }

    /// The ids of the next turn's prompt.
    ///
    /// # Errors
    /// As [`Self::pieces`] and [`Self::encode`].
    pub fn prompt(&self, messages: &[Message], tools: &[Value]) -> Result<Vec<u32>> {
        let pieces = self.pieces(messages, tools, true)?;
        Ok(pieces.iter().map(|p| self.encode(p)).collect::<Result<Vec<_>>>()?.concat())
    }

    /// Messages exactly as transformers renders them, and the ids on the trusted or the safe path (`safe`: control strings in user
    /// and tool messages make no control tokens).
    ///
    /// # Errors
    /// If rendering or encoding fails.
    pub fn render_official(
        &self,
        messages: &[Value],
        tools: &[Value],
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
        safe: bool,
    ) -> Result<(String, Vec<u32>)> {
        let text = self.template.render(messages, tools, add_generation_prompt, enable_thinking)?;
        if !safe {
            let ids = self.tokenizer.encode(&text)?;
            return Ok((text, ids));
        }
        let guard = free_guard(&(messages, tools))?;
        let guarded: Vec<Value> = messages
            .iter()
            .map(|message| {
                let mut message = message.clone();
                let role = message["role"].as_str().unwrap_or_default().to_owned();
                if let (Some(content), "user" | "tool") = (message["content"].as_str(), role.as_str()) {
                    message["content"] = Value::String(self.tokenizer.guard(content, guard, |_| true));
                }
                message
            })
            .collect();
        let marked = self.template.render(&guarded, tools, add_generation_prompt, enable_thinking)?;
        let ids = self.tokenizer.encode_guarded(&marked, guard)?;
        Ok((text, ids))
    }

    fn render(&self, messages: &[Message], tools: &[Value], add_generation_prompt: bool, guard: char) -> Result<String> {
        // A tool's description may come from a server or a data set: it makes no turn marks.
        let tools: Vec<Value> = tools.iter().map(|tool| self.guarded_json(tool, guard)).collect();
        let (values, tools): (Vec<Value>, &[Value]) = match self.protocol {
            ToolProtocol::Template => (messages.iter().map(|m| self.template_value(m, guard)).collect(), &tools),
            ToolProtocol::Text => (self.text_values(messages, &tools, guard), &[]),
        };
        self.template.render(&values, tools, add_generation_prompt, None)
    }

    /// The text up to where the turn after `messages` begins. Templates write their generation prompt after what others wrote;
    /// after a turn, a further turn shows where its text begins.
    fn render_up_to_turn(&self, messages: &[Message], tools: &[Value], guard: char) -> Result<String> {
        if !ends_with_turn(messages) {
            return self.render(messages, tools, true, guard);
        }
        let more = [Message::text(Role::Assistant, guard), Message::text(Role::User, "")];
        let mut text = self.render(&followed_by(messages, more), tools, false, guard)?;
        let start = text.rfind(guard).ok_or_else(|| Error::Template("it leaves out what a turn says".to_owned()))?;
        text.truncate(start);
        Ok(text)
    }

    /// What a message may say, with control strings broken where its author must not steer.
    fn guarded(&self, role: Role, text: &str, guard: char) -> String {
        match role {
            Role::System => text.to_owned(),
            Role::User | Role::Tool => self.tokenizer.guard(text, guard, |_| true),
            // The policy writes tags, but no turn mark within its turn.
            Role::Assistant => self.tokenizer.guard(text, guard, |c| c.special || c.id == self.end_of_turn_id),
        }
    }

    /// A message for a template that knows tools. Thinking is folded into the content, and `reasoning_content` is defined and
    /// empty: every turn keeps its thinking, and no empty block is added.
    fn template_value(&self, message: &Message, guard: char) -> Value {
        let mut value = json!({"role": message.role, "content": self.guarded(message.role, &self.spoken(message), guard)});
        if message.role == Role::Assistant {
            value["reasoning_content"] = json!("");
            if !message.tool_calls.is_empty() {
                let calls = message.tool_calls.iter().map(|call| {
                    let arguments = self.guarded_json(&Value::Object(call.arguments.clone()), guard);
                    let name = self.guarded(Role::Assistant, &call.name, guard);
                    json!({"type": "function", "function": {"name": name, "arguments": arguments}})
                });
                value["tool_calls"] = calls.collect();
            }
        }
        value
    }

    fn guarded_json(&self, value: &Value, guard: char) -> Value {
        match value {
            Value::String(text) => Value::String(self.guarded(Role::Assistant, text, guard)),
            Value::Array(items) => items.iter().map(|v| self.guarded_json(v, guard)).collect(),
            Value::Object(map) => {
                let entry = |(k, v): (&String, &Value)| (self.guarded(Role::Assistant, k, guard), self.guarded_json(v, guard));
                map.iter().map(entry).collect::<serde_json::Map<_, _>>().into()
            }
            other => other.clone(),
        }
    }

    /// A turn's text before its calls, thinking included, as Qwen's template writes it.
    fn spoken(&self, message: &Message) -> String {
        let content = &message.content;
        match &message.reasoning_content {
            None => content.clone(),
            // The template itself puts a newline between text and a first call.
            Some(thought) if content.is_empty() && !message.tool_calls.is_empty() => format!("<think>\n{thought}\n</think>\n"),
            Some(thought) => format!("<think>\n{thought}\n</think>\n\n{content}"),
        }
    }

    /// Messages for a template that knows no tools: the Hermes form, with neighbouring results in one user message.
    fn text_values(&self, messages: &[Message], tools: &[Value], guard: char) -> Vec<Value> {
        let mut values: Vec<Value> = Vec::new();
        let tool_list = tool_list(tools);
        let mut in_results = false;
        for (i, message) in messages.iter().enumerate() {
            let mut text = self.guarded(message.role, &self.spoken(message), guard);
            for call in &message.tool_calls {
                let arguments = python_json(&self.guarded_json(&Value::Object(call.arguments.clone()), guard), None);
                let separator = if text.is_empty() { "" } else { "\n" };
                text.push_str(&format!(
                    "{separator}<tool_call>\n{{\"name\": \"{}\", \"arguments\": {arguments}}}\n</tool_call>",
                    self.guarded(Role::Assistant, &call.name, guard)
                ));
            }
            if message.role == Role::Tool {
                let result = format!("<tool_response>\n{text}\n</tool_response>");
                match values.last_mut() {
                    Some(last) if in_results => {
                        last["content"] = json!(format!("{}\n{result}", last["content"].as_str().unwrap_or_default()))
                    }
                    _ => values.push(json!({"role": "user", "content": result})),
                }
                in_results = true;
                continue;
            }
            in_results = false;
            if i == 0 && !tool_list.is_empty() {
                if message.role == Role::System {
                    text = format!("{text}\n\n{tool_list}");
                } else {
                    values.push(json!({"role": "system", "content": tool_list}));
                }
            }
            values.push(json!({"role": message.role, "content": text}));
        }
        values
    }
}

/// Qwen's wording of the tool list, which is the Hermes form.
fn tool_list(tools: &[Value]) -> String {
    if tools.is_empty() {
        return String::new();
    }
    let listed: String = tools.iter().map(|tool| format!("\n{}", python_json(tool, None))).collect();
    format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within \
         <tools></tools> XML tags:\n<tools>{listed}\n</tools>\n\nFor each function call, return a json object with function name and arguments \
         within <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>"
    )
}

fn ends_with_turn(messages: &[Message]) -> bool {
    messages.last().is_some_and(|m| m.role == Role::Assistant)
}

fn followed_by<const N: usize>(messages: &[Message], more: [Message; N]) -> Vec<Message> {
    messages.iter().cloned().chain(more).collect()
}

/// A private-use character that `content` does not hold: it breaks control strings on the way through the template. They are so
/// many that no page can use them up.
fn free_guard(content: &impl Serialize) -> Result<char> {
    let text = serde_json::to_string(content).expect("messages and tools serialise");
    let mut guards = ('\u{f0000}'..='\u{ffffd}').rev();
    guards.find(|c| !text.contains(*c)).ok_or_else(|| Error::Tokenizer("the text uses every guard character".to_owned()))
}
