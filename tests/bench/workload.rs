//! The requests to the servers and the expected responses: the same bytes for every server.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use crate::messages::{
    ModelInferRequest, ModelInferResponse, Parameter, RequestedOutput, TensorHead,
};

/// Size of the large tensor, bytes.
const MIB: usize = 1 << 20;

/// The header that names the tenant of a request. All servers receive it; `pharos-observed` counts
/// by it.
pub(crate) const TENANT_HEADER: &str = "x-tenant";
/// The tenant of all requests.
pub(crate) const TENANT: &str = "bench";

/// The path of the measured gRPC method.
pub(crate) const GRPC_PATH: &str = "/inference.GRPCInferenceService/ModelInfer";

/// The model with a TorchServe handler.
pub(crate) const HANDLER: &str = "handler";

/// The model of a compiled backend.
pub(crate) const COMPILED: &str = "compiled";

/// The number of sequences that are open at once.
pub(crate) const OPEN_SEQUENCES: u64 = 10_000;

/// A step of a sequence, or a request to one of several models.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Sequence { id: u64, start: bool },
    Model(u64),
}

/// A model and a request to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Workload {
    /// Two INT32 [1, 16] in, their sum and difference out: the cost of a request.
    Simple,
    /// 1 MiB of UINT8 in, the same out: the cost of a byte.
    Identity,
    /// The same as `Simple`, each request a step of one of [`OPEN_SEQUENCES`] in turn: the cost of
    /// a sequence.
    Sequences,
    /// FP32 in, the same out, by a Python model: the cost of a request and a byte there.
    Python(Rows),
    /// Some bytes in, the same out, by a TorchServe handler without torch: the cost of a request
    /// there.
    Handler,
    /// This many bytes of UINT8 in, the same out, by a compiled backend: the cost of its interface.
    Compiled(usize),
    /// UINT8 in, the same out, by several models in turn: how the cost grows. The models are those
    /// of `tests/bench_growth`.
    Growth(Growth),
}

/// The size of requests, and the number of models that they go to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Growth {
    pub(crate) bytes: usize,
    pub(crate) models: u64,
}

/// The size of a request to the Python model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rows {
    /// Bytes per row.
    bytes: usize,
    /// The batch size of the request.
    count: usize,
}

/// A tensor of a request or of a response.
pub(crate) struct Tensor {
    name: &'static str,
    datatype: &'static str,
    shape: Vec<i64>,
    data: Bytes,
}

impl Workload {
    /// All workloads.
    pub(crate) const ALL: [Self; 12] = [
        Self::Simple,
        Self::Identity,
        Self::Sequences,
        Self::python(64, 1),
        Self::python(64, 8),
        Self::python(64 << 10, 1),
        Self::python(64 << 10, 8),
        Self::python(16 * MIB, 1),
        Self::python(16 * MIB, 8),
        Self::Handler,
        Self::Compiled(64),
        Self::Compiled(MIB),
    ];

    const fn python(bytes: usize, count: usize) -> Self {
        Self::Python(Rows { bytes, count })
    }

