//! Every real conversation file imports whole: rows are kept, or dropped with a reason that is known.

use std::{collections::BTreeMap, env, path::PathBuf};

use weact_core::message::Role;
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
    ] {
        let imported = import(&root.join("data/bench").join(&path), format).unwrap_or_else(|e| panic!("{path}: {e}"));
        let reasons: BTreeMap<&str, usize> = imported.dropped.iter().fold(BTreeMap::new(), |mut reasons, row| {
            *reasons.entry(row.reason.as_str()).or_default() += 1;
            reasons
        });
        let messages = || imported.trajectories.iter().flat_map(|row| row.messages());
        let calls = messages().map(|m| m.tool_calls.len()).sum::<usize>();
        assert_eq!((imported.trajectories.len(), reasons, calls), (n_rows, BTreeMap::new(), n_calls), "{path}");
        let n_results = messages().filter(|m| m.role == Role::Tool).count();
        assert_eq!(n_results, calls, "{path}: every call has its result");
        assert!(messages().flat_map(|m| &m.tool_calls).all(|call| call.id.is_some()), "{path}");
    }
}
