//! The gap in negative log-likelihood between fusions and specialists (App. E.3): records, table and Fig. 14.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use weact_core::{
    Backbone, Capability,
    lora::FactorMap,
    sample::Sample,
    stats::{Resampling, Z95, wilson},
};
use weact_diagnostics::{
    nll_gap::{self, NllGap},
    teacher_forced::{self, Scored},
};
use weact_eval::report::{Cell, Drawing, Figure, Table};

use super::{Result, Subjects};

/// One record under one fusion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GapRecord {
    /// The fusion's name.
    pub fusion: String,
    /// Whose record it is.
    pub capability: Capability,
    /// The record's id.
    pub id: String,
    /// Supervised tokens.
    pub n_tokens: usize,
    /// `L_m(x)`: the fusion's mean over them, in nats.
    pub fused_nll_nats: f64,
    /// `L_k(x)`: the specialist's.
    pub own_nll_nats: f64,
    /// `dL(x)`.
    pub gap_nats: f64,
    /// Every supervised token is the fusion's first choice.
    pub fused_right: bool,
    /// Every supervised token is the specialist's first choice.
    pub own_right: bool,
}

/// How many trajectories a fusion, and switching between the specialists, get wholly right: every supervised token of every stage
/// is the first choice of the weights that act there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WhollyRight {
    /// The fusion's name.
    pub fusion: String,
    /// Trajectories.
    pub n: usize,
    /// Wholly right under the fusion.
    pub fused: usize,
    /// Wholly right under each stage's specialist.
    pub switching: usize,
}

/// Scores every specialist's records under it and under every fusion. `observe` hears what is scored.
///
/// # Errors
/// If a log-likelihood is not finite; the message names the record.
pub fn measure(backbone: &Backbone, subjects: &Subjects, observe: &mut dyn FnMut(&str)) -> Result<Vec<GapRecord>> {
    let mut score = |name: &str, factors: &FactorMap, capability: &Capability, samples: &[&Sample]| {
        observe(&format!("{name} on {} records of {capability}", samples.len()));
        teacher_forced::score(backbone, Some(factors), samples)
    };
    let device = backbone.device();
    let mut own: Vec<Vec<Scored>> = Vec::new();
    let samples: Vec<Vec<&Sample>> = subjects.specialists.iter().map(|s| s.records.iter().collect()).collect();
    for (specialist, samples) in subjects.specialists.iter().zip(&samples) {
        let factors = specialist.adapter.to_device(&backbone.config, &device)?;
        own.push(score("its specialist", &factors, &specialist.capability, samples)?);
    }
    let mut records = Vec::new();
    for fusion in &subjects.fusions {
        let factors = fusion.adapter.to_device(&backbone.config, &device)?;
        for ((specialist, samples), own) in subjects.specialists.iter().zip(&samples).zip(&own) {
            let fused = score(&fusion.name, &factors, &specialist.capability, samples)?;
            let gaps = nll_gap::gaps(&fused, own)?;
            let mean = |scored: &Scored| scored.nll_nats.iter().sum::<f64>() / scored.nll_nats.len() as f64;
            records.extend(fused.iter().zip(own).zip(gaps).map(|((fused, own), gap_nats)| GapRecord {
                fusion: fusion.name.clone(),
                capability: specialist.capability.clone(),
                id: fused.id.clone(),
                n_tokens: fused.nll_nats.len(),
                fused_nll_nats: mean(fused),
                own_nll_nats: mean(own),
                gap_nats,
                fused_right: fused.top1.iter().all(|hit| *hit),
                own_right: own.top1.iter().all(|hit| *hit),
            }));
        }
    }
    Ok(records)
}

/// The gaps of each fusion and capability, in the order in which they first occur.
pub fn gaps(records: &[GapRecord], resampling: Resampling) -> Vec<(String, Capability, NllGap)> {
    let mut groups: Vec<(&str, &Capability, Vec<f64>)> = Vec::new();
    for r in records {
        match groups.iter_mut().find(|(fusion, capability, _)| *fusion == r.fusion && **capability == r.capability) {
            Some((.., gaps)) => gaps.push(r.gap_nats),
            None => groups.push((&r.fusion, &r.capability, vec![r.gap_nats])),
        }
    }
    groups
        .into_iter()
        .map(|(fusion, capability, gaps)| (fusion.to_owned(), capability.clone(), NllGap::of(gaps, resampling)))
        .collect()
}

