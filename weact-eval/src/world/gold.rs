//! Gold trajectories: how a perfect policy answers, in stages with the control protocol woven in, or without stages.

use serde_json::{Value, json};
use weact_core::{
    Capability, control,
    message::{Message, Role, ToolCall},
    stage::{self, Stage},
    trajectory::{Exit, Span, Trajectory},
};
use weact_infer::tools::ToolSet;

use super::{
    SYSTEM, World,
    dialect::Dialects,
    facts::{Entity, Fact, Relation},
    pages::{MORE, said},
    question::Question,
    stages,
};
use crate::{Error, Result};

/// The one capability of a trajectory without stages.
pub const AGENT: &str = "agent";

/// How a trajectory is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// In three stages, each loaded and released.
    Staged,
    /// By one capability, [`AGENT`], without control tools.
    Plain,
}

/// What the policy wants to see when it makes a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Want<'a> {
    /// The page of a fact among the hits, or none where it is unknown.
    Hits(Entity, Relation, Option<&'a Fact>),
    /// An entity's own page, with a link to the fact.
    Root(&'a Fact),
    /// The page of a fact.
    Page(&'a Fact),
    /// The value of an expression.
    Value,
}

impl World {
    /// The gold trajectory for `question`, with what `tools`, fresh ones, really answer.
    ///
    /// # Errors
    /// If a call fails twice, or does not show the fact that was asked for.
    pub fn gold(&self, question: &Question, form: Form, tools: &ToolSet) -> Result<Trajectory> {
        let look_up = |call: &ToolCall, want: Want<'_>| {
            let text = tools.call(call).text;
            let shows = |fact: &Fact| failed(&text) || is_long(&text) || text.contains(&said(fact));
            match want {
                Want::Hits(_, _, Some(fact)) | Want::Page(fact) if !shows(fact) => {
                    Err(Error::Other(format!("question {}: {:?} is not in {text:?}", question.id, said(fact))))
                }
                _ => Ok(text),
            }
        };
        let id = match form {
            Form::Staged => question.id.clone(),
            Form::Plain => format!("{}:plain", question.id),
        };
        tell(id, question, form, &self.dialects, &schemas(form, tools), look_up)
    }
}

/// The schemas that the toy policy sees in a run with `tools`: the control tools where there are stages, then these.
pub fn schemas(form: Form, tools: &ToolSet) -> Vec<Value> {
    let mut all = match form {
        Form::Staged => {
            control::tool_schemas(&stages().into_iter().map(|stage| (stage.alias, stage.description)).collect::<Vec<_>>())
        }
        Form::Plain => Vec::new(),
    };
    all.extend(tools.schemas());
    all
}

/// Tells how `question` is answered in `dialects`; `look_up` answers the calls.
pub(super) fn tell(
    id: String,
    question: &Question,
    form: Form,
    dialects: &Dialects,
    tools: &[Value],
    look_up: impl FnMut(&ToolCall, Want<'_>) -> Result<String>,
) -> Result<Trajectory> {
    let (plan, report) = (plan(question, dialects), cited_report(question, dialects));
    let exchanges = search(question, dialects, look_up)?;
    let mut script = Script { messages: Vec::new(), spans: Vec::new() };
    script.messages.push(Message::text(Role::System, SYSTEM));
    script.messages.push(Message::text(Role::User, &question.text));
    match form {
        Form::Staged => {
            let [planning, searching, writing] = <[Stage; 3]>::try_from(stages()).expect("three stages");
            script.load(&planning);
            script.offload(&planning, &plan);
            script.load(&searching);
            for (call, result) in exchanges {
                script.exchange("", call, result);
            }
            script.offload(&searching, "");
            script.load(&writing);
            script.offload(&writing, &report);
        }
        Form::Plain => {
            let start = script.messages.len();
            let mut words = plan.as_str();
            for (call, result) in exchanges {
                script.exchange(std::mem::take(&mut words), call, result);
            }
            script.messages.push(Message::text(Role::Assistant, report));
            let capability = Capability::new(AGENT).expect("a legal name");
            script.spans.push(Span { capability, start, end: script.messages.len(), exit: Exit::None });
        }
    }
    let mut trajectory = Trajectory::new(id, tools.to_vec(), script.messages, script.spans)?;
    trajectory.question = Some(question.text.clone());
    trajectory.answer = Some(json!(question.answer));
    Ok(trajectory)
}

fn plan(question: &Question, dialects: &Dialects) -> String {
    let step = |(number, (_, relation)): (usize, &(Entity, Relation))| format!("step{number} {}", dialects.plan.word(*relation));
    (1..).zip(&question.lookups).map(step).collect::<Vec<_>>().join(" ")
}

/// Last fact first: reports of any length then begin alike, with what the last search found. In the other order a small model
/// learns the one kind and stays at chance on the other for thousands of batches.
pub(super) fn cited_report(question: &Question, dialects: &Dialects) -> String {
    let cite = |fact: &Fact| format!(" {} {} {}", fact.subject, dialects.write.word(fact.relation), fact.value);
    let citations: String = question.evidence.iter().rev().map(cite).collect();
    format!("cite{citations} <answer> {}</answer>", question.answer)
}

/// The calls of the search and what came back.
fn search(
    question: &Question,
    dialects: &Dialects,
    mut look_up: impl FnMut(&ToolCall, Want<'_>) -> Result<String>,
) -> Result<Vec<(ToolCall, String)>> {
    let mut exchanges = Vec::new();
    for (i, &(subject, relation)) in question.lookups.iter().enumerate() {
        let fact = question.evidence.get(i);
        let word = dialects.search.word(relation);
        if let (0, Some(root), Some(fact)) = (i, &question.root, fact) {
            let call = visit_call(root);
            let page = look_up(&call, Want::Root(fact))?;
            let link = after(&page, &format!(" {word} ("))
                .ok_or_else(|| Error::Other(format!("question {}: {page:?} has no link for {word}", question.id)))?;
            let page_call = visit_call(link);
            exchanges.push((call, page));
            let page = look_up(&page_call, Want::Page(fact))?;
            exchanges.push((page_call, page));
            continue;
        }
        let call = search_call(subject, word);
        let want = Want::Hits(subject, relation, fact);
        let mut hits = look_up(&call, want)?;
        if failed(&hits) {
            exchanges.push((call.clone(), hits));
            hits = look_up(&call, want)?;
        }
        if failed(&hits) {
            return Err(Error::Other(format!("question {}: a search failed twice", question.id)));
        }
        let to_visit = fact.filter(|_| is_long(&hits)).zip(after(&hits, "1. (").map(visit_call));
        exchanges.push((call, hits));
        if let Some((fact, call)) = to_visit {
            let page = look_up(&call, Want::Page(fact))?;
            exchanges.push((call, page));
        }
    }
    if let Some(expression) = &question.expression {
        let call = tool_call("compute", &json!({"expr": expression}));
        let value = look_up(&call, Want::Value)?;
        exchanges.push((call, value));
    }
    Ok(exchanges)
}

/// Whether a search should be repeated.
fn failed(result: &str) -> bool {
    result.starts_with("error:") || result == "no results"
}

/// Whether the first hit says what is asked only on its page.
fn is_long(hits: &str) -> bool {
    hits.lines().next().is_some_and(|hit| hit.ends_with(MORE))
}

/// The address that follows `mark`, up to the parenthesis.
fn after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    text.split_once(mark)?.1.split(')').next()
}

/// The query starts with a space because its words do.
fn search_call(subject: Entity, word: &str) -> ToolCall {
    tool_call("search", &json!({"query": [format!(" {subject} {word}")]}))
}

fn visit_call(url: &str) -> ToolCall {
    tool_call("visit", &json!({"url": [url]}))
}

fn tool_call(name: &str, arguments: &Value) -> ToolCall {
    ToolCall::new(name, arguments.as_object().expect("an object").clone())
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
    use crate::world::{
        WorldConfig,
        question::{Family, MIXTURE, Split},
    };

    #[test]
    fn a_gold_report_is_right_and_each_stage_writes_its_own_dialect() {
        let world = World::new(&WorldConfig { noise: 0.4, ..WorldConfig::default() }).expect("a world");
        let library = world.library().expect("a library");
        let (mut n_retries, mut n_visits) = (0, 0);
        for question in MIXTURE.iter().flat_map(|(family, _)| world.family(*family, Split::Test, 40)) {
            let tell = |form| world.gold(&question, form, &library.tools().expect("tools")).expect("a gold trajectory");
            let gold = tell(Form::Staged);
            assert_eq!(gold, tell(Form::Staged));
            let turn = |span: usize, at: usize| &gold.messages()[gold.spans()[span].start + at];
            assert!(world.grade(&question, &turn(2, 0).content).right, "{}", turn(2, 0).content);
            let (subject, relation) = question.lookups[0];
            assert!(turn(0, 0).content.starts_with(&format!("step1 {}", world.dialects().plan.word(relation))));
            let searching = &gold.messages()[gold.spans()[1].start..gold.spans()[1].end - 2];
            let first = &searching[0].tool_calls[0];
            match &question.root {
                Some(root) => assert_eq!(first.arguments["url"], json!([root])),
                None => {
                    let query = format!(" {subject} {}", world.dialects().search.word(relation));
                    assert_eq!(first.arguments["query"], json!([query]));
                }
            }
            let calls: Vec<_> = searching.iter().flat_map(|message| &message.tool_calls).collect();
            n_retries += calls.windows(2).filter(|pair| pair[0].arguments == pair[1].arguments).count();
            n_visits += calls.iter().filter(|call| call.name == "visit" && question.root.is_none()).count();
            assert_eq!(calls.iter().any(|call| call.name == "compute"), question.family == Family::Compute);

            let plain = tell(Form::Plain);
            let own = |gold: &Trajectory| {
                let messages = gold.messages().iter().filter(|message| message.role == Role::Assistant);
                messages.flat_map(|message| message.tool_calls.clone()).filter(|call| !control::is_control(&call.name)).collect()
            };
            let [a, b]: [Vec<ToolCall>; 2] = [own(&gold), own(&plain)];
            assert_eq!(a.iter().map(|c| &c.arguments).collect::<Vec<_>>(), b.iter().map(|c| &c.arguments).collect::<Vec<_>>());
            assert_eq!(plain.messages().last().map(|m| &m.content), Some(&turn(2, 0).content));
        }
        assert!(n_retries > 20 && n_visits > 40, "{n_retries} {n_visits}");
    }

    #[test]
    fn a_search_that_misses_the_fact_is_an_error() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        let other = World::new(&WorldConfig { shift: 1.0, ..WorldConfig::default() }).expect("another world");
        let question = world.family(Family::Chain(1), Split::Test, 1).remove(0);
        let tools = other.library().and_then(|library| library.tools()).expect("tools");
        let error = world.gold(&question, Form::Staged, &tools).expect_err("another world's pages");
        assert!(error.to_string().contains("is not in"), "{error}");
    }

    /// The list in the system message is one token only in this order.
    #[test]
    fn the_policy_sees_the_control_tools_first() {
        let tools = World::new(&WorldConfig::default()).and_then(|world| world.library()?.tools()).expect("tools");
        let names = |form| {
            let names: Vec<String> =
                schemas(form, &tools).iter().map(|s| s["function"]["name"].as_str().expect("a name").to_owned()).collect();
            names.join(" ")
        };
        assert_eq!(names(Form::Staged), "load_lora offload_lora search visit compute");
        assert_eq!(names(Form::Plain), "search visit compute");
    }
}
