//! Tool lists in the forms that data sets hold, to OpenAI's form.

use serde_json::{Map, Value, json};

/// Reads a tool list: an array or one as a JSON string, of OpenAI's `{"type": "function", "function": {..}}`, bare
/// `{"name", "description", "parameters"}`, or Qwen-Agent's `{"name_for_model", "description_for_model", "parameters"}`.
/// Null and blank text are an empty list.
pub(super) fn tools(value: Value) -> Result<Vec<Value>, String> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::String(text) if text.trim().is_empty() => Ok(Vec::new()),
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(Value::String(_)) => Err("tools are a string within a string".to_owned()),
            Ok(value) => tools(value),
            Err(e) => Err(format!("tools are no JSON: {e}")),
        },
        Value::Array(items) => items.into_iter().map(tool).collect(),
        other => Err(format!("tools must be a list, not {other}")),
    }
}

fn tool(value: Value) -> Result<Value, String> {
    let Value::Object(mut fields) = value else { return Err(format!("a tool is an object, not {value}")) };
    if fields.get("function").is_some_and(|f| f["name"].is_string()) {
        fields.entry("type").or_insert_with(|| json!("function"));
        return Ok(Value::Object(fields));
    }
    if fields.get("name_for_model").is_some_and(Value::is_string) {
        fields = qwen_agent(fields);
    }
    if fields.get("name").is_some_and(Value::is_string) {
        return Ok(json!({"type": "function", "function": fields}));
    }
    Err(format!("a tool without a name: {}", Value::Object(fields)))
}

fn qwen_agent(fields: Map<String, Value>) -> Map<String, Value> {
    let renamed = |key: String| match key.as_str() {
        "name_for_model" => Some("name".to_owned()),
        "description_for_model" => Some("description".to_owned()),
        "name_for_human" => None,
        _ => Some(key),
    };
    fields.into_iter().filter_map(|(key, value)| Some((renamed(key)?, value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_reads_as_openai() {
        let expected = vec![json!({"type": "function", "function": {"name": "visit", "description": "d", "parameters": {}}})];
        let bare = json!([{"name": "visit", "description": "d", "parameters": {}}]);
        let qwen_agent =
            json!([{"name_for_human": "v", "name_for_model": "visit", "description_for_model": "d", "parameters": {}}]);
        for form in [json!(expected), json!(bare.to_string()), bare, qwen_agent] {
            assert_eq!(tools(form.clone()).expect("a known form"), expected, "{form}");
        }
        for none in [Value::Null, json!(" "), json!("[]")] {
            assert_eq!(tools(none), Ok(Vec::new()));
        }
        for bad in [json!({"name": "visit"}), json!("{"), json!([1]), json!([{"function": {}}])] {
            assert!(tools(bad.clone()).is_err(), "{bad} was accepted");
        }
    }
}
