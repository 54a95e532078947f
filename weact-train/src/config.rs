//! A training run's TOML file. Unknown keys are refused; the resolved configuration is saved with the run.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use weact_core::{
    Capability, card::Think, chat::ToolProtocol, context::Retention, io::toml_text, lora::Projection, sample::Rules,
};

use crate::{Error, Result, sft};

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// One adapter over the frozen backbone.
    Lora,
    /// All weights of the backbone, for all the named capabilities at once.
    Full,
}

/// One training run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// What is trained.
    pub kind: Kind,
    /// A Hugging Face folder.
    pub model: PathBuf,
    /// Trajectory or episode files.
    pub data: Vec<PathBuf>,
    /// `lora`: whose stages are supervised. Also the adapter's alias.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capability: Option<Capability>,
    /// `full`: whose stages are supervised.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capabilities: Vec<Capability>,
    /// The run directory. The adapter or model is written into it.
    pub out: PathBuf,
    /// The adapter's shape.
    #[serde(default)]
    pub lora: Lora,
    /// The optimisation.
    #[serde(default)]
    pub train: Train,
    /// What a stage sees of the history.
    #[serde(default)]
    pub context: Context,
    /// Held-back data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid: Option<Valid>,
}

/// The adapter's shape. The paper leaves alpha open (App. F is not published); 32 is the convention of its reference trainer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lora {
    /// Rank; §4.1 uses 32, 64, 32 for plan, search, write.
    pub rank: usize,
    /// Scale numerator.
    pub alpha: f64,
    /// Adapted projections.
    pub targets: Targets,
    /// Scale by `alpha / sqrt(rank)`.
    pub rslora: bool,
    /// Start from this adapter's factors instead of fresh ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub continue_from: Option<PathBuf>,
}

impl Default for Lora {
    fn default() -> Self {
        Self {
            rank: 32,
            alpha: 32.0,
            targets: Targets::Names(Projection::BLOCK.iter().map(|p| p.name().to_owned()).collect()),
            rslora: false,
            continue_from: None,
        }
    }
}

/// Which projections: a list of names, or `"paper"` for the seven of a block and the output head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Targets {
    /// `"paper"`
    Preset(String),
    /// Names.
    Names(Vec<String>),
}

impl Targets {
    /// The projections.
    ///
    /// # Errors
    /// If a name matches no module, or the list is empty.
    pub fn projections(&self) -> weact_core::Result<Vec<Projection>> {
        let mut projections = match self {
            Self::Preset(name) if name == "paper" => Projection::BLOCK.into_iter().chain([Projection::LmHead]).collect(),
            Self::Preset(name) => vec![name.parse()?],
            Self::Names(names) => names.iter().map(|n| n.parse()).collect::<weact_core::Result<Vec<Projection>>>()?,
        };
        if projections.is_empty() {
            return Err(weact_core::Error::Model("targets is empty: nothing would be trained".to_owned()));
        }
        projections.sort();
        projections.dedup();
        Ok(projections)
    }
}

/// How the learning rate moves after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Along half a cosine to zero.
    Cosine,
    /// Not at all.
    Constant,
}

/// Which body of the model's operators runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Body {
    /// Kernels of this project.
    Fused,
    /// Burn's operations.
    Composed,
}

/// The optimisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Train {
    /// Passes over the data; exclusive with `steps`. Without either, the paper's 2 (§4.1 trains 2, 3, 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<usize>,
    /// Updates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<usize>,
    /// Samples per update.
    pub batch_rows: usize,
    /// Samples computed at a time; the update is the same for any value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_rows: Option<usize>,
    /// Longest sample in tokens; the paper's 32k.
    pub max_length: usize,
    /// Share of the stages that may be left out for being too long.
    pub max_lost: f64,
    /// Peak learning rate.
    pub lr: f64,
    /// After the warm-up.
    pub schedule: Schedule,
    /// Below 1 a share of all updates, from 1 on a number of updates.
    pub warmup: f64,
    /// Decoupled decay of matrices; norms and biases have none.
    pub weight_decay: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Largest norm of the whole gradient; 0 does not clip.
    pub clip: f64,
    /// Decides initial factors and order.
    pub seed: u64,
    /// Element type of the frozen weights and the computation.
    pub dtype: String,
    /// Updates between checkpoints.
    pub save_every: usize,
    /// Checkpoints kept.
    pub keep: usize,
    /// Recompute each block in the backward pass instead of keeping what it needs: a third more work, a fraction of the memory.
    /// Without it, decided by the size of a micro-batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<bool>,
    /// Which body of the model's operators runs. Without it, the fused ones where the device has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operators: Option<Body>,
}

