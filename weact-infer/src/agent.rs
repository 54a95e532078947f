//! An agent's run (Algorithm 1): one shared history, the session that continues it, and what controllers do with both: take a
//! turn, answer its calls, switch weights. Which stages there are and when they end is the [controller](crate::controller)'s.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use weact_core::{
    Capability,
    chat::Chat,
    context::{self, LeftOut, Retention},
    control::{self, Action},
    episode::{Author, Cause, Event, Header, MessageEvent, Notice, Outcome as EpisodeOutcome, Transition},
    message::{Message, Role, ToolCall},
    registry::Registry,
    stage,
};

use crate::{
    Error, Result,
    engine::{AdapterHandle, Engine},
    record::Recorder,
    sampler::{Choose, Sampler, Sampling},
    session::{Finish, Session},
    timeline::{Monotonic, Timeline},
    tools::{self, ToolSet},
    turn::{self, Turn},
};

/// What a run may use up. Each is checked before a turn; running out ends the stage and then the run, never silently.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Budget {
    /// Turns of the policy in the whole run; a fallback may take two more.
    pub max_turns: usize,
    /// Tokens of one turn.
    pub max_new: usize,
    /// Seconds of the whole run.
    pub max_seconds: Option<f64>,
    /// The same external call this many times in a row ends the stage.
    pub max_repeats: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { max_turns: 60, max_new: 8192, max_seconds: None, max_repeats: 3 }
    }
}

impl Budget {
    /// Checks that there is something to use up.
    ///
    /// # Errors
    /// If a limit is zero or the seconds are negative or no number.
    pub fn check(&self) -> Result<()> {
        let seconds = self.max_seconds.is_none_or(|s| Duration::try_from_secs_f64(s).is_ok());
        if self.max_turns > 0 && self.max_new > 0 && self.max_repeats > 0 && seconds {
            return Ok(());
        }
        Err(Error::Other("turns, tokens and repeats of a run must be positive, and its seconds not negative".to_owned()))
    }

    /// Whether a run that began then has used its seconds up.
    fn is_out_of_time(&self, begun: Instant) -> bool {
        self.max_seconds.is_some_and(|s| begun.elapsed() >= Duration::try_from_secs_f64(s).unwrap_or(Duration::MAX))
    }
}

/// Everything that decides how a run goes, apart from the controller.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// The system message, where there is one.
    pub system: Option<String>,
    /// What a stage keeps of tool results.
    pub retention: Retention,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// What may be used up.
    pub budget: Budget,
    /// What else the header should say, such as the controller's rules and the device.
    pub about: Map<String, Value>,
}

/// What an agent is made of.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "tools are trait objects")]
pub struct Parts<'a> {
    /// The weights.
    pub engine: &'a Engine,
    /// Template and tokenizer.
    pub chat: &'a Chat,
    /// The adapters.
    pub registry: &'a Registry,
    /// The external tools.
    pub tools: &'a ToolSet,
}

/// A run in progress.
#[expect(missing_debug_implementations, reason = "tools are trait objects")]
pub struct Run<'a> {
    parts: Parts<'a>,
    settings: Settings,
    with_control: bool,
    tools: Vec<Value>,
    handles: BTreeMap<Capability, AdapterHandle>,
    session: Session,
    tokens: Box<dyn Choose + 'a>,
    messages: Vec<Message>,
    sampled: BTreeMap<usize, Vec<u32>>, // by message: the turn's ids as they stand in the context
    stage_start: usize,
    recorder: Recorder,
    timeline: Timeline,
    begun: Instant,
    n_turns: usize,
    last_call: Option<(String, usize)>,
    observe: &'a mut dyn FnMut(&Event),
    interrupted: &'a dyn Fn() -> bool,
}

/// What a turn did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TurnReport {
    /// Its visible text.
    pub content: String,
    /// Calls of external tools, unknown ones included.
    pub n_executed: usize,
    /// Calls that were made at all, malformed ones and violations included; those inside thinking are none.
    pub n_calls: usize,
    /// The active adapter was released by the policy's own call.
    pub exited: bool,
    /// Some external call has been made this many times in a row.
    pub repeats: usize,
}

