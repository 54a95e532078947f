//! Which tasks are asked.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use crate::{Error, Result, task::Task};

/// A part of the tasks. Shards are told apart by the tasks' ids, so that they are disjoint, together all, and the same wherever they run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// The first so many, or, below 1, this share of them.
    pub limit: Option<f64>,
    /// These ids only.
    pub ids: Option<BTreeSet<String>>,
    /// Shard i of n, from 1.
    pub shard: Option<(u64, u64)>,
}

/// The tasks of `selection`, in their order.
///
/// # Errors
/// If an id is not among the tasks, a number is out of range, or nothing is left.
pub fn select(tasks: Vec<Task>, selection: &Selection, name: &str) -> Result<Vec<Task>> {
    let Selection { limit, ids, shard } = selection;
    let mut tasks = tasks;
    if let Some(ids) = ids {
        tasks.retain(|task| ids.contains(&task.id));
    }
    if let Some(limit) = limit {
        if !(*limit > 0.0 && limit.is_finite()) || (*limit > 1.0 && limit.fract() != 0.0) {
            return Err(Error::Other(format!("limit {limit}: use a number of tasks, or a share below 1")));
        }
        let n = if *limit < 1.0 { (limit * tasks.len() as f64).ceil() } else { *limit };
        tasks.truncate(n as usize);
    }
    if let Some((i, n)) = *shard {
        if !(1..=n).contains(&i) {
            return Err(Error::Other(format!("shard {i}/{n}: shards are numbered from 1 to {n}")));
        }
        tasks.retain(|task| shard_of(&task.id, n) == i);
    }
    if tasks.is_empty() && ids.is_none() && shard.is_none() {
        return Err(Error::Other(format!("{name}: no task is left")));
    }
    Ok(tasks)
}

fn shard_of(id: &str, n: u64) -> u64 {
    let hash = Sha256::digest(id);
    u64::from_le_bytes(hash[..8].try_into().expect("a hash has 32 bytes")) % n + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks(n: usize) -> Vec<Task> {
        let task = |i: usize| Task {
            id: format!("t{i}"),
            question: "q".to_owned(),
            gold: Vec::new(),
            files: Vec::new(),
            more: Default::default(),
        };
        (0..n).map(task).collect()
    }

    fn ids(tasks: &[Task]) -> Vec<&str> {
        tasks.iter().map(|task| task.id.as_str()).collect()
    }

    #[test]
    fn shards_are_disjoint_and_together_all() {
        let mut all = Vec::new();
        for i in 1..=3 {
            let shard = Selection { shard: Some((i, 3)), ..Selection::default() };
            all.extend(select(tasks(50), &shard, "x").expect("a shard"));
        }
        all.sort_by_key(|task| task.id[1..].parse::<usize>().expect("a number"));
        assert_eq!(ids(&all), ids(&tasks(50)));
        for shard in [(0, 3), (4, 3), (1, 0)] {
            let selection = Selection { shard: Some(shard), ..Selection::default() };
            assert!(select(tasks(5), &selection, "x").is_err(), "{shard:?}");
        }
    }

    #[test]
    fn limits_are_numbers_or_shares() {
        for (limit, n) in [(3.0, 3), (0.1, 1), (0.5, 5), (1.0, 1), (99.0, 10)] {
            let selection = Selection { limit: Some(limit), ..Selection::default() };
            assert_eq!(select(tasks(10), &selection, "x").expect("tasks").len(), n, "{limit}");
        }
        for limit in [0.0, -1.0, f64::NAN, 2.5, f64::INFINITY] {
            let selection = Selection { limit: Some(limit), ..Selection::default() };
            assert!(select(tasks(10), &selection, "x").is_err(), "{limit}");
        }
        let chosen = Selection { ids: Some(["t7".to_owned(), "t2".to_owned()].into()), ..Selection::default() };
        assert_eq!(ids(&select(tasks(10), &chosen, "x").expect("two")), ["t2", "t7"]);
    }
}
