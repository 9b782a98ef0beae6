//! The server's verbs, free of protocols: the only thing that `http` and `grpc` call.

mod exchange;
mod repository_control;
mod responses;
mod trace;
mod workers;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{CorrelationId, InferRequest, InferResponse, Parameter};
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::{self, Cache};
use pharos::metrics::catalog::{Difference, MetricSpec};
use pharos::metrics::exposition::{self, Format, Names};
use pharos::metrics::labels::RELOAD_RESULTS;
use pharos::metrics::record;
use pharos::metrics::statistics::{self, ModelStatistics};
use pharos::model::{ModelMetadata, Scheduling, envelope};
use pharos::repository::parse_version;
use pharos::timeline::Instant;

pub use crate::repository::Unfinished;
pub use exchange::Aliases;
pub use pharos::metrics::labels::{Outcome, Protocol, Route};
pub use responses::{Responses, Streamed};
pub use trace::Shown;
pub(crate) use trace::unchangeable_trace_setting;
pub use workers::WorkerShown;

use crate::cli;
use crate::clock;
use crate::log;
use crate::metrics::{Definition, Source};
use crate::repository::{self, Repository, Serving};
use crate::scheduler::Timer;
use crate::shared_memory::{self, SharedMemory};
use crate::system;
use crate::trace::Traces;
use exchange::Exchange;

/// So many responses of one request may be made and not read yet.
pub(crate) const UNREAD: u32 = pharos::wire::CREDITS;

/// What the server is started with, apart from its listeners.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The name that clients see (`--id`).
    pub name: String,
    /// Whether readiness asks for every model (`--strict-readiness`).
    pub strict_readiness: bool,
    /// Memory that clients share.
    pub shared_memory: shared_memory::Settings,
    /// The models.
    pub repository: repository::Settings,
    /// What is traced from the start.
    pub trace: cli::Tracing,
}

/// What a request gets while the server exits.
pub const EXITING_TEXT: &str = "Server exiting";

/// A way on which an inference request gets one answer: models that may answer any number of times refuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `POST .../infer`.
    HttpInfer,
    /// `ModelInfer`.
    GrpcInfer,
}

impl Endpoint {
    /// The refusal of a model that may answer any number of times, where one answer is all there is room for.
    fn refuse_decoupled(self) -> InferError {
        let way = match self {
            Self::HttpInfer => "HTTP end point",
            Self::GrpcInfer => "ModelInfer RPC",
        };
        InferError::unsupported(format!("{way} doesn't support models with decoupled transaction policy"))
    }
}

/// Where the server is in its life.
const LOADING: u8 = 0;
const SERVING: u8 = 1;
/// It serves, and tells load balancers that it soon will not.
const LEAVING: u8 = 2;
const EXITING: u8 = 3;

struct Inner {
    settings: Settings,
    cache: Arc<Cache>,
    repository: Arc<Repository>,
    traces: Traces,
    shared_memory: SharedMemory,
    gpus: Arc<system::LatestGpus>,
    phase: AtomicU8,
}

/// A stream that is open.
pub struct OpenStream {
    engine: Engine,
    protocol: Protocol,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        record::stream_open(&self.engine.0.cache, self.protocol, -1);
    }
}

/// Counts that the definition of the metrics was read again, with or without success.
fn count_reload(cache: &Cache, succeeded: bool) {
    let [success, failure] = RELOAD_RESULTS;
    if let Ok(reloads) = cache.counter(Builtin::Reloads.name(), &[if succeeded { success } else { failure }]) {
        // A counter takes every whole number.
        let _ = reloads.add_or_update(1.0);
    }
}

/// The server. Cheap to clone.
#[derive(Clone)]
pub struct Engine(Arc<Inner>, Option<Arc<dyn Aliases>>);

impl Engine {
    /// A server that has loaded no models yet.
    ///
    /// # Errors
    /// No thread is left.
    pub fn new(settings: Settings, metrics: Definition, labels: cache::Settings) -> std::io::Result<Self> {
        let cache = Arc::new(Cache::new(metrics.catalog, labels));
        let timer = Timer::start()?;
        let repository = Repository::new(settings.repository.clone(), cache.clone(), metrics.text.into(), timer);
        let repository = Arc::new(repository.map_err(std::io::Error::other)?);
        let shared_memory = SharedMemory::new(settings.shared_memory.clone());
        let traces = Traces::start(&settings.trace, &cache)?;
        let (gpus, phase) = (Arc::default(), AtomicU8::new(LOADING));
        Ok(Self(Arc::new(Inner { settings, cache, repository, shared_memory, traces, gpus, phase }), None))
    }

