//! One version of a model: its deployment and the lifecycle of its workers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::MutexGuard;

use super::phase::{Phase, Progress};
use super::{Deployment, Registry};
use pharos::error::InferError;
use pharos_os::{blocking, clock};

/// The backoff before a model is loaded again, in seconds; the last one repeats.
const PAUSES: [u64; 18] = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597];

/// The wait for the end of a cancelled load before the load is cancelled again.
const CANCELLED: Duration = Duration::from_millis(100);

/// A registered version of a model.
pub struct Version {
    /// The model's name.
    pub name: String,
    /// The version string.
    pub text: String,
    /// The model's name in the engine.
    pub engine_name: String,
    // Replaced as a whole on changes.
    deployment: RwLock<Arc<Deployment>>,
    /// Whether the model was loaded, or loading was given up.
    load_ended: AtomicBool,
    progress: Progress,
    /// The time of the last request to start workers, in milliseconds since 1970.
    asked_ms: AtomicU64,
    // Locked while workers are started or stopped, so that changes are applied in order.
    turn: tokio::sync::Mutex<()>,
    /// Incremented by each start or stop request. A start request with an outdated generation is
    /// not retried.
    generation: AtomicU64,
    /// The number of requests in progress.
    in_flight: AtomicUsize,
    /// Whether the version was unregistered; its workers do not start any more.
    removed: AtomicBool,
}

