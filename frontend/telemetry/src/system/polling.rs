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
use super::{Gpus, Latest, Sampler, Settings, Worker, device_files};
use pharos_os::clock;

/// The time limit for the driver to answer a query when a model is loaded. After this time at the
/// start, a log line says what this process waits for.
pub(super) const DRIVER_TIMEOUT: Duration = Duration::from_secs(10);

/// The time limit for the driver to wake its devices at the start. Without persistence mode it
/// needs some seconds for each; without its answer, the server would not use GPUs until its next
/// start.
const WAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// The first interval: short, so that processor utilization is known soon after the start.
const FIRST: Duration = Duration::from_millis(250);

/// Returns the current instances, each with its process if it has one.
pub trait Workers: Fn() -> Vec<(Worker, Option<u32>)> + Send + 'static {}
impl<F: Fn() -> Vec<(Worker, Option<u32>)> + Send + 'static> Workers for F {}

/// The polling thread. It ends after its current reading when this is dropped, which does not wait
/// for it: the driver may hang.
pub struct Polling {
    _stop: mpsc::Sender<()>,
}

impl Polling {
    /// Starts reading into the cache; readings of GPUs and of the host also into `latest`. Starts
    /// no thread if the settings enable no reading.
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
        std::thread::Builder::new()
            .name("system-metrics".to_owned())
            .spawn(move || poll(&settings, cache, &latest, &workers, &stopped))?;
        Ok(Some(Self { _stop: stop }))
    }
}

/// Reads until stopped. The second reading comes early, because processor utilization needs two.
fn poll(
    settings: &Settings,
    cache: Arc<Cache>,
    latest: &Latest,
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

/// Returns `due` plus `interval`, or `now` plus `interval` if that time has passed: missed readings
/// are skipped.
fn next(due: Instant, now: Instant, interval: Duration) -> Instant {
    let next = due + interval;
    if next > now { next } else { now + interval }
}

/// Opens the driver's library, or `library` in its place. Logs one line with the GPUs, or why none
/// can be used.
pub async fn find_gpus(library: Option<PathBuf>, minimum: super::Capability) -> Option<Arc<Gpus>> {
    let (sender, found) = oneshot::channel();
    let named = library.is_some();
    // A separate thread, not one of the runtime: a driver that hangs would delay the exit.
    let thread = std::thread::Builder::new().name("find-gpus".to_owned()).spawn(move || {
        let opened = Gpus::open(library.as_deref(), minimum);
        drop(sender.send(opened.map(|gpus| (gpus.describe(), gpus))));
    });
    thread.ok()?;
    match answer(found, DRIVER_TIMEOUT, WAKE_TIMEOUT).await {
        Some(Ok(Ok((described, gpus)))) => {
            tracing::info!("GPUs: {described}");
            if let Some(gap) = device_files::gap() {
                tracing::warn!("{gap}");
            }
            return Some(Arc::new(gpus));
        }
        Some(Ok(Err(reason))) if named => {
            tracing::warn!("no GPUs: cannot use --nvml-library: {reason}")
        }
        Some(Ok(Err(reason))) if device_files::has_driver() => {
            tracing::warn!(
                "no GPUs: NVIDIA's driver is here, but its management library cannot be used: \
                 {reason}"
            );
        }
        Some(Ok(Err(reason))) => {
            tracing::info!("no GPUs: cannot use NVIDIA's management library: {reason}")
        }
        Some(Err(_)) => tracing::warn!("no GPUs: NVIDIA's management library panicked"),
        None => tracing::warn!(
            "no GPUs: the driver did not respond within {} s",
            WAKE_TIMEOUT.as_secs()
        ),
    }
    None
}

/// Returns the answer of the driver; `None` without an answer within `most`. Logs the wait after
/// `usual`.
async fn answer<T>(
    mut found: oneshot::Receiver<T>,
    usual: Duration,
    most: Duration,
) -> Option<Result<T, oneshot::error::RecvError>> {
    if let Ok(answer) = timeout(usual, &mut found).await {
        return Some(answer);
    }
    tracing::info!(
        "waiting for the driver of the GPUs, at most {} s; persistence mode (nvidia-persistenced) \
         makes it faster",
        most.as_secs()
    );
    timeout(most.saturating_sub(usual), found).await.ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Returns what a driver answers that needs this time, with a usual time of 10 ms and a limit
    /// of 10 s.
    fn answered(after: Duration) -> Option<u32> {
        let (sender, found) = oneshot::channel();
        let wait = std::thread::spawn(move || {
            std::thread::sleep(after);
            let _ = sender.send(7);
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let most = Duration::from_secs(10).min(after * 100);
        let found = runtime.block_on(answer(found, Duration::from_millis(10), most));
        wait.join().unwrap();
        found.map(|answer| answer.unwrap())
    }

    #[test]
    fn a_driver_may_need_longer_than_usual_to_wake_its_devices() {
        assert_eq!(answered(Duration::from_millis(100)), Some(7));
        assert!(WAKE_TIMEOUT >= Duration::from_secs(60), "eight GPUs need up to a minute");
        let (_sender, found) = oneshot::channel::<u32>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let found =
            runtime.block_on(answer(found, Duration::from_millis(1), Duration::from_millis(20)));
        assert!(found.is_none(), "it hangs");
    }
}
