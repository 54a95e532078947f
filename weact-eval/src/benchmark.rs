//! The benchmarks by name.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A public benchmark whose files are read and whose answers are graded here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Benchmark {
    Gaia,
    TwoWiki,
    Bamboogle,
    MuSiQue,
    WebWalkerQa,
    XbenchDeepSearch,
    BrowseComp,
    Frames,
    MegaScience,
    SciBench,
    Ds1000,
    ResearchQa,
    DeepResearchBench,
    MmluPro,
    IfEval,
}

/// In the order of the paper's tables: the benchmark, its name in files and on the command line, and its title in tables.
const NAMES: [(Benchmark, &str, &str); 15] = [
    (Benchmark::Gaia, "gaia", "GAIA"),
    (Benchmark::TwoWiki, "2wiki", "2Wiki"),
    (Benchmark::Bamboogle, "bamboogle", "Bamboogle"),
    (Benchmark::MuSiQue, "musique", "MuSiQue"),
    (Benchmark::WebWalkerQa, "webwalkerqa", "WebWalkerQA"),
    (Benchmark::XbenchDeepSearch, "xbench", "xbench-DS"),
    (Benchmark::BrowseComp, "browsecomp", "BrowseComp"),
    (Benchmark::Frames, "frames", "FRAMES"),
    (Benchmark::MegaScience, "megascience", "MegaScience"),
    (Benchmark::SciBench, "scibench", "SciBench"),
    (Benchmark::Ds1000, "ds1000", "DS-1000"),
    (Benchmark::ResearchQa, "researchqa", "ResearchQA"),
    (Benchmark::DeepResearchBench, "deepresearch-bench", "DeepResearch Bench"),
    (Benchmark::MmluPro, "mmlu-pro", "MMLU-Pro"),
    (Benchmark::IfEval, "ifeval", "IFEval"),
];

impl Benchmark {
    /// All, in the order of the paper's tables.
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(|(benchmark, ..)| benchmark)
    }

    /// The name in files and on the command line.
    pub fn name(self) -> &'static str {
        self.names().1
    }

    /// The name in tables.
    pub fn title(self) -> &'static str {
        self.names().2
    }

    /// Whether its rows are published obfuscated: their plain text is shown and written only where that was asked for.
    pub fn is_secret(self) -> bool {
        matches!(self, Self::XbenchDeepSearch | Self::BrowseComp)
    }

    fn names(self) -> (Self, &'static str, &'static str) {
        NAMES.into_iter().find(|&(benchmark, ..)| benchmark == self).expect("every benchmark has its names")
    }
}

impl fmt::Display for Benchmark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Benchmark {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = || Self::all().map(Self::name).collect::<Vec<_>>().join(", ");
        Self::all().find(|b| b.name() == name).ok_or_else(|| format!("unknown benchmark {name:?}: use one of {}", known()))
    }
}

impl TryFrom<String> for Benchmark {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

impl From<Benchmark> for String {
    fn from(benchmark: Benchmark) -> Self {
        benchmark.name().to_owned()
    }
}
