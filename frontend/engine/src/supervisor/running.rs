//! The current process of an instance: its events, its share of a GPU, its warm-up, frames to it,
//! and its end.

use std::sync::Arc;
use std::time::Duration;

use pharos::error::InferError;
use pharos::infer::{InferInput, InferRequest};
use pharos::model::Checked;
use pharos::supervisor::LossReason;
use pharos::timeline::Instant;
use pharos::wire::{Device, Loaded, ToWorker};
use tokio::sync::mpsc;

use super::STOP_TIMEOUT;
use crate::memory::Share;
use crate::process::{TemporaryFiles, WorkerProcess};
use crate::wire::{BatchedRequest, SharedLink};
use crate::worker_session::Event;
use pharos_os::{background, clock};
use pharos_telemetry::system::ChosenDevice;

/// The current process of an instance.
pub(super) struct Running {
    pub(super) process: Box<dyn WorkerProcess>,
    /// Keeps the temporary files of its process.
    pub(super) _temporary: Option<TemporaryFiles>,
    pub(super) link: SharedLink,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
    /// What it reported about its model, until the instance is ready.
    pub(super) loaded: Option<Loaded>,
    /// Whether it has loaded its model. Before, it reads no frames.
    pub(super) has_loaded: bool,
    pub(super) warming: Option<Warming>,
    /// The time of its start.
    pub(super) started: Instant,
    /// When it is killed if it has not stopped by then.
    pub(super) kill_at: Option<Instant>,
    /// Whether this server has killed it.
    pub(super) killed: bool,
    /// Whether the process has ended; its last frames may not be read yet.
    pub(super) has_ended: bool,
    /// The share of a GPU that the process uses.
    pub(super) device_share: Option<DeviceShare>,
}

impl Running {
    /// Kills the process.
    pub(super) fn kill(&mut self) {
        self.killed = true;
        // Fails if it has ended.
        let _ = self.process.start_kill();
    }
}

/// Requests that an instance executes as one batch before it is ready.
pub(crate) struct WarmUpBatch {
    pub(crate) requests: Vec<(InferRequest, Checked)>,
    /// The control inputs given in the model's configuration.
    pub(crate) controls: Vec<InferInput>,
}

impl WarmUpBatch {
    /// Returns the batch with the current time in its stamps.
    pub(super) fn batched_requests(&self, now: Instant) -> Vec<Arc<BatchedRequest>> {
        let mut batched_requests = Vec::with_capacity(self.requests.len());
        for (request, checked) in &self.requests {
            let mut request = request.clone();
            request.timeline.received = now;
            request.timeline.request_start = now;
            request.timeline.queue_start = now;
            batched_requests.push(Arc::new(BatchedRequest {
                request,
                checked: *checked,
                padding: false,
            }));
        }
        batched_requests
    }
}

/// A process's share of a GPU.
pub(super) struct DeviceShare {
    pub(super) chosen: ChosenDevice,
    pub(super) share: Share,
}

impl DeviceShare {
    /// Returns the device description for the worker.
    pub(super) fn device(&self) -> Device {
        Device {
            number: self.chosen.number,
            uuid: self.chosen.uuid.clone(),
            visible: self.chosen.visible.clone(),
            pinned: self.share.each(),
        }
    }
}

/// A running warm-up of an instance.
pub(super) struct Warming {
    /// The number of completed runs of all warm-ups.
    pub(super) over: u32,
    pub(super) name: String,
    /// The index of its warm-up, and the requests of all runs of it.
    pub(super) index: usize,
    pub(super) batch: Arc<WarmUpBatch>,
    pub(super) batched_requests: Vec<Arc<BatchedRequest>>,
    pub(super) since: Instant,
    /// The first error among the responses of a decoupled model.
    pub(super) failed: Option<InferError>,
}

impl Warming {
    /// Returns why the instance cannot be loaded, in Triton's format.
    pub(super) fn failure(&self, why: impl std::fmt::Display) -> String {
        failure(&self.name, why)
    }

    /// Returns the failure if the run has exceeded the time limit of a batch.
    pub(super) fn overdue(&self, now: Instant, limit: Duration) -> Option<String> {
        let over = now - self.since >= limit;
        over.then(|| self.failure(format!("it did not finish within {} s", limit.as_secs_f64())))
    }
}

/// Returns why an instance cannot be loaded because of a warm-up, in Triton's format.
pub(super) fn failure(sample: &str, why: impl std::fmt::Display) -> String {
    format!("failed to run warmup sample '{sample}': {why}")
}

/// Sends the new text of `metrics.yaml` to a running worker; a starting one reads it after loading
/// its model.
pub(super) fn redefine(running: &Option<Running>, instance: &str, text: &str) {
    if let Some(running) = running
        && !running.link.send(&ToWorker::Metrics(text.to_owned()))
    {
        let bytes = text.len();
        tracing::warn!(
            instance,
            "the worker keeps the previous metrics.yaml: {bytes} bytes are too long for a message"
        );
    }
}

/// Ends the process: asks it to stop if it is no longer needed and can read the request, kills it
/// otherwise.
pub(super) fn end(running: &mut Option<Running>, reason: &LossReason) {
    let Some(running) = running else { return };
    if let Some(pid) = running.process.id().filter(|_| background::is_entered()) {
        // The kernel's work at its end, which frees its memory, is long.
        background::put(pid);
    }
    if *reason == LossReason::Stopped && running.has_loaded {
        running.link.send(&ToWorker::Shutdown);
        running.kill_at = Some(clock::now() + STOP_TIMEOUT);
    } else {
        running.kill();
    }
}

/// Waits for the next event of the process. Its connection ends with it, also if another process
/// holds it open, such as one that the model has forked.
pub(super) async fn next_event(running: &mut Option<Running>) -> Event {
    let Some(running) = running else { return std::future::pending().await };
    loop {
        tokio::select! {
            biased;
            event = running.events.recv() => {
                return event.unwrap_or_else(|| Event::Ended { reason: "no reason given".to_owned(), is_fault: true });
            }
            _ = running.process.wait(), if !running.has_ended => {
                running.has_ended = true;
                running.link.close();
            }
        }
    }
}
