//! Text to token ids and back. Text that a tool or a person wrote can be encoded so that it never makes a control token.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{Error, Result, io::tensors::hex};

/// A token that steers: a turn's start or end, a tool call's or a thought's tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// Its text.
    pub text: String,
    /// Its id.
    pub id: u32,
    /// Marked special by the tokenizer: it structures turns. Tags such as `<tool_call>` usually are not.
    pub special: bool,
}

/// A checkpoint's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    full: tokenizers::Tokenizer,
    plain: tokenizers::Tokenizer, // the same without control tokens: their text encodes as ordinary characters
    controls: Vec<Control>,       // longest first
    stop_ids: BTreeSet<u32>,
    digest: String,
}

/// Around the name under which a control token keeps its place in the plain tokenizer: no character of any text.
const PLACE: char = '\u{10fffe}';

fn broken(error: impl std::fmt::Display) -> Error {
    Error::Tokenizer(error.to_string())
}

impl Tokenizer {
    /// Loads `DIR/tokenizer.json`; end tokens come from `generation_config.json`, `config.json` and `tokenizer_config.json`.
    /// `None` if there is no tokenizer file.
    ///
    /// # Errors
    /// If a file can't be read or parsed.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        let bytes = fs::read(&path).map_err(|e| Error::io("can't read", &path, e))?;
        let mut tokenizer = Self::from_json(&bytes).map_err(|e| Error::file(&path, e.to_string()))?;
        tokenizer.stop_ids.extend(stop_ids(dir)?);
        let config = read_json(&dir.join("tokenizer_config.json"))?;
        let eos = config["eos_token"].as_str().or_else(|| config["eos_token"]["content"].as_str());
        tokenizer.stop_ids.extend(eos.and_then(|eos| tokenizer.full.token_to_id(eos)));
        Ok(Some(tokenizer))
    }

    /// A tokenizer from the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// If it is none.
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        let full = tokenizers::Tokenizer::from_bytes(bytes).map_err(broken)?;
        let mut json: Value = serde_json::from_slice(bytes).map_err(broken)?;
        let mut controls = Vec::new();
        let in_model: BTreeSet<String> =
            json["model"]["vocab"].as_object().into_iter().flatten().map(|(k, _)| k.clone()).collect();
        if let Some(added) = json["added_tokens"].as_array_mut() {
            added.retain_mut(|token| {
                let text = token["content"].as_str().unwrap_or_default().to_owned();
                let special = token["special"] == Value::Bool(true);
                let (true, Some(id)) = (special || is_tag(&text), token["id"].as_u64()) else { return true };
                // Loading numbers added tokens by position, so one that takes a number keeps its place under a name that no
                // text has; one that stands in the model's own vocabulary takes none.
                token["content"] = Value::String(format!("{PLACE}{id}{PLACE}"));
                let keeps_its_place = !in_model.contains(&text);
                controls.push(Control { text, id: id as u32, special });
                keeps_its_place
            });
        }
        controls.sort_by_key(|c| std::cmp::Reverse(c.text.len()));
        let plain = tokenizers::Tokenizer::from_bytes(json.to_string()).map_err(broken)?;
        let moved = |(id, token): (&u32, &tokenizers::AddedToken)| {
            let stays = controls.iter().any(|c| c.id == *id) || plain.id_to_token(*id).as_deref() == Some(token.content.as_str());
            (!stays).then(|| token.content.clone())
        };
        if let Some(token) = full.get_added_tokens_decoder().iter().find_map(moved) {
            return Err(Error::Tokenizer(format!("the added token {token:?} changes its id without the control tokens")));
        }
        let digest = hex(&Sha256::digest(bytes));
        Ok(Self { full, plain, controls, stop_ids: BTreeSet::new(), digest })
    }

    /// SHA-256 of the tokenizer file.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Ids after which generation ends.
    pub fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.stop_ids
    }

    /// The control tokens.
    pub fn controls(&self) -> &[Control] {
        &self.controls
    }

    /// Number of entries, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.full.get_vocab_size(true)
    }

    /// The id of a token by its text.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.full.token_to_id(token)
    }

    /// Ids of trusted text: control strings become control tokens. No token is added at either end.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.full.encode_fast(text, false).map_err(broken)?.get_ids().to_vec())
    }

    /// Ids of `marked` text in which untrusted control strings are broken by `guard` (see [`Self::guard`]): what is left whole
    /// becomes control tokens, the rest ordinary ones, and the guards vanish. Without a guard in it, the same as
    /// [`Self::encode`].
    ///
    /// # Errors
    /// If the tokenizer fails, or untrusted text made a control token all the same.
    pub fn encode_guarded(&self, marked: &str, guard: char) -> Result<Vec<u32>> {
        if !marked.contains(guard) {
            return self.encode(marked);
        }
        let mut ids = Vec::new();
        let mut rest = marked;
        while !rest.is_empty() {
            let next = self.first_control(rest, |_| true);
            let (chunk, control) = next.map_or((rest, None), |(at, control)| (&rest[..at], Some(control)));
            let text: String = chunk.chars().filter(|c| *c != guard).collect();
            // No part holds the name under which a control token keeps its place.
            for part in text.split_inclusive(PLACE) {
                let encoded = self.plain.encode_fast(part, false).map_err(broken)?;
                if let Some(id) = encoded.get_ids().iter().find(|id| self.controls.iter().any(|c| c.id == **id)) {
                    return Err(Error::Tokenizer(format!("untrusted text encodes to the control token {id}")));
                }
                ids.extend_from_slice(encoded.get_ids());
            }
            ids.extend(control.map(|c| c.id));
            rest = &rest[chunk.len() + control.map_or(0, |c| c.text.len())..];
        }
        Ok(ids)
    }

    /// `text` with `guard` put into each control string that `which` selects, so that it is none any more.
    pub fn guard(&self, text: &str, guard: char, which: impl Fn(&Control) -> bool) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((at, control)) = self.first_control(rest, &which) {
            let first = control.text.chars().next().expect("a control has text").len_utf8();
            out.push_str(&rest[..at + first]);
            out.push(guard);
            rest = &rest[at + first..];
        }
        out.push_str(rest);
        out
    }

    /// The first control string in `text`, the longest where several start at one place.
    fn first_control(&self, text: &str, which: impl Fn(&Control) -> bool) -> Option<(usize, &Control)> {
        text.char_indices().find_map(|(at, _)| {
            self.controls.iter().find(|c| text[at..].starts_with(&c.text) && which(c)).map(|control| (at, control))
        })
    }

    /// Text of ids; control tokens are shown.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.full.decode(ids, false).map_err(broken)
    }

    /// Gives text as ids come in: pieces join to the full decode, and no half character is ever shown.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn decode_stream(&self, ids: &[u32], show: &mut dyn FnMut(&str)) -> Result<()> {
        let mut stream = self.full.decode_stream(false);
        let mut shown = 0;
        for id in ids {
            if let Some(piece) = stream.step(*id).map_err(broken)? {
                shown += piece.len();
                show(&piece);
            }
        }
        let all = self.decode(ids)?;
        if let Some(rest) = all.get(shown..).filter(|rest| !rest.is_empty()) {
            show(rest);
        }
        Ok(())
    }

    /// The text of each id; together they are that of [`Self::decode`]. Of a character that several ids make, the last has the whole.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn pieces(&self, ids: &[u32]) -> Result<Vec<String>> {
        let mut stream = self.full.decode_stream(false);
        let mut pieces =
            ids.iter().map(|id| Ok(stream.step(*id).map_err(broken)?.unwrap_or_default())).collect::<Result<Vec<String>>>()?;
        let n_shown = pieces.iter().map(String::len).sum();
        if let (Some(last), Some(rest)) = (pieces.last_mut(), self.decode(ids)?.get(n_shown..)) {
            last.push_str(rest);
        }
        Ok(pieces)
    }

    /// `text` cut to at most `n_tokens` by leaving out its middle, with a marker that says how many tokens are gone; `None` if it
    /// is no longer than that.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn clipped(&self, text: &str, n_tokens: usize) -> Result<Option<String>> {
        let encoded = self.plain.encode(text, false).map_err(broken)?;
        let offsets = encoded.get_offsets();
        if offsets.len() <= n_tokens {
            return Ok(None);
        }
        let (head, tail) = (n_tokens.div_ceil(2), offsets.len() - n_tokens / 2); // tokens ..head and tail.. may stay
        // The tokens of one character all have the whole character's offsets: where a cut divides it, it goes.
        let head_end = head.checked_sub(1).map_or(0, |last| offsets[last].1.min(offsets[head].0));
        let tail_start = offsets.get(tail).map_or(text.len(), |first| first.0.max(offsets[tail - 1].1));
        let head_end = text.floor_char_boundary(head_end);
        let tail_start = text.ceil_char_boundary(tail_start).max(head_end);
        let kept = offsets.iter().filter(|(start, end)| *end <= head_end || *start >= tail_start).count();
        let gone = offsets.len() - kept;
        Ok(Some(format!("{}\n[{gone} tokens left out]\n{}", &text[..head_end], &text[tail_start..])))
    }
}

