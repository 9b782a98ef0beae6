//! Checks CUDA memory before it is registered, in a separate process: a CUDA context costs hundreds
//! of megabytes, and a client's handle must not harm this process.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use pharos::region::CUDA_HANDLE;
use pharos::wire::regions::{PROBE, Probed};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::timeout;

/// The time limit of opening memory; an idle driver needs seconds.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The reason why the probe failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no GPU, or no driver for it.
    NoGpu(String),
    /// The driver refuses the handle.
    Refused(String),
    /// The probe itself failed.
    Broken(String),
}

/// Starts probe processes.
#[derive(Debug)]
pub(super) struct Probe {
    worker: PathBuf,
    /// Serializes probes, so that clients cannot start any number of processes.
    turn: Mutex<()>,
}

impl Probe {
    pub(super) fn new(worker: PathBuf) -> Self {
        Self { worker, turn: Mutex::new(()) }
    }

    /// Returns the size in bytes of the memory that a handle opens on a device.
    pub(super) async fn opened_size(
        &self,
        device: u32,
        handle: &[u8; CUDA_HANDLE],
    ) -> Result<u64, Failure> {
        let _turn = self.turn.lock().await;
        let output = match timeout(TIMEOUT, self.run(device, handle)).await {
            Ok(ended) => ended.map_err(|error| Failure::Broken(error.to_string()))?,
            Err(_) => {
                return Err(Failure::Broken(format!(
                    "the driver did not answer within {TIMEOUT:?}"
                )));
            }
        };
        match Probed::parse(&output) {
            Some(Probed::Bytes(size)) => Ok(size),
            Some(Probed::NoGpu(why)) => Err(Failure::NoGpu(why)),
            Some(Probed::Refused(why)) => Err(Failure::Refused(why)),
            None => Err(Failure::Broken(
                "the process that checks CUDA memory exited without an answer".to_owned(),
            )),
        }
    }

    async fn run(
        &self,
        device: u32,
        handle: &[u8],
    ) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
        let mut command = Command::new(&self.worker);
        command.arg(PROBE).arg(device.to_string());
        // Devices are numbered in the order of the bus in all processes.
        command.env("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // Passed by a pipe, because all users can read arguments, and the handle gives access
            // to the memory.
            stdin.write_all(handle).await?;
        }
        let output = child.wait_with_output().await?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