/// A request in progress, until it is dropped.
pub struct InFlight(Arc<Version>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Version {
    pub(super) fn new(name: String, text: String, deployment: Deployment) -> Self {
        let progress = Progress::default();
        if deployment.min_workers > 0 {
            progress.begin();
        }
        Self {
            name,
            text,
            engine_name: deployment.name.clone(),
            deployment: RwLock::new(Arc::new(deployment)),
            load_ended: AtomicBool::new(false),
            progress,
            asked_ms: AtomicU64::new(clock::wall_ms()),
            turn: tokio::sync::Mutex::new(()),
            generation: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            removed: AtomicBool::new(false),
        }
    }

    /// Returns the current deployment.
    pub fn deployment(&self) -> Arc<Deployment> {
        self.deployment.read().clone()
    }

    /// Registers a request in progress. `None` if the model only accepts requests while a worker is
    /// idle, and none is.
    pub fn enter(self: &Arc<Self>) -> Option<InFlight> {
        let deployment = self.deployment();
        let before = self.in_flight.fetch_add(1, Ordering::Relaxed);
        let entered = InFlight(self.clone());
        let idle = before < deployment.min_workers as usize && !self.is_loading();
        (!deployment.use_job_ticket || idle).then_some(entered)
    }

    /// Returns whether the first worker is still loading the model.
    pub fn is_loading(&self) -> bool {
        self.progress.is_loading()
    }

    /// Waits until the workers have loaded the model or loading has been given up. `None` if too
    /// many requests are waiting.
    pub async fn loaded(&self) -> Option<()> {
        let _place = self.progress.wait(self.deployment().queue as usize)?;
        self.progress.settled().await;
        Some(())
    }

    /// Returns the number of requests that wait for the first worker.
    pub(super) fn waiting(&self) -> u64 {
        self.progress.waiting()
    }

    /// Ends the wait for workers that are still loading.
    pub(super) fn stop_waiting(&self) {
        if self.is_loading() {
            self.progress.set(Phase::Stopped);
        }
    }

    /// Returns the time of the last request to start workers, in milliseconds since 1970.
    pub(super) fn asked_ms(&self) -> u64 {
        self.asked_ms.load(Ordering::Relaxed)
    }

    pub(super) fn resize(&self, min: u32, max: u32) {
        let mut deployment = self.deployment.write();
        *deployment =
            Arc::new(Deployment { min_workers: min, max_workers: max, ..(**deployment).clone() });
    }

    /// Starts or stops workers until there are as many as configured.
    ///
    /// # Errors
    /// The model cannot be loaded.
    pub(super) async fn start(&self, registry: &Registry) -> Result<(), InferError> {
        let generation = self.begin_start();
        let started = match self.try_to_start(registry, generation).await {
            None if self.is_removed() => Err(InferError::internal("it was unregistered meanwhile")),
            started => started.unwrap_or(Ok(())),
        };
        if started.is_err() {
            self.give_up(registry);
        }
        started
    }

    /// Like `start`, but in the background. Retries a failed load within the model's
    /// `maxRetryTimeoutInSec`.
    pub(super) fn keep_starting(self: &Arc<Self>, registry: &Arc<Registry>) {
        let generation = self.begin_start();
        let version = self.clone();
        let registry = registry.clone();
        tokio::spawn(async move {
            let began = clock::now();
            let retry_window = Duration::from_secs(version.deployment().max_retry_timeout.into());
            let last = PAUSES.last().copied().unwrap_or_default();
            let pauses = PAUSES.into_iter().skip(1).chain(std::iter::repeat(last));
            for pause in pauses {
                let Some(Err(error)) = version.try_to_start(&registry, generation).await else {
                    return;
                };
                let name = &version.name;
                let text = &version.text;
                let reason = error.message.trim();
                if clock::now() - began >= retry_window {
                    tracing::error!("giving up loading model {name} version {text}: {reason}");
                    version.load_ended.store(true, Ordering::Relaxed);
                    return version.give_up(&registry);
                }
                tracing::warn!(
                    "loading model {name} version {text} failed; retrying in {pause} s: {reason}"
                );
                tokio::time::sleep(Duration::from_secs(pause)).await;
            }
        });
    }

    /// Tries once to start the workers. `None` if there has been a newer request, or the version
    /// was unregistered.
    async fn try_to_start(
        &self,
        registry: &Registry,
        generation: u64,
    ) -> Option<Result<(), InferError>> {
        // Nothing needs a load under way if there are to be no workers.
        let _turn = match self.deployment().min_workers {
            0 => self.turn_without_load(registry, || self.is_newest(generation)).await?,
            _ => self.turn.lock().await,
        };
        if self.is_removed() {
            self.progress.set(Phase::Stopped);
            return None;
        }
        if !self.is_newest(generation) {
            return None;
        }
        self.load_ended.store(false, Ordering::Relaxed);
        let deployment = self.deployment();
        if deployment.min_workers == 0 {
            let unloaded = unload(registry, &self.engine_name).await;
            self.progress.set(Phase::Stopped);
            return Some(unloaded);
        }
        self.progress.begin();
        if deployment.startup_timeout == 0 {
            return Some(Err(InferError::internal("startup_timeout is 0 s; no worker can start")));
        }
        let repository = registry.repository.clone();
        match blocking::run(move || deployment.write(&repository)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                return Some(Err(InferError::internal(format!(
                    "cannot write its configuration: {error}"
                ))));
            }
            Err(error) => {
                return Some(Err(InferError::internal(format!(
                    "cannot write its configuration: {error}"
                ))));
            }
        }
        let loaded = registry.service.load_model(&self.engine_name, Vec::new()).await;
        // A request for no workers has cancelled the load.
        let cancelled =
            loaded.is_err() && self.deployment().min_workers == 0 && !self.is_newest(generation);
        if self.is_removed() || cancelled {
            return None;
        }
        if loaded.is_ok() {
            self.progress.set(Phase::Loaded);
            self.load_ended.store(true, Ordering::Relaxed);
        }
        Some(loaded)
    }

    /// Gives up starting workers. Workers that are already running continue to serve.
    fn give_up(&self, registry: &Registry) {
        let serves = !registry.service.worker_health(&self.engine_name).is_empty();
        self.progress.set(if serves { Phase::Loaded } else { Phase::Stopped });
    }

    /// Stops all workers permanently, also those that are loading the model, and removes the
    /// generated files.
    pub(super) async fn stop(&self, registry: &Registry) {
        self.removed.store(true, Ordering::Release);
        self.next_generation();
        self.stop_waiting();
        let _turn = self.turn_without_load(registry, || true).await;
        // A start that was under way may have entered the loading phase again.
        self.stop_waiting();
        if let Err(reason) = unload(registry, &self.engine_name).await {
            tracing::warn!("failed to unload model {} version {}: {reason}", self.name, self.text);
        }
        let place = registry.repository.join(&self.engine_name);
        let removed = blocking::run(move || remove(&place)).await;
        if let Ok(Err(error)) = removed {
            tracing::warn!(
                "cannot remove the generated files of model {} version {}: {error}",
                self.name,
                self.text
            );
        }
    }

    /// Waits for the turn. An unload cancels the load that has the turn: otherwise the wait could
    /// last until `startupTimeout`. Returns `None` when `is_wanted` returns false: the load may
    /// then belong to a newer request.
    async fn turn_without_load(
        &self,
        registry: &Registry,
        is_wanted: impl Fn() -> bool,
    ) -> Option<MutexGuard<'_, ()>> {
        loop {
            if let Ok(turn) = self.turn.try_lock() {
                return Some(turn);
            }
            if !is_wanted() {
                return None;
            }
            // An error is reported by the unload that follows.
            let _ = unload(registry, &self.engine_name).await;
            // A load that began after the unload is cancelled by the next one.
            if let Ok(turn) = tokio::time::timeout(CANCELLED, self.turn.lock()).await {
                return Some(turn);
            }
        }
    }

    fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    fn begin_start(&self) -> u64 {
        if self.deployment().min_workers > 0 {
            self.asked_ms.store(clock::wall_ms(), Ordering::Relaxed);
            self.progress.begin();
        }
        self.next_generation()
    }

    /// Returns whether no start or stop request came after this one.
    fn is_newest(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) == generation
    }

    fn next_generation(&self) -> u64 {
        self.generation.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Returns whether the model was loaded, or loading was given up.
    pub(super) fn is_load_ended(&self) -> bool {
        self.load_ended.load(Ordering::Relaxed)
    }
}

async fn unload(registry: &Registry, called: &str) -> Result<(), InferError> {
    registry.service.unload_model(called, false).await
}

fn remove(place: &Path) -> std::io::Result<()> {
    match pharos_os::removal::remove_tree(place) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
