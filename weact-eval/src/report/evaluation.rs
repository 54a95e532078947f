//! The report of an evaluation: from records, and nothing else.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Bar, Cell, Drawing, Figure, Group, Point, Report, Series, Table,
    paper::{printed, printed_table1},
};
use crate::{
    Result,
    record::{Record, State},
    score::{Score, average, compare, quantile, scores},
};

/// Differences up to this many points count as none in comparisons.
const MARGIN: f64 = 0.05;

/// Tables and figures of `records`: Table 1, states, retries, costs, paired comparisons; accuracies with their errors, distributions of time and its
/// parts. The paper's Tables 1 and 6 stand beside their own.
///
/// # Errors
/// If an attempt stands twice.
pub fn evaluation(title: &str, records: &[Record], provenance: Vec<(String, String)>) -> Result<Report> {
    let scores = scores(records)?;
    let mut provenance = provenance;
    let graders: BTreeSet<&str> = records.iter().map(|record| record.grader.as_str()).collect();
    provenance.push(("graders".to_owned(), graders.into_iter().collect::<Vec<_>>().join(", ")));
    provenance.push(("records".to_owned(), records.len().to_string()));
    let mut tables = vec![table1(&scores)];
    tables.extend(further_scores(&scores));
    tables.extend([paired(records, &scores)?, states(&scores), table6(&scores), costs(&scores), printed_table1()]);
    tables.extend(printed("paper-table6"));
    let notes = vec![
        "Accuracy is the share of right answers among all tasks of a benchmark; errors and answers that could not be judged count as not right. \
         ± is the binomial standard error, sqrt(p (1 - p) / n). The average weighs every benchmark the same."
            .to_owned(),
    ];
    Ok(Report { title: title.to_owned(), notes, provenance, tables, figures: figures(&scores) })
}

fn methods(scores: &[Score]) -> Vec<&str> {
    in_order(scores.iter().map(|score| score.method.as_str()))
}

fn benchmarks(scores: &[Score]) -> Vec<&str> {
    in_order(scores.iter().map(|score| score.benchmark.as_str()))
}

/// Each once, in the order in which they first occur.
fn in_order<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = BTreeSet::new();
    names.filter(|name| seen.insert(*name)).collect()
}

fn find<'a>(scores: &'a [Score], method: &str, benchmark: &str) -> Option<&'a Score> {
    scores.iter().find(|score| score.method == method && score.benchmark == benchmark)
}

/// Methods in rows, benchmarks in columns: accuracy in percent with its standard error, and the average.
pub fn table1(scores: &[Score]) -> Table {
    let benchmarks = benchmarks(scores);
    let row = |method: &&str| {
        let mut cells = vec![Cell::of(*method)];
        cells.extend(benchmarks.iter().map(|benchmark| {
            find(scores, method, benchmark).map_or_else(Cell::unknown, |score| Cell::percent(score.accuracy, score.se))
        }));
        let average = average(scores, method, &benchmarks);
        cells.push(Cell::percent(average.map(|mean| mean.mean), average.map(|mean| mean.se)));
        cells
    };
    let mut header = vec!["Method".to_owned()];
    header.extend(benchmarks.iter().map(|name| (*name).to_owned()));
    header.push("Avg.".to_owned());
    let n: Vec<String> = benchmarks
        .iter()
        .map(|benchmark| {
            let sizes: BTreeSet<usize> = scores.iter().filter(|s| s.benchmark == *benchmark).map(|s| s.n).collect();
            format!("{benchmark} {}", sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("/"))
        })
        .collect();
    Table {
        name: "table1".to_owned(),
        title: "Accuracy (%)".to_owned(),
        caption: format!("Tasks: {}. Best of a column bold, second underlined.", n.join(", ")),
        header,
        rows: methods(scores).iter().map(row).collect(),
    }
    .ranked()
}

/// One table for each further score that some method has on every benchmark.
fn further_scores(scores: &[Score]) -> Vec<Table> {
    let names: BTreeSet<&String> = scores.iter().flat_map(|score| score.scores.keys()).collect();
    let benchmarks = benchmarks(scores);
    let table = |name: &String| {
        let row = |method: &&str| {
            let values: Vec<Option<f64>> =
                benchmarks.iter().map(|b| find(scores, method, b).and_then(|score| score.scores.get(name).copied())).collect();
            let mean = values.iter().copied().collect::<Option<Vec<f64>>>().map(|v| v.iter().sum::<f64>() / v.len() as f64);
            let cells = values.iter().chain([&mean]).map(|x| Cell::number(x.map(|x| 100.0 * x), 1));
            std::iter::once(Cell::of(*method)).chain(cells).collect()
        };
        let mut header = vec!["Method".to_owned()];
        header.extend(benchmarks.iter().map(|name| (*name).to_owned()));
        header.push("Avg.".to_owned());
        Table {
            name: format!("score-{}", file_stem(name)),
            title: format!("Mean score: {name} (%)"),
            caption: String::new(),
            header,
            rows: methods(scores).iter().map(row).collect(),
        }
    };
    names.into_iter().map(table).collect()
}

