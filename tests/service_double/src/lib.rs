//! A test double of [`pharos::service::Service`] for unit tests of protocol edges: echoes inputs
//! and keeps recorded answers.
//!
//! It has the models `echo`, `slow` (never responds), `many` (decoupled) and `text` (decoupled, a
//! language model whose tokens are the words of the prompt).

mod responses;
mod settings;
mod text_model;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::TenantId;
use pharos::infer::{InferOutput, InferRequest, InferResponse};
use pharos::load_report::{LoadReport, Values};
use pharos::metrics::cache::TokenBudget;
use pharos::metrics::catalog::TenantSource;
use pharos::metrics::exposition::{Encoding, Format, Names};
use pharos::metrics::statistics::ModelStatistics;
use pharos::model::{ModelConfig, ModelMetadata, TensorMetadata};
use pharos::region::{CUDA_HANDLE, Kind};
use pharos::repository::{IndexEntry, State, StateReason};
use pharos::request_trace::Traced;
use pharos::service::{
    Endpoint, LogSettings, LogUpdate, OpenStream, Protocol, Responses, Route, Service,
    SharedService, TraceSettings,
};
use pharos::shared_memory::{Registry, Status, cannot_open, not_a_handle, object_name, refusal};
use pharos::timeline::Instant;
use pharos::trace::settings::Update;

use responses::EchoResponses;
use settings::Settings;

/// A recorded answer: protocol, route, code and reason.
pub type Record = (Protocol, Route, u16, Option<Reason>);

/// The maximum number of regions of shared memory.
const MAX_REGIONS: usize = 16;

/// Returns every input as an output whose name has INPUT replaced by OUTPUT. Clones share the
/// recorded answers.
#[derive(Clone, Debug)]
pub struct EchoService(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    records: Mutex<Vec<Record>>,
    requests: Mutex<Vec<InferRequest>>,
    regions: Mutex<Registry>,
    settings: Mutex<Settings>,
    text_config: Arc<ModelConfig>,
    other_config: Arc<ModelConfig>,
    /// Whether models are loaded by request.
    is_controlled: AtomicBool,
    /// Advances by a microsecond with each read.
    clock: AtomicU64,
}

impl Default for EchoService {
    fn default() -> Self {
        let regions = Mutex::new(Registry::new(MAX_REGIONS));
        Self(Arc::new(Inner {
            records: Mutex::default(),
            requests: Mutex::default(),
            regions,
            settings: Mutex::default(),
            text_config: Arc::new(text_model::config(true)),
            other_config: Arc::new(text_model::config(false)),
            is_controlled: AtomicBool::new(true),
            clock: AtomicU64::new(1),
        }))
    }
}

impl EchoService {
    /// Returns the recorded answers.
    pub fn records(&self) -> Vec<Record> {
        locked(&self.0.records).clone()
    }

    /// Returns the requests that reached a model, as the edge has made them.
    pub fn requests(&self) -> Vec<InferRequest> {
        locked(&self.0.requests).clone()
    }

    /// Refuses to load models by request.
    pub fn disable_model_control(&self) {
        self.0.is_controlled.store(false, Ordering::Relaxed);
    }

    /// Returns the service as edges hold it.
    pub fn shared(&self) -> SharedService {
        Arc::new(self.clone())
    }

    fn known(&self, model: &str) -> Result<(), InferError> {
        if matches!(model, "echo" | "slow" | "many" | "text") {
            return Ok(());
        }
        let message = format!("Request for unknown model: '{model}' is not found");
        Err(InferError::new(ErrorCode::InvalidArg, Reason::UnknownModel, message))
    }

