//! Every real conversation file imports whole: rows are kept, or dropped with a reason that is known.

use std::{collections::BTreeMap, env, fs, path::PathBuf};

use serde_json::Value;
use weact_core::{Trajectory, message::Role};
use weact_train::data::{Format, import};

#[test]
#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn real_files_import_whole() {
    let Some(root) = env::var_os("WEACT_SHARED").map(PathBuf::from) else {
        println!("skipped: WEACT_SHARED is not set");
        return;
    };
    let swe = [
        "0_replay__marshmallow-code__marshmallow-18_marshmallow-code__marshmallow-1867.traj",
        "1_gpt4__swe-agent-test-repo__default_from__6e44b9__sweagenttestrepo-1c2844.traj",
    ];
    for (path, format, n_rows, n_calls) in [
        ("traj_webdancer/sample_traj.jsonl".to_owned(), Format::Hermes, 14, 17),
        ("traj_taubench/gpt-4o-airline.json".to_owned(), Format::OpenAi, 11, 83),
        ("traj_sharegpt_toolcall/glaive_toolcall_en_demo.json".to_owned(), Format::ShareGpt, 25, 24),
        ("traj_sharegpt_toolcall/glaive_toolcall_zh_demo.json".to_owned(), Format::ShareGpt, 15, 11),
        (format!("traj_sweagent/{}", swe[0]), Format::SweAgent, 1, 11),
        (format!("traj_sweagent/{}", swe[1]), Format::SweAgent, 1, 4),
        ("../../golden/searchatlas/synthetic_trace.json".to_owned(), Format::Hermes, 1, 1),
    ] {
        let raw = fs::read_to_string(root.join("data/bench").join(&path)).expect("readable");
        let imported = import(&root.join("data/bench").join(&path), format).unwrap_or_else(|e| panic!("{path}: {e}"));
        let reasons: BTreeMap<&str, usize> = imported.dropped.iter().fold(BTreeMap::new(), |mut reasons, row| {
            *reasons.entry(row.reason.as_str()).or_default() += 1;
            reasons
        });
        let messages = || imported.trajectories.iter().flat_map(|row| row.messages());
        let calls = messages().map(|m| m.tool_calls.len()).sum::<usize>();
        assert_eq!((imported.trajectories.len(), reasons, calls), (n_rows, BTreeMap::new(), n_calls), "{path}");
        in_order(&raw, &imported.trajectories);
        let n_results = messages().filter(|m| m.role == Role::Tool).count();
        assert_eq!(n_results, calls, "{path}: every call has its result");
        assert!(messages().flat_map(|m| &m.tool_calls).all(|call| call.id.is_some()), "{path}");
    }
}

/// Every text of the trajectories stands in the raw file, one after another.
fn in_order(raw: &str, trajectories: &[Trajectory]) {
    let raw = serde_json::from_str::<Value>(raw).map(|value| vec![value]).unwrap_or_else(|_| {
        raw.split('\n').filter(|line| !line.trim().is_empty()).map(|line| serde_json::from_str(line).expect("JSON")).collect()
    });
    let mut texts = String::new();
    raw.iter().for_each(|value| collect(value, &mut texts));
    let mut at = 0;
    for message in trajectories.iter().flat_map(|row| row.messages()) {
        for text in message.reasoning_content.iter().chain([&message.content]).filter(|text| !text.trim().is_empty()) {
            let found = texts[at..].find(text.trim()).unwrap_or_else(|| panic!("not there, or out of order: {text:.80}"));
            at += found + text.trim().len();
        }
    }
}

/// The texts of messages, in the order of the file.
fn collect(value: &Value, into: &mut String) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, into)),
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(text) if ["content", "value", "system"].contains(&key.as_str()) => {
                        into.push_str(text);
                        into.push('\n');
                    }
                    other if ["messages", "traj", "conversations", "history"].contains(&key.as_str()) => collect(other, into),
                    _ => {}
                }
            }
        }
        _ => {}
    }
}