/// `name` as part of a file's name; two names never give the same.
fn file_stem(name: &str) -> String {
    let keep = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    name.bytes().map(|byte| if keep(byte) { char::from(byte).to_string() } else { format!("%{byte:02x}") }).collect()
}

/// Every method against every one before it, on the tasks that both have.
fn paired(records: &[Record], scores: &[Score]) -> Result<Table> {
    let methods = methods(scores);
    let mut rows = Vec::new();
    for (i, b) in methods.iter().enumerate() {
        for a in &methods[..i] {
            let Ok(result) = compare(records, a, b, MARGIN) else { continue };
            let points = |x: f64| format!("{:+.1}", 100.0 * x);
            let verdict = serde_json::to_value(result.verdict).expect("a name");
            rows.push(vec![
                Cell::of(format!("{b} - {a}")),
                Cell::of(result.n.to_string()),
                Cell::of(points(result.delta)),
                Cell::of(format!("[{}, {}]", points(result.bootstrap95.0), points(result.bootstrap95.1))),
                Cell::of(format!("{}/{}", result.b, result.c)),
                Cell::of(if result.mcnemar_p < 1e-4 { "<0.0001".to_owned() } else { format!("{:.4}", result.mcnemar_p) }),
                Cell::of(verdict.as_str().unwrap_or_default().replace('_', " ")),
                Cell::of(if result.equivalent { "yes" } else { "no" }),
            ]);
        }
    }
    let header = ["B - A", "tasks", "Δ points", "95 % bootstrap", "only A/only B", "McNemar p", "B is", "equivalent ±5"];
    Ok(Table {
        name: "paired".to_owned(),
        title: "Methods compared on the same tasks".to_owned(),
        caption:
            "The interval resamples tasks; McNemar's test is exact and two-sided; equivalence is two one-sided tests at 5 points."
                .to_owned(),
        header: header.map(str::to_owned).into(),
        rows,
    })
}

fn states(scores: &[Score]) -> Table {
    let row = |score: &Score| {
        let mut cells = vec![Cell::of(&score.method), Cell::of(&score.benchmark), Cell::of(score.n.to_string())];
        cells.extend(State::ALL.iter().map(|state| Cell::of(score.states.get(state).copied().unwrap_or(0).to_string())));
        cells.push(Cell::number(score.accuracy.map(|x| 100.0 * x), 1));
        cells.push(Cell::number(score.accuracy_graded.map(|x| 100.0 * x), 1));
        cells.push(interval(score));
        cells
    };
    let mut header = vec!["Method".to_owned(), "Benchmark".to_owned(), "tasks".to_owned()];
    header.extend(State::ALL.iter().map(|state| state.name().replace('_', " ")));
    header.extend(["of all (%)", "of graded (%)", "95 % Wilson"].map(str::to_owned));
    Table {
        name: "states".to_owned(),
        title: "What became of the tasks".to_owned(),
        caption: "By each task's last attempt.".to_owned(),
        header,
        rows: scores.iter().map(row).collect(),
    }
}

fn interval(score: &Score) -> Cell {
    score.wilson.map_or_else(Cell::unknown, |(low, high)| Cell::of(format!("[{:.1}, {:.1}]", 100.0 * low, 100.0 * high)))
}

/// Table 6: the share of tasks with retries, in percent, and accuracies before and after them.
pub fn table6(scores: &[Score]) -> Table {
    let row = |score: &Score| {
        let percent = |x: Option<f64>| Cell::number(x.map(|x| 100.0 * x), 2);
        vec![
            Cell::of(&score.method),
            Cell::of(&score.benchmark),
            Cell::of(score.n.to_string()),
            percent(score.retry_share),
            percent(score.first_accuracy),
            percent(score.accuracy),
        ]
    };
    let header = ["Method", "Benchmark", "N", "retried (%)", "first accuracy (%)", "final accuracy (%)"];
    Table {
        name: "table6".to_owned(),
        title: "Tasks with retries".to_owned(),
        caption: "The denominator is the number of tasks.".to_owned(),
        header: header.map(str::to_owned).into(),
        rows: scores.iter().map(row).collect(),
    }
}