/// `<name>` and `</name>`: tags that chat models act on whether or not the tokenizer calls them special.
fn is_tag(text: &str) -> bool {
    let inner = text.strip_prefix('<').and_then(|t| t.strip_suffix('>')).map(|t| t.strip_prefix('/').unwrap_or(t));
    inner.is_some_and(|name| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-|".contains(c)))
}

/// End-of-sequence ids that `generation_config.json` and `config.json` of a checkpoint name.
///
/// # Errors
/// If a file is there but can't be read.
pub fn stop_ids(dir: &Path) -> Result<BTreeSet<u32>> {
    let mut ids = BTreeSet::new();
    for file in ["generation_config.json", "config.json"] {
        match &read_json(&dir.join(file))?["eos_token_id"] {
            Value::Array(list) => ids.extend(list.iter().filter_map(Value::as_u64).map(|id| id as u32)),
            one => ids.extend(one.as_u64().map(|id| id as u32)),
        }
    }
    Ok(ids)
}

fn read_json(path: &Path) -> Result<Value> {
    if !path.exists() {
        return Ok(Value::Null);
    }
    let text = fs::read_to_string(path).map_err(|e| Error::io("can't read", path, e))?;
    serde_json::from_str(&text).map_err(|e| Error::file(path, e.to_string()))
}
