//! The gRPC form of inference requests and responses, as pure functions over messages (spec 2.5).

use std::collections::BTreeMap;

use bytes::Bytes;
use pharos::data::Data;
use pharos::error::InferError;
use pharos::infer::{
    CorrelationId, InferInput, InferRequest, InferResponse, Parameter, RequestedOutput,
};
use pharos::region::Slice;
use pharos::service::Service;
use pharos::tensor::{DataType, Tensor};

use super::contents::{self, Of};
use super::large_tensors::{Inputs, Outputs};
use super::proto::infer_parameter::ParameterChoice;
use super::proto::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use super::proto::model_infer_response::InferOutputTensor;
use super::proto::{InferParameter, ModelInferRequest, ModelInferResponse};
use pharos_listener::receiving::grpc::bounded::{BoundedCodec, InnerMessages};
use pharos_os::blocking;

/// The size of typed contents from which their conversion takes longer, up to 2 ns for a byte, than
/// the way to another thread.
const LONG_CONVERSION: usize = 64 << 10;

/// The codec of the service.
pub(super) type RequestCodec<T, U> = BoundedCodec<T, U, Tensors>;

/// The inputs and outputs of `ModelInferRequest`. Other requests have no fields with these numbers.
#[derive(Debug)]
pub(super) struct Tensors;

impl InnerMessages for Tensors {
    const NUMBERS: &'static [u32] = &[5, 6];
}

/// The response parameter that marks the last response.
pub(super) const FINAL_RESPONSE: &str = "triton_final_response";

/// Decodes a request without copying raw inputs. The caller sets the request's stamps.
///
/// # Errors
/// INVALID_ARG with the texts of spec 2.2 and 2.5.
pub fn decode(message: ModelInferRequest) -> Result<InferRequest, InferError> {
    decode_with_inputs(message, Inputs::default())
}

/// Like [`decode`], for a message some of whose inputs were received separately.
fn decode_with_inputs(
    message: ModelInferRequest,
    inputs: Inputs,
) -> Result<InferRequest, InferError> {
    let mut request = InferRequest {
        model_name: message.model_name,
        model_version: message.model_version,
        id: message.id,
        ..InferRequest::default()
    };
    for (key, parameter) in message.parameters {
        request_parameter(key, parameter.parameter_choice, &mut request)?;
    }
    let mut raw = inputs.merge(message.raw_input_contents).into_iter();
    let any_raw = raw.len() > 0;
    let model = &request.model_name;
    let inputs = message.inputs.into_iter().map(|tensor| input(tensor, model, any_raw, &mut raw));
    let inputs = inputs.collect::<Result<_, _>>()?;
    if raw.len() > 0 {
        return Err(InferError::invalid(format!(
            "unexpected additional input data for model '{model}'"
        )));
    }
    request.inputs = inputs;
    request.outputs = message.outputs.into_iter().map(output).collect::<Result<_, _>>()?;
    Ok(request)
}

/// Like [`decode`], but reports an unknown model before errors in the request, as Triton does.
/// Converts large typed contents on a thread that serves no sockets.
pub(super) async fn decode_for(
    message: ModelInferRequest,
    inputs: Inputs,
    service: &dyn Service,
) -> Result<Box<InferRequest>, InferError> {
    let model = message.model_name.clone();
    let version = message.model_version.clone();
    let typed = message
        .inputs
        .iter()
        .filter_map(|input| input.contents.as_ref())
        .map(Bytes::len)
        .sum::<usize>();
    let decoded = if typed <= LONG_CONVERSION {
        decode_with_inputs(message, inputs).map(Box::new)
    } else {
        let decoded =
            blocking::run(move || decode_with_inputs(message, inputs).map(Box::new)).await;
        decoded.unwrap_or_else(|error| {
            Err(InferError::internal(format!("decoding the request failed: {error}")))
        })
    };
    decoded.map_err(|error| service.model_metadata(&model, &version).err().unwrap_or(error))
}

fn wrong_type(key: &str, expected: &str) -> InferError {
    InferError::invalid(format!("invalid value type for '{key}' parameter, expected {expected}."))
}

