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
    for drawing in page.split("<svg").skip(1) {
        let head = drawing.split('>').next().expect("an element");
        let of = |name: &str| {
            head.split_once(&format!(" {name}=\"")).and_then(|(_, rest)| rest.split('"').next()).expect("an attribute")
        };
        assert_eq!(of("viewBox"), format!("0 0 {} {}", of("width"), of("height")), "it shrinks with the page");
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
        Drawing::Heat {
            rows: names(["r", "s"]),
            columns: names(["c", "d"]),
            values: vec![vec![Some(0.1), None], vec![Some(0.3), Some(0.4)]],
        },
        Drawing::Bars { series: Vec::new(), groups: Vec::new() },
    ] {
        let figure = figure(drawing);
        assert!(figure.svg().expect("a drawing").contains("<svg"));
        assert!(figure.png().expect("a picture").starts_with(b"\x89PNG"));
    }
}

fn drawn(name: &str, drawing: Drawing) -> Figure {
    let [title, caption, x_label, y_label] = ["F", "C.", "x", "y"].map(str::to_owned);
    Figure { name: name.to_owned(), title, caption, x_label, y_label, drawing }
}

/// Vertical positions of the texts that read `text`.
fn heights(svg: &str, text: &str) -> Vec<f64> {
    let end = format!(">{text}</text>");
    let of = |before: &str| before.rsplit(" y=\"").next().and_then(|rest| rest.split('"').next()).and_then(|y| y.parse().ok());
    svg.match_indices(&end).filter_map(|(at, _)| of(&svg[..at])).collect()
}

#[test]
fn a_heat_map_s_rows_stand_beside_their_names() {
    let names = |names: [&str; 3]| names.map(str::to_owned).to_vec();
    let values = [[1.25, 2.25, 3.25], [4.25, 5.25, 6.25], [7.25, 8.25, 9.25]].map(|row| row.map(Some).to_vec()).to_vec();
    let heat = Drawing::Heat { rows: names(["top", "middle", "bottom"]), columns: names(["a", "b", "c"]), values };
    let svg = drawn("heat", heat).svg().expect("a drawing");
    let height = |text: &str| heights(&svg, text)[0];
    for (row, value) in [("top", "2.25"), ("middle", "5.25"), ("bottom", "8.25")] {
        assert!((height(row) - height(value)).abs() < 1.0, "{row} stands at {}, {value} at {}", height(row), height(value));
    }
    assert!(height("top") < height("bottom"));
}

#[test]
fn an_unknown_cell_is_grey_and_without_a_number() {
    let heat = |value| Drawing::Heat {
        rows: vec!["r".to_owned()],
        columns: vec!["a".to_owned(), "b".to_owned()],
        values: vec![vec![Some(1.5), value]],
    };
    let [known, unknown] = [Some(2.5), None].map(|value| drawn("heat", heat(value)));
    let (known_svg, unknown_svg) = (known.svg().expect("a drawing"), unknown.svg().expect("a drawing"));
    let grey = |svg: &str| svg.contains("rgb(190,190,190)") || svg.contains("#bebebe");
    assert!(!grey(&known_svg) && grey(&unknown_svg) && !unknown_svg.contains("NaN"), "{unknown_svg}");
    assert!(unknown.png().is_ok() && unknown.data().render(Format::Csv).contains("r,b,\n"));
}

/// Of 0, 0, 0 and 8 the median is 0 and the mean 2: the mark stands where a box's median of 2 would.
#[test]
fn the_mark_of_a_box_stands_at_the_mean() {
    let boxes = |values: &[&[f64]]| {
        let series = values.iter().enumerate().map(|(i, x)| (format!("s{i}"), x.to_vec())).collect();
        drawn("boxes", Drawing::Boxes { series }).svg().expect("a drawing")
    };
    let marks = |svg: &str| -> Vec<f64> {
        let of = |rest: &str| rest.split_once("cy=\"").and_then(|(_, y)| y.split('"').next()).and_then(|y| y.parse().ok());
        svg.split("<circle")
            .skip(1)
            .filter(|part| part.split('>').next().is_some_and(|head| head.contains("#e69f00")))
            .filter_map(of)
            .collect()
    };
    let svg = boxes(&[&[0.0, 0.0, 0.0, 8.0], &[2.0, 2.0, 2.0, 2.0], &[]]);
    let marks = marks(&svg);
    assert!(marks.len() == 2 && (marks[0] - marks[1]).abs() < 0.5, "{marks:?} {svg}");
}

#[test]
fn an_unknown_bar_has_no_whisker_and_is_named() {
    let group =
        |value, error| Group { name: "g".to_owned(), bars: vec![Bar { value, error }, Bar { value: Some(2.0), error: None }] };
    let whiskers = |group| {
        let bars = Drawing::Bars { series: vec!["a".to_owned(), "b".to_owned()], groups: vec![group] };
        let figure = drawn("bars", bars);
        let svg = figure.svg().expect("a drawing");
        assert!(!svg.contains("NaN") && figure.png().is_ok());
        (svg.matches("#1a1a1a").count(), figure.full_caption())
    };
    assert_eq!(whiskers(group(Some(1.0), Some(0.5))), (3, "C.".to_owned()));
    assert_eq!(whiskers(group(Some(1.0), None)), (0, "C.".to_owned()));
    assert_eq!(whiskers(group(None, None)), (0, "C. Unknown and not drawn: a in g.".to_owned()));
}

