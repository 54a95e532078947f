//! `weact score`: teacher-forced log-likelihoods.

mod by_stage;

use std::{path::PathBuf, process::ExitCode};

use burn::tensor::Tensor;
use serde::Serialize;
use serde_json::{Value, json};
use weact::core::{
    Backbone, Error, Result,
    chat::ToolProtocol,
    io::tensors,
    lora::FactorMap,
    nll::{Targets, per_token},
};

use super::{
    Common, lines,
    model::{self, ModelArgs},
    rows::{self, Row, name},
};

/// Scores recorded tokens: how likely each is after those before it
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The adapter that is active
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// One `{"id", "ids" or "text" or "messages" (and "tools"), "mask"?}` a line; entry i of the mask is about predicting token i
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// One `{"id","n_tokens","nll","top1"}` a line: nats, one value for each token after the first
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Also write each row's logits, `id -> [n, vocab]` in f32
    #[arg(long, value_name = "FILE.safetensors", conflicts_with = "by_stage")]
    logits: Option<PathBuf>,
    /// How tools reach the model in rows with messages: template (the default) or text; by stage, the default is what cards say
    #[arg(long, value_name = "PROTOCOL")]
    tool_protocol: Option<ToolProtocol>,
    #[command(flatten)]
    stages: by_stage::Args,
}

#[derive(Serialize)]
struct Scored {
    id: Value,
    n_tokens: usize,
    nll: Vec<f32>,
    top1: Vec<u8>,
    #[serde(skip)]
    logits: Vec<f32>,
}

/// Padded tokens of one forward pass; a longer row has one of its own.
const BATCH_TOKENS: usize = 2048;
/// Logits held at a time: 128 MiB.
const BLOCK_LOGITS: usize = 1 << 25;

/// Checks all input, then loads the model.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    if args.stages.by_stage {
        return by_stage::run(args, common);
    }
    let (_, device) = common.device.open()?;
    let checkpoint = args.model.open()?;
    let rows = rows::read(&args.input, &args.model.model, args.tool_protocol.unwrap_or_default(), checkpoint.config.vocab_size)?;
    let adapter = args.adapter.as_ref().map(|dir| model::adapter(dir, &checkpoint, common.say)).transpose()?;
    let backbone = checkpoint.load(&device, args.model.dtype)?;
    let factors = adapter.as_ref().map(|a| a.to_device(&backbone.config, &device)).transpose()?;

    let mut scored: Vec<Option<Scored>> = rows.iter().map(|_| None).collect();
    for batch in batches(&rows.iter().map(|row| row.ids.len()).collect::<Vec<_>>()) {
        let members: Vec<&Row> = batch.iter().map(|i| &rows[*i]).collect();
        for (i, result) in batch.iter().zip(score(&backbone, factors.as_ref(), &members, args.logits.is_some())?) {
            scored[*i] = Some(result);
        }
    }
    let scored: Vec<Scored> = scored.into_iter().map(|s| s.expect("every row is in one batch")).collect();
    if let Some(path) = &args.logits {
        let vocab = backbone.config.vocab_size;
        let named: Vec<tensors::Named<'_>> =
            scored.iter().map(|s| (name(&s.id), vec![s.logits.len() / vocab, vocab], s.logits.as_slice())).collect();
        tensors::write(path, &named)?;
    }
    lines::write(&args.out, &scored)?;

    let n_tokens: usize = scored.iter().map(|s| s.n_tokens).sum();
    let mean = mean_nll(&rows, &scored);
    let shown = mean.map_or_else(|| "no mean".to_owned(), |m| format!("{m:.6} nats a token"));
    let text = format!("{} rows, {n_tokens} tokens scored, {shown} -> {}", rows.len(), args.out.display());
    let digest = adapter.as_ref().map(|a| a.digest());
    let summary = json!({"rows": rows.len(), "n_tokens": n_tokens, "nll_nats_mean": mean, "adapter": digest, "out": args.out});
    common.say.summary(&text, &summary)?;
    Ok(ExitCode::SUCCESS)
}

/// Indices of rows in batches of similar length.
fn batches(lengths: &[usize]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|i| lengths[*i]);
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for i in order {
        match batches.last_mut() {
            // Rows come in order of length, so this one sets the width.
            Some(batch) if (batch.len() + 1) * lengths[i] <= BATCH_TOKENS => batch.push(i),
            _ => batches.push(vec![i]),
        }
    }
    batches
}

/// Logits that are held at a time, in positions.
fn block(backbone: &Backbone) -> usize {
    (BLOCK_LOGITS / backbone.config.vocab_size).max(1)
}

/// One row's token ids, and which of them are scored; the first has no prediction.
type Scorable<'a> = (&'a [u32], &'a [bool]);

