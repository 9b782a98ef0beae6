//! Elements of tensors: arithmetic over all numeric datatypes, conversion from and to bytes, and
//! strings.

use half::{bf16, f16};
use pharos::error::InferError;
use pharos::tensor::{DataType, bytes_elements, element_count};
use pharos::wire::BatchRequest;
use pharos_backend::{Batch, Input, Outputs, run_error};

/// An operation on two elements: wrapping for integers, or on floats.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    Add,
    Subtract,
}

/// Computes `out[i] = left[i] op right[i]`. Elements beyond the shortest slice are not changed.
/// Returns `false` for BOOL and BYTES, which have no arithmetic.
pub(super) fn apply(
    datatype: DataType,
    operation: Operation,
    left: &[u8],
    right: &[u8],
    out: &mut [u8],
) -> bool {
    macro_rules! wrapping {
        ($number:ty) => {
            match operation {
                Operation::Add => each(left, right, out, |a, b| {
                    <$number>::from_le_bytes(a)
                        .wrapping_add(<$number>::from_le_bytes(b))
                        .to_le_bytes()
                }),
                Operation::Subtract => each(left, right, out, |a, b| {
                    <$number>::from_le_bytes(a)
                        .wrapping_sub(<$number>::from_le_bytes(b))
                        .to_le_bytes()
                }),
            }
        };
    }
    macro_rules! floating {
        ($number:ty) => {
            match operation {
                Operation::Add => each(left, right, out, |a, b| {
                    (<$number>::from_le_bytes(a) + <$number>::from_le_bytes(b)).to_le_bytes()
                }),
                Operation::Subtract => each(left, right, out, |a, b| {
                    (<$number>::from_le_bytes(a) - <$number>::from_le_bytes(b)).to_le_bytes()
                }),
            }
        };
    }
    match datatype {
        DataType::Uint8 => wrapping!(u8),
        DataType::Uint16 => wrapping!(u16),
        DataType::Uint32 => wrapping!(u32),
        DataType::Uint64 => wrapping!(u64),
        DataType::Int8 => wrapping!(i8),
        DataType::Int16 => wrapping!(i16),
        DataType::Int32 => wrapping!(i32),
        DataType::Int64 => wrapping!(i64),
        DataType::Fp16 => floating!(f16),
        DataType::Bf16 => floating!(bf16),
        DataType::Fp32 => floating!(f32),
        DataType::Fp64 => floating!(f64),
        DataType::Bool | DataType::Bytes => return false,
    }
    true
}

fn each<const N: usize>(
    left: &[u8],
    right: &[u8],
    out: &mut [u8],
    operation: impl Fn([u8; N], [u8; N]) -> [u8; N],
) {
    let operands = left.as_chunks().0.iter().zip(right.as_chunks().0);
    for ((left, right), out) in operands.zip(out.as_chunks_mut().0) {
        *out = operation(*left, *right);
    }
}

/// Runs `$body` with `$number` as the Rust type of a fixed-size datatype that every runtime
/// supports: all but BOOL and BF16. `also` adds datatypes that only some runtimes support.
macro_rules! for_numbers {
    ($datatype:expr, $number:ident => $body:expr, $(also $more:ident = $type:ty,)* otherwise $otherwise:expr) => {
        for_numbers!(
            @match $datatype, $number => $body, otherwise $otherwise,
            Uint8 = u8, Uint16 = u16, Uint32 = u32, Uint64 = u64, Int8 = i8, Int16 = i16, Int32 = i32, Int64 = i64,
            Fp16 = half::f16, Fp32 = f32, Fp64 = f64, $($more = $type,)*
        )
    };
    (@match $datatype:expr, $number:ident => $body:expr, otherwise $otherwise:expr, $($variant:ident = $type:ty,)*) => {
        match $datatype {
            $(DataType::$variant => {
                type $number = $type;
                $body
            })*
            _ => $otherwise,
        }
    };
}
pub(super) use for_numbers;

/// Returns the elements of a BYTES input as strings. An element that is not UTF-8, or contains a
/// NUL byte, which no ONNX runtime accepts, fails only its request; an empty string replaces it.
///
/// # Errors
/// The input is not framed as BYTES, which the frontend has checked.
pub(super) fn texts(
    input: &Input<'_>,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<Vec<String>, InferError> {
    let elements = bytes_elements(input.data).collect::<Result<Vec<_>, _>>().map_err(|at| {
        run_error(format!("input '{}' is not framed as BYTES at {at}", input.name))
    })?;
    let elements_of = counts(batch, input, elements.len());
    let mut texts = Vec::with_capacity(elements.len());
    let mut rest = elements.into_iter();
    for (position, request) in batch.requests.iter().enumerate() {
        let mut is_valid = true;
        for element in rest.by_ref().take(elements_of(request)) {
            let text = str::from_utf8(element).ok().filter(|text| !text.contains('\0'));
            is_valid &= text.is_some();
            texts.push(text.unwrap_or_default().to_owned());
        }
        if !is_valid {
            let text = format!(
                "input '{}' holds an element that is not UTF-8 text without NUL bytes",
                input.name
            );
            outputs.fail(position, InferError::invalid(text));
        }
    }
    Ok(texts)
}

/// Returns a function for the number of elements that a request has of an input, of which the batch
/// has `elements`. Requests with a ragged input have different shapes, which its
/// [details](BatchRequest::details) contain.
pub(super) fn counts(
    batch: &Batch<'_>,
    input: &Input<'_>,
    elements: usize,
) -> impl Fn(&BatchRequest) -> usize + use<> {
    let index = input.index;
    let per_row = elements / usize::try_from(batch.rows()).unwrap_or(1).max(1);
    move |request| {
        let mut ragged = request.details.iter().flat_map(|details| &details.ragged);
        let shape =
            ragged.find(|(position, _)| usize::from(*position) == index).map(|(_, shape)| shape);
        let own = shape.and_then(|shape| usize::try_from(element_count(shape)?).ok());
        own.unwrap_or(per_row * request.rows as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_wrap_and_halves_add() {
        let mut out = [0; 2];
        assert!(apply(DataType::Int8, Operation::Add, &[127, 1], &[1, 1], &mut out));
        assert_eq!(out, [128, 2]);
        assert!(apply(DataType::Int8, Operation::Subtract, &[0, 1], &[1, 1], &mut out));
        assert_eq!(out, [255, 0]);
        let [one, two] = [1.0, 2.0].map(|number| f16::from_f32(number).to_le_bytes());
        assert!(apply(DataType::Fp16, Operation::Subtract, &one, &two, &mut out));
        assert_eq!(f16::from_le_bytes(out), f16::from_f32(-1.0));
        let [one, two] = [1.0, 2.0].map(|number| bf16::from_f32(number).to_le_bytes());
        assert!(apply(DataType::Bf16, Operation::Add, &one, &two, &mut out));
        assert_eq!(bf16::from_le_bytes(out), bf16::from_f32(3.0));
        assert!(!apply(DataType::Bool, Operation::Add, &[1], &[1], &mut out));
    }
}
