//! General skill: exercises that have nothing to do with research, to tell what training costs a model.

use rand::{Rng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;
use weact_core::message::{Message, Role};

use super::{
    dialect::CODES,
    facts::{Entity, YEARS},
    pages::{N_ADDRESSES, url},
    stream,
};

/// The system message of exercises.
pub const SYSTEM: &str = "general";

/// What is to be done with a list of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Skill {
    /// Say it again.
    Copy,
    /// Say it backwards.
    Reverse,
    /// Say it in ascending order; years.
    Sort,
}

/// The skills and their words.
pub const SKILLS: [(Skill, &str); 3] = [(Skill::Copy, "copy"), (Skill::Reverse, "reverse"), (Skill::Sort, "sort")];

/// One exercise with its solution.
#[derive(Clone, Debug, PartialEq)]
pub struct Exercise {
    /// What is to be done.
    pub skill: Skill,
    /// What the user asks.
    pub question: String,
    /// What a right answer says.
    pub answer: String,
    /// System message, question, and the answer as the assistant's.
    pub messages: Vec<Message>,
}

/// `n` exercises of the series of `seed`.
pub fn exercises(seed: u64, n: usize) -> Vec<Exercise> {
    (0..n as u64).map(|index| exercise(&mut stream(seed, index))).collect()
}

pub(super) fn exercise(rng: &mut ChaCha8Rng) -> Exercise {
    let (skill, word) = *SKILLS.choose(rng).expect("there are skills");
    let words = match skill {
        Skill::Copy | Skill::Reverse => words(rng),
        Skill::Sort => distinct(YEARS, rng),
    };
    let mut solution = words.clone();
    match skill {
        Skill::Copy => {}
        Skill::Reverse => solution.reverse(),
        Skill::Sort => solution.sort(),
    }
    let question = format!(" {word} {}", words.join(" "));
    let answer = format!(" {}", solution.join(" "));
    let messages =
        vec![Message::text(Role::System, SYSTEM), Message::text(Role::User, &question), Message::text(Role::Assistant, &answer)];
    Exercise { skill, question, answer, messages }
}

/// Words of one kind: entities, years, addresses, codes or small numbers. Copying is to be learned for every word of the world.
fn words(rng: &mut ChaCha8Rng) -> Vec<String> {
    match rng.random_range(0..10) {
        0..4 => distinct(Entity::all(), rng),
        4..6 => distinct(YEARS, rng),
        6..8 => distinct((0..N_ADDRESSES).map(url), rng),
        8 => distinct(CODES, rng),
        _ => distinct(1..YEARS.len(), rng),
    }
}

/// Two to five different ones of `all`.
fn distinct<T: ToString>(all: impl IntoIterator<Item = T>, rng: &mut ChaCha8Rng) -> Vec<String> {
    let all: Vec<T> = all.into_iter().collect();
    let n = rng.random_range(2..=5);
    all.choose_multiple(rng, n).map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_solution_holds_the_words_of_its_question_in_the_order_asked_for() {
        let mut seen = BTreeSet::new();
        for Exercise { skill, question, answer, .. } in exercises(1, 100) {
            let words: Vec<&str> = question.split_whitespace().skip(1).collect();
            let mut expected = words.clone();
            match skill {
                Skill::Copy => {}
                Skill::Reverse => expected.reverse(),
                Skill::Sort => expected.sort_by_key(|year| year.parse::<u16>().expect("a year")),
            }
            assert_eq!(answer.split_whitespace().collect::<Vec<_>>(), expected);
            seen.insert((skill, words.len()));
        }
        assert_eq!(seen.len(), 12);
        assert_eq!(exercises(1, 3), exercises(1, 5)[..3]);
    }
}
