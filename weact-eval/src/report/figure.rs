//! Figures: our own types, so that what draws them can be replaced; the data stands beside each.

use kuva::{
    plot::{BarPlot, BoxPlot, EcdfPlot, Heatmap, LegendPosition, ScatterPlot},
    render::{layout::Layout, plots::Plot},
};
use serde::Serialize;

use super::table::{Cell, Table};
use crate::{Error, Result};

/// Colours that are told apart with any kind of colour vision (Okabe and Ito), then darker ones.
const COLOURS: [&str; 12] = [
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#555555", "#004B75", "#8F6200", "#006147",
    "#A3A3A3",
];

/// A figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The name of its files.
    pub name: String,
    /// Above it.
    pub title: String,
    /// Below it.
    pub caption: String,
    /// The horizontal axis, with its unit.
    pub x_label: String,
    /// The vertical axis, with its unit.
    pub y_label: String,
    /// What is drawn.
    pub drawing: Drawing,
}

/// What is drawn.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Drawing {
    /// Bars side by side, one of each series a group.
    Bars {
        /// Their names.
        series: Vec<String>,
        /// Groups of bars.
        groups: Vec<Group>,
    },
    /// Bars on top of each other.
    Stacked {
        /// Their names.
        series: Vec<String>,
        /// Stacks.
        groups: Vec<Group>,
    },
    /// Points.
    Scatter {
        /// Series of points.
        series: Vec<Series>,
    },
    /// Distribution functions, the horizontal axis logarithmic.
    Ecdf {
        /// Values by name.
        series: Vec<(String, Vec<f64>)>,
    },
    /// A matrix.
    Heat {
        /// Names of the rows.
        rows: Vec<String>,
        /// Names of the columns.
        columns: Vec<String>,
        /// By row and column.
        values: Vec<Vec<f64>>,
    },
    /// Quartiles and outliers.
    Boxes {
        /// Values by name.
        series: Vec<(String, Vec<f64>)>,
    },
}

/// A group of bars.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Below it.
    pub name: String,
    /// One for each series.
    pub bars: Vec<Bar>,
}

/// A bar.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bar {
    /// Its height; an unknown one is not drawn.
    pub value: Option<f64>,
    /// How far its whisker reaches to either side.
    pub error: Option<f64>,
}

/// Points of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// The points.
    pub points: Vec<Point>,
}

/// A point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Along.
    pub x: f64,
    /// Up.
    pub y: f64,
    /// In the data beside the figure.
    pub name: String,
}

impl Figure {
    /// As SVG, for a light ground.
    pub fn svg(&self) -> String {
        let (plots, layout) = self.plots();
        always_the_same(&kuva::render_to_svg(plots, layout))
    }

    /// As PNG, at twice the size.
    ///
    /// # Errors
    /// If it can't be drawn.
    pub fn png(&self) -> Result<Vec<u8>> {
        let (plots, layout) = self.plots();
        kuva::render_to_png(plots, layout, 2.0).map_err(|why| Error::Other(format!("figure {}: {why}", self.name)))
    }

    /// The data as a table, one value a row.
    pub fn data(&self) -> Table {
        let number = |x: f64| Cell::of(format!("{x}"));
        let maybe = |x: Option<f64>| x.map_or_else(Cell::unknown, number);
        let (header, rows): (Vec<&str>, Vec<Vec<Cell>>) = match &self.drawing {
            Drawing::Bars { series, groups } | Drawing::Stacked { series, groups } => {
                let rows = groups.iter().flat_map(|group| {
                    let bars = series.iter().zip(&group.bars);
                    bars.map(|(name, bar)| vec![Cell::of(&group.name), Cell::of(name), maybe(bar.value), maybe(bar.error)])
                });
                (vec!["group", "series", "value", "error"], rows.collect())
            }
            Drawing::Scatter { series } => {
                let rows = series.iter().flat_map(|series| {
                    let points = series.points.iter();
                    points.map(|p| vec![Cell::of(&series.name), Cell::of(&p.name), number(p.x), number(p.y)])
                });
                (vec!["series", "name", "x", "y"], rows.collect())
            }
            Drawing::Ecdf { series } | Drawing::Boxes { series } => {
                let rows = series.iter().flat_map(|(name, values)| values.iter().map(move |x| vec![Cell::of(name), number(*x)]));
                (vec!["series", "value"], rows.collect())
            }
            Drawing::Heat { rows, columns, values } => {
                let cells = rows.iter().zip(values).flat_map(|(row, values)| {
                    columns.iter().zip(values).map(move |(column, x)| vec![Cell::of(row), Cell::of(column), number(*x)])
                });
                (vec!["row", "column", "value"], cells.collect())
            }
        };
        Table {
            name: self.name.clone(),
            title: self.title.clone(),
            caption: String::new(),
            header: header.into_iter().map(str::to_owned).collect(),
            rows,
        }
    }

