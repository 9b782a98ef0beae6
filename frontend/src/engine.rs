//! A stand-in for the engine, for the unit tests of the protocol edges only.

use std::sync::{Arc, Mutex};

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{InferOutput, InferRequest, InferResponse};
use pharos::timeline::Instant;

/// Which protocol a request came over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// HTTP/REST.
    Http,
    /// gRPC.
    Grpc,
}

/// What a request asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Route {
    ServerLive,
    ServerReady,
    ServerMetadata,
    ModelReady,
    ModelMetadata,
    ModelConfig,
    ModelInfer,
    ModelStreamInfer,
    Generate,
    GenerateStream,
    Statistics,
    RepositoryIndex,
    RepositoryLoad,
    RepositoryUnload,
    SystemSharedMemory,
    CudaSharedMemory,
    Trace,
    Logging,
    Health,
    Reflection,
    Unknown,
}

/// What `ModelMetadata` answers.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct ModelMetadata {
    pub name: String,
    pub versions: Vec<String>,
    pub platform: String,
    pub inputs: Vec<TensorMetadata>,
    pub outputs: Vec<TensorMetadata>,
}

/// One tensor of it.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct TensorMetadata {
    pub name: String,
    pub datatype: &'static str,
    pub shape: Vec<i64>,
}

/// One entry of the repository index.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct IndexEntry {
    pub name: String,
    pub version: Option<String>,
    pub state: Option<&'static str>,
    pub reason: Option<String>,
}

/// A count and a sum.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
#[allow(missing_docs)]
pub struct StatisticDuration {
    pub count: u64,
    pub ns: u64,
}

/// Sums of one model version.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
#[allow(missing_docs)]
pub struct InferStatistics {
    pub success: StatisticDuration,
    pub fail: StatisticDuration,
    pub queue: StatisticDuration,
    pub compute_input: StatisticDuration,
    pub compute_infer: StatisticDuration,
    pub compute_output: StatisticDuration,
    pub cache_hit: StatisticDuration,
    pub cache_miss: StatisticDuration,
}

/// Sums of one response index.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
#[allow(missing_docs)]
pub struct ResponseStatistics {
    pub compute_infer: StatisticDuration,
    pub compute_output: StatisticDuration,
    pub success: StatisticDuration,
    pub fail: StatisticDuration,
    pub empty_response: StatisticDuration,
    pub cancel: StatisticDuration,
}

/// Sums of one batch size.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
#[allow(missing_docs)]
pub struct BatchStatistics {
    pub batch_size: u64,
    pub compute_input: StatisticDuration,
    pub compute_infer: StatisticDuration,
    pub compute_output: StatisticDuration,
}

/// Memory of one kind.
#[derive(Clone, Debug, Default, serde::Serialize)]
#[allow(missing_docs)]
pub struct MemoryUsage {
    #[serde(rename = "type")]
    pub kind: String,
    pub id: i64,
    pub byte_size: u64,
}

/// The statistics of one model version.
#[derive(Clone, Debug, Default, serde::Serialize)]
#[allow(missing_docs)]
pub struct ModelStatistics {
    pub name: String,
    pub version: String,
    pub last_inference: u64,
    pub inference_count: u64,
    pub execution_count: u64,
    pub inference_stats: InferStatistics,
    pub response_stats: std::collections::BTreeMap<String, ResponseStatistics>,
    pub batch_stats: Vec<BatchStatistics>,
    pub memory_usage: Vec<MemoryUsage>,
}

/// One recorded answer.
pub type Record = (Protocol, Route, u16, Option<Reason>);

/// Echoes: every input comes back as an output whose name has INPUT replaced by OUTPUT.
#[derive(Clone, Default)]
pub struct Engine {
    records: Arc<Mutex<Vec<Record>>>,
}

impl Engine {
    /// Every answer recorded so far.
    pub fn records(&self) -> Vec<Record> {
        self.records.lock().map(|records| records.clone()).unwrap_or_default()
    }
    /// Whether the process is alive.
    pub fn live(&self) -> bool {
        true
    }
    /// Whether every model is ready.
    pub fn ready(&self) -> bool {
        true
    }
    /// Whether the server is stopping.
    pub fn exiting(&self) -> bool {
        false
    }
    /// `--id`.
    pub fn server_name(&self) -> &str {
        "triton"
    }
    fn known(&self, name: &str) -> Result<(), InferError> {
        if matches!(name, "echo" | "slow") {
            return Ok(());
        }
        let message = format!("Request for unknown model: '{name}' is not found");
        Err(InferError::new(ErrorCode::InvalidArg, Reason::UnknownModel, message))
    }
    /// Whether a model version is ready.
    pub fn model_ready(&self, name: &str, _version: &str) -> Result<bool, InferError> {
        self.known(name).map(|()| true)
    }
    /// Metadata.
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
    /// Configuration as JSON.
    pub fn model_config_json(&self, name: &str, _version: &str) -> Result<String, InferError> {
        self.known(name).map(|()| format!("{{\"name\":\"{name}\"}}"))
    }
    /// Configuration as protobuf: field 1 is the name.
    pub fn model_config_proto(&self, name: &str, _version: &str) -> Result<Vec<u8>, InferError> {
        self.known(name)?;
        let mut bytes = vec![0x0a, name.len() as u8];
        bytes.extend_from_slice(name.as_bytes());
        Ok(bytes)
    }
    /// Echo. The model `slow` never answers.
    pub async fn infer(&self, request: InferRequest) -> Result<InferResponse, InferError> {
        self.known(&request.model_name)?;
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
    /// Statistics.
    pub fn statistics(&self, name: &str, _version: &str) -> Result<Vec<ModelStatistics>, InferError> {
        if !name.is_empty() {
            self.known(name)?;
        }
        Ok(vec![ModelStatistics { name: "echo".into(), version: "1".into(), ..Default::default() }])
    }
    /// The repository index.
    pub fn repository_index(&self, ready_only: bool) -> Vec<IndexEntry> {
        let ready = IndexEntry { name: "echo".into(), version: Some("1".into()), state: Some("READY"), reason: None };
        let never = IndexEntry { name: "never".into(), version: None, state: None, reason: None };
        if ready_only { vec![ready] } else { vec![ready, never] }
    }
    /// `/metrics`.
    pub fn metrics_text(&self, openmetrics: bool) -> String {
        if openmetrics { "# EOF\n".into() } else { "nv_x 1\n".into() }
    }
    /// Counts an answer.
    pub fn record_answered(&self, protocol: Protocol, route: Route, code: u16, reason: Option<Reason>) {
        if let Ok(mut records) = self.records.lock() {
            records.push((protocol, route, code, reason));
        }
    }
    /// The time.
    pub fn now(&self) -> Instant {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Instant(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    }
}
