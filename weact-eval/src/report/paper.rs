//! The paper's own tables as data, so that a report shows them beside its own. *WeAct: Dynamic Weight Switching as Agent Actions*, arXiv 2610.26847.

use serde::Deserialize;

use super::table::{Cell, Table};

/// Table 1, in percent.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table1 {
    /// The columns.
    pub benchmarks: Vec<String>,
    /// Tasks of each.
    pub n: Vec<usize>,
    /// The rows.
    #[serde(rename = "method")]
    pub methods: Vec<Row>,
}

/// One method of Table 1, in percent.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub group: String,
    /// By benchmark.
    pub accuracy: Vec<f64>,
    /// By benchmark.
    pub se: Vec<f64>,
    /// The last column.
    pub average: f64,
    /// Its error.
    pub average_se: f64,
}

#[derive(Deserialize)]
struct File {
    table: Vec<Printed>,
}

#[derive(Deserialize)]
struct Printed {
    name: String,
    title: String,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// Table 1.
pub fn table1() -> Table1 {
    toml::from_str(include_str!("paper/table1.toml")).expect("the shipped data are legal")
}

/// Table 1 as it is printed.
pub fn printed_table1() -> Table {
    let Table1 { benchmarks, methods, .. } = table1();
    let row = |row: &Row| {
        let cell = |(accuracy, se): (&f64, &f64)| Cell::of(format!("{accuracy:.2}±{se:.2}"));
        let mut cells = vec![Cell::of(&row.name)];
        cells.extend(row.accuracy.iter().zip(&row.se).map(cell));
        cells.push(cell((&row.average, &row.average_se)));
        cells
    };
    Table {
        name: "paper-table1".to_owned(),
        title: "Table 1 of the paper: accuracy (%)".to_owned(),
        caption: "Qwen3-32B on the public benchmarks, as printed: not comparable with other models or task files.".to_owned(),
        header: std::iter::once("Method".to_owned()).chain(benchmarks).chain(["Avg.".to_owned()]).collect(),
        rows: methods.iter().map(row).collect(),
    }
    .ranked()
}

/// Another table of the paper by the name of its files, `paper-table6` and the like; `None` if there is none.
pub fn printed(name: &str) -> Option<Table> {
    let file: File = toml::from_str(include_str!("paper/tables.toml")).expect("the shipped data are legal");
    let table = file.table.into_iter().find(|table| table.name == name)?;
    let cell = |text: String| if text.is_empty() { Cell::unknown() } else { Cell::of(text) };
    Some(Table {
        name: table.name,
        title: format!("{} (of the paper)", table.title),
        caption: String::new(),
        header: table.header,
        rows: table.rows.into_iter().map(|row| row.into_iter().map(cell).collect()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use weact_core::stats::{Mean, binomial_se, mean_of_benchmarks};

    use super::*;

    /// Every printed standard error from its accuracy and n, and every average with its error from the row.
    #[test]
    fn table_1_is_consistent_with_itself() {
        let table = table1();
        assert_eq!((table.methods.len(), table.benchmarks.len()), (10, 8));
        for row in &table.methods {
            let mut means = Vec::new();
            for ((accuracy, se), n) in row.accuracy.iter().zip(&row.se).zip(&table.n) {
                let n_right = (accuracy / 100.0 * *n as f64).round() as usize;
                let own = 100.0 * binomial_se(n_right, *n).expect("tasks");
                assert_eq!(format!("{own:.2}"), format!("{se:.2}"), "{}: {accuracy} of {n}", row.name);
                means.push(Mean { mean: *accuracy, se: own });
            }
            let Mean { mean, se } = mean_of_benchmarks(&means).expect("eight");
            assert!((mean - row.average).abs() <= 0.01 && (se - row.average_se).abs() <= 0.01, "{}: {mean} {se}", row.name);
        }
    }

    #[test]
    fn the_other_tables_are_there_and_rectangular() {
        for name in ["paper-table2", "paper-table3", "paper-table5", "paper-table6", "paper-fig4", "paper-fig7"] {
            let table = printed(name).unwrap_or_else(|| panic!("{name}"));
            assert!(table.rows.iter().all(|row| row.len() == table.header.len()), "{name}");
        }
        assert_eq!(printed("paper-table9"), None);
        assert_eq!(printed_table1().header.len(), 10);
    }
}
