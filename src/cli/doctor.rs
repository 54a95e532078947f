//! `weact doctor`

use std::{panic, process::ExitCode};

use serde_json::json;
use weact::{diagnostics::trust::Backend, doctor};

use super::{Common, device};

/// Lists devices and runs the numeric trust checks of the one in use
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

/// Exits with 1 if a check fails.
pub(super) fn run(Args {}: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let (name, device) = common.device.open()?;
    let devices = device::names();
    // The checks catch panics and report them.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let report = doctor::report(&name, &device, &Backend);
    panic::set_hook(hook);
    let text = format!("devices: {}\n{report}", devices.join(", "));
    common.say.result(&text, &json!({"devices": devices, "device": name, "passed": report.passed, "checks": report.checks}))?;
    Ok(ExitCode::from(report.exit_status()))
}
