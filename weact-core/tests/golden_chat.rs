//! Rendering and encoding against transformers 5.24 with the real Qwen3 tokenizer and template.
//!
//! The tokenizer (11 MB) is not kept in the repository: `WEACT_SHARED` names the folder with `data/qwen3-tokenizer`.
#![expect(clippy::print_stdout, reason = "a skipped test says so")]

use std::path::PathBuf;

use serde_json::Value;
use weact_core::{
    chat::{Chat, ToolProtocol},
    message::{Message, Role},
};

struct Case {
    name: String,
    messages: Vec<Value>,
    tools: Vec<Value>,
    open: bool,
    thinking: Option<bool>,
    text: String,
    ids: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/chat/qwen3.jsonl");
    let text = std::fs::read_to_string(path).expect("golden conversations");
    let case = |line: &str| {
        let v: Value = serde_json::from_str(line).expect("JSON");
        Case {
            name: v["name"].as_str().expect("a name").to_owned(),
            messages: v["messages"].as_array().expect("messages").clone(),
            tools: v["tools"].as_array().cloned().unwrap_or_default(),
            open: v["add_generation_prompt"].as_bool().expect("a flag"),
            thinking: v["enable_thinking"].as_bool(),
            text: v["text"].as_str().expect("text").to_owned(),
            ids: v["ids"].as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect(),
        }
    };
    text.lines().map(case).collect()
}

fn qwen3() -> Option<Chat> {
    let Some(shared) = std::env::var_os("WEACT_SHARED") else {
        println!("skipped: needs the Qwen3 tokenizer; set WEACT_SHARED to the folder with data/qwen3-tokenizer");
        return None;
    };
    let dir = PathBuf::from(shared).join("data/qwen3-tokenizer");
    Some(Chat::open(&dir, ToolProtocol::Template).expect("the real tokenizer and template"))
}

#[test]
fn text_and_ids_equal_transformers_byte_for_byte() {
    let Some(chat) = qwen3() else { return };
    for case in cases() {
        let (text, ids) = chat.render_official(&case.messages, &case.tools, case.open, case.thinking, false).expect(&case.name);
        assert_eq!(text, case.text, "{}", case.name);
        assert_eq!(ids, case.ids, "{}", case.name);
    }
}

#[test]
fn untrusted_text_makes_no_control_token_and_loses_no_character() {
    let Some(chat) = qwen3() else { return };
    for case in cases() {
        let (text, ids) = chat.render_official(&case.messages, &case.tools, case.open, case.thinking, true).expect(&case.name);
        assert_eq!(text, case.text, "{}", case.name);
        if case.name != "special-tokens-in-observation" {
            assert_eq!(ids, case.ids, "{}", case.name);
            continue;
        }
        assert_eq!(chat.tokenizer.decode(&ids).expect("decodable"), case.text);
        let count = |ids: &[u32], token: &str| ids.iter().filter(|id| **id == chat.tokenizer.id(token).expect(token)).count();
        for (token, in_observation) in [("<|im_end|>", 1), ("<|im_start|>", 1), ("<tool_call>", 1), ("</tool_call>", 1)] {
            assert_eq!(count(&ids, token), count(&case.ids, token) - in_observation, "{token}");
        }
    }
}

#[test]
fn a_prompt_is_a_prefix_of_every_longer_conversation() {
    let Some(chat) = qwen3() else { return };
    for case in cases() {
        let Ok(messages) = serde_json::from_value::<Vec<Message>>(Value::Array(case.messages)) else { panic!("{}", case.name) };
        let whole: Vec<u32> = chat
            .pieces(&messages, &case.tools, false)
            .expect(&case.name)
            .iter()
            .flat_map(|piece| chat.encode(piece).expect("encodable"))
            .collect();
        for turn in (0..messages.len()).filter(|i| messages[*i].role == Role::Assistant) {
            let prompt = chat.prompt(&messages[..turn], &case.tools).expect("a prompt");
            assert!(whole.starts_with(&prompt), "{}: turn {turn}", case.name);
        }
    }
}