impl Default for Train {
    fn default() -> Self {
        Self {
            epochs: None,
            steps: None,
            batch_rows: 8,
            micro_rows: None,
            max_length: 32768,
            max_lost: 0.01,
            lr: 1e-4,
            schedule: Schedule::Cosine,
            warmup: 0.03,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            clip: 1.0,
            seed: 0,
            dtype: "f32".to_owned(),
            save_every: 50,
            keep: 2,
            recompute: None,
            operators: None,
        }
    }
}

/// What a stage sees of the history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Context {
    /// Tool results kept (App. A.1).
    pub keep_tool_result: usize,
    /// Longest tool result in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_tool_result: Option<usize>,
    /// Thinking of earlier turns.
    pub think: Think,
    /// How tools reach the model.
    pub tool_protocol: ToolProtocol,
    /// Leave out stages without the policy's own exit call.
    pub require_exit: bool,
}

impl Default for Context {
    fn default() -> Self {
        Self {
            keep_tool_result: 5,
            clip_tool_result: None,
            think: Think::Preserve,
            tool_protocol: ToolProtocol::Template,
            require_exit: true,
        }
    }
}

/// Held-back data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Valid {
    /// Trajectory files.
    pub data: Vec<PathBuf>,
    /// Updates between evaluations; there is always one before the first and one after the last.
    #[serde(default = "every")]
    pub every: usize,
}

fn every() -> usize {
    50
}

impl Run {
    /// Reads a run's TOML file.
    ///
    /// # Errors
    /// [`Error::Config`], with the line and the nearest known key, if it can't be read or is not what it should be.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(|e| Error::Config { path: path.to_owned(), why: e.to_string() })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self> {
        let bad = |why: String| Error::Config { path: path.to_owned(), why };
        let run: Self = toml_text::parse(text).map_err(bad)?;
        run.check().map_err(bad)?;
        Ok(run)
    }

    /// Whether the keys' values fit each other: what reading a file checks, for runs that are made by a program.
    ///
    /// # Errors
    /// What is wrong, by its key.
    pub fn check(&self) -> std::result::Result<(), String> {
        let t = &self.train;
        let wrong = match (self.kind, &self.capability, self.capabilities.as_slice()) {
            (Kind::Lora, None, _) => "kind = \"lora\" needs the key capability",
            (Kind::Lora, _, [_, ..]) => "kind = \"lora\" trains one capability; capabilities is for kind = \"full\"",
            (Kind::Full, Some(_), _) | (Kind::Full, _, []) => {
                "kind = \"full\" needs the key capabilities (a list) and not capability"
            }
            _ if self.kind == Kind::Full && t.dtype != "f32" => "kind = \"full\" computes in f32; leave [train] dtype away",
            _ if self.kind == Kind::Full && self.lora.continue_from.is_some() => "[lora] continue_from is for kind = \"lora\"",
            _ if self.out.as_os_str().is_empty() => "out is empty",
            _ if self.valid.as_ref().is_some_and(|v| v.data.is_empty()) => "[valid] data is empty",
            _ if self.data.is_empty() => "data is empty",
            _ if t.epochs.is_some() && t.steps.is_some() => "[train] has epochs and steps; give one",
            _ if t.epochs == Some(0) || t.steps == Some(0) => "[train] epochs and steps must be at least 1",
            _ if t.batch_rows == 0 || t.micro_rows == Some(0) => "[train] batch_rows and micro_rows must be at least 1",
            _ if t.max_length < 2 => "[train] max_length must be at least 2",
            _ if !(t.lr.is_finite() && t.lr > 0.0) => "[train] lr must be positive",
            _ if t.warmup.is_nan() || t.warmup < 0.0 => "[train] warmup must not be negative",
            _ if !(0.0..1.0).contains(&t.beta1) || !(0.0..1.0).contains(&t.beta2) => "[train] beta1 and beta2 must be in [0, 1)",
            _ if t.weight_decay.is_nan() || t.weight_decay < 0.0 || t.clip.is_nan() || t.clip < 0.0 => {
                "[train] weight_decay and clip must not be negative"
            }
            _ if t.save_every == 0 || t.keep == 0 => "[train] save_every and keep must be at least 1",
            _ if !(0.0..=1.0).contains(&t.max_lost) => "[train] max_lost is a share between 0 and 1",
            _ if self.lora.rank == 0 => "[lora] rank must be at least 1",
            _ if !(self.lora.alpha.is_finite() && self.lora.alpha > 0.0) => "[lora] alpha must be positive",
            _ if self.valid.as_ref().is_some_and(|v| v.every == 0) => "[valid] every must be at least 1",
            _ => {
                self.lora.targets.projections().map_err(|e| format!("[lora] {e}"))?;
                return sft::dtype(&t.dtype).map(drop).map_err(|e| format!("[train] {e}"));
            }
        };
        Err(wrong.to_owned())
    }

    /// The capabilities whose stages are supervised.
    pub fn supervised(&self) -> Vec<Capability> {
        self.capability.iter().chain(&self.capabilities).cloned().collect()
    }

    /// How samples are cut.
    pub fn rules(&self) -> Rules {
        Rules { retention: self.retention(), max_length: self.train.max_length, require_exit: self.context.require_exit }
    }

    /// What the history keeps.
    pub fn retention(&self) -> Retention {
        Retention { keep_tool_result: self.context.keep_tool_result, clip_tool_result: self.context.clip_tool_result }
    }

    /// The keys in which two configurations differ, as `train.lr`. `out` is left aside: a run directory may be moved.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let flat = |run: &Self| {
            let mut flat = BTreeMap::new();
            flatten("", &toml::Value::try_from(run).expect("a run serialises"), &mut flat);
            flat.remove("out");
            flat
        };
        let (a, b) = (flat(self), flat(other));
        let mut keys: Vec<String> = a.keys().chain(b.keys()).filter(|k| a.get(*k) != b.get(*k)).cloned().collect();
        keys.sort();
        keys.dedup();
        keys
    }

    /// The resolved configuration as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a run serialises")
    }
}

