//! The HTTP form of inference requests and responses, as pure functions over bytes (spec 2.3, 2.4).
//!
//! Nothing here does I/O or panics, whatever the bytes. Binary inputs are slices of the body, never copies; binary outputs
//! leave as the tensors' own bytes.

use bytes::Bytes;
use pharos::data::Data;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{InferRequest, InferResponse};

/// The header that says how many bytes of a body are JSON.
pub const HEADER_LENGTH: &str = "inference-header-content-length";

/// What a request says outside its body.
#[derive(Clone, Debug, Default)]
pub struct Head {
    /// The model's name, from the path.
    pub model_name: String,
    /// The version, from the path; empty if the server chooses.
    pub model_version: String,
    /// The value of `Inference-Header-Content-Length`, if given.
    pub header_length: Option<String>,
}

/// How the client wants the outputs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerForm {
    /// Whether outputs go as binary data unless they say otherwise (`binary_data_output`).
    pub binary: bool,
    /// The outputs that say otherwise.
    pub exceptions: Vec<String>,
}

impl AnswerForm {
    fn is_binary(&self, output: &str) -> bool {
        self.binary != self.exceptions.iter().any(|name| name == output)
    }
}

/// A response ready to be sent: `head`, then `blobs`.
#[derive(Clone, Debug, Default)]
pub struct Encoded {
    /// The JSON.
    pub head: Bytes,
    /// The binary outputs that have bytes, in the order of the outputs.
    pub blobs: Vec<Bytes>,
}

impl Encoded {
    /// Whether binary data follows the JSON: then the header and the content type must say so.
    pub fn is_binary(&self) -> bool {
        !self.blobs.is_empty()
    }
}

/// How many bytes of a body of `body` bytes are JSON; 0 means a raw binary request.
///
/// # Errors
/// INVALID_ARG when the header is no number or is out of range.
pub fn json_length(header: Option<&str>, body: usize) -> Result<usize, InferError> {
    let Some(header) = header else { return Ok(body) };
    let length: i64 = header.trim().parse().map_err(|_| {
        InferError::malformed(format!("Unable to parse Inference-Header-Content-Length, got: {header}"))
    })?;
    usize::try_from(length).ok().filter(|&length| length <= body).ok_or_else(|| {
        InferError::malformed(format!("inference header size should be in range (0, {body}), got: {header}"))
    })
}

/// Checks the two parts of a body against `--http-max-input-size`, which bounds each of them.
///
/// # Errors
/// INVALID_ARG naming the size and the limit.
pub fn check_size(json: u64, binary: u64, limit: u64) -> Result<(), InferError> {
    let message = if json > limit {
        format!("request JSON size of {json} bytes exceeds the maximum allowed input size of {limit} bytes.")
    } else if binary > limit {
        format!("binary input size of {binary} bytes exceeds the maximum allowed value of {limit} bytes.")
    } else {
        return Ok(());
    };
    let message = format!("{message} Use --http-max-input-size to increase the limit.");
    Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, message))
}

/// Decodes a whole, decompressed body; binary inputs are its pieces. The request's stamps are the caller's to set.
///
/// # Errors
/// Every row of spec 2.3, with its code.
pub fn decode(head: Head, body: impl Into<Data>, limit: u64) -> Result<(InferRequest, AnswerForm), InferError> {
    let mut body = body.into();
    let json_length = json_length(head.header_length.as_deref(), body.len())?;
    check_size(json_length as u64, (body.len() - json_length) as u64, limit)?;
    let mut request =
        InferRequest { model_name: head.model_name, model_version: head.model_version, ..InferRequest::default() };
    if json_length == 0 {
        request.raw_body = Some(body);
        return Ok((request, AnswerForm { binary: true, exceptions: Vec::new() }));
    }
    let json = body.split_to(json_length).join();
    let binary = super::parse::parse(&json, body, &mut request)?;
    let exceptions = request.outputs.iter().filter(|output| output.binary_data.is_some_and(|wish| wish != binary));
    let exceptions = exceptions.map(|output| output.name.clone()).collect();
    Ok((request, AnswerForm { binary, exceptions }))
}

/// Encodes a response.
///
/// # Errors
/// INVALID_ARG when an output has no JSON form, INTERNAL when its bytes do not fit its shape.
pub fn encode(response: InferResponse, form: &AnswerForm) -> Result<Encoded, InferError> {
    let mut head = Vec::with_capacity(256);
    super::render::render(&response, |output| form.is_binary(output), &mut head)?;
    let outputs = response.outputs.into_iter();
    let blobs = outputs.filter(|output| form.is_binary(&output.name) && output.tensor.data.bytes_here() > 0);
    Ok(Encoded { head: head.into(), blobs: blobs.map(|output| output.tensor.data.join()).collect() })
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
