//! Formats tensors as text for trace files: decimal numbers, booleans as 1 and 0, strings in
//! quotes, separated by commas.

use std::fmt::{Display, Write};

use half::{bf16, f16};

use crate::tensor::{DataType, Tensor};

/// Formats all elements. Stops at the end of the data if it is shorter than its shape requires.
pub fn elements(tensor: &Tensor) -> String {
    let data = tensor.data.as_slice();
    match tensor.datatype {
        DataType::Bool | DataType::Uint8 => numbers(&data, u8::from_le_bytes),
        DataType::Int8 => numbers(&data, i8::from_le_bytes),
        DataType::Uint16 => numbers(&data, u16::from_le_bytes),
        DataType::Int16 => numbers(&data, i16::from_le_bytes),
        DataType::Uint32 => numbers(&data, u32::from_le_bytes),
        DataType::Int32 => numbers(&data, i32::from_le_bytes),
        DataType::Uint64 => numbers(&data, u64::from_le_bytes),
        DataType::Int64 => numbers(&data, i64::from_le_bytes),
        DataType::Fp16 => numbers(&data, f16::from_le_bytes),
        DataType::Bf16 => numbers(&data, bf16::from_le_bytes),
        DataType::Fp32 => numbers(&data, f32::from_le_bytes),
        DataType::Fp64 => numbers(&data, f64::from_le_bytes),
        DataType::Bytes => texts(&data),
    }
}

/// Formats the dimensions.
pub fn shape(tensor: &Tensor) -> String {
    join(tensor.shape.iter())
}

fn numbers<const N: usize, T: Display>(data: &[u8], read: impl Fn([u8; N]) -> T) -> String {
    join(data.as_chunks::<N>().0.iter().map(|bytes| read(*bytes)))
}

fn texts(mut data: &[u8]) -> String {
    let mut all = Vec::new();
    while let Some((length, rest)) = data.split_first_chunk::<4>() {
        let Some((text, rest)) = rest.split_at_checked(u32::from_le_bytes(*length) as usize) else {
            break;
        };
        all.push(format!("\"{}\"", String::from_utf8_lossy(text)));
        data = rest;
    }
    join(all.into_iter())
}

fn join(values: impl Iterator<Item = impl Display>) -> String {
    let mut text = String::new();
    for (position, value) in values.enumerate() {
        let comma = if position == 0 { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}{value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_datatype_is_shown_as_its_elements() {
        let show = |datatype, data: Vec<u8>| {
            elements(&Tensor { datatype, shape: vec![2], data: data.into() })
        };
        assert_eq!(show(DataType::Bool, vec![1, 0]), "1,0");
        assert_eq!(show(DataType::Int8, vec![255, 1]), "-1,1");
        assert_eq!(show(DataType::Int32, [1i32, -2].map(i32::to_le_bytes).concat()), "1,-2");
        assert_eq!(
            show(DataType::Fp32, [0.5f32, -1e9].map(f32::to_le_bytes).concat()),
            "0.5,-1000000000"
        );
        assert_eq!(
            show(DataType::Fp16, [f16::from_f32(1.5); 2].map(f16::to_le_bytes).concat()),
            "1.5,1.5"
        );
        assert_eq!(show(DataType::Bytes, b"\x02\0\0\0ab\0\0\0\0".to_vec()), "\"ab\",\"\"");
        // Truncated data: the complete elements.
        assert_eq!(show(DataType::Bytes, b"\x01\0\0\0a\xff\0\0\0b".to_vec()), "\"a\"");
        assert_eq!(show(DataType::Uint64, vec![1, 0, 0, 0, 0, 0, 0, 0, 9]), "1");
        assert_eq!(
            shape(&Tensor {
                datatype: DataType::Bool,
                shape: vec![1, 16],
                data: Vec::<u8>::new().into()
            }),
            "1,16"
        );
    }
}
