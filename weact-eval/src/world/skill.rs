//! What a model still can of what it was pre-trained for (App. H in the toy): exercises, and trajectories in plain words, external
//! tools off, so that the results in them are given.

use weact_core::{
    Backbone,
    chat::Chat,
    lora::FactorMap,
    message::Message,
    nll::{self, Targets},
};

use super::{
    document::{Document, Tools, document},
    general,
};
use crate::Result;

/// Seed of the series that is measured: neither pre-training nor its validation draws from it.
const SEED: u64 = 1_000_003;

/// How well a model does one kind of thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Skill {
    /// `exercises` or `plain trajectories`.
    pub suite: &'static str,
    /// Documents in which every token of the policy's turns is the most likely one: what greedy decoding solves.
    pub n_right: usize,
    /// For each document the mean negative log-likelihood of the tokens of the policy's turns, in nats.
    pub nll_nats: Vec<f64>,
}

impl Skill {
    /// The mean over documents, in nats.
    pub fn mean_nll_nats(&self) -> f64 {
        self.nll_nats.iter().sum::<f64>() / self.nll_nats.len() as f64
    }
}

/// The skills of `backbone` under `factors`, each over `n` documents that are always the same.
///
/// # Errors
/// If a document can't be rendered or encoded.
///
/// # Panics
/// If `n` is zero.
pub fn measure(backbone: &Backbone, factors: Option<&FactorMap>, chat: &Chat, tools: &Tools, n: usize) -> Result<[Skill; 2]> {
    assert!(n > 0, "there is something to measure");
    let score = |suite, documents: &mut dyn Iterator<Item = Document>| -> Result<Skill> {
        let mut skill = Skill { suite, n_right: 0, nll_nats: Vec::new() };
        for document in documents.take(n) {
            let (nll, right) = policys_tokens(backbone, factors, chat, &document.messages, &document.tools)?;
            skill.nll_nats.push(nll);
            skill.n_right += usize::from(right);
        }
        Ok(skill)
    };
    let mut exercises = general::exercises(SEED, n).into_iter().map(|exercise| Document {
        id: String::new(),
        messages: exercise.messages,
        tools: Vec::new(),
        neutral: true,
    });
    let mut trajectories = (0..).map(|index| document(SEED, index, tools)).filter(|d| d.neutral && !d.tools.is_empty());
    Ok([score("exercises", &mut exercises)?, score("plain trajectories", &mut trajectories)?])
}

/// Mean NLL of the policy's tokens in nats, and whether each is the most likely one.
fn policys_tokens(
    backbone: &Backbone,
    factors: Option<&FactorMap>,
    chat: &Chat,
    messages: &[Message],
    tools: &[serde_json::Value],
) -> Result<(f64, bool)> {
    let (mut ids, mut mask) = (Vec::new(), Vec::new());
    for piece in chat.pieces(messages, tools, false)? {
        let piece_ids = chat.encode(&piece)?;
        mask.resize(mask.len() + piece_ids.len(), piece.is_turn);
        ids.extend(piece_ids);
    }
    let tokens = backbone.tokens(&[&ids])?;
    let targets = Targets::new(&[(&ids, &mask)], &backbone.device()).expect("the policy has a turn");
    let scored = nll::per_token(backbone, factors, backbone.hidden(&tokens, factors, None), &targets);
    let right = scored.n_top1() == targets.len();
    let sum: f64 = scored.nll.into_data().iter::<f64>().sum();
    Ok((sum / targets.len() as f64, right))
}
