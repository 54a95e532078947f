//! One self-contained page.

use minijinja::{AutoEscape, Environment, Value, context};

use super::{
    Report,
    table::{Emphasis, Table},
};

/// The report as HTML; `drawn` are its figures as SVG. Every text is escaped. There is no script, and nothing is loaded.
pub(super) fn html(report: &Report, drawn: &[String]) -> String {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.add_template("page", include_str!("page.html")).expect("the page's template is legal");
    let tables: Vec<Value> = report.tables.iter().map(table).collect();
    let figures = report.figures.iter().zip(drawn).map(|(figure, svg)| {
        context! { title => &figure.title, caption => figure.full_caption(), svg => Value::from_safe_string(inlined(svg, &figure.name)) }
    });
    let context = context! {
        title => &report.title, notes => &report.notes, tables => tables, figures => figures.collect::<Vec<_>>(),
        provenance => &report.provenance,
    };
    environment.get_template("page").and_then(|page| page.render(context)).expect("the page's values are there") + "\n"
}

fn table(table: &Table) -> Value {
    let rows: Vec<Vec<Value>> = table
        .rows
        .iter()
        .map(|row| {
            let cell = |cell: &super::Cell| {
                context! {
                    text => cell.text.as_deref().unwrap_or("—"), best => cell.emphasis == Emphasis::Best,
                    second => cell.emphasis == Emphasis::Second,
                }
            };
            row.iter().map(cell).collect()
        })
        .collect();
    context! { title => &table.title, caption => &table.caption, header => &table.header, rows => rows }
}

/// Without the parts that stand before an SVG file's element, with ids of its own, as several drawings share the page, and with its size as a
/// view box: without one a narrower page cuts the drawing instead of shrinking it.
fn inlined(svg: &str, name: &str) -> String {
    let element = svg.find("<svg").map_or(svg, |at| &svg[at..]).trim_end();
    let (head, rest) = element.split_once('>').expect("a drawing has its element");
    let size = |attribute: &str| {
        let value = head.split_once(&format!(" {attribute}=\"")).and_then(|(_, rest)| rest.split_once('"'));
        value.expect("a drawing has its size").0
    };
    let (width, height) = (size("width"), size("height"));
    let element = match head.contains(" viewBox=") {
        true => element.to_owned(),
        false => format!("{head} viewBox=\"0 0 {width} {height}\">{rest}"),
    };
    element.replace(" id=\"", &format!(" id=\"{name}-")).replace("url(#", &format!("url(#{name}-"))
}
