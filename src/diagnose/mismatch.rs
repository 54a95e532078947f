//! The local mismatch of fusions on matched activations (App. E.2): records, tables and Fig. 13.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use weact_core::{
    Backbone, Capability,
    lora::{FactorMap, Projection},
    sample::Sample,
    stats::Resampling,
};
use weact_diagnostics::mismatch::{self, Average, Mismatch, Positions, RecordMismatch};
use weact_eval::report::{Cell, Drawing, Figure, Table};

use super::{Result, Subjects};

/// One record under one fusion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MismatchRecord {
    /// The fusion's name.
    pub fusion: String,
    /// Whose record it is.
    pub capability: Capability,
    /// What it contributes.
    #[serde(flatten)]
    pub record: RecordMismatch,
}

/// The records, and those that contribute nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Fusion by fusion.
    pub records: Vec<MismatchRecord>,
    /// Ids of records without an eligible position.
    pub left_out: BTreeMap<Capability, Vec<String>>,
}

/// Measures every fusion on every specialist's records. `observe` hears what is measured.
///
/// # Errors
/// If a value is not finite; the message names the record.
pub fn measure(
    backbone: &Backbone,
    subjects: &Subjects,
    positions: &Positions,
    observe: &mut dyn FnMut(&str),
) -> Result<Measured> {
    let device = backbone.device();
    let fusions = subjects.fusions.iter().map(|f| f.adapter.to_device(&backbone.config, &device));
    let fusions: Vec<FactorMap> = fusions.collect::<weact_core::Result<_>>()?;
    let fusions: Vec<&FactorMap> = fusions.iter().collect();
    let mut records = Vec::new();
    let mut left_out = BTreeMap::new();
    for specialist in &subjects.specialists {
        observe(&format!("{} fusions on {} records of {}", fusions.len(), specialist.records.len(), specialist.capability));
        let own = specialist.adapter.to_device(&backbone.config, &device)?;
        let samples: Vec<&Sample> = specialist.records.iter().collect();
        let measured = mismatch::measure(backbone, &own, &fusions, &samples, positions)?;
        for (fusion, of_fusion) in subjects.fusions.iter().zip(measured.fusions) {
            let of = |record| MismatchRecord { fusion: fusion.name.clone(), capability: specialist.capability.clone(), record };
            records.extend(of_fusion.into_iter().map(of));
        }
        left_out.insert(specialist.capability.clone(), measured.left_out);
    }
    let place = |name: &str| subjects.fusions.iter().position(|f| f.name == name);
    records.sort_by_key(|r| place(&r.fusion));
    Ok(Measured { records, left_out })
}

/// The averages of each fusion and capability, in the order in which they first occur. `per_record` is how many positions were asked
/// for.
pub fn averages(records: &[MismatchRecord], per_record: usize, resampling: Resampling) -> Vec<(String, Capability, Mismatch)> {
    let mut groups: Vec<(&str, &Capability, Vec<RecordMismatch>)> = Vec::new();
    for r in records {
        match groups.iter_mut().find(|(fusion, capability, _)| *fusion == r.fusion && **capability == r.capability) {
            Some((.., of_group)) => of_group.push(r.record.clone()),
            None => groups.push((&r.fusion, &r.capability, vec![r.record.clone()])),
        }
    }
    let summary = |(fusion, capability, records): (&str, &Capability, Vec<RecordMismatch>)| {
        (fusion.to_owned(), capability.clone(), mismatch::summarise(&records, per_record, resampling))
    };
    groups.into_iter().map(summary).collect()
}

/// The table of means over layers, that of all layers, and the figure of layers (Fig. 13).
pub fn report(averages: &[(String, Capability, Mismatch)]) -> (Vec<Table>, Figure) {
    let interval =
        |a: &Average| a.interval95.map_or_else(Cell::unknown, |(low, high)| Cell::of(format!("[{low:.3}, {high:.3}]")));
    let projections = Projection::BLOCK.map(|p| p.name().to_owned());
    let head = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).chain(projections.clone()).collect::<Vec<String>>();

    let row = |(fusion, capability, m): &(String, Capability, Mismatch)| {
        let counts = [m.n_trajectories, m.n_records, m.n_short, m.n_floored].map(|n| Cell::of(n.to_string()));
        let mut cells = vec![Cell::of(fusion), Cell::of(capability.as_str())];
        cells.extend(counts);
        cells.extend([Cell::number(m.overall.mean, 3), interval(&m.overall)]);
        cells.extend(Projection::BLOCK.map(|p| Cell::number(m.projections.get(&p).and_then(|a| a.mean), 3)));
        cells
    };
    let all = Table {
        name: "mismatch".to_owned(),
        title: "Local mismatch on matched activations".to_owned(),
        caption: "Means of rho over layers, with the bootstrap over trajectories. Short records contribute fewer positions than \
                  asked; floored values are relative to 1e-12, because the specialist's own update is as good as zero there."
            .to_owned(),
        header: head(&["Fusion", "Capability", "trajectories", "records", "short", "floored", "mean rho", "95 %"]),
        rows: averages.iter().map(row).collect(),
    };
    let of_layers = |(fusion, capability, m): &(String, Capability, Mismatch)| -> Vec<Vec<Cell>> {
        let row = |(layer, (average, modules)): (usize, (&Average, &BTreeMap<Projection, f64>))| {
            let mut cells = vec![Cell::of(fusion), Cell::of(capability.as_str()), Cell::of(layer.to_string())];
            cells.extend([Cell::number(average.mean, 3), interval(average)]);
            cells.extend(Projection::BLOCK.map(|p| Cell::number(modules.get(&p).copied(), 3)));
            cells
        };
        m.layers.iter().zip(&m.modules).enumerate().map(row).collect()
    };
    let by_layer = Table {
        name: "mismatch-layers".to_owned(),
        title: "Local mismatch by layer".to_owned(),
        caption: String::new(),
        header: head(&["Fusion", "Capability", "layer", "mean rho", "95 %"]),
        rows: averages.iter().flat_map(of_layers).collect(),
    };
    let n_layers = averages.iter().map(|(.., m)| m.layers.len()).max().unwrap_or(0);
    let figure = Figure {
        name: "fig13".to_owned(),
        title: "Local mismatch across layers".to_owned(),
        caption: "Mean rho by layer: how far the fusion's update is from the specialist's own, relative to that. 0 is the same \
                  update; grey is unknown."
            .to_owned(),
        x_label: "layer".to_owned(),
        y_label: String::new(),
        drawing: Drawing::Heat {
            rows: averages.iter().map(|(fusion, capability, _)| format!("{fusion}, {capability}")).collect(),
            columns: (0..n_layers).map(|layer| layer.to_string()).collect(),
            values: averages.iter().map(|(.., m)| m.layers.iter().map(|a| a.mean).collect()).collect(),
        },
    };
    (vec![all, by_layer], figure)
}
