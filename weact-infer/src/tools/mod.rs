//! External tools: what a policy can call besides the control tools. A tool's failure is an observation, never an error of
//! the run.

pub mod corpus;

use std::{fmt, path::Path, sync::Arc};

use serde_json::{Map, Value};
use weact_core::{control, message::ToolCall};

use crate::Error;
use corpus::Corpus;

/// What a call gives back to the policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolOutput {
    /// The observation: untrusted text.
    pub text: String,
    /// Whether the call failed; `text` then says why.
    pub error: bool,
}

impl ToolOutput {
    /// The observation of a call that did what was asked.
    pub fn ok(text: impl Into<String>) -> Self {
        Self { text: text.into(), error: false }
    }

    /// The observation `error: WHY`.
    pub fn failed(why: impl fmt::Display) -> Self {
        Self { text: format!("error: {why}"), error: true }
    }
}

/// A tool that a policy calls by name.
pub trait Tool: Send + Sync {
    /// The name in its schema.
    fn name(&self) -> &str;

    /// The schema in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`.
    fn schema(&self) -> Value;

    /// Runs the tool on arguments that fit its schema, as [`ToolSet::call`] sees to. A failure is an observation: this
    /// neither panics nor ends the run, whatever the arguments.
    fn call(&self, arguments: &Map<String, Value>) -> ToolOutput;
}

/// The external tools of a run, in the order in which the model sees them.
///
/// Invariant: names are unique, and none is a control tool's.
#[derive(Default)]
pub struct ToolSet(Vec<Box<dyn Tool>>);

impl fmt::Debug for ToolSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ToolSet").field(&self.names()).finish()
    }
}

impl ToolSet {
    /// The set of `tools`.
    ///
    /// # Errors
    /// If two tools share a name, or one has the name of a control tool.
    pub fn new(tools: Vec<Box<dyn Tool>>) -> crate::Result<Self> {
        for (i, tool) in tools.iter().enumerate() {
            let name = tool.name();
            if control::is_control(name) {
                return Err(Error::Other(format!("{name} is a control tool: an external tool needs another name")));
            }
            if tools[..i].iter().any(|other| other.name() == name) {
                return Err(Error::Other(format!("two tools are called {name}: leave one out")));
            }
        }
        Ok(Self(tools))
    }

    /// The schemas in OpenAI's form.
    pub fn schemas(&self) -> Vec<Value> {
        self.0.iter().map(|tool| tool.schema()).collect()
    }

    /// The names.
    pub fn names(&self) -> Vec<&str> {
        self.0.iter().map(|tool| tool.name()).collect()
    }

    /// Runs `call`. An unknown tool, a missing argument and an argument of the wrong type are observations that say what
    /// would have been right. A string is read as a list of one where a list of strings is wanted, null as absent, and
    /// arguments that the schema does not know are left out.
    pub fn call(&self, call: &ToolCall) -> ToolOutput {
        let Some(tool) = self.0.iter().find(|tool| tool.name() == call.name) else {
            return unknown(&call.name, &self.names());
        };
        let parameters = &tool.schema()["function"]["parameters"];
        match fit_object(&call.arguments, parameters) {
            Ok(arguments) => tool.call(&arguments),
            Err(why) => ToolOutput::failed(format!("{}: {why}; expected {}", call.name, expected(parameters))),
        }
    }
}

/// The answer to a call of a tool that is none of `known`.
pub(crate) fn unknown(name: &str, known: &[&str]) -> ToolOutput {
    ToolOutput::failed(format!("there is no tool {name:?}; the tools are {}", known.join(", ")))
}

/// Opens the tools that a command line names: `corpus:FILE`, several with commas between them.
///
/// # Errors
/// If a tool is unknown or not available, or can't be opened, or two share a name.
pub fn open(spec: &str) -> crate::Result<ToolSet> {
    let mut tools = Vec::new();
    for item in spec.split(',').map(str::trim) {
        match item.split_once(':').unwrap_or((item, "")) {
            ("corpus", file) if !file.is_empty() => tools.extend(Arc::new(Corpus::open(Path::new(file))?).tools()),
            ("web" | "python" | "mcp", _) => {
                return Err(Error::Other(format!("tool {item:?} is not available in this version: use corpus:FILE")));
            }
            _ => return Err(Error::Other(format!("unknown tool {item:?}: use corpus:FILE"))),
        }
    }
    ToolSet::new(tools)
}

/// `value` in the form that `schema` wants, or what is wrong with it. Reads `type`, `items`, `properties` and `required`.
fn fit(value: &Value, schema: &Value) -> Result<Value, String> {
    let wanted = types(schema);
    let wants = |name: &str| wanted.contains(&name);
    let fits = match value {
        Value::Null => wants("null"),
        Value::Bool(_) => wants("boolean"),
        Value::Number(n) => wants("number") || (wants("integer") && !n.is_f64()),
        Value::String(_) => wants("string"),
        Value::Array(_) => wants("array"),
        Value::Object(_) => wants("object"),
    };
    match (value, &schema["items"]) {
        (Value::String(_), items) if !fits && wants("array") && types(items).contains(&"string") => {
            Ok(Value::Array(vec![value.clone()]))
        }
        _ if !fits && !wanted.is_empty() => Err(format!("must be {}, not {}", wanted.join(" or "), clip(&value.to_string()))),
        (Value::Array(values), items) => values.iter().map(|value| fit(value, items)).collect(),
        (Value::Object(map), _) if schema["properties"].is_object() => fit_object(map, schema).map(Value::Object),
        _ => Ok(value.clone()),
    }
}

