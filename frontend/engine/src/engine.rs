//! The server: implements `pharos::service` with the model repository and worker processes,
//! independent of any protocol.

mod load_report;
mod responses;
mod service;
mod uploads;

use std::borrow::Cow;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::RwLock;
use pharos::access::tokens::Keyring;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::TenantId;
use pharos::infer::{CorrelationId, InferRequest, Parameter};
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::{self, Cache};
use pharos::metrics::catalog::{Difference, TenantSource};
use pharos::metrics::labels::{self, Protocol};
use pharos::metrics::record;
use pharos::metrics::worker_metrics::WorkerMetrics;
use pharos::model::{ModelConfig, Scheduling};
use pharos::service::{Naming, Resolved, Service};

use crate::loader::{self, Loader};
use crate::scheduler::Timer;
pub use crate::serving::Unfinished;
use crate::serving::{Refusal, Serving};
use crate::shared_memory::{self, SharedMemory};
use load_report::LoadReports;
use pharos_os::blocking;
use pharos_telemetry::metrics::push::{self, Push};
use pharos_telemetry::metrics::{Definition, Source};
use pharos_telemetry::trace::{Traces, Tracing};
use pharos_telemetry::{log, system};
use responses::ClientResponses;
pub use uploads::Uploads;

/// Settings of the server apart from its listeners.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The name that clients see (`--id`).
    pub name: String,
    /// Whether server readiness requires every model to be ready (`--strict-readiness`).
    pub strict_readiness: bool,
    /// Settings of the memory that clients share.
    pub shared_memory: shared_memory::Settings,
    /// Settings of the model loader.
    pub loader: loader::Settings,
    /// The initial trace settings.
    pub trace: Tracing,
}

/// A phase of the server's life; the phases follow each other in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Phase {
    /// Loads the models of the start.
    Loading,
    /// Answers requests, for example to register further models, and is not ready.
    Registering,
    /// Answers requests.
    Serving,
    /// Answers requests, but reports itself as not ready so that load balancers stop sending
    /// requests.
    Leaving,
    /// Refuses requests.
    Exiting,
}

/// The phase now.
struct CurrentPhase(AtomicU8);

impl CurrentPhase {
    fn new() -> Self {
        Self(AtomicU8::new(Phase::Loading as u8))
    }

    fn get(&self) -> Phase {
        match self.0.load(Ordering::Relaxed) {
            0 => Phase::Loading,
            1 => Phase::Registering,
            2 => Phase::Serving,
            3 => Phase::Leaving,
            _ => Phase::Exiting,
        }
    }

    /// Enters a phase, unless a later one has begun.
    fn advance(&self, phase: Phase) {
        self.0.fetch_max(phase as u8, Ordering::Relaxed);
    }
}

struct Inner {
    settings: Settings,
    cache: Arc<Cache>,
    loader: Arc<Loader>,
    traces: Traces,
    shared_memory: SharedMemory,
    latest: system::Latest,
    load_reports: LoadReports,
    phase: CurrentPhase,
    /// The tokens that name the tenants of requests.
    tokens: OnceLock<Arc<RwLock<Keyring>>>,
}

/// An open stream of a client; dropping it updates the gauge of open streams.
struct OpenStreamCount {
    engine: Engine,
    protocol: Protocol,
}

impl Drop for OpenStreamCount {
    fn drop(&mut self) {
        record::stream_open(&self.engine.inner.cache, self.protocol, -1);
    }
}

/// The server. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
    /// Translates model names of clients; `None` if clients use the repository's names.
    naming: Option<Arc<dyn Naming>>,
    /// What loads of its clients may bring.
    uploads: Uploads,
}