    fn plots(&self) -> (Vec<Plot>, Layout) {
        let plots = match &self.drawing {
            Drawing::Bars { series, groups } => vec![Plot::Bar(bars(series, groups))],
            Drawing::Stacked { series, groups } => vec![Plot::Bar(bars(series, groups).with_stacked())],
            Drawing::Scatter { series } => {
                series.iter().zip(COLOURS.iter().cycle()).map(|(s, colour)| Plot::Scatter(scatter(s, colour))).collect()
            }
            Drawing::Ecdf { series } => {
                let plot = series.iter().zip(COLOURS.iter().cycle()).fold(EcdfPlot::new(), |plot, ((name, values), colour)| {
                    plot.with_data_colored(name.as_str(), values.iter().copied(), *colour)
                });
                vec![Plot::Ecdf(plot.with_legend(""))]
            }
            Drawing::Heat { rows, columns, values } => {
                let plot = Heatmap::new().with_data(values.iter().map(|row| row.iter().copied()));
                vec![Plot::Heatmap(plot.with_labels(rows.clone(), columns.clone()).with_values())]
            }
            Drawing::Boxes { series } => {
                let plot = series.iter().fold(BoxPlot::new().with_color(COLOURS[0]), |plot, (name, values)| {
                    plot.with_group(name.as_str(), values.iter().copied())
                });
                vec![Plot::Box(plot)]
            }
        };
        let mut layout = Layout::auto_from_plots(&plots)
            .with_title(self.title.as_str())
            .with_x_label(self.x_label.as_str())
            .with_y_label(self.y_label.as_str())
            .with_legend_position(LegendPosition::OutsideBottomColumns)
            .with_width(900.0);
        if let Drawing::Heat { rows, columns, .. } = &self.drawing {
            layout = layout.with_x_categories(columns.clone()).with_y_categories(rows.iter().rev().cloned().collect());
        }
        if matches!(self.drawing, Drawing::Ecdf { .. }) {
            layout = layout.with_log_x();
        }
        (plots, layout)
    }
}

fn bars(series: &[String], groups: &[Group]) -> BarPlot {
    let mut plot = BarPlot::new();
    for group in groups {
        let values = group.bars.iter().zip(COLOURS.iter().cycle()).map(|(bar, colour)| (bar.value.unwrap_or(0.0), *colour));
        plot = plot.with_group(group.name.as_str(), values);
    }
    let errors: Vec<f64> = groups.iter().flat_map(|group| &group.bars).map(|bar| bar.error.unwrap_or(0.0)).collect();
    if errors.iter().any(|error| *error > 0.0) {
        plot = plot.with_error(errors);
    }
    // Without groups there is nothing that a legend could explain.
    if groups.is_empty() { plot } else { plot.with_legend(series.iter().map(String::as_str).collect()) }
}

fn scatter(series: &Series, colour: &str) -> ScatterPlot {
    ScatterPlot::new()
        .with_data(series.points.iter().map(|p| (p.x, p.y)))
        .with_color(colour)
        .with_size(6.0)
        .with_legend(series.name.as_str())
}

/// The drawing library writes its version into the file, and numbers its ids through the life of the process: neither makes another figure.
fn always_the_same(svg: &str) -> String {
    const ID: &str = "kuva-clip-";
    let mut out = String::with_capacity(svg.len());
    let mut rest = svg;
    while let Some((before, after)) = rest.split_once("<!--") {
        out.push_str(before);
        rest = after.split_once("-->").map_or("", |(_, after)| after);
    }
    out.push_str(rest);
    let mut numbers: Vec<&str> = Vec::new();
    let mut parts = out.split(ID);
    let mut renumbered = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let (number, after) = part.split_at(end);
        let at = numbers.iter().position(|known| *known == number).unwrap_or_else(|| {
            numbers.push(number);
            numbers.len() - 1
        });
        renumbered += &format!("clip-{at}{after}");
    }
    renumbered
}
