//! The checkpoint's own chat template, rendered as transformers renders it: Jinja with Python's string methods, `trim_blocks`,
//! `lstrip_blocks`, key order as given and `tojson` in the style of `json.dumps`.

use std::{fs, path::Path};

use minijinja::{
    Environment, ErrorKind, Value as Jinja,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{Error, Result};

/// A compiled chat template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
    special_tokens: Map<String, Value>,
}

const NAME: &str = "chat_template";

impl Template {
    /// The template of a checkpoint folder: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json` (of a list, the
    /// one named `default`). `None` if there is neither.
    ///
    /// # Errors
    /// If a file can't be read or the template does not compile; no other template is used instead.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let config_path = dir.join("tokenizer_config.json");
        let config: Map<String, Value> = if config_path.exists() {
            let text = fs::read_to_string(&config_path).map_err(|e| Error::io("can't read", &config_path, e))?;
            serde_json::from_str(&text).map_err(|e| Error::file(&config_path, e.to_string()))?
        } else {
            Map::new()
        };
        let jinja = dir.join("chat_template.jinja");
        let source = if jinja.exists() {
            Some(fs::read_to_string(&jinja).map_err(|e| Error::io("can't read", &jinja, e))?)
        } else {
            match config.get("chat_template") {
                Some(Value::String(source)) => Some(source.clone()),
                Some(Value::Array(named)) => {
                    let default = named.iter().find(|t| t["name"] == "default").and_then(|t| t["template"].as_str());
                    default.map(str::to_owned)
                }
                _ => None,
            }
        };
        let text_of = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(|s| Value::String(s.to_owned()));
        let special_tokens = ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"]
            .into_iter()
            .filter_map(|key| Some((key.to_owned(), text_of(config.get(key)?)?)))
            .collect();
        source.map(|source| Self::new(source, special_tokens)).transpose()
    }

    /// Compiles `source`. `special_tokens` are variables that it may use, such as `bos_token`.
    ///
    /// # Errors
    /// If it does not compile.
    pub fn new(source: String, special_tokens: Map<String, Value>) -> Result<Self> {
        let mut environment = Environment::new();
        environment
            .set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().expect("the standard delimiters"));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<Jinja, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, without_generation_tags(&source)).map_err(|e| Error::Template(describe(&e)))?;
        let unknown = environment.get_template(NAME).expect("it was added").undeclared_variables(false);
        if unknown.contains("strftime_now") && !source.contains("strftime_now is defined") {
            return Err(Error::Template(
                "it needs strftime_now (today's date), which would make prompts differ from day to day".to_owned(),
            ));
        }
        Ok(Self { environment, source, special_tokens })
    }

    /// The template's text: its identity.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template renders a tool list at all.
    pub fn knows_tools(&self) -> bool {
        self.source.contains("tools")
    }

    /// The conversation as text, exactly as transformers' `apply_chat_template` gives it.
    ///
    /// # Errors
    /// If rendering fails, or the template itself raises an exception.
    pub fn render(
        &self,
        messages: &[Value],
        tools: &[Value],
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
    ) -> Result<String> {
        #[derive(Serialize)]
        struct Context<'a> {
            messages: &'a [Value],
            tools: Option<&'a [Value]>,
            documents: Option<()>,
            add_generation_prompt: bool,
            #[serde(skip_serializing_if = "Option::is_none")]
            enable_thinking: Option<bool>,
            #[serde(flatten)]
            special_tokens: &'a Map<String, Value>,
        }
        let tools = (!tools.is_empty()).then_some(tools);
        let context = Context {
            messages,
            tools,
            documents: None,
            add_generation_prompt,
            enable_thinking,
            special_tokens: &self.special_tokens,
        };
        let template = self.environment.get_template(NAME).expect("it was added");
        template.render(Serde(context)).map_err(|e| Error::Template(describe(&e)))
    }
}

/// The error with its line and what lies below it.
fn describe(error: &minijinja::Error) -> String {
    let line = error.line().map_or_else(String::new, |line| format!("line {line}: "));
    let mut text = format!("{line}{error}");
    let mut source = std::error::Error::source(error);
    while let Some(below) = source {
        text.push_str(&format!(": {below}"));
        source = below.source();
    }
    text
}

/// transformers' `{% generation %}` blocks mark assistant text for masks; they render as their content. The block's place keeps
/// its whitespace control.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let tag = &rest[start..start + len + 2];
        let inner = tag[2..tag.len() - 2].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        out.push_str(&rest[..start]);
        match inner {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[start + len + 2..];
    }
    out.push_str(rest);
    out
}

