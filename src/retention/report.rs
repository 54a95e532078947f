//! Table 7 and Figure 3 from a study's records.

use weact_core::stats::Estimate;
use weact_diagnostics::retention::{Measurement, Retained, Retention, Set, Tokens, retention};
use weact_eval::report::{Bar, Cell, Drawing, Figure, Group, Point, Report, Series, Table};
use weact_train::Result;

use super::{Arm, Study, of_diagnostics, run::in_words};

/// The folder of the report in a study's directory.
pub(super) const DIRECTORY: &str = "report";

/// The report of a study, and the numbers that it shows: every arm on each set over each kind of tokens. The first four are those of Table 7: the
/// arms in order, on the validation set, over content tokens.
///
/// # Errors
/// If the records do not say all that the table needs.
pub fn report(study: &Study, records: &[Measurement]) -> Result<(Report, Vec<Retention>)> {
    let sets = if study.monitor > 0 { vec![Set::Valid, Set::Monitor] } else { vec![Set::Valid] };
    let mut all = Vec::new();
    for tokens in [Tokens::Content, Tokens::ContentWithoutThinking, Tokens::Supervised] {
        for set in &sets {
            for arm in Arm::ALL {
                all.push(retention(records, arm.name(), *set, tokens, study.seed).map_err(of_diagnostics)?);
            }
        }
    }
    let tables = all.chunks(Arm::ALL.len()).map(table7).collect::<Vec<_>>();
    let first = &all[..Arm::ALL.len()];
    let report = Report {
        title: "Retention under sequential training".to_owned(),
        notes: vec![
            "Accuracy is teacher-forced top-1. Losses are averaged over all orders; a capability that comes last loses nothing in that \
             order. Brackets are 95 % intervals over trajectories. One seed."
                .to_owned(),
        ],
        provenance: vec![
            ("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("configuration".to_owned(), study.to_toml().split_whitespace().collect::<Vec<_>>().join(" ")),
        ],
        tables: [tables, vec![gains(first), orders(first)]].concat(),
        figures: [vec![kept(first)], first.iter().map(|arm| sequence(study, arm)).collect()].concat(),
    };
    Ok((report, all))
}

fn set_name(set: Set) -> &'static str {
    match set {
        Set::Valid => "validation set",
        Set::Monitor => "monitoring subset",
    }
}

fn percent(estimate: Option<Estimate>) -> Cell {
    let shown = |Estimate { value, interval }: Estimate| match interval {
        Some((low, high)) => format!("{:.2} [{:.2}, {:.2}]", 100.0 * value, 100.0 * low, 100.0 * high),
        None => format!("{:.2}", 100.0 * value),
    };
    estimate.map_or_else(Cell::unknown, |estimate| Cell::of(shown(estimate)))
}

fn nats(estimate: Option<Estimate>) -> Cell {
    let shown = |Estimate { value, interval }: Estimate| match interval {
        Some((low, high)) => format!("{value:.3} [{low:.3}, {high:.3}]"),
        None => format!("{value:.3}"),
    };
    estimate.map_or_else(Cell::unknown, |estimate| Cell::of(shown(estimate)))
}

/// The arms of one set over one kind of tokens.
fn table7(arms: &[Retention]) -> Table {
    let Retention { set, tokens, n_trajectories, capabilities, .. } = &arms[0];
    let of_each = |what: &str| capabilities.iter().map(|c| format!("{}: {what}", c.capability)).collect::<Vec<_>>();
    let row = |arm: &Retention| {
        let each = |cell: fn(&Retained) -> Cell| arm.capabilities.iter().map(cell).collect::<Vec<_>>();
        [
            vec![Cell::of(&arm.arm), percent(Some(arm.mean_loss))],
            each(|c| percent(c.loss_of_gain)),
            vec![nats(arm.mean_forgotten_nats)],
        ]
        .concat()
    };
    let suffix = match tokens {
        Tokens::Content => "content",
        Tokens::ContentWithoutThinking => "content-without-thinking",
        Tokens::Supervised => "supervised",
    };
    Table {
        name: format!("table7-{suffix}-{}", if *set == Set::Valid { "valid" } else { "monitor" }),
        title: format!("Loss under sequential training, {}, {}", tokens.name(), set_name(*set)),
        caption: format!(
            "{n_trajectories} trajectories. The last column is negative log-likelihood at the end less that right after a capability's own \
             stage, in nats per token, over the orders in which another stage follows."
        ),
        header: [
            vec!["Adapters".to_owned(), "mean absolute loss (points)".to_owned()],
            of_each("loss of initial gain (%)"),
            vec!["forgotten (nats)".to_owned()],
        ]
        .concat(),
        rows: arms.iter().map(row).collect(),
    }
}

