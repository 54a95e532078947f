//! One table in every form.

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;

/// How a table is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For a terminal.
    Terminal,
    /// A pipe table.
    Markdown,
    /// Plain values.
    Csv,
    /// A `tabular`.
    Latex,
}

/// What a cell's rank in its column is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Emphasis {
    /// Nothing special.
    #[default]
    None,
    /// The best: bold.
    Best,
    /// The second: underlined.
    Second,
}

/// A cell. An unknown value is shown as a dash, and empty in CSV.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// What it says; `None` is unknown.
    pub text: Option<String>,
    /// How it stands out.
    pub emphasis: Emphasis,
}

/// A table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The name of its files.
    pub name: String,
    /// Above it.
    pub title: String,
    /// Below it.
    pub caption: String,
    /// The columns' names.
    pub header: Vec<String>,
    /// As long as the header.
    pub rows: Vec<Vec<Cell>>,
}

/// What stands for an unknown value.
const UNKNOWN: &str = "—";

impl Cell {
    /// A known value.
    pub fn of(text: impl Into<String>) -> Self {
        Self { text: Some(text.into()), emphasis: Emphasis::None }
    }

    /// An unknown value.
    pub fn unknown() -> Self {
        Self::default()
    }

    /// `value` with so many decimals, or unknown.
    pub fn number(value: Option<f64>, decimals: usize) -> Self {
        Self { text: value.map(|x| format!("{x:.decimals$}")), emphasis: Emphasis::None }
    }

    /// A share in percent with its standard error, as `35.92±4.73`; unknown where either is.
    pub fn percent(share: Option<f64>, se: Option<f64>) -> Self {
        let text = share.zip(se).map(|(share, se)| format!("{:.2}±{:.2}", 100.0 * share, 100.0 * se));
        Self { text, emphasis: Emphasis::None }
    }
}

impl Table {
    /// Marks the best and the second best of each column after the first, by the number with which the cell begins.
    #[must_use]
    pub fn ranked(mut self) -> Self {
        for column in 1..self.header.len() {
            let value = |row: &Vec<Cell>| -> Option<f64> { row[column].text.as_deref().and_then(leading_number) };
            let mut values: Vec<f64> = self.rows.iter().filter_map(value).collect();
            values.sort_by(|a, b| b.total_cmp(a));
            values.dedup();
            if values.len() < 2 {
                continue;
            }
            for row in &mut self.rows {
                row[column].emphasis = match row[column].text.as_deref().and_then(leading_number) {
                    Some(x) if x == values[0] => Emphasis::Best,
                    Some(x) if x == values[1] => Emphasis::Second,
                    _ => Emphasis::None,
                };
            }
        }
        self
    }

    /// The table in a format, with a line break at its end.
    pub fn render(&self, format: Format) -> String {
        match format {
            Format::Terminal => self.terminal(),
            Format::Markdown => self.pipes(),
            Format::Csv => self.csv(),
            Format::Latex => self.latex(),
        }
    }

    fn terminal(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(UTF8_HORIZONTAL_ONLY).set_header(self.header.iter().map(|name| printable(name)));
        for row in &self.rows {
            let mark = |cell: &Cell| match cell.emphasis {
                Emphasis::Best => format!("{}*", shown(cell)),
                _ => shown(cell).to_owned(),
            };
            table.add_row(row.iter().map(|cell| printable(&mark(cell))));
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
        format!("{table}\n")
    }

    fn pipes(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let mut text = line(&self.header.iter().map(|name| markdown(name)).collect::<Vec<_>>());
        let rules: Vec<String> = (0..self.header.len()).map(|i| if i == 0 { "---" } else { "---:" }.to_owned()).collect();
        text += &line(&rules);
        for row in &self.rows {
            let cell = |cell: &Cell| match (markdown(shown(cell)), cell.emphasis) {
                (text, Emphasis::Best) => format!("**{text}**"),
                (text, Emphasis::Second) => format!("<u>{text}</u>"),
                (text, Emphasis::None) => text,
            };
            text += &line(&row.iter().map(cell).collect::<Vec<_>>());
        }
        text
    }

    fn csv(&self) -> String {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(self.header.iter().map(|name| inert(name))).expect("memory takes it");
        for row in &self.rows {
            writer
                .write_record(row.iter().map(|cell| inert(cell.text.as_deref().unwrap_or_default())))
                .expect("rows are as long as the header");
        }
        String::from_utf8(writer.into_inner().expect("memory takes it")).expect("cells are text")
    }

    fn latex(&self) -> String {
        let columns = format!("l{}", "r".repeat(self.header.len().saturating_sub(1)));
        let line = |cells: Vec<String>| format!("{} \\\\\n", cells.join(" & "));
        let mut text = format!("% {}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n", self.title.replace(['\n', '\r'], " "));
        text += &line(self.header.iter().map(|name| tex(name)).collect());
        text += "\\midrule\n";
        for row in &self.rows {
            let cell = |cell: &Cell| match (tex(shown(cell)), cell.emphasis) {
                (text, Emphasis::Best) => format!("\\textbf{{{text}}}"),
                (text, Emphasis::Second) => format!("\\underline{{{text}}}"),
                (text, Emphasis::None) => text,
            };
            text += &line(row.iter().map(cell).collect());
        }
        text + "\\bottomrule\n\\end{tabular}\n"
    }
}

fn shown(cell: &Cell) -> &str {
    cell.text.as_deref().unwrap_or(UNKNOWN)
}

fn leading_number(text: &str) -> Option<f64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && !"+-.".contains(c)).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// Without control characters: a name must not steer the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A spreadsheet takes what begins with these for a formula. What is nothing but a number with a sign, an error or a percent sign is none.
fn inert(text: &str) -> String {
    let is_number = leading_number(text).is_some() && text.chars().skip(1).all(|c| c.is_ascii_digit() || ".± %".contains(c));
    let risky = text.starts_with(['=', '@', '+', '-', '＝', '＠', '＋', '－', '\t', '\r', '\n']) && !is_number;
    if risky { format!("'{text}") } else { text.to_owned() }
}

/// Text that Markdown and the HTML in it show as it is, on one line.
pub(super) fn markdown(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\\' | '|' | '*' | '_' | '`' | '[' | ']' | '#' => out.extend(['\\', c]),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

fn tex(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\textbackslash{}"),
            '^' => out.push_str("\\textasciicircum{}"),
            '~' => out.push_str("\\textasciitilde{}"),
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => out.extend(['\\', c]),
            '±' => out.push_str("$\\pm$"),
            'Δ' => out.push_str("$\\Delta$"),
            '×' => out.push_str("$\\times$"),
            '→' => out.push_str("$\\to$"),
            '<' => out.push_str("\\textless{}"),
            '>' => out.push_str("\\textgreater{}"),
            '|' => out.push_str("\\textbar{}"),
            '—' => out.push_str("---"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
