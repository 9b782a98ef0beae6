//! Flags of Triton that are accepted without effect, because this server has no equivalent.

use clap::{ArgAction, Args};

use super::{boolean, whole};

const ACCEPTED: &str = "Accepted for compatibility with Triton (no effect)";

/// A pair `DEVICE:BYTES`; only its form is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeviceBytes;

/// The flags without effect.
#[derive(Clone, Debug, Args)]
pub(super) struct Accepted {
    /// Memory for tensors on GPUs grows with the batches
    #[arg(
        id = "cuda-memory-pool-byte-size", long = "cuda-memory-pool-byte-size",
        value_name = "DEVICE:BYTES", env = "PHAROS_CUDA_MEMORY_POOL_BYTE_SIZE",
        value_parser = device_bytes, help_heading = ACCEPTED
    )]
    cuda_pool: Vec<DeviceBytes>,
    /// Implicit state is kept in the worker's host memory, which grows as needed
    #[arg(
        id = "cuda-virtual-address-size", long = "cuda-virtual-address-size",
        value_name = "DEVICE:BYTES", env = "PHAROS_CUDA_VIRTUAL_ADDRESS_SIZE",
        value_parser = device_bytes, help_heading = ACCEPTED
    )]
    cuda_addresses: Vec<DeviceBytes>,
    /// Each instance uses a single GPU
    #[arg(
        id = "enable-peer-access", long = "enable-peer-access", value_name = "BOOL",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_ENABLE_PEER_ACCESS", value_parser = boolean, help_heading = ACCEPTED
    )]
    peer_access: Option<bool>,
    /// The thread that sends a batch copies its tensors
    #[arg(
        id = "buffer-manager-thread-count", long = "buffer-manager-thread-count", value_name = "N",
        env = "PHAROS_BUFFER_MANAGER_THREAD_COUNT", value_parser = whole(0..=u32::MAX),
        help_heading = ACCEPTED
    )]
    buffer_threads: Option<u32>,
    /// The response caches local and redis are built in; see --cache-config
    #[arg(
        id = "cache-directory", long = "cache-directory", value_name = "DIR",
        env = "PHAROS_CACHE_DIRECTORY", help_heading = ACCEPTED
    )]
    cache_directory: Option<String>,
    /// The repository agent checksum is built in; others are not supported
    #[arg(
        id = "repoagent-directory", long = "repoagent-directory", value_name = "DIR",
        env = "PHAROS_REPOAGENT_DIRECTORY", help_heading = ACCEPTED
    )]
    repoagent_directory: Option<String>,
}

impl Accepted {
    /// Returns the given flags of this group, each with the reason why it has no effect.
    pub(super) fn without_effect(&self) -> Vec<String> {
        let flags = [
            (
                "cuda-memory-pool-byte-size",
                !self.cuda_pool.is_empty(),
                "the memory for tensors on GPUs grows with the batches",
            ),
            (
                "cuda-virtual-address-size",
                !self.cuda_addresses.is_empty(),
                "implicit state is kept in the worker's host memory, which grows as needed",
            ),
            ("enable-peer-access", self.peer_access.is_some(), "each instance uses a single GPU"),
            (
                "buffer-manager-thread-count",
                self.buffer_threads.is_some(),
                "the thread that sends a batch copies its tensors; see --http-thread-count",
            ),
            (
                "cache-directory",
                self.cache_directory.is_some(),
                "the response caches local and redis are built in; see --cache-config",
            ),
            (
                "repoagent-directory",
                self.repoagent_directory.is_some(),
                "the repository agent checksum is built in; others are not supported",
            ),
        ];
        let given = flags.into_iter().filter(|(_, given, _)| *given);
        given.map(|(flag, _, why)| format!("--{flag} has no effect: {why}")).collect()
    }
}

fn device_bytes(text: &str) -> Result<DeviceBytes, String> {
    let pair =
        text.split_once(':').map(|(device, bytes)| (device.parse::<i32>(), bytes.parse::<u64>()));
    match pair {
        Some((Ok(_), Ok(_))) => Ok(DeviceBytes),
        _ => Err("expected DEVICE:BYTES with two whole numbers, for example 0:67108864".to_owned()),
    }
}
