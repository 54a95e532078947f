//! Weight actions: Eq. 6 as a total function, and the two tools through which a policy takes them.
//!
//! ```
//! use weact_core::{Capability, control::{Action, transition}};
//! let plan = Capability::new("plan")?;
//! let z = transition(None, &Action::Load(plan.clone()));
//! assert_eq!(z, Some(plan.clone()));
//! assert_eq!(transition(z, &Action::Offload(plan)), None);
//! # Ok::<(), weact_core::Error>(())
//! ```

use serde_json::{Map, Value, json};

use crate::{Capability, message::ToolCall};

/// The name of the tool that activates an adapter.
pub const LOAD: &str = "load_lora";
/// The name of the tool that releases the active adapter.
pub const OFFLOAD: &str = "offload_lora";
/// The one argument of both tools.
pub const ARGUMENT: &str = "adapter";

const INTRODUCTION: &str = "Activate one capability adapter; it keeps control until it is offloaded. ";

/// What a turn does to the active weights, `a_t` of Eq. 6.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Activate a capability's adapter.
    Load(Capability),
    /// Release a capability's adapter.
    Offload(Capability),
    /// Anything else: text, or a call of an external tool.
    Other,
}

/// The active adapter after `action` (Eq. 6):
///
/// `z' = k` if `a = Load(k)` and `z` is empty; `z' = empty` if `a = Offload(k)` and `z = k`; `z' = z` otherwise.
pub fn transition(z: Option<Capability>, action: &Action) -> Option<Capability> {
    match (z, action) {
        (None, Action::Load(k)) => Some(k.clone()),
        (Some(active), Action::Offload(k)) if active == *k => None,
        (z, _) => z,
    }
}

/// Whether `name` is one of the two control tools.
pub fn is_control(name: &str) -> bool {
    name == LOAD || name == OFFLOAD
}

/// A control call that can't be understood, with what would have been right. It changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tool} takes exactly {{\"adapter\": ALIAS}} with a registered alias, got {got}")]
pub struct MalformedControl {
    /// The tool that was called.
    pub tool: String,
    /// The arguments as JSON.
    pub got: String,
}

/// Reads the action of one call; external tools are [`Action::Other`].
///
/// # Errors
/// If a control tool is called with other arguments than one legal alias. Nothing is repaired here: a guessed alias could
/// activate the wrong weights.
pub fn action(call: &ToolCall) -> Result<Action, MalformedControl> {
    if !is_control(&call.name) {
        return Ok(Action::Other);
    }
    let alias = match call.arguments.get(ARGUMENT) {
        Some(Value::String(alias)) if call.arguments.len() == 1 => Capability::new(alias).ok(),
        _ => None,
    };
    let Some(alias) = alias else {
        return Err(MalformedControl { tool: call.name.clone(), got: Value::Object(call.arguments.clone()).to_string() });
    };
    Ok(if call.name == LOAD { Action::Load(alias) } else { Action::Offload(alias) })
}

/// The call `load_lora(capability)`.
pub fn load_call(capability: &Capability) -> ToolCall {
    control_call(LOAD, capability)
}

/// The call `offload_lora(capability)`.
pub fn offload_call(capability: &Capability) -> ToolCall {
    control_call(OFFLOAD, capability)
}

fn control_call(tool: &str, capability: &Capability) -> ToolCall {
    let mut arguments = Map::new();
    arguments.insert(ARGUMENT.to_owned(), Value::String(capability.to_string()));
    ToolCall::new(tool, arguments)
}

/// The schemas of `load_lora` and `offload_lora` in OpenAI's form; `adapters` are (alias, description), in registry order.
pub fn tool_schemas(adapters: &[(Capability, String)]) -> Vec<Value> {
    let aliases: Vec<&str> = adapters.iter().map(|(alias, _)| alias.as_str()).collect();
    let listed: Vec<String> = adapters.iter().map(|(alias, description)| format!("{alias}: {description}")).collect();
    let schema = |name: &str, description: String| {
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "enum": aliases, "description": "alias of the capability"}},
            "required": [ARGUMENT]}}})
    };
    vec![
        schema(LOAD, format!("{INTRODUCTION}{}", listed.join("; "))),
        schema(OFFLOAD, "Release the active adapter and hand control back to the base model.".to_owned()),
    ]
}

/// The description that a schema of `load_lora`, made by [`tool_schemas`], gives `alias`. Descriptions may hold any text: each
/// ends where the next alias of the schema's own list begins.
pub fn listed_description(load_schema: &Value, alias: &Capability) -> Option<String> {
    let function = &load_schema["function"];
    let aliases: Vec<&str> =
        function["parameters"]["properties"][ARGUMENT]["enum"].as_array()?.iter().filter_map(Value::as_str).collect();
    let (_, mut rest) = function["description"].as_str()?.split_once(INTRODUCTION)?;
    for (i, listed) in aliases.iter().enumerate() {
        rest = rest.strip_prefix(listed)?.strip_prefix(": ")?;
        let next = aliases.get(i + 1).map(|next| format!("; {next}: "));
        let end = next.map_or(Some(rest.len()), |next| rest.find(&next))?;
        if *listed == alias.as_str() {
            return Some(rest[..end].to_owned());
        }
        rest = rest.get(end + 2..).unwrap_or_default();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capability(name: &str) -> Capability {
        Capability::new(name).expect("a legal name")
    }

    /// Every state against every action, with the answer of Eq. 6 written out.
    #[test]
    fn transition_follows_equation_6_on_every_pair() {
        let (j, k) = (capability("plan"), capability("search"));
        let load = |c: &Capability| Action::Load(c.clone());
        let offload = |c: &Capability| Action::Offload(c.clone());
        let table = [
            (None, load(&j), Some(&j)),
            (None, offload(&j), None),
            (None, Action::Other, None),
            (Some(&j), load(&j), Some(&j)),
            (Some(&j), load(&k), Some(&j)),
            (Some(&j), offload(&j), None),
            (Some(&j), offload(&k), Some(&j)),
            (Some(&j), Action::Other, Some(&j)),
        ];
        for (z, action, expected) in table {
            assert_eq!(transition(z.cloned(), &action).as_ref(), expected, "z = {z:?}, a = {action:?}");
        }
    }

    #[test]
    fn a_listed_description_is_found_whatever_it_says() {
        let listing = [("plan", "plan: first; search: later"), ("re-plan", "again; and again"), ("write", "")];
        let listing = listing.map(|(alias, text)| (capability(alias), text.to_owned()));
        let schemas = tool_schemas(&listing);
        for (alias, text) in &listing {
            assert_eq!(listed_description(&schemas[0], alias).as_ref(), Some(text));
        }
        assert_eq!(listed_description(&schemas[0], &capability("code")), None);
    }

    #[test]
    fn only_a_strict_control_call_is_an_action() {
        let parse = |name: &str, arguments: Value| {
            let Value::Object(arguments) = arguments else { unreachable!("objects only") };
            action(&ToolCall::new(name, arguments))
        };
        assert_eq!(parse("load_lora", json!({"adapter": "plan"})), Ok(Action::Load(capability("plan"))));
        assert_eq!(parse("search", json!({"adapter": "plan"})), Ok(Action::Other));
        assert_eq!(parse("lod_lora", json!({"adapter": "plan"})), Ok(Action::Other));
        for bad in [
            json!({}),
            json!({"adapter": 1}),
            json!({"adapter": "Plan"}),
            json!({"name": "plan"}),
            json!({"adapter": "plan", "x": 1}),
        ] {
            assert!(parse("offload_lora", bad.clone()).is_err(), "{bad} was accepted");
        }
    }
}