fn costs(scores: &[Score]) -> Table {
    let row = |score: &Score| {
        let mean = (!score.wall_s.is_empty()).then(|| score.wall_s.iter().sum::<f64>() / score.wall_s.len() as f64);
        let per_task = |n: usize| Cell::number((score.n > 0).then(|| n as f64 / score.n as f64), 1);
        vec![
            Cell::of(&score.method),
            Cell::of(&score.benchmark),
            Cell::number(mean, 3),
            Cell::number(quantile(&score.wall_s, 0.5), 3),
            Cell::number(quantile(&score.wall_s, 0.99), 3),
            per_task(score.prefilled),
            per_task(score.recomputed),
            per_task(score.sampled),
        ]
    };
    let header = ["Method", "Benchmark", "mean s", "median s", "p99 s", "prefilled", "recomputed", "sampled"];
    Table {
        name: "costs".to_owned(),
        title: "Cost of a task, retries included".to_owned(),
        caption: "Seconds of the whole run without grading; tokens per task.".to_owned(),
        header: header.map(str::to_owned).into(),
        rows: scores.iter().map(row).collect(),
    }
}

fn figures(scores: &[Score]) -> Vec<Figure> {
    let (methods, benchmarks) = (methods(scores), benchmarks(scores));
    let bar = |score: Option<&Score>| Bar {
        value: score.and_then(|score| score.accuracy).map(|x| 100.0 * x),
        error: score.and_then(|score| score.se).map(|x| 100.0 * x),
    };
    let group = |benchmark: &&str| Group {
        name: (*benchmark).to_owned(),
        bars: methods.iter().map(|method| bar(find(scores, method, benchmark))).collect(),
    };
    let names: Vec<String> = methods.iter().map(|name| (*name).to_owned()).collect();
    let accuracy = Figure {
        name: "accuracy".to_owned(),
        title: "Accuracy by benchmark".to_owned(),
        caption: "Whiskers are one binomial standard error.".to_owned(),
        x_label: String::new(),
        y_label: "accuracy (%)".to_owned(),
        drawing: Drawing::Bars { series: names.clone(), groups: benchmarks.iter().map(group).collect() },
    };
    let own = |method: &&str| scores.iter().filter(|score| score.method == **method).collect::<Vec<_>>();
    let times = |method: &&str| {
        let mut values: Vec<f64> =
            own(method).iter().flat_map(|score| score.wall_s.iter().copied()).filter(|s| *s > 0.0).collect();
        values.sort_by(f64::total_cmp);
        ((*method).to_owned(), values)
    };
    let wall = Figure {
        name: "wall-time".to_owned(),
        title: "Time of a task".to_owned(),
        caption: match scores.iter().flat_map(|score| &score.wall_s).filter(|s| **s <= 0.0).count() {
            0 => "Share of tasks that took no longer, retries included.".to_owned(),
            n => format!("Share of tasks that took no longer, retries included; {n} without a time above zero are left out."),
        },
        x_label: "seconds".to_owned(),
        y_label: "share of tasks".to_owned(),
        drawing: Drawing::Ecdf { series: methods.iter().map(times).filter(|(_, values)| !values.is_empty()).collect() },
    };
    let trade = |method: &&str| {
        let points = own(method).into_iter().filter_map(|score| {
            let mean = score.wall_s.iter().sum::<f64>() / score.wall_s.len() as f64;
            let y = 100.0 * score.accuracy?;
            mean.is_finite().then(|| Point { x: mean, y, name: score.benchmark.clone() })
        });
        Series { name: (*method).to_owned(), points: points.collect() }
    };
    let quality = Figure {
        name: "accuracy-time".to_owned(),
        title: "Accuracy and time".to_owned(),
        caption: "One point for each benchmark; time is the mean of a task, retries included.".to_owned(),
        x_label: "seconds".to_owned(),
        y_label: "accuracy (%)".to_owned(),
        drawing: Drawing::Scatter { series: methods.iter().map(trade).collect() },
    };
    vec![accuracy, quality, wall, parts(scores, &methods)]
}

/// Mean seconds of a task by category.
fn parts(scores: &[Score], methods: &[&str]) -> Figure {
    let categories: BTreeSet<&String> = scores.iter().flat_map(|score| score.seconds.keys()).collect();
    let group = |method: &&str| {
        let own: Vec<&Score> = scores.iter().filter(|score| score.method == **method).collect();
        let n: usize = own.iter().map(|score| score.n).sum();
        let mut sums: BTreeMap<&String, f64> = BTreeMap::new();
        for (category, s) in own.iter().flat_map(|score| &score.seconds) {
            *sums.entry(category).or_default() += s;
        }
        let bar =
            |category: &&String| Bar { value: Some(sums.get(*category).copied().unwrap_or(0.0) / n.max(1) as f64), error: None };
        Group { name: (*method).to_owned(), bars: categories.iter().map(bar).collect() }
    };
    Figure {
        name: "time-parts".to_owned(),
        title: "Where the time of a task goes".to_owned(),
        caption: "Mean seconds of a task, retries included; model time by the weights that were active.".to_owned(),
        x_label: String::new(),
        y_label: "seconds".to_owned(),
        drawing: Drawing::Stacked {
            series: categories.iter().map(|name| (*name).clone()).collect(),
            groups: methods.iter().map(group).collect(),
        },
    }
}
