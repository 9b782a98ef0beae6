//! Converts typed tensor contents, an encoded `InferTensorContents`, to the tensor's little-endian
//! bytes.

use std::fmt::Display;

use pharos::error::InferError;
use pharos::tensor::{DataType, push_bytes_element};
use prost::encoding::{WireType, decode_varint};

use pharos_listener::receiving::grpc::fields::{Field, Fields};

/// The input to which the contents belong, for error messages.
#[derive(Clone, Copy)]
pub(super) struct Of<'a> {
    pub(super) input: &'a str,
    pub(super) model: &'a str,
    pub(super) datatype: DataType,
}

/// The fields of `InferTensorContents` in the order of their numbers, from 1, each named by its
/// datatype.
const FIELDS: [&str; 8] = ["BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64", "BYTES"];

/// The number of `bytes_contents`.
const STRINGS: u32 = 8;

/// Returns the bytes of `contents`; `None` if no field is set.
///
/// # Errors
/// Fails if the contents are malformed, if a set field does not match the datatype, or if a number
/// is out of the datatype's range (Triton wraps it silently).
pub(super) fn bytes(contents: &[u8], of: Of<'_>) -> Result<Option<Vec<u8>>, InferError> {
    let set = fields_set(contents).ok_or_else(|| malformed(of))?;
    let mut set = (1..).zip(FIELDS).zip(set).filter(|(_, set)| *set).map(|(field, _)| field);
    let Some((number, field)) = set.next() else { return Ok(None) };
    let Of { input, model, datatype } = of;
    if set.next().is_some() {
        return Err(InferError::invalid(format!(
            "unexpected explicit tensor data for input tensor '{input}' for model '{model}', \
             binary data was already supplied."
        )));
    }
    if Some(field) != field_of(datatype) {
        return Err(InferError::invalid(format!(
            "unexpected explicit tensor data for input tensor '{input}' for model '{model}' of \
             type '{field}', expected datatype '{datatype}'"
        )));
    }
    // Others may be there without elements.
    let fields = || Fields::of(contents).filter(|field| field.number == number);
    let mut out = Vec::new();
    if datatype == DataType::Bytes {
        out.reserve(fields().map(|field| field.value.len() + 4).sum());
    }
    for field in fields() {
        append(&mut out, field, of)?;
    }
    Ok(Some(out))
}

/// Returns which fields are set; `None` if the contents are malformed.
fn fields_set(contents: &[u8]) -> Option<[bool; FIELDS.len()]> {
    let mut set = [false; FIELDS.len()];
    let mut fields = Fields::of(contents);
    for field in fields.by_ref() {
        // A group has its own numbers of fields. No version of the protocol has groups.
        if matches!(field.wire_type, WireType::StartGroup | WireType::EndGroup) {
            return None;
        }
        if !is_known(&field) {
            continue;
        }
        // Packed numbers may be none; a string may be empty.
        *set.get_mut(field.number as usize - 1)? |=
            field.number == STRINGS || !field.value.is_empty();
    }
    fields.rest().is_empty().then_some(set)
}

fn is_known(field: &Field<'_>) -> bool {
    (1..=FIELDS.len()).contains(&(field.number as usize))
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

fn malformed(Of { input, model, .. }: Of<'_>) -> InferError {
    InferError::invalid(format!(
        "the contents of input tensor '{input}' for model '{model}' are malformed"
    ))
}

/// Appends the elements of a field: packed numbers, one number, or a string.
fn append(out: &mut Vec<u8>, field: Field<'_>, of: Of<'_>) -> Result<(), InferError> {
    let value = field.value;
    let single = match of.datatype {
        DataType::Fp32 => WireType::ThirtyTwoBit,
        DataType::Fp64 => WireType::SixtyFourBit,
        DataType::Bytes => WireType::LengthDelimited,
        _ => WireType::Varint,
    };
    // A number that is not packed has the same bytes as packed ones.
    if field.wire_type != single && field.wire_type != WireType::LengthDelimited {
        return Err(malformed(of));
    }
    match of.datatype {
        DataType::Bool => numbers(out, value, of, |n| Ok([u8::from(n != 0)])),
        DataType::Int8 => {
            numbers(out, value, of, |n| fitting(low(n).cast_signed(), i8::to_le_bytes))
        }
        DataType::Int16 => {
            numbers(out, value, of, |n| fitting(low(n).cast_signed(), i16::to_le_bytes))
        }
        DataType::Uint8 => numbers(out, value, of, |n| fitting(low(n), u8::to_le_bytes)),
        DataType::Uint16 => numbers(out, value, of, |n| fitting(low(n), u16::to_le_bytes)),
        DataType::Int32 | DataType::Uint32 => numbers(out, value, of, |n| Ok(low(n).to_le_bytes())),
        DataType::Int64 | DataType::Uint64 => numbers(out, value, of, |n| Ok(n.to_le_bytes())),
        DataType::Fp32 | DataType::Fp64
            if !value.len().is_multiple_of(of.datatype.size().unwrap_or(1)) =>
        {
            Err(malformed(of))
        }
        DataType::Fp32 | DataType::Fp64 => {
            out.extend_from_slice(value);
            Ok(())
        }
        DataType::Bytes => string(out, value, of),
        // These have no field, so a set field was refused before.
        DataType::Fp16 | DataType::Bf16 => Ok(()),
    }
}

/// Returns the lower half, all that a 32-bit number has: negative ones are encoded with 64 bits.
fn low(number: u64) -> u32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Returns the bytes of a number in a smaller type, or its text if it does not fit.
fn fitting<T: Copy + Display, S: TryFrom<T>, const N: usize>(
    number: T,
    bytes: impl Fn(S) -> [u8; N],
) -> Result<[u8; N], String> {
    S::try_from(number).map(bytes).map_err(|_| number.to_string())
}

/// Appends the elements of packed varints. `element` returns the text of a number that is out of
/// range as the error.
fn numbers<const N: usize>(
    out: &mut Vec<u8>,
    mut packed: &[u8],
    of: Of<'_>,
    element: impl Fn(u64) -> Result<[u8; N], String>,
) -> Result<(), InferError> {
    // The last byte of each number is below 0x80.
    out.reserve(packed.iter().filter(|byte| **byte < 0x80).count() * N);
    while !packed.is_empty() {
        let number = decode_varint(&mut packed).map_err(|_| malformed(of))?;
        let bytes = element(number).map_err(|number| {
            let Of { input, model, datatype } = of;
            InferError::invalid(format!(
                "value {number} of input tensor '{input}' for model '{model}' is out of range for \
                 datatype {datatype}"
            ))
        })?;
        out.extend_from_slice(&bytes);
    }
    Ok(())
}

fn string(out: &mut Vec<u8>, element: &[u8], of: Of<'_>) -> Result<(), InferError> {
    if push_bytes_element(out, element) {
        return Ok(());
    }
    let Of { input, model, .. } = of;
    Err(InferError::invalid(format!(
        "an element of input tensor '{input}' for model '{model}' has {} bytes; the maximum is {}",
        element.len(),
        u32::MAX
    )))
}
