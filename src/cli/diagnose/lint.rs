//! `weact diagnose lint`.

use std::process::ExitCode;

use serde::Serialize;
use serde_json::json;
use weact::{
    core::{Adapter, sample::Sample},
    diagnostics::lint::{self, Lint},
};

use super::{Args, Common, open, write};

/// An adapter, looked at, under its name.
#[derive(Serialize)]
struct Named {
    name: String,
    #[serde(flatten)]
    lint: Lint,
}

/// Runs it: specialists on their own records, fusions on all.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let opened = open(args, common)?;
    let specialists = opened.subjects.specialists.iter();
    let all: Vec<&Sample> = specialists.clone().flat_map(|s| &s.records).collect();
    let of_specialists = specialists.map(|s| (s.capability.to_string(), &s.adapter, s.records.iter().collect()));
    let of_fusions = opened.subjects.fusions.iter().map(|f| (f.name.clone(), &f.adapter, all.clone()));
    let mut linted: Vec<Named> = Vec::new();
    for (name, adapter, samples) in of_specialists.chain(of_fusions) {
        let (adapter, samples): (&Adapter, Vec<&Sample>) = (adapter, samples);
        common.say.note(&format!("{name}: {} records", samples.len()));
        linted.push(Named { lint: lint::lint(&opened.backbone, adapter, &samples)?, name });
    }
    write(&opened, "lint.jsonl", &linted)?;
    let text: Vec<String> = linted.iter().map(paragraph).collect();
    let has_error = linted.iter().any(|named| named.lint.has_error());
    common.say.result(&text.join("\n"), &json!({"adapters": linted, "errors": has_error}))?;
    Ok(ExitCode::from(u8::from(has_error)))
}

fn paragraph(named: &Named) -> String {
    let Named { name, lint } = named;
    let targets: Vec<&str> = lint.targets.iter().map(|p| p.name()).collect();
    let span = |min: String, max: String| if min == max { min } else { format!("{min} to {max}") };
    let rank = span(lint.rank.min.to_string(), lint.rank.max.to_string());
    let scale = span(lint.scale.min.to_string(), lint.scale.max.to_string());
    let mut text = format!("{name}: {}, rank {rank}, scale {scale}\n", targets.join(" "));
    for layer in &lint.layers {
        let place = layer.layer.map_or_else(|| "output head".to_owned(), |layer| format!("layer {layer}"));
        let relative = layer.relative.map_or_else(|| "unknown".to_owned(), |x| format!("{:.3} %", 100.0 * x));
        text += &format!("  {place}: |dW| {:.4}, of |W| {relative}\n", layer.update_norm);
    }
    if let Some(effect) = &lint.effect {
        let (max, mean, same) = (effect.max_change, effect.mean_change, 100.0 * effect.top1_agreement);
        text += &format!(
            "  logits change by {max:.3} at most, {mean:.4} in the mean; same choice at {same:.1} % of {} tokens\n",
            effect.n_tokens
        );
    }
    if let Some(exits) = &lint.exit_calls {
        text += &format!("  exit call most likely in {} of {} records\n", exits.n_right, exits.n);
    }
    for finding in &lint.findings {
        let level = format!("{:?}", finding.level).to_lowercase();
        text += &format!("  {level} [{}]: {}\n", finding.code, finding.message);
    }
    text
}
