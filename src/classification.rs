//! The classification extension: the largest values of an output as texts `value:index` or
//! `value:index:label` (spec 2.11), formatted like C's `%f` and `%d`, which Triton's clients parse.

use std::cmp::Ordering;

use crate::error::InferError;
use crate::tensor::{DataType, Tensor, element_count, push_bytes_element};

/// The maximum number of elements of a classified output.
const MAX_ELEMENTS: u64 = 1_000_000;

/// Returns the `count` largest elements of each item of the output, or all if there are fewer
/// classes. They are in descending order; equal elements are in the order of their indices.
/// `labels` names the classes; it may be shorter than the number of classes. If `batching` is set,
/// the first dimension counts the items.
///
/// The result is a BYTES tensor of shape `[count]` or `[items, count]`.
///
/// # Errors
/// INVALID_ARG for a datatype without an order (BOOL, BYTES, FP16, BF16) and for too many elements.
pub fn classify(
    tensor: &Tensor,
    count: u64,
    labels: &[String],
    batching: bool,
) -> Result<Tensor, InferError> {
    let elements = element_count(&tensor.shape).unwrap_or(u64::MAX);
    if elements > MAX_ELEMENTS {
        let text = format!(
            "classification output tensor too large: {elements} elements, at most {MAX_ELEMENTS}"
        );
        return Err(InferError::invalid(text));
    }
    let bytes = tensor.data.as_slice();
    let values: Vec<Value> = match tensor.datatype {
        DataType::Uint8 => list(&bytes, |bytes| Value::Whole(u8::from_le_bytes(bytes).into())),
        DataType::Uint16 => list(&bytes, |bytes| Value::Whole(u16::from_le_bytes(bytes).into())),
        DataType::Uint32 => list(&bytes, |bytes| Value::Whole(u32::from_le_bytes(bytes).into())),
        DataType::Uint64 => list(&bytes, |bytes| Value::Whole(u64::from_le_bytes(bytes).into())),
        DataType::Int8 => list(&bytes, |bytes| Value::Whole(i8::from_le_bytes(bytes).into())),
        DataType::Int16 => list(&bytes, |bytes| Value::Whole(i16::from_le_bytes(bytes).into())),
        DataType::Int32 => list(&bytes, |bytes| Value::Whole(i32::from_le_bytes(bytes).into())),
        DataType::Int64 => list(&bytes, |bytes| Value::Whole(i64::from_le_bytes(bytes).into())),
        DataType::Fp32 => list(&bytes, |bytes| Value::Real(f32::from_le_bytes(bytes).into())),
        DataType::Fp64 => list(&bytes, |bytes| Value::Real(f64::from_le_bytes(bytes))),
        other @ (DataType::Bool | DataType::Bytes | DataType::Fp16 | DataType::Bf16) => {
            let text =
                format!("class result not available for output due to unsupported type '{other}'");
            return Err(InferError::invalid(text));
        }
    };
    let items = match tensor.shape.first() {
        Some(&items) if batching => usize::try_from(items).unwrap_or(0),
        _ => 1,
    };
    let classes = values.len().checked_div(items).unwrap_or(0);
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(classes);
    let mut data = Vec::new();
    for item in values.chunks(classes.max(1)).take(items) {
        for (index, value) in largest(item, count) {
            push_bytes_element(&mut data, describe(value, index, labels).as_bytes());
        }
    }
    let dim = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
    let shape = if batching { vec![dim(items), dim(count)] } else { vec![dim(count)] };
    Ok(Tensor { datatype: DataType::Bytes, shape, data: data.into() })
}

/// An element in a type in which the elements of one tensor compare.
#[derive(Clone, Copy, Debug)]
enum Value {
    Whole(i128),
    Real(f64),
}

impl Value {
    /// Orders larger values first and NaN last.
    fn before(self, other: Self) -> Ordering {
        match (self, other) {
            (Self::Whole(one), Self::Whole(other)) => other.cmp(&one),
            (Self::Real(one), Self::Real(other)) => {
                other.partial_cmp(&one).unwrap_or_else(|| one.is_nan().cmp(&other.is_nan()))
            }
            _ => Ordering::Equal,
        }
    }
}

fn list<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> Value) -> Vec<Value> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| value(*chunk)).collect()
}

