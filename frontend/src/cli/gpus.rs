//! The flags of GPUs.

use clap::Args;

const GPUS: &str = "GPUs";

/// How GPUs are used.
#[derive(Clone, Debug, Args)]
pub struct Gpus {
    /// Refuse to load a model onto a GPU of whose memory more than this share is in use: DEVICE:FRACTION; may be given several
    /// times, or several separated by ';'
    #[arg(long, value_name = "DEVICE:FRACTION", env = "PHAROS_MODEL_LOAD_GPU_LIMIT", value_parser = limit, value_delimiter = ';', help_heading = GPUS)]
    pub model_load_gpu_limit: Vec<GpuLimit>,
    /// Bytes of memory that instances on GPUs register with the driver, so that copies are direct; each takes half of what is
    /// left
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20, env = "PHAROS_PINNED_MEMORY_POOL_BYTE_SIZE", help_heading = GPUS)]
    pub pinned_memory_pool_byte_size: u64,
}

/// One `--model-load-gpu-limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuLimit {
    /// The GPU's number.
    pub device: u32,
    /// The share of its memory, 0 to 1.
    pub fraction: f64,
}

/// Triton's texts for what is out of range.
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
