//! An engine for the unit tests of the protocol edges: it has the verbs of [`crate::engine::Engine`], echoes, and
//! remembers what was recorded.

use std::sync::{Arc, Mutex};

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{InferOutput, InferRequest, InferResponse};
use pharos::metrics::exposition::{Format, Names};
use pharos::metrics::statistics::ModelStatistics;
use pharos::model::{ModelMetadata, TensorMetadata};
use pharos::repository::{IndexEntry, State};
use pharos::request_trace::Traced;
use pharos::tensor::{DataType, Tensor};
use pharos::timeline::Instant;
use pharos::trace::settings::{Mode, Settings, Update, Values};

use crate::cli::Tracing;
use crate::engine::{Endpoint, Protocol, Responses, Route, Shown, Streamed};
use crate::shared_memory::{self, SharedMemory};
use crate::trace::shown;

/// One recorded answer.
pub type Record = (Protocol, Route, u16, Option<Reason>);

/// Echoes: every input comes back as an output whose name has INPUT replaced by OUTPUT.
#[derive(Clone)]
pub struct Engine {
    records: Arc<Mutex<Vec<Record>>>,
    shared_memory: Arc<SharedMemory>,
    traces: Arc<Mutex<Option<Settings>>>,
}

impl Default for Engine {
    fn default() -> Self {
        let settings = shared_memory::Settings { allowed: true, worker: "/nowhere".into() };
        Self { records: Arc::default(), traces: Arc::default(), shared_memory: Arc::new(SharedMemory::new(settings)) }
    }
}

/// Counts nothing.
pub struct OpenStream;

