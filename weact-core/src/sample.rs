//! Samples (Eq. 4): `p + u_k + c_k + v_k` as token ids with the mask built beside them.
//!
//! `p` is the history before the stage, `u_k` the load exchange, `c_k` the stage's messages and `v_k` its exit call. The mask is
//! true on the policy's tokens of `c_k` and `v_k`, each turn through its end-of-turn token (App. A.1); everything else is context.

use std::{collections::BTreeMap, fmt, ops::Range};

use serde::Serialize;

use crate::{
    Capability, Result, Trajectory,
    chat::Chat,
    context::{self, LeftOut, Retention},
    message::{Message, Role},
    parse::CALL,
    tokenizer::Tokenizer,
    trajectory::{Exit, Span},
};

/// How samples are cut from trajectories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// What the history keeps of tool results.
    pub retention: Retention,
    /// Longest sample in tokens. Oldest exchanges of the history go first; targets are never cut.
    pub max_length: usize,
    /// Leave out stages that did not end with the policy's own exit call.
    pub require_exit: bool,
}

/// One stage of one trajectory, ready to train on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// `trajectory id#span index`
    pub id: String,
    /// Whose stage it is.
    pub capability: Capability,
    /// Token ids.
    pub ids: Vec<u32>,
    /// Which of them are supervised; as long as `ids`. Entry `i` is about predicting `ids[i]`.
    pub mask: Vec<bool>,
    /// What was left out of the history's tool results.
    pub left_out: LeftOut,
    /// Exchanges of the history dropped to fit.
    pub dropped_exchanges: usize,
}

impl Sample {
    /// Supervised tokens that have a prediction (token 0 has none).
    pub fn n_supervised(&self) -> usize {
        self.mask.iter().skip(1).filter(|m| **m).count()
    }

    /// The exit call `v_k`: the last call of the stage's last turn, from the token that opens it through the end of the turn, as
    /// indices into `ids`. Only a stage whose exit is a call has one; elsewhere it is whatever call ends the turn, or none.
    ///
    /// # Errors
    /// If the tokenizer can't decode.
    pub fn exit_call(&self, tokenizer: &Tokenizer) -> Result<Option<Range<usize>>> {
        let Some(last) = self.mask.iter().rposition(|m| *m) else { return Ok(None) };
        let turn = self.mask[..last].iter().rposition(|m| !*m).map_or(0, |before| before + 1);
        for start in (turn..=last).rev() {
            if tokenizer.decode(&self.ids[start..=last])?.contains(CALL) {
                return Ok(Some(start..last + 1));
            }
        }
        Ok(None)
    }
}

/// Why a stage gives no sample.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It did not end with the policy's exit call, and the rules require one.
    NoExitCall,
    /// Even without the history's older exchanges it is longer than the limit.
    TooLong {
        /// Tokens that it needs.
        needed: usize,
        /// Tokens allowed.
        limit: usize,
    },
    /// No token of it is supervised.
    NothingSupervised,
    /// The trajectory has no stage of this capability.
    NoStage,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoExitCall => f.write_str("no exit call"),
            Self::TooLong { needed, limit } => write!(f, "needs {needed} tokens, max_length is {limit}"),
            Self::NothingSupervised => f.write_str("nothing is supervised"),
            Self::NoStage => f.write_str("no stage of this capability"),
        }
    }
}

/// The samples of a data set and what gave none.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// In file order.
    pub kept: Vec<Sample>,
    /// Id and reason of each stage or row left out.
    pub dropped: Vec<(String, Reason)>,
}

impl Samples {
    /// How many were left out, by reason (without the numbers).
    pub fn dropped_by_reason(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for (_, reason) in &self.dropped {
            let name = match reason {
                Reason::TooLong { limit, .. } => format!("longer than {limit} tokens"),
                other => other.to_string(),
            };
            *counts.entry(name).or_insert(0) += 1;
        }
        counts
    }
}

/// The samples of `capability` in `rows`: one for each of its spans.
///
/// # Errors
/// If a conversation can't be rendered or encoded.
pub fn samples(chat: &Chat, rows: &[Trajectory], capability: &Capability, rules: Rules) -> Result<Samples> {
    let mut samples = Samples::default();
    for row in rows {
        let spans: Vec<(usize, &Span)> = row.spans().iter().enumerate().filter(|(_, s)| s.capability == *capability).collect();
        if spans.is_empty() {
            samples.dropped.push((row.id.clone(), Reason::NoStage));
        }
        for (i, span) in spans {
            let id = format!("{}#{i}", row.id);
            match sample(chat, row, span, rules, &id)? {
                Ok(sample) => samples.kept.push(sample),
                Err(reason) => samples.dropped.push((id, reason)),
            }
        }
    }
    Ok(samples)
}

fn sample(chat: &Chat, row: &Trajectory, span: &Span, rules: Rules, id: &str) -> Result<std::result::Result<Sample, Reason>> {
    if rules.require_exit && span.exit != Exit::Call {
        return Ok(Err(Reason::NoExitCall));
    }
    let last_turn = (span.start..span.end).rev().find(|i| row.messages()[*i].role == Role::Assistant).expect("a span has a turn");
    let (mut messages, left_out) = context::view(&row.messages()[..=last_turn], span.start, rules.retention, &chat.tokenizer)?;
    let mut start = span.start;
    let mut dropped_exchanges = 0;
    loop {
        let (ids, mask) = encode(chat, &messages, row, start)?;
        if ids.len() <= rules.max_length {
            let sample =
                Sample { id: id.to_owned(), capability: span.capability.clone(), ids, mask, left_out, dropped_exchanges };
            return Ok(if sample.n_supervised() == 0 { Err(Reason::NothingSupervised) } else { Ok(sample) });
        }
        let Some(n_messages) = drop_oldest_exchange(&mut messages, start) else {
            return Ok(Err(Reason::TooLong { needed: ids.len(), limit: rules.max_length }));
        };
        start -= n_messages;
        dropped_exchanges += 1;
    }
}

/// Ids and mask of a conversation whose turns from message `start` on are supervised.
fn encode(chat: &Chat, messages: &[Message], row: &Trajectory, start: usize) -> Result<(Vec<u32>, Vec<bool>)> {
    let (mut ids, mut mask) = (Vec::new(), Vec::new());
    for piece in chat.pieces(messages, &row.tools, false)? {
        let piece_ids = chat.encode(&piece)?;
        let supervised = piece.is_turn && piece.messages.start >= start;
        mask.resize(mask.len() + piece_ids.len(), supervised);
        ids.extend(piece_ids);
    }
    Ok((ids, mask))
}

/// Removes the oldest assistant turn of the history with the results that follow it; never the opening messages, nor the load
/// exchange just before the stage. Returns how many messages went.
fn drop_oldest_exchange(messages: &mut Vec<Message>, stage_start: usize) -> Option<usize> {
    let load = messages[..stage_start].iter().rposition(|m| m.role == Role::Assistant)?;
    let first = messages[..load].iter().position(|m| m.role == Role::Assistant)?;
    let len = messages[first + 1..load].iter().take_while(|m| m.role == Role::Tool).count() + 1;
    messages.drain(first..first + len);
    Some(len)
}
