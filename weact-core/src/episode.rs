//! Episodes: what a run writes down, one JSON line per event, so that a crash leaves a valid prefix. The [`Trajectory`] that
//! training reads is a view of it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    Capability, Error, Result,
    message::{Message, Role},
    trajectory::{Exit, Span, Trajectory},
};

/// One line of an episode file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The episode's id, the same on all its lines.
    pub episode: String,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// What happened, in the order in which it happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The first line: what runs.
    Header(Header),
    /// A message joined the history.
    Message(MessageEvent),
    /// The active adapter changed. The next token is the first under the new weights.
    Transition(Transition),
    /// Something that is neither: a violation of the rules, a repaired call, a call inside thinking, omitted results.
    Notice(Notice),
    /// An interval of the run's time. Intervals tile the run: each starts where the one before it ended.
    Time(Interval),
    /// The last line: how it ended. An episode without it was interrupted.
    Outcome(Outcome),
}

/// What runs: enough to run it again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Version of this format.
    pub v: u32,
    /// The question asked.
    pub question: String,
    /// The controller: `hard`, `base`, `single:ALIAS`.
    pub policy: String,
    /// Tool schemas as the model sees them.
    pub tools: Vec<Value>,
    /// Digest of the backbone's weights.
    pub base: String,
    /// `alias@digest` of each registered adapter.
    pub adapters: Vec<String>,
    /// Everything else that decides the run (sampler, seed, budgets, template and tokenizer digests, device), by name.
    #[serde(flatten)]
    pub settings: Map<String, Value>,
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Author {
    /// The person or file that asked.
    User,
    /// The policy, token by token.
    Model,
    /// The harness: the system message, and in the policy's name the load and release exchanges that it prescribes.
    Harness,
    /// A tool.
    Tool,
}

/// A message with its provenance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MessageEvent {
    /// The message.
    pub message: Message,
    /// Who wrote it.
    pub author: Author,
    /// `alias@digest` of the weights that sampled it, `base`, or nothing for text that no weights wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// The sampled token ids, end-of-turn token included, exactly as they stayed in the context.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<u32>,
    /// Why sampling ended: `stop` or `length`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<String>,
}

/// A change of the active adapter, or a call that would have been one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transition {
    /// Active before.
    pub from: Option<Capability>,
    /// Active after.
    pub to: Option<Capability>,
    /// Who or what caused it.
    pub cause: Cause,
    /// Number of messages in the history when it took effect.
    pub at: usize,
    /// Tokens of retained history that the new weights had to recompute.
    pub recomputed_tokens: usize,
}

/// Why the active adapter changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A load call: the harness's under WeAct-hard.
    Load,
    /// The policy's own `offload_lora`.
    ExitCall,
    /// The stage's or the run's budget was used up.
    Budget,
    /// The policy wrote too many messages without a call.
    NoTool,
    /// The policy repeated itself.
    Repetition,
}

/// A remark of the harness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// Its kind: `violation`, `repaired_call`, `malformed_call`, `call_in_thinking`, `left_out`, `fallback`, ...
    pub kind: String,
    /// The details.
    pub detail: String,
}

/// A part of the run's time, in nanoseconds since it began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// What was being done: `model:ROUTE`, `rebuild:ROUTE`, `tool`, `control`, `orchestration`.
    pub category: String,
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

/// How an episode ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The extracted answer.
    pub answer: Option<String>,
    /// Why it ended: `answered`, `fallback_write`, `fallback_base`, `fallback_intermediate`, `no_answer`.
    pub termination: String,
    /// How each stage ended, in order.
    pub stages: Vec<(Capability, Cause)>,
    /// Token counts.
    pub usage: Usage,
}

/// Token counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Positions computed: prompt and history, each time they were computed.
    pub prefilled: usize,
    /// Of these, recomputed because the weights changed.
    pub recomputed: usize,
    /// Tokens sampled.
    pub sampled: usize,
}

/// Collects event values of one or many episodes, interleaved or not.
#[derive(Debug, Default)]
pub struct Assembler {
    episodes: Vec<(String, Vec<Event>)>,
}

impl Assembler {
    /// Takes one event line.
    ///
    /// # Errors
    /// If it is no event, or comes before its episode's header.
    pub fn push(&mut self, line: Value) -> Result<()> {
        let Line { episode, event } = serde_json::from_value(line).map_err(|e| Error::Trajectory(e.to_string()))?;
        let known = self.episodes.iter_mut().find(|(id, _)| *id == episode);
        match (known, &event) {
            (None, Event::Header(_)) => self.episodes.push((episode, vec![event])),
            (None, _) => return Err(Error::Trajectory(format!("the episode {episode:?} has no header before this event"))),
            (Some(_), Event::Header(_)) => return Err(Error::Trajectory(format!("a second header of the episode {episode:?}"))),
            (Some((_, events)), _) => events.push(event),
        }
        Ok(())
    }

    /// The view that training reads.
    ///
    /// # Errors
    /// If an episode's transitions contradict its messages.
    pub fn trajectories(&self) -> Result<Vec<Trajectory>> {
        self.episodes.iter().map(|(id, events)| view(id, events)).collect()
    }
}

/// The trajectory of one episode: its messages, and a span for each stretch in which an adapter's own messages stand.
///
/// # Errors
/// If the events start without a header, or transitions contradict messages.
pub fn view(id: &str, events: &[Event]) -> Result<Trajectory> {
    let Some(Event::Header(header)) = events.first() else {
        return Err(Error::Trajectory(format!("the episode {id:?} has no header")));
    };
    let messages: Vec<&MessageEvent> =
        events.iter().filter_map(|e| if let Event::Message(m) = e { Some(m) } else { None }).collect();
    let transitions: Vec<&Transition> =
        events.iter().filter_map(|e| if let Event::Transition(t) = e { Some(t) } else { None }).collect();
    let mut spans = Vec::new();
    for (i, load) in transitions.iter().enumerate() {
        let Some(capability) = &load.to else { continue };
        let release = transitions.get(i + 1);
        let until = release.map_or(messages.len(), |r| r.at).min(messages.len());
        let exit = match release.map(|r| r.cause) {
            Some(Cause::ExitCall) => Exit::Call,
            Some(_) => Exit::Harness,
            None => Exit::None,
        };
        spans.extend(span_between(capability, &messages, load.at, until, exit));
    }
    let outcome = events.iter().find_map(|e| if let Event::Outcome(o) = e { Some(o) } else { None });
    let plain = messages.iter().map(|m| m.message.clone()).collect();
    let mut trajectory = Trajectory::new(id.to_owned(), header.tools.clone(), plain, spans)?;
    trajectory.question = Some(header.question.clone());
    trajectory.answer = outcome.and_then(|o| o.answer.clone()).map(Value::String);
    Ok(trajectory)
}

/// The model's messages between `from` and `until` with the results they got; the harness's release exchange is not the model's.
fn span_between(capability: &Capability, messages: &[&MessageEvent], from: usize, until: usize, exit: Exit) -> Option<Span> {
    let by_model = |m: &&MessageEvent| m.message.role == Role::Assistant && m.author == Author::Model;
    let start = from + messages.get(from..until)?.iter().position(by_model)?;
    let end = messages[start..until]
        .iter()
        .position(|m| m.message.role == Role::Assistant && m.author == Author::Harness)
        .map_or(until, |harness| start + harness);
    Some(Span { capability: capability.clone(), start, end, exit })
}