    /// The same server, for clients that call models by these names.
    #[must_use]
    pub fn with_aliases(&self, aliases: Arc<dyn Aliases>) -> Self {
        Self(self.0.clone(), Some(aliases))
    }

    /// Loads all models. Returns those that could not be loaded, with the reasons.
    ///
    /// # Errors
    /// A repository cannot be read.
    pub async fn load(&self) -> std::io::Result<Vec<(String, String)>> {
        let failures = self.0.repository.load_at_start().await?;
        let _ = self.0.phase.compare_exchange(LOADING, SERVING, Ordering::Relaxed, Ordering::Relaxed);
        Ok(failures)
    }

    /// Reads the definition of the metrics again, for the frontend and all workers, and says what it changes.
    ///
    /// # Errors
    /// It cannot be read or is wrong; then nothing has changed.
    pub fn reload_metrics(&self, source: &Source) -> Result<Difference, String> {
        let read = source.read();
        let succeeded = read.is_ok();
        let result = read.map(|Definition { text, catalog, .. }| {
            let difference = self.0.cache.reload(catalog);
            self.0.repository.redefine_metrics(text.into());
            difference
        });
        count_reload(&self.0.cache, succeeded);
        result
    }

    /// Begins to measure the machine and the workers; ends when what is returned is dropped. `None` if there is nothing to
    /// measure.
    ///
    /// # Errors
    /// No thread is left.
    pub fn watch_system(&self, settings: system::Settings) -> std::io::Result<Option<system::Polling>> {
        let (repository, gpus) = (self.0.repository.clone(), self.0.gpus.clone());
        system::Polling::start(settings, self.0.cache.clone(), gpus, move || repository.workers())
    }

    /// The server is no longer ready, and answers as before.
    pub fn leave(&self) {
        self.0.phase.fetch_max(LEAVING, Ordering::Relaxed);
    }

    /// Refuses new work from now on: what is let in belongs to a sequence that runs.
    pub fn refuse(&self) {
        self.0.phase.fetch_max(EXITING, Ordering::Relaxed);
    }

    /// Refuses new work, finishes what was accepted and the sequences that run for at most `patience`, ends all workers.
    /// Returns what was left.
    pub async fn shut_down(&self, patience: Duration) -> Unfinished {
        self.refuse();
        self.0.repository.shut_down(patience).await
    }

    /// Has [`Engine::shut_down`] wait for nothing more.
    pub fn hurry(&self) {
        self.0.repository.hurry();
    }

    /// Whether the server runs and is not exiting.
    pub fn live(&self) -> bool {
        !self.exiting()
    }

    /// Whether requests can be answered: all models are loaded and living, unless readiness is not strict.
    pub fn ready(&self) -> bool {
        self.phase() == SERVING && (!self.0.settings.strict_readiness || self.0.repository.all_ready())
    }

    /// Whether the server is on its way out.
    pub fn exiting(&self) -> bool {
        self.phase() == EXITING
    }

    fn phase(&self) -> u8 {
        self.0.phase.load(Ordering::Relaxed)
    }

    /// The name that clients see.
    pub fn server_name(&self) -> &str {
        &self.0.settings.name
    }

    /// Whether a version of a model (empty: the latest) can answer, and its code does not say otherwise.
    ///
    /// # Errors
    /// The server itself cannot answer now.
    pub async fn model_ready(&self, name: &str, version: &str) -> Result<bool, InferError> {
        self.open()?;
        Ok(match self.resolve(name, version) {
            Ok(Some((name, _))) => self.0.repository.says_ready(&name, "").await,
            Ok(None) => self.0.repository.says_ready(name, version).await,
            Err(_) => false,
        })
    }

    /// Why a version of a model that is loaded cannot answer now, if more is known than that its process is not there.
    pub fn why_not_ready(&self, name: &str, version: &str) -> Option<String> {
        match self.resolve(name, version).ok()? {
            Some((name, _)) => self.0.repository.why_not_ready(&name, ""),
            None => self.0.repository.why_not_ready(name, version),
        }
    }

