//! One set of weights from beginning to end: the base model, or a single adapter, with the external tools only.

use weact_core::{
    Capability,
    episode::Author,
    message::{Message, Role},
};

use crate::{
    Result,
    agent::{Finished, Run, answer_in, marked_answer},
};

/// Turns are taken until one makes no call: its text is the answer. `adapter` acts throughout; `None` is the base. There are no
/// control tools: a call of one is that of an unknown tool.
///
/// # Errors
/// If the alias is unknown, generation fails or is interrupted, or the record can't be written.
pub fn run(mut run: Run<'_>, adapter: Option<&Capability>) -> Result<Finished> {
    if let Some(adapter) = adapter {
        run.activate_silently(adapter)?;
    }
    let why = loop {
        if run.is_spent() {
            break "its turns or seconds are used up";
        }
        let before = run.n_turns();
        let report = run.turn()?;
        if run.n_turns() == before {
            break "its context is full";
        }
        if report.n_executed > 0 && report.repeats >= run.max_repeats() {
            break "it repeats the same call";
        }
        if report.n_calls == 0 {
            if let Some(answer) = answer_in(&report.content) {
                return run.finish(Some(answer), "answered", Vec::new());
            }
            run.push(Message::text(Role::Tool, "The message was empty. Call a tool or answer."), Author::Harness)?;
        }
    };
    run.notice("stopped", why)?;
    let marked = run.messages().iter().rev().filter(|m| m.role == Role::Assistant).find_map(|m| marked_answer(&m.content));
    let termination = if marked.is_some() { "fallback_intermediate" } else { "no_answer" };
    run.finish(marked, termination, Vec::new())
}