impl Engine {
    /// Creates a server without loaded models.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(
        settings: Settings,
        metrics: Definition,
        labels: cache::Settings,
    ) -> std::io::Result<Self> {
        let of_workers = WorkerMetrics::of(&metrics.catalog).encode();
        let cache = Arc::new(Cache::new(metrics.catalog, labels));
        let timer = Timer::start()?;
        let loader = Loader::new(settings.loader.clone(), cache.clone(), of_workers.into(), timer)
            .map_err(std::io::Error::other)?;
        let shared_memory = SharedMemory::new(settings.shared_memory.clone());
        let traces = Traces::start(&settings.trace, &cache)?;
        let inner = Inner {
            settings,
            cache,
            loader: Arc::new(loader),
            traces,
            shared_memory,
            latest: system::Latest::default(),
            load_reports: LoadReports::default(),
            phase: CurrentPhase::new(),
            tokens: OnceLock::new(),
        };
        Ok(Self { inner: Arc::new(inner), naming: None, uploads: Uploads::default() })
    }

    /// Returns the server for clients whose loads may bring this.
    pub fn with_uploads(&self, uploads: Uploads) -> Self {
        Self { uploads, ..self.clone() }
    }

    /// Loads all models, and answers requests from then on; [`Self::all_is_loaded`] makes it ready.
    /// Returns the models that could not be loaded, with the reasons.
    ///
    /// # Errors
    /// A repository cannot be read.
    pub async fn load(&self) -> std::io::Result<Vec<(String, String)>> {
        let failures = self.inner.loader.load_at_start().await?;
        self.inner.phase.advance(Phase::Registering);
        Ok(failures)
    }

    /// Reports the server as ready, after other endpoints have registered their models.
    pub fn all_is_loaded(&self) {
        self.inner.phase.advance(Phase::Serving);
    }

    /// Uses these tokens for the names of tenants, if the metrics definition assigns requests by
    /// token. `has_certificates` is whether a listener requires client certificates. Only the first
    /// call has an effect.
    ///
    /// # Errors
    /// The definition needs tokens or certificates that are not configured.
    pub fn name_tenants_by(
        &self,
        tokens: Option<&Arc<RwLock<Keyring>>>,
        has_certificates: bool,
    ) -> Result<(), String> {
        match (self.inner.cache.tenant_source(), tokens) {
            (Some(TenantSource::Token), None) => {
                Err("metrics: `tenants` assigns requests by token, which needs \
                     --inference-token-file or --management-token-file"
                    .to_owned())
            }
            (Some(TenantSource::Certificate), _) if !has_certificates => {
                Err("metrics: `tenants` assigns requests by client certificate, which needs \
                     --http-use-ssl-mutual or --grpc-use-ssl-mutual"
                    .to_owned())
            }
            (_, tokens) => {
                if let Some(tokens) = tokens {
                    let _ = self.inner.tokens.set(Arc::clone(tokens));
                }
                Ok(())
            }
        }
    }

    /// Returns the tenant that uses a token.
    fn tenant_of_token(&self, token: &[u8]) -> TenantId {
        let Some(tokens) = self.inner.tokens.get() else { return TenantId::default() };
        let tokens = tokens.read();
        self.inner.cache.tenant(tokens.tenant(token).as_bytes())
    }

    /// Reads the metrics definition again for the frontend and all workers, and returns the
    /// changes.
    ///
    /// # Errors
    /// The definition cannot be read or is invalid; nothing has changed then.
    pub fn reload_metrics(&self, source: &Source) -> Result<Difference, String> {
        let read = source
            .read()
            .and_then(|read| self.inner.cache.check_reload(&read.catalog).map(|()| read));
        let succeeded = read.is_ok();
        let result = read.map(|Definition { catalog, .. }| {
            let of_workers = WorkerMetrics::of(&catalog).encode();
            let difference = self.inner.cache.reload(catalog);
            self.inner.loader.redefine_metrics(of_workers.into());
            difference
        });
        self.inner.cache.count(Builtin::Reloads, &[labels::result(succeeded)], 1.0);
        result
    }

    /// Starts measuring the machine and the workers until the returned value is dropped. Returns
    /// `None` if nothing is to be measured.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn watch_system(
        &self,
        settings: system::Settings,
    ) -> std::io::Result<Option<system::Polling>> {
        let models = self.inner.loader.models().clone();
        let latest = self.inner.latest.clone();
        system::Polling::start(settings, self.inner.cache.clone(), latest, move || models.workers())
    }

    /// Starts to push the metrics to a collector.
    ///
    /// # Errors
    /// The endpoint's certificates or headers are not usable.
    pub fn push_metrics(&self, settings: push::Settings) -> Result<Push, String> {
        let engine = self.clone();
        Push::start(settings, self.cache(), move || engine.observe())
    }

    /// Reports the server as not ready while it continues to answer requests.
    pub fn leave(&self) {
        self.inner.phase.advance(Phase::Leaving);
    }

    /// Refuses new work from now on, except requests that continue a running sequence.
    pub fn refuse(&self) {
        self.inner.phase.advance(Phase::Exiting);
    }

    /// Refuses new work, lets accepted requests and running sequences finish for at most `limit`,
    /// and ends all workers. Returns what was left unfinished.
    pub async fn shut_down(&self, limit: Duration) -> Unfinished {
        self.refuse();
        self.inner.loader.shut_down(limit).await
    }

    /// Makes [`Engine::shut_down`] stop waiting.
    pub fn abort_drain(&self) {
        self.inner.loader.models().abort_drain();
    }

    fn phase(&self) -> Phase {
        self.inner.phase.get()
    }

    /// Returns the model of a request if it accepts requests now.
    fn resolve_accepting_model(&self, request: &InferRequest) -> Result<Arc<Serving>, Refusal> {
        if !self.exiting() {
            self.check_open()?;
        }
        let serving = self.inner.loader.models().serving_for(request)?;
        if self.exiting() && !continues(request, &serving) {
            return Err(Refusal::by(serving, InferError::exiting()));
        }
        serving.accepting()
    }

    /// Loads the model of a refused request if the model is loaded on demand, and returns it.
    async fn load_for(
        &self,
        request: &InferRequest,
        mut refusal: Refusal,
    ) -> Result<Arc<Serving>, InferError> {
        for _ in 0..LOADS_OF_A_REQUEST {
            // The model may be unloaded between its load and this request.
            let demanded = match self.check_open() {
                Ok(()) => {
                    let limit = loader::wait_limit(request);
                    self.inner
                        .loader
                        .demand(&request.model_name, &request.model_version, limit)
                        .await
                }
                Err(_) => Ok(None),
            };
            let load = match demanded {
                Ok(load) => load,
                Err(error) => {
                    refusal.count();
                    return Err(error);
                }
            };
            match self.resolve_accepting_model(request) {
                Ok(serving) => {
                    if load.is_some() {
                        self.inner.loader.models().snapshot().record_waited(&request.model_name);
                    }
                    return Ok(serving);
                }
                Err(refused) if self.inner.loader.may_be_demanded(request) => refusal = refused,
                Err(_) => return Err(refusal.count()),
            }
        }
        Err(refusal.count())
    }

    /// The metrics cache.
    pub fn cache(&self) -> &Arc<Cache> {
        &self.inner.cache
    }

    /// Updates the metrics cache before a scrape.
    fn observe(&self) {
        self.inner.loader.models().observe();
        self.inner.shared_memory.observe(&self.inner.cache);
        log::take_lost()
            .into_iter()
            .for_each(|(file, lost)| record::log_lines_lost(&self.inner.cache, file, lost));
    }

    fn serving(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        self.check_open()?;
        self.named(name, version)
    }

    /// Returns the configuration of a model, which need not be loaded if it is loaded on demand.
    fn config(&self, name: &str, version: &str) -> Result<Arc<ModelConfig>, InferError> {
        match self.serving(name, version) {
            Ok(serving) => Ok(serving.config.clone()),
            Err(error) => {
                self.unloaded_config(name, version).map(|(config, ..)| config).ok_or(error)
            }
        }
    }

    /// Returns what is known about a model that is loaded on demand and is not loaded; see
    /// [`Snapshot::unloaded_config`].
    fn unloaded_config(
        &self,
        name: &str,
        version: &str,
    ) -> Option<(Arc<ModelConfig>, u64, Vec<u64>)> {
        self.check_open().ok()?;
        let (name, version) = self.in_repository(name, version).ok()?;
        self.inner.loader.models().snapshot().unloaded_config(&name, version)
    }

    /// Resolves a model by the name that clients use.
    fn named(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        let (name, version) = self.in_repository(name, version)?;
        self.inner.loader.models().serving(&name, version)
    }

    /// Translates a client's model name and version to the repository's name and version. A model
    /// behind an alias has one version.
    fn in_repository<'n>(
        &self,
        name: &'n str,
        version: &'n str,
    ) -> Result<(Cow<'n, str>, &'n str), InferError> {
        Ok(match self.resolve(name, version)? {
            Some(resolved) => (resolved.model.into(), ""),
            None => (name.into(), version),
        })
    }

    fn resolve(&self, name: &str, version: &str) -> Result<Option<Resolved>, InferError> {
        self.naming.as_ref().map_or(Ok(None), |naming| naming.resolve(name, version))
    }

    /// Resolves a model, even while the server exits.
    fn at_any_time(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        if !self.exiting() {
            self.check_open()?;
        }
        self.named(name, version)
    }

    /// Returns an error while models are being loaded and when the server exits.
    fn check_open(&self) -> Result<(), InferError> {
        match self.phase() {
            Phase::Registering | Phase::Serving | Phase::Leaving => Ok(()),
            Phase::Loading => Err(InferError::not_ready("Server not ready")),
            Phase::Exiting => Err(InferError::exiting()),
        }
    }
}

