//! The flags of GPUs.

use clap::Args;

use super::models::{MemoryLimit, memory_limit};
use super::whole;
use pharos_telemetry::system::Capability;

const GPUS: &str = "GPUs";

/// Limits on the use of GPUs.
#[derive(Clone, Debug, Args)]
pub struct Gpus {
    /// Refuse to load models onto a GPU if more than this fraction of its memory is in use:
    /// DEVICE:FRACTION. May be repeated, or given as a list separated by ';'
    #[arg(
        long, value_name = "DEVICE:FRACTION", env = "PHAROS_MODEL_LOAD_GPU_LIMIT",
        value_parser = limit, value_delimiter = ';', help_heading = GPUS
    )]
    pub model_load_gpu_limit: Vec<GpuLimit>,
    /// The most memory of each GPU that models may use, in bytes or as a share of the GPU's
    /// memory, for example 80%, or of one GPU: DEVICE:80%. As with --model-memory-limit, models
    /// are unloaded or refused. May be repeated, or given as a list separated by ';' [default:
    /// unlimited]
    #[arg(
        long, value_name = "[DEVICE:]BYTES|PERCENT%", env = "PHAROS_MODEL_GPU_MEMORY_LIMIT",
        value_parser = gpu_memory_limit, value_delimiter = ';', help_heading = GPUS
    )]
    pub model_gpu_memory_limit: Vec<GpuMemoryLimit>,
    /// Bytes of host memory that instances on GPUs pin for direct copies; each instance gets half
    /// of the remaining amount
    #[arg(
        long, value_name = "BYTES", default_value_t = 256 << 20,
        env = "PHAROS_PINNED_MEMORY_POOL_BYTE_SIZE", value_parser = whole(0..=u64::MAX),
        help_heading = GPUS
    )]
    pub pinned_memory_pool_byte_size: u64,
    /// Minimum CUDA compute capability; GPUs below it are not used
    #[arg(
        id = "min-supported-compute-capability", long = "min-supported-compute-capability",
        value_name = "MAJOR.MINOR", default_value = "0.0", hide_default_value = true,
        env = "PHAROS_MIN_SUPPORTED_COMPUTE_CAPABILITY", value_parser = capability,
        help_heading = GPUS
    )]
    pub min_capability: Capability,
}

fn capability(text: &str) -> Result<Capability, String> {
    let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
    let numbers = major.parse().ok().zip(minor.parse().ok());
    numbers
        .map(|(major, minor)| Capability { major, minor })
        .ok_or_else(|| "expected MAJOR.MINOR, for example 7.5".to_owned())
}

/// One `--model-load-gpu-limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuLimit {
    /// The index of the GPU.
    pub device: u32,
    /// The fraction of its memory, 0 to 1.
    pub fraction: f64,
}

/// One `--model-gpu-memory-limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuMemoryLimit {
    /// The index of the GPU; `None` for all.
    pub device: Option<u32>,
    /// The most memory that models may use on it.
    pub limit: MemoryLimit,
}

impl Gpus {
    /// Returns the most memory that models may use on a GPU. A limit of the GPU takes precedence
    /// over a general one, and a later limit over an earlier one.
    pub fn memory_limit(&self, gpu: u32) -> Option<MemoryLimit> {
        let of = |device| self.model_gpu_memory_limit.iter().rfind(|limit| limit.device == device);
        of(Some(gpu)).or_else(|| of(None)).map(|found| found.limit)
    }
}

fn gpu_memory_limit(text: &str) -> Result<GpuMemoryLimit, String> {
    let Some((device, limit)) = text.split_once(':') else {
        return Ok(GpuMemoryLimit { device: None, limit: memory_limit(text)? });
    };
    match device.parse() {
        Ok(device) => Ok(GpuMemoryLimit { device: Some(device), limit: memory_limit(limit)? }),
        Err(_) => Err("expected the number of a GPU before ':', for example 0:80%".to_owned()),
    }
}

/// Parses a limit. The texts of values out of range are Triton's.
fn limit(text: &str) -> Result<GpuLimit, String> {
    let form = "allowed is DEVICE:FRACTION, for example 0:0.8";
    let (device, fraction) = text.split_once(':').ok_or(form)?;
    let number: i64 = device.parse().map_err(|_| form)?;
    let fraction: f64 = fraction.parse().map_err(|_| form)?;
    let device =
        u32::try_from(number).map_err(|_| format!("expects device ID >= 0, got {number}"))?;
    if !(0.0..=1.0).contains(&fraction) {
        return Err(format!("expects limit fraction to be in range [0.0, 1.0], got {fraction}"));
    }
    Ok(GpuLimit { device, fraction })
}
