//! Which constraints a query deploys, by their words: two rules, for annotations that don't list it. Words are runs of ASCII letters and digits,
//! so that text in other scripts matches nothing: list its memberships.
//!
//! The rules are SearchAtlas's; the lists of words left out are ours, so that a rare pair may be judged otherwise there.

use std::collections::{BTreeMap, BTreeSet};

use super::graph::{Annotation, Graph, NodeType, Unit};
use crate::{Error, Result};

/// Words that tell nothing.
pub(super) const STOP: &[&str] = &[
    "about", "after", "all", "also", "am", "an", "and", "any", "are", "as", "at", "be", "been", "before", "but", "by", "can",
    "did", "do", "does", "for", "from", "had", "has", "have", "he", "her", "his", "how", "if", "in", "into", "is", "it", "its",
    "many", "more", "most", "much", "no", "not", "of", "on", "one", "or", "other", "out", "over", "she", "so", "some", "than",
    "that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to", "under", "up", "was", "we", "were",
    "what", "when", "where", "which", "while", "who", "whom", "whose", "why", "will", "with", "would", "you", "your",
];

/// Words too general to tell a constraint.
const GENERIC: &[&str] =
    &["answer", "date", "find", "first", "last", "list", "name", "number", "people", "person", "place", "thing", "time", "year"];

/// When a query deploys a constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchRule {
    /// It has one of the constraint's words where that has one or two, else half of them and at least two.
    TokenCoverage,
    /// It has the constraint's only term; or two terms, one of which has four letters or more if any of the constraint's has; or one of eight
    /// letters or more. Terms are words in the singular, without generic ones.
    DistinctiveTerms,
}

impl MatchRule {
    /// Whether `query` deploys the constraint `unit`.
    pub fn matches(self, unit: &str, query: &str) -> bool {
        match self {
            Self::TokenCoverage => {
                let words = |text| ascii_words(text, |word| word.len() > 1);
                let unit = words(unit);
                let needed = if unit.len() <= 2 { 1 } else { unit.len().div_ceil(2).max(2) };
                !unit.is_empty() && unit.intersection(&words(query)).count() >= needed
            }
            Self::DistinctiveTerms => {
                let unit = terms(unit);
                let hits: Vec<String> = unit.intersection(&terms(query)).cloned().collect();
                let is_long = |term: &String| term.len() >= 4 && !term.bytes().all(|b| b.is_ascii_digit());
                match hits.as_slice() {
                    [] => false,
                    _ if unit.len() == 1 => true,
                    [hit] => is_long(hit) && hit.len() >= 8,
                    hits => hits.iter().any(is_long) || !unit.iter().any(is_long),
                }
            }
        }
    }
}

impl Annotation {
    /// The annotation of `graph` with the constraints `units`, matched with its queries by `rule`.
    ///
    /// # Errors
    /// If a unit's id stands twice, or a unit or a query has no text.
    pub fn by_words(units: Vec<Unit>, graph: &Graph, rule: MatchRule) -> Result<Self> {
        let text = |text: &Option<String>, what: &str, id: &str| {
            let text = text.clone().filter(|text| !text.trim().is_empty());
            text.ok_or_else(|| Error::Other(format!("annotation: {what} {id:?} has no text: list query_unit_ids instead")))
        };
        let texts = units.iter().map(|unit| text(&unit.text, "unit", &unit.unit_id)).collect::<Result<Vec<_>>>()?;
        let mut query_unit_ids = BTreeMap::new();
        for query in graph.nodes().iter().filter(|node| node.kind == NodeType::Query) {
            let own = text(&query.text, "query", &query.id)?;
            let deployed = units.iter().zip(&texts).filter(|(_, text)| rule.matches(text, &own));
            query_unit_ids.insert(query.id.clone(), deployed.map(|(unit, _)| unit.unit_id.clone()).collect());
        }
        let annotation = Self { constraint_units: units, query_unit_ids };
        annotation.check(graph)?;
        Ok(annotation)
    }
}

fn ascii_words(text: &str, keep: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let lower = text.to_lowercase();
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    words.filter(|word| !word.is_empty() && keep(word) && !STOP.contains(word)).map(str::to_owned).collect()
}

fn terms(text: &str) -> BTreeSet<String> {
    let words = ascii_words(text, |word| word.len() > 1 || word.bytes().all(|b| b.is_ascii_digit()));
    words.iter().map(|word| singular(word)).filter(|term| !GENERIC.contains(&term.as_str())).collect()
}

fn singular(word: &str) -> String {
    let without = |n: usize| word[..word.len() - n].to_owned();
    let has_es = ["ches", "shes", "xes", "zes", "sses"].iter().any(|end| word.ends_with(end));
    match word.len() {
        5.. if word.ends_with("ies") => without(3) + "y",
        5.. if has_es => without(2),
        4.. if word.ends_with('s') && !word.ends_with("ss") => without(1),
        _ => word.to_owned(),
    }
}