impl<'a> Run<'a> {
    /// Begins a run: the header is written, system message and question are in the history.
    ///
    /// # Errors
    /// If an adapter does not fit the backbone, the sampling is out of range or the record can't be written.
    pub fn begin(
        parts: Parts<'a>,
        settings: Settings,
        policy: &str,
        question: &str,
        recorder: Recorder,
        observe: &'a mut dyn FnMut(&Event),
        interrupted: &'a dyn Fn() -> bool,
    ) -> Result<Self> {
        let mut handles = BTreeMap::new();
        for entry in parts.registry.entries() {
            handles.insert(entry.stage.alias.clone(), parts.engine.make_resident(&entry.adapter)?);
        }
        let with_control = policy == "hard";
        settings.budget.check()?;
        let control = if with_control { control::tool_schemas(&parts.registry.listing()) } else { Vec::new() };
        let tools: Vec<Value> = control.into_iter().chain(parts.tools.schemas()).collect();
        let adapters = parts.registry.entries().iter().map(|e| format!("{}@{}", e.stage.alias, e.adapter.digest())).collect();
        let header = Header {
            v: 1,
            question: question.to_owned(),
            policy: policy.to_owned(),
            tools: tools.clone(),
            base: parts.engine.base_digest().to_owned(),
            adapters,
            settings: header_settings(&parts, &settings),
        };
        let mut run = Self {
            parts,
            with_control,
            tools,
            handles,
            session: parts.engine.session(),
            tokens: Box::new(Sampler::new(settings.sampling)?),
            messages: Vec::new(),
            sampled: BTreeMap::new(),
            stage_start: 0,
            recorder,
            timeline: Timeline::new(Box::new(Monotonic::new()), "orchestration"),
            begun: Instant::now(),
            n_turns: 0,
            last_call: None,
            observe,
            interrupted,
            settings,
        };
        run.event(Event::Header(header))?;
        if let Some(system) = run.settings.system.clone() {
            run.push(Message::text(Role::System, system), Author::Harness)?;
        }
        run.push(Message::text(Role::User, question), Author::User)?;
        Ok(run)
    }

    /// The same run, its tokens chosen in another way than the settings say.
    #[must_use]
    pub fn choosing(self, tokens: impl Choose + 'a) -> Self {
        Self { tokens: Box::new(tokens), ..self }
    }

    /// The history.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The active adapter.
    pub fn active(&self) -> Option<&Capability> {
        self.session.active()
    }

    /// The ids that the last turn followed, and that turn's own.
    pub fn context(&self) -> &[u32] {
        self.session.context()
    }

    /// Turns taken.
    pub fn n_turns(&self) -> usize {
        self.n_turns
    }

    /// The same external call this many times in a row ends a stage.
    pub fn max_repeats(&self) -> usize {
        self.settings.budget.max_repeats
    }

    /// Whether turns or seconds are used up.
    pub fn is_spent(&self) -> bool {
        self.n_turns >= self.settings.budget.max_turns || self.is_out_of_time()
    }

    /// Whether the seconds are used up.
    pub fn is_out_of_time(&self) -> bool {
        self.settings.budget.is_out_of_time(self.begun)
    }

    /// Checks that an adapter is registered.
    ///
    /// # Errors
    /// If the alias is unknown; the known ones are listed.
    pub fn need(&self, capability: &Capability) -> Result<()> {
        self.parts.registry.need(capability)?;
        Ok(())
    }

    /// Adds a message that nobody sampled.
    ///
    /// # Errors
    /// If the record can't be written.
    pub fn push(&mut self, message: Message, author: Author) -> Result<()> {
        self.messages.push(message.clone());
        self.event(Event::Message(MessageEvent { message, author, route: None, ids: Vec::new(), finish: None }))
    }

    /// Writes a remark down.
    ///
    /// # Errors
    /// If the record can't be written.
    pub fn notice(&mut self, kind: &str, detail: impl Into<String>) -> Result<()> {
        self.event(Event::Notice(Notice { kind: kind.to_owned(), detail: detail.into() }))
    }

