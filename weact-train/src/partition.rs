//! Which part of a data set a trajectory belongs to: decided by its id and a seed, so that it is the same in every run and file.

use sha2::{Digest, Sha256};

/// The part of trajectory `id`, of `n_parts`: the first eight bytes of SHA-256 over seed and id, modulo `n_parts`.
///
/// # Panics
/// If there are no parts.
pub fn part(seed: u64, id: &str, n_parts: usize) -> usize {
    (draw("part", seed, id) % n_parts as u64) as usize
}

/// Which of `ids` are held apart: the `n` with the smallest draw, so that a larger `n` holds the same ones and more. All where there are
/// no more than `n`.
pub fn held_apart(seed: u64, ids: &[&str], n: usize) -> Vec<bool> {
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|i| (draw("held apart", seed, ids[*i]), ids[*i]));
    let mut held = vec![false; ids.len()];
    order.into_iter().take(n).for_each(|i| held[i] = true);
    held
}

fn draw(purpose: &str, seed: u64, id: &str) -> u64 {
    let digest = Sha256::digest(format!("{purpose}\0{seed}\0{id}"));
    u64::from_be_bytes(digest[..8].try_into().expect("a digest has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_about_equal_and_depend_on_id_and_seed_alone() {
        let ids: Vec<String> = (0..3000).map(|i| format!("q{i}")).collect();
        let mut sizes = [0_usize; 3];
        ids.iter().for_each(|id| sizes[part(1, id, 3)] += 1);
        // Four standard deviations of a binomial with 3000 draws at 1/3.
        assert!(sizes.iter().all(|n| n.abs_diff(1000) < 104), "{sizes:?}");
        assert!(ids.iter().any(|id| part(1, id, 3) != part(2, id, 3)));
    }

    #[test]
    fn more_held_apart_are_the_same_and_more() {
        let ids: Vec<String> = (0..50).map(|i| format!("q{i}")).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let [few, many] = [5, 20].map(|n| held_apart(0, &ids, n));
        assert_eq!([&few, &many].map(|held| held.iter().filter(|h| **h).count()), [5, 20]);
        assert!(few.iter().zip(&many).all(|(few, many)| many | !few));
        assert!(held_apart(0, &ids, 99).into_iter().all(|held| held));
    }
}
