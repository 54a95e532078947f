//! Tables and figures of gradients that meet.

use weact_core::stats::Estimate;
use weact_diagnostics::interference::{FirstOrder, Pair, Part};
use weact_eval::report::{Cell, Drawing, Figure, Point, Report, Series, Table};

use super::{Found, Study};

/// The report of a study.
pub fn report(study: &Study, found: &Found) -> Report {
    Report {
        title: "Interference of shared updates".to_owned(),
        notes: vec![
            "Cosines are those of mini-batch gradients, averaged over pairs of mini-batches, of a capability with itself over different ones. \
             Brackets are 95 % intervals over mini-batches. A negative one says that a step for the one raises the loss of the other (Eq. 3)."
                .to_owned(),
        ],
        provenance: vec![
            ("weact".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("configuration".to_owned(), study.to_toml().split_whitespace().collect::<Vec<_>>().join(" ")),
            ("adapter".to_owned(), found.adapter.clone().unwrap_or_else(|| "a fresh one".to_owned())),
        ],
        tables: vec![pairs(&found.pairs), first_order(found)],
        figures: vec![by_layer(&found.pairs)],
    }
}

fn part_name(part: Part) -> String {
    match part {
        Part::Total => "total".to_owned(),
        Part::Layer(layer) => format!("layer {layer}"),
        Part::Projection(projection) => projection.to_string(),
    }
}

fn pairs(pairs: &[Pair]) -> Table {
    let cell = |estimate: Option<Estimate>, shown: fn(f64) -> String| match estimate {
        None => Cell::unknown(),
        Some(Estimate { value, interval: None }) => Cell::of(shown(value)),
        Some(Estimate { value, interval: Some((low, high)) }) => {
            Cell::of(format!("{} [{}, {}]", shown(value), shown(low), shown(high)))
        }
    };
    let row = |pair: &Pair| {
        vec![
            Cell::of(part_name(pair.part)),
            Cell::of(format!("{} · {}", pair.j, pair.k)),
            cell(pair.cosine, |x| format!("{x:.3}")),
            cell(pair.product, |x| format!("{x:.3e}")),
        ]
    };
    Table {
        name: "interference".to_owned(),
        title: "Gradients of capabilities".to_owned(),
        caption: String::new(),
        header: ["parameters", "pair", "cosine", "inner product"].map(str::to_owned).into(),
        rows: pairs.iter().map(row).collect(),
    }
}

fn first_order(found: &Found) -> Table {
    let row = |(i, step): (usize, &FirstOrder)| {
        let same = |other: &&FirstOrder| other.j == step.j && other.k == step.k;
        let next = found.first_order[i + 1..].iter().find(same);
        let exact = |x: f64| Cell::of(format!("{x:.6}"));
        vec![
            Cell::of(step.j.as_str()),
            Cell::of(step.k.as_str()),
            Cell::of(format!("{}", step.eta)),
            exact(step.predicted_nats),
            exact(step.measured_nats),
            Cell::of(format!("{:.2e}", step.residual_nats())),
            Cell::number(next.and_then(|next| step.exponent(next)), 2),
        ]
    };
    Table {
        name: "first-order".to_owned(),
        title: "Eq. 3: predicted and measured change of loss".to_owned(),
        caption: "In nats per token. The last column is the exponent with which the residual shrinks to the next step: 2 where the first order \
                  is right, the steps are small and the residual stands above rounding."
            .to_owned(),
        header: ["loss of", "step of", "eta", "predicted", "measured", "residual", "exponent"].map(str::to_owned).into(),
        rows: found.first_order.iter().enumerate().map(row).collect(),
    }
}

fn by_layer(pairs: &[Pair]) -> Figure {
    let mut series: Vec<Series> = Vec::new();
    for pair in pairs {
        let (Part::Layer(layer), Some(cosine)) = (pair.part, pair.cosine) else { continue };
        let name = format!("{} · {}", pair.j, pair.k);
        let point = Point { x: layer as f64, y: cosine.value, name: part_name(pair.part) };
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name, points: vec![point] }),
        }
    }
    Figure {
        name: "cosine-by-layer".to_owned(),
        title: "Cosine of gradients by layer".to_owned(),
        caption: "An unknown cosine, where a gradient is zero, is not drawn.".to_owned(),
        x_label: "layer".to_owned(),
        y_label: "cosine".to_owned(),
        drawing: Drawing::Scatter { series },
    }
}
