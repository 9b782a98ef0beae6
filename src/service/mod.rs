//! The operations of an inference server, independent of protocols: the interface between the
//! edges, which implement a protocol, and the engine, which serves requests.
//!
//! An edge holds a [`SharedService`], so that its code is compiled in its own package, and not
//! where it meets the engine. [`Management`] adds the operations of an edge that manages models and
//! workers.

mod log;
mod management;
mod model_policy;
mod naming;
mod responses;
mod trace;

use std::any::Any;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

pub use self::log::{
    LogFormat, LogSettings, LogUpdate, REQUEST_LOG_TARGET, log_format, unchangeable_log_setting,
};
pub use self::management::{GpuUsage, Management, SharedManagement, WorkerHealth, WorkerStatus};
pub use self::model_policy::ModelPolicy;
pub use self::naming::{Naming, Resolved};
pub use self::responses::{Responses, Streamed};
pub use self::trace::{TraceSettings, unchangeable_trace_setting};
use crate::error::{InferError, Reason};
use crate::id::TenantId;
use crate::infer::{InferRequest, InferResponse};
use crate::load_report::LoadReport;
use crate::metrics::cache::TokenBudget;
use crate::metrics::catalog::TenantSource;
use crate::metrics::exposition::{Encoding, Names};
pub use crate::metrics::labels::{Protocol, Route};
use crate::metrics::statistics::ModelStatistics;
use crate::model::{ModelConfig, ModelMetadata};
use crate::region::Kind;
use crate::repository::IndexEntry;
use crate::request_trace::Traced;
use crate::shared_memory::Status;
use crate::timeline::Instant;
use crate::trace::settings::Update;

/// The maximum number of unread responses of one request.
pub const UNREAD_RESPONSES: u32 = crate::wire::CREDITS;

/// An endpoint that gives one response to an inference request: it refuses decoupled models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `POST .../infer`, and other requests over HTTP that have one response.
    HttpInfer,
    /// `ModelInfer`.
    GrpcInfer,
}

impl Endpoint {
    /// Returns the error for a decoupled model, which may give any number of responses.
    pub fn refuse_decoupled(self) -> InferError {
        let endpoint = match self {
            Self::HttpInfer => "HTTP end point",
            Self::GrpcInfer => "ModelInfer RPC",
        };
        InferError::unsupported(format!(
            "{endpoint} doesn't support models with decoupled transaction policy"
        ))
    }
}

/// A server as edges hold it.
pub type SharedService = Arc<dyn Service>;

/// Counts a stream as open until it is dropped.
pub type OpenStream = Box<dyn Any + Send>;