    /// The harness's load exchange, and the switch that follows it. The stage's view of the history is fixed here.
    ///
    /// # Errors
    /// If an adapter is active, the alias is unknown, or the record can't be written.
    pub fn load(&mut self, capability: &Capability) -> Result<()> {
        if let Some(active) = self.active() {
            return Err(Error::Other(format!("{active} is active: release it before {capability} is loaded")));
        }
        let activation = self.parts.registry.need(capability)?.stage.activation.clone();
        let call = control::load_call(capability);
        self.push(Message::calling("", vec![call.clone()]), Author::Harness)?;
        self.push(Message::tool_result(&call, activation), Author::Tool)?;
        self.transition(&Action::Load(capability.clone()), Cause::Load)
    }

    /// The harness's release exchange, where the policy did not leave by itself.
    ///
    /// # Errors
    /// If the record can't be written.
    pub fn release(&mut self, cause: Cause) -> Result<()> {
        let Some(active) = self.session.active().cloned() else { return Ok(()) };
        let call = control::offload_call(&active);
        self.push(Message::calling("", vec![call.clone()]), Author::Harness)?;
        self.push(Message::tool_result(&call, stage::released(&active)), Author::Tool)?;
        self.transition(&Action::Offload(active), cause)
    }

    /// Activates an adapter for the whole run, without an exchange: single-adapter policies.
    ///
    /// # Errors
    /// If the alias is unknown.
    pub fn activate_silently(&mut self, capability: &Capability) -> Result<()> {
        self.parts.registry.need(capability)?;
        self.session.switch(Some((capability.clone(), self.handles[capability].clone())));
        Ok(())
    }

    /// Eq. 6, applied to the session: the next token is the first under the new weights.
    fn transition(&mut self, action: &Action, cause: Cause) -> Result<()> {
        self.timeline.switch("control");
        let from = self.session.active().cloned();
        let to = control::transition(from.clone(), action);
        self.session.switch(to.clone().map(|k| (k.clone(), self.handles[&k].clone())));
        self.stage_start = self.messages.len();
        self.last_call = None;
        let recomputed_tokens = self.session.stale();
        self.event(Event::Transition(Transition { from, to, cause, at: self.messages.len(), recomputed_tokens }))?;
        self.timeline.switch("orchestration");
        Ok(())
    }

    /// One turn of the policy under the active weights: sampled, written down, its calls answered. Every call gets one tool
    /// message; a control call must be the last, what follows it is answered "not executed".
    ///
    /// # Errors
    /// If generation fails or is interrupted ([`Error::Interrupted`]), or the record can't be written.
    pub fn turn(&mut self) -> Result<TurnReport> {
        let mut report = TurnReport::default();
        if !self.prepare_context()? {
            self.notice("context_full", format!("the history fills the model's {} positions", self.max_positions()))?;
            return Ok(report);
        }
        self.n_turns += 1;
        let turn = self.sample_turn()?;
        report.content = turn.content;
        report.n_calls = turn.calls.len();
        let mut control_seen = false;
        for (i, call) in turn.calls.iter().enumerate() {
            let result = match call {
                _ if control_seen => "error: not executed; a control call must be the last of a turn".to_owned(),
                Err(why) => format!("error: the call could not be read: {why}"),
                Ok(call) if self.with_control && control::is_control(&call.name) => {
                    control_seen = true;
                    self.control_call(call, i + 1 == report.n_calls, &mut report)?
                }
                Ok(call) => self.external_call(call, &mut report),
            };
            let message = match call {
                Ok(call) => Message::tool_result(call, result),
                Err(_) => Message::text(Role::Tool, result),
            };
            self.push(message, Author::Tool)?;
        }
        if report.exited {
            let active = self.session.active().cloned().expect("an exit releases an active adapter");
            self.transition(&Action::Offload(active), Cause::ExitCall)?;
        }
        Ok(report)
    }