impl Engine {
    pub fn records(&self) -> Vec<Record> {
        self.records.lock().map(|records| records.clone()).unwrap_or_default()
    }
    pub fn shared_memory(&self) -> &SharedMemory {
        &self.shared_memory
    }
    pub fn live(&self) -> bool {
        true
    }
    pub fn ready(&self) -> bool {
        true
    }
    pub fn exiting(&self) -> bool {
        false
    }
    pub fn server_name(&self) -> &str {
        "triton"
    }
    fn known(&self, name: &str) -> Result<(), InferError> {
        if matches!(name, "echo" | "slow" | "many") {
            return Ok(());
        }
        let message = format!("Request for unknown model: '{name}' is not found");
        Err(InferError::new(ErrorCode::InvalidArg, Reason::UnknownModel, message))
    }
    pub async fn model_ready(&self, name: &str, _version: &str) -> Result<bool, InferError> {
        self.known(name).map(|()| true)
    }
    pub fn why_not_ready(&self, _name: &str, _version: &str) -> Option<String> {
        None
    }
    pub fn model_metadata(&self, name: &str, _version: &str) -> Result<ModelMetadata, InferError> {
        self.known(name)?;
        let tensor = |name: &str| TensorMetadata { name: name.into(), datatype: "FP32", shape: vec![-1] };
        Ok(ModelMetadata {
            name: name.into(),
            versions: vec!["1".into()],
            platform: "builtin".into(),
            inputs: vec![tensor("INPUT0")],
            outputs: vec![tensor("OUTPUT0")],
        })
    }
    pub fn model_config_json(&self, name: &str, _version: &str) -> Result<String, InferError> {
        self.known(name).map(|()| format!("{{\"name\":\"{name}\"}}"))
    }
    pub fn model_config_proto(&self, name: &str, _version: &str) -> Result<Vec<u8>, InferError> {
        self.known(name)?;
        let mut bytes = vec![0x0a, name.len() as u8];
        bytes.extend_from_slice(name.as_bytes());
        Ok(bytes)
    }
    pub async fn infer(&self, mut request: InferRequest, _: Endpoint) -> Result<InferResponse, InferError> {
        self.known(&request.model_name)?;
        self.shared_memory.lend(&mut request)?;
        if request.timeline.received == Instant(0) || request.timeline.request_start < request.timeline.received {
            return Err(InferError::internal("the request was not stamped"));
        }
        if request.model_name == "slow" {
            std::future::pending::<()>().await;
        }
        if request.id == "fail" {
            return Err(InferError::invalid("asked to fail").with_request_id(&request.id));
        }
        let inputs = request.inputs.into_iter();
        let outputs = inputs.map(|i| InferOutput { name: i.name.replace("INPUT", "OUTPUT"), tensor: i.tensor });
        Ok(InferResponse {
            model_name: request.model_name,
            model_version: "1".into(),
            id: request.id,
            parameters: request.parameters,
            outputs: outputs.collect(),
            timeline: request.timeline,
        })
    }
    /// The model `many` answers as often as its first input has elements, with the element as a byte; 255 is an error.
    pub fn stream(&self, request: InferRequest) -> Result<Responses, InferError> {
        if request.model_name != "many" {
            let engine = self.clone();
            return Ok(Responses::one(async move { engine.infer(request, Endpoint::GrpcInfer).await }));
        }
        let Some(input) = request.inputs.first() else { return Err(InferError::invalid("no input")) };
        let elements = input.tensor.data.clone().join();
        let answers = elements.as_chunks().0.iter().map(|&element| {
            let byte = f32::from_le_bytes(element) as u8;
            let data = bytes::Bytes::from(vec![byte]).into();
            let tensor = Tensor { datatype: DataType::Uint8, shape: vec![1], data };
            let answer = match byte {
                255 => Err(InferError::internal("asked to fail")),
                _ => Ok(InferResponse {
                    model_name: "many".into(),
                    model_version: "1".into(),
                    id: request.id.clone(),
                    outputs: vec![InferOutput { name: "OUT".into(), tensor }],
                    ..InferResponse::default()
                }),
            };
            Streamed { answer, last: false, empty: false }
        });
        let bare = InferResponse { model_name: "many".into(), id: request.id.clone(), ..InferResponse::default() };
        let last = Streamed { answer: Ok(bare), last: true, empty: true };
        Ok(Responses::fixed(answers.chain([last]).collect()))
    }
    pub fn statistics(&self, name: &str, _version: &str) -> Result<Vec<ModelStatistics>, InferError> {
        if !name.is_empty() {
            self.known(name)?;
        }
        Ok(vec![ModelStatistics { name: "echo".into(), version: "1".into(), ..Default::default() }])
    }
    pub async fn repository_index(&self, ready_only: bool) -> Result<Vec<IndexEntry>, InferError> {
        let ready =
            IndexEntry { name: "echo".into(), version: Some(1), state: Some(State::Ready), reason: String::new() };
        let never = IndexEntry { name: "never".into(), version: None, state: None, reason: String::new() };
        Ok(if ready_only { vec![ready] } else { vec![ready, never] })
    }
    /// Only `echo` can be loaded, and only with a configuration; what was given is in the error of others.
    pub async fn load_model(&self, name: &str, parameters: Vec<(String, bytes::Bytes)>) -> Result<(), InferError> {
        let given: Vec<String> = parameters.iter().map(|(name, value)| format!("{name}={}", value.len())).collect();
        if name == "echo" { Ok(()) } else { Err(InferError::internal(format!("{name} with {}", given.join(" ")))) }
    }
    pub async fn unload_model(&self, name: &str, dependents: bool) -> Result<(), InferError> {
        if name == "echo" { Ok(()) } else { Err(InferError::internal(format!("{name} {dependents}"))) }
    }
    pub fn metrics_text(&self, format: Format, names: &Names) -> String {
        if !names.is_all() {
            return String::new();
        }
        if format == Format::OpenMetrics { "# EOF\n".into() } else { "nv_x 1\n".into() }
    }
    /// Never samples; settings can be changed all the same.
    pub fn trace(&self, _: &str, _: impl Fn(&str) -> Option<String>) -> Option<Traced> {
        None
    }
    pub(crate) fn trace_settings(&self, model: &str) -> Result<Shown, InferError> {
        self.update_trace_settings(model, &Update::default())
    }
    pub(crate) fn update_trace_settings(&self, model: &str, update: &Update) -> Result<Shown, InferError> {
        if !model.is_empty() {
            self.known(model)?;
        }
        let tracing = Tracing { file: "f".into(), ..Tracing::default() };
        let mut traces = self.traces.lock().map_err(|_| InferError::internal("poisoned"))?;
        let settings = traces.get_or_insert_with(|| Settings::new(Mode::Triton, Values::default(), true));
        settings.update(model, update)?;
        Ok(shown(&settings.of(model), &tracing))
    }
    pub fn stream_open(&self, _: Protocol) -> OpenStream {
        OpenStream
    }
    pub fn record_answered(&self, protocol: Protocol, route: Route, code: u16, reason: Option<Reason>) {
        if let Ok(mut records) = self.records.lock() {
            records.push((protocol, route, code, reason));
        }
    }
    pub fn now(&self) -> Instant {
        crate::clock::now()
    }
}
