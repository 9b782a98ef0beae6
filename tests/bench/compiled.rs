//! Two compiled backends that do the same: one with the interface of `pharos_backend.h`, one with
//! Triton's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::models::Scratch;

/// The name of both backends.
pub(crate) const BACKEND: &str = "identity";

/// The interface of a backend's library.
#[derive(Clone, Copy)]
pub(crate) enum Interface {
    Pharos,
    Triton,
}

/// Compiles a backend into a directory of backends; returns that directory.
///
/// # Errors
/// There is no C compiler, or it fails.
pub(crate) fn backends(scratch: &Scratch, interface: Interface) -> io::Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (name, source, headers) = match interface {
        Interface::Pharos => ("pharos", "bench/identity.c", "../worker/include"),
        Interface::Triton => {
            ("triton", "python/backends/triton/identity.c", "python/backends/triton")
        }
    };
    let all = scratch.path(&format!("{name}-backends"));
    let folder = all.join(BACKEND);
    fs::create_dir_all(&folder)?;
    let status = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-I"])
        .arg(root.join(headers))
        .arg("-o")
        .arg(folder.join(format!("lib{name}_{BACKEND}.so")))
        .arg(root.join(source))
        .status()?;
    if status.success() {
        return Ok(all);
    }
    Err(io::Error::other(format!("cc cannot compile {source}: {status}")))
}