    /// Answers a control call of the policy. Only `offload_lora` of the active adapter, as the turn's last call, has an effect:
    /// under prescribed stages a load is a violation.
    fn control_call(&mut self, call: &ToolCall, is_last: bool, report: &mut TurnReport) -> Result<String> {
        let active = self.session.active().cloned();
        let name = active.as_ref().map_or("none", Capability::as_str);
        let refusal = match control::action(call) {
            Err(malformed) => malformed.to_string(),
            Ok(Action::Offload(k)) if Some(&k) == active.as_ref() && is_last => {
                report.exited = true;
                return Ok(stage::released(&k));
            }
            Ok(Action::Offload(k)) if Some(&k) == active.as_ref() => format!("offload_lora({k}) must be the last call of a turn"),
            Ok(Action::Offload(k)) => format!("the active adapter is {name}, not {k}"),
            Ok(Action::Load(k)) if Some(&k) == active.as_ref() => format!("{k} is already active"),
            Ok(Action::Load(_)) if active.is_some() => format!("{name} is active; call offload_lora({name}) first"),
            Ok(Action::Load(_)) => "stages are prescribed in this run; adapters are loaded for you".to_owned(),
            Ok(Action::Other) => unreachable!("only control calls come here"),
        };
        self.notice("violation", format!("{}: {refusal}", call.name))?;
        Ok(format!("error: {refusal}"))
    }

    /// Runs an external tool.
    fn external_call(&mut self, call: &ToolCall, report: &mut TurnReport) -> String {
        report.n_executed += 1;
        report.repeats = report.repeats.max(self.count_repeats(call));
        let known: Vec<&str> = self.tools.iter().filter_map(|tool| tool["function"]["name"].as_str()).collect();
        if !known.contains(&call.name.as_str()) {
            return tools::unknown(&call.name, &known).text;
        }
        self.timeline.switch("tool");
        let output = self.parts.tools.call(call);
        self.timeline.switch("orchestration");
        output.text
    }

    fn count_repeats(&mut self, call: &ToolCall) -> usize {
        let key = format!("{} {}", call.name, canonical(&Value::Object(call.arguments.clone())));
        let n = match self.last_call.take() {
            Some((last, n)) if last == key => n + 1,
            _ => 1,
        };
        self.last_call = Some((key, n));
        n
    }

    /// Brings the session's context to the stage's view of the history. False if that leaves no room for a turn.
    fn prepare_context(&mut self) -> Result<bool> {
        let (view, left_out) =
            context::view(&self.messages, self.stage_start, self.settings.retention, &self.parts.chat.tokenizer)?;
        let mut ids: Vec<u32> = Vec::new();
        let mut n_old = 0; // through the last turn that was sampled
        for piece in self.parts.chat.pieces(&view, &self.tools, true)? {
            match self.sampled.get(&piece.messages.start) {
                Some(sampled) if piece.is_turn => {
                    ids.extend(sampled);
                    n_old = ids.len();
                }
                _ => ids.extend(self.parts.chat.encode(&piece)?),
            }
        }
        if ids.len() >= self.max_positions() {
            return Ok(false);
        }
        if !ids.starts_with(self.session.context()) {
            self.session.set_context(ids[..n_old].to_vec());
            if left_out != LeftOut::default() {
                let LeftOut { omitted, clipped } = left_out;
                self.notice("left_out", format!("{omitted} of the history's tool results omitted, {clipped} clipped"))?;
            }
        }
        self.session.append(&ids[self.session.context().len()..]);
        if self.session.stale() > 0 {
            self.timeline.switch(format!("rebuild:{}", self.session.route()));
            self.session.rebuild()?;
        }
        Ok(true)
    }

    fn max_positions(&self) -> usize {
        self.parts.engine.backbone().config.max_positions
    }

    /// Samples a turn and writes it down.
    fn sample_turn(&mut self) -> Result<Turn> {
        let route = self.session.route();
        self.timeline.switch(format!("model:{route}"));
        let (chat, budget, begun, interrupted) = (self.parts.chat, self.settings.budget, self.begun, self.interrupted);
        let stop_now = || interrupted() || budget.is_out_of_time(begun);
        let stop = turn::stop_ids(chat);
        let generated = self.session.generate(self.tokens.as_mut(), budget.max_new, &stop, &stop_now, &mut |_| {})?;
        self.timeline.switch("orchestration");
        let finish = match generated.finish {
            Finish::Interrupted if interrupted() => return Err(Error::Interrupted),
            Finish::Interrupted => "time",
            Finish::Length => "length",
            Finish::Stop => "stop",
        };
        let turn = turn::read(chat, &generated, self.n_turns)?;
        self.sampled.extend(turn.ids.clone().map(|ids| (self.messages.len(), ids)));
        self.messages.push(turn.message.clone());
        self.event(Event::Message(MessageEvent {
            message: turn.message.clone(),
            author: Author::Model,
            route: Some(route),
            ids: generated.ids,
            finish: Some(finish.to_owned()),
        }))?;
        for (kind, detail) in &turn.remarks {
            self.notice(kind, detail)?;
        }
        Ok(turn)
    }

