//! WeAct-hard (§2.3): prescribed stages, by default plan, search, write. A stage ends when the policy calls `offload_lora`, when its
//! turns are used up, when it writes too many messages without a call, or when it repeats itself; the harness records the
//! release and the next load.
//!
//! Algorithm 1 is not published; this is our reconstruction of it.

use serde::{Deserialize, Serialize};
use weact_core::{
    Capability,
    episode::{Author, Cause},
    message::{Message, Role},
};

use crate::{
    Result,
    agent::{Finished, Run, TurnReport, answer_in, marked_answer},
};

/// One prescribed stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageRule {
    /// Whose turn it is.
    pub capability: Capability,
    /// Turns that it may take.
    pub max_turns: usize,
    /// Messages without a call, in a row, after which the harness releases it.
    pub max_without_call: usize,
}

/// The prescribed stages; the last one writes the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hard {
    /// In order.
    pub workflow: Vec<StageRule>,
}

impl Default for Hard {
    fn default() -> Self {
        let rule = |name: &str, max_turns, max_without_call| {
            let capability = Capability::new(name).expect("a legal name");
            StageRule { capability, max_turns, max_without_call }
        };
        Self { workflow: vec![rule("plan", 2, 1), rule("search", 30, 2), rule("write", 2, 1)] }
    }
}

/// What the policy reads when it wrote a message without a call.
const CONTINUE: &str = "No tool was called. Go on with a tool call, or call offload_lora if this stage is done.";
/// What the policy reads when no stage has answered.
const ANSWER_NOW: &str = "Give the final answer now.";

/// Runs the stages and extracts the answer. If the writing stage gives none, the fallback is, in this order: the writing stage
/// once, where it was never reached; the base model; the last answer marked anywhere in the history.
///
/// # Errors
/// If a stage's adapter is not registered, generation fails or is interrupted, or the record can't be written.
pub fn run(mut run: Run<'_>, rules: &Hard) -> Result<Finished> {
    for rule in &rules.workflow {
        run.need(&rule.capability)?;
    }
    let mut ended = Vec::new();
    let mut answer = None;
    for (i, rule) in rules.workflow.iter().enumerate() {
        if run.is_spent() {
            break;
        }
        let (cause, written) = stage(&mut run, rule)?;
        ended.push((rule.capability.clone(), cause));
        if i + 1 == rules.workflow.len() {
            answer = written;
        }
    }
    if answer.is_some() {
        return run.finish(answer, "answered", ended);
    }
    fallback(run, rules, ended)
}

/// One stage, from its load exchange to its release. Returns why it ended, and the answer in what it wrote: the last one that is
/// marked as such, or else the last text.
fn stage(run: &mut Run<'_>, rule: &StageRule) -> Result<(Cause, Option<String>)> {
    run.load(&rule.capability)?;
    let (mut without_call, mut turns) = (0, 0);
    let (mut marked, mut last) = (None, None);
    let cause = loop {
        let before = run.n_turns();
        let TurnReport { content, n_executed, n_calls, exited, repeats } = run.turn()?;
        turns += 1;
        marked = marked_answer(&content).or(marked);
        last = answer_in(&content).or(last);
        if exited {
            return Ok((Cause::ExitCall, marked.or(last)));
        }
        without_call = if n_calls == 0 { without_call + 1 } else { 0 };
        let context_is_full = run.n_turns() == before;
        if context_is_full || turns >= rule.max_turns || run.is_spent() {
            break Cause::Budget;
        }
        if without_call >= rule.max_without_call {
            break Cause::NoTool;
        }
        if n_executed > 0 && repeats >= run.max_repeats() {
            break Cause::Repetition;
        }
        if n_calls == 0 {
            run.push(Message::text(Role::Tool, CONTINUE), Author::Harness)?;
        }
    };
    run.release(cause)?;
    Ok((cause, marked.or(last)))
}

fn fallback(mut run: Run<'_>, rules: &Hard, mut ended: Vec<(Capability, Cause)>) -> Result<Finished> {
    let writer = rules.workflow.last();
    let unreached = writer.filter(|w| ended.iter().all(|(k, _)| *k != w.capability));
    if let (Some(writer), false) = (unreached, run.is_out_of_time()) {
        run.notice("fallback", format!("{} was not reached; it gets one turn", writer.capability))?;
        let (cause, answer) = stage(&mut run, &StageRule { max_turns: 1, ..writer.clone() })?;
        ended.push((writer.capability.clone(), cause));
        if answer.is_some() {
            return run.finish(answer, "fallback_write", ended);
        }
    }
    if !run.is_out_of_time() {
        run.notice("fallback", "the base model answers")?;
        run.push(Message::text(Role::Tool, ANSWER_NOW), Author::Harness)?;
        let report = run.turn()?;
        if let Some(answer) = answer_in(&report.content) {
            return run.finish(Some(answer), "fallback_base", ended);
        }
    }
    let marked = run.messages().iter().rev().filter(|m| m.role == Role::Assistant).find_map(|m| marked_answer(&m.content));
    let termination = if marked.is_some() { "fallback_intermediate" } else { "no_answer" };
    run.finish(marked, termination, ended)
}
