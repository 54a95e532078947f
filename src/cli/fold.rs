//! `weact fold`: an adapter and its checkpoint as one checkpoint.

use std::{
    fs,
    path::{Component, Path, PathBuf},
    process::ExitCode,
};

use burn::tensor::{DType, Device};
use serde_json::{Value, json};
use weact::{
    core::{
        Adapter, Error,
        chat::ToolProtocol,
        io::{
            atomic,
            checkpoint::Checkpoint,
            fold::{self, Folded},
        },
    },
    diagnostics::logit_gap::{LogitGap, Recorded, logit_gap, record},
};

use super::{Common, exit::Usage, model, rows};

/// Folds an adapter into its checkpoint, and measures what rounding did
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A checkpoint's folder in Hugging Face's form; it is only read
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The adapter
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// The folder of the result
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Element type of the weights written: f32, bf16, f16, or same (each tensor keeps its own)
    #[arg(long, default_value = "same", value_name = "TYPE")]
    dtype: Written,
    /// Rows to measure the gap on, as `weact score` reads them; without it, one row of ids drawn by --seed
    #[arg(long, value_name = "FILE.jsonl")]
    input: Option<PathBuf>,
    /// How tools reach the model in rows with messages: template or text
    #[arg(long, default_value = "template", value_name = "PROTOCOL")]
    tool_protocol: ToolProtocol,
    /// Do not measure the gap, which loads the model twice, in f32
    #[arg(long, conflicts_with = "input")]
    no_gap: bool,
    /// Replace what an earlier fold wrote
    #[arg(long)]
    overwrite: bool,
    /// Use the embedding as the output head where the checkpoint has none
    #[arg(long)]
    tie_embeddings: bool,
}

/// The element type of the weights written.
#[derive(Clone, Copy, Debug)]
enum Written {
    Same,
    All(DType),
}

impl std::str::FromStr for Written {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "same" => Ok(Self::Same),
            _ => model::dtype(name).map(Self::All).map_err(|known| format!("{known}, or same")),
        }
    }
}

/// What was folded, and what it cost: beside the result.
const RECORD: &str = "fold.json";
/// Ids drawn where no rows are given.
const DRAWN_IDS: usize = 64;

/// Checks everything, folds beside the output folder, measures what was written, and moves it into place.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    check_out(args)?;
    let (_, device) = common.device.open()?;
    let checkpoint = Checkpoint::open(&args.model, args.tie_embeddings)?;
    let rows = (!args.no_gap).then(|| rows_of(args, common, &checkpoint)).transpose()?;
    let adapter = model::adapter(&args.adapter, &checkpoint, common.say)?;
    let before = rows.as_ref().map(|rows| run_through(&checkpoint, Some(&adapter), rows, &device)).transpose()?;
    let dtype = match args.dtype {
        Written::Same => None,
        Written::All(dtype) => Some(dtype),
    };
    let mut done = None;
    atomic::write_folder(&args.out, |folder| -> anyhow::Result<()> {
        let folded = fold::fold(&checkpoint, &adapter, dtype, folder)?;
        let result = Checkpoint::open(folder, false)?;
        let gap = match (&rows, &before) {
            (Some(rows), Some(before)) => Some(gap(before, &run_through(&result, None, rows, &device)?)?),
            _ => None,
        };
        let record = json!({
            "base": checkpoint.digest(), "adapter": adapter.digest(), "result": result.digest(), "dtype": name_of(dtype),
            "folded": folded.n_folded, "unchanged": folded.n_unchanged, "untied": folded.untied, "bytes": folded.bytes,
            "copied": folded.copied, "left_out": folded.left_out, "gap": gap.map(|gap| gap_json(&gap, rows.as_deref())),
            "weact": env!("CARGO_PKG_VERSION"),
        });
        atomic::write_text(&folder.join(RECORD), &format!("{record:#}\n"))?;
        done = Some((folded, gap, record));
        Ok(())
    })?;
    let (folded, gap, mut summary) = done.expect("the folder was filled");
    if folded.n_unchanged > 0 {
        let why = "their update is zero, or too small for the element type";
        common.say.warn(&format!("{} of {} tensors are the checkpoint's own: {why}", folded.n_unchanged, folded.n_folded));
    }
    summary["out"] = json!(args.out);
    common.say.summary(&text(args, &folded, gap.as_ref()), &summary)?;
    Ok(ExitCode::SUCCESS)
}

