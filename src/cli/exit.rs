//! Exit statuses: 0 done, 1 the input or the run is at fault, 2 the command line or a configuration is wrong.

use std::{
    io::{self, Write},
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
};

/// Something that another command line or configuration would put right: exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Usage(pub String);

/// Runs a command and says on one line of stderr what went wrong. A reader of stdout that went away is no fault.
pub(super) fn status(command: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    // Burn's GPU backends have no errors, they panic: what they say reaches the user as a line like any other.
    panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or_else(String::new, |l| format!(" ({}:{})", l.file(), l.line()));
        say(&format!("{}{place}", panic.payload_as_str().unwrap_or("panicked")));
    }));
    match panic::catch_unwind(AssertUnwindSafe(command)) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) if reader_is_gone(&error) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            say(&in_full(&error));
            ExitCode::from(if is_usage(&error) { 2 } else { 1 })
        }
        Err(_said_by_the_hook) => ExitCode::from(1),
    }
}

/// The error with what lies below it, where it does not say that itself.
fn in_full(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(&format!(": {cause}"));
        }
    }
    text
}

fn say(what: &str) {
    let one_line = what.split_whitespace().collect::<Vec<_>>().join(" ");
    // With stderr closed there is nobody to tell.
    let _unheard = writeln!(io::stderr(), "error: {one_line}");
}

fn reader_is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

fn is_usage(error: &anyhow::Error) -> bool {
    use weact::train::Error::{Config, Recipe, RunDirectory};
    let of_training = error.downcast_ref::<weact::train::Error>();
    let of_evaluation = error.downcast_ref::<weact::eval::Error>();
    let of_diagnostics = error.downcast_ref::<weact::diagnose::Error>();
    error.is::<Usage>()
        || matches!(of_diagnostics, Some(weact::diagnose::Error::Config { .. }))
        || matches!(of_training, Some(Config { .. } | Recipe(_) | RunDirectory { .. }))
        || matches!(of_evaluation, Some(weact::eval::Error::Config { .. } | weact::eval::Error::RunDirectory { .. }))
}
