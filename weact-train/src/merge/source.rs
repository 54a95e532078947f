//! What is merged: adapters in memory or in files, of which a module is read when its turn comes.

use std::{borrow::Cow, collections::BTreeSet};

use weact_core::{
    Adapter,
    adapter::{LoraConfig, PlainFactors},
    io::peft::AdapterFile,
    lora::Module,
};

use crate::{Error, Result};

/// An adapter that goes into a merge.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its name: its masks are drawn for it, and errors and cards use it. The alias in its card, or its folder's name.
    pub id: &'a str,
    /// Its factors.
    pub weights: Weights<'a>,
}

/// Where an adapter's factors are.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// In memory.
    Memory(&'a Adapter),
    /// In a file.
    File(&'a AdapterFile),
}

impl<'a> Source<'a> {
    /// An adapter in memory.
    pub fn memory(id: &'a str, adapter: &'a Adapter) -> Self {
        Self { id, weights: Weights::Memory(adapter) }
    }

    /// An adapter's files.
    pub fn file(id: &'a str, file: &'a AdapterFile) -> Self {
        Self { id, weights: Weights::File(file) }
    }

    pub(super) fn config(&self) -> &'a LoraConfig {
        match self.weights {
            Weights::Memory(adapter) => adapter.config(),
            Weights::File(file) => &file.config,
        }
    }

    pub(super) fn modules(&self) -> BTreeSet<Module> {
        match self.weights {
            Weights::Memory(adapter) => adapter.plain().keys().copied().collect(),
            Weights::File(file) => file.modules().collect(),
        }
    }

    /// `(d_in, r, d_out)`
    pub(super) fn dims(&self, module: Module) -> Option<(usize, usize, usize)> {
        match self.weights {
            Weights::Memory(adapter) => adapter.plain().get(&module).map(|f| (f.d_in, f.rank, f.d_out)),
            Weights::File(file) => file.dims(module),
        }
    }

    /// A module's factors and their scale.
    pub(super) fn factors(&self, module: Module) -> Result<Option<(Cow<'a, PlainFactors>, f64)>> {
        let factors = match self.weights {
            Weights::Memory(adapter) => adapter.plain().get(&module).map(Cow::Borrowed),
            Weights::File(file) => {
                let read = file.factors(module).map_err(|e| Error::Merge(format!("adapter {}: {e}", self.id)))?;
                read.map(Cow::Owned)
            }
        };
        let scale = self.config().scale_of(module);
        if factors.is_some() && !scale.is_finite() {
            return Err(Error::Merge(format!("adapter {}: the scale of {} is {scale}", self.id, module.path())));
        }
        Ok(factors.map(|f| (f, scale)))
    }
}
