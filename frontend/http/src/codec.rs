//! The HTTP form of inference requests and responses, as pure functions over bytes (spec 2.3, 2.4).
//!
//! This module does no I/O and does not panic on any input. Binary inputs are slices of the body,
//! not copies; binary outputs share the tensors' memory.

use bytes::Bytes;
use http::HeaderName;
use pharos::data::Data;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{InferOutput, InferRequest, InferResponse};

/// The header with the length of the JSON part of a body.
pub const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// The size in bytes that is reserved for the JSON of a response.
const HEAD_SIZE: usize = 256;

/// Outputs of at most this many bytes in total are copied behind the JSON instead of being sent as
/// separate pieces.
pub(super) const SMALL: usize = 16 << 10;

/// The parts of a request that are outside its body.
#[derive(Clone, Debug, Default)]
pub struct Head {
    /// The model's name, from the path.
    pub model_name: String,
    /// The version, from the path; empty if the server selects it.
    pub model_version: String,
    /// The value of `Inference-Header-Content-Length`, if given.
    pub header_length: Option<String>,
}

/// The output format that the client requested.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerForm {
    /// Whether outputs without an individual setting are sent as binary data
    /// (`binary_data_output`).
    pub binary: bool,
    /// The outputs whose individual setting differs from `binary`.
    pub exceptions: Vec<String>,
}

impl AnswerForm {
    fn is_binary(&self, output: &str) -> bool {
        self.binary != self.exceptions.iter().any(|name| name == output)
    }

    /// Returns the bytes of the tensors that are written as JSON.
    pub(crate) fn bytes_in_json(&self, outputs: &[InferOutput]) -> usize {
        let written = outputs.iter().filter(|output| !self.is_binary(&output.name));
        written.map(|output| output.tensor.data.bytes_here()).sum()
    }
}

/// An encoded response: `head`, then `blobs`.
#[derive(Clone, Debug, Default)]
pub struct Encoded {
    /// The JSON, with room for small outputs behind it.
    pub head: Vec<u8>,
    /// The non-empty binary outputs, in the order of the outputs.
    pub blobs: Vec<Bytes>,
}

impl Encoded {
    /// Returns whether binary data follows the JSON; if so, the length header and the content type
    /// must announce it.
    pub fn is_binary(&self) -> bool {
        !self.blobs.is_empty()
    }
}

/// Returns the length of the JSON part of a body of `body` bytes; 0 means a raw binary request.
///
/// # Errors
/// INVALID_ARG if the header is not a number or is out of range.
pub fn json_length(header: Option<&str>, body: usize) -> Result<usize, InferError> {
    let Some(header) = header else { return Ok(body) };
    let length: i64 = header.trim().parse().map_err(|_| {
        InferError::malformed(format!(
            "Unable to parse Inference-Header-Content-Length, got: {header}"
        ))
    })?;
    usize::try_from(length).ok().filter(|&length| length <= body).ok_or_else(|| {
        InferError::malformed(format!(
            "inference header size should be in range (0, {body}), got: {header}"
        ))
    })
}

/// Checks both parts of a body against `--http-max-input-size`, which limits each of them
/// separately.
///
/// # Errors
/// INVALID_ARG with the size and the limit.
pub fn check_size(json: u64, binary: u64, limit: u64) -> Result<(), InferError> {
    let message = if json > limit {
        format!(
            "request JSON size of {json} bytes exceeds the maximum allowed input size of {limit} \
             bytes."
        )
    } else if binary > limit {
        format!(
            "binary input size of {binary} bytes exceeds the maximum allowed value of {limit} \
             bytes."
        )
    } else {
        return Ok(());
    };
    let message = format!("{message} Use --http-max-input-size to increase the limit.");
    Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, message))
}

/// A decoded request and the form of its answer.
pub type Decoded = (Box<InferRequest>, AnswerForm);

/// Decodes a complete, decompressed body; binary inputs are slices of it. The caller sets the
/// request's stamps.
///
/// # Errors
/// All errors of spec 2.3, with their codes.
pub fn decode(head: Head, body: impl Into<Data>, limit: u64) -> Result<Decoded, InferError> {
    let mut body = body.into();
    let json_length = json_length(head.header_length.as_deref(), body.len())?;
    check_size(json_length as u64, (body.len() - json_length) as u64, limit)?;
    let mut request = Box::new(InferRequest {
        model_name: head.model_name,
        model_version: head.model_version,
        ..InferRequest::default()
    });
    if json_length == 0 {
        request.raw_body = Some(body);
        return Ok((request, AnswerForm { binary: true, exceptions: Vec::new() }));
    }
    let json = body.split_to(json_length).join();
    let binary = super::parse::parse(&json, body, &mut request)?;
    let exceptions = request
        .outputs
        .iter()
        .filter(|output| output.binary_data.is_some_and(|wish| wish != binary));
    let exceptions = exceptions.map(|output| output.name.clone()).collect();
    Ok((request, AnswerForm { binary, exceptions }))
}

/// Encodes a response.
///
/// # Errors
/// INVALID_ARG if an output cannot be represented in JSON, INTERNAL if its bytes do not match its
/// shape.
pub fn encode(response: InferResponse, form: &AnswerForm) -> Result<Encoded, InferError> {
    let size: usize = response.outputs.iter().map(|output| output.tensor.data.bytes_here()).sum();
    let behind = if size <= SMALL { size } else { 0 };
    let mut head = Vec::with_capacity(HEAD_SIZE + behind);
    super::render::render(&response, |output| form.is_binary(output), &mut head)?;
    let outputs = response.outputs.into_iter();
    let blobs = outputs
        .filter(|output| form.is_binary(&output.name) && output.tensor.data.bytes_here() > 0);
    Ok(Encoded { head, blobs: blobs.map(|output| output.tensor.data.join()).collect() })
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