    /// Ends the run: time and outcome are written down.
    ///
    /// # Errors
    /// If the record can't be written.
    pub fn finish(mut self, answer: Option<String>, termination: &str, stages: Vec<(Capability, Cause)>) -> Result<Finished> {
        let timeline = std::mem::replace(&mut self.timeline, Timeline::new(Box::new(Monotonic::new()), "orchestration"));
        for interval in timeline.finish() {
            self.event(Event::Time(interval))?;
        }
        let outcome = EpisodeOutcome { answer, termination: termination.to_owned(), stages, usage: self.session.usage() };
        self.event(Event::Outcome(outcome.clone()))?;
        Ok(Finished { outcome, recorder: self.recorder })
    }

    /// Writes an event down, after the intervals of time that ended before it.
    fn event(&mut self, event: Event) -> Result<()> {
        for interval in self.timeline.take_closed() {
            self.write(Event::Time(interval))?;
        }
        self.write(event)
    }

    fn write(&mut self, event: Event) -> Result<()> {
        self.recorder.push(event)?;
        (self.observe)(self.recorder.events().last().expect("one was pushed"));
        Ok(())
    }
}

/// A run that has ended.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub outcome: EpisodeOutcome,
    /// Its record.
    pub recorder: Recorder,
}

fn header_settings(parts: &Parts<'_>, settings: &Settings) -> Map<String, Value> {
    let value = json!({
        "system": settings.system, "retention": settings.retention, "sampling": settings.sampling, "budget": settings.budget,
        "tool_protocol": parts.chat.protocol, "think": "preserve", "tokenizer": parts.chat.tokenizer.digest(),
        "template": parts.chat.template_digest(),
    });
    let Value::Object(mut map) = value else { unreachable!("it is an object") };
    map.extend(settings.about.clone());
    map
}

/// JSON with sorted keys and trimmed, lower-case text: calls that differ only in that are the same.
fn canonical(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(text.trim().to_lowercase()),
        Value::Array(items) => items.iter().map(canonical).collect(),
        Value::Object(map) => {
            let sorted: BTreeMap<&String, Value> = map.iter().map(|(k, v)| (k, canonical(v))).collect();
            sorted.into_iter().map(|(k, v)| (k.clone(), v)).collect::<Map<_, _>>().into()
        }
        other => other.clone(),
    }
}

/// The answer in a text: inside the last `<answer>` or `\boxed{}`, else the whole text; `None` where there is none.
pub fn answer_in(text: &str) -> Option<String> {
    marked_answer(text).or_else(|| Some(text.trim().to_owned()).filter(|t| !t.is_empty()))
}

/// The answer that a text marks as such.
pub fn marked_answer(text: &str) -> Option<String> {
    let tagged = text.rsplit_once("<answer>").map(|(_, rest)| rest.split("</answer>").next().unwrap_or(rest));
    let boxed = || {
        let (_, rest) = text.rsplit_once("\\boxed{")?;
        let mut depth = 1;
        let end = rest.char_indices().find(|(_, c)| {
            depth += match c {
                '{' => 1,
                '}' => -1,
                _ => 0,
            };
            depth == 0
        })?;
        Some(&rest[..end.0])
    };
    tagged.or_else(boxed).map(|t| t.trim().to_owned()).filter(|t| !t.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_what_is_marked_or_else_the_text() {
        let cases = [
            ("cite a <answer> Sorn</answer>\n", Some("Sorn")),
            ("<answer>one</answer> <answer>two\n\"2\"</answer>", Some("two\n\"2\"")),
            ("so \\boxed{f(x) = {1}}.", Some("f(x) = {1}")),
            ("  plain  ", Some("plain")),
            ("<answer>unclosed", Some("unclosed")),
            (" \n", None),
            ("<answer></answer>", Some("<answer></answer>")),
        ];
        for (text, expected) in cases {
            assert_eq!(answer_in(text).as_deref(), expected, "{text:?}");
        }
    }
}
