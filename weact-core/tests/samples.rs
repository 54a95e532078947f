//! Samples: which tokens are supervised, what a history keeps, and that a run's prompt is a prefix of its training sample.

mod common;

use common::{capability, chat, exchange, load_exchange, offload_exchange, span, traj, twenty_messages};
use serde_json::json;
use weact_core::{
    Trajectory,
    chat::Chat,
    context::{self, Retention},
    message::{Message, Role},
    sample::{Reason, Rules, Sample, Samples, samples},
    stage::OMITTED,
    trajectory::Exit,
};

const RULES: Rules =
    Rules { retention: Retention { keep_tool_result: 5, clip_tool_result: None }, max_length: 100_000, require_exit: true };

fn cut(chat: &Chat, trajectory: &Trajectory, alias: &str, rules: Rules) -> Samples {
    samples(chat, std::slice::from_ref(trajectory), &capability(alias), rules).expect("it renders")
}

fn only(samples: Samples) -> Sample {
    let [sample] = <[Sample; 1]>::try_from(samples.kept).expect("one sample");
    sample
}

/// The text of a sample with its supervised parts in `[[ ]]`.
fn drawn(chat: &Chat, sample: &Sample) -> String {
    assert_eq!(sample.ids.len(), sample.mask.len());
    let mut text = String::new();
    let mut from = 0;
    for run in sample.mask.chunk_by(|a, b| a == b) {
        let part = chat.tokenizer.decode(&sample.ids[from..from + run.len()]).expect("it decodes");
        text.push_str(&if run[0] { format!("[[{part}]]") } else { part });
        from += run.len();
    }
    text
}

/// The sample of `alias`'s one stage, drawn, is `expected`.
fn check(trajectory: &Trajectory, alias: &str, rules: Rules, expected: &str) {
    let chat = chat();
    assert_eq!(drawn(&chat, &only(cut(&chat, trajectory, alias, rules))), expected);
}

fn n_results(messages: &[Message]) -> usize {
    messages.iter().filter(|m| m.role == Role::Tool).count()
}

