//! The library of adapters: aliases point at immutable adapters, known by digest. Registering, swapping or removing one leaves the
//! backbone and every other adapter as they are.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{Adapter, Capability, Error, Result, card::Card, io::peft, stage::Stage};

/// A registered adapter.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What the model is told.
    pub stage: Stage,
    /// The weights.
    pub adapter: Arc<Adapter>,
    /// Its card, where it came with one.
    pub card: Option<Card>,
}

/// What an adapter's card is checked against.
#[derive(Clone, Debug)]
pub struct Against {
    /// Digest of the backbone in use.
    pub base: String,
    /// Digest of the tokenizer file.
    pub tokenizer: String,
    /// Digest of the chat template.
    pub template: String,
}

/// Adapters by alias, in the order of registration: the order in which the model sees them.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    entries: Vec<Entry>,
}

impl Registry {
    /// Opens every adapter folder in `dir` (or `dir` itself, if it is one), in alias order of the paper's stages, then by name.
    /// Returns warnings for adapters without a card.
    ///
    /// # Errors
    /// If there is no adapter, one is broken, two have the same alias, or a card names another base, tokenizer or template.
    pub fn open(dir: &Path, against: &Against) -> Result<(Self, Vec<String>)> {
        let mut registry = Self::default();
        let mut warnings = Vec::new();
        for folder in adapter_folders(dir)? {
            let (entry, warning) = read_entry(&folder, against)?;
            warnings.extend(warning);
            registry.register(entry).map_err(|e| Error::file(&folder, e.to_string()))?;
        }
        let rank = |alias: &Capability| ["plan", "search", "write"].iter().position(|n| *n == alias.as_str()).unwrap_or(3);
        registry.entries.sort_by_key(|e| (rank(&e.stage.alias), e.stage.alias.clone()));
        Ok((registry, warnings))
    }

    /// Adds an adapter.
    ///
    /// # Errors
    /// If the alias is taken; [`Registry::swap`] replaces.
    pub fn register(&mut self, entry: Entry) -> Result<()> {
        if self.get(&entry.stage.alias).is_some() {
            return Err(Error::Model(format!("two adapters have the alias {}", entry.stage.alias)));
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Points an alias at new weights and returns the old entry. Whoever holds the old adapter keeps it.
    ///
    /// # Errors
    /// If the alias is unknown.
    pub fn swap(&mut self, entry: Entry) -> Result<Entry> {
        let known = self.aliases();
        let place = self.entries.iter_mut().find(|e| e.stage.alias == entry.stage.alias);
        let place = place.ok_or_else(|| unknown(&entry.stage.alias, &known))?;
        Ok(std::mem::replace(place, entry))
    }

    /// Points every alias at one adapter's weights: what a static merge is at run time. The stages' texts stay.
    pub fn fuse(&mut self, adapter: &Arc<Adapter>) {
        self.entries.iter_mut().for_each(|entry| entry.adapter = Arc::clone(adapter));
    }

    /// The entry of an alias: a lease, since adapters are shared and never change.
    pub fn get(&self, alias: &Capability) -> Option<&Entry> {
        self.entries.iter().find(|e| e.stage.alias == *alias)
    }

    /// The entry of an alias, or an error that lists the known ones.
    ///
    /// # Errors
    /// If the alias is unknown.
    pub fn need(&self, alias: &Capability) -> Result<&Entry> {
        self.get(alias).ok_or_else(|| unknown(alias, &self.aliases()))
    }

    /// All entries in order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Alias and description of each entry, as `load_lora` lists them.
    pub fn listing(&self) -> Vec<(Capability, String)> {
        self.entries.iter().map(|e| (e.stage.alias.clone(), e.stage.description.clone())).collect()
    }

    fn aliases(&self) -> String {
        self.entries.iter().map(|e| e.stage.alias.as_str()).collect::<Vec<_>>().join(", ")
    }
}

fn unknown(alias: &Capability, known: &str) -> Error {
    Error::Model(format!("no adapter has the alias {alias} (known: {known})"))
}

fn is_adapter(folder: &Path) -> bool {
    folder.join("adapter_config.json").exists()
}

fn adapter_folders(dir: &Path) -> Result<Vec<PathBuf>> {
    if is_adapter(dir) {
        return Ok(vec![dir.to_owned()]);
    }
    let read = fs::read_dir(dir).map_err(|e| Error::io("can't read", dir, e))?;
    let mut folders = Vec::new();
    for entry in read {
        let entry = entry.map_err(|e| Error::io("can't read", dir, e))?;
        // A folder whose name starts with a dot is a write that was never finished.
        if is_adapter(&entry.path()) && !entry.file_name().to_string_lossy().starts_with('.') {
            folders.push(entry.path());
        }
    }
    if folders.is_empty() {
        return Err(Error::file(dir, "holds no adapter (no folder with adapter_config.json)"));
    }
    folders.sort();
    Ok(folders)
}

/// Reads one adapter folder and checks its card.
///
/// # Errors
/// If it is broken, or its card names another base, tokenizer, template or digest.
pub fn read_entry(folder: &Path, against: &Against) -> Result<(Entry, Option<String>)> {
    let adapter = peft::read(folder)?;
    let Some(card) = Card::read(folder)? else {
        let name = folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let alias = Capability::new(&name).map_err(|e| Error::file(folder, format!("has no card.toml, and its name: {e}")))?;
        let warning =
            format!("{}: no card.toml; loaded as {alias}, without knowing which base it was trained over", folder.display());
        return Ok((Entry { stage: Stage::builtin(&alias), adapter: Arc::new(adapter), card: None }, Some(warning)));
    };
    let checks = [
        ("adapter tensors", card.digest.as_str(), adapter.digest()),
        ("base model", &card.base, &against.base),
        ("tokenizer", &card.tokenizer, &against.tokenizer),
        ("chat template", &card.template, &against.template),
    ];
    if let Some((what, made_for, in_use)) = checks.into_iter().find(|(_, a, b)| a != b) {
        return Err(Error::file(folder, format!("the card says {what} {made_for}, in use is {in_use}")));
    }
    Ok((Entry { stage: card.stage(), adapter: Arc::new(adapter), card: Some(card) }, None))
}
