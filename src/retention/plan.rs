//! Which stages are trained, from what, and whose weights score whom.

use std::path::{Path, PathBuf};

use serde::Serialize;
use weact_core::Capability;
use weact_train::{config::Run, partition};

use super::Study;

/// How adapters are shared (§3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// One adapter of the active rank, carried on from stage to stage.
    SharedActive,
    /// One adapter with as many parameters as all several have together.
    SharedTotal,
    /// One adapter for each capability.
    ByCapability,
    /// As many adapters; each trajectory trains one, whatever the capability.
    Random,
}

impl Arm {
    /// All, in the order of the table.
    pub const ALL: [Self; 4] = [Self::SharedActive, Self::SharedTotal, Self::ByCapability, Self::Random];

    /// In records and paths.
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedActive => "shared-active",
            Self::SharedTotal => "shared-total",
            Self::ByCapability => "by-capability",
            Self::Random => "random",
        }
    }
}

/// One stage to train.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    /// In progress and errors.
    pub(super) name: String,
    /// How.
    pub(super) run: Run,
}

/// All points of all orders: the base, then every beginning of every order, those that others go on from before these.
pub(super) fn points(capabilities: &[Capability]) -> Vec<Vec<Capability>> {
    let mut points: Vec<Vec<Capability>> = vec![Vec::new()];
    let mut next = 0;
    while let Some(point) = points.get(next).cloned() {
        let rest = capabilities.iter().filter(|capability| !point.contains(capability));
        points.extend(rest.map(|capability| [point.clone(), vec![capability.clone()]].concat()));
        next += 1;
    }
    points
}

/// Every stage, after those from which it goes on. Parts of the training data are in `part_files`.
pub(super) fn stages(study: &Study, part_files: &[PathBuf]) -> Vec<Stage> {
    let mut stages = Vec::new();
    for arm in Arm::ALL {
        for point in points(&study.capabilities) {
            let Some((capability, before)) = point.split_last() else { continue };
            let rank = if arm == Arm::SharedTotal { study.rank_total } else { study.rank_active };
            let mut add = |adapter: Option<usize>, data: &[PathBuf]| {
                let mut run = study.stage(capability, rank, data.to_vec());
                run.out = directory(study, arm, &point, adapter);
                run.lora.continue_from = (!before.is_empty()).then(|| directory(study, arm, before, adapter));
                let name = run.out.strip_prefix(&study.out).unwrap_or(&run.out).display().to_string();
                stages.push(Stage { name, run });
            };
            match arm {
                // Nothing of another stage reaches this adapter.
                Arm::ByCapability if !before.is_empty() => {}
                Arm::SharedActive | Arm::SharedTotal | Arm::ByCapability => add(None, &study.data),
                Arm::Random => part_files.iter().enumerate().for_each(|(i, file)| add(Some(i), std::slice::from_ref(file))),
            }
        }
    }
    stages
}

/// The adapter under which `capability` in `trajectory` is scored after these stages; the base where there is none yet.
pub(super) fn weights(
    study: &Study,
    arm: Arm,
    after: &[Capability],
    capability: &Capability,
    trajectory: &str,
) -> Option<PathBuf> {
    if after.is_empty() {
        return None;
    }
    match arm {
        Arm::SharedActive | Arm::SharedTotal => Some(directory(study, arm, after, None)),
        Arm::ByCapability => after.contains(capability).then(|| directory(study, arm, std::slice::from_ref(capability), None)),
        Arm::Random => {
            let adapter = partition::part(study.seed, trajectory, study.capabilities.len());
            Some(directory(study, arm, after, Some(adapter)))
        }
    }
}

/// Where the adapter after these stages is: what goes on from it is within it, so that beside it are only those that go on from the same.
fn directory(study: &Study, arm: Arm, after: &[Capability], adapter: Option<usize>) -> PathBuf {
    let mut path = study.out.join(STAGES).join(arm.name());
    if let Some(adapter) = adapter {
        path.push(format!("adapter-{adapter}"));
    }
    for (i, capability) in after.iter().enumerate() {
        path.push(if i == 0 { capability.to_string() } else { format!("then-{capability}") });
    }
    path
}

/// The folder of the trainings in a study's directory.
pub(super) const STAGES: &str = "stages";

/// The file of a part of the training data.
pub(super) fn part_file(data: &Path, part: usize) -> PathBuf {
    data.join(format!("part-{part}.jsonl"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn study() -> Study {
        let text = "model = \"m\"\ndata = [\"d\"]\nvalid = [\"v\"]\nout = \"o\"\n";
        weact_core::io::toml_text::parse(text).expect("minimal")
    }

    #[test]
    fn orders_that_begin_alike_share_their_first_stages() {
        let study = study();
        let parts: Vec<PathBuf> = (0..3).map(|i| part_file(Path::new("o/data"), i)).collect();
        let stages = stages(&study, &parts);
        let of = |arm: &str| stages.iter().filter(|stage| stage.name.starts_with(&format!("stages/{arm}/"))).count();
        // 3 first stages, 6 second ones, 6 third ones.
        assert_eq!(Arm::ALL.map(|arm| of(arm.name())), [15, 15, 3, 45]);
        for (i, stage) in stages.iter().enumerate() {
            let from = &stage.run.lora.continue_from;
            assert!(from.iter().all(|from| stages[..i].iter().any(|earlier| earlier.run.out == *from)), "{}", stage.name);
        }
    }

    #[test]
    fn with_one_adapter_a_capability_later_stages_change_no_score() {
        let study = study();
        let [plan, search, write] = &study.capabilities[..] else { panic!("three") };
        let after = |after: &[&Capability], capability| {
            let after: Vec<Capability> = after.iter().map(|c| (*c).clone()).collect();
            weights(&study, Arm::ByCapability, &after, capability, "q1")
        };
        assert_eq!(after(&[plan, search, write], plan), after(&[plan], plan));
        assert_eq!(after(&[plan, search], write), None);
        assert_ne!(after(&[plan, search], plan), after(&[plan, search], search));
    }

    #[test]
    fn under_random_partition_a_trajectory_stays_with_its_adapter() {
        let study = study();
        let [plan, search, _] = &study.capabilities[..] else { panic!("three") };
        let both = [plan.clone(), search.clone()];
        let (first, then) =
            (weights(&study, Arm::Random, &both[..1], plan, "q1"), weights(&study, Arm::Random, &both, plan, "q1"));
        let (first, then) = (first.expect("trained"), then.expect("trained"));
        assert!(then.starts_with(first));
        assert_eq!(weights(&study, Arm::Random, &both, search, "q1"), Some(then));
    }
}
