//! A function for the fuzz target of archives. The server does not use this module.

use std::fs::File;
use std::path::Path;

use crate::launch::unpack::{Limits, unpack};

/// Unpacks the archive of an environment into a new directory, at most `bytes` bytes and `files`
/// files.
///
/// # Errors
/// The archive is refused.
pub fn unpack_environment(
    archive: &Path,
    target: &Path,
    bytes: u64,
    files: u64,
) -> std::io::Result<()> {
    unpack(&File::open(archive)?, target, &Limits { bytes, files })
}
