//! Figures: our own types, so that what draws them can be replaced; the data stands beside each.

use std::sync::Arc;

use kuva::{
    PngBackend,
    backend::svg::SvgBackend,
    plot::{
        BarPlot, BoxPlot, ColorMap, EcdfPlot, Heatmap, LegendPosition, ScatterPlot,
        legend::{LegendEntry, LegendShape},
    },
    render::{
        layout::Layout,
        plots::Plot,
        render::{Primitive, Scene, render_multiple},
    },
};
use serde::Serialize;

use super::table::{Cell, Table};
use crate::{Error, Result};

/// Colours that are told apart with any kind of colour vision (Okabe and Ito), then darker ones.
const COLOURS: [&str; 12] = [
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#555555", "#004B75", "#8F6200", "#006147",
    "#A3A3A3",
];

/// Numbers beyond this are not drawn: an axis that reaches them has no finite length.
const LARGEST: f64 = 1e300;

/// Heat maps with more columns have no numbers in their cells: they would lie over each other.
const WRITTEN_COLUMNS: usize = 16;

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
        /// By row and column; an unknown one is grey.
        values: Vec<Vec<Option<f64>>>,
    },
    /// Quartiles, whiskers to the last value within one and a half times their distance, and a mark at the mean. What lies beyond the
    /// whiskers is in the data beside the figure alone.
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
    /// How far its whisker reaches to either side; an unknown one is not drawn.
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
    ///
    /// # Errors
    /// If a number is not finite or too large to draw.
    pub fn svg(&self) -> Result<String> {
        Ok(always_the_same(&SvgBackend.render_scene(&self.scene()?)))
    }

    /// As PNG, at twice the size.
    ///
    /// # Errors
    /// As [`Figure::svg`], or if it can't be drawn.
    pub fn png(&self) -> Result<Vec<u8>> {
        let png = PngBackend::new().with_scale(2.0).render_scene(&self.scene()?);
        png.map(|png| without_text(&png)).map_err(|why| Error::Other(format!("figure {}: {why}", self.name)))
    }

    /// The caption, and which bars are missing from the drawing: one that is not there looks like a zero.
    pub(super) fn full_caption(&self) -> String {
        let (Drawing::Bars { series, groups } | Drawing::Stacked { series, groups }) = &self.drawing else {
            return self.caption.clone();
        };
        let unknown = groups.iter().flat_map(|group| {
            let bars = series.iter().zip(&group.bars).filter(|(_, bar)| bar.value.is_none());
            bars.map(|(name, _)| format!("{name} in {}", group.name))
        });
        match unknown.collect::<Vec<_>>().join(", ") {
            names if names.is_empty() => self.caption.clone(),
            names => format!("{} Unknown and not drawn: {names}.", self.caption).trim_start().to_owned(),
        }
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
                    columns.iter().zip(values).map(move |(column, x)| vec![Cell::of(row), Cell::of(column), maybe(*x)])
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

    fn scene(&self) -> Result<Scene> {
        if let Some(x) = self.numbers().into_iter().find(|x| !x.is_finite() || x.abs() > LARGEST) {
            return Err(Error::Other(format!("figure {}: can't draw {x:e}: numbers go to {LARGEST:e}", self.name)));
        }
        let (plots, layout) = self.plots();
        let mut scene = render_multiple(plots, layout);
        // The whiskers of unknown errors, and what is written in unknown cells.
        scene.elements.retain(|element| match element {
            Primitive::Line { x1, y1, x2, y2, .. } => [x1, y1, x2, y2].into_iter().all(|x| x.is_finite()),
            Primitive::Text { content, .. } => content != "NaN",
            _ => true,
        });
        Ok(scene)
    }

    fn numbers(&self) -> Vec<f64> {
        match &self.drawing {
            Drawing::Bars { groups, .. } | Drawing::Stacked { groups, .. } => {
                groups.iter().flat_map(|group| &group.bars).flat_map(|bar| bar.value.into_iter().chain(bar.error)).collect()
            }
            Drawing::Scatter { series } => series.iter().flat_map(|s| &s.points).flat_map(|p| [p.x, p.y]).collect(),
            Drawing::Ecdf { series } | Drawing::Boxes { series } => series.iter().flat_map(|(_, x)| x).copied().collect(),
            Drawing::Heat { values, .. } => values.iter().flatten().copied().flatten().collect(),
        }
    }

    fn plots(&self) -> (Vec<Plot>, Layout) {
        let mut plots = match &self.drawing {
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
                // The first row is drawn at the bottom, as are the first names.
                let plot = Heatmap::new().with_data(values.iter().rev().map(|row| row.iter().map(|x| x.unwrap_or(f64::NAN))));
                let plot = plot.with_labels(rows.iter().rev().cloned().collect(), columns.clone());
                let plot = plot.with_color_map(ColorMap::Custom(Arc::new(pale)));
                vec![Plot::Heatmap(if columns.len() > WRITTEN_COLUMNS { plot } else { plot.with_values() })]
            }
            Drawing::Boxes { series } => {
                let plot = series.iter().fold(BoxPlot::new().with_color(COLOURS[0]), |plot, (name, values)| {
                    plot.with_group(name.as_str(), values.iter().copied())
                });
                let mean = |(i, (_, x)): (usize, &(String, Vec<f64>))| {
                    (!x.is_empty()).then(|| (i as f64 + 1.0, x.iter().sum::<f64>() / x.len() as f64)) // boxes stand at 1, 2, ..
                };
                let means = series.iter().enumerate().filter_map(mean);
                let means = ScatterPlot::new().with_data(means).with_color(COLOURS[1]).with_size(5.0);
                vec![Plot::Box(plot), Plot::Scatter(means)]
            }
        };
        let mut layout = Layout::auto_from_plots(&plots)
            .with_title(self.title.as_str())
            .with_x_label(self.x_label.as_str())
            .with_y_label(self.y_label.as_str())
            .with_legend_position(LegendPosition::OutsideBottomColumns)
            .with_legend_box(false)
            .with_width(900.0);
        let legend = self.legend();
        if !legend.is_empty() {
            // By itself the layout reserves one row, however many there are.
            layout = layout.with_legend_entries(legend);
        }
        if let Drawing::Heat { rows, columns, .. } = &self.drawing {
            layout = layout.with_x_categories(columns.clone()).with_y_categories(rows.iter().rev().cloned().collect());
        }
        // A logarithmic axis of nothing has no ends.
        if matches!(&self.drawing, Drawing::Ecdf { series } if series.iter().any(|(_, values)| !values.is_empty())) {
            layout = layout.with_log_x();
        }
        // After the layout, which takes unknown errors as none.
        if let (Drawing::Bars { groups, .. } | Drawing::Stacked { groups, .. }, [Plot::Bar(plot)]) =
            (&self.drawing, &mut plots[..])
        {
            let bars = groups.iter().flat_map(|group| &group.bars);
            let whisker = |bar: &Bar| bar.value.and(bar.error).unwrap_or(f64::NAN);
            plot.errors = Some(bars.map(|bar| (whisker(bar), whisker(bar))).collect());
        }
        (plots, layout)
    }

    fn legend(&self) -> Vec<LegendEntry> {
        let (names, shape): (Vec<&String>, _) = match &self.drawing {
            Drawing::Bars { groups, .. } | Drawing::Stacked { groups, .. } if groups.is_empty() => return Vec::new(),
            Drawing::Bars { series, .. } | Drawing::Stacked { series, .. } => (series.iter().collect(), LegendShape::Rect),
            Drawing::Scatter { series } => (series.iter().map(|s| &s.name).collect(), LegendShape::Circle),
            Drawing::Ecdf { series } => (series.iter().map(|(name, _)| name).collect(), LegendShape::Line),
            Drawing::Heat { .. } | Drawing::Boxes { .. } => return Vec::new(),
        };
        let entry = |(name, colour): (&String, &&str)| LegendEntry {
            label: name.clone(),
            color: (*colour).to_owned(),
            shape,
            dasharray: None,
        };
        names.into_iter().zip(COLOURS.iter().cycle()).map(entry).collect()
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

/// From nearly white to a middle blue: black numbers can be read on all of it. Grey where the share is no number.
fn pale(share: f64) -> String {
    if share.is_nan() {
        return "rgb(190,190,190)".to_owned();
    }
    let mix = |from: f64, to: f64| (from + (to - from) * share.clamp(0.0, 1.0)).round() as u8;
    format!("rgb({},{},{})", mix(247.0, 86.0), mix(251.0, 180.0), mix(255.0, 233.0))
}

/// A PNG without its text chunks: the drawing library writes its version into one.
fn without_text(png: &[u8]) -> Vec<u8> {
    let (signature, mut rest) = png.split_at(8);
    let mut out = signature.to_vec();
    // A chunk is its length, four letters, so many bytes and a checksum.
    while let Some((length, _)) = rest.split_first_chunk::<4>() {
        let (chunk, after) = rest.split_at(12 + u32::from_be_bytes(*length) as usize);
        if &chunk[4..8] != b"tEXt" {
            out.extend_from_slice(chunk);
        }
        rest = after;
    }
    out
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
    // What XML can't hold, not even escaped.
    renumbered.replace(|c: char| (c.is_control() && !"\t\n\r".contains(c)) || matches!(c, '\u{fffe}' | '\u{ffff}'), " ")
}
