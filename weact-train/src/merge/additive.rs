//! Full Additive (§3.2): the sum of the updates, exact because factors are concatenated and ranks add.

use std::collections::{BTreeMap, BTreeSet};

use weact_core::{
    Adapter,
    adapter::{LoraConfig, PlainFactors},
    lora::{Module, Projection},
};

use crate::{Error, Result};

/// The adapter whose update is `sum_k scale_k a_k b_k` in every module, with scale 1: `a` holds the sources' `a_k` side by side,
/// `b` their `scale_k b_k` one below the other. A source that lacks a module adds nothing there.
///
/// # Errors
/// If there is no source, or two disagree about a module's dimensions.
pub fn additive(sources: &[&Adapter]) -> Result<Adapter> {
    let modules: BTreeSet<Module> = sources.iter().flat_map(|s| s.plain().keys().copied()).collect();
    let mut sums = BTreeMap::new();
    for module in modules {
        let parts = sources.iter().filter_map(|s| Some((s.plain().get(&module)?, s.config().scale_of(module))));
        sums.insert(module, sum(module, &parts.collect::<Vec<_>>())?);
    }
    let Some(rank) = sums.values().map(|f: &PlainFactors| f.rank).max() else {
        return Err(Error::Other("a sum needs at least one adapter".to_owned()));
    };
    let smaller: Vec<(String, usize)> = sums.iter().filter(|(_, f)| f.rank != rank).map(|(m, f)| (m.path(), f.rank)).collect();
    let targets: BTreeSet<Projection> = sums.keys().map(|m| m.projection).collect();
    let config = LoraConfig {
        rank,
        alpha: rank as f64,
        alpha_pattern: smaller.iter().map(|(path, r)| (path.clone(), *r as f64)).collect(),
        rank_pattern: smaller.into_iter().collect(),
        rslora: false,
        targets: targets.into_iter().collect(),
    };
    Ok(Adapter::new(config, sums)?)
}

fn sum(module: Module, parts: &[(&PlainFactors, f64)]) -> Result<PlainFactors> {
    let (d_in, d_out) = (parts[0].0.d_in, parts[0].0.d_out);
    if parts.iter().any(|(f, _)| (f.d_in, f.d_out) != (d_in, d_out)) {
        return Err(Error::Other(format!("the adapters disagree about the dimensions of {}", module.path())));
    }
    let rank = parts.iter().map(|(f, _)| f.rank).sum();
    let a = (0..d_in)
        .flat_map(|row| parts.iter().flat_map(move |(f, _)| f.a[row * f.rank..(row + 1) * f.rank].iter().copied()))
        .collect();
    let b = parts.iter().flat_map(|(f, scale)| f.b.iter().map(move |x| (f64::from(*x) * scale) as f32)).collect();
    Ok(PlainFactors { a, b, d_in, rank, d_out })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(alpha: f64, a: [f32; 2], b: [f32; 2]) -> Adapter {
        let module = Module { layer: Some(0), projection: Projection::QProj };
        let factors = PlainFactors { a: a.to_vec(), b: b.to_vec(), d_in: 2, rank: 1, d_out: 2 };
        let config = LoraConfig {
            rank: 1,
            alpha,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            rslora: false,
            targets: vec![Projection::QProj],
        };
        Adapter::new(config, BTreeMap::from([(module, factors)])).expect("finite")
    }

    /// 2 [1 2]^T [3 4] + 1 [5 6]^T [7 8] = [6 8; 12 16] + [35 40; 42 48] = [41 48; 54 64].
    #[test]
    fn the_sum_of_two_updates_is_exact_as_worked_by_hand() {
        let merged = additive(&[&adapter(2.0, [1.0, 2.0], [3.0, 4.0]), &adapter(1.0, [5.0, 6.0], [7.0, 8.0])]).expect("they fit");
        let (module, f) = merged.plain().first_key_value().expect("one module");
        let entry = |i: usize, j: usize| (0..f.rank).map(|r| f.a[i * f.rank + r] * f.b[r * f.d_out + j]).sum::<f32>();
        assert_eq!((f.rank, merged.config().scale_of(*module)), (2, 1.0));
        assert_eq!([entry(0, 0), entry(0, 1), entry(1, 0), entry(1, 1)], [41.0, 48.0, 54.0, 64.0]);
    }
}
