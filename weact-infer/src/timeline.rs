//! The run's time as intervals that tile it (B.3): one category at a time, and one stamp per change, so that the categories sum
//! to the run exactly.

use std::{fmt, time::Instant};

use weact_core::episode::Interval;

/// A clock that never goes back.
pub trait Clock: fmt::Debug + Send {
    /// Nanoseconds since some fixed moment.
    fn now_ns(&self) -> u64;
}

/// The system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Monotonic(Instant);

impl Monotonic {
    /// A clock that shows 0 now.
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for Monotonic {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for Monotonic {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).expect("a run takes less than 584 years")
    }
}

/// A run's time so far.
///
/// Invariant: each interval starts at the stamp at which the one before it ended, the first at 0.
#[derive(Debug)]
pub struct Timeline {
    clock: Box<dyn Clock>,
    begin_ns: u64,
    category: String,
    since_ns: u64,
    closed: Vec<Interval>,
}

impl Timeline {
    /// A timeline that begins now, in `category`.
    pub fn new(clock: Box<dyn Clock>, category: impl Into<String>) -> Self {
        let begin_ns = clock.now_ns();
        Self { clock, begin_ns, category: category.into(), since_ns: 0, closed: Vec::new() }
    }

    /// What is being done now.
    pub fn category(&self) -> &str {
        &self.category
    }

    /// Ends the current interval and begins one of `category` at the same stamp. Nothing happens where it is the current one.
    pub fn switch(&mut self, category: impl Into<String>) {
        let category = category.into();
        if category != self.category {
            let ended = std::mem::replace(&mut self.category, category);
            self.close(ended);
        }
    }

    /// The intervals that have ended since this was last asked, in order.
    pub fn take_closed(&mut self) -> Vec<Interval> {
        std::mem::take(&mut self.closed)
    }

    /// Ends the run: its intervals, in order, but for those already taken.
    pub fn finish(mut self) -> Vec<Interval> {
        let last = std::mem::take(&mut self.category);
        self.close(last);
        self.closed
    }

    fn close(&mut self, category: String) {
        let end_ns = self.clock.now_ns() - self.begin_ns;
        self.closed.push(Interval { category, start_ns: self.since_ns, end_ns });
        self.since_ns = end_ns;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering},
        },
    };

    use rand_chacha::{
        ChaCha8Rng,
        rand_core::{RngCore, SeedableRng},
    };

    use super::*;

    #[derive(Clone, Debug)]
    struct Fake(Arc<AtomicU64>);

    impl Clock for Fake {
        fn now_ns(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn intervals_tile_the_run_for_any_sequence_of_switches() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for n_switches in 0..200 {
            let now = Arc::new(AtomicU64::new(rng.next_u64() >> 1)); // the clock need not start at 0
            let begin = now.load(Ordering::Relaxed);
            let mut timeline = Timeline::new(Box::new(Fake(now.clone())), "orchestration");
            let mut spent: BTreeMap<String, u64> = BTreeMap::new(); // counted apart from the timeline
            let mut wait = |category: &str| {
                let step = u64::from(rng.next_u32() % 1000); // at times 0
                now.fetch_add(step, Ordering::Relaxed);
                *spent.entry(category.to_owned()).or_default() += step;
                rng.next_u32() % 3
            };
            for _ in 0..n_switches {
                let next = wait(timeline.category());
                timeline.switch(["orchestration", "tool", "model:base"][next as usize]);
            }
            wait(timeline.category());
            let total = now.load(Ordering::Relaxed) - begin;
            let intervals = timeline.finish();

            assert_eq!((intervals[0].start_ns, intervals[intervals.len() - 1].end_ns), (0, total));
            assert!(intervals.windows(2).all(|w| w[0].end_ns == w[1].start_ns && w[0].category != w[1].category));
            let mut sums: BTreeMap<String, u64> = BTreeMap::new();
            for interval in &intervals {
                *sums.entry(interval.category.clone()).or_default() += interval.end_ns - interval.start_ns;
            }
            spent.retain(|_, ns| *ns > 0);
            sums.retain(|_, ns| *ns > 0);
            assert_eq!(sums, spent);
        }
    }

    #[test]
    fn the_system_clock_does_not_go_back() {
        let clock = Monotonic::new();
        let stamps: Vec<u64> = (0..100).map(|_| clock.now_ns()).collect();
        assert!(stamps.is_sorted());
    }
}
