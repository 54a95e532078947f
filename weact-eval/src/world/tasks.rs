//! The world's task files: test questions in the formats of eight public benchmarks, so that their readers read them.

use serde_json::{Map, Value, json};

use super::{
    World, WorldConfig,
    facts::{Entity, Fact},
    question::{Family, Question, Split},
};
use crate::{Error, Result, benchmark::Benchmark, task::Task};

/// The eight in the order of the paper's Table 1, each with its file in `datasets/toy/bench`, named as the original is.
pub const BENCHMARKS: [(Benchmark, &str); 8] = [
    (Benchmark::Gaia, "gaia/metadata.jsonl"),
    (Benchmark::TwoWiki, "2wiki/dev.json"),
    (Benchmark::Bamboogle, "bamboogle/bamboogle.csv"),
    (Benchmark::MuSiQue, "musique/musique_ans_dev.jsonl"),
    (Benchmark::WebWalkerQa, "webwalkerqa/main.jsonl"),
    (Benchmark::XbenchDeepSearch, "xbench/DeepSearch.csv"),
    (Benchmark::BrowseComp, "browsecomp/browse_comp_test_set.csv"),
    (Benchmark::Frames, "frames/test.tsv"),
];
/// The key under which the obfuscated files are stored.
const CANARY: &str = "The toy research world is invented; its rows are obfuscated only so that real readers are used. canary toy";
/// Noise of the world in which BrowseComp's questions are asked: twice the usual.
pub const BROWSE_NOISE: f64 = 0.4;

/// The world in which the questions of a benchmark are asked, as a change of the world of the others.
pub fn config_for(benchmark: Benchmark, config: WorldConfig) -> WorldConfig {
    match benchmark {
        Benchmark::BrowseComp => WorldConfig { noise: BROWSE_NOISE, ..config },
        _ => config,
    }
}

impl World {
    /// The first `n` tasks by analogy with `benchmark`.
    ///
    /// # Errors
    /// If the benchmark is none of [`BENCHMARKS`], or there are not `n` such questions.
    pub fn tasks(&self, benchmark: Benchmark, n: usize) -> Result<Vec<Task>> {
        let test = |family, n| self.family(family, Split::Test, n);
        let mix = |families: &[Family]| {
            let share = n.div_ceil(families.len());
            let lists: Vec<Vec<Question>> = families.iter().map(|&family| test(family, share)).collect();
            (0..share).flat_map(|i| lists.iter().filter_map(move |list| list.get(i).cloned()).collect::<Vec<_>>()).collect()
        };
        let mut questions: Vec<Question> = match benchmark {
            Benchmark::Gaia => self.questions(Split::Test, n),
            Benchmark::TwoWiki => mix(&[Family::Chain(2), Family::Comparison]),
            Benchmark::Bamboogle => self.unusual_chains(n),
            Benchmark::MuSiQue => test(Family::Chain(3), n),
            Benchmark::WebWalkerQa => mix(&[Family::Rooted(1), Family::Rooted(2)]),
            Benchmark::XbenchDeepSearch => mix(&[Family::Chain(2), Family::Chain(3), Family::Intersection(2)]),
            Benchmark::BrowseComp => test(Family::Intersection(3), n),
            Benchmark::Frames => mix(&[Family::Compute, Family::Comparison, Family::Chain(3)]),
            other => return Err(Error::Other(format!("the toy world has no task file like {other}"))),
        };
        if questions.len() < n {
            return Err(Error::Other(format!(
                "the world has only {} questions like {benchmark}'s: {n} are wanted",
                questions.len()
            )));
        }
        questions.truncate(n);
        Ok(questions.iter().map(|question| self.task(benchmark, question)).collect())
    }