/// transformers' `tojson`: `json.dumps(value, ensure_ascii=False)`, with its `indent`.
#[expect(clippy::needless_pass_by_value, reason = "the signature that the engine calls")]
fn to_json(value: &Jinja, options: Kwargs) -> std::result::Result<Jinja, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if sort == Some(true) || ascii == Some(true) {
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, "tojson with sort_keys or ensure_ascii is not supported"));
    }
    let value = serde_json::to_value(value).map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(Jinja::from_safe_string(python_json(&value, indent)))
}

/// `value` as Python's `json.dumps(value, ensure_ascii=False, indent=indent)` writes it.
pub fn python_json(value: &Value, indent: Option<usize>) -> String {
    let mut out = String::new();
    write_json(value, indent, 0, &mut out);
    out
}

fn write_json(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) {
    let separator = |out: &mut String, first: bool, depth: usize| match indent {
        None if first => {}
        None => out.push_str(", "),
        Some(width) => {
            out.push_str(if first { "\n" } else { ",\n" });
            out.push_str(&" ".repeat(width * depth));
        }
    };
    let close = |out: &mut String, bracket: char| {
        if let Some(width) = indent {
            out.push('\n');
            out.push_str(&" ".repeat(width * depth));
        }
        out.push(bracket);
    };
    match value {
        Value::Array(items) if items.is_empty() => out.push_str("[]"),
        Value::Object(map) if map.is_empty() => out.push_str("{}"),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                separator(out, i == 0, depth + 1);
                write_json(item, indent, depth + 1, out);
            }
            close(out, ']');
        }
        Value::Object(map) => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                separator(out, i == 0, depth + 1);
                out.push_str(&Value::String(key.clone()).to_string());
                out.push_str(": ");
                write_json(item, indent, depth + 1, out);
            }
            close(out, '}');
        }
        Value::Number(number) if number.is_f64() => out.push_str(&python_float(number.as_f64().expect("it is one"))),
        scalar => out.push_str(&scalar.to_string()),
    }
}

/// Python's `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn python_float(x: f64) -> String {
    let shortest = format!("{x:e}");
    let (digits, exponent) = shortest.split_once('e').expect("the format has an exponent");
    let exponent: i32 = exponent.parse().expect("a number");
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str) -> Result<String> {
        Template::new(source.to_owned(), Map::new())?.render(&[json!({"role": "user", "content": " Hi\n"})], &[], false, None)
    }

    #[test]
    fn python_methods_and_filters_of_real_templates_work() {
        let cases = [
            ("{{ messages[0].content.strip() }}", "Hi"),
            ("{{ '\n\na\n'.lstrip('\n') }}|{{ 'a\n'.rstrip() }}", "a\n|a"),
            ("{{ 'x</think>y'.split('</think>')[-1] }}", "y"),
            ("{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith('bc') }}", "True True"),
            ("{{ 'a-b'.replace('-', '+') }} {{ 'ab cd'.title() }}", "a+b Ab Cd"),
            ("{% for k, v in {'z': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "z1a2"),
            ("{% for i in [1, 2, 3][::-1] %}{{ i }}{{ loop.index0 }}{% endfor %}", "302112"),
            ("{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
            ("{{ 'a' is string }}", "True"),
            ("{{ {'b': [1, 2.0], 'a': {}} | tojson }}", r#"{"b": [1, 2.0], "a": {}}"#),
            ("{{ {'b': [1]} | tojson(indent=2) }}", "{\n  \"b\": [\n    1\n  ]\n}"),
        ]
        .map(|(a, b)| (a.to_owned(), b.to_owned()));
        for (source, expected) in cases {
            assert_eq!(render(&source).expect(&source), expected, "{source}");
        }
    }

    #[test]
    fn a_generation_block_renders_as_its_content() {
        let with =
            "{%- for m in messages -%}\n  <a>{%- generation -%} {{ m.content.strip() }} {%- endgeneration -%}</a>\n{%- endfor %}";
        let without = with.replace("{%- generation -%}", "{%- if true -%}").replace("{%- endgeneration -%}", "{%- endif -%}");
        assert_eq!(render(with).expect("it compiles"), render(&without).expect("it compiles"));
    }

    #[test]
    fn what_is_unknown_is_an_error_and_never_another_template() {
        assert!(render("a\n{{ 1 | no_such_filter }}").expect_err("unknown filter").to_string().contains("line 2"));
        assert!(
            render("{{ raise_exception('roles must alternate') }}")
                .expect_err("raised")
                .to_string()
                .contains("roles must alternate")
        );
        assert!(render("{{ strftime_now('%d') }}").is_err());
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (x, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1e16, "1e+16"),
            (123456789.5, "123456789.5"),
            (-2.5e-10, "-2.5e-10"),
        ] {
            assert_eq!(python_float(x), expected);
        }
    }
}
