//! Which samples make which update: a pure function of seed and epoch, so that a resumed run goes on exactly where it stopped.

use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// Batches that are sorted by length among their neighbours: the samples of one are alike, their order is random.
const BATCHES_PER_WINDOW: usize = 16;

/// The batches of one epoch as indices into `lengths`. Every sample occurs once; the last batch may be smaller.
///
/// Samples are shuffled, sorted by length within windows of 16 batches, cut into batches, and the batches shuffled.
pub fn epoch(lengths: &[usize], batch_rows: usize, seed: u64, epoch: usize) -> Vec<Vec<usize>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(epoch as u64 + 1); // stream 0 draws the initial factors
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.shuffle(&mut rng);
    let mut batches = Vec::new();
    for window in order.chunks_mut(batch_rows * BATCHES_PER_WINDOW) {
        window.sort_by_key(|i| lengths[*i]);
        batches.extend(window.chunks(batch_rows).map(<[usize]>::to_vec));
    }
    batches.shuffle(&mut rng);
    batches
}

/// The batch of update `step` (from 1).
pub fn of_step(lengths: &[usize], batch_rows: usize, seed: u64, step: usize) -> Vec<usize> {
    let per_epoch = lengths.len().div_ceil(batch_rows);
    let (number, place) = ((step - 1) / per_epoch, (step - 1) % per_epoch);
    epoch(lengths, batch_rows, seed, number).swap_remove(place)
}

/// The batches of updates `1..=n_steps`, in order.
pub fn of_steps(lengths: &[usize], batch_rows: usize, seed: u64, n_steps: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..).flat_map(move |number| epoch(lengths, batch_rows, seed, number)).take(n_steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_holds_every_sample_once_and_depends_on_seed_and_epoch_only() {
        let lengths: Vec<usize> = (0..103).map(|i| i * 37 % 50 + 1).collect();
        let batches = epoch(&lengths, 4, 7, 2);
        let mut seen: Vec<usize> = batches.iter().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..103).collect::<Vec<_>>());
        assert_eq!(batches.iter().filter(|b| b.len() != 4).count(), 1);
        assert_eq!(batches, epoch(&lengths, 4, 7, 2));
        assert_ne!(batches, epoch(&lengths, 4, 7, 3));
        assert_ne!(batches, epoch(&lengths, 4, 8, 2));
        assert_eq!(of_step(&lengths, 4, 7, 26 * 2 + 5), batches[4]);
        let all: Vec<Vec<usize>> = of_steps(&lengths, 4, 7, 60).collect();
        assert_eq!(all, (1..=60).map(|step| of_step(&lengths, 4, 7, step)).collect::<Vec<_>>());
    }
}
