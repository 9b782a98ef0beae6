//! The interface of this executable for the launcher of TorchServe's command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::error::ErrorKind;

use crate::cli::Options;
use pharos_engine::launch;
use pharos_os::worker_user::WorkerUser;
use pharos_telemetry::system::{self, Devices, Roots};
use pharos_torchserve as torchserve;

const ONLY_OPTIONS: &str = "only options of the server may follow `--`; `pharos --help` lists them";

/// The options of `pharos`, and the GPUs of this machine.
pub(super) struct Executable;

impl torchserve::Executable for Executable {
    type Options = Options;

    fn parse(&self, arguments: Vec<OsString>) -> Result<Options, String> {
        let options = Options::from_args(arguments).map_err(|error| match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ONLY_OPTIONS.to_owned(),
            // The usage that follows would be for `pharos` without `torchserve`.
            _ => error
                .to_string()
                .split("\n\nUsage:")
                .next()
                .unwrap_or_default()
                .trim_start_matches("error: ")
                .to_owned(),
        })?;
        if options.command.is_some() { Err(ONLY_OPTIONS.to_owned()) } else { Ok(options) }
    }

    fn python(&self, options: &Options) -> Option<PathBuf> {
        options.workers.python.clone()
    }

    fn worker_user(&self, options: &Options) -> Option<Arc<WorkerUser>> {
        options.workers.worker_user.clone()
    }

    fn pip_sandbox(&self, options: &Options, python: &Path) -> Option<torchserve::PipSandbox> {
        let workers = &options.workers;
        let permissions = launch::installer_permissions(
            &workers.sandboxes(),
            workers.worker_user.as_deref(),
            python,
        )?;
        // Without the worker's executable, the server does not start.
        let worker = super::worker_binary(options).ok()?;
        Some(torchserve::PipSandbox { worker, permissions })
    }

    fn gpus(&self, options: Option<&Options>) -> Vec<u32> {
        // The server's runtime does not exist yet.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return Vec::new() };
        let minimum = options.map(|options| options.gpus.min_capability).unwrap_or_default();
        let library = options.and_then(|options| options.metrics.nvml_library.clone());
        let found = runtime.block_on(system::find_gpus(library, minimum));
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        Devices::new(found, visible.as_deref(), [], &Roots::new(Path::new("/"))).usable().to_vec()
    }
}
