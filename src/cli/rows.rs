//! Rows of tokens to score, from JSONL: ids, text, or messages.

use std::{collections::HashSet, path::Path};

use serde::Deserialize;
use serde_json::Value;
use weact::core::{
    Error, Result,
    chat::{Chat, ToolProtocol},
    message::Message,
    tokenizer::Tokenizer,
};

use super::lines;

#[derive(Deserialize)]
struct Line {
    id: Value,
    ids: Option<Vec<u32>>,
    text: Option<String>,
    messages: Option<Vec<Message>>,
    tools: Option<Vec<Value>>,
    mask: Option<Vec<u8>>,
}

/// A row to score.
pub(super) struct Row {
    pub(super) id: Value,
    pub(super) ids: Vec<u32>,
    /// 1 where the token counts, as long as the ids; every token counts where there is none.
    pub(super) mask: Option<Vec<u8>>,
}

/// Reads the rows of `file` and encodes them with the tokenizer and template of the checkpoint in `dir`.
///
/// # Errors
/// If the file can't be read or a row is wrong, which is said with its line.
pub(super) fn read(file: &Path, dir: &Path, protocol: ToolProtocol, vocab_size: usize) -> Result<Vec<Row>> {
    let lines = lines::read::<Line>(file)?;
    let (mut chat, mut tokenizer) = (None, None); // opened for the first row that needs them
    let mut seen = HashSet::new();
    let mut rows = Vec::new();
    for (number, line) in lines {
        let wrong = |why: String| lines::wrong(file, number, why);
        let ids = match (line.ids, line.text, line.messages) {
            (Some(ids), None, None) => ids,
            (None, Some(text), None) => {
                let tokenizer = match &mut tokenizer {
                    Some(tokenizer) => tokenizer,
                    empty => empty.insert(need_tokenizer(dir)?),
                };
                tokenizer.encode(&text).map_err(|e| wrong(e.to_string()))?
            }
            (None, None, Some(messages)) => {
                let chat = match &mut chat {
                    Some(chat) => chat,
                    empty => empty.insert(Chat::open(dir, protocol)?),
                };
                encode(chat, &messages, &line.tools.unwrap_or_default()).map_err(|e| wrong(e.to_string()))?
            }
            _ => return Err(wrong("a row has exactly one of ids, text and messages".to_owned())),
        };
        if !(line.id.is_string() || line.id.is_number()) {
            return Err(wrong(format!("the id is a string, not {}", line.id)));
        }
        if !seen.insert(name(&line.id)) {
            return Err(wrong(format!("the id {} occurs twice", line.id)));
        }
        if ids.is_empty() {
            return Err(wrong("the row has no tokens".to_owned()));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab_size) {
            return Err(wrong(format!("token id {id} is outside the model's vocabulary of {vocab_size}")));
        }
        if let Some(mask) = &line.mask {
            if mask.len() != ids.len() {
                return Err(wrong(format!("the mask has {} entries, the row {} tokens", mask.len(), ids.len())));
            }
            if let Some(other) = mask.iter().find(|m| **m > 1) {
                return Err(wrong(format!("the mask has an entry {other}; 0 and 1 are allowed")));
            }
        }
        rows.push(Row { id: line.id, ids, mask: line.mask });
    }
    Ok(rows)
}

fn need_tokenizer(dir: &Path) -> Result<Tokenizer> {
    Tokenizer::open(dir)?.ok_or_else(|| Error::file(dir, "has no tokenizer.json: give ids instead of text"))
}

/// A whole conversation as training encodes it.
fn encode(chat: &Chat, messages: &[Message], tools: &[Value]) -> Result<Vec<u32>> {
    let pieces = chat.pieces(messages, tools, false)?;
    Ok(pieces.iter().map(|piece| chat.encode(piece)).collect::<Result<Vec<_>>>()?.concat())
}

/// An id as a tensor's name.
pub(super) fn name(id: &Value) -> String {
    id.as_str().map_or_else(|| id.to_string(), str::to_owned)
}