/// Negative log-likelihood in nats of each token to score, and whether it is the most likely one, row by row. `name` names a row.
fn token_scores(
    backbone: &Backbone,
    factors: Option<&FactorMap>,
    hidden: &Tensor<2>,
    rows: &[Scorable<'_>],
    name: impl Fn(usize) -> String,
) -> Result<Vec<Vec<(f32, u8)>>> {
    let mut scores: Vec<Vec<(f32, u8)>> = rows.iter().map(|_| Vec::new()).collect();
    let scored = |(row, (ids, mask)): (usize, &Scorable<'_>)| {
        (1..ids.len()).filter(|i| mask[*i]).map(move |i| (row, i)).collect::<Vec<_>>()
    };
    let positions: Vec<(usize, usize)> = rows.iter().enumerate().flat_map(scored).collect();
    for positions in positions.chunks(block(backbone)) {
        let mut masks: Vec<Vec<bool>> = rows.iter().map(|(ids, _)| vec![false; ids.len()]).collect();
        positions.iter().for_each(|(row, i)| masks[*row][*i] = true);
        let paired: Vec<Scorable<'_>> = rows.iter().zip(&masks).map(|((ids, _), mask)| (*ids, mask.as_slice())).collect();
        let targets = Targets::new(&paired, &backbone.device()).expect("a chunk has positions");
        let predicted = per_token(backbone, factors, hidden.clone(), &targets);
        let (nll, best) = (predicted.nll.into_data(), predicted.best.into_data());
        for (((row, i), nll), best) in positions.iter().zip(nll.iter::<f32>()).zip(best.iter::<i64>()) {
            if !nll.is_finite() {
                return Err(not_finite(backbone, "log-likelihood", &name(*row)));
            }
            scores[*row].push((nll, u8::from(best == i64::from(rows[*row].0[*i]))));
        }
    }
    Ok(scores)
}

/// The scores of one batch's rows, in their order.
fn score(backbone: &Backbone, factors: Option<&FactorMap>, rows: &[&Row], with_logits: bool) -> Result<Vec<Scored>> {
    let ids: Vec<&[u32]> = rows.iter().map(|row| row.ids.as_slice()).collect();
    let hidden = backbone.hidden(&backbone.tokens(&ids)?, factors, None); // [positions of all rows, d]
    let all: Vec<Vec<bool>> = ids.iter().map(|ids| vec![true; ids.len()]).collect();
    let scorable: Vec<Scorable<'_>> = ids.iter().zip(&all).map(|(ids, mask)| (*ids, mask.as_slice())).collect();
    let scores = token_scores(backbone, factors, &hidden, &scorable, |row| rows[row].id.to_string())?;

    let mut scored: Vec<Scored> = rows.iter().map(|row| empty(row)).collect();
    for (scored, scores) in scored.iter_mut().zip(scores) {
        (scored.nll, scored.top1) = scores.into_iter().unzip();
    }
    if with_logits {
        let mut first = 0;
        for (row, (scored, ids)) in scored.iter_mut().zip(&ids).enumerate() {
            let hidden = hidden.clone().narrow(0, first, ids.len());
            first += ids.len();
            for part in hidden.split(block(backbone), 0) {
                scored.logits.extend(backbone.logits(part, factors).into_data().iter::<f32>());
            }
            if scored.logits.iter().any(|x| !x.is_finite()) {
                return Err(not_finite(backbone, "logits", &rows[row].id.to_string()));
            }
        }
    }
    Ok(scored)
}

fn empty(row: &Row) -> Scored {
    let n_tokens = match &row.mask {
        None => row.ids.len() - 1,
        Some(mask) => mask.iter().skip(1).filter(|m| **m == 1).count(),
    };
    Scored { id: row.id.clone(), n_tokens, nll: Vec::new(), top1: Vec::new(), logits: Vec::new() }
}

fn not_finite(backbone: &Backbone, what: &'static str, row: &str) -> Error {
    Error::NonFinite { what, place: format!(", row {row}"), dtype: format!("{:?}", backbone.dtype()).to_lowercase() }
}

/// The mean over all tokens that the masks count; none without such a token.
fn mean_nll(rows: &[Row], scored: &[Scored]) -> Option<f64> {
    let counted = rows.iter().zip(scored).flat_map(|(row, scored)| {
        let counts = move |i: usize| row.mask.as_ref().is_none_or(|mask| mask[i + 1] == 1);
        scored.nll.iter().enumerate().filter(move |(i, _)| counts(*i)).map(|(_, nll)| f64::from(*nll))
    });
    let (sum, n) = counted.fold((0.0, 0_usize), |(sum, n), nll| (sum + nll, n + 1));
    (n > 0).then(|| sum / n as f64)
}
