//! An evaluation's TOML file: methods, benchmarks, and how the one answers the other. Unknown keys are refused.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use weact_core::{Capability, chat::ToolProtocol, io::toml_text};
use weact_infer::{agent::Budget, controller::hard::Hard, sampler::Sampling};

use crate::{
    Error, Result,
    benchmark::Benchmark,
    grade::{self, Options},
    record::State,
    world::WorldConfig,
};

/// What kind of run the file describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// An evaluation.
    Eval,
}

/// One evaluation: every method on every benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// `"eval"`.
    pub kind: Kind,
    /// The run directory.
    pub out: PathBuf,
    /// Decides every random draw: an attempt's own seed follows from it, the task's id and the attempt's number.
    #[serde(default)]
    pub seed: u64,
    /// How methods act.
    #[serde(default)]
    pub agent: Agent,
    /// The external tools.
    #[serde(default)]
    pub tools: Tools,
    /// Which attempts are made again.
    #[serde(default)]
    pub retry: Retry,
    /// The model that judges, where one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<Judge>,
    /// The rows of the table.
    #[serde(rename = "method")]
    pub methods: Vec<Method>,
    /// Its columns.
    #[serde(rename = "benchmark")]
    pub benchmarks: Vec<Task>,
}

/// How methods act.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Agent {
    /// The system message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Turns of a whole run.
    pub max_turns: usize,
    /// Turns of single stages under prescribed ones, by alias.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub stage_turns: BTreeMap<Capability, usize>,
    /// Tokens of one turn.
    pub max_new: usize,
    /// Seconds of a whole run. With it, records depend on the machine's speed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_seconds: Option<f64>,
    /// 0 is greedy.
    pub temperature: f64,
    /// Draw from the most likely tokens whose probabilities reach this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Draw from so many most likely tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// How tools reach the model, where no card says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_protocol: Option<ToolProtocol>,
    /// Tool results that a stage keeps, where no card says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_tool_result: Option<usize>,
    /// Longest tool result in tokens, where no card says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_tool_result: Option<usize>,
}

impl Default for Agent {
    fn default() -> Self {
        Self {
            system: None,
            max_turns: 60,
            stage_turns: BTreeMap::new(),
            max_new: 8192,
            max_seconds: None,
            temperature: 0.0,
            top_p: None,
            top_k: None,
            tool_protocol: None,
            keep_tool_result: None,
            clip_tool_result: None,
        }
    }
}

impl Agent {
    /// What a run may use up.
    pub fn budget(&self) -> Budget {
        let Self { max_turns, max_new, max_seconds, .. } = *self;
        Budget { max_turns, max_new, max_seconds, ..Budget::default() }
    }

    /// How tokens are drawn.
    pub fn sampling(&self, seed: u64) -> Sampling {
        Sampling { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p, seed }
    }

    /// The prescribed stages with these turns.
    ///
    /// # Errors
    /// If there is no such stage, or it would have no turn.
    pub fn stages(&self) -> std::result::Result<Hard, String> {
        let mut rules = Hard::default();
        for (alias, turns) in &self.stage_turns {
            let names: Vec<String> = rules.workflow.iter().map(|rule| rule.capability.to_string()).collect();
            match rules.workflow.iter_mut().find(|rule| rule.capability == *alias) {
                Some(rule) if *turns > 0 => rule.max_turns = *turns,
                Some(_) => return Err(format!("stage_turns: {alias} must have a turn")),
                None => return Err(format!("stage_turns: there is no stage {alias}: use {}", names.join(", "))),
            }
        }
        Ok(rules)
    }
}

/// The external tools.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tools {
    /// `none`, `world`, or a specification as `corpus:FILE`.
    pub spec: String,
    /// The toy world whose pages `world` searches, and that grades where a benchmark says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world: Option<WorldConfig>,
}

impl Default for Tools {
    fn default() -> Self {
        Self { spec: "none".to_owned(), world: None }
    }
}

/// Which attempts are made again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retry {
    /// Attempts at a task, the first included.
    pub attempts: usize,
    /// After which states. A judge error is graded again, not run again.
    pub on: BTreeSet<State>,
}

impl Default for Retry {
    fn default() -> Self {
        Self { attempts: 1, on: [State::Error, State::NoAnswer, State::Length, State::JudgeError].into() }
    }
}

