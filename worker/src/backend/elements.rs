//! Arithmetic over the elements of tensors of all numeric datatypes.

use half::{bf16, f16};
use pharos::tensor::DataType;

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