    /// Returns the name of the model.
    pub(crate) fn model(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::Identity => "identity_1mib",
            Self::Sequences => "sequences_10000",
            Self::Python(_) => "python_identity",
            Self::Handler => HANDLER,
            Self::Compiled(_) => COMPILED,
            Self::Growth(_) => "growth",
        }
    }

    /// Returns the name of the model that a step is sent to. The names of several models have the
    /// same length, as all answers must have.
    fn model_of(self, step: Option<Step>) -> String {
        match step {
            Some(Step::Model(number)) => format!("m{number:03}"),
            _ => self.model().to_owned(),
        }
    }

    /// Returns the name in the report: the name of the model. The Python model's name ends with the row
    /// size and the batch size, the compiled model's with the size.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Python(Rows { bytes, count }) => {
                format!("python_{}_batch_{count}", short_size(bytes))
            }
            Self::Compiled(bytes) => format!("{COMPILED}_{}", short_size(bytes)),
            _ => self.model().to_owned(),
        }
    }

    /// Returns whether the payload matters more than the number of requests.
    pub(crate) fn is_large(self) -> bool {
        self.payload() >= 64 << 10
    }

    /// Returns the tensor bytes of one request in each direction.
    pub(crate) fn payload(self) -> usize {
        match self {
            Self::Python(Rows { bytes, count }) => bytes * count,
            Self::Growth(Growth { bytes, .. }) => bytes,
            _ => self.inputs().iter().map(|tensor| tensor.data.len()).sum(),
        }
    }

    fn inputs(self) -> Vec<Tensor> {
        match self {
            Self::Simple | Self::Sequences => {
                vec![int32("INPUT0", &left()), int32("INPUT1", &right())]
            }
            Self::Identity => vec![uint8("INPUT0", MIB)],
            Self::Python(rows) => vec![fp32("INPUT0", rows)],
            Self::Handler => vec![octets()],
            Self::Compiled(bytes) | Self::Growth(Growth { bytes, .. }) => {
                vec![uint8("INPUT0", bytes)]
            }
        }
    }

    fn outputs(self) -> Vec<Tensor> {
        let combine = |operation: fn(i32, i32) -> i32| -> Vec<i32> {
            left().iter().zip(right()).map(|(left, right)| operation(*left, right)).collect()
        };
        match self {
            Self::Simple | Self::Sequences => {
                let (sum, difference) = (combine(i32::wrapping_add), combine(i32::wrapping_sub));
                vec![int32("OUTPUT0", &sum), int32("OUTPUT1", &difference)]
            }
            Self::Identity => vec![uint8("OUTPUT0", MIB)],
            Self::Python(rows) => vec![fp32("OUTPUT0", rows)],
            Self::Handler => vec![octets()],
            Self::Compiled(bytes) | Self::Growth(Growth { bytes, .. }) => {
                vec![uint8("OUTPUT0", bytes)]
            }
        }
    }

    /// Returns the expected tensors of the response.
    pub(crate) fn answer(self) -> Vec<Bytes> {
        self.outputs().into_iter().map(|tensor| tensor.data).collect()
    }

    /// Returns the steps of client number `client` of `clients`: the first ones start its
    /// sequences, the others continue them.
    pub(crate) fn steps(
        self,
        client: usize,
        clients: usize,
    ) -> (Vec<Option<Step>>, Vec<Option<Step>>) {
        if let Self::Growth(Growth { models, .. }) = self {
            let turns = (0..models).map(|turn| Some(Step::Model((turn + client as u64) % models)));
            return (Vec::new(), turns.collect());
        }
        if self != Self::Sequences {
            return (Vec::new(), vec![None]);
        }
        let own = (1..=OPEN_SEQUENCES).filter(|id| *id as usize % clients == client);
        let steps =
            |start: bool| own.clone().map(|id| Some(Step::Sequence { id, start })).collect();
        (steps(true), steps(false))
    }

    /// Returns a whole HTTP/1.1 request with binary tensor data in and out, or one to TorchServe's
    /// endpoint.
    pub(crate) fn http_request(self, step: Option<Step>) -> Bytes {
        if self == Self::Handler {
            return prediction(&octets().data);
        }
        let inputs = self.inputs();
        let wanted: Vec<_> = self.outputs().iter().map(|output| wanted_json(output.name)).collect();
        let parameters = match step {
            Some(Step::Sequence { id, start }) => {
                format!(r#""parameters":{{"sequence_id":{id},"sequence_start":{start}}},"#)
            }
            _ => String::new(),
        };
        let json = format!(
            r#"{{{parameters}"inputs":[{}],"outputs":[{}]}}"#,
            tensors_json(&inputs),
            wanted.join(",")
        );
        let mut request = BytesMut::new();
        let head = format!(
            "POST /v2/models/{}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: \
             application/octet-stream\r\n{TENANT_HEADER}: \
             {TENANT}\r\nInference-Header-Content-Length: {}\r\nContent-Length: {}\r\n\r\n",
            self.model_of(step),
            json.len(),
            json.len() + self.payload()
        );
        request.put(head.as_bytes());
        request.put(json.as_bytes());
        inputs.iter().for_each(|tensor| request.put(&*tensor.data));
        request.freeze()
    }

    /// Returns the JSON head of the response that the protocol defines.
    pub(crate) fn http_response_head(self) -> String {
        let outputs = tensors_json(&self.outputs());
        format!(r#"{{"model_name":"{}","model_version":"1","outputs":[{outputs}]}}"#, self.model())
    }

    /// Returns the length of the body of the HTTP response.
    pub(crate) fn http_response_length(self) -> usize {
        self.http_response_head().len() + self.payload()
    }

    /// Returns the gRPC request message with its five-byte prefix.
    pub(crate) fn grpc_request(self, step: Option<Step>) -> Bytes {
        let inputs = self.inputs();
        let wanted = |output: &Tensor| RequestedOutput { name: output.name.to_owned() };
        framed(&ModelInferRequest {
            model_name: self.model_of(step),
            parameters: match step {
                Some(Step::Sequence { id, start }) => {
                    let id = Parameter { int64: Some(id as i64), boolean: None };
                    let start = Parameter { boolean: Some(start), int64: None };
                    [("sequence_id".to_owned(), id), ("sequence_start".to_owned(), start)].into()
                }
                _ => Default::default(),
            },
            inputs: inputs.iter().map(head).collect(),
            outputs: self.outputs().iter().map(wanted).collect(),
            raw_input_contents: inputs.into_iter().map(|tensor| tensor.data).collect(),
        })
    }

    /// Returns the gRPC response with the given contents.
    pub(crate) fn grpc_response(self, contents: Vec<Bytes>) -> ModelInferResponse {
        ModelInferResponse {
            model_name: self.model().to_owned(),
            model_version: "1".to_owned(),
            outputs: self.outputs().iter().map(head).collect(),
            raw_output_contents: contents,
        }
    }
}

fn short_size(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= MIB => format!("{}mib", bytes / MIB),
        bytes if bytes >= 1 << 10 => format!("{}kib", bytes >> 10),
        bytes => format!("{bytes}b"),
    }
}