    fn task(&self, benchmark: Benchmark, question: &Question) -> Task {
        let more = match benchmark {
            Benchmark::Gaia => {
                json!({"Level": question.hops().min(3), "Annotator Metadata": {"Number of steps": question.hops()}})
            }
            Benchmark::TwoWiki => json!({
                "type": if question.family == Family::Comparison { "comparison" } else { "compositional" },
                "context": contexts(question),
                "supporting_facts": question.evidence.iter().map(|fact| json!([fact.subject.name(), 0])).collect::<Vec<_>>(),
                "evidences": question.evidence.iter().map(triple).collect::<Vec<_>>()}),
            Benchmark::MuSiQue => json!({
                "answerable": true,
                "paragraphs": (0..).zip(&question.evidence).map(paragraph).collect::<Vec<_>>(),
                "question_decomposition": (0..).zip(&question.evidence).map(decomposed).collect::<Vec<_>>()}),
            Benchmark::WebWalkerQa => {
                let pages: Vec<String> = question.evidence.iter().map(|fact| self.root_url(fact.subject)).collect();
                json!({
                    "root_url": question.root,
                    "info": {"hop": if question.hops() == 1 { "single-source" } else { "multi-source" }, "domain": "toy", "lang": "en",
                             "difficulty_level": if question.hops() == 1 { "easy" } else { "medium" }, "source_website": pages,
                             "golden_path": [], "type": if question.hops() == 1 { "single_source" } else { "multi_source" }}})
            }
            Benchmark::XbenchDeepSearch => json!({"reference_steps": steps(question), "canary": CANARY}),
            Benchmark::BrowseComp => json!({"problem_topic": "toy", "canary": CANARY}),
            Benchmark::Frames => {
                let links: Vec<String> = question.evidence.iter().map(|fact| self.root_url(fact.subject)).collect();
                let reasoning = match question.family {
                    Family::Compute => "Numerical reasoning | Multiple constraints",
                    Family::Comparison => "Temporal reasoning",
                    _ => "Multiple constraints",
                };
                json!({"reasoning_types": reasoning, "wiki_links": links})
            }
            _ => json!({}),
        };
        Task {
            id: question.id.clone(),
            question: question.text.clone(),
            gold: vec![question.answer.clone()],
            files: Vec::new(),
            more: more.as_object().cloned().unwrap_or_else(Map::new),
        }
    }
}

/// Per entity its title and sentences, as 2Wiki has them.
fn contexts(question: &Question) -> Vec<Value> {
    let mut entities: Vec<Entity> = question.evidence.iter().map(|fact| fact.subject).collect();
    entities.sort();
    entities.dedup();
    let sentences = |entity: Entity| -> Vec<String> {
        question.evidence.iter().filter(|fact| fact.subject == entity).map(sentence).collect()
    };
    entities.into_iter().map(|entity| json!([entity.name(), sentences(entity)])).collect()
}

fn triple(fact: &Fact) -> Value {
    json!([fact.subject.name(), fact.relation.word(), fact.value.to_string()])
}

fn sentence(fact: &Fact) -> String {
    format!("the {} of {} is {}", fact.relation, fact.subject, fact.value)
}

fn paragraph((idx, fact): (usize, &Fact)) -> Value {
    json!({"idx": idx, "title": fact.subject.name(), "paragraph_text": sentence(fact), "is_supporting": true})
}

fn decomposed((idx, fact): (usize, &Fact)) -> Value {
    let question = format!("{} >> {}", fact.subject, fact.relation);
    json!({"id": idx, "question": question, "answer": fact.value.to_string(), "paragraph_support_idx": idx})
}

fn steps(question: &Question) -> String {
    question.evidence.iter().map(sentence).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_benchmark_has_its_forty_questions_which_the_world_knows_again() {
        let world = World::new(&WorldConfig::default()).expect("the default world");
        for (benchmark, _) in BENCHMARKS {
            let tasks = world.tasks(benchmark, 40).expect("forty questions");
            assert_eq!(tasks.len(), 40);
            for task in &tasks {
                let question = world.question(&task.question).expect("a question of the world");
                assert_eq!((&question.id, vec![question.answer.clone()]), (&task.id, task.gold.clone()));
            }
            let own: std::collections::BTreeSet<&String> = tasks.iter().map(|task| &task.id).collect();
            assert_eq!(own.len(), 40, "{benchmark}");
        }
        assert!(world.tasks(Benchmark::IfEval, 1).is_err());
        assert!(world.tasks(Benchmark::Gaia, 1_000_000).is_err());
    }
}