fn fit_object(map: &Map<String, Value>, schema: &Value) -> Result<Map<String, Value>, String> {
    let mut fitted = Map::new();
    for (key, property) in schema["properties"].as_object().into_iter().flatten() {
        match map.get(key) {
            Some(Value::Null) | None if is_required(schema, key) => return Err(format!("{key:?} is missing")),
            Some(Value::Null) | None => {}
            Some(value) => {
                fitted.insert(key.clone(), fit(value, property).map_err(|why| format!("{key:?} {why}"))?);
            }
        }
    }
    Ok(fitted)
}

/// The types that a schema allows; empty where it allows any.
fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        name => name.as_str().into_iter().collect(),
    }
}

fn is_required(schema: &Value, key: &str) -> bool {
    schema["required"].as_array().is_some_and(|keys| keys.iter().any(|required| required == key))
}

/// The arguments of a tool in one line: `{"query": array of string, "top_k": integer (optional)}`.
fn expected(parameters: &Value) -> String {
    let describe = |(key, property): (&String, &Value)| {
        let items = types(&property["items"]);
        let of = if items.is_empty() { String::new() } else { format!(" of {}", items.join(" or ")) };
        let optional = if is_required(parameters, key) { "" } else { " (optional)" };
        format!("{key:?}: {}{of}{optional}", types(property).join(" or "))
    };
    let properties = parameters["properties"].as_object().into_iter().flatten();
    format!("{{{}}}", properties.map(describe).collect::<Vec<_>>().join(", "))
}

/// `text` in one line of at most 200 characters; `...` stands for the rest.
fn clip(text: &str) -> String {
    let line = one_line(text);
    match line.char_indices().nth(200) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// `text` with one space for every run of white space, line breaks of all kinds included.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Answers with the arguments that reach it.
    struct Echo(&'static str);

    impl Tool for Echo {
        fn name(&self) -> &str {
            self.0
        }

        fn schema(&self) -> Value {
            json!({"type": "function", "function": {"name": self.0, "description": "", "parameters": {
                "type": "object",
                "properties": {"query": {"type": "array", "items": {"type": "string"}}, "n": {"type": "integer"}},
                "required": ["query"]}}})
        }

        fn call(&self, arguments: &Map<String, Value>) -> ToolOutput {
            ToolOutput::ok(Value::Object(arguments.clone()).to_string())
        }
    }

    fn set(names: &[&'static str]) -> crate::Result<ToolSet> {
        ToolSet::new(names.iter().map(|name| Box::new(Echo(name)) as Box<dyn Tool>).collect())
    }

    #[test]
    fn names_are_unique_and_never_a_control_tools() {
        assert_eq!(set(&["b", "a"]).expect("two names").names(), ["b", "a"]);
        for (names, why) in [(["a", "a"], "two tools are called a"), (["a", "load_lora"], "load_lora is a control tool")] {
            let error = set(&names).expect_err("a bad set").to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn arguments_are_fitted_to_the_schema_or_answered_with_what_is_expected() {
        let expected = r#"; expected {"query": array of string, "n": integer (optional)}"#;
        let refused = |why: &str| ToolOutput::failed(format!("echo: {why}{expected}"));
        let echo = |arguments: &str| ToolOutput::ok(arguments);
        let table = [
            (json!({"query": ["a", "b"], "n": 2}), echo(r#"{"query":["a","b"],"n":2}"#)),
            (json!({"n": null, "query": "a", "other": {}}), echo(r#"{"query":["a"]}"#)),
            (json!({}), refused(r#""query" is missing"#)),
            (json!({"query": null}), refused(r#""query" is missing"#)),
            (json!({"query": {"q": "a"}}), refused(r#""query" must be array, not {"q":"a"}"#)),
            (json!({"query": ["a", 1]}), refused(r#""query" must be string, not 1"#)),
            (json!({"query": "a", "n": 1.5}), refused(r#""n" must be integer, not 1.5"#)),
            (json!({"query": "a", "n": "2"}), refused(r#""n" must be integer, not "2""#)),
        ];
        let tools = set(&["echo"]).expect("one tool");
        for (arguments, output) in table {
            let Value::Object(arguments) = arguments else { unreachable!("objects only") };
            assert_eq!(tools.call(&ToolCall::new("echo", arguments)), output);
        }
    }

    #[test]
    fn an_unknown_tool_is_answered_with_the_names() {
        let output = set(&["search", "visit"]).expect("two tools").call(&ToolCall::new("lod_lora", Map::new()));
        assert_eq!(output, ToolOutput::failed("there is no tool \"lod_lora\"; the tools are search, visit"));
    }

    #[test]
    fn a_spec_names_tools_that_exist() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("pages.jsonl");
        std::fs::write(&file, r#"{"url":"u","title":"t","text":"x"}"#).expect("a file");
        let corpus = format!("corpus:{}", file.display());
        assert_eq!(open(&corpus).expect("a corpus").names(), ["search", "visit"]);
        for (spec, why) in [
            (format!("{corpus},web"), "\"web\" is not available in this version"),
            ("mcp:server --flag".to_owned(), "is not available in this version"),
            ("python".to_owned(), "is not available in this version"),
            (format!("{corpus}, {corpus}"), "two tools are called search"),
            ("corpus:".to_owned(), "unknown tool \"corpus:\""),
            (String::new(), "unknown tool \"\""),
            ("corpus:/nowhere.jsonl".to_owned(), "/nowhere.jsonl"),
        ] {
            let error = open(&spec).expect_err("a bad spec").to_string();
            assert!(error.contains(why), "{spec}: {error}");
        }
    }
}
