//! What decides an answer and its grade, and the digest of it that every record has.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use weact_core::io::tensors::hex;

use super::Bench;
use crate::task::Task;

/// What a method is, for its run directory: what its identity says on every benchmark, and a digest of its tools on each.
pub(super) fn method_parts(identity: &dyn Fn(&str) -> Map<String, Value>, benches: &[Bench]) -> Map<String, Value> {
    let mut parts = Map::new();
    for bench in benches {
        for (key, value) in identity(&bench.name) {
            match key.as_str() {
                "tools" => parts.insert(tools_key(&bench.name), hex(&Sha256::digest(value.to_string())[..8]).into()),
                _ => parts.insert(key, value),
            };
        }
    }
    parts
}

/// What a benchmark's grades depend on.
pub(super) fn bench_parts(bench: &Bench) -> Map<String, Value> {
    let parts = json!({"benchmark": bench.benchmark, "grader": bench.grader.id()});
    parts.as_object().cloned().expect("an object")
}

/// SHA-256 over all that decides the answer to `task` of `benchmark`, and its grade, for a method of these parts.
pub(super) fn digest(parts: &Map<String, Value>, benchmark: &str, grader: &str, task: &Task, seed: u64) -> String {
    let tools = tools_key(benchmark);
    let method: BTreeMap<&String, &Value> =
        parts.iter().filter(|(key, _)| !key.starts_with(TOOLS_ON) || **key == tools).collect();
    let all =
        json!({"method": method, "question": task.question, "task": task.id, "gold": task.gold, "seed": seed, "grader": grader});
    hex(&Sha256::digest(all.to_string()))
}

/// Seed of an attempt: it follows from the run's seed, the task and the attempt's number, whatever was asked before.
pub(super) fn attempt_seed(seed: u64, task: &str, attempt: usize) -> u64 {
    let hash =
        Sha256::new().chain_update(seed.to_le_bytes()).chain_update((attempt as u64).to_le_bytes()).chain_update(task).finalize();
    u64::from_le_bytes(hash[..8].try_into().expect("a hash has 32 bytes"))
}

const TOOLS_ON: &str = "tools on ";

fn tools_key(benchmark: &str) -> String {
    format!("{TOOLS_ON}{benchmark}")
}