fn request_parameter(
    key: String,
    choice: Option<ParameterChoice>,
    request: &mut InferRequest,
) -> Result<(), InferError> {
    match key.as_str() {
        "sequence_id" => {
            request.correlation_id = match choice {
                // As in Triton: some clients have no other way to send numbers from 2^63 on.
                Some(ParameterChoice::Int64Param(id)) => CorrelationId::Uint(id.cast_unsigned()),
                Some(ParameterChoice::Uint64Param(id)) => CorrelationId::Uint(id),
                Some(ParameterChoice::StringParam(id)) => CorrelationId::from_text(id)?,
                _ => return Err(wrong_type(&key, "int64_param or string_param")),
            }
        }
        "sequence_start" => request.sequence_start = flag(&key, choice)?,
        "sequence_end" => request.sequence_end = flag(&key, choice)?,
        "priority" => request.priority = whole(&key, choice, "int64_param or uint64_param")?,
        "timeout" => {
            request.timeout_us = match choice {
                // As in Triton: a negative number becomes one that is too large to expire.
                Some(ParameterChoice::Int64Param(timeout)) => timeout.cast_unsigned(),
                choice => whole(&key, choice, "int64_param")?,
            }
        }
        "triton_enable_empty_final_response" => request.empty_final_response = flag(&key, choice)?,
        reserved if reserved.starts_with("triton_") => {
            return Err(InferError::invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the \
                 following keys starting with 'triton_' are allowed: \
                 triton_enable_empty_final_response",
            ));
        }
        _ => {
            let parameter = match choice {
                Some(ParameterChoice::BoolParam(value)) => Parameter::Bool(value),
                Some(ParameterChoice::Int64Param(value)) => Parameter::Int(value),
                Some(ParameterChoice::Uint64Param(value)) => Parameter::Uint(value),
                Some(ParameterChoice::DoubleParam(value)) => Parameter::Double(value),
                Some(ParameterChoice::StringParam(value)) => Parameter::String(value),
                None => {
                    let expected =
                        "bool_param, int64_param, string_param, double_param or uint64_param";
                    return Err(wrong_type(&key, expected));
                }
            };
            request.parameters.push((key, parameter));
        }
    }
    Ok(())
}

fn flag(key: &str, choice: Option<ParameterChoice>) -> Result<bool, InferError> {
    match choice {
        Some(ParameterChoice::BoolParam(value)) => Ok(value),
        _ => Err(wrong_type(key, "bool_param")),
    }
}

fn whole(key: &str, choice: Option<ParameterChoice>, expected: &str) -> Result<u64, InferError> {
    match choice {
        Some(ParameterChoice::Uint64Param(value)) => Ok(value),
        Some(ParameterChoice::Int64Param(value)) => u64::try_from(value).map_err(|_| {
            InferError::invalid(format!(
                "invalid value {value} for '{key}' parameter, expected 0 or greater."
            ))
        }),
        _ => Err(wrong_type(key, expected)),
    }
}

fn input(
    tensor: InferInputTensor,
    model: &str,
    any_raw: bool,
    raw: &mut impl Iterator<Item = Data>,
) -> Result<InferInput, InferError> {
    let InferInputTensor { name, datatype, shape, parameters, contents } = tensor;
    let datatype =
        DataType::from_name(&datatype).ok_or_else(|| unknown_datatype(&name, &datatype))?;
    if let Some(slice) = slice(&name, &parameters)? {
        if contents.is_some() {
            return Err(InferError::invalid(format!(
                "unexpected 'content' provided when using shared memory for input tensor '{name}' \
                 for model '{model}'"
            )));
        }
        return Ok(InferInput { name, tensor: Tensor { datatype, shape, data: slice.into() } });
    }
    let typed = match &contents {
        Some(contents) => contents::bytes(contents, Of { input: &name, model, datatype })?,
        None => None,
    };
    let data = match (typed, any_raw) {
        (Some(_), true) => {
            return Err(InferError::invalid(format!(
                "contents field must not be specified when using raw_input_contents for '{name}' \
                 for model '{model}'"
            )));
        }
        (Some(typed), false) => typed.into(),
        (None, true) => raw.next().ok_or_else(|| no_data(&name, model))?,
        // A tensor without elements needs no data.
        (None, false) if shape.contains(&0) => Data::new(),
        (None, false) => return Err(no_data(&name, model)),
    };
    Ok(InferInput { name, tensor: Tensor { datatype, shape, data } })
}

fn no_data(input: &str, model: &str) -> InferError {
    InferError::invalid(format!(
        "unable to find data for input tensor '{input}' for model '{model}' in request."
    ))
}

fn unknown_datatype(input: &str, datatype: &str) -> InferError {
    let names: Vec<&str> = DataType::ALL.into_iter().map(DataType::name).collect();
    InferError::invalid(format!(
        "invalid datatype for input {input}: '{datatype}' is not one of {}",
        names.join(", ")
    ))
}