/// Appendix A.1: eight messages of context with three tool results, all kept; twelve of the stage, of which the last result
/// answers the exit call and comes after the sample's end.
#[test]
fn the_papers_twenty_messages_supervise_the_search_stage_and_its_exit() {
    let trajectory = twenty_messages(0);
    assert_eq!((trajectory.messages().len(), trajectory.spans()[1].start), (20, 8));
    assert_eq!(n_results(&trajectory.messages()[..8]), 3);
    let expected = r#"<|im_start|>system
research<|im_end|>
<|im_start|>user
who?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "load_lora", "arguments": {"adapter": "plan"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
plan on
</tool_response><|im_end|>
<|im_start|>assistant
1. look
<tool_call>
{"name": "offload_lora", "arguments": {"adapter": "plan"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
adapter 'plan' released
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "load_lora", "arguments": {"adapter": "search"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
search on
</tool_response><|im_end|>
<|im_start|>assistant
[[<tool_call>
{"name": "search", "arguments": {"query": "q1"}}
</tool_call><|im_end|>]]
<|im_start|>user
<tool_response>
hit 1
</tool_response><|im_end|>
<|im_start|>assistant
[[<tool_call>
{"name": "search", "arguments": {"query": "q2"}}
</tool_call><|im_end|>]]
<|im_start|>user
<tool_response>
hit 2
</tool_response><|im_end|>
<|im_start|>assistant
[[<tool_call>
{"name": "search", "arguments": {"query": "q3"}}
</tool_call><|im_end|>]]
<|im_start|>user
<tool_response>
hit 3
</tool_response><|im_end|>
<|im_start|>assistant
[[<tool_call>
{"name": "search", "arguments": {"query": "q4"}}
</tool_call><|im_end|>]]
<|im_start|>user
<tool_response>
hit 4
</tool_response><|im_end|>
<|im_start|>assistant
[[<tool_call>
{"name": "search", "arguments": {"query": "q5"}}
</tool_call><|im_end|>]]
<|im_start|>user
<tool_response>
hit 5
</tool_response><|im_end|>
<|im_start|>assistant
[[found
<tool_call>
{"name": "offload_lora", "arguments": {"adapter": "search"}}
</tool_call><|im_end|>]]"#;
    check(&trajectory, "search", RULES, expected);
}

#[test]
fn a_plan_that_is_one_turn_is_supervised_whole() {
    let expected = r#"<|im_start|>system
research<|im_end|>
<|im_start|>user
who?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "load_lora", "arguments": {"adapter": "plan"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
plan on
</tool_response><|im_end|>
<|im_start|>assistant
[[1. look
<tool_call>
{"name": "offload_lora", "arguments": {"adapter": "plan"}}
</tool_call><|im_end|>]]"#;
    check(&twenty_messages(0), "plan", RULES, expected);
}

#[test]
fn each_supervised_turn_ends_with_the_end_of_turn_token() {
    let chat = chat();
    for (trajectory, alias, n_turns) in
        [(traj(), "search", 2), (twenty_messages(0), "search", 6), (twenty_messages(2), "plan", 3)]
    {
        let sample = only(cut(&chat, &trajectory, alias, RULES));
        let ends: Vec<usize> =
            (0..sample.ids.len()).filter(|i| sample.mask[*i] && !sample.mask.get(i + 1).is_some_and(|m| *m)).collect();
        assert_eq!(ends.len(), n_turns);
        assert!(ends.iter().all(|i| sample.ids[*i] == chat.end_of_turn()));
        let supervised_ends = sample.ids.iter().zip(&sample.mask).filter(|(id, m)| **m && **id == chat.end_of_turn()).count();
        assert_eq!(supervised_ends, n_turns);
        assert_eq!(sample.n_supervised(), sample.mask.iter().filter(|m| **m).count());
    }
}

/// For each turn that a sample trains, what a run would feed the model before it, by the same view of the history, is the start of
/// the sample, and supervision begins right there.
#[test]
fn a_runs_prompt_is_a_prefix_of_the_sample_that_trains_its_turn() {
    let chat = chat();
    let retentions = [(5, None), (1, None), (0, Some(4)), (2, Some(3)), (100, Some(1))];
    for trajectory in [traj(), twenty_messages(0), twenty_messages(3)] {
        for (keep_tool_result, clip_tool_result) in retentions {
            let retention = Retention { keep_tool_result, clip_tool_result };
            for span in trajectory.spans() {
                let sample = only(cut(&chat, &trajectory, span.capability.as_str(), Rules { retention, ..RULES }));
                let messages = trajectory.messages();
                for turn in (span.start..span.end).filter(|i| messages[*i].role == Role::Assistant) {
                    let (view, _) = context::view(&messages[..turn], span.start, retention, &chat.tokenizer).expect("it encodes");
                    let prompt = chat.prompt(&view, &trajectory.tools).expect("it renders");
                    assert!(sample.ids.starts_with(&prompt), "{} turn {turn} under {retention:?}", trajectory.id);
                    assert_eq!(sample.mask[prompt.len() - 1..=prompt.len()], [false, true]);
                }
            }
        }
    }
}

#[test]
fn the_history_keeps_its_last_results_and_the_stage_keeps_all_of_its_own() {
    let chat = chat();
    let results = |n_plan_calls: usize| {
        let trajectory = twenty_messages(n_plan_calls);
        let sample = only(cut(&chat, &trajectory, "search", RULES));
        let text = chat.tokenizer.decode(&sample.ids).expect("it decodes");
        let kept = ["plan on", "page 0", "page 1", "page 2", "page 3", "released", "search on", "hit 1", "hit 5"]
            .map(|result| usize::from(text.contains(&format!("{result}\n</tool_response>"))));
        (kept, sample.left_out.omitted, text.matches(OMITTED).count())
    };
    assert_eq!(results(0), ([1, 0, 0, 0, 0, 1, 1, 1, 1], 0, 0));
    assert_eq!(results(4), ([0, 0, 1, 1, 1, 1, 1, 1, 1], 2, 2));
}

#[test]
fn a_long_result_loses_its_middle_in_history_and_stage() {
    let chat = chat();
    let long = format!("HEAD{}TAIL", "🙂".repeat(200));
    let mut messages = vec![Message::text(Role::System, "S"), Message::text(Role::User, long.clone())];
    messages.extend(exchange("", common::call("search", json!({})), &long));
    messages.extend(load_exchange("search"));
    messages.extend(exchange("", common::call("search", json!({"query": long.clone()})), &long));
    messages.extend(offload_exchange(&long, "search"));
    let trajectory = Trajectory::new("long".to_owned(), Vec::new(), messages, vec![span("search", 6, 10)]).expect("a trajectory");
    let rules = Rules { retention: Retention { clip_tool_result: Some(20), ..Retention::default() }, ..RULES };
    let sample = only(cut(&chat, &trajectory, "search", rules));
    let text = chat.tokenizer.decode(&sample.ids).expect("it decodes");
    assert_eq!(sample.left_out.clipped, 2);
    let n_gone = chat.tokenizer.encode(&long).expect("it encodes").len() - 20;
    assert_eq!(text.matches(&format!("🙂\n[{n_gone} tokens left out]\n🙂")).count(), 2);
    assert_eq!(text.matches("<tool_response>\nHEAD").count(), 2);
    assert_eq!(text.matches("TAIL\n</tool_response>").count(), 2);
    // What people and the policy wrote stays whole.
    assert_eq!(text.matches(&long).count(), 3);
    assert!(!text.contains('\u{fffd}'));
}

#[test]
fn the_oldest_exchanges_go_first_and_targets_are_never_cut() {
    let chat = chat();
    let trajectory = twenty_messages(3);
    let full = only(cut(&chat, &trajectory, "search", RULES));
    let targets =
        |sample: &Sample| sample.ids.iter().zip(&sample.mask).filter(|(_, m)| **m).map(|(id, _)| *id).collect::<Vec<_>>();
    let exchanges = [
        "\"adapter\": \"plan\"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nTool result",
        "draft 0",
        "draft 1",
        "draft 2",
        "1. look",
    ];
    let mut lengths = vec![full.ids.len()];
    for n_dropped in 1..=exchanges.len() {
        let rules = Rules { max_length: lengths[n_dropped - 1] - 1, ..RULES };
        let sample = only(cut(&chat, &trajectory, "search", rules));
        let text = chat.tokenizer.decode(&sample.ids).expect("it decodes");
        assert_eq!(sample.dropped_exchanges, n_dropped);
        assert_eq!(exchanges.map(|e| text.contains(e)), std::array::from_fn(|i| i >= n_dropped), "{text}");
        let opening = "<|im_start|>system\nresearch<|im_end|>\n<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n";
        assert!(text.starts_with(opening) && text.contains("search on"), "{text}");
        assert_eq!(targets(&sample), targets(&full));
        lengths.push(sample.ids.len());
    }
    let needed = *lengths.last().expect("lengths");
    let limit = needed - 1;
    let none = cut(&chat, &trajectory, "search", Rules { max_length: limit, ..RULES });
    assert!(none.kept.is_empty());
    assert_eq!(none.dropped, [("a1#1".to_owned(), Reason::TooLong { needed, limit })]);
    assert_eq!(none.dropped[0].1.to_string(), format!("needs {needed} tokens, max_length is {limit}"));
}

#[test]
fn what_gives_no_sample_is_listed_with_its_id_and_reason() {
    let chat = chat();
    let ended_by_harness = {
        let mut spans = twenty_messages(0).spans().to_vec();
        spans[1].exit = Exit::Harness;
        Trajectory::new("cut".to_owned(), Vec::new(), twenty_messages(0).messages().to_vec(), spans).expect("a trajectory")
    };
    let rows = [twenty_messages(0), ended_by_harness, traj()];
    let found = samples(&chat, &rows, &capability("search"), RULES).expect("they render");
    assert_eq!(found.kept.iter().map(|s| s.id.as_str()).collect::<Vec<_>>(), ["a1#1", "traj#0"]);
    assert_eq!(found.dropped, [("cut#1".to_owned(), Reason::NoExitCall)]);
    let all = samples(&chat, &rows, &capability("search"), Rules { require_exit: false, ..RULES }).expect("they render");
    assert_eq!(all.kept.len(), 3);
    let found = samples(&chat, &rows, &capability("plan"), Rules { max_length: 10, ..RULES }).expect("they render");
    assert!(found.kept.is_empty());
    let counts: Vec<(String, usize)> = found.dropped_by_reason().into_iter().collect();
    assert_eq!(counts, [("longer than 10 tokens".to_owned(), 2), ("no stage of this capability".to_owned(), 1)]);
    let found = samples(&chat, &rows, &capability("write"), RULES).expect("they render");
    assert_eq!(found.dropped.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["a1", "cut", "traj"]);
    assert!(found.dropped.iter().all(|(_, reason)| *reason == Reason::NoStage));
}

/// A supervised token is one that something predicts: the first token of a text is none.
#[test]
fn the_first_token_is_no_target() {
    let sample = Sample {
        id: "s".to_owned(),
        capability: capability("plan"),
        ids: vec![1, 2, 3],
        mask: vec![true, false, true],
        left_out: context::LeftOut::default(),
        dropped_exchanges: 0,
    };
    assert_eq!(sample.n_supervised(), 1);
}
