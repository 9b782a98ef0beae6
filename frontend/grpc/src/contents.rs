//! Converts typed tensor contents (`InferTensorContents`) from repeated numbers to the tensor's little-endian bytes.

use pharos::error::InferError;
use pharos::tensor::{DataType, push_bytes_element};

use super::proto::InferTensorContents;

/// The input to which the contents belong, for error messages.
#[derive(Clone, Copy)]
pub(super) struct Of<'a> {
    pub(super) input: &'a str,
    pub(super) model: &'a str,
    pub(super) datatype: DataType,
}

/// Returns the bytes of `contents`; `None` if no field is set.
///
/// # Errors
/// Fails if a set field does not match the datatype, or if a number is out of the datatype's range (Triton wraps it silently).
pub(super) fn bytes(contents: &InferTensorContents, of: Of<'_>) -> Result<Option<Vec<u8>>, InferError> {
    let set = fields_set(contents);
    if set.iter().filter(|(set, _)| *set).count() > 1 {
        let Of { input, model, .. } = of;
        return Err(InferError::invalid(format!(
            "unexpected explicit tensor data for input tensor '{input}' for model '{model}', binary data was already supplied."
        )));
    }
    let wanted = field_of(of.datatype);
    if let Some((_, other)) = set.iter().find(|(set, field)| *set && Some(*field) != wanted) {
        let Of { input, model, datatype } = of;
        return Err(InferError::invalid(format!(
            "unexpected explicit tensor data for input tensor '{input}' for model '{model}' of type '{other}', \
             expected datatype '{datatype}'"
        )));
    }
    if !set.iter().any(|(set, _)| *set) {
        return Ok(None);
    }
    Ok(Some(match of.datatype {
        DataType::Bool => contents.bool_contents.iter().map(|&flag| u8::from(flag)).collect(),
        DataType::Int8 => narrow(&contents.int_contents, of, |n| i8::try_from(n).map(i8::to_le_bytes).ok())?,
        DataType::Int16 => narrow(&contents.int_contents, of, |n| i16::try_from(n).map(i16::to_le_bytes).ok())?,
        DataType::Int32 => narrow(&contents.int_contents, of, |n| Some(n.to_le_bytes()))?,
        DataType::Int64 => narrow(&contents.int64_contents, of, |n| Some(n.to_le_bytes()))?,
        DataType::Uint8 => narrow(&contents.uint_contents, of, |n| u8::try_from(n).map(u8::to_le_bytes).ok())?,
        DataType::Uint16 => narrow(&contents.uint_contents, of, |n| u16::try_from(n).map(u16::to_le_bytes).ok())?,
        DataType::Uint32 => narrow(&contents.uint_contents, of, |n| Some(n.to_le_bytes()))?,
        DataType::Uint64 => narrow(&contents.uint64_contents, of, |n| Some(n.to_le_bytes()))?,
        DataType::Fp32 => narrow(&contents.fp32_contents, of, |n| Some(n.to_le_bytes()))?,
        DataType::Fp64 => narrow(&contents.fp64_contents, of, |n| Some(n.to_le_bytes()))?,
        DataType::Bytes => strings(contents, of)?,
        // These have no field, so a set field was refused above.
        DataType::Fp16 | DataType::Bf16 => Vec::new(),
    }))
}

/// Returns which fields are set, each named by its datatype.
fn fields_set(contents: &InferTensorContents) -> [(bool, &'static str); 8] {
    [
        (!contents.bool_contents.is_empty(), "BOOL"),
        (!contents.int_contents.is_empty(), "INT32"),
        (!contents.int64_contents.is_empty(), "INT64"),
        (!contents.uint_contents.is_empty(), "UINT32"),
        (!contents.uint64_contents.is_empty(), "UINT64"),
        (!contents.fp32_contents.is_empty(), "FP32"),
        (!contents.fp64_contents.is_empty(), "FP64"),
        (!contents.bytes_contents.is_empty(), "BYTES"),
    ]
}

/// Returns the name of the field with a datatype's numbers; `None` for the 16-bit floats.
fn field_of(datatype: DataType) -> Option<&'static str> {
    match datatype {
        DataType::Int8 | DataType::Int16 => Some("INT32"),
        DataType::Uint8 | DataType::Uint16 => Some("UINT32"),
        DataType::Fp16 | DataType::Bf16 => None,
        other => Some(other.name()),
    }
}

fn narrow<T: Copy + std::fmt::Display, const N: usize>(
    numbers: &[T],
    of: Of<'_>,
    element: impl Fn(T) -> Option<[u8; N]>,
) -> Result<Vec<u8>, InferError> {
    let mut out = Vec::with_capacity(numbers.len() * N);
    for &number in numbers {
        let bytes = element(number).ok_or_else(|| {
            let Of { input, model, datatype } = of;
            InferError::invalid(format!(
                "value {number} of input tensor '{input}' for model '{model}' is out of range for datatype {datatype}"
            ))
        })?;
        out.extend_from_slice(&bytes);
    }
    Ok(out)
}

fn strings(contents: &InferTensorContents, of: Of<'_>) -> Result<Vec<u8>, InferError> {
    let elements = &contents.bytes_contents;
    let mut out = Vec::with_capacity(elements.iter().map(|element| element.len() + 4).sum());
    for element in elements {
        if !push_bytes_element(&mut out, element) {
            let Of { input, model, .. } = of;
            return Err(InferError::invalid(format!(
                "an element of input tensor '{input}' for model '{model}' has {} bytes; the maximum is {}",
                element.len(),
                u32::MAX
            )));
        }
    }
    Ok(out)
}
