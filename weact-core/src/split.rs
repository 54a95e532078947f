//! Validation data (Appendix E.1): a capability's records are shuffled with seed 42, the first 200 are held back, the remainder is trained on.

use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

/// The paper's size of a capability's validation set.
pub const N_VALID: usize = 200;
/// The paper's seed.
pub const SEED: u64 = 42;

/// The first `n_valid` of the shuffled `records`, and the remainder, each in shuffled order.
///
/// The paper names the seed and not the generator: here, Fisher and Yates from the last place down, each partner drawn evenly by
/// ChaCha8. The split depends on the records' order and number, so both parts are to be cut from the same whole.
pub fn split<T>(mut records: Vec<T>, n_valid: usize, seed: u64) -> (Vec<T>, Vec<T>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for last in (1..records.len()).rev() {
        records.swap(last, rng.random_range(0..=last));
    }
    let train = records.split_off(n_valid.min(records.len()));
    (records, train)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_parts_are_the_whole_and_depend_on_the_seed_alone() {
        let whole: Vec<usize> = (0..1000).collect();
        let (valid, train) = split(whole.clone(), N_VALID, SEED);
        assert_eq!((valid.len(), train.len()), (200, 800));
        assert_eq!(split(whole.clone(), N_VALID, SEED), (valid.clone(), train.clone()));
        assert_ne!(split(whole.clone(), N_VALID, 43).0, valid);
        let mut both = [valid, train].concat();
        assert_ne!(both, whole);
        both.sort_unstable();
        assert_eq!(both, whole);
        assert_eq!(split(vec![7], N_VALID, SEED), (vec![7], vec![]));
    }

    /// All six orders of three, over six thousand seeds.
    #[test]
    fn every_order_is_as_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..6000 {
            *counts.entry(split(vec![0, 1, 2], 3, seed).0).or_insert(0_usize) += 1;
        }
        assert!(counts.len() == 6 && counts.values().all(|n| n.abs_diff(1000) < 150), "{counts:?}");
    }
}
