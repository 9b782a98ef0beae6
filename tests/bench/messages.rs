//! The two messages of `ModelInfer`, with only the fields that the benchmark uses.
//!
//! Written by hand, so that the benchmark does not depend on the measured code. Field numbers:
//! `proto/grpc_service.proto`.

use std::collections::HashMap;

use bytes::Bytes;

/// `inference.ModelInferRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ModelInferRequest {
    #[prost(string, tag = "1")]
    pub(crate) model_name: String,
    #[prost(map = "string, message", tag = "4")]
    pub(crate) parameters: HashMap<String, Parameter>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) inputs: Vec<TensorHead>,
    #[prost(message, repeated, tag = "6")]
    pub(crate) outputs: Vec<RequestedOutput>,
    #[prost(bytes = "bytes", repeated, tag = "7")]
    pub(crate) raw_input_contents: Vec<Bytes>,
}

/// `inference.InferParameter`; one of its fields is set.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Parameter {
    #[prost(bool, optional, tag = "1")]
    pub(crate) boolean: Option<bool>,
    #[prost(int64, optional, tag = "2")]
    pub(crate) int64: Option<i64>,
}

/// `inference.ModelInferResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ModelInferResponse {
    #[prost(string, tag = "1")]
    pub(crate) model_name: String,
    #[prost(string, tag = "2")]
    pub(crate) model_version: String,
    #[prost(message, repeated, tag = "5")]
    pub(crate) outputs: Vec<TensorHead>,
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub(crate) raw_output_contents: Vec<Bytes>,
}

/// `InferInputTensor` and `InferOutputTensor`, which agree in these fields.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TensorHead {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) datatype: String,
    #[prost(int64, repeated, tag = "3")]
    pub(crate) shape: Vec<i64>,
}

/// `InferRequestedOutputTensor`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RequestedOutput {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
}
