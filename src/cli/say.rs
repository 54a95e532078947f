//! What a command says: data and summaries on stdout, everything else on stderr.

use std::io::{self, Write};

use serde_json::Value;

/// How much is said, and in which form.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Say {
    /// Only errors, warnings and what was asked for
    #[arg(long, global = true)]
    pub(super) quiet: bool,
    /// The summary as one JSON object on stdout
    #[arg(long, global = true)]
    pub(super) json: bool,
}

impl Say {
    /// What the command was asked for, on stdout: text, or JSON with `--json`.
    pub(super) fn result(self, text: &str, json: &Value) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            writeln!(out, "{json}")?
        } else {
            writeln!(out, "{}", text.trim_end())?
        }
        out.flush()
    }

    /// What a command that writes a file has to say at its end: as [`Self::result`], but no text with `--quiet`.
    pub(super) fn summary(self, text: &str, json: &Value) -> io::Result<()> {
        if self.quiet && !self.json { Ok(()) } else { self.result(text, json) }
    }

    /// A line on stderr, unless `--quiet`.
    pub(super) fn note(self, text: &str) {
        if !self.quiet {
            // With stderr closed there is nobody to tell.
            let _unheard = writeln!(io::stderr(), "{text}");
        }
    }

    /// A warning on stderr.
    pub(super) fn warn(self, text: &str) {
        let _unheard = writeln!(io::stderr(), "warning: {text}");
    }
}
