//! The retention study (§3.1, Table 7, Figure 3): capabilities are trained one after another in every order, with one shared adapter or with
//! several, and each is measured before, between and after.
//!
//! The study trains all stages first, each into a run directory of its own, then measures every point, one durable record a trajectory and
//! capability. Table and figures are functions of the records. Orders that begin alike share their first stages.

mod plan;
mod measure;
mod report;
mod run;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use weact_core::{Capability, io::toml_text};
use weact_train::{
    Error, Result,
    config::{Context, Kind, Lora, Run, Targets, Train},
};

pub use measure::{RECORDS, read};
pub use plan::Arm;
pub use report::report;
pub use run::{Outcome, Progress, run};

/// A study's TOML file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Study {
    /// A Hugging Face folder.
    pub model: PathBuf,
    /// Trajectory files to train on.
    pub data: Vec<PathBuf>,
    /// Trajectory files to measure on, the monitoring subset among them.
    pub valid: Vec<PathBuf>,
    /// Trajectories of `valid` that are held apart and measured on their own; the paper has 168 and 24 (§3.1).
    #[serde(default = "monitor")]
    pub monitor: usize,
    /// Two to four, trained in every order.
    #[serde(default = "capabilities")]
    pub capabilities: Vec<Capability>,
    /// Rank of the smaller shared adapter, and of each of several.
    #[serde(default = "rank_active")]
    pub rank_active: usize,
    /// Rank of the larger shared adapter: that of all several together (§3.1).
    #[serde(default = "rank_total")]
    pub rank_total: usize,
    /// `alpha / r`, the same for every rank.
    #[serde(default = "alpha_per_rank")]
    pub alpha_per_rank: f64,
    /// Adapted projections.
    #[serde(default = "targets")]
    pub targets: Targets,
    /// Decides initial factors, order of samples, the monitoring subset, the random parts and the resamples.
    #[serde(default)]
    pub seed: u64,
    /// The study's directory.
    pub out: PathBuf,
    /// The optimisation of every stage. Under random partition each adapter has a share of the data: with `epochs` it makes that share of
    /// the updates, with `steps` as many as every other adapter.
    #[serde(default)]
    pub train: Train,
    /// What a stage sees of the history.
    #[serde(default)]
    pub context: Context,
}

fn monitor() -> usize {
    24
}

fn capabilities() -> Vec<Capability> {
    ["plan", "search", "write"].map(|name| Capability::new(name).expect("a legal name")).to_vec()
}

fn rank_active() -> usize {
    32
}

fn rank_total() -> usize {
    96
}

fn alpha_per_rank() -> f64 {
    1.0
}

fn targets() -> Targets {
    Lora::default().targets
}

impl Study {
    /// Reads a study's TOML file.
    ///
    /// # Errors
    /// [`Error::Config`], with the line and the nearest known key, if it can't be read or is not what it should be.
    pub fn read(path: &Path) -> Result<Self> {
        let bad = |why: String| Error::Config { path: path.to_owned(), why };
        let text = fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        let mut study: Self = toml_text::parse(&text).map_err(bad)?;
        if study.train.seed != 0 && study.train.seed != study.seed {
            return Err(bad("[train] seed: a study has one seed, give it as the key seed at the top".to_owned()));
        }
        study.train.seed = study.seed;
        study.check().map_err(bad)?;
        Ok(study)
    }

    /// Whether the keys' values fit each other.
    ///
    /// # Errors
    /// What is wrong, by its key.
    pub fn check(&self) -> std::result::Result<(), String> {
        let mut names = self.capabilities.clone();
        names.sort();
        names.dedup();
        let wrong = match () {
            () if names.len() != self.capabilities.len() => "capabilities has a name twice",
            () if !(2..=4).contains(&names.len()) => "capabilities must be two to four: every order of them is trained",
            () if self.valid.is_empty() => "valid is empty",
            () if self.rank_active == 0 || self.rank_total == 0 => "rank_active and rank_total must be at least 1",
            () if self.rank_total <= self.rank_active => "rank_total must be more than rank_active",
            () if !(self.alpha_per_rank.is_finite() && self.alpha_per_rank > 0.0) => "alpha_per_rank must be positive",
            () if self.train.seed != self.seed => "[train] seed must be that of the study",
            () => return self.stage(&self.capabilities[0], self.rank_active, self.data.clone()).check(),
        };
        Err(wrong.to_owned())
    }

