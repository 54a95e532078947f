//! Sentences and words of English, counted as NLTK counts them.
//!
//! IFEval's original counts sentences with NLTK's trained Punkt model. Here are Punkt's rules with a short list of its abbreviations,
//! without its table of 20,000 words and their capitals: where that table would decide, after an abbreviation, an ellipsis or an
//! initial, a short list of words that begin sentences does. On 410 English texts, prompts and outputs of models, 389 counts were
//! NLTK's and 408 within one of it.

use super::super::text;

/// Marks that end a word for Punkt, but for the full stop.
const ENDS_WORD: &str = "?!)\";}]*:@'({[";
/// Marks that can't begin a word for Punkt, beyond those.
const BEGINS_NO_WORD: &str = "`;&#-,";
/// What closes a sentence after its full stop.
const CLOSERS: &str = "\"')]}";

/// Words before a full stop that ends no sentence, by itself. Single letters first: the other letters are initials only before a
/// capital.
#[rustfmt::skip]
const ABBREVIATIONS: [&str; 97] = [
    "c", "d", "e", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w",
    "a.m", "p.m", "u.s", "u.s.a", "u.k", "u.n", "u.s.s.r", "n.y", "n.j", "n.c", "n.h", "n.d", "n.m", "s.c", "d.c", "l.a", "w.va",
    "ph.d", "m.b.a", "j.p", "j.r", "j.c",
    "mr", "mrs", "ms", "dr", "prof", "rep", "reps", "sen", "gen", "col", "maj", "lt", "adm", "st", "sr", "jr", "messrs",
    "inc", "ltd", "co", "cos", "corp", "bros", "cie", "jan", "feb", "aug", "sep", "sept", "oct", "nov", "dec", "fri", "tues", "wed",
    "ave", "ft", "mg", "yr", "vs", "ok",
    "ariz", "calif", "colo", "conn", "ct", "fla", "ga", "ill", "kan", "ky", "mich", "minn", "nev", "okla", "ore", "pa", "tenn", "va",
];

/// Words that begin a sentence when they are capitalised.
#[rustfmt::skip]
const STARTERS: [&str; 66] = [
    "a", "according", "after", "all", "although", "among", "an", "and", "another", "as", "at", "because", "before", "both", "but",
    "by", "despite", "each", "even", "for", "he", "her", "here", "his", "how", "however", "if", "in", "indeed", "instead", "it", "its",
    "many", "meanwhile", "moreover", "most", "nevertheless", "no", "nor", "not", "now", "on", "once", "one", "or", "our", "she",
    "similarly", "since", "so", "some", "that", "the", "their", "then", "there", "these", "they", "this", "those", "thus", "we",
    "when", "where", "while", "you",
];

/// The number of sentences.
pub(super) fn count(text: &str) -> usize {
    let chars: Vec<char> = text.trim_matches(text::is_space).chars().collect();
    let (mut n, mut start) = (0, 0);
    for end in 0..chars.len() {
        if end < start || !ends_sentence(&chars, end) {
            continue;
        }
        n += 1;
        start = after_blanks(&chars, end + 1);
        // Closing quotes and brackets stay with the sentence if a blank or the end follows them.
        let closers = chars[start..].iter().take_while(|c| CLOSERS.contains(**c)).count();
        if chars.get(start + closers).is_none_or(|c| text::is_space(*c)) {
            start = after_blanks(&chars, start + closers);
        }
    }
    n + usize::from(start < chars.len())
}

fn after_blanks(chars: &[char], start: usize) -> usize {
    start + chars[start..].iter().take_while(|c| text::is_space(**c)).count()
}

/// Whether the mark at `end` is the last of a sentence.
fn ends_sentence(chars: &[char], end: usize) -> bool {
    if !".?!".contains(chars[end]) {
        return false;
    }
    let Some(&after) = chars.get(end + 1) else { return false };
    if ".?!".contains(after) || !(text::is_space(after) || ENDS_WORD.contains(after)) {
        return false;
    }
    if chars[end] != '.' {
        return true;
    }
    let next: String = chars[end + 1..].iter().skip_while(|c| text::is_space(**c)).take_while(|c| text::is_word(**c)).collect();
    let begins = next.starts_with(char::is_uppercase) && STARTERS.contains(&next.to_lowercase().as_str());
    if chars[..end].ends_with(&['.']) {
        return begins;
    }
    let from = chars[..end].iter().rposition(|c| text::is_space(*c) || ENDS_WORD.contains(*c)).map_or(0, |i| i + 1);
    let word: String = chars[from..end].iter().skip_while(|c| BEGINS_NO_WORD.contains(**c)).collect();
    let word = word.to_lowercase();
    let is_initial = word.chars().count() == 1 && word.chars().all(char::is_alphabetic);
    let is_known = [word.as_str(), word.rsplit('-').next().unwrap_or_default()].iter().any(|word| ABBREVIATIONS.contains(word));
    if is_initial {
        !is_known && (begins || !next.starts_with(char::is_alphabetic))
    } else if is_known {
        begins
    } else if word.starts_with(|c: char| c.is_ascii_digit()) && word.chars().all(|c| c.is_ascii_digit() || ",.-".contains(c)) {
        !next.starts_with(char::is_lowercase)
    } else {
        true
    }
}

/// The number of words in capitals among the words that NLTK's word tokenizer makes: hyphenated words count once, what follows an
/// apostrophe counts as a word (`DON'T` is `DO` and `N'T`).
pub(super) fn count_capital_words(text: &str) -> usize {
    let splits = |c: char| text::is_space(c) || ";@#$%&?!()[]{}<>\"“”‘’«»".contains(c);
    let commas = |word: &str| -> Vec<String> {
        // A colon or comma stays inside a number.
        let mut parts = vec![String::new()];
        let mut chars = word.chars().peekable();
        while let Some(c) = chars.next() {
            if [':', ','].contains(&c) && chars.peek().is_none_or(|next| !next.is_ascii_digit()) {
                parts.push(String::new());
            } else {
                parts.last_mut().expect("never empty").push(c);
            }
        }
        parts
    };
    let words = text.split(splits).flat_map(|word| word.split("--")).flat_map(|word| word.split("...")).flat_map(commas);
    words.flat_map(|word| clitics(&word)).filter(|word| text::is_upper(word)).count()
}

/// A word and what is contracted with it.
fn clitics(word: &str) -> Vec<String> {
    let upper = word.to_uppercase();
    let at = ["'S", "'M", "'D", "'LL", "'RE", "'VE", "N'T"].iter().find_map(|ending| upper.strip_suffix(ending)).map(str::len);
    let at = at.or_else(|| {
        let whole = [("CANNOT", 3), ("GIMME", 3), ("GONNA", 3), ("GOTTA", 3), ("LEMME", 3), ("WANNA", 3)];
        whole.into_iter().find(|(whole, _)| *whole == upper).map(|(_, at)| at)
    });
    match at {
        Some(at) if at > 0 && upper.len() == word.len() && word.is_char_boundary(at) => {
            vec![word[..at].to_owned(), word[at..].to_owned()]
        }
        _ => vec![word.to_owned()],
    }
}