/// The output folder is new, empty, or an earlier fold's that may be replaced; and it is apart from what is read.
fn check_out(args: &Args) -> anyhow::Result<()> {
    let out = &args.out;
    let refuse = |why: String| Err(Usage(format!("{} {why}", out.display())).into());
    if out.file_name().is_none() {
        return refuse("has no name of its own: name a folder to make".to_owned());
    }
    let target = resolved(out);
    for source in [&args.model, &args.adapter] {
        let source_at = resolved(source);
        // The adapter may lie in the model's folder or beside it; the result goes into neither, and replaces neither.
        if target.starts_with(&source_at) || source_at.starts_with(&target) {
            return refuse(format!("lies in {} or around it, which is only read: choose another out", source.display()));
        }
    }
    if !out.exists() {
        return Ok(());
    }
    let unreadable = |e| Error::io("can't read", out, e);
    let names: Vec<_> =
        fs::read_dir(out).map_err(unreadable)?.map(|e| e.map(|e| e.file_name())).collect::<Result<_, _>>().map_err(unreadable)?;
    if names.iter().all(|name| atomic::is_leftover(name)) {
        return Ok(());
    }
    if !args.overwrite {
        return refuse("is not empty: --overwrite replaces what an earlier fold wrote".to_owned());
    }
    if !out.join(RECORD).exists() {
        return refuse(format!("holds files but no {RECORD}: no fold wrote it"));
    }
    Ok(())
}

/// The path with its links followed as far as it exists; the folders after that would be made, and have none.
fn resolved(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = absolute.ancestors().find_map(|part| Some((part, fs::canonicalize(part).ok()?)));
    let Some((part, mut real)) = there else { return absolute };
    for step in absolute.strip_prefix(part).expect("an ancestor is a beginning").components() {
        match step {
            Component::ParentDir => drop(real.pop()),
            step => real.push(step),
        }
    }
    // The way back may have led to what exists.
    fs::canonicalize(&real).unwrap_or(real)
}

/// The rows of `--input`, or one of drawn ids.
fn rows_of(args: &Args, common: &Common, checkpoint: &Checkpoint) -> anyhow::Result<Vec<Vec<u32>>> {
    let vocab_size = checkpoint.config.vocab_size;
    let Some(file) = &args.input else {
        let len = DRAWN_IDS.min(checkpoint.config.max_positions);
        return Ok(vec![drawn(common.seed.unwrap_or(0), len, vocab_size)]);
    };
    let rows = rows::read(file, &args.model, args.tool_protocol, vocab_size)?;
    if rows.is_empty() {
        return Err(Error::file(file, "has no rows").into());
    }
    Ok(rows.into_iter().map(|row| row.ids).collect())
}

/// `n` ids by SplitMix64 (<https://doi.org/10.1145/2714064.2660195>): the same on every machine.
fn drawn(seed: u64, n: usize, vocab_size: usize) -> Vec<u32> {
    let id = |i: u64| {
        let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % vocab_size as u64) as u32
    };
    (0..n as u64).map(id).collect()
}

/// What a checkpoint, with or without an adapter, makes of the rows in f32. The weights are gone when this returns.
fn run_through(
    checkpoint: &Checkpoint,
    adapter: Option<&Adapter>,
    rows: &[Vec<u32>],
    device: &Device,
) -> anyhow::Result<Recorded> {
    let backbone = checkpoint.load(device, DType::F32)?;
    let factors = adapter.map(|adapter| adapter.to_device(&backbone.config, device)).transpose()?;
    Ok(record(&backbone, factors.as_ref(), rows)?)
}

fn gap(before: &Recorded, after: &Recorded) -> anyhow::Result<LogitGap> {
    let gap = logit_gap(before, after);
    if !gap.max_difference.is_finite() {
        let place = " before or after folding".to_owned();
        return Err(Error::NonFinite { what: "logits", place, dtype: "f32".to_owned() }.into());
    }
    Ok(gap)
}

fn gap_json(gap: &LogitGap, rows: Option<&[Vec<u32>]>) -> Value {
    json!({
        "rows": rows.map(<[Vec<u32>]>::len), "n_tokens": gap.n_positions, "max_logit_difference": gap.max_difference,
        "top1_agreement": gap.top1_agreement,
    })
}

fn name_of(dtype: Option<DType>) -> String {
    dtype.map_or_else(|| "same".to_owned(), |dtype| format!("{dtype:?}").to_lowercase())
}

fn text(args: &Args, folded: &Folded, gap: Option<&LogitGap>) -> String {
    let gap = gap.map_or_else(
        || "gap not measured".to_owned(),
        |gap| {
            let agreement = gap.top1_agreement.map_or_else(|| "unknown".to_owned(), |share| format!("{:.2}%", 100.0 * share));
            let (n, difference) = (gap.n_positions, gap.max_difference);
            format!("over {n} tokens: max logit difference {difference:.3e}, top-1 agreement {agreement}")
        },
    );
    let untied = if folded.untied { ", the head untied from the embedding" } else { "" };
    let left_out = match folded.left_out.as_slice() {
        [] => String::new(),
        names => format!("\nnot copied: {}", names.join(", ")),
    };
    let (n, bytes, out) = (folded.n_folded, folded.bytes, args.out.display());
    format!("{n} tensors folded, {bytes} bytes of weights{untied} -> {out}\n{gap}{left_out}")
}
