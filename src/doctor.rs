//! What `weact doctor` finds: the numeric trust checks of one device, the model's operators among them, and the exit status that
//! they give.

use std::fmt;

use burn::tensor::Device;
use serde::Serialize;
use weact_diagnostics::trust::{Check, Operators, trust};

/// The checks of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The device's name on the command line.
    pub device: String,
    /// All checks, in their order.
    pub checks: Vec<Check>,
    /// Whether every one passed.
    pub passed: bool,
}

/// Runs every check of `ops` on `device`, which is called `name`.
pub fn report(name: &str, device: &Device, ops: &dyn Operators) -> Report {
    let checks = trust(device, ops);
    let passed = checks.iter().all(|check| check.passed);
    Report { device: name.to_owned(), checks, passed }
}

impl Report {
    /// The exit status of `weact doctor`: 1 if a check failed, because nothing that this device computes can then be trusted.
    pub fn exit_status(&self) -> u8 {
        u8::from(!self.passed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Check { name, passed, detail } in &self.checks {
            writeln!(f, "{:6} {name}: {detail}", if *passed { "ok" } else { "FAILED" })?;
        }
        let n_failed = self.checks.iter().filter(|check| !check.passed).count();
        match n_failed {
            0 => write!(f, "{}: all {} checks passed", self.device, self.checks.len()),
            _ => write!(f, "{}: {n_failed} of {} checks failed, do not use this device", self.device, self.checks.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use weact_core::ops::SelfCheck;
    use weact_diagnostics::trust::Backend;

    use super::*;

    struct WrongSum;

    impl Operators for WrongSum {
        fn add(&self, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
            a + b * 2.0
        }
    }

    /// The model's operator of this name is wrong.
    struct Wrong(&'static str);

    impl Operators for Wrong {
        fn model_operator(&self, name: &'static str, result: Tensor<2>) -> Tensor<2> {
            if name == self.0 { result * 1.01 } else { result }
        }
    }

    #[test]
    fn a_wrong_operator_gives_exit_status_1_and_is_named() {
        let sound = report("cpu", &Device::flex(), &Backend);
        assert_eq!(sound.exit_status(), 0, "{sound}");
        let broken = report("cpu", &Device::flex(), &WrongSum);
        assert_eq!(broken.exit_status(), 1);
        assert!(broken.to_string().contains("FAILED thin and LoRA products"), "{broken}");
        for SelfCheck { operator, .. } in SelfCheck::ALL {
            let broken = report("cpu", &Device::flex(), &Wrong(operator));
            assert_eq!(broken.exit_status(), 1);
            let failed: Vec<_> = broken.checks.iter().filter(|check| !check.passed).map(|check| check.name).collect();
            assert_eq!(failed, [operator], "{broken}");
            assert!(broken.to_string().contains(&format!("FAILED {operator}: ")), "{broken}");
        }
    }
}