/// Returns the shared memory range in a tensor's parameters, if any. A negative number becomes one
/// that exceeds every region.
fn slice(
    tensor: &str,
    parameters: &BTreeMap<String, InferParameter>,
) -> Result<Option<Slice>, InferError> {
    const REGION: &str = "shared_memory_region";
    let of = format!("parameter for tensor '{tensor}'");
    let wrong = |key: &str, expected: &str| {
        InferError::invalid(format!("invalid value type for '{key}' {of}, expected {expected}."))
    };
    let number = |key: &str| match parameters.get(key).map(|parameter| &parameter.parameter_choice)
    {
        None => Ok(None),
        Some(Some(ParameterChoice::Int64Param(number))) => Ok(Some(number.cast_unsigned())),
        Some(_) => Err(wrong(key, "int64_param")),
    };
    let Some(region) = parameters.get(REGION) else {
        let alone = ["shared_memory_offset", "shared_memory_byte_size"].into_iter();
        return match alone.into_iter().find(|key| parameters.contains_key(*key)) {
            Some(key) => Err(InferError::invalid(format!(
                "'{key}' can not be specified without '{REGION}' {of}"
            ))),
            None => Ok(None),
        };
    };
    let Some(ParameterChoice::StringParam(region)) = &region.parameter_choice else {
        return Err(wrong(REGION, "string_param"));
    };
    let offset = number("shared_memory_offset")?.unwrap_or(0);
    let Some(len) = number("shared_memory_byte_size")? else {
        let text =
            format!("'shared_memory_byte_size' must be specified along with '{REGION}' {of}");
        return Err(InferError::invalid(text));
    };
    Ok(Some(Slice::new(region.clone(), offset, len)))
}

fn output(output: InferRequestedOutputTensor) -> Result<RequestedOutput, InferError> {
    let region = slice(&output.name, &output.parameters)?;
    if region.is_some() && output.parameters.contains_key("classification") {
        return Err(InferError::invalid(
            "output can't set both 'shared_memory_region' and 'classification'",
        ));
    }
    let classification = match output.parameters.get("classification") {
        None => 0,
        Some(InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(count)) })
            if *count > 0 =>
        {
            count.cast_unsigned()
        }
        Some(InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(count)) }) => {
            return Err(InferError::invalid(format!(
                "invalid value {count} for 'classification' parameter, expected 1 or greater."
            )));
        }
        Some(_) => return Err(wrong_type("classification", "int64_param")),
    };
    Ok(RequestedOutput { name: output.name, binary_data: None, classification, region })
}

/// Encodes a response, always with raw contents: one entry per output.
pub fn encode(response: InferResponse) -> ModelInferResponse {
    let (mut message, raw) = encode_apart(response);
    message.raw_output_contents = raw.into_iter().map(Data::join).collect();
    message
}

/// Like [`encode`]; large outputs are sent separately from the message if allowed.
pub(super) fn encode_for(
    response: InferResponse,
    allows_large_outputs: bool,
) -> tonic::Response<ModelInferResponse> {
    if !allows_large_outputs {
        return tonic::Response::new(encode(response));
    }
    let (mut message, raw) = encode_apart(response);
    match Outputs::of(raw) {
        Ok(outputs) => {
            let mut response = tonic::Response::new(message);
            response.extensions_mut().insert(outputs);
            response
        }
        Err(raw) => {
            message.raw_output_contents = raw.into_iter().map(Data::join).collect();
            tonic::Response::new(message)
        }
    }
}

fn encode_apart(response: InferResponse) -> (ModelInferResponse, Vec<Data>) {
    let mut raw = Vec::with_capacity(response.outputs.len());
    let mut message = ModelInferResponse {
        model_name: response.model_name,
        model_version: response.model_version,
        id: response.id,
        parameters: response
            .parameters
            .into_iter()
            .map(|(key, value)| (key, parameter(value)))
            .collect(),
        outputs: Vec::with_capacity(response.outputs.len()),
        raw_output_contents: Vec::new(),
    };
    for output in response.outputs {
        message.outputs.push(InferOutputTensor {
            name: output.name,
            datatype: output.tensor.datatype.name().to_owned(),
            shape: output.tensor.shape,
            ..InferOutputTensor::default()
        });
        raw.push(output.tensor.data);
    }
    (message, raw)
}

/// Converts a parameter to a message.
pub(super) fn parameter(value: Parameter) -> InferParameter {
    let choice = match value {
        Parameter::Bool(value) => ParameterChoice::BoolParam(value),
        Parameter::Int(value) => ParameterChoice::Int64Param(value),
        Parameter::Uint(value) => ParameterChoice::Uint64Param(value),
        Parameter::Double(value) => ParameterChoice::DoubleParam(value),
        Parameter::String(value) => ParameterChoice::StringParam(value),
    };
    InferParameter { parameter_choice: Some(choice) }
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
