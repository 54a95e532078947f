//! The TOML file of `weact diagnose`, one for all diagnostics. Unknown keys are refused.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use weact_core::{Capability, context::Retention, io::toml_text, sample::Rules, split, stats::Resampling};
use weact_diagnostics::mismatch::Positions;
use weact_train::config::Context;

use super::{Error, Result};

/// One run: specialists, what they are compared with, and on which records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// A Hugging Face folder.
    pub model: PathBuf,
    /// Trajectory or episode files.
    pub data: Vec<PathBuf>,
    /// Where records, tables and figures go.
    pub out: PathBuf,
    /// Longest record in tokens, at most the model's positions; the paper's 32k.
    #[serde(default = "max_length")]
    pub max_length: usize,
    /// The specialists.
    pub adapters: Vec<AdapterPath>,
    /// What is measured against them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fusions: Vec<FusionPath>,
    /// What a stage sees of the history: as in training.
    #[serde(default)]
    pub context: Context,
    /// Which trajectories are looked at.
    #[serde(default)]
    pub records: Records,
    /// Intervals of means.
    #[serde(default)]
    pub bootstrap: Bootstrap,
    /// Which positions the mismatch is taken at.
    #[serde(default)]
    pub mismatch: Positions,
}

fn max_length() -> usize {
    32768
}

/// A specialist.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterPath {
    /// Whose stages it was trained on.
    pub capability: Capability,
    /// Its folder.
    pub path: PathBuf,
}

/// A fusion of specialists, or any other adapter to compare with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FusionPath {
    /// The name in tables.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
}

/// Which trajectories are looked at, for each capability those that have a stage of it (App. E.1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Records {
    /// The first so many after the shuffle.
    pub per_capability: usize,
    /// Of the shuffle, [`split::split`].
    pub shuffle_seed: u64,
}

impl Default for Records {
    /// App. E.1.
    fn default() -> Self {
        Self { per_capability: split::N_VALID, shuffle_seed: split::SEED }
    }
}

/// Intervals of means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Bootstrap {
    /// Resamples.
    pub resamples: usize,
    /// Of their draws.
    pub seed: u64,
}

impl Default for Bootstrap {
    /// The paper gives no intervals here.
    fn default() -> Self {
        Self { resamples: 10_000, seed: 0 }
    }
}

impl Bootstrap {
    /// How means are resampled.
    pub fn resampling(&self) -> Resampling {
        Resampling { n: self.resamples, seed: self.seed }
    }
}

impl Run {
    /// Reads the TOML file.
    ///
    /// # Errors
    /// [`Error::Config`], with the line and the nearest known key, if it can't be read or is not what it should be.
    pub fn read(path: &Path) -> Result<Self> {
        let bad = |why: String| Error::Config { path: path.to_owned(), why };
        let text = fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        let run: Self = toml_text::parse(&text).map_err(bad)?;
        run.check().map_err(|why| bad(why.to_owned()))?;
        Ok(run)
    }

    fn check(&self) -> std::result::Result<(), &'static str> {
        let twice = |mut names: Vec<&str>| {
            let n = names.len();
            n != names.drain(..).collect::<BTreeSet<_>>().len()
        };
        let capabilities = self.adapters.iter().map(|a| a.capability.as_str()).collect();
        let names = self.fusions.iter().map(|f| f.name.as_str()).collect();
        match self {
            _ if self.out.as_os_str().is_empty() => Err("out is empty"),
            _ if self.data.is_empty() => Err("data is empty"),
            _ if self.max_length < 2 => Err("max_length must be at least 2"),
            _ if self.adapters.is_empty() => Err("there is no [[adapters]]"),
            _ if twice(capabilities) => Err("two [[adapters]] have the same capability"),
            _ if self.fusions.iter().any(|f| f.name.trim().is_empty()) => Err("a [[fusions]] has no name"),
            _ if twice(names) => Err("two [[fusions]] have the same name"),
            _ if self.records.per_capability == 0 => Err("[records] per_capability must be at least 1"),
            _ if self.bootstrap.resamples == 0 => Err("[bootstrap] resamples must be at least 1"),
            _ if self.mismatch.per_record == 0 => Err("[mismatch] per_record must be at least 1"),
            _ if self.mismatch.prefix_tokens < 2 => Err("[mismatch] prefix_tokens must be at least 2"),
            _ => Ok(()),
        }
    }

    /// How records are cut, for a model of so many positions.
    pub fn rules(&self, max_positions: usize) -> Rules {
        let Context { keep_tool_result, clip_tool_result, require_exit, .. } = self.context;
        let retention = Retention { keep_tool_result, clip_tool_result };
        Rules { retention, max_length: self.max_length.min(max_positions), require_exit }
    }

    /// The resolved configuration as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a run serialises")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "model = \"m\"\ndata = [\"d.jsonl\"]\nout = \"o\"\n[[adapters]]\ncapability = \"plan\"\npath = \"p\"\n";

    fn read(text: &str) -> Result<Run> {
        let dir = std::env::temp_dir().join(format!("weact-diagnose-{}-{:x}", std::process::id(), text.len()));
        fs::create_dir_all(&dir).expect("a folder");
        let path = dir.join("run.toml");
        fs::write(&path, text).expect("writable");
        let run = Run::read(&path);
        fs::remove_dir_all(dir).expect("it was made");
        run
    }

    #[test]
    fn the_paper_s_values_are_the_defaults_and_read_back() {
        let run = read(MINIMAL).expect("minimal");
        assert_eq!((run.records.per_capability, run.records.shuffle_seed), (200, 42));
        assert_eq!((run.mismatch.prefix_tokens, run.mismatch.per_record, run.max_length), (8192, 4, 32768));
        assert_eq!(read(&run.to_toml()).expect("resolved"), run);
    }

    #[test]
    fn each_mistake_is_named() {
        for (extra, expected) in [
            ("[mismatch]\nprefix_token = 3\n", "did you mean `prefix_tokens`?"),
            ("[mismatch]\nchoice = \"middle\"\n", "even"),
            ("[records]\nper_capability = 0\n", "per_capability must be"),
            ("[[adapters]]\ncapability = \"plan\"\npath = \"q\"\n", "the same capability"),
            ("[[fusions]]\nname = \"a\"\npath = \"q\"\n[[fusions]]\nname = \"a\"\npath = \"r\"\n", "the same name"),
            ("[[fusions]]\nname = \" \"\npath = \"q\"\n", "no name"),
            ("[bootstrap]\nresamples = 0\n", "resamples must be"),
        ] {
            let error = read(&format!("{MINIMAL}{extra}")).expect_err(extra).to_string();
            assert!(error.contains(expected), "{extra:?} gives {error:?}");
        }
        let error = read(&MINIMAL.replace("\"d.jsonl\"", "")).expect_err("no data").to_string();
        assert!(error.contains("data is empty"), "{error}");
    }
}
