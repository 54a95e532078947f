//! Merges from adapter folders to an adapter folder: ids, bases and digests checked, written module by module.

use std::{
    borrow::Cow,
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
};

use weact_core::{
    Capability, Error as CoreError,
    adapter::PlainFactors,
    card::{Card, MergeRecord, MergeSource},
    io::{atomic, peft, peft::AdapterFile},
    lora::Module,
    stage::Stage,
};

use super::{Merge, ModuleRecord, Recipe, Record, Source};
use crate::{Error, Result};

/// The record beside a merged adapter: [`Record`] as JSON.
pub const FILE: &str = "merge.json";

/// An adapter folder that goes into a merge.
#[derive(Debug)]
pub struct Input {
    /// The alias in its card, or the folder's name.
    pub id: String,
    /// The folder.
    pub dir: PathBuf,
    /// Its factors.
    pub file: AdapterFile,
    /// Its card, where it has one.
    pub card: Option<Card>,
}

/// What may already be where the result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Nothing.
    Refuse,
    /// An earlier merge, which is replaced.
    Overwrite,
}

/// Opens the adapters and checks that they were made for one base, tokenizer and template.
///
/// # Errors
/// If one is broken or not as its card says, or two name different bases, tokenizers, templates, tool protocols or histories. Bases
/// of adapters without cards are known by name only: two names are refused unless `any_base`.
pub fn open(dirs: &[PathBuf], any_base: bool) -> Result<Vec<Input>> {
    let inputs: Vec<Input> = dirs.iter().map(|dir| open_one(dir)).collect::<Result<_>>()?;
    let carded: Vec<(&Input, &Card)> = inputs.iter().filter_map(|input| Some((input, input.card.as_ref()?))).collect();
    for pair in carded.windows(2) {
        let [(a, of_a), (b, of_b)] = pair else { unreachable!("windows of two") };
        let told = [
            ("base model", of_a.base.clone(), of_b.base.clone()),
            ("tokenizer", of_a.tokenizer.clone(), of_b.tokenizer.clone()),
            ("chat template", of_a.template.clone(), of_b.template.clone()),
            ("tool protocol", format!("{:?}", of_a.tool_protocol), format!("{:?}", of_b.tool_protocol)),
            ("treatment of tool results", format!("{:?}", of_a.retention), format!("{:?}", of_b.retention)),
        ];
        if let Some((what, of_a, of_b)) = told.into_iter().find(|(_, of_a, of_b)| of_a != of_b) {
            return Err(Error::Merge(format!("adapter {} was made for the {what} {of_a}, adapter {} for {of_b}", a.id, b.id)));
        }
    }
    if !any_base && carded.len() < inputs.len() {
        let named: Vec<(&Input, &String)> = inputs.iter().filter_map(|i| Some((i, i.file.base_name.as_ref()?))).collect();
        if let Some(pair) = named.windows(2).find(|pair| pair[0].1 != pair[1].1) {
            let [(a, of_a), (b, of_b)] = pair else { unreachable!("windows of two") };
            let why = format!("adapter {} names the base {of_a:?}, adapter {} {of_b:?}", a.id, b.id);
            return Err(Error::Merge(format!("{why}; if they are the same model, say so with --any-base")));
        }
    }
    Ok(inputs)
}

fn open_one(dir: &Path) -> Result<Input> {
    let file = AdapterFile::open(dir)?;
    let card = Card::read(dir)?;
    let id = match &card {
        Some(card) => card.alias.to_string(),
        None => {
            let full = fs::canonicalize(dir).map_err(|e| CoreError::io("can't open", dir, e))?;
            full.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
        }
    };
    if let Some(card) = &card {
        let digest = file.digest()?;
        if digest != card.digest {
            let why = format!("the card says adapter tensors {}, in the file are {digest}", card.digest);
            return Err(CoreError::file(dir, why).into());
        }
    }
    Ok(Input { id, dir: dir.to_owned(), file, card })
}

/// Merges `inputs` into the folder `out`: an adapter in PEFT's form, [`FILE`], and a card where every input has one. `alias` is the
/// result's; the folder's name where there is none.
///
/// # Errors
/// As [`Merge::new`] and [`Merge::module`]; if `out` holds something that may not be replaced, or can't be written: it is as it was then.
pub fn to_files(out: &Path, inputs: &[Input], recipe: &Recipe, alias: Option<&Capability>, existing: Existing) -> Result<Record> {
    check_out(out, inputs, existing)?;
    let sources: Vec<Source<'_>> = inputs.iter().map(|input| Source::file(&input.id, &input.file)).collect();
    let merge = Merge::new(&sources, recipe)?;
    let cards: Vec<&Card> = inputs.iter().filter_map(|input| input.card.as_ref()).collect();
    let alias = match (alias, cards.len() == inputs.len()) {
        (_, false) => None,
        (Some(alias), _) => Some(alias.clone()),
        (None, _) => Some(alias_of(out)?),
    };
    let base = inputs.iter().find_map(|input| input.file.base_name.as_deref()).unwrap_or_default();
    let mut record = None;
    atomic::write_folder(out, |dir| -> Result<()> {
        let made = merge.record(write_factors(dir, &merge, base)?)?;
        let json = serde_json::to_string_pretty(&made).expect("a record serialises");
        atomic::write_text(&dir.join(FILE), &(json + "\n"))?;
        if let Some(alias) = &alias {
            card(alias, cards[0], &made, AdapterFile::open(dir)?.digest()?)?.write(dir)?;
        }
        record = Some(made);
        Ok(())
    })?;
    Ok(record.expect("written"))
}

