//! Judges: a model that is asked for a verdict, and what it said before.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use weact_infer::remote;

use crate::{Error, Result};

/// What answers a judge's prompts.
pub trait Model: Send + Sync {
    /// The model's name: it stands in every result.
    fn name(&self) -> &str;

    /// The reply to `prompt`. The same prompt and seed may give the same reply.
    ///
    /// # Errors
    /// If there is no reply, after whatever tries the model itself makes.
    fn complete(&self, prompt: &str, seed: u64) -> Result<String>;
}

impl Model for remote::Client {
    fn name(&self) -> &str {
        self.model()
    }

    fn complete(&self, prompt: &str, seed: u64) -> Result<String> {
        Ok(self.complete(None, prompt, Some(seed))?.text)
    }
}

/// How a judge is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Replies per question; the majority decides, and of equals one is drawn.
    pub votes: usize,
    /// Times that a reply is asked for until one can be read.
    pub tries: usize,
    /// Seed of replies and draws.
    pub seed: u64,
    /// Where readable replies are kept, one a line, and found again.
    pub cache: Option<PathBuf>,
}

impl Default for Settings {
    /// One vote, three tries, seed 0, no file.
    fn default() -> Self {
        Self { votes: 1, tries: 3, seed: 0, cache: None }
    }
}

/// A prompt with its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    /// As `frames@1`: it changes with the text.
    pub(super) version: &'static str,
    /// With `{name}` for what is filled in.
    pub(super) template: &'static str,
}

impl Prompt {
    /// The template with `values` for their names. What is filled in is not searched for names.
    pub(super) fn fill(self, values: &[(&str, &str)]) -> String {
        let mut filled = String::new();
        let mut rest = self.template.trim_end();
        while let Some(at) = rest.find('{') {
            let (before, after) = rest.split_at(at);
            filled.push_str(before);
            let named = values.iter().find_map(|(name, value)| {
                let rest = after[1..].strip_prefix(name)?.strip_prefix('}')?;
                Some((*value, rest))
            });
            let (value, behind) = named.unwrap_or(("{", &after[1..]));
            filled.push_str(value);
            rest = behind;
        }
        filled + rest
    }
}

/// A model with the settings under which it judges, and its earlier replies. It is shared between threads.
pub struct Judge {
    model: Box<dyn Model>,
    settings: Settings,
    cache: Mutex<Cache>,
}

impl std::fmt::Debug for Judge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Judge").field("model", &self.model.name()).field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Judge {
    /// A judge with the replies of its cache file, where there is one.
    ///
    /// # Errors
    /// If it has no votes or no tries, or its cache can't be read or written.
    pub fn new(model: Box<dyn Model>, settings: Settings) -> Result<Self> {
        if settings.votes == 0 || settings.tries == 0 {
            return Err(Error::Other("a judge takes at least one vote and one try".to_owned()));
        }
        let cache = Mutex::new(Cache::open(settings.cache.as_deref())?);
        Ok(Self { model, settings, cache })
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        self.model.name()
    }

    /// What the majority of its replies to `text`, made from `prompt`, says, with the last reply that said so. Where `secret`, replies
    /// are kept in memory only: they repeat what must not be written in plain text.
    ///
    /// # Errors
    /// In words, for a verdict: if the model failed, or no reply could be read.
    pub(super) fn decide(
        &self,
        prompt: Prompt,
        text: &str,
        secret: bool,
        parse: impl Fn(&str) -> Option<bool>,
    ) -> std::result::Result<(bool, String), String> {
        let replies = (0..self.settings.votes).map(|vote| self.ask(prompt, text, vote, secret, &parse));
        let replies: Vec<(bool, String)> = replies.collect::<std::result::Result<_, _>>()?;
        let votes: Vec<bool> = replies.iter().map(|(vote, _)| *vote).collect();
        let decision = *majority(&votes, self.draw(text)).expect("at least one vote");
        let n = votes.iter().filter(|vote| **vote == decision).count();
        let (_, reply) = replies.into_iter().rfind(|(vote, _)| *vote == decision).expect("someone voted so");
        let counted = if votes.len() > 1 { format!("{n} of {} votes: ", votes.len()) } else { String::new() };
        Ok((decision, counted + &reply))
    }

    /// What a reply to `text` says, with the reply.
    ///
    /// # Errors
    /// As [`Self::decide`].
    pub(super) fn ask<T>(
        &self,
        prompt: Prompt,
        text: &str,
        vote: usize,
        secret: bool,
        parse: impl Fn(&str) -> Option<T>,
    ) -> std::result::Result<(T, String), String> {
        let key = self.key(prompt, text, vote);
        let known = self.cache.lock().unwrap_or_else(PoisonError::into_inner).replies.get(&key).cloned();
        if let Some((read, reply)) = known.and_then(|reply| Some((parse(&reply)?, reply))) {
            return Ok((read, reply));
        }
        for attempt in 0..self.settings.tries {
            let seed = self.settings.seed.wrapping_add((vote * self.settings.tries + attempt) as u64);
            let reply = self.model.complete(text, seed).map_err(|error| format!("the judge failed: {error}"))?;
            if let Some(read) = parse(&reply) {
                let entry = Entry { key, model: self.name().to_owned(), prompt: prompt.version.to_owned(), reply: reply.clone() };
                let kept = self.cache.lock().unwrap_or_else(PoisonError::into_inner).keep(entry, secret);
                kept.map_err(|error| format!("the judge's reply can't be kept: {error}"))?;
                return Ok((read, reply));
            }
            if attempt + 1 == self.settings.tries {
                let shown: String = reply.chars().take(200).collect();
                return Err(format!("the judge's reply can't be read after {} tries: {shown:?}", self.settings.tries));
            }
        }
        unreachable!("the last try returns")
    }

    /// Equal for equal questions to the same model, and for no others.
    fn key(&self, prompt: Prompt, text: &str, vote: usize) -> String {
        let mut hash = Sha256::new();
        for part in [self.name(), prompt.version, &vote.to_string(), text] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hex(&hash.finalize())
    }

    /// Seed of the draw among equals: each question has its own, whatever was asked before.
    fn draw(&self, text: &str) -> u64 {
        let hash = Sha256::new().chain_update(self.settings.seed.to_le_bytes()).chain_update(text).finalize();
        u64::from_le_bytes(hash[..8].try_into().expect("a hash has 32 bytes"))
    }
}

