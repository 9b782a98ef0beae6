//! The flags of shared memory.

use clap::{ArgAction, Args};

use super::{GENERAL, boolean};

/// Shared memory of clients.
#[derive(Clone, Debug, Args)]
pub struct SharedMemory {
    /// Allow clients to register system and CUDA shared memory for inputs and outputs
    #[arg(id = "allow-client-shm", long = "allow-client-shm", value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_ALLOW_CLIENT_SHM", value_parser = boolean, help_heading = GENERAL)]
    pub allowed: bool,
}
