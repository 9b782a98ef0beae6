//! The settings of models that are loaded on demand, and the limits of the memory that models may
//! use.

use pharos::repository::memory_budget::{Memory, MemoryBytes};
use pharos_engine::loader;
use pharos_telemetry::system::{self, Devices, Roots};

use crate::cli;
use crate::cli::Options;

pub(super) fn settings(options: &Options, devices: &Devices) -> loader::OnDemandSettings {
    let models = &options.models;
    let roots = Roots::new(&options.metrics.cgroup_root);
    let main =
        models.memory_limit.map(|limit| (Memory::Main, limit.bytes(system::memory_limit(&roots))));
    loader::OnDemandSettings {
        max_waiting: models.on_demand_max_waiting as usize,
        idle: models.idle_unload,
        memory_limits: main
            .into_iter()
            .chain(gpu_limits(&options.gpus, devices))
            .collect::<MemoryBytes>(),
        memory_pressure: system::memory_pressure(&roots),
    }
}

/// Returns the limit of each GPU. Logs limits without effect.
fn gpu_limits(options: &cli::Gpus, devices: &Devices) -> Vec<(Memory, u64)> {
    let here: Vec<u32> = devices.numbers().collect();
    if here.is_empty() && !options.model_gpu_memory_limit.is_empty() {
        tracing::warn!("--model-gpu-memory-limit has no effect: there are no GPUs");
        return Vec::new();
    }
    for number in options.model_gpu_memory_limit.iter().filter_map(|limit| limit.device) {
        if !here.contains(&number) {
            tracing::warn!(
                "--model-gpu-memory-limit names GPU {number}, which does not exist; existing \
                 GPUs: {here:?}"
            );
        }
    }
    let mut limits = Vec::new();
    for number in here {
        let Some(limit) = options.memory_limit(number) else { continue };
        match (limit, devices.total_memory(number)) {
            (cli::MemoryLimit::Bytes(bytes), _) => limits.push((Memory::Gpu(number), bytes)),
            (limit, Some(total)) => limits.push((Memory::Gpu(number), limit.bytes(total))),
            (_, None) => tracing::warn!(
                "GPU {number} does not report its memory: a share of it as \
                 --model-gpu-memory-limit has no effect"
            ),
        }
    }
    limits
}