/// The most frequent of `votes`; of several, one drawn with `seed`. `None` without votes.
pub fn majority<T: PartialEq>(votes: &[T], seed: u64) -> Option<&T> {
    let count = |vote: &T| votes.iter().filter(|other| *other == vote).count();
    let most = votes.iter().map(count).max()?;
    let mut candidates: Vec<&T> = Vec::new();
    for vote in votes.iter().filter(|vote| count(vote) == most) {
        if !candidates.contains(&vote) {
            candidates.push(vote);
        }
    }
    let drawn = if candidates.len() == 1 { 0 } else { ChaCha8Rng::seed_from_u64(seed).random_range(0..candidates.len()) };
    candidates.get(drawn).copied()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a string takes all");
    }
    text
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: String,
    model: String,
    prompt: String,
    reply: String,
}

/// Replies by key.
#[derive(Default)]
struct Cache {
    replies: HashMap<String, String>,
    file: Option<(PathBuf, File)>,
}

impl Cache {
    /// Reads the file, or begins it. A last line without an end is what a crash left; it is cut off.
    fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self::default()) };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(weact_core::Error::io("can't read", path, error).into()),
        };
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut replies = HashMap::new();
        for (i, line) in text[..whole].lines().enumerate() {
            let entry: Entry = serde_json::from_str(line).map_err(|error| weact_core::Error::Line {
                path: path.to_owned(),
                line: i + 1,
                why: format!("no reply of a judge: {error}; remove the line or the file"),
            })?;
            replies.insert(entry.key, entry.reply);
        }
        let open = || -> std::io::Result<File> {
            let file = OpenOptions::new().create(true).append(true).open(path)?;
            if whole < text.len() {
                file.set_len(whole as u64)?;
            }
            Ok(file)
        };
        let file = open().map_err(|error| weact_core::Error::io("can't write", path, error))?;
        Ok(Self { replies, file: Some((path.to_owned(), file)) })
    }

    fn keep(&mut self, entry: Entry, secret: bool) -> Result<()> {
        if let Some((path, file)) = self.file.as_mut().filter(|_| !secret) {
            let line = serde_json::to_string(&entry).expect("four strings are JSON") + "\n";
            // One write: lines of several threads or processes don't mix.
            file.write_all(line.as_bytes()).map_err(|error| weact_core::Error::io("can't write", path, error))?;
        }
        self.replies.insert(entry.key, entry.reply);
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;

    /// Answers with what `replies` gives for a prompt and the number of prompts before it.
    pub(in crate::grade) struct Scripted<F> {
        replies: F,
        asked: Arc<Mutex<Vec<String>>>,
    }

    impl<F: Fn(&str, usize) -> Result<String> + Send + Sync> Model for Scripted<F> {
        fn name(&self) -> &str {
            "scripted"
        }

        fn complete(&self, prompt: &str, _seed: u64) -> Result<String> {
            let mut asked = self.asked.lock().expect("no panic");
            asked.push(prompt.to_owned());
            (self.replies)(prompt, asked.len() - 1)
        }
    }

    /// A judge that answers so, and the prompts that it gets.
    pub(in crate::grade) fn scripted(
        settings: Settings,
        replies: impl Fn(&str, usize) -> Result<String> + Send + Sync + 'static,
    ) -> (Arc<Judge>, Arc<Mutex<Vec<String>>>) {
        let asked = Arc::default();
        let model = Scripted { replies, asked: Arc::clone(&asked) };
        (Arc::new(Judge::new(Box::new(model), settings).expect("legal")), asked)
    }

    const PROMPT: Prompt = Prompt { version: "test@1", template: "Q {question} A {response} {x} {\n" };

    fn yes(reply: &str) -> Option<bool> {
        match reply {
            "yes" => Some(true),
            "no" => Some(false),
            _ => None,
        }
    }

    #[test]
    fn what_is_filled_in_is_not_filled_again() {
        let filled = PROMPT.fill(&[("question", "{response}"), ("response", "{question} {")]);
        assert_eq!(filled, "Q {response} A {question} { {x} {");
    }

    #[test]
    fn an_unreadable_reply_is_asked_for_again_and_then_an_error() {
        let (judge, asked) = scripted(Settings::default(), |_, n| Ok(["what?", "yes"][n.min(1)].to_owned()));
        assert_eq!(judge.decide(PROMPT, "q", false, yes), Ok((true, "yes".to_owned())));
        assert_eq!(asked.lock().expect("no panic").len(), 2);
        let (judge, asked) = scripted(Settings::default(), |_, _| Ok("what?".to_owned()));
        assert!(judge.decide(PROMPT, "q", false, yes).expect_err("unreadable").contains("after 3 tries: \"what?\""));
        assert_eq!(asked.lock().expect("no panic").len(), 3);
        let (judge, asked) = scripted(Settings::default(), |_, _| Err(Error::Other("no route".to_owned())));
        assert_eq!(judge.decide(PROMPT, "q", false, yes), Err("the judge failed: no route".to_owned()));
        assert_eq!(asked.lock().expect("no panic").len(), 1);
    }

    #[test]
    fn replies_are_found_again_in_the_file_but_secret_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        let settings = Settings { cache: Some(folder.path().join("judge.jsonl")), ..Settings::default() };
        let open = || scripted(settings.clone(), |_, n| Ok(["yes", "no", "no"][n].to_owned()));
        let (judge, asked) = open();
        for secret in [false, true] {
            let text = if secret { "s" } else { "q" };
            let first = judge.decide(PROMPT, text, secret, yes).expect("readable");
            assert_eq!(judge.decide(PROMPT, text, secret, yes), Ok(first));
        }
        assert_eq!(asked.lock().expect("no panic").len(), 2);
        let path = folder.path().join("judge.jsonl");
        let written = fs::read_to_string(&path).expect("written");
        assert_eq!(written.lines().count(), 1);
        fs::write(&path, format!("{written}{{\"key\": \"torn")).expect("writable");

        let (judge, asked) = open();
        assert_eq!(judge.decide(PROMPT, "q", false, yes), Ok((true, "yes".to_owned())));
        assert_eq!(asked.lock().expect("no panic").len(), 0);
        // Another prompt, another version, another vote: another question.
        judge.decide(PROMPT, "q2", false, yes).expect("readable");
        judge.decide(Prompt { version: "test@2", ..PROMPT }, "q", false, yes).expect("readable");
        assert_eq!(asked.lock().expect("no panic").len(), 2);
        assert_eq!(fs::read_to_string(&path).expect("written").lines().count(), 3);

        fs::write(&path, "{\"key\": 1}\n").expect("writable");
        let error = Judge::new(Box::new(remote_client()), settings).expect_err("no entry").to_string();
        assert!(error.contains("judge.jsonl:1: no reply of a judge"), "{error}");
    }

    fn remote_client() -> remote::Client {
        remote::Client::new(remote::Settings::new("http://localhost/v1", "m")).expect("legal")
    }

    #[test]
    fn the_majority_decides_and_equals_are_drawn_by_seed() {
        assert_eq!(majority(&["a", "b", "b"], 0), Some(&"b"));
        assert_eq!(majority::<u8>(&[], 0), None);
        let drawn: Vec<_> = (0..40).map(|seed| *majority(&["a", "b", "b", "a", "c"], seed).expect("votes")).collect();
        assert_eq!(drawn, (0..40).map(|seed| *majority(&["a", "b", "b", "a", "c"], seed).expect("votes")).collect::<Vec<_>>());
        assert!(drawn.contains(&"a") && drawn.contains(&"b") && !drawn.contains(&"c"));

        let settings = Settings { votes: 3, ..Settings::default() };
        let (judge, _) = scripted(settings, |_, n| Ok(["no", "yes", "no"][n].to_owned()));
        assert_eq!(judge.decide(PROMPT, "q", false, yes), Ok((false, "2 of 3 votes: no".to_owned())));
    }
}
