use std::fs;

use super::*;
use crate::{record::State, score::tests::record};

fn table(texts: &[&str]) -> Table {
    Table {
        name: "t".to_owned(),
        title: "A & B".to_owned(),
        caption: String::new(),
        header: vec!["name".to_owned(), "x_1".to_owned()],
        rows: texts.iter().map(|text| vec![Cell::of(*text), Cell::unknown()]).collect(),
    }
}

#[test]
fn every_format_escapes_what_it_must() {
    let hostile = table(&["<script>|a*b_c</script>", "=HYPERLINK(1)", "50% & {x}^2 \\n \"q\"", "-1.5", "line\nbreak\u{1b}[31m"]);
    let markdown = hostile.render(Format::Markdown);
    assert!(markdown.contains("| &lt;script&gt;\\|a\\*b\\_c&lt;/script&gt; | — |"), "{markdown}");
    let csv = hostile.render(Format::Csv);
    assert!(
        csv.contains("'=HYPERLINK(1),") && csv.contains("\n-1.5,\n") && csv.contains("\"50% & {x}^2 \\n \"\"q\"\"\""),
        "{csv}"
    );
    let latex = hostile.render(Format::Latex);
    assert!(latex.contains("50\\% \\& \\{x\\}\\textasciicircum{}2 \\textbackslash{}n"), "{latex}");
    assert!(latex.contains("name & x\\_1 \\\\") && latex.contains("& --- \\\\"), "{latex}");
    let terminal = hostile.render(Format::Terminal);
    assert!(!terminal.contains('\u{1b}') && terminal.contains("line break [31m"), "{terminal}");
}

#[test]
fn the_best_and_the_second_of_a_column_stand_out() {
    let cell = |text: &str| Cell::of(text);
    let table = Table {
        header: ["m", "a", "b"].map(str::to_owned).into(),
        rows: vec![
            vec![cell("x"), cell("40.78±4.84"), cell("1.0")],
            vec![cell("y"), cell("9.50±1.00"), Cell::unknown()],
            vec![cell("z"), cell("46.60±4.92"), cell("1.0")],
        ],
        ..Table::default()
    }
    .ranked();
    let marks: Vec<Emphasis> = table.rows.iter().map(|row| row[1].emphasis).collect();
    assert_eq!(marks, [Emphasis::Second, Emphasis::None, Emphasis::Best]);
    assert!(table.rows.iter().all(|row| row[2].emphasis == Emphasis::None), "all known values are the same");
    assert!(table.render(Format::Markdown).contains("| z | **46.60±4.92** | 1.0 |"));
    assert!(table.render(Format::Latex).contains("\\underline{40.78$\\pm$4.84}"));
}

fn small() -> Report {
    let mut records = Vec::new();
    for i in 0..8 {
        let id = format!("t{i}");
        records.push(record("Base", "GAIA", &id, 0, if i < 2 { State::Correct } else { State::Wrong }));
        records.push(record("<b>WeAct</b>", "GAIA", &id, 0, if i < 7 { State::Correct } else { State::NoAnswer }));
    }
    records.push(record("<b>WeAct</b>", "GAIA", "t7", 1, State::Error));
    records.push(record("Base", "FRAMES", "f", 0, State::Correct));
    evaluation("Toy & more", &records, vec![("config".to_owned(), "seed = 0 <x>".to_owned())]).expect("a report")
}

#[test]
fn a_report_s_numbers_are_those_of_its_records_and_unknown_ones_are_dashes() {
    let report = small();
    let markdown = |name: &str| report.tables.iter().find(|t| t.name == name).expect("a table").render(Format::Markdown);
    let expected = "| Method | GAIA | FRAMES | Avg. |\n| --- | ---: | ---: | ---: |\n\
                    | Base | <u>25.00±15.31</u> | 100.00±0.00 | 62.50±7.65 |\n\
                    | &lt;b&gt;WeAct&lt;/b&gt; | **87.50±11.69** | — | — |\n";
    assert_eq!(markdown("table1"), expected);
    assert!(
        markdown("table6").contains("| &lt;b&gt;WeAct&lt;/b&gt; | GAIA | 8 | 12.50 | 87.50 | 87.50 |"),
        "{}",
        markdown("table6")
    );
    assert!(
        markdown("states").contains("| 8 | 7 | 0 | 0 | 0 | 1 | 0 | 87.5 | 100.0 | \\[52.9, 97.8\\] |"),
        "{}",
        markdown("states")
    );
    assert!(markdown("paired").contains("| &lt;b&gt;WeAct&lt;/b&gt; - Base | 8 | +62.5 |"), "{}", markdown("paired"));
}

#[test]
fn a_written_report_is_whole_escaped_self_contained_and_always_the_same() {
    let dir = tempfile::tempdir().expect("a folder");
    let [a, b] = ["a", "b"].map(|name| {
        let out = dir.path().join(name);
        small().write(&out).expect("written");
        out
    });
    let page = fs::read_to_string(a.join("report.html")).expect("a page");
    assert!(page.contains("&lt;b&gt;WeAct&lt;&#x2f;b&gt;") && !page.contains("<b>"), "names are text");
    assert!(
        page.contains("Toy &amp; more") && page.contains("prefers-color-scheme: dark") && page.contains("width=device-width")
    );
    for foreign in ["<script", "src=", "@import", "<link", "href="] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    let ids: Vec<&str> = page.split(" id=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), ids.len(), "drawings share no id");
    for used in page.split("url(").skip(1).filter_map(|rest| rest.split(')').next()) {
        assert!(used.strip_prefix('#').is_some_and(|id| ids.contains(&id)), "{used}");
    }
    for file in [
        "report.html",
        "report.md",
        "tables/table1.tex",
        "tables/paper-table1.csv",
        "figures/accuracy.svg",
        "figures/accuracy.png",
        "figures/accuracy.csv",
        "figures/accuracy.json",
        "figures/time-parts.svg",
        "figures/wall-time.svg",
    ] {
        let bytes = fs::read(a.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(!bytes.is_empty() && bytes == fs::read(b.join(file)).expect("the other"), "{file}");
    }
    let svg = fs::read_to_string(a.join("figures/accuracy.svg")).expect("a drawing");
    assert!(svg.contains("&lt;b&gt;WeAct") && !svg.contains("<b>") && !svg.contains("0.6.0"), "{}", &svg[..200]);
    let data = fs::read_to_string(a.join("figures/accuracy.csv")).expect("data");
    assert!(data.contains("FRAMES,<b>WeAct</b>,,\n"), "an unknown value is empty: {data}");
}

#[test]
fn every_kind_of_drawing_is_drawn() {
    let values = vec![("a".to_owned(), vec![0.5, 1.0, 2.0]), ("b".to_owned(), vec![1.0, 4.0, 9.0])];
    let figure = |drawing| Figure {
        name: "f".to_owned(),
        title: "F".to_owned(),
        caption: String::new(),
        x_label: "x".to_owned(),
        y_label: "y".to_owned(),
        drawing,
    };
    let names = |names: [&str; 2]| names.map(str::to_owned).to_vec();
    for drawing in [
        Drawing::Ecdf { series: values.clone() },
        Drawing::Boxes { series: values },
        Drawing::Heat { rows: names(["r", "s"]), columns: names(["c", "d"]), values: vec![vec![0.1, 0.2], vec![0.3, 0.4]] },
        Drawing::Bars { series: Vec::new(), groups: Vec::new() },
    ] {
        let figure = figure(drawing);
        assert!(figure.svg().contains("<svg"));
        assert!(figure.png().expect("a picture").starts_with(b"\x89PNG"));
    }
}