    /// What a model takes and gives.
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    pub fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, InferError> {
        let serving = self.at_any_time(name, version)?;
        // Who asks about one version is told of that one, as by Triton.
        let versions = match version {
            "" if self.1.is_none() => self.0.repository.ready_versions(name),
            _ => vec![serving.model.version],
        };
        let metadata = serving.config.metadata(&versions);
        Ok(match (self.resolve(name, version)?, &self.1) {
            (Some((_, own)), Some(aliases)) => {
                let versions = if version.is_empty() { aliases.versions(name) } else { vec![own] };
                ModelMetadata { name: name.to_owned(), versions, ..metadata }
            }
            _ => metadata,
        })
    }

    /// A model's completed configuration as JSON.
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    pub fn model_config_json(&self, name: &str, version: &str) -> Result<String, InferError> {
        Ok(self.serving(name, version)?.config.to_json())
    }

    /// A model's completed configuration as bytes of `inference.ModelConfig`.
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    pub fn model_config_proto(&self, name: &str, version: &str) -> Result<Vec<u8>, InferError> {
        Ok(self.serving(name, version)?.config.encode())
    }

    /// Checks a request, executes it and records it. Dropping the future cancels the request.
    ///
    /// # Errors
    /// Everything that can go wrong with a request; each has been recorded by the time it is returned, except for the
    /// answer itself ([`Engine::record_answered`] is the caller's).
    pub async fn infer(&self, mut request: InferRequest, endpoint: Endpoint) -> Result<InferResponse, InferError> {
        let mut exchange = Exchange::begin(self, &mut request)?;
        let serving = self.able(&request)?;
        exchange.found(self, &serving, &mut request)?;
        self.0.shared_memory.lend(&mut request)?;
        // A handler that may send parts of an answer need not.
        if serving.config.decoupled && serving.config.backend != envelope::BACKEND {
            return Err(endpoint.refuse_decoupled());
        }
        check_text(&request)?;
        let answer = match serving.config.decoupled {
            true => {
                let admitted = serving.admit(&mut request)?;
                let responses = Responses::many(self.0.repository.clone().stream(&serving, request, admitted));
                responses.only().await.and_then(|only| only.ok_or_else(|| endpoint.refuse_decoupled()))
            }
            false => self.0.repository.infer(&serving, request).await,
        };
        if exchange.is_plain() { answer } else { exchange.end(answer) }
    }

    /// As [`Engine::infer`], for models of both kinds: a decoupled model may answer any number of times. Its requests are
    /// on their way when this returns, in the order of the calls; those of other models when the answer is asked for.
    ///
    /// # Errors
    /// As [`Engine::infer`]; those of executing the request are among its answers.
    pub fn stream(&self, mut request: InferRequest) -> Result<Responses, InferError> {
        let mut exchange = Exchange::begin(self, &mut request)?;
        let serving = self.able(&request)?;
        exchange.found(self, &serving, &mut request)?;
        self.0.shared_memory.lend(&mut request)?;
        check_text(&request)?;
        let admitted = serving.admit(&mut request)?;
        let repository = self.0.repository.clone();
        let responses = match serving.config.decoupled {
            true => Responses::many(repository.stream(&serving, request, admitted)),
            false => Responses::one(async move { repository.execute(&serving, request, admitted).await }),
        };
        Ok(if exchange.is_plain() { responses } else { responses.seen_as(exchange) })
    }

    /// The model that a request is for, if it can answer.
    fn able(&self, request: &InferRequest) -> Result<Arc<Serving>, InferError> {
        if !self.exiting() {
            self.open()?;
        }
        let serving = self.0.repository.serving_for(request)?;
        if self.exiting() && !continues(request, &serving) {
            return Err(InferError::not_ready(EXITING_TEXT));
        }
        serving.check_ready()?;
        Ok(serving)
    }

    /// Statistics of a model's version (empty: every ready version), or of all models (both empty).
    ///
    /// # Errors
    /// The model or version is not available.
    pub fn statistics(&self, name: &str, version: &str) -> Result<Vec<ModelStatistics>, InferError> {
        self.open()?;
        let unavailable = |text| InferError::new(ErrorCode::InvalidArg, Reason::UnknownModel, text);
        let all = self.0.repository.all();
        if name.is_empty() {
            return Ok(all.iter().map(|serving| statistics::of(&serving.series)).collect());
        }
        let resolved = self.resolve(name, "")?;
        let name = resolved.as_ref().map_or(name, |(name, _)| name);
        let version = if resolved.is_some() { "" } else { version };
        let called = self.0.repository.called(name)?;
        let of_name: Vec<_> = all.iter().filter(|serving| *serving.model.name == *called).collect();
        if of_name.is_empty() {
            return Err(unavailable(format!("requested model '{name}' is not available")));
        }
        let wanted = match version {
            "" => None,
            _ => Some(parse_version(version)?),
        };
        let chosen = of_name.iter().filter(|serving| wanted.is_none_or(|wanted| serving.model.version == wanted));
        let chosen: Vec<_> = chosen.map(|serving| statistics::of(&serving.series)).collect();
        if chosen.is_empty() {
            return Err(unavailable(format!("requested model version is not available for model '{name}'")));
        }
        Ok(chosen)
    }

