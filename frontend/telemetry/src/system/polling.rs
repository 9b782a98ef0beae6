//! The thread that reads the system into the metrics, and the search for GPUs at the start.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use pharos::metrics::cache::Cache;
use pharos::timeline::Instant;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::publish::Publisher;
use super::{Gpus, Latest, Sampler, Settings, Worker};
use pharos_os::clock;

/// The time limit for the driver: to wake its devices at the start, or to answer a query when a model is loaded.
pub(super) const DRIVER_TIMEOUT: Duration = Duration::from_secs(10);

/// The first interval: short, so that processor utilization is known soon after the start.
const FIRST: Duration = Duration::from_millis(250);

/// Returns the current instances, each with its process if it has one.
pub trait Workers: Fn() -> Vec<(Worker, Option<u32>)> + Send + 'static {}
impl<F: Fn() -> Vec<(Worker, Option<u32>)> + Send + 'static> Workers for F {}

/// The polling thread. It ends after its current reading when this is dropped, which does not wait for it: the driver may hang.
pub struct Polling {
    _stop: mpsc::Sender<()>,
}

impl Polling {
    /// Starts reading into the cache; readings of GPUs and of the host also into `latest`. Starts no thread if the settings enable
    /// no reading.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        settings: Settings,
        cache: Arc<Cache>,
        latest: Latest,
        workers: impl Workers,
    ) -> io::Result<Option<Self>> {
        if !settings.any() {
            return Ok(None);
        }
        let (stop, stopped) = mpsc::channel();
        let poll = move || poll(&settings, (cache, &latest), &workers, &stopped);
        std::thread::Builder::new().name("system-metrics".to_owned()).spawn(poll)?;
        Ok(Some(Self { _stop: stop }))
    }
}

/// Reads until stopped. The second reading comes early, because processor utilization needs two.
fn poll(
    settings: &Settings,
    (cache, latest): (Arc<Cache>, &Latest),
    workers: &impl Workers,
    stopped: &mpsc::Receiver<()>,
) {
    let mut sampler = Sampler::new(settings);
    let mut publisher = Publisher::new(cache);
    let mut read = |now: Instant, log: bool| {
        let readings = sampler.sample(now, &workers());
        publisher.publish(&readings, log);
        let until = now + settings.interval + DRIVER_TIMEOUT;
        if let Some(reading) = readings.host {
            latest.host.set(reading, until);
        }
        latest.gpus.set(readings.gpus, until);
    };
    let mut due = clock::now() + FIRST.min(settings.interval);
    read(clock::now(), false);
    let mut log_due = due;
    while stopped.recv_timeout(due - clock::now()) == Err(RecvTimeoutError::Timeout) {
        let now = clock::now();
        let log = now >= log_due;
        read(now, log);
        due = next(due, now, settings.interval);
        if log {
            log_due = next(log_due, now, settings.log_interval);
        }
    }
}

/// Returns `due` plus `interval`, or `now` plus `interval` if that time has passed: missed readings are skipped.
fn next(due: Instant, now: Instant, interval: Duration) -> Instant {
    let next = due + interval;
    if next > now { next } else { now + interval }
}

/// Opens the driver's library, or `library` in its place. Logs one line with the GPUs, or why none can be used.
pub async fn find_gpus(library: Option<PathBuf>, minimum: super::Capability) -> Option<Arc<Gpus>> {
    let (sender, found) = oneshot::channel();
    let named = library.is_some();
    // A separate thread, not one of the runtime: a driver that hangs would delay the exit.
    let open = move || drop(sender.send(Gpus::open(library.as_deref(), minimum).map(|gpus| (gpus.describe(), gpus))));
    std::thread::Builder::new().name("find-gpus".to_owned()).spawn(open).ok()?;
    match timeout(DRIVER_TIMEOUT, found).await {
        Ok(Ok(Ok((described, gpus)))) => {
            tracing::info!("GPUs: {described}");
            return Some(Arc::new(gpus));
        }
        Ok(Ok(Err(reason))) if named => tracing::warn!("no GPUs: cannot use --nvml-library: {reason}"),
        Ok(Ok(Err(reason))) => tracing::info!("no GPUs: cannot use NVIDIA's management library: {reason}"),
        Ok(Err(_)) => tracing::warn!("no GPUs: NVIDIA's management library panicked"),
        Err(_) => tracing::warn!("no GPUs: the driver did not respond within {} s", DRIVER_TIMEOUT.as_secs()),
    }
    None
}