/// Returns the `count` largest elements with their positions, in time linear in the number of
/// classes. Sorts only the result.
fn largest(item: &[Value], count: usize) -> Vec<(usize, Value)> {
    let order = |one: &(usize, Value), other: &(usize, Value)| {
        one.1.before(other.1).then(one.0.cmp(&other.0))
    };
    let mut all: Vec<(usize, Value)> = item.iter().copied().enumerate().collect();
    if count < all.len() {
        all.select_nth_unstable_by(count, order);
        all.truncate(count);
    }
    all.sort_unstable_by(order);
    all
}

fn describe(value: Value, index: usize, labels: &[String]) -> String {
    let value = match value {
        Value::Whole(value) => value.to_string(),
        Value::Real(value) if value.is_finite() => format!("{value:.6}"),
        Value::Real(value) if value.is_nan() => "nan".to_owned(),
        Value::Real(value) => (if value > 0.0 { "inf" } else { "-inf" }).to_owned(),
    };
    match labels.get(index).filter(|label| !label.is_empty()) {
        Some(label) => format!("{value}:{index}:{label}"),
        None => format!("{value}:{index}"),
    }
}

/// Parses a label file: one class name per line, in the order of the classes.
pub fn labels(text: &str) -> Vec<String> {
    text.lines().map(|line| line.trim_end_matches('\r').to_owned()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::tensor::bytes_elements;

    fn texts(tensor: &Tensor) -> Vec<String> {
        let data = tensor.data.as_slice();
        let texts = bytes_elements(&data)
            .map(|element| String::from_utf8(element.unwrap().to_vec()).unwrap());
        texts.collect()
    }

    fn fp32(shape: &[i64], values: &[f32]) -> Tensor {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor { datatype: DataType::Fp32, shape: shape.to_vec(), data: data.into() }
    }

    #[test]
    fn returns_the_largest_elements_of_each_item() {
        let labels = labels("cat\r\ndog\n\nbird");
        let tensor = fp32(&[2, 4], &[0.1, 0.9, 0.2, 0.9, 5.0, -1.5, f32::NAN, f32::INFINITY]);
        let found = classify(&tensor, 3, &labels, true).unwrap();
        assert_eq!((found.datatype, found.shape.as_slice()), (DataType::Bytes, &[2, 3][..]));
        assert_eq!(
            texts(&found),
            [
                "0.900000:1:dog",
                "0.900000:3:bird",
                "0.200000:2",
                "inf:3:bird",
                "5.000000:0:cat",
                "-1.500000:1:dog"
            ]
        );
        let all = classify(&fp32(&[3], &[1.0, f32::NAN, 3.0]), 100, &[], false).unwrap();
        assert_eq!(
            (texts(&all), all.shape),
            (vec!["3.000000:2".into(), "1.000000:0".into(), "nan:1".into()], vec![3])
        );
    }

    #[test]
    fn formats_integers_without_loss() {
        let data: Vec<u8> =
            [1u64, u64::MAX, u64::MAX - 1].iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = Tensor { datatype: DataType::Uint64, shape: vec![3], data: data.into() };
        let found = classify(&tensor, 2, &[], false).unwrap();
        assert_eq!(texts(&found), ["18446744073709551615:1", "18446744073709551614:2"]);
        let tensor =
            Tensor { datatype: DataType::Int8, shape: vec![1, 2], data: vec![255, 1].into() };
        assert_eq!(texts(&classify(&tensor, 2, &[], true).unwrap()), ["1:1", "-1:0"]);
    }

    #[test]
    fn refuses_unordered_datatypes_and_too_many_elements() {
        for datatype in [DataType::Bool, DataType::Bytes, DataType::Fp16, DataType::Bf16] {
            let tensor = Tensor { datatype, shape: vec![1], data: vec![0, 0].into() };
            let error = classify(&tensor, 1, &[], false).unwrap_err();
            let expected = format!(
                "class result not available for output due to unsupported type '{datatype}'"
            );
            assert_eq!(error.message, expected);
        }
        let tensor = Tensor {
            datatype: DataType::Uint8,
            shape: vec![1_000_001],
            data: vec![0; 1_000_001].into(),
        };
        let error = classify(&tensor, 1, &[], false).unwrap_err();
        assert!(error.message.starts_with("classification output tensor too large"), "{error}");
        let empty = fp32(&[0, 4], &[]);
        assert_eq!(classify(&empty, 2, &[], true).unwrap().shape, [0, 0]);
    }
}
