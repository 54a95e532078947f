//! `--device` to a device of Burn.

use std::str::FromStr;

use burn::tensor::Device;

use super::exit::Usage;

/// A device by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The CPU.
    Cpu,
    /// The CUDA device of this number.
    Cuda(usize),
    /// The first CUDA device where there is one, else the CPU.
    Auto,
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "auto" => Ok(Self::Auto),
            _ => {
                let index = name.strip_prefix("cuda:").and_then(|n| n.parse().ok());
                index.map(Self::Cuda).ok_or_else(|| "use cpu, cuda, cuda:N or auto".to_owned())
            }
        }
    }
}

impl Choice {
    /// The device and its name.
    ///
    /// # Errors
    /// If CUDA is asked for and not built in, or there is no such device.
    pub(super) fn open(self) -> Result<(String, Device), Usage> {
        let wanted = match self {
            Self::Cpu => None,
            Self::Auto => (!cuda().is_empty()).then_some(0),
            Self::Cuda(_) if cfg!(not(feature = "cuda")) => {
                return Err(Usage(
                    "--device cuda: CUDA is not built in; build with --features cuda, or use --device cpu".to_owned(),
                ));
            }
            Self::Cuda(index) => Some(index),
        };
        let Some(index) = wanted else { return Ok(("cpu".to_owned(), Device::flex())) };
        let mut devices = cuda();
        if index >= devices.len() {
            return Err(Usage(format!(
                "--device cuda:{index}: this machine shows {} CUDA devices; use --device cpu",
                devices.len()
            )));
        }
        Ok((format!("cuda:{index}"), devices.swap_remove(index)))
    }
}

/// The names of all devices that `--device` can open.
pub(super) fn names() -> Vec<String> {
    ["cpu".to_owned()].into_iter().chain((0..cuda().len()).map(|i| format!("cuda:{i}"))).collect()
}

/// The CUDA devices. Burn lists none, where opening one would panic for want of a driver.
fn cuda() -> Vec<Device> {
    #[cfg(feature = "cuda")]
    return Device::enumerate(burn::tensor::DeviceType::Cuda).into_vec();
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}
