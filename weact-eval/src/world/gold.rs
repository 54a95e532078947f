//! Gold trajectories: how a perfect policy answers, with the control protocol woven in.

use serde_json::{Value, json};
use weact_core::{
    control,
    message::{Message, Role, ToolCall},
    stage::{self, Stage},
    trajectory::{Exit, Span, Trajectory},
};
use weact_infer::tools::ToolSet;

use super::{
    SYSTEM, World,
    dialect::Dialects,
    facts::{Entity, Fact},
    question::Question,
    stages,
};
use crate::{Error, Result};

impl World {
    /// The gold trajectory for `question`, with what `tools` really answer.
    ///
    /// # Errors
    /// If a search fails, or its first hit is not the page of the fact that was searched.
    pub fn gold(&self, question: &Question, tools: &ToolSet) -> Result<Trajectory> {
        weave(question.id.clone(), question, &self.dialects, schemas(tools), |fact, call| {
            let Fact { subject, relation, value } = fact;
            let output = tools.call(call);
            let wanted = format!("{subject} {} {value}", relation.page_word());
            match output.text.lines().next() {
                Some(first) if !output.error && first.contains(&wanted) => Ok(output.text),
                _ => Err(Error::Other(format!("question {}: the search for {wanted:?} gave {:?}", question.id, output.text))),
            }
        })
    }
}

/// The schemas that the toy policy sees in a run with `tools`: the control tools, then these.
pub fn schemas(tools: &ToolSet) -> Vec<Value> {
    let mut all = control::tool_schemas(&stages().into_iter().map(|stage| (stage.alias, stage.description)).collect::<Vec<_>>());
    all.extend(tools.schemas());
    all
}

/// Tells how `question` is answered in `dialects`; `look_up` gives the search result for one fact of the evidence.
pub(super) fn weave(
    id: String,
    question: &Question,
    dialects: &Dialects,
    tools: Vec<Value>,
    mut look_up: impl FnMut(&Fact, &ToolCall) -> Result<String>,
) -> Result<Trajectory> {
    let Dialects { plan, search, write } = dialects;
    let evidence = &question.evidence;
    let mut script = Script { messages: Vec::new(), spans: Vec::new() };
    script.messages.push(Message::text(Role::System, SYSTEM));
    script.messages.push(Message::text(Role::User, &question.text));
    for stage in &stages() {
        script.load(stage);
        let last_words = match stage.alias.as_str() {
            "plan" => {
                let step = |(number, fact): (usize, &Fact)| format!("step{number} {}", plan.word(fact.relation));
                (1..).zip(evidence).map(step).collect::<Vec<_>>().join(" ")
            }
            "search" => {
                for fact in evidence {
                    let call = search_call(fact.subject, search.word(fact.relation));
                    let result = look_up(fact, &call)?;
                    script.exchange("", call, result);
                }
                String::new()
            }
            "write" => {
                let cite = |fact: &Fact| format!("{} {} {}", fact.subject, write.word(fact.relation), fact.value);
                // Last hop first: a report of one hop and one of two then begin alike, with what the last search found. In the
                // other order a small model learns the one kind and stays at chance on the other for thousands of batches.
                let citations: Vec<String> = evidence.iter().rev().map(cite).collect();
                format!("cite {} <answer> {}</answer>", citations.join(" "), question.answer)
            }
            other => unreachable!("the toy has no stage {other}"),
        };
        script.offload(stage, &last_words);
    }
    let mut trajectory = Trajectory::new(id, tools, script.messages, script.spans)?;
    trajectory.question = Some(question.text.clone());
    trajectory.answer = Some(json!(question.answer.name()));
    Ok(trajectory)
}

/// The query starts with a space because its words do.
fn search_call(subject: Entity, word: &str) -> ToolCall {
    let Value::Object(arguments) = json!({"query": [format!(" {subject} {word}")]}) else { unreachable!("an object") };
    ToolCall::new("search", arguments)
}

/// A trajectory as it grows.
struct Script {
    messages: Vec<Message>,
    /// The last one is open between [`Script::load`] and [`Script::offload`].
    spans: Vec<Span>,
}

impl Script {
    /// The assistant says `content` and makes `call`, and `result` comes back.
    fn exchange(&mut self, content: &str, call: ToolCall, result: String) {
        let answer = Message::tool_result(&call, result);
        self.messages.push(Message::calling(content, vec![call]));
        self.messages.push(answer);
    }

    fn load(&mut self, stage: &Stage) {
        self.exchange("", control::load_call(&stage.alias), stage.activation.clone());
        let start = self.messages.len();
        self.spans.push(Span { capability: stage.alias.clone(), start, end: start, exit: Exit::Call });
    }

    fn offload(&mut self, stage: &Stage, last_words: &str) {
        self.exchange(last_words, control::offload_call(&stage.alias), stage::released(&stage.alias));
        self.spans.last_mut().expect("a stage was loaded").end = self.messages.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::{WorldConfig, question::Split};

    #[test]
    fn a_gold_report_is_right_and_each_stage_writes_its_own_dialect() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        let tools = world.tools().expect("tools");
        for question in &world.questions(Split::Test)[..50] {
            let gold = world.gold(question, &tools).expect("a gold trajectory");
            assert_eq!(gold, world.gold(question, &tools).expect("a gold trajectory"));
            let turn = |span: usize, at: usize| &gold.messages()[gold.spans()[span].start + at];
            let report = &turn(2, 0).content;
            assert!(world.grade(question, report).right, "{report}");
            let step = format!("step1 {}", world.dialects().plan.word(question.path[0]));
            assert!(turn(0, 0).content.starts_with(&step));
            let query = format!(" {} {}", question.start, world.dialects().search.word(question.path[0]));
            assert_eq!(turn(1, 0).tool_calls[0].arguments["query"], json!([query]));
            assert_eq!(tools.call(&turn(1, 0).tool_calls[0]).text, turn(1, 1).content);
            assert!(turn(1, 2 * question.hops).content.is_empty());
            let n_messages = gold.spans().iter().map(|span| span.end - span.start).collect::<Vec<_>>();
            assert_eq!(n_messages, [2, 2 * question.hops + 2, 2]);
        }
    }

    #[test]
    fn a_search_that_misses_the_fact_is_an_error() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        let other = World::new(&WorldConfig { seed: 1, ..WorldConfig::default() }).expect("another world");
        let fact = world.facts().find(|fact| *fact != other.fact(fact.subject, fact.relation)).expect("a fact that differs");
        let error = world.gold(&Question::new(vec![fact]), &other.tools().expect("tools")).expect_err("another world's pages");
        assert!(error.to_string().contains("the search for"), "{error}");
    }

    /// The list in the system message is one token only in this order.
    #[test]
    fn the_policy_sees_the_control_tools_first() {
        let tools = World::new(&WorldConfig::default()).and_then(|world| world.tools()).expect("tools");
        let names: Vec<_> = schemas(&tools).iter().map(|schema| schema["function"]["name"].clone()).collect();
        assert_eq!(names, ["load_lora", "offload_lora", "search", "visit"]);
    }
}
