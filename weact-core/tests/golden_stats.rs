//! Statistics against scipy's and against an exact law that was computed apart; the values come with their tolerance, 1e-10.

use std::{env, fs, path::PathBuf};

use serde_json::Value;
use weact_core::stats::{Outcome, Verdict, Z95, binomial_se, mcnemar, paired, wilson};

const TOLERANCE: f64 = 1e-10;

#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn golden(name: &str) -> Option<Value> {
    let Some(root) = env::var_os("WEACT_SHARED").map(PathBuf::from) else {
        println!("skipped: WEACT_SHARED is not set");
        return None;
    };
    let text = fs::read_to_string(root.join("golden").join(name)).expect("golden values");
    Some(serde_json::from_str(&text).expect("JSON"))
}

fn close(value: f64, expected: &Value, what: &str) {
    let expected = expected.as_f64().expect("a number");
    assert!((value - expected).abs() <= TOLERANCE, "{what}: {value}, expected {expected}");
}

fn count(value: &Value) -> u64 {
    value.as_u64().expect("a count")
}

#[test]
fn table_1_s_standard_errors_are_reproduced_to_the_printed_digit() {
    let Some(golden) = golden("eval/paper_binomial_se.json") else { return };
    for case in golden.as_array().expect("cases") {
        let n = count(&case["n"]);
        let accuracy = case["acc"].as_f64().expect("a share");
        let n_right = (accuracy / 100.0 * n as f64).round() as usize;
        let se = 100.0 * binomial_se(n_right, n as usize).expect("samples");
        assert_eq!(format!("{se:.2}"), format!("{:.2}", case["se"].as_f64().expect("a number")), "{case}");
    }
}

#[test]
fn wilson_s_intervals_equal_the_reference() {
    let Some(golden) = golden("grpo/wilson.json") else { return };
    close(Z95, &golden["data"]["z"], "z");
    for case in golden["data"]["cases"].as_array().expect("cases") {
        let (low, high) = wilson(count(&case["k"]) as usize, count(&case["n"]) as usize, Z95).expect("samples");
        close(low, &case["lo"], "low");
        close(high, &case["hi"], "high");
    }
}

#[test]
fn mcnemar_equals_the_reference() {
    let Some(golden) = golden("grpo/mcnemar.json") else { return };
    for case in golden["data"].as_array().expect("cases") {
        close(mcnemar(count(&case["b"]), count(&case["c"])), &case["p"], &case.to_string());
    }
}

#[test]
fn the_clustered_bootstrap_equals_the_exact_law() {
    let Some(golden) = golden("grpo/bootstrap.json") else { return };
    for case in golden["data"]["cases"].as_array().expect("cases") {
        let name = case["name"].as_str().expect("a name");
        let outcomes = |arm: &str| -> Vec<Outcome> {
            let tasks = case[arm].as_array().expect("tasks").iter().enumerate();
            let runs = |(t, runs): (usize, &Value)| {
                let runs = runs.as_array().expect("runs").iter().enumerate();
                runs.map(|(seed, s)| Outcome {
                    id: format!("task{t}"),
                    task: format!("task{t}"),
                    seed: seed as u64,
                    success: count(s) == 1,
                })
                .collect::<Vec<_>>()
            };
            tasks.flat_map(runs).collect()
        };
        let expect = &case["expect"];
        let (base, arm) = (outcomes("base"), outcomes("arm"));
        for (margin, equivalent) in expect["tost"].as_object().expect("margins") {
            let result = paired(&base, &arm, margin.parse().expect("a margin"), 0).expect("aligned");
            assert_eq!(result.equivalent, equivalent.as_bool().expect("a flag"), "{name} at {margin}");
            close(result.delta, &expect["delta"], name);
            for (value, key) in [
                (result.bootstrap95.0, "q025"),
                (result.bootstrap95.1, "q975"),
                (result.bootstrap90.0, "q05"),
                (result.bootstrap90.1, "q95"),
                (result.mcnemar_p, "mcnemar_p"),
            ] {
                close(value, &expect[key], &format!("{name}: {key}"));
            }
            assert_eq!((result.b, result.c), (count(&expect["mcnemar_b_base_only"]), count(&expect["mcnemar_c_arm_only"])));
            let verdict: Verdict = serde_json::from_value(expect["verdict"].clone()).expect("a verdict");
            assert_eq!(result.verdict, verdict, "{name}");
        }
    }
}
