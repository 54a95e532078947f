//! `weact data check`: what training would make of a file.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde_json::{Value, json};
use weact::{
    core::{
        Capability, Trajectory,
        chat::{Chat, ToolProtocol},
        context::Retention,
        sample::{Reason, Rules, Sample, Samples, samples},
        tokenizer::Tokenizer,
        trajectory,
    },
    train::{config, data},
};

use super::{Common, exit::Usage};

/// Counts what each capability would train on, and names rows that would train nothing
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Trajectories or episodes
    file: PathBuf,
    /// A folder with tokenizer and chat template
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Only this one; without it, every one that has a stage
    #[arg(long, value_name = "NAME")]
    capability: Option<Capability>,
    /// Longest sample in tokens
    #[arg(long, value_name = "N", default_value_t = config::Train::default().max_length)]
    max_length: usize,
    /// Longest tool result in tokens; without it they stay whole
    #[arg(long, value_name = "N")]
    clip_tool_result: Option<usize>,
    /// How many of the tool results before a stage stay
    #[arg(long, value_name = "N", default_value_t = Retention::default().keep_tool_result)]
    keep_tool_result: usize,
    /// How tools reach the model: template or text
    #[arg(long, value_name = "PROTOCOL", default_value = "template")]
    tool_protocol: ToolProtocol,
    /// Print the samples of row I, from 1, with the supervised tokens marked
    #[arg(long, value_name = "I")]
    show: Option<usize>,
    /// Rows that would train nothing are no fault
    #[arg(long)]
    allow_empty: bool,
}

/// Exits with 1 if a row would train nothing.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let chat = Chat::open(&args.model, args.tool_protocol)?;
    let rows = trajectory::read(&args.file)?;
    let retention = Retention { keep_tool_result: args.keep_tool_result, clip_tool_result: args.clip_tool_result };
    let rules = Rules { retention, max_length: args.max_length, require_exit: true };
    let in_file: BTreeSet<&Capability> = rows.iter().flat_map(Trajectory::spans).map(|span| &span.capability).collect();
    let checked: Vec<&Capability> = args.capability.as_ref().map_or_else(|| in_file.into_iter().collect(), |one| vec![one]);
    let mut found: Vec<(&Capability, Samples)> = Vec::new();
    for capability in checked {
        found.push((capability, samples(&chat, &rows, capability, rules)?));
    }

    let empty = empty_rows(&rows, &found);
    let shown = args.show.map(|i| show(i, &rows, &found, &chat.tokenizer)).transpose()?;
    let mut text = shown.iter().flatten().map(|(id, _, marked)| format!("== {id}\n{marked}\n")).collect::<String>();
    text += &format!("{} rows, max_length {}\n", rows.len(), args.max_length);
    found.iter().for_each(|(capability, samples)| text += &counts(capability, samples));
    empty.iter().for_each(|(id, why)| text += &format!("row {id:?} would train nothing: {why}\n"));

    let mut summary = json!({
        "rows": rows.len(), "max_length": args.max_length,
        "capabilities": found.iter().map(|(c, samples)| (c.to_string(), counts_json(samples))).collect::<serde_json::Map<_, _>>(),
        "empty_rows": empty.iter().map(|(id, why)| json!({"id": id, "why": why})).collect::<Vec<_>>(),
    });
    if let Some(shown) = shown {
        let sample =
            |(id, capability, text): &(String, String, String)| json!({"id": id, "capability": capability, "text": text});
        summary["show"] = shown.iter().map(sample).collect();
    }
    common.say.result(&text, &summary)?;
    if rows.is_empty() && !args.allow_empty {
        anyhow::bail!("{}: no rows", args.file.display());
    }
    match empty.first() {
        Some((id, why)) if !args.allow_empty => anyhow::bail!(
            "{}: {} of {} rows would train nothing, the first is {id:?}: {why}; mend or remove them, or pass --allow-empty",
            args.file.display(),
            empty.len(),
            rows.len()
        ),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Writes the samples of one capability as parquet, and says what was left out.
pub(super) fn export(args: &Args, out: &Path, common: &Common) -> anyhow::Result<ExitCode> {
    let Some(capability) = &args.capability else {
        return Err(Usage("data export needs --capability NAME: a file holds the samples of one".to_owned()).into());
    };
    if args.show.is_some() {
        return Err(Usage("--show goes with data check".to_owned()).into());
    }
    let chat = Chat::open(&args.model, args.tool_protocol)?;
    let rows = trajectory::read(&args.file)?;
    let retention = Retention { keep_tool_result: args.keep_tool_result, clip_tool_result: args.clip_tool_result };
    let rules = Rules { retention, max_length: args.max_length, require_exit: true };
    let found = [(capability, samples(&chat, &rows, capability, rules)?)];
    let empty = empty_rows(&rows, &found);
    if let Some((id, why)) = empty.first().filter(|_| !args.allow_empty) {
        anyhow::bail!(
            "{}: {} of {} rows would train nothing, the first is {id:?}: {why}; mend or remove them, or pass --allow-empty",
            args.file.display(),
            empty.len(),
            rows.len()
        );
    }
    let [(_, samples)] = &found;
    data::write_parquet(out, &samples.kept)?;
    let text = format!("{}{} samples -> {}", counts(capability, samples), samples.kept.len(), out.display());
    let summary = json!({"out": out, "samples": samples.kept.len(), "rows": rows.len(), "capability": capability,
        "counts": counts_json(samples), "empty_rows": empty.iter().map(|(id, why)| json!({"id": id, "why": why})).collect::<Vec<_>>()});
    common.say.summary(&text, &summary)?;
    Ok(ExitCode::SUCCESS)
}

/// The trajectory of a sample's id, `trajectory id#span index`, or of a whole row's.
fn row_of<'a>(id: &'a str, reason: Option<&Reason>) -> &'a str {
    match reason {
        Some(Reason::NoStage) => id,
        _ => id.rsplit_once('#').map_or(id, |(row, _)| row),
    }
}

