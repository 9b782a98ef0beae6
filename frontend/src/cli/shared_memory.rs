//! The flags of memory that clients share with the server.

use clap::{ArgAction, Args};

use super::{GENERAL, boolean};

/// Memory that clients share.
#[derive(Clone, Debug, Args)]
pub struct SharedMemory {
    /// Let clients register memory of theirs, system or CUDA, for inputs and outputs; Triton's own default is false
    #[arg(id = "allow-client-shm", long = "allow-client-shm", value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_ALLOW_CLIENT_SHM", value_parser = boolean, help_heading = GENERAL)]
    pub allowed: bool,
}