/// Trajectories that are wholly right, by fusion. A record's id is its trajectory's, `#`, and the span's index.
pub fn wholly_right(records: &[GapRecord]) -> Vec<WhollyRight> {
    /// By trajectory: right under the fusion, right under the specialists.
    type Rights<'a> = BTreeMap<&'a str, (bool, bool)>;
    let mut fusions: Vec<(&str, Rights<'_>)> = Vec::new();
    for r in records {
        let place = fusions.iter().position(|(fusion, _)| *fusion == r.fusion).unwrap_or_else(|| {
            fusions.push((&r.fusion, BTreeMap::new()));
            fusions.len() - 1
        });
        let trajectory = r.id.rsplit_once('#').map_or(r.id.as_str(), |(trajectory, _)| trajectory);
        let (fused, own) = fusions[place].1.entry(trajectory).or_insert((true, true));
        *fused &= r.fused_right;
        *own &= r.own_right;
    }
    let counted = |(fusion, trajectories): (&str, Rights<'_>)| WhollyRight {
        fusion: fusion.to_owned(),
        n: trajectories.len(),
        fused: trajectories.values().filter(|(fused, _)| *fused).count(),
        switching: trajectories.values().filter(|(_, own)| *own).count(),
    };
    fusions.into_iter().map(counted).collect()
}

/// The table of [`wholly_right`].
pub fn right_table(counts: &[WhollyRight]) -> Table {
    let percent = |n_right: usize, n: usize| Cell::number((n > 0).then(|| 100.0 * n_right as f64 / n as f64), 1);
    let interval = |n_right: usize, n: usize| {
        wilson(n_right, n, Z95)
            .map_or_else(Cell::unknown, |(low, high)| Cell::of(format!("[{:.1}, {:.1}]", 100.0 * low, 100.0 * high)))
    };
    let row = |c: &WhollyRight| {
        vec![
            Cell::of(&c.fusion),
            Cell::of(c.n.to_string()),
            percent(c.fused, c.n),
            interval(c.fused, c.n),
            percent(c.switching, c.n),
            interval(c.switching, c.n),
        ]
    };
    let header = ["Fusion", "trajectories", "fusion (%)", "95 %", "switching (%)", "95 %"];
    Table {
        name: "wholly-right".to_owned(),
        title: "Trajectories wholly right".to_owned(),
        caption: "Teacher-forced: every supervised token of every stage is the first choice; Wilson intervals.".to_owned(),
        header: header.map(str::to_owned).to_vec(),
        rows: counts.iter().map(row).collect(),
    }
}

/// The table of means and the figure of all records (Fig. 14).
pub fn report(gaps: &[(String, Capability, NllGap)]) -> (Table, Figure) {
    let row = |(fusion, capability, gap): &(String, Capability, NllGap)| {
        let n = gap.per_record.len();
        let not_positive = gap.per_record.iter().filter(|x| **x <= 0.0).count();
        let interval = gap.interval95.map_or_else(Cell::unknown, |(low, high)| Cell::of(format!("[{low:.4}, {high:.4}]")));
        vec![
            Cell::of(fusion),
            Cell::of(capability.as_str()),
            Cell::of(n.to_string()),
            Cell::number(gap.mean, 4),
            interval,
            Cell::number(gap.median, 4),
            Cell::number(Some(100.0 * not_positive as f64 / n as f64), 1),
        ]
    };
    let header = ["Fusion", "Capability", "records", "mean gap (nats)", "95 %", "median", "not positive (%)"];
    let table = Table {
        name: "nll-gap".to_owned(),
        title: "Target-text fit of fusions against the matching specialist".to_owned(),
        caption: "The record's mean NLL under the fusion less that under the specialist; bootstrap over records.".to_owned(),
        header: header.map(str::to_owned).to_vec(),
        rows: gaps.iter().map(row).collect(),
    };
    let series = gaps.iter().map(|(fusion, capability, gap)| (format!("{fusion}, {capability}"), gap.per_record.clone()));
    let figure = Figure {
        name: "fig14".to_owned(),
        title: "NLL gap across records".to_owned(),
        caption:
            "Quartiles of the records' gaps, whiskers to the last within 1.5 quartile distances; the dot is the mean. Above zero \
                  the fusion fits the text worse."
                .to_owned(),
        x_label: String::new(),
        y_label: "gap (nats per token)".to_owned(),
        drawing: Drawing::Boxes { series: series.collect() },
    };
    (table, figure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_token_in_one_stage_makes_a_trajectory_wrong() {
        let record = |fusion: &str, id: &str, fused_right, own_right| GapRecord {
            fusion: fusion.to_owned(),
            capability: "plan".parse().expect("legal"),
            id: id.to_owned(),
            n_tokens: 1,
            fused_nll_nats: 0.0,
            own_nll_nats: 0.0,
            gap_nats: 0.0,
            fused_right,
            own_right,
        };
        let records = [
            record("a", "t#0", true, true),
            record("a", "u#0", true, true),
            record("a", "t#1", false, true),
            record("b", "t#0", true, false),
        ];
        let count = |fusion: &str, n, fused, switching| WhollyRight { fusion: fusion.to_owned(), n, fused, switching };
        assert_eq!(wholly_right(&records), [count("a", 2, 1, 2), count("b", 1, 1, 0)]);
    }
}
