//! Looks at CUDA memory before it is registered, in a process of its own: this one has no CUDA context, which would take
//! hundreds of megabytes, and no handle of a client's can hurt it.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use pharos::region::CUDA_HANDLE;
use pharos::wire::regions::{PROBE, Probed};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::timeout;

/// How long opening may take: a driver that wakes up needs seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no GPU, or no driver for it.
    NoGpu(String),
    /// The driver does not open it.
    Refused(String),
    /// It cannot be looked at.
    Broken(String),
}

/// Who looks.
#[derive(Debug)]
pub(super) struct Probe {
    worker: PathBuf,
    /// One at a time: clients cannot have any number of processes started.
    turn: Mutex<()>,
}

impl Probe {
    pub(super) fn new(worker: PathBuf) -> Self {
        Self { worker, turn: Mutex::new(()) }
    }

    /// The bytes that a handle opens on a device.
    pub(super) async fn look(&self, device: u32, handle: &[u8; CUDA_HANDLE]) -> Result<u64, Failure> {
        let _turn = self.turn.lock().await;
        let output = timeout(PATIENCE, self.ask(device, handle)).await;
        let output = output.unwrap_or_else(|_| Err(format!("the driver did not answer within {PATIENCE:?}").into()));
        let output = output.map_err(|error| Failure::Broken(error.to_string()))?;
        match Probed::parse(&output) {
            Some(Probed::Bytes(size)) => Ok(size),
            Some(Probed::NoGpu(why)) => Err(Failure::NoGpu(why)),
            Some(Probed::Refused(why)) => Err(Failure::Refused(why)),
            None => Err(Failure::Broken("the process that looks at CUDA memory ended without an answer".to_owned())),
        }
    }

    async fn ask(&self, device: u32, handle: &[u8]) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
        let mut command = Command::new(&self.worker);
        command.arg(PROBE).arg(device.to_string());
        // As everywhere else here, devices are numbered in the order of the bus.
        command.env("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // By a pipe: arguments can be read by everybody on the machine, and a handle opens memory.
            stdin.write_all(handle).await?;
        }
        let output = child.wait_with_output().await?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
