//! The request and response types that all protocols and ensembles use.

use crate::data::Data;
pub use crate::id::CorrelationId;
use crate::id::{TenantId, TraceId};
use crate::region::Slice;
use crate::request_trace::Traced;
use crate::tensor::Tensor;
pub use crate::timeline::is_late;
use crate::timeline::{Instant, Timeline};

/// The value of a request's or response's parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Parameter {
    /// A Boolean.
    Bool(bool),
    /// A signed integer.
    Int(i64),
    /// An unsigned integer that does not fit [`Parameter::Int`].
    Uint(u64),
    /// A double.
    Double(f64),
    /// Text.
    String(String),
}

/// Named parameters in the order given.
pub type Parameters = Vec<(String, Parameter)>;

/// One input of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct InferInput {
    /// The input's name in the model's configuration.
    pub name: String,
    /// Its tensor; the data may be in the client's shared memory ([`Data::region`]).
    pub tensor: Tensor,
}

/// One output that the client requests.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct RequestedOutput {
    /// The output's name in the model's configuration.
    pub name: String,
    /// Whether to send it as binary data (HTTP only); `None` for the request's default.
    pub binary_data: Option<bool>,
    /// The number of classes to return instead of the tensor; 0 for the tensor.
    pub classification: u64,
    /// The range of the client's shared memory into which it is written instead of being sent.
    pub region: Option<Slice>,
}

/// An inference request, independent of the protocol.
#[derive(Clone, Debug, Default)]
pub struct InferRequest {
    /// The model's name.
    pub model_name: String,
    /// The version as the client wrote it; empty if the server chooses.
    pub model_version: String,
    /// The client's id; may be empty.
    pub id: String,
    /// The inputs: in the client's order until the model's check, then in the order of the
    /// configuration.
    pub inputs: Vec<InferInput>,
    /// The client's order of the inputs, as positions in the configuration, if the model's check
    /// has sorted them; otherwise empty.
    pub input_order: Vec<u16>,
    /// The body of a raw binary request (`Inference-Header-Content-Length: 0`), whose only input
    /// the model's configuration describes. `inputs` is empty until the model's check has derived
    /// it.
    pub raw_body: Option<Data>,
    /// The requested outputs; empty means all.
    pub outputs: Vec<RequestedOutput>,
    /// Free parameters for the backend. Parameters with a defined meaning are the fields below.
    pub parameters: Parameters,
    /// `priority`; 0 means the model's default.
    pub priority: u64,
    /// `timeout` in microseconds; 0 means none.
    pub timeout_us: u64,
    /// `sequence_id`.
    pub correlation_id: CorrelationId,
    /// `sequence_start`.
    pub sequence_start: bool,
    /// `sequence_end`.
    pub sequence_end: bool,
    /// The tenant that the request belongs to.
    pub tenant: TenantId,
    /// The trace of the client, which its `traceparent` names.
    pub trace: Option<TraceId>,
    /// Collects the stamps of the request if it is sampled for tracing.
    pub traced: Option<Traced>,
    /// Whether the client requests a final response without outputs if the last response of a
    /// decoupled model was not marked as the last (`triton_enable_empty_final_response`).
    pub empty_final_response: bool,
    /// From when on a client that leaves does so at its deadline (`grpc-timeout`): earlier than
    /// the deadline itself by the time that the call may have taken to arrive.
    pub leaves_at: Option<Instant>,
    /// The stamps so far.
    pub timeline: Timeline,
}

impl InferRequest {
    /// Returns whether an input or an output is in the client's shared memory.
    pub fn uses_regions(&self) -> bool {
        let inputs = self.inputs.iter().any(|input| input.tensor.data.region().is_some());
        inputs || self.outputs.iter().any(|output| output.region.is_some())
    }

    /// Returns whether the response cache may answer the request and store its response. A client's
    /// shared memory may change between the look-up and the execution, and the response to a step
    /// of a sequence depends on the steps before it. The key has neither of the flags of sequences,
    /// which models without sequences can see too.
    pub fn is_cacheable(&self) -> bool {
        let is_step = !self.correlation_id.is_none() || self.sequence_start || self.sequence_end;
        !is_step && !self.uses_regions()
    }
}

/// One output of a response. Its `tensor.data` may point into a worker's arena, or be the range of
/// the client's shared memory into which the worker has written it.
#[derive(Clone, Debug, PartialEq)]
pub struct InferOutput {
    /// The output's name.
    pub name: String,
    /// Its tensor.
    pub tensor: Tensor,
}

impl InferOutput {
    /// Returns the name and the tensor.
    pub fn named(&self) -> (&str, &Tensor) {
        (&self.name, &self.tensor)
    }
}

/// An inference response, independent of the protocol.
#[derive(Clone, Debug, Default)]
pub struct InferResponse {
    /// The model's name.
    pub model_name: String,
    /// The version that answered, as text.
    pub model_version: String,
    /// The id of the request.
    pub id: String,
    /// Parameters of the response.
    pub parameters: Parameters,
    /// The requested outputs, in the order of the configuration.
    pub outputs: Vec<InferOutput>,
    /// The stamps of the request.
    pub timeline: Timeline,
}

impl InferResponse {
    /// Returns the number of bytes of all tensors.
    pub fn byte_size(&self) -> u64 {
        byte_size(&self.outputs)
    }
}

/// Returns the number of bytes of the outputs' tensors, those in the client's shared memory
/// included.
pub fn byte_size(outputs: &[InferOutput]) -> u64 {
    outputs.iter().map(|output| output.tensor.data.len() as u64).sum()
}
