//! Static merges: several adapters made into one (§3.2, App. E.1). What switching is measured against.
//!
//! Every merge is data of one algorithm ([`Recipe`]): what is trimmed, how signs are elected, how the result is brought to its rank.
//! Merging happens in the space of the scaled updates `s_i B_i A_i`, so that ranks and scales may differ; PEFT's merging of `A` and
//! `B` apart is there under its own name ([`Space::Factors`]). The result is an ordinary adapter: one rank in all modules, scale 1.
//! Modules are merged a few at a time, whatever the model's size: memory is a few times the largest projection.

pub mod recipe;
pub mod mask;
pub mod trim;
pub mod elect;
mod decompose;
mod knots;
mod tspa;
mod source;
mod module;
mod whole;
pub mod files;
pub mod lorahub;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use rayon::prelude::*;
use serde::Serialize;
use weact_core::{
    Adapter,
    adapter::{LoraConfig, PlainFactors},
    io::peft::in_file_order,
    lora::{Module, Projection},
};

pub use decompose::How;
pub use module::{Alignment, ModuleRecord};
pub use recipe::{Method, Preset, Rank, Recipe, Space, Stages};
pub use source::{Source, Weights};

use crate::{Error, Result};
use whole::Whole;

/// A merge whose sources have been checked against each other.
///
/// Invariant: sources stand in the order of their ids, so that nothing depends on the order in which they were given.
#[derive(Debug)]
pub struct Merge<'a> {
    sources: Vec<Source<'a>>,
    recipe: Recipe,
    shapes: BTreeMap<Module, (usize, usize, usize)>, // (d_in, r, d_out)
    whole: Whole,
}

/// What a merge was made of and what came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The recipe, every option resolved; weights are those of `sources`.
    pub recipe: Recipe,
    /// In the order of their ids.
    pub sources: Vec<SourceRecord>,
    /// The rank of the result.
    pub rank: usize,
    /// Version of the rule of DARE's masks, where entries were dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask_version: Option<u32>,
    /// Per module, in the order of files.
    pub modules: Vec<ModuleRecord>,
}

/// A source by content.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceRecord {
    /// Its id.
    pub id: String,
    /// The adapter's digest.
    pub digest: String,
    /// Its weight.
    pub weight: f64,
}

