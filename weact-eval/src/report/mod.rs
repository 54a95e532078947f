//! Reports: tables, figures and one page, as pure functions of what is given to them. Nothing here reads a clock, a file or a random number.

mod table;
mod figure;
mod page;
pub mod paper;
mod evaluation;

use std::{collections::BTreeSet, path::Path};

use weact_core::io::atomic;

pub use evaluation::{evaluation, table1, table6};
pub use figure::{Bar, Drawing, Figure, Group, Point, Series};
pub use table::{Cell, Emphasis, Format, Table};

use crate::{Error, Result};

/// A report: what was run, and what came of it.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Its title.
    pub title: String,
    /// Remarks, one a paragraph.
    pub notes: Vec<String>,
    /// What it was made of, by name: configuration, seeds, digests, graders.
    pub provenance: Vec<(String, String)>,
    /// In the order in which they are shown.
    pub tables: Vec<Table>,
    /// In the order in which they are shown.
    pub figures: Vec<Figure>,
}

impl Report {
    /// Writes `report.html`, `report.md`, `tables/NAME.{csv,tex,md}` and `figures/NAME.{svg,png,csv,json}` into `dir`. The same report gives the
    /// same bytes.
    ///
    /// # Errors
    /// If a file can't be written, a figure can't be drawn, or a name of a table or a figure makes no file of its own.
    pub fn write(&self, dir: &Path) -> Result<()> {
        own_files("table", self.tables.iter().map(|table| &table.name))?;
        own_files("figure", self.figures.iter().map(|figure| &figure.name))?;
        let make = |part: &str| {
            let path = dir.join(part);
            std::fs::create_dir_all(&path).map_err(|e| weact_core::Error::io("can't make", &path, e)).map(|()| path)
        };
        let (tables, figures) = (make("tables")?, make("figures")?);
        for table in &self.tables {
            for (format, extension) in [(Format::Csv, "csv"), (Format::Latex, "tex"), (Format::Markdown, "md")] {
                atomic::write_text(&tables.join(format!("{}.{extension}", table.name)), &table.render(format))?;
            }
        }
        let mut drawn = Vec::new();
        for figure in &self.figures {
            let svg = figure.svg()?;
            let file = |extension: &str| figures.join(format!("{}.{extension}", figure.name));
            atomic::write_text(&file("svg"), &svg)?;
            let png = figure.png()?;
            atomic::write(&file("png"), |out| std::io::Write::write_all(out, &png))?;
            atomic::write_text(&file("csv"), &figure.data().render(Format::Csv))?;
            let json = serde_json::to_string_pretty(&figure.drawing).expect("numbers and names") + "\n";
            atomic::write_text(&file("json"), &json)?;
            drawn.push(svg);
        }
        atomic::write_text(&dir.join("report.md"), &self.markdown())?;
        Ok(atomic::write_text(&dir.join("report.html"), &page::html(self, &drawn))?)
    }

    fn markdown(&self) -> String {
        let mut text = format!("# {}\n", table::markdown(&self.title));
        for note in &self.notes {
            text += &format!("\n{}\n", table::markdown(note));
        }
        for table in &self.tables {
            text += &format!(
                "\n## {}\n\n{}\n{}",
                table::markdown(&table.title),
                table.render(Format::Markdown),
                caption(&table.caption)
            );
        }
        for figure in &self.figures {
            let (title, name) = (table::markdown(&figure.title), &figure.name);
            text += &format!("\n## {title}\n\n![{title}](figures/{name}.svg)\n{}", caption(&figure.full_caption()));
        }
        text += "\n## What it was made of\n\n";
        for (name, value) in &self.provenance {
            text += &format!("- {}: {}\n", table::markdown(name), table::markdown(value));
        }
        text
    }
}

/// Names go into paths, ids and links: letters, digits and `-_.%`, each once.
fn own_files<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> Result<()> {
    let mut seen = BTreeSet::new();
    for name in names {
        let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.%".contains(c));
        if name.is_empty() || !is_plain {
            return Err(Error::Other(format!("{what} {name:?}: use letters, digits and -_.% in its name")));
        }
        if !seen.insert(name) {
            return Err(Error::Other(format!("{what} {name:?}: two have this name")));
        }
    }
    Ok(())
}

fn caption(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("\n{}\n", table::markdown(text)) }
}

#[cfg(test)]
mod tests;