/// The model that judges.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judge {
    /// An OpenAI-compatible endpoint.
    pub url: String,
    /// The model's name there.
    pub model: String,
    /// The environment variable that holds the API key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_env: Option<String>,
    /// Replies per answer; the majority decides.
    #[serde(default = "one")]
    pub votes: usize,
}

fn one() -> usize {
    1
}

/// A way of answering.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Method {
    /// The name in tables.
    pub name: String,
    /// A Hugging Face folder.
    pub model: PathBuf,
    /// `hard`, `base` or `single:ALIAS`.
    pub policy: Policy,
    /// A folder of adapters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapters: Option<PathBuf>,
    /// One adapter, as a static merge, whose weights act in every stage instead of the stage's own; the stages' texts stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fused: Option<PathBuf>,
    /// Another system message for this method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
}

/// A controller with its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Policy {
    /// Prescribed stages.
    Hard,
    /// No adapter.
    Base,
    /// One adapter throughout.
    Single(Capability),
}

impl TryFrom<String> for Policy {
    type Error = String;

    fn try_from(name: String) -> std::result::Result<Self, String> {
        match (name.as_str(), name.strip_prefix("single:")) {
            ("hard", _) => Ok(Self::Hard),
            ("base", _) => Ok(Self::Base),
            (_, Some(alias)) => Capability::new(alias).map(Self::Single).map_err(|e| e.to_string()),
            _ => Err(format!("unknown policy {name:?}: this version runs hard, base and single:ALIAS")),
        }
    }
}

impl From<Policy> for String {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Hard => "hard".to_owned(),
            Policy::Base => "base".to_owned(),
            Policy::Single(alias) => format!("single:{alias}"),
        }
    }
}

/// A benchmark's file and its grader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// The name in tables; the benchmark's where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whose format the file has.
    pub benchmark: Benchmark,
    /// The file, or a folder where the format is several.
    pub file: PathBuf,
    /// Who grades.
    #[serde(default)]
    pub grader: GraderChoice,
    /// Another toy world for this benchmark's tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub world: Option<WorldConfig>,
    /// These tasks only, by their ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<BTreeSet<String>>,
    /// The first so many tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

impl Task {
    /// The name in tables.
    pub fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.benchmark.title().to_owned())
    }
}

/// Who grades a benchmark's answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GraderChoice {
    /// The benchmark's own rules or judge.
    #[default]
    Official,
    /// The toy world's grader: answer and citations.
    World,
}

impl Run {
    /// Reads an evaluation's TOML file.
    ///
    /// # Errors
    /// [`Error::Config`], with the line and the nearest known key, if it can't be read or is not what it should be.
    pub fn read(path: &Path) -> Result<Self> {
        let bad = |why: String| Error::Config { path: path.to_owned(), why };
        let text = fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        let run: Self = toml_text::parse(&text).map_err(bad)?;
        run.check().map_err(bad)?;
        Ok(run)
    }