/// Merges adapters into one in memory.
///
/// # Errors
/// As [`Merge::new`] and [`Merge::module`].
pub fn merge(sources: &[Source<'_>], recipe: &Recipe) -> Result<(Adapter, Record)> {
    let merge = Merge::new(sources, recipe)?;
    let mut plain = BTreeMap::new();
    let mut modules = Vec::new();
    for wave in merge.waves() {
        for (module, (factors, record)) in merge.wave(&wave)? {
            plain.insert(module, factors);
            modules.push(record);
        }
    }
    let adapter = Adapter::new(merge.config(), plain)?;
    Ok((adapter, merge.record(modules)?))
}

/// Full Additive (§3.2): the sum of the updates, exact because factors are concatenated and ranks add.
///
/// # Errors
/// As [`merge`].
pub fn additive(sources: &[Source<'_>]) -> Result<Adapter> {
    Ok(merge(sources, &Method::Additive.recipe(Preset::Peft))?.0)
}

impl<'a> Merge<'a> {
    /// Checks the sources against each other and the recipe, and makes the passes over whole adapters that the recipe needs.
    ///
    /// # Errors
    /// If the recipe's numbers are wrong ([`Recipe::resolve`]); two sources have the same id; a source lacks a module that another
    /// has (and the recipe does not allow it), or has other dimensions there; ranks differ where factors are merged apart; or the
    /// result's rank is above what a module can have. Messages name adapter and module.
    pub fn new(sources: &[Source<'a>], recipe: &Recipe) -> Result<Self> {
        let mut recipe = recipe.clone();
        recipe.resolve(&sources.iter().map(|s| s.id).collect::<Vec<_>>())?;
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|i| sources[*i].id);
        if let Some(pair) = order.windows(2).find(|pair| sources[pair[0]].id == sources[pair[1]].id) {
            return Err(Error::Merge(format!("two adapters are called {}", sources[pair[0]].id)));
        }
        recipe.weights = order.iter().map(|i| recipe.weights[*i]).collect();
        let sources: Vec<Source<'a>> = order.iter().map(|i| sources[*i]).collect();
        check_modules(&sources, recipe.union && !matches!(recipe.space, Space::Aligned { .. }))?;
        let mut merge = Self { sources, recipe, shapes: BTreeMap::new(), whole: Whole::default() };
        merge.shapes = merge.plan_shapes()?;
        merge.whole = Whole::of(&merge)?;
        Ok(merge)
    }

    /// `(d_in, r, d_out)` of each module of the result.
    pub fn shapes(&self) -> &BTreeMap<Module, (usize, usize, usize)> {
        &self.shapes
    }

    /// The configuration of the result: one rank, scale 1.
    pub fn config(&self) -> LoraConfig {
        let targets: BTreeSet<Projection> = self.shapes.keys().map(|m| m.projection).collect();
        let rank = self.rank();
        LoraConfig {
            rank,
            alpha: rank as f64,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            rslora: false,
            targets: targets.into_iter().collect(),
        }
    }

    fn rank(&self) -> usize {
        self.shapes.values().next().expect("a source has a module").1
    }

    fn plan_shapes(&self) -> Result<BTreeMap<Module, (usize, usize, usize)>> {
        let modules: BTreeSet<Module> = self.sources.iter().flat_map(Source::modules).collect();
        let ranks = |module: Module| self.sources.iter().filter_map(move |s| Some((s.id, s.dims(module)?.1)));
        let largest = modules.iter().flat_map(|m| ranks(*m).map(|(id, rank)| (rank, id, *m))).max_by_key(|(rank, ..)| *rank);
        let (largest, largest_id, _) = largest.expect("a source has a module");
        if self.recipe.space == Space::Factors {
            let other = modules.iter().flat_map(|m| ranks(*m).map(move |r| (*m, r))).find(|(_, (_, rank))| *rank != largest);
            if let Some((module, (id, rank))) = other {
                let why = format!("adapter {id} has rank {rank} in {}, adapter {largest_id} {largest}", module.path());
                return Err(Error::Merge(format!("factors can only be merged apart where ranks are equal: {why}")));
            }
        }
        if self.recipe.rank == Rank::Exact && !self.has_low_rank() {
            return Err(Error::Merge(format!("{} has no exact low rank: give a rank", self.recipe.method)));
        }
        let rank = match self.recipe.rank {
            Rank::At(rank) => rank,
            Rank::LargestSource => largest,
            Rank::Exact => modules.iter().map(|m| ranks(*m).map(|(_, rank)| rank).sum()).max().expect("a source has a module"),
        };
        if self.recipe.space == Space::Factors && rank != largest {
            return Err(Error::Merge(format!("factors merged apart keep the sources' rank {largest}; {rank} was asked for")));
        }
        if matches!(self.recipe.space, Space::Aligned { .. }) && rank < largest {
            let why = format!("aligned factors need at least the largest rank, {largest} of adapter {largest_id}");
            return Err(Error::Merge(format!("{why}; {rank} was asked for")));
        }
        let mut shapes = BTreeMap::new();
        for module in modules {
            let (id, (d_in, _, d_out)) =
                self.sources.iter().find_map(|s| Some((s.id, s.dims(module)?))).expect("a source has the module");
            let most = d_in.min(d_out);
            if rank > most && self.recipe.rank != Rank::Exact {
                let from = if self.recipe.rank == Rank::LargestSource { largest_id } else { id };
                let why =
                    format!("rank {rank} is more than {} of adapter {from} can have, which is [{d_out}, {d_in}]", module.path());
                return Err(Error::Merge(format!("{why}: give a rank of at most {most}")));
            }
            shapes.insert(module, (d_in, rank, d_out));
        }
        Ok(shapes)
    }

    /// The modules in the order of files, in runs that are merged at the same time: no more numbers than in four of the largest.
    pub(crate) fn waves(&self) -> Vec<Vec<Module>> {
        let size = |module: &Module| self.shapes[module].0 * self.shapes[module].2;
        let most = 4 * self.shapes.keys().map(size).max().unwrap_or(0);
        let mut waves: Vec<Vec<Module>> = Vec::new();
        let mut left = 0;
        for module in in_file_order(self.shapes.keys().copied()) {
            match waves.last_mut().filter(|_| size(&module) <= left) {
                Some(wave) => {
                    left -= size(&module);
                    wave.push(module);
                }
                None => {
                    left = most - size(&module);
                    waves.push(vec![module]);
                }
            }
        }
        waves
    }

    pub(crate) fn wave(&self, modules: &[Module]) -> Result<Vec<(Module, (PlainFactors, ModuleRecord))>> {
        modules.par_iter().map(|module| Ok((*module, self.module(*module)?))).collect()
    }

    pub(crate) fn record(&self, modules: Vec<ModuleRecord>) -> Result<Record> {
        let source = |(source, weight): (&Source<'_>, &f64)| {
            let digest = match source.weights {
                Weights::Memory(adapter) => Cow::Borrowed(adapter.digest()),
                Weights::File(file) => Cow::Owned(file.digest()?),
            };
            Ok(SourceRecord { id: source.id.to_owned(), digest: digest.into_owned(), weight: *weight })
        };
        Ok(Record {
            sources: self.sources.iter().zip(&self.recipe.weights).map(source).collect::<Result<_>>()?,
            rank: self.rank(),
            mask_version: self.recipe.drop.map(|_| mask::VERSION),
            recipe: self.recipe.clone(),
            modules,
        })
    }
}

/// That the sources adapt the same modules, and agree about their dimensions.
fn check_modules(sources: &[Source<'_>], may_lack: bool) -> Result<()> {
    for (first, second) in sources.iter().flat_map(|a| sources.iter().map(move |b| (a, b))).filter(|(a, b)| a.id != b.id) {
        for module in first.modules() {
            let path = module.path();
            let (d_in, _, d_out) = first.dims(module).expect("one of its modules");
            match second.dims(module) {
                None if may_lack => {}
                None => {
                    let why = format!("adapter {} has no factors for {path}, which adapter {} has", second.id, first.id);
                    return Err(Error::Merge(format!("{why}; a union counts it as no update there")));
                }
                Some((other_in, _, other_out)) if (other_in, other_out) != (d_in, d_out) => {
                    let why =
                        format!("adapter {} has [{d_out}, {d_in}], adapter {} [{other_out}, {other_in}]", first.id, second.id);
                    return Err(Error::Merge(format!("{path}: {why}; were they trained over the same base?")));
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}