/// The operations of a server.
///
/// An empty version means the version that the server chooses.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Returns whether the server runs and is not exiting.
    fn live(&self) -> bool;

    /// Returns whether the server can answer requests: all models are loaded and their workers run,
    /// unless readiness is not strict.
    fn ready(&self) -> bool;

    /// Returns whether the server is exiting.
    fn exiting(&self) -> bool;

    /// Returns whether the exit has begun, so that no health check may report the server as
    /// healthy. It may still answer requests for a while.
    fn leaving(&self) -> bool;

    /// Returns the name that clients see.
    fn server_name(&self) -> &str;

    /// Returns the current time of the monotonic clock that all timestamps use.
    fn now(&self) -> Instant;

    /// Returns whether a version of a model can answer requests.
    ///
    /// # Errors
    /// The server itself cannot answer now, or the version is malformed.
    async fn model_ready(&self, model: &str, version: &str) -> Result<bool, InferError>;

    /// Returns why a loaded version of a model cannot answer now, if the reason is more than that
    /// its worker does not run.
    fn why_not_ready(&self, model: &str, version: &str) -> Option<String>;

    /// Returns the inputs and outputs of a model.
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    fn model_metadata(&self, model: &str, version: &str) -> Result<ModelMetadata, InferError>;

    /// Returns the completed configuration of a model that is ready, for edges that adapt to it.
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    fn model_config(&self, model: &str, version: &str) -> Result<Arc<ModelConfig>, InferError>;

    /// Reads a file of a model that is ready: from the directory of its version, or else from the
    /// one of the model; `None` if neither has it. `name` is a path inside these directories.
    ///
    /// # Errors
    /// The model or version is unknown or not ready, the path leads out of the directories, or the
    /// file cannot be read or has more than 16 MiB.
    async fn model_file(
        &self,
        model: &str,
        version: &str,
        name: &str,
    ) -> Result<Option<Vec<u8>>, InferError>;

    /// Returns the completed configuration of a model as JSON.
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    fn model_config_json(&self, model: &str, version: &str) -> Result<String, InferError>;

    /// Returns the completed configuration of a model as an encoded `inference.ModelConfig`.
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    fn model_config_proto(&self, model: &str, version: &str) -> Result<Vec<u8>, InferError>;

    /// Checks, executes and records a request. Dropping the future cancels the request. The request
    /// is boxed, because each of the nested futures of its execution would copy it.
    ///
    /// # Errors
    /// The request is invalid, refused, cancelled or failed. An error from the queue on is recorded
    /// for the model; any error counts as an answer only when the caller records it with
    /// [`Service::record_answered`].
    async fn infer(
        &self,
        request: Box<InferRequest>,
        endpoint: Endpoint,
    ) -> Result<InferResponse, InferError>;

    /// Loads the model of a request if it is loaded on demand and not loaded. Call before
    /// [`Service::stream`], and before a request is decoded by the metadata of its model.
    /// `timeout_us` is the request's timeout in microseconds, 0 for none.
    ///
    /// # Errors
    /// The model cannot be loaded, or not in time, or too many requests wait already. An unknown
    /// model is not an error.
    async fn demand(&self, model: &str, version: &str, timeout_us: u64) -> Result<(), InferError> {
        let _ = (model, version, timeout_us);
        Ok(())
    }

    /// Does the same as [`Service::infer`] for models of both kinds: a decoupled model may send any
    /// number of responses. A request to a decoupled model is queued before this returns, in the
    /// order of the calls; a request to another model is queued when the first response is polled.
    ///
    /// # Errors
    /// The same as for [`Service::infer`]. Errors of the execution are among the responses.
    fn stream(&self, request: InferRequest) -> Result<Box<dyn Responses>, InferError>;

    /// Counts a stream of requests or responses as open until the guard is dropped.
    fn stream_open(&self, protocol: Protocol) -> OpenStream;

    /// Records an answer with its status code (HTTP) or code (gRPC). Called once for each answer,
    /// refusals and malformed requests included.
    fn record_answered(&self, protocol: Protocol, route: Route, code: u16, reason: Option<Reason>);

    /// Returns the latest load report with the metrics of a model; the server's report if the model
    /// is unknown or empty.
    fn load_report(&self, model: &str, version: &str) -> Arc<LoadReport>;

    /// Returns the statistics of a version of a model (empty version: every ready version), or of
    /// all models (both empty).
    ///
    /// # Errors
    /// The model or version is not available.
    fn statistics(&self, model: &str, version: &str) -> Result<Vec<ModelStatistics>, InferError>;

    /// Encodes the metrics of these names. Takes milliseconds for thousands of series.
    fn scrape(&self, encoding: Encoding, names: &Names) -> Vec<u8>;

    /// Returns every known model and version with its state, and every model that is only in a
    /// repository.
    ///
    /// # Errors
    /// The repositories cannot be read.
    async fn repository_index(&self, ready_only: bool) -> Result<Vec<IndexEntry>, InferError>;

    /// Loads a model, or reloads it if it has changed. `parameters` override the configuration and
    /// files of the repository, by name.
    ///
    /// # Errors
    /// With Triton's codes and texts: models are not loaded by request, the name or a parameter is
    /// invalid, or the load failed. After a failure the previous version continues to serve.
    async fn load_model(
        &self,
        model: &str,
        parameters: Vec<(String, Bytes)>,
    ) -> Result<(), InferError>;

    /// Unloads a model, and with `dependents` the models that only it needs. Accepted requests are
    /// completed. A model that is not loaded is not an error.
    ///
    /// # Errors
    /// Models are not unloaded by request.
    async fn unload_model(&self, model: &str, dependents: bool) -> Result<(), InferError>;

    /// Checks that models, and what belongs to them, are loaded and unloaded by request.
    ///
    /// # Errors
    /// With the text of [`Service::load_model`]: they are not.
    fn check_model_control(&self) -> Result<(), InferError>;

    /// Returns whether directories can be registered as models.
    fn registers_directories(&self) -> bool;

    /// Checks that a request may load a model from a place outside of the repositories: `from` is a
    /// directory or a URL.
    ///
    /// # Errors
    /// The operator does not permit it.
    fn check_registration(&self, model: &str, from: &str) -> Result<(), InferError>;

    /// Registers directories as models by name, all or none of them. They are loaded by
    /// [`Service::load_model`].
    ///
    /// # Errors
    /// The first name that is in use.
    fn register_directories(&self, models: &BTreeMap<String, PathBuf>) -> Result<(), String>;

    /// Removes registered directories from the table. Does not delete their files.
    fn unregister_directories(&self, models: &[String]);

    /// Registers `byte_size` bytes from `offset` of the POSIX shared memory object `key`.
    ///
    /// # Errors
    /// With Triton's texts: the key does not name an object that clients may use, the object does
    /// not contain the range, the region's name is in use, or shared memory of clients is disabled.
    fn register_system_memory(
        &self,
        region: &str,
        key: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<(), InferError>;

    /// Registers `byte_size` bytes of CUDA memory of `device` by the IPC handle of the process that
    /// allocated it.
    ///
    /// # Errors
    /// With Triton's texts: there is no GPU, the handle cannot be opened, its memory is smaller,
    /// the region's name is in use, or shared memory of clients is disabled.
    async fn register_cuda_memory(
        &self,
        region: &str,
        handle: &[u8],
        device: i64,
        byte_size: u64,
    ) -> Result<(), InferError>;

    /// Unregisters the region of a kind and name, or all regions of the kind. Requests that use a
    /// region keep it until they end.
    ///
    /// # Errors
    /// Shared memory of clients is disabled.
    fn unregister_memory(&self, kind: Kind, region: Option<&str>) -> Result<(), InferError>;

    /// Returns the region of a kind and name, or all regions of the kind.
    ///
    /// # Errors
    /// There is no such region, or it is of the other kind.
    fn memory_status(&self, kind: Kind, region: Option<&str>) -> Result<Vec<Status>, InferError>;

    /// Begins to trace a request to a model, if it is sampled. `header` gives the headers (or
    /// metadata) of the request by name.
    fn trace(&self, model: &str, header: &dyn Fn(&str) -> Option<String>) -> Option<Traced>;

    /// Returns the tenant of a request, which is charged for it. `given` returns what the request
    /// has of the source: the value of the header, its bearer token, or the name in the certificate
    /// of its connection.
    fn tenant<'r>(&self, given: &dyn Fn(&TenantSource) -> Option<&'r [u8]>) -> TenantId;

    /// Returns the state of a tenant's budget of tokens; `None` if the tenant has none.
    fn token_budget(&self, tenant: TenantId) -> Option<TokenBudget>;

    /// Returns the trace settings of a model, or (empty) of the server.
    ///
    /// # Errors
    /// The model is unknown or not ready.
    fn trace_settings(&self, model: &str) -> Result<TraceSettings, InferError>;

    /// Changes the trace settings of a model, or (empty) of the server. Returns the resulting
    /// settings.
    ///
    /// # Errors
    /// The model is unknown or not ready, or requests would be traced without a destination; then
    /// nothing has changed.
    fn update_trace_settings(
        &self,
        model: &str,
        update: &Update,
    ) -> Result<TraceSettings, InferError>;

    /// Returns the log settings.
    fn log_settings(&self) -> LogSettings;

    /// Changes the log settings. Returns the resulting settings.
    fn update_log_settings(&self, update: LogUpdate) -> LogSettings;
}
