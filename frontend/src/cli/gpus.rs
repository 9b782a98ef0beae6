//! The flags of GPUs.

use clap::Args;

use super::whole;
use pharos_telemetry::system::Capability;

const GPUS: &str = "GPUs";

/// Limits on the use of GPUs.
#[derive(Clone, Debug, Args)]
pub struct Gpus {
    /// Refuse to load models onto a GPU if more than this fraction of its memory is in use: DEVICE:FRACTION. May be repeated,
    /// or given as a list separated by ';'
    #[arg(long, value_name = "DEVICE:FRACTION", env = "PHAROS_MODEL_LOAD_GPU_LIMIT", value_parser = limit, value_delimiter = ';', help_heading = GPUS)]
    pub model_load_gpu_limit: Vec<GpuLimit>,
    /// Bytes of host memory that instances on GPUs pin for direct copies; each instance gets half of the remaining amount
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, env = "PHAROS_PINNED_MEMORY_POOL_BYTE_SIZE", value_parser = whole(0..=u64::MAX), help_heading = GPUS)]
    pub pinned_memory_pool_byte_size: u64,
    /// Minimum CUDA compute capability; GPUs below it are not used
    #[arg(id = "min-supported-compute-capability", long = "min-supported-compute-capability", value_name = "MAJOR.MINOR", default_value = "0.0", hide_default_value = true, env = "PHAROS_MIN_SUPPORTED_COMPUTE_CAPABILITY", value_parser = capability, help_heading = GPUS)]
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

/// Parses a limit. The texts of values out of range are Triton's.
fn limit(text: &str) -> Result<GpuLimit, String> {
    let form = "allowed is DEVICE:FRACTION, for example 0:0.8";
    let (device, fraction) = text.split_once(':').ok_or(form)?;
    let device: i64 = device.parse().map_err(|_| form)?;
    let fraction: f64 = fraction.parse().map_err(|_| form)?;
    let device = u32::try_from(device).map_err(|_| format!("expects device ID >= 0, got {device}"))?;
    if !(0.0..=1.0).contains(&fraction) {
        return Err(format!("expects limit fraction to be in range [0.0, 1.0], got {fraction}"));
    }
    Ok(GpuLimit { device, fraction })
}
