//! How much memory a piece of work takes.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use weact::train::memory::of_process;

/// Does `work` and gives the largest anonymous memory of the process meanwhile, in bytes: what mapped files hold does not count.
/// `None` where the system does not tell.
pub(super) fn peak<T>(work: impl FnOnce() -> T) -> (T, Option<u64>) {
    let (done, peak) = (AtomicBool::new(false), AtomicU64::new(0));
    let look = || _ = peak.fetch_max(of_process("RssAnon").unwrap_or(0), Ordering::Relaxed);
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                look();
                thread::sleep(Duration::from_millis(1));
            }
        });
        let result = work();
        look();
        done.store(true, Ordering::Relaxed);
        result
    });
    (result, Some(peak.into_inner()).filter(|bytes| *bytes > 0))
}
