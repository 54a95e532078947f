//! The name of a capability (§2.1): an open set, so that a new capability is data and no code.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A capability's name, which is also the alias of the adapter that holds it: `plan`, `search`, `write`, `code`, ...
///
/// Invariant: it matches `[a-z][a-z0-9_-]{0,63}` and is neither `base` nor `none`, which name the absence of an adapter.
/// The active state `z` of Eq. 6 is an `Option<Capability>`: `None` is the paper's empty set.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Capability(String);

impl Capability {
    /// Checks `name` and wraps it.
    ///
    /// # Errors
    /// If `name` has other characters than the invariant allows, or is reserved.
    pub fn new(name: &str) -> Result<Self> {
        let tail_is_legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '-';
        let legal = name.len() <= 64 && name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(tail_is_legal);
        if !legal || name == "base" || name == "none" {
            return Err(Error::Capability { name: name.to_owned() });
        }
        Ok(Self(name.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Capability {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<String> for Capability {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        Self::new(&name)
    }
}

impl From<Capability> for String {
    fn from(capability: Capability) -> Self {
        capability.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_lower_case_and_not_reserved() {
        for name in ["plan", "code-2", "deep_search"] {
            assert_eq!(Capability::new(name).expect("a legal name").as_str(), name);
        }
        for name in ["", "Plan", "2plan", "base", "none", "pl an", "plan/../x", "é", &"a".repeat(65)] {
            assert!(Capability::new(name).is_err(), "{name:?} was accepted");
        }
    }
}