/// Rows that would train nothing, with the reason: for a capability that has a stage in the row, or for all that were checked. A
/// stage that the harness ended is no fault of the data: it is counted, and is no reason.
fn empty_rows(rows: &[Trajectory], found: &[(&Capability, Samples)]) -> Vec<(String, String)> {
    let mut trained: BTreeSet<&str> = BTreeSet::new(); // or left out by the rule on exits
    let mut whys: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (capability, samples) in found {
        let kept: BTreeSet<&str> = samples.kept.iter().map(|s| row_of(&s.id, None)).collect();
        for (id, reason) in &samples.dropped {
            let row = row_of(id, Some(reason));
            if *reason == Reason::NoExitCall {
                trained.insert(row);
            } else if *reason != Reason::NoStage && !kept.contains(row) {
                whys.entry(row).or_default().push(format!("{capability}: {reason}"));
            }
        }
        trained.extend(kept);
    }
    rows.iter()
        .filter_map(|row| match whys.get(row.id.as_str()) {
            Some(whys) => Some((row.id.clone(), whys.join(", "))),
            None if trained.contains(row.id.as_str()) => None,
            None => Some((row.id.clone(), Reason::NoStage.to_string().replace("this", "a checked"))),
        })
        .collect()
}

fn n_supervised(samples: &Samples) -> usize {
    samples.kept.iter().map(Sample::n_supervised).sum()
}

fn n_context(samples: &Samples) -> usize {
    samples.kept.iter().map(|s| s.ids.len() - s.n_supervised()).sum()
}

fn longest(samples: &Samples) -> Option<usize> {
    samples.kept.iter().map(|s| s.ids.len()).max()
}

fn counts(capability: &Capability, samples: &Samples) -> String {
    let longest = longest(samples).map_or_else(|| "none".to_owned(), |n| n.to_string());
    let mut text = format!(
        "{capability}: {} samples, {} supervised tokens, {} context tokens, longest {longest}\n",
        samples.kept.len(),
        n_supervised(samples),
        n_context(samples)
    );
    for (reason, n) in samples.dropped_by_reason() {
        text += &format!("{n:>6} dropped: {reason}\n");
    }
    for (id, reason) in samples.dropped.iter().filter(|(_, reason)| *reason != Reason::NoStage) {
        text += &format!("       {id}: {reason}\n");
    }
    let thinned = |count: fn(&Sample) -> usize| samples.kept.iter().map(count).sum::<usize>();
    for (n, what) in [
        (thinned(|s| s.left_out.omitted), "tool results omitted"),
        (thinned(|s| s.left_out.clipped), "tool results clipped"),
        (thinned(|s| s.dropped_exchanges), "exchanges of the history left out"),
    ] {
        if n > 0 {
            text += &format!("{n:>6} {what}\n");
        }
    }
    text
}

fn counts_json(samples: &Samples) -> Value {
    let sum = |count: fn(&Sample) -> usize| samples.kept.iter().map(count).sum::<usize>();
    json!({
        "samples": samples.kept.len(), "supervised_tokens": n_supervised(samples), "context_tokens": n_context(samples),
        "longest": longest(samples), "dropped": samples.dropped.len(), "reasons": samples.dropped_by_reason(),
        "dropped_rows": samples.dropped.iter().map(|(id, why)| json!({"id": id, "why": why.to_string()})).collect::<Vec<_>>(),
        "tool_results_omitted": sum(|s| s.left_out.omitted), "tool_results_clipped": sum(|s| s.left_out.clipped),
        "exchanges_left_out": sum(|s| s.dropped_exchanges),
    })
}

/// Id, capability and marked text of the samples of row `i`, from 1.
fn show(
    i: usize,
    rows: &[Trajectory],
    found: &[(&Capability, Samples)],
    tokenizer: &Tokenizer,
) -> anyhow::Result<Vec<(String, String, String)>> {
    let row = i.checked_sub(1).and_then(|i| rows.get(i));
    let row = row.ok_or_else(|| Usage(format!("--show {i}: the file has the rows 1 to {}", rows.len())))?;
    let marks = if io::stdout().is_terminal() { ["\u{1b}[7m", "\u{1b}[0m"] } else { ["[[", "]]"] };
    let mut shown = Vec::new();
    for (capability, samples) in found {
        for sample in samples.kept.iter().filter(|s| row_of(&s.id, None) == row.id) {
            shown.push((sample.id.clone(), capability.to_string(), marked(sample, tokenizer, marks)?));
        }
    }
    Ok(shown)
}

/// A sample's text with its supervised tokens between two marks, decoded run by run of equal mask.
fn marked(sample: &Sample, tokenizer: &Tokenizer, [on, off]: [&str; 2]) -> anyhow::Result<String> {
    let mut text = String::new();
    let mut start = 0;
    for run in sample.mask.chunk_by(|a, b| a == b) {
        let decoded = tokenizer.decode(&sample.ids[start..start + run.len()])?;
        // Pages may hold escape sequences, which a terminal would obey.
        let visible = decoded.replace('\u{1b}', "\u{241b}");
        text += &if run[0] { format!("{on}{visible}{off}") } else { visible };
        start += run.len();
    }
    Ok(text)
}