    /// Looks up the shared memory regions of a request.
    fn attach(&self, request: &mut InferRequest) -> Result<(), InferError> {
        let regions = locked(&self.0.regions);
        for input in &mut request.inputs {
            if let Some(slice) = input.tensor.data.region_mut() {
                regions.attach(slice)?;
            }
        }
        request.outputs.iter_mut().filter_map(|output| output.region.as_mut()).try_for_each(
            |slice| {
                regions.attach(slice)?;
                Ok(())
            },
        )
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

#[async_trait]
impl Service for EchoService {
    fn live(&self) -> bool {
        true
    }

    fn ready(&self) -> bool {
        true
    }

    fn exiting(&self) -> bool {
        false
    }

    fn leaving(&self) -> bool {
        self.exiting()
    }

    fn server_name(&self) -> &str {
        "triton"
    }

    fn now(&self) -> Instant {
        Instant(self.0.clock.fetch_add(1000, Ordering::Relaxed))
    }

    async fn model_ready(&self, model: &str, _: &str) -> Result<bool, InferError> {
        self.known(model).map(|()| true)
    }

    fn why_not_ready(&self, _: &str, _: &str) -> Option<String> {
        None
    }

    fn model_metadata(&self, model: &str, _: &str) -> Result<ModelMetadata, InferError> {
        self.known(model)?;
        let tensor =
            |name: &str| TensorMetadata { name: name.into(), datatype: "FP32", shape: vec![-1] };
        Ok(ModelMetadata {
            name: model.into(),
            versions: vec!["1".into()],
            platform: "builtin".into(),
            inputs: vec![tensor("INPUT0")],
            outputs: vec![tensor("OUTPUT0")],
        })
    }

    fn model_config(&self, model: &str, _: &str) -> Result<Arc<ModelConfig>, InferError> {
        self.known(model)?;
        let Inner { text_config, other_config, .. } = &*self.0;
        Ok(if model == "text" { text_config.clone() } else { other_config.clone() })
    }

    /// The model `text` has a chat template.
    async fn model_file(
        &self,
        model: &str,
        _: &str,
        name: &str,
    ) -> Result<Option<Vec<u8>>, InferError> {
        self.known(model)?;
        Ok((name == "chat_template.jinja").then(|| text_model::CHAT_TEMPLATE.as_bytes().to_vec()))
    }

    fn model_config_json(&self, model: &str, _: &str) -> Result<String, InferError> {
        self.known(model).map(|()| format!("{{\"name\":\"{model}\"}}"))
    }

    fn model_config_proto(&self, model: &str, _: &str) -> Result<Vec<u8>, InferError> {
        self.known(model)?;
        let mut bytes = vec![0x0a, model.len() as u8];
        bytes.extend_from_slice(model.as_bytes());
        Ok(bytes)
    }

    /// Fails requests with the id `fail`. A request without timestamps is an error of the edge.
    async fn infer(
        &self,
        mut request: Box<InferRequest>,
        _: Endpoint,
    ) -> Result<InferResponse, InferError> {
        self.known(&request.model_name)?;
        self.attach(&mut request)?;
        if request.timeline.received == Instant(0)
            || request.timeline.request_start < request.timeline.received
        {
            return Err(InferError::internal(
                "the request was not stamped: `received` and `request_start` are set by \
                 `Call::describe_client_in`",
            ));
        }
        locked(&self.0.requests).push((*request).clone());
        if request.model_name == "slow" {
            std::future::pending::<()>().await;
        }
        if request.id == "fail" {
            return Err(InferError::invalid("asked to fail").with_request_id(&request.id));
        }
        let inputs = request.inputs.into_iter();
        let outputs = inputs
            .map(|i| InferOutput { name: i.name.replace("INPUT", "OUTPUT"), tensor: i.tensor });
        Ok(InferResponse {
            model_name: request.model_name,
            model_version: "1".into(),
            id: request.id,
            parameters: request.parameters,
            outputs: outputs.collect(),
            timeline: request.timeline,
        })
    }

    /// The model `many` sends a response for each element of its first input, with the element as a
    /// byte; 255 means an error.
    fn stream(&self, request: InferRequest) -> Result<Box<dyn Responses>, InferError> {
        if request.model_name == "text" {
            locked(&self.0.requests).push(request.clone());
            return Ok(Box::new(text_model::responses(&request)?));
        }
        if request.model_name != "many" {
            let service = self.clone();
            let answer = async move { service.infer(Box::new(request), Endpoint::GrpcInfer).await };
            return Ok(Box::new(EchoResponses::one(answer)));
        }
        Ok(Box::new(EchoResponses::many(&request)?))
    }

    fn stream_open(&self, _: Protocol) -> OpenStream {
        Box::new(())
    }

    fn record_answered(&self, protocol: Protocol, route: Route, code: u16, reason: Option<Reason>) {
        locked(&self.0.records).push((protocol, route, code, reason));
    }

    /// The report of the model `echo` has the metric `waiting_requests`; that of the server does
    /// not.
    fn load_report(&self, model: &str, _: &str) -> Arc<LoadReport> {
        let named_metrics =
            if model == "echo" { vec![("waiting_requests", 3.0)] } else { Vec::new() };
        Arc::new(LoadReport::new(Values {
            rps_fractional: Some(2.0),
            named_metrics,
            ..Values::default()
        }))
    }

    fn statistics(&self, model: &str, _: &str) -> Result<Vec<ModelStatistics>, InferError> {
        if !model.is_empty() {
            self.known(model)?;
        }
        Ok(vec![ModelStatistics { name: "echo".into(), version: "1".into(), ..Default::default() }])
    }

    fn scrape(&self, encoding: Encoding, names: &Names) -> Vec<u8> {
        if !names.is_all() {
            return Vec::new();
        }
        match encoding {
            Encoding::Text(Format::OpenMetrics) => b"# EOF\n".to_vec(),
            Encoding::Text(Format::Text) => b"nv_x 1\n".to_vec(),
            Encoding::Protobuf => vec![6, 10, 4, b'n', b'v', b'_', b'x'],
        }
    }

    async fn repository_index(&self, ready_only: bool) -> Result<Vec<IndexEntry>, InferError> {
        let ready = IndexEntry {
            name: "echo".into(),
            version: Some(1),
            state: Some(State::Ready),
            reason: StateReason::None,
        };
        let never = IndexEntry {
            name: "never".into(),
            version: None,
            state: None,
            reason: StateReason::None,
        };
        Ok(if ready_only { vec![ready] } else { vec![ready, never] })
    }

    /// Loads only `echo`; the error for other models lists the parameters.
    async fn load_model(
        &self,
        model: &str,
        parameters: Vec<(String, Bytes)>,
    ) -> Result<(), InferError> {
        let given: Vec<String> =
            parameters.iter().map(|(name, value)| format!("{name}={}", value.len())).collect();
        if model == "echo" {
            Ok(())
        } else {
            Err(InferError::internal(format!("{model} with {}", given.join(" "))))
        }
    }

    async fn unload_model(&self, model: &str, dependents: bool) -> Result<(), InferError> {
        if model == "echo" {
            Ok(())
        } else {
            Err(InferError::internal(format!("{model} {dependents}")))
        }
    }

    fn check_model_control(&self) -> Result<(), InferError> {
        match self.0.is_controlled.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(InferError::new(
                ErrorCode::Unavailable,
                Reason::Unsupported,
                "explicit model load / unload is not allowed",
            )),
        }
    }

    fn registers_directories(&self) -> bool {
        false
    }

    fn check_registration(&self, _: &str, _: &str) -> Result<(), InferError> {
        Ok(())
    }

    fn register_directories(&self, models: &BTreeMap<String, PathBuf>) -> Result<(), String> {
        models.keys().next().map_or(Ok(()), |name| Err(name.clone()))
    }

    fn unregister_directories(&self, _: &[String]) {}

    /// Checks the names and opens nothing.
    fn register_system_memory(
        &self,
        region: &str,
        key: &str,
        _: u64,
        _: u64,
    ) -> Result<(), InferError> {
        locked(&self.0.regions).check_new(region)?;
        object_name(region, key)?;
        Err(cannot_open(key))
    }

    /// Checks the handle and reports that GPUs are not supported.
    async fn register_cuda_memory(
        &self,
        region: &str,
        handle: &[u8],
        _: i64,
        _: u64,
    ) -> Result<(), InferError> {
        locked(&self.0.regions).check_new(region)?;
        if handle.len() != CUDA_HANDLE {
            return Err(not_a_handle());
        }
        let text =
            format!("failed to register CUDA shared memory region: '{region}', GPUs not supported");
        Err(refusal(ErrorCode::InvalidArg, text))
    }

    fn unregister_memory(&self, kind: Kind, region: Option<&str>) -> Result<(), InferError> {
        locked(&self.0.regions).unregister(kind, region);
        Ok(())
    }

    fn memory_status(&self, kind: Kind, region: Option<&str>) -> Result<Vec<Status>, InferError> {
        locked(&self.0.regions).status(kind, region)
    }

    /// Never samples a request, but settings can be changed.
    fn trace(&self, _: &str, _: &dyn Fn(&str) -> Option<String>) -> Option<Traced> {
        None
    }

    fn tenant<'r>(&self, _: &dyn Fn(&TenantSource) -> Option<&'r [u8]>) -> TenantId {
        TenantId::default()
    }

    fn token_budget(&self, _: TenantId) -> Option<TokenBudget> {
        None
    }

    fn trace_settings(&self, model: &str) -> Result<TraceSettings, InferError> {
        self.update_trace_settings(model, &Update::default())
    }

    fn update_trace_settings(
        &self,
        model: &str,
        update: &Update,
    ) -> Result<TraceSettings, InferError> {
        if !model.is_empty() {
            self.known(model)?;
        }
        locked(&self.0.settings).update_trace(model, update)
    }

    fn log_settings(&self) -> LogSettings {
        locked(&self.0.settings).log.clone()
    }

    fn update_log_settings(&self, update: LogUpdate) -> LogSettings {
        locked(&self.0.settings).update_log(&update)
    }
}