/// Writes the merged factors a wave of modules at a time.
fn write_factors(dir: &Path, merge: &Merge<'_>, base: &str) -> Result<Vec<ModuleRecord>> {
    let mut records = Vec::new();
    let mut waves = merge.waves().into_iter();
    let mut ready: VecDeque<(Module, PlainFactors)> = VecDeque::new();
    let factors = |module: Module| -> Result<Cow<'_, PlainFactors>> {
        if ready.is_empty() {
            let wave = waves.next().expect("waves hold every module");
            for (module, (factors, record)) in merge.wave(&wave)? {
                ready.push_back((module, factors));
                records.push(record);
            }
        }
        let (next, factors) = ready.pop_front().expect("a wave has a module");
        assert_eq!(next, module, "waves are in the order of files");
        Ok(Cow::Owned(factors))
    };
    peft::write_module_by_module(dir, &merge.config(), merge.shapes(), base, factors)?;
    Ok(records)
}

fn check_out(out: &Path, inputs: &[Input], existing: Existing) -> Result<()> {
    let refuse = |why: &str| Err(Error::RunDirectory { path: out.to_owned(), why: why.to_owned() });
    if !out.exists() {
        return Ok(());
    }
    let is = |dir: &Path| matches!((fs::canonicalize(dir), fs::canonicalize(out)), (Ok(a), Ok(b)) if a.starts_with(&b));
    if inputs.iter().any(|input| is(&input.dir)) {
        return refuse("is one of the adapters that are merged, or holds one: choose another folder");
    }
    let mut entries = fs::read_dir(out).map_err(|e| CoreError::io("can't read", out, e))?;
    match (entries.next().is_none(), existing) {
        (true, _) => Ok(()),
        (false, Existing::Refuse) => refuse("is not empty: --overwrite replaces an earlier merge"),
        (false, Existing::Overwrite) if out.join(FILE).exists() => Ok(()),
        (false, Existing::Overwrite) => refuse("holds files but no merge.json: it is no earlier merge"),
    }
}

fn alias_of(out: &Path) -> Result<Capability> {
    let name = out.file_name().map_or_else(String::new, |name| name.to_string_lossy().to_lowercase());
    Capability::new(&name).map_err(|e| Error::Merge(format!("{e}; --alias names the merged adapter")))
}

/// The merged adapter's card: made for what its sources were made for.
fn card(alias: &Capability, of_source: &Card, record: &Record, digest: String) -> Result<Card> {
    let ids: Vec<&str> = record.sources.iter().map(|s| s.id.as_str()).collect();
    let method = record.recipe.method.name();
    let least = |of: fn(&ModuleRecord) -> Option<f64>| record.modules.iter().filter_map(of).min_by(f64::total_cmp);
    let total: f64 = record.modules.iter().map(|m| m.norm.powi(2)).sum();
    let kept: f64 = record.modules.iter().map(|m| m.kept * m.norm.powi(2)).sum();
    let recipe = toml::Table::try_from(&record.recipe).map_err(|e| Error::Merge(format!("the recipe can't be written: {e}")))?;
    Ok(Card {
        alias: alias.clone(),
        description: format!("{} merged by {method}", ids.join(", ")),
        activation: Stage::builtin(alias).activation,
        digest,
        base: of_source.base.clone(),
        tokenizer: of_source.tokenizer.clone(),
        template: of_source.template.clone(),
        tool_protocol: of_source.tool_protocol,
        think: of_source.think,
        retention: of_source.retention,
        training: None,
        merge: Some(MergeRecord {
            method: method.to_owned(),
            kept: if total > 0.0 { kept / total } else { 1.0 },
            kept_least: least(|m| Some(m.kept)).unwrap_or(1.0),
            trim_margin: least(|m| m.trim_margin),
            sign_margin: least(|m| m.sign_margin),
            sources: record
                .sources
                .iter()
                .map(|s| MergeSource { id: s.id.clone(), digest: s.digest.clone(), weight: s.weight })
                .collect(),
            recipe,
        }),
    })
}
