//! The two obfuscations in which benchmarks are published, so that their rows stand nowhere in plain text. Neither is a protection.

use base64::{Engine, engine::general_purpose::STANDARD};
use sha2::{Digest, Sha256};

use crate::benchmark::Benchmark;

/// How a benchmark's texts are obfuscated: base64 of the exclusive or with a repeated key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// BrowseComp: the key is the SHA-256 of the canary
    /// ([simple-evals](https://github.com/openai/simple-evals/blob/ee3b0318d8d1d9d72755a4120879be65f7c07e9e/browsecomp_eval.py)).
    Hashed,
    /// xbench: the key is the canary itself
    /// ([xbench-evals](https://github.com/xbench-ai/xbench-evals/tree/17c562192cc7e62215bfb98b65e9f8806fb95504)).
    Raw,
}

impl Cipher {
    /// The one of `benchmark`, where its rows are published obfuscated.
    pub fn of(benchmark: Benchmark) -> Option<Self> {
        match benchmark {
            Benchmark::BrowseComp => Some(Self::Hashed),
            Benchmark::XbenchDeepSearch => Some(Self::Raw),
            _ => None,
        }
    }

    /// Obfuscates `text`.
    ///
    /// # Panics
    /// If the canary is empty.
    pub fn conceal(self, text: &str, canary: &str) -> String {
        STANDARD.encode(self.applied(text.as_bytes(), canary))
    }

    /// The text that was [concealed](Self::conceal).
    ///
    /// # Errors
    /// If `field` is no base64, or what comes out is no text: the canary is another one's. The message holds neither.
    pub fn reveal(self, field: &str, canary: &str) -> Result<String, String> {
        if canary.is_empty() {
            return Err("the canary is empty".to_owned());
        }
        let bytes = STANDARD.decode(field.trim()).map_err(|_| "is no base64".to_owned())?;
        String::from_utf8(self.applied(&bytes, canary)).map_err(|_| "can't be decoded with this row's canary".to_owned())
    }

    fn applied(self, bytes: &[u8], canary: &str) -> Vec<u8> {
        let key = match self {
            Self::Hashed => Sha256::digest(canary).to_vec(),
            Self::Raw => canary.as_bytes().to_vec(),
        };
        assert!(!key.is_empty(), "a canary is not empty");
        bytes.iter().zip(key.iter().cycle()).map(|(byte, key)| byte ^ key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_concealed_is_revealed_with_its_canary_only() {
        for cipher in [Cipher::Hashed, Cipher::Raw] {
            for text in ["", "Ossel Tower", "A café named “Ñandú” 你好", &"x".repeat(1000)] {
                let field = cipher.conceal(text, "canary one");
                assert_eq!(cipher.reveal(&field, "canary one").as_deref(), Ok(text));
                if text.len() > 20 {
                    assert_ne!(cipher.reveal(&field, "canary two").as_deref(), Ok(text));
                }
            }
            assert_eq!(cipher.reveal("?", "c"), Err("is no base64".to_owned()));
            assert_eq!(cipher.reveal("", ""), Err("the canary is empty".to_owned()));
            let binary = STANDARD.encode([0xff; 64]);
            assert!(cipher.reveal(&binary, "aaaa").is_err_and(|why| why.contains("canary")));
        }
        assert_eq!(Cipher::of(Benchmark::Gaia), None);
    }
}
