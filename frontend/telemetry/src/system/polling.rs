//! The thread that reads the system and fills the metrics, and the search for GPUs at the start.

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
use super::{Gpus, LatestGpus, Sampler, Settings, Worker};
use pharos_os::clock;

/// How long the driver may take: to wake its devices at the start, or to answer a question at a model's load.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The first interval, so that the processors' use is known soon after the start.
const FIRST: Duration = Duration::from_millis(250);

/// The instances there are now, each with its process if it has one.
pub trait Workers: Fn() -> Vec<(Worker, Option<u32>)> + Send + 'static {}
impl<F: Fn() -> Vec<(Worker, Option<u32>)> + Send + 'static> Workers for F {}

/// The thread at work; it ends when this is dropped, after the reading it is at. Nobody waits for it: the driver may not
/// give it back.
pub struct Polling {
    _stop: mpsc::Sender<()>,
}

impl Polling {
    /// Starts reading into the cache, and what the GPUs tell into `latest` as well. Nothing is started where there is nothing to
    /// read.
    ///
    /// # Errors
    /// No thread is left.
    pub fn start(
        settings: Settings,
        cache: Arc<Cache>,
        latest: Arc<LatestGpus>,
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

/// Reads until nobody wants it any more. The second reading comes early: only with two is the processors' use known.
fn poll(
    settings: &Settings,
    (cache, latest): (Arc<Cache>, &LatestGpus),
    workers: &impl Workers,
    stopped: &mpsc::Receiver<()>,
) {
    let mut sampler = Sampler::new(settings);
    let mut publisher = Publisher::new(cache);
    let mut read = |now: Instant, log: bool| {
        let readings = sampler.sample(now, &workers());
        publisher.publish(&readings, log);
        latest.set(readings.gpus, now + settings.interval + PATIENCE);
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

/// The next time on the grid of `interval` after `due` that is not over; what was missed is not made up for.
fn next(due: Instant, now: Instant, interval: Duration) -> Instant {
    let next = due + interval;
    if next > now { next } else { now + interval }
}

/// The GPUs, if the driver's library (or `library` in its place) is there and answers. What there is, or why there is
/// nothing, is said once, in one line of the log.
pub async fn find_gpus(library: Option<PathBuf>, minimum: super::Capability) -> Option<Arc<Gpus>> {
    let (sender, found) = oneshot::channel();
    let named = library.is_some();
    // A thread of its own, not one of the runtime's: a driver that hangs would hold up the exit.
    let open = move || drop(sender.send(Gpus::open(library.as_deref(), minimum).map(|gpus| (gpus.describe(), gpus))));
    std::thread::Builder::new().name("find-gpus".to_owned()).spawn(open).ok()?;
    match timeout(PATIENCE, found).await {
        Ok(Ok(Ok((described, gpus)))) => {
            tracing::info!("GPUs: {described}");
            return Some(Arc::new(gpus));
        }
        Ok(Ok(Err(reason))) if named => tracing::warn!("no GPUs: --nvml-library cannot be used: {reason}"),
        Ok(Ok(Err(reason))) => tracing::info!("no GPUs: NVIDIA's management library cannot be used: {reason}"),
        Ok(Err(_)) => tracing::warn!("no GPUs: NVIDIA's management library ended its thread"),
        Err(_) => tracing::warn!("no GPUs: the driver has not answered for {} s", PATIENCE.as_secs()),
    }
    None
}

/// What processes hold on the GPUs now, by the number of the device; nothing if the driver takes too long to tell.
pub async fn gpu_memory(gpus: Arc<Gpus>, pids: Vec<u32>) -> Vec<(u32, u64)> {
    let asked = tokio::task::spawn_blocking(move || gpus.memory_of(&pids));
    timeout(PATIENCE, asked).await.ok().and_then(Result::ok).unwrap_or_default()
}