fn left() -> Vec<i32> {
    (0..16).collect()
}

fn right() -> Vec<i32> {
    vec![1; 16]
}

fn int32(name: &'static str, values: &[i32]) -> Tensor {
    let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor { name, datatype: "INT32", shape: vec![1, 16], data }
}

fn uint8(name: &'static str, bytes: usize) -> Tensor {
    Tensor { name, datatype: "UINT8", shape: vec![bytes as i64], data: pattern(bytes) }
}

fn fp32(name: &'static str, Rows { bytes, count }: Rows) -> Tensor {
    let elements = (bytes / size_of::<f32>()) as i64;
    Tensor {
        name,
        datatype: "FP32",
        shape: vec![count as i64, elements],
        data: pattern(bytes * count),
    }
}

/// Returns the input of the handler: bytes without shape and type, which are also the whole
/// response.
fn octets() -> Tensor {
    Tensor { name: "body", datatype: "BYTES", shape: vec![1], data: pattern(64) }
}

/// Returns a request to TorchServe's endpoint.
fn prediction(body: &[u8]) -> Bytes {
    let length = body.len();
    let mut request = BytesMut::new();
    request.put(format!("POST /predictions/{HANDLER} HTTP/1.1\r\nHost: 127.0.0.1\r\n").as_bytes());
    request.put(
        format!("Content-Type: application/octet-stream\r\nContent-Length: {length}\r\n\r\n")
            .as_bytes(),
    );
    request.put(body);
    request.freeze()
}

/// Returns bytes with a prime period, so that a misplaced block is detected and no two pages are
/// equal.
fn pattern(length: usize) -> Bytes {
    (0..length).map(|position| (position % 251) as u8).collect()
}

fn head(tensor: &Tensor) -> TensorHead {
    TensorHead {
        name: tensor.name.to_owned(),
        datatype: tensor.datatype.to_owned(),
        shape: tensor.shape.clone(),
    }
}

fn tensors_json(tensors: &[Tensor]) -> String {
    let one = |tensor: &Tensor| {
        let shape: Vec<_> = tensor.shape.iter().map(i64::to_string).collect();
        format!(
            r#"{{"name":"{}","datatype":"{}","shape":[{}],"parameters":{{"binary_data_size":{}}}}}"#,
            tensor.name,
            tensor.datatype,
            shape.join(","),
            tensor.data.len()
        )
    };
    tensors.iter().map(one).collect::<Vec<_>>().join(",")
}

fn wanted_json(name: &str) -> String {
    format!(r#"{{"name":"{name}","parameters":{{"binary_data":true}}}}"#)
}

/// Encodes a message with gRPC's prefix: not compressed, length in big-endian.
fn framed(message: &impl Message) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(message.encoded_len() as u32);
    bytes.put(message.encode_to_vec().as_slice());
    bytes.freeze()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_http_request_has_correct_lengths() {
        for workload in Workload::ALL.into_iter().filter(|workload| *workload != Workload::Handler)
        {
            let request = workload.http_request(None);
            let end = request.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
            let head = std::str::from_utf8(&request[..end]).unwrap();
            let number = |name: &str| -> usize {
                let line = head.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                line.trim().parse().unwrap()
            };
            assert_eq!(number("Content-Length:"), request.len() - end);
            let json = number("Inference-Header-Content-Length:");
            assert_eq!(json + workload.payload(), request.len() - end);
            assert_eq!((request[end], request[end + json - 1]), (b'{', b'}'));
            assert!(head.contains("\r\nx-tenant: bench\r\n"), "{head}");
        }
    }

    #[test]
    fn the_handler_request_contains_the_expected_response() {
        let request = Workload::Handler.http_request(None);
        let text = String::from_utf8_lossy(&request[..request.len() - Workload::Handler.payload()])
            .into_owned();
        assert!(text.starts_with("POST /predictions/handler HTTP/1.1\r\n"), "{text}");
        assert!(text.ends_with("Content-Length: 64\r\n\r\n"), "{text}");
        assert!(request.ends_with(&Workload::Handler.answer()[0]));
    }

    #[test]
    fn the_grpc_message_round_trips() {
        let framed = Workload::Simple.grpc_request(None);
        assert_eq!(framed[..5], [0, 0, 0, 0, (framed.len() - 5) as u8]);
        let message = ModelInferRequest::decode(framed.slice(5..)).unwrap();
        assert_eq!(message.inputs[1].shape, [1, 16]);
        assert_eq!(message.raw_input_contents[0].len(), 64);
        // Field 7, wire type 2 (length-delimited), as every KServe client sends raw contents.
        assert!(framed.windows(2).any(|window| window == [7 << 3 | 2, 64]));
    }

    #[test]
    fn the_simple_response_is_sum_and_difference() {
        let answer = Workload::Simple.answer();
        assert_eq!((answer[0][4], answer[1][4], answer[1][0]), (2, 0, 255));
        assert_eq!(Workload::Identity.answer()[0].len(), MIB);
    }
}
