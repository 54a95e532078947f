//! The tools of a run in the toy world: `search`, `visit` and `compute`, with calls that fail.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use weact_infer::tools::{
    Tool, ToolOutput, ToolSet,
    corpus::{Corpus, Hit, format_hits},
};

use super::{World, compute::evaluate};
use crate::Result;

/// How many hits a query gets.
const TOP_K: usize = 3;

/// The pages of one world with their index, from which every run takes tools of its own.
#[derive(Clone, Debug)]
pub struct Library {
    corpus: Arc<Corpus>,
    seed: u64,
    timeout_share: f64,
    empty_share: f64,
}

impl World {
    /// The pages, indexed.
    ///
    /// # Errors
    /// If they can't be indexed.
    pub fn library(&self) -> Result<Library> {
        let config = self.config();
        Ok(Library {
            corpus: Arc::new(Corpus::from_pages(self.pages())?),
            seed: config.seed,
            timeout_share: config.timeout_share,
            empty_share: config.empty_share,
        })
    }
}

impl Library {
    /// The tools of one run. A query that fails does so the first time it is asked in this run; which ones fail is decided by the
    /// world's seed and the query's text.
    ///
    /// # Errors
    /// None is expected: the names differ.
    pub fn tools(&self) -> Result<ToolSet> {
        let search = Search { library: self.clone(), asked: Mutex::default() };
        let visit = Arc::clone(&self.corpus).tools().into_iter().filter(|tool| tool.name() == "visit");
        let mut tools: Vec<Box<dyn Tool>> = vec![Box::new(search)];
        tools.extend(visit);
        tools.push(Box::new(Compute));
        Ok(ToolSet::new(tools)?)
    }

    /// How `query` fails when it is asked for the first time.
    fn failure(&self, query: &str) -> Option<ToolOutput> {
        let mut hash = Sha256::new();
        hash.update(self.seed.to_le_bytes());
        hash.update(query);
        let bytes: [u8; 8] = hash.finalize()[..8].try_into().expect("eight bytes");
        let u = u64::from_le_bytes(bytes) as f64 / u64::MAX as f64;
        match u {
            u if u < self.timeout_share => Some(timeout()),
            u if u < self.timeout_share + self.empty_share => Some(ToolOutput::ok(format_hits(&[]))),
            _ => None,
        }
    }
}

/// The answer of a search that took too long.
pub(super) fn timeout() -> ToolOutput {
    ToolOutput::failed("timeout")
}

struct Search {
    library: Library,
    asked: Mutex<BTreeSet<String>>,
}

impl Tool for Search {
    fn name(&self) -> &str {
        "search"
    }

    fn schema(&self) -> Value {
        json!({"type": "function", "function": {
            "name": "search",
            "description": "Search the pages; of each the first line is shown.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "array", "items": {"type": "string"}, "description": "one or more queries"}},
                "required": ["query"]}}})
    }

    fn call(&self, arguments: &Map<String, Value>) -> ToolOutput {
        let queries = arguments.get("query").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let queries: Vec<&str> = queries.iter().filter_map(Value::as_str).collect();
        if queries.is_empty() {
            return ToolOutput::failed("query must be one string or more");
        }
        let results: Vec<ToolOutput> = queries.iter().map(|query| self.answer(query)).collect();
        let texts: Vec<&str> = results.iter().map(|result| result.text.as_str()).collect();
        ToolOutput { text: texts.join("\n\n"), error: results.iter().any(|result| result.error) }
    }
}

impl Search {
    fn answer(&self, query: &str) -> ToolOutput {
        let first_time = self.asked.lock().unwrap_or_else(PoisonError::into_inner).insert(query.trim().to_owned());
        if let Some(failure) = self.library.failure(query.trim()).filter(|_| first_time) {
            return failure;
        }
        match self.library.corpus.search(query, TOP_K) {
            Ok(hits) => {
                let shown: Vec<Hit> = hits.into_iter().map(|hit| self.with_first_line(hit)).collect();
                ToolOutput::ok(format_hits(&shown))
            }
            Err(why) => ToolOutput::failed(why),
        }
    }

    fn with_first_line(&self, hit: Hit) -> Hit {
        let page = self.library.corpus.page(&hit.url).expect("a hit is a page");
        Hit { snippet: page.text.lines().next().unwrap_or_default().to_owned(), ..hit }
    }
}

struct Compute;

impl Tool for Compute {
    fn name(&self) -> &str {
        "compute"
    }

    fn schema(&self) -> Value {
        json!({"type": "function", "function": {
            "name": "compute",
            "description": "Compute with whole numbers: + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expr": {"type": "string", "description": "the expression"}},
                "required": ["expr"]}}})
    }

    fn call(&self, arguments: &Map<String, Value>) -> ToolOutput {
        let expression = arguments.get("expr").and_then(Value::as_str).unwrap_or_default();
        evaluate(expression).map_or_else(ToolOutput::failed, |value| ToolOutput::ok(format!("= {value}")))
    }
}

#[cfg(test)]
mod tests {
    use weact_core::message::ToolCall;

    use super::*;
    use crate::world::WorldConfig;

    fn ask(tools: &ToolSet, name: &str, arguments: Value) -> ToolOutput {
        let Value::Object(arguments) = arguments else { unreachable!("objects only") };
        tools.call(&ToolCall::new(name, arguments))
    }

    #[test]
    fn queries_fail_once_a_run_and_the_same_in_every_run() {
        let config = WorldConfig { timeout_share: 0.2, empty_share: 0.2, ..WorldConfig::default() };
        let library = World::new(&config).and_then(|world| world.library()).expect("a library");
        let [a, b] = [library.tools(), library.tools()].map(|tools| tools.expect("tools"));
        let mut counts = [0; 3];
        for i in 0..200 {
            let query = json!({"query": [format!(" Orun k0{} {i}", i % 10)]});
            let first = ask(&a, "search", query.clone());
            let kind = [first.error, first.text == "no results", true].iter().position(|is| *is).expect("one holds");
            counts[kind] += 1;
            assert_eq!(ask(&b, "search", query.clone()), first);
            assert!(ask(&a, "search", query).text.starts_with("1. ("), "the second time it works");
        }
        assert!((25..55).contains(&counts[0]) && (25..55).contains(&counts[1]), "{counts:?}");
    }

    #[test]
    fn a_calculation_that_makes_no_sense_is_an_observation() {
        let tools = World::new(&WorldConfig::default()).and_then(|world| world.library()?.tools()).expect("tools");
        assert_eq!(ask(&tools, "compute", json!({"expr": " 1755 - 1742"})), ToolOutput::ok("= 13"));
        assert_eq!(ask(&tools, "compute", json!({"expr": "1 /"})).text, "error: expected a number");
        assert!(ask(&tools, "compute", json!({})).text.contains("\"expr\" is missing"));
    }
}