    /// Memory that clients share.
    pub fn shared_memory(&self) -> &SharedMemory {
        &self.0.shared_memory
    }

    /// Where every series lives.
    pub fn cache(&self) -> &Arc<Cache> {
        &self.0.cache
    }

    /// What is in the metrics now, of these names. Takes milliseconds where there are thousands of series.
    pub fn metrics_text(&self, format: Format, names: &Names) -> String {
        self.observe();
        exposition::render_named(&self.0.cache, format, names)
    }

    /// The same in the text format of Prometheus' Java client; `help` gives the text behind `# HELP`.
    pub fn java_client_metrics_text(&self, names: &Names, help: impl Fn(&MetricSpec) -> String) -> String {
        self.observe();
        exposition::java_client::render(&self.0.cache, names, help)
    }

    /// Brings the cache up to date before a scrape.
    fn observe(&self) {
        self.0.repository.observe();
        self.0.shared_memory.observe(&self.0.cache);
        log::take_lost().into_iter().for_each(|(file, lost)| record::log_lines_lost(&self.0.cache, file, lost));
    }

    /// A stream of requests or responses was opened; it is open until the guard is dropped.
    pub fn stream_open(&self, protocol: Protocol) -> OpenStream {
        record::stream_open(&self.0.cache, protocol, 1);
        OpenStream { engine: self.clone(), protocol }
    }

    /// Records an answer; to be called once for each, refusals and malformed requests included.
    pub fn record_answered(&self, protocol: Protocol, route: Route, code: u16, reason: Option<Reason>) {
        record::request_answered(&self.0.cache, protocol, route, Outcome { code, reason });
    }

    /// Now, on the clock of all stamps.
    pub fn now(&self) -> Instant {
        clock::now()
    }

    fn serving(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        self.open()?;
        self.named(name, version)
    }

    /// The model that a client calls so.
    fn named(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        match self.resolve(name, version)? {
            Some((name, _)) => self.0.repository.serving(&name, ""),
            None => self.0.repository.serving(name, version),
        }
    }

    fn resolve(&self, name: &str, version: &str) -> Result<Option<(String, String)>, InferError> {
        self.1.as_ref().map_or(Ok(None), |names| names.resolve(name, version))
    }

    /// A model, also while the server exits.
    fn at_any_time(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        if !self.exiting() {
            self.open()?;
        }
        self.named(name, version)
    }

    /// Refuses while models are being loaded and when the server exits.
    fn open(&self) -> Result<(), InferError> {
        match self.phase() {
            SERVING | LEAVING => Ok(()),
            LOADING => Err(InferError::not_ready("Server not ready")),
            _ => Err(InferError::not_ready(EXITING_TEXT)),
        }
    }
}

/// Whether a request may belong to a sequence that runs; whether it does, the model's scheduler knows.
fn continues(request: &InferRequest, serving: &Serving) -> bool {
    let sequences = matches!(serving.config.scheduling, Scheduling::Sequence(_)) || serving.ensemble().is_some();
    sequences && !request.correlation_id.is_none() && !request.sequence_start
}

/// The most bytes of a request's id and free parameters: they travel to the worker beside the tensors, with those of the
/// other requests of the batch.
const MAX_TEXT: usize = 1 << 20;

/// Refuses a request whose id and parameters are too long.
fn check_text(request: &InferRequest) -> Result<(), InferError> {
    let size = |(name, value): &(String, Parameter)| {
        let value = if let Parameter::String(text) = value { text.len() } else { 0 };
        name.len() + value + 16
    };
    let sequence = if let CorrelationId::String(text) = &request.correlation_id { text.len() } else { 0 };
    let total = sequence + request.id.len() + request.parameters.iter().map(size).sum::<usize>();
    if total <= MAX_TEXT {
        return Ok(());
    }
    let text = format!("the request's id and parameters have {total} bytes; at most {MAX_TEXT} are allowed");
    Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text))
}