/// Returns whether a request may continue a running sequence. The model's scheduler decides whether
/// it does.
fn continues(request: &InferRequest, serving: &Serving) -> bool {
    let sequences = matches!(serving.config.scheduling, Scheduling::Sequence(_))
        || serving.ensemble().is_some();
    sequences && !request.correlation_id.is_none() && !request.sequence_start
}

/// How often a request may load its model.
const LOADS_OF_A_REQUEST: usize = 3;

/// The limit of the bytes of a request's id and parameters, which are sent to the worker in one
/// frame for the whole batch.
const MAX_TEXT: usize = 1 << 20;

/// Refuses a request whose id and parameters are too long.
fn check_text(request: &InferRequest) -> Result<(), InferError> {
    let mut total = request.id.len();
    if let CorrelationId::String(text) = &request.correlation_id {
        total += text.len();
    }
    for (name, value) in &request.parameters {
        total += name.len() + 16;
        if let Parameter::String(text) = value {
            total += text.len();
        }
    }
    if total <= MAX_TEXT {
        return Ok(());
    }
    let text = format!(
        "the request's id and parameters have {total} bytes; at most {MAX_TEXT} are allowed"
    );
    Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text))
}

impl Engine {
    /// Stops sampling, and writes or sends the queued traces within `limit`.
    pub async fn stop_tracing(&self, limit: Duration) {
        let engine = self.clone();
        // A panic is already logged, and nothing depends on the result.
        let _ = blocking::run(move || engine.inner.traces.stop(limit)).await;
    }

    /// Returns an error for a model (empty: the server) whose requests cannot be traced.
    fn check_traceable(&self, model: &str) -> Result<(), InferError> {
        self.check_open()?;
        let models = self.inner.loader.models();
        if model.is_empty()
            || models.serving(model, "").is_ok_and(|serving| models.is_ready(&serving))
        {
            return Ok(());
        }
        // Triton's spelling, which clients match; other texts differ.
        let text = format!("Request for unknown model : {model}");
        Err(InferError::new(ErrorCode::InvalidArg, Reason::UnknownModel, text))
    }
}