    /// The training of one stage.
    fn stage(&self, capability: &Capability, rank: usize, data: Vec<PathBuf>) -> Run {
        let alpha = self.alpha_per_rank * rank as f64;
        Run {
            kind: Kind::Lora,
            model: self.model.clone(),
            data,
            capability: Some(capability.clone()),
            capabilities: Vec::new(),
            out: self.out.clone(),
            lora: Lora { rank, alpha, targets: self.targets.clone(), ..Lora::default() },
            train: self.train.clone(),
            context: self.context.clone(),
            valid: None,
        }
    }

    /// The keys in which two studies differ; `out` is one of them, because stages name those that they go on from.
    fn differences(&self, other: &Self) -> Vec<String> {
        let flat = |study: &Self| {
            let mut flat = BTreeMap::new();
            let toml::Value::Table(table) = toml::Value::try_from(study).expect("a study serialises") else {
                panic!("a study is a table");
            };
            for (key, value) in table {
                match value {
                    toml::Value::Table(section) => {
                        flat.extend(section.into_iter().map(|(inner, value)| (format!("{key}.{inner}"), value.to_string())));
                    }
                    value => _ = flat.insert(key, value.to_string()),
                }
            }
            flat
        };
        let (a, b) = (flat(self), flat(other));
        let mut keys: Vec<String> = a.keys().chain(b.keys()).filter(|key| a.get(*key) != b.get(*key)).cloned().collect();
        keys.sort();
        keys.dedup();
        keys
    }

    /// The resolved configuration as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a study serialises")
    }
}

/// What a diagnostic reports, as an error of the study.
pub(crate) fn of_diagnostics(error: weact_diagnostics::Error) -> Error {
    match error {
        weact_diagnostics::Error::Core(error) => Error::Core(error),
        other => Error::Other(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "model = \"m\"\ndata = [\"d.jsonl\"]\nvalid = [\"v.jsonl\"]\nout = \"o\"\n";

    fn parse(extra: &str) -> Result<Study> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("study.toml");
        fs::write(&path, format!("{MINIMAL}{extra}")).expect("writable");
        Study::read(&path)
    }

    #[test]
    fn each_mistake_is_named() {
        for (extra, part) in [
            ("rank_activ = 8\n", "did you mean `rank_active`?"),
            ("rank_active = 0\n", "rank_active and rank_total must be at least 1"),
            ("rank_active = 96\n", "rank_total must be more than rank_active"),
            ("capabilities = [\"plan\"]\n", "two to four"),
            ("capabilities = [\"plan\", \"plan\"]\n", "a name twice"),
            ("[train]\nseed = 3\n", "a study has one seed"),
            ("[train]\nlr = 0.0\n", "[train] lr"),
            ("[train]\nrank = 3\n", "unknown field `rank`"),
            ("alpha_per_rank = 0.0\n", "alpha_per_rank"),
            ("targets = []\n", "targets is empty"),
        ] {
            let error = parse(extra).expect_err(extra).to_string();
            assert!(error.contains(part), "{extra:?} gives {error:?} without {part:?}");
        }
    }

    #[test]
    fn the_saved_configuration_reads_back_and_differences_are_named() {
        let study = parse("seed = 4\n").expect("minimal");
        assert_eq!((study.train.seed, study.monitor, study.rank_total), (4, 24, 96));
        let again: Study = toml_text::parse(&study.to_toml()).expect("resolved");
        assert_eq!(again, study);
        let mut other = study.clone();
        (other.train.lr, other.monitor, other.out) = (2e-3, 3, "elsewhere".into());
        assert_eq!(study.differences(&other), ["monitor", "out", "train.lr"]);
    }
}