    /// Checks what the types can't say.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> std::result::Result<(), String> {
        let double = |names: Vec<String>| {
            let mut seen = BTreeSet::new();
            names.into_iter().find(|name| name.trim().is_empty() || !seen.insert(name.clone()))
        };
        if self.out.as_os_str().is_empty() {
            return Err("out is empty".to_owned());
        }
        if self.methods.is_empty() || self.benchmarks.is_empty() {
            return Err("an evaluation needs a [[method]] and a [[benchmark]]".to_owned());
        }
        if let Some(name) = double(self.methods.iter().map(|m| m.name.clone()).collect()) {
            return Err(format!("two methods are called {name:?}, or one has no name"));
        }
        if let Some(name) = double(self.benchmarks.iter().map(Task::name).collect()) {
            return Err(format!("two benchmarks are called {name:?}: give each a name"));
        }
        if let Some(method) = self.methods.iter().find(|m| m.policy != Policy::Base && m.adapters.is_none()) {
            return Err(format!("method {:?}: its policy needs adapters = DIR", method.name));
        }
        let agent = &self.agent;
        agent.budget().check().and_then(|()| agent.sampling(0).check()).map_err(|e| format!("[agent] {e}"))?;
        agent.stages().map_err(|why| format!("[agent] {why}"))?;
        let needs_world = self.tools.spec == "world" || self.benchmarks.iter().any(|b| b.grader == GraderChoice::World);
        if needs_world && self.tools.world.is_none() {
            return Err("the toy world is used: say which in [tools.world]; an empty table is the default one".to_owned());
        }
        if self.retry.attempts == 0 {
            return Err("[retry] attempts must be at least 1".to_owned());
        }
        if let Some(state) = [State::Correct, State::Wrong].iter().find(|state| self.retry.on.contains(state)) {
            return Err(format!("[retry] on = {state:?}: a graded answer is final, or accuracies could be rolled for"));
        }
        if self.benchmarks.iter().any(|b| b.limit == Some(0)) {
            return Err("a benchmark's limit must be at least 1".to_owned());
        }
        if self.judge.as_ref().is_some_and(|judge| judge.votes == 0) {
            return Err("[judge] votes must be at least 1".to_owned());
        }
        for task in self.benchmarks.iter().filter(|b| b.grader == GraderChoice::Official && self.judge.is_none()) {
            grade::grader(task.benchmark, None, Options::default()).map_err(|e| format!("benchmark {:?}: {e}", task.name()))?;
        }
        Ok(())
    }

    /// The resolved configuration as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a run serialises")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "kind = \"eval\"\nout = \"runs/x\"\n[[method]]\nname = \"base\"\nmodel = \"m\"\npolicy = \"base\"\n\
                        [[benchmark]]\nbenchmark = \"gaia\"\nfile = \"f\"\n";

    #[test]
    fn a_configuration_survives_being_written() {
        let run: Run = toml_text::parse(GOOD).expect("legal");
        assert_eq!(run.check(), Ok(()));
        assert_eq!((run.benchmarks[0].name().as_str(), run.retry.attempts), ("GAIA", 1));
        let more = "ids = [\"b\", \"a\"]\nlimit = 3\nworld = { seed = 2 }\n[agent]\nmax_seconds = 1.5\nstage_turns = { search = 6 }\n\
                    [judge]\nurl = \"u\"\nmodel = \"m\"\n";
        let full: Run = toml_text::parse(&format!("{GOOD}{more}")).expect("legal");
        assert_eq!((full.check(), full.agent.stages().expect("legal").workflow[1].max_turns), (Ok(()), 6));
        for run in [run, full] {
            assert_eq!(toml_text::parse::<Run>(&run.to_toml()).expect("legal"), run);
        }
    }

    #[test]
    fn each_mistake_is_named() {
        let with = |more: &str| format!("{GOOD}{more}");
        for (text, why) in [
            (with("limt = 3\n"), "did you mean `limit`?"),
            (GOOD.replace("\"gaia\"", "\"gaja\""), "unknown benchmark \"gaja\""),
            (GOOD.replace("policy = \"base\"", "policy = \"soft\""), "unknown policy \"soft\""),
            (GOOD.replace("policy = \"base\"", "policy = \"hard\""), "its policy needs adapters"),
            (GOOD.replace("out = \"runs/x\"", "out = \"\""), "out is empty"),
            (with("limit = 0\n"), "limit must be at least 1"),
            (with("grader = \"world\"\n"), "[tools.world]"),
            (with("[[benchmark]]\nbenchmark = \"gaia\"\nfile = \"g\"\n"), "two benchmarks are called \"GAIA\""),
            (with("[retry]\nattempts = 0\n"), "attempts must be at least 1"),
            (with("[retry]\nattempts = 2\non = [\"wrong\"]\n"), "a graded answer is final"),
            (with("[tools.world]\nsead = 1\n"), "unknown field `sead`"),
            (with("[agent]\nmax_new = 0\n"), "[agent] turns, tokens"),
            (with("[agent]\ntemperature = -1.0\n"), "[agent] sampling"),
            (with("[agent]\nstage_turns = { serch = 3 }\n"), "no stage serch: use plan, search, write"),
            (with("[agent]\nstage_turns = { search = 0 }\n"), "search must have a turn"),
            (with("[judge]\nurl = \"u\"\nmodel = \"m\"\nvotes = 0\n"), "votes must be at least 1"),
            (GOOD.replace("\"gaia\"", "\"researchqa\""), "by a judge alone"),
        ] {
            let error = toml_text::parse::<Run>(&text).and_then(|run| run.check()).expect_err(why);
            assert!(error.contains(why), "{error}");
        }
    }
}