fn flatten(prefix: &str, value: &toml::Value, into: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&path, value, into);
            }
        }
        other => {
            into.insert(prefix.to_owned(), other.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "kind = \"lora\"\nmodel = \"m\"\ndata = [\"d.jsonl\"]\ncapability = \"plan\"\nout = \"o\"\n";

    fn error(extra: &str) -> String {
        Run::parse(Path::new("run.toml"), &format!("{MINIMAL}{extra}")).expect_err(extra).to_string()
    }

    #[test]
    fn each_mistake_is_named_with_its_line_and_the_nearest_key() {
        let cases = [
            ("[train]\nlearning_rte = 1e-3\n", vec!["line 7", "[train]", "learning_rte"]),
            ("[train]\nwarmpu = 3\n", vec!["line 7", "did you mean `warmup`?"]),
            ("[train]\nrank = 3\n", vec!["line 7", "unknown field `rank`"]),
            ("[lora]\nlora_alpha = 3\n", vec!["line 7", "did you mean `alpha`?"]),
            ("[train]\nlr = \"fast\"\n", vec!["line 7", "invalid type"]),
            ("[train\nlr = 1\n", vec!["line 6"]),
            ("[train]\nepochs = 1\nsteps = 2\n", vec!["epochs and steps"]),
            ("[context]\nthink = \"strip\"\n", vec!["line 7", "preserve"]),
            ("[lora]\ntargets = [\"q_proj\", \"qproj\"]\n", vec!["[lora] target \"qproj\"", "did you mean q_proj?"]),
            ("[lora]\ntargets = []\n", vec!["[lora] targets is empty"]),
            ("[train]\ndtype = \"fp16\"\n", vec!["[train] dtype \"fp16\""]),
            ("[train]\noperators = \"fast\"\n", vec!["line 7", "fused", "composed"]),
        ];
        for (extra, parts) in cases {
            let error = error(extra);
            for part in parts {
                assert!(error.contains(part), "{extra:?} gives {error:?} without {part:?}");
            }
        }
    }

    #[test]
    fn the_saved_configuration_reads_back_and_differences_are_named() {
        let run = Run::parse(Path::new("run.toml"), MINIMAL).expect("minimal");
        assert_eq!(Run::parse(Path::new("run.toml"), &run.to_toml()).expect("resolved"), run);
        let mut other = run.clone();
        other.train.lr = 2e-4;
        other.out = "elsewhere".into();
        assert_eq!(run.differences(&other), ["train.lr"]);
    }
}