/// The accuracies behind Table 7.
fn gains(arms: &[Retention]) -> Table {
    let row = |arm: &Retention, c: &Retained| {
        let numbers = [c.base, c.initial, c.end, c.gain, c.loss].map(|estimate| percent(Some(estimate)));
        [vec![Cell::of(&arm.arm), Cell::of(c.capability.as_str())], numbers.to_vec(), vec![nats(c.forgotten_nats)]].concat()
    };
    Table {
        name: "gains".to_owned(),
        title: "Accuracy before, right after its own stage, and at the end (%)".to_owned(),
        caption: format!("{}, {}, averaged over the orders.", arms[0].tokens.name(), set_name(arms[0].set)),
        header: ["Adapters", "capability", "base", "after own stage", "end", "initial gain", "absolute loss", "forgotten (nats)"]
            .map(str::to_owned)
            .into(),
        rows: arms.iter().flat_map(|arm| arm.capabilities.iter().map(move |c| row(arm, c))).collect(),
    }
}

/// Every point of every order.
fn orders(arms: &[Retention]) -> Table {
    let capabilities = &arms[0].capabilities;
    let mut header = vec!["Adapters".to_owned(), "order".to_owned(), "stages done".to_owned()];
    header.extend(capabilities.iter().flat_map(|c| [format!("{} (%)", c.capability), format!("{} (nats)", c.capability)]));
    let mut rows = Vec::new();
    for arm in arms {
        for sequence in &arm.sequences {
            for (n_stages, points) in sequence.points.iter().enumerate() {
                let names = [arm.arm.clone(), in_words(&sequence.order), n_stages.to_string()].map(Cell::of).to_vec();
                let numbers = points
                    .values()
                    .flat_map(|point| [Cell::number(Some(100.0 * point.accuracy), 2), Cell::number(Some(point.nll_nats), 4)]);
                rows.push(names.into_iter().chain(numbers).collect());
            }
        }
    }
    Table {
        name: "orders".to_owned(),
        title: "Accuracy and negative log-likelihood in every order".to_owned(),
        caption: format!("{}, {}.", arms[0].tokens.name(), set_name(arms[0].set)),
        header,
        rows,
    }
}

/// How much of the initial gain is left at the end.
fn kept(arms: &[Retention]) -> Figure {
    let bar = |c: &Retained| {
        let kept = |loss: f64| 100.0 * (1.0 - loss);
        let value = c.loss_of_gain.map(|estimate| kept(estimate.value));
        let error = c.loss_of_gain.and_then(|estimate| estimate.interval).map(|(low, high)| 50.0 * (high - low));
        Bar { value, error }
    };
    let groups = arms[0]
        .capabilities
        .iter()
        .enumerate()
        .map(|(i, c)| Group { name: c.capability.to_string(), bars: arms.iter().map(|arm| bar(&arm.capabilities[i])).collect() });
    Figure {
        name: "fig3-kept".to_owned(),
        title: "Initial gain that is kept to the end".to_owned(),
        caption: "Averaged over the orders; whiskers are half the width of the 95 % interval over trajectories.".to_owned(),
        x_label: String::new(),
        y_label: "of the initial gain (%)".to_owned(),
        drawing: Drawing::Bars { series: arms.iter().map(|arm| arm.arm.clone()).collect(), groups: groups.collect() },
    }
}

/// Accuracy over the study's own order.
fn sequence(study: &Study, arm: &Retention) -> Figure {
    let own = arm.sequences.iter().find(|sequence| sequence.order == study.capabilities).unwrap_or(&arm.sequences[0]);
    let series = study.capabilities.iter().map(|capability| {
        let point = |(i, points): (usize, &std::collections::BTreeMap<_, weact_diagnostics::retention::Point>)| Point {
            x: i as f64,
            y: 100.0 * points[capability].accuracy,
            name: if i == 0 { "base".to_owned() } else { format!("after {}", own.order[i - 1]) },
        };
        Series { name: capability.to_string(), points: own.points.iter().enumerate().map(point).collect() }
    });
    Figure {
        name: format!("fig3-{}", arm.arm),
        title: format!("{}: accuracy over {}", arm.arm, in_words(&own.order)),
        caption: format!("{}, {}; 0 is the base.", arm.tokens.name(), set_name(arm.set)),
        x_label: "stages done".to_owned(),
        y_label: "accuracy (%)".to_owned(),
        drawing: Drawing::Scatter { series: series.collect() },
    }
}