#[test]
fn every_name_of_a_legend_is_inside_the_picture() {
    let series: Vec<String> = (0..12).map(|i| format!("a method with a long name {i}")).collect();
    let bars = series.iter().map(|_| Bar { value: Some(1.0), error: None }).collect();
    let svg = drawn("bars", Drawing::Bars { series: series.clone(), groups: vec![Group { name: "g".to_owned(), bars }] });
    let svg = svg.svg().expect("a drawing");
    let height: f64 = svg.split(" height=\"").nth(1).and_then(|rest| rest.split('"').next()?.parse().ok()).expect("a height");
    for name in &series {
        assert!(heights(&svg, name)[0] < height, "{name} of {height}");
    }
}

#[test]
fn numbers_that_no_axis_holds_are_refused_by_name() {
    for x in [f64::NAN, f64::INFINITY, f64::MAX] {
        for drawing in [
            Drawing::Ecdf { series: vec![("a".to_owned(), vec![x])] },
            Drawing::Stacked {
                series: vec!["a".to_owned()],
                groups: vec![Group { name: "g".to_owned(), bars: vec![Bar { value: Some(x), error: None }] }],
            },
        ] {
            let figure = drawn("far", drawing);
            assert!(figure.svg().expect_err("no axis").to_string().starts_with("figure far: can't draw"));
            assert!(figure.png().is_err());
        }
    }
}

#[test]
fn pictures_hold_no_version_and_no_character_that_xml_refuses() {
    let point = Point { x: 1.0, y: 1.0, name: "p".to_owned() };
    let figure =
        drawn("s", Drawing::Scatter { series: vec![Series { name: "a\u{0}b\u{1}c\u{ffff}".to_owned(), points: vec![point] }] });
    let svg = figure.svg().expect("a drawing");
    assert!(!svg.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{ffff}') && svg.contains("a b c "));
    let png = figure.png().expect("a picture");
    assert!(!png.windows(4).any(|four| four == b"kuva" || four == b"tEXt") && png.ends_with(b"IEND\xae\x42\x60\x82"));
}

#[test]
fn only_whole_numbers_with_a_sign_pass_a_spreadsheet_unquoted() {
    for (text, expected) in [
        ("-1*cmd|' /C calc'!A0", "'-1*cmd|' /C calc'!A0\n"),
        ("+1&A1", "'+1&A1\n"),
        ("-2+3", "'-2+3\n"),
        ("＝1", "'＝1\n"),
        ("\n=1", "\"'\n=1\"\n"),
        ("+71.6", "+71.6\n"),
        ("-3.10±1.20", "-3.10±1.20\n"),
        ("-7.3 %", "-7.3 %\n"),
    ] {
        let csv =
            Table { header: vec!["h".to_owned()], rows: vec![vec![Cell::of(text)]], ..Table::default() }.render(Format::Csv);
        assert_eq!(csv.split_once('\n').expect("a header").1, expected);
    }
}

#[test]
fn latex_gets_no_letter_that_its_default_fonts_lack() {
    let report = small();
    let paper = ["paper-table2", "paper-table3", "paper-table5", "paper-table6", "paper-fig4", "paper-fig7"].map(paper::printed);
    for table in report.tables.iter().chain(paper.iter().flatten()) {
        let body = table.render(Format::Latex);
        let body = body.split_once('\n').expect("the title is a comment").1;
        assert!(body.is_ascii(), "{}: {:?}", table.name, body.chars().find(|c| !c.is_ascii()));
    }
}

#[test]
fn names_of_scores_make_files_and_never_the_same_one() {
    let mut records = vec![record("A", "x", "1", 0, State::Correct)];
    records[0].scores = [("a/b", 1.0), ("a%2fb", 0.0), ("../../x", 0.5)].map(|(name, x)| (name.to_owned(), x)).into();
    let report = evaluation("T", &records, Vec::new()).expect("a report");
    let dir = tempfile::tempdir().expect("a folder");
    report.write(dir.path()).expect("written");
    for file in ["score-a%2fb.csv", "score-a%252fb.csv", "score-..%2f..%2fx.csv"] {
        assert!(dir.path().join("tables").join(file).exists(), "{file}");
    }
    let mut twice = report.clone();
    twice.tables.push(twice.tables[0].clone());
    assert!(twice.write(dir.path()).expect_err("one file for two").to_string().contains("two have this name"));
    twice.tables[0].name = "../x".to_owned();
    assert!(twice.write(dir.path()).expect_err("elsewhere").to_string().contains("use letters"));
}
