//! Ragged batches: inputs that the server generates from the batch as a whole so that a model can
//! tell its requests apart (`batch_input`), and how it splits a common output (`batch_output`). The
//! kinds are Triton's, from the comments of its model configuration schema.

use super::error::{ConfigError, error};
use super::proto;
use crate::tensor::{DataType, element_count};

/// An input that the server generates from one input of all requests of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchInput {
    /// Its content.
    pub kind: BatchInputKind,
    /// The model's inputs that receive this tensor.
    pub targets: Vec<String>,
    /// INT32 or FP32.
    pub datatype: DataType,
    /// The input from which it is generated: a position in the configuration.
    pub source: usize,
}

/// The content of a [`BatchInput`]. Element counts are counts of a request's whole input, including
/// its batch dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchInputKind {
    /// `[requests]`: the number of elements of each request.
    ElementCount,
    /// `[requests]`: the number of elements up to and including each request.
    AccumulatedElementCount,
    /// `[requests + 1]`: 0, then the same.
    AccumulatedElementCountWithZero,
    /// `[most]`, where `most` is the largest number of elements of a request. Only the shape is
    /// meaningful; the values are 0.
    MaxElementCountAsShape,
    /// `[items, dimensions]`: the shape of each item, without the batch dimension.
    ItemShape,
    /// `[items * dimensions]`: the same in one dimension.
    ItemShapeFlatten,
}

/// Outputs that contain the concatenated results of all requests, each as long as the request's
/// input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchOutput {
    /// The model's outputs that are split.
    pub targets: Vec<String>,
    /// The input whose shape determines the shape of each response's output: a position in the
    /// configuration.
    pub source: usize,
}

impl BatchInput {
    /// Returns the tensor's shape and bytes (little-endian) for requests whose source inputs have
    /// these shapes.
    ///
    /// Shapes start with the batch dimension if `batching`. Returns `None` if the tensor would be
    /// too large to be intended.
    pub fn make(&self, shapes: &[&[i64]], batching: bool) -> Option<(Vec<i64>, Vec<u8>)> {
        let counts = shapes.iter().map(|shape| i64::try_from(element_count(shape)?).ok());
        let counts: Vec<i64> = counts.collect::<Option<_>>()?;
        let accumulated = counts.iter().scan(0i64, |sum, count| {
            *sum = sum.saturating_add(*count);
            Some(*sum)
        });
        let (shape, values): (Vec<i64>, Vec<i64>) = match self.kind {
            BatchInputKind::ElementCount => (vec![length(&counts)], counts),
            BatchInputKind::AccumulatedElementCount => {
                (vec![length(&counts)], accumulated.collect())
            }
            BatchInputKind::AccumulatedElementCountWithZero => {
                (vec![length(&counts) + 1], std::iter::once(0).chain(accumulated).collect())
            }
            BatchInputKind::MaxElementCountAsShape => {
                let most = counts.iter().copied().max().unwrap_or(0);
                let len = usize::try_from(most).ok()?.checked_mul(4)?;
                return (len <= MAX_BYTES).then(|| (vec![most], vec![0; len]));
            }
            BatchInputKind::ItemShape | BatchInputKind::ItemShapeFlatten => {
                let (items, values) = item_shapes(shapes, batching)?;
                let dims = length(&values).checked_div(items).unwrap_or(0);
                let flat = self.kind == BatchInputKind::ItemShapeFlatten;
                (if flat { vec![length(&values)] } else { vec![items, dims] }, values)
            }
        };
        Some((shape, self.bytes(&values)))
    }

    fn bytes(&self, values: &[i64]) -> Vec<u8> {
        let bytes = values.iter().map(|&value| match self.datatype {
            #[allow(clippy::cast_precision_loss)] // the schema's choice of datatype
            DataType::Fp32 => (value as f32).to_le_bytes(),
            _ => i32::try_from(value).unwrap_or(i32::MAX).to_le_bytes(),
        });
        bytes.flatten().collect()
    }
}

/// The maximum size, in bytes, of a tensor of which only the shape is meaningful.
const MAX_BYTES: usize = 1 << 30;

fn length(values: &[i64]) -> i64 {
    i64::try_from(values.len()).unwrap_or(i64::MAX)
}

/// Returns the number of items of all requests, and the concatenated shapes of the items.
fn item_shapes(shapes: &[&[i64]], batching: bool) -> Option<(i64, Vec<i64>)> {
    let mut items = 0i64;
    let mut values = Vec::new();
    for shape in shapes {
        let (count, dims) = match shape.split_first() {
            Some((count, dims)) if batching => (*count, dims),
            _ => (1, *shape),
        };
        items = items.checked_add(count)?;
        for _ in 0..count {
            values.extend_from_slice(dims);
        }
    }
    Some((items, values))
}

/// Checks and converts `batch_input`.
pub(super) fn batch_inputs(proto: &proto::ModelConfig) -> Result<Vec<BatchInput>, ConfigError> {
    use proto::batch_input::Kind;
    let mut names: Vec<&str> = proto.input.iter().map(|input| input.name.as_str()).collect();
    let mut all = Vec::new();
    for raw in &proto.batch_input {
        let kind = match raw.kind() {
            Kind::BatchElementCount => BatchInputKind::ElementCount,
            Kind::BatchAccumulatedElementCount => BatchInputKind::AccumulatedElementCount,
            Kind::BatchAccumulatedElementCountWithZero => {
                BatchInputKind::AccumulatedElementCountWithZero
            }
            Kind::BatchMaxElementCountAsShape => BatchInputKind::MaxElementCountAsShape,
            Kind::BatchItemShape => BatchInputKind::ItemShape,
            Kind::BatchItemShapeFlatten => BatchInputKind::ItemShapeFlatten,
        };
        let datatype = match raw.data_type() {
            proto::DataType::TypeInt32 => DataType::Int32,
            proto::DataType::TypeFp32 => DataType::Fp32,
            other => {
                let other = other.as_str_name();
                return error(format!(
                    "batch input data type must be TYPE_INT32 or TYPE_FP32 for {}, got {other}",
                    proto.name
                ));
            }
        };
        let source = source(proto, "input", raw.kind().as_str_name(), &raw.source_input)?;
        if raw.target_name.is_empty() {
            return error(format!("batch input must specify 'target_name' for {}", proto.name));
        }
        for target in &raw.target_name {
            if names.contains(&target.as_str()) {
                return error(format!("batch input '{target}' is listed twice for {}", proto.name));
            }
            names.push(target);
        }
        all.push(BatchInput { kind, targets: raw.target_name.clone(), datatype, source });
    }
    Ok(all)
}

/// Checks and converts `batch_output`.
pub(super) fn batch_outputs(proto: &proto::ModelConfig) -> Result<Vec<BatchOutput>, ConfigError> {
    proto
        .batch_output
        .iter()
        .map(|raw| {
            for (number, target) in raw.target_name.iter().enumerate() {
                if proto.output.iter().all(|output| output.name != *target) {
                    return error(format!(
                        "unknown target output name '{target}' for {}",
                        proto.name
                    ));
                }
                if raw.target_name.iter().take(number).any(|other| other == target) {
                    return error(format!(
                        "target output name '{target}' can only be specified once for {}",
                        proto.name
                    ));
                }
            }
            let source = source(proto, "output", raw.kind().as_str_name(), &raw.source_input)?;
            Ok(BatchOutput { targets: raw.target_name.clone(), source })
        })
        .collect()
}

/// Returns the position of the only source.
fn source(
    proto: &proto::ModelConfig,
    role: &str,
    kind: &str,
    names: &[String],
) -> Result<usize, ConfigError> {
    let [name] = names else {
        let count = names.len();
        return error(format!(
            "batch {role} kind '{kind}' expects 1 source input, got {count}, for {}",
            proto.name
        ));
    };
    let Some(position) = proto.input.iter().position(|input| input.name == *name) else {
        return error(format!(
            "unknown source input name '{name}' of a batch {role} for {}",
            proto.name
        ));
    };
    if proto.input.get(position).is_some_and(|input| input.optional) {
        return error(format!(
            "source input '{name}' of a batch {role} must not be optional for {}: the shape is \
             unknown without it",
            proto.name
        ));
    }
    Ok(position)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(
        kind: BatchInputKind,
        datatype: DataType,
        shapes: &[&[i64]],
        batching: bool,
    ) -> (Vec<i64>, Vec<f64>) {
        let input = BatchInput { kind, targets: vec!["T".to_owned()], datatype, source: 0 };
        let (shape, bytes) = input.make(shapes, batching).expect("small enough");
        (
            shape,
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|bytes| match datatype {
                    DataType::Fp32 => f64::from(f32::from_le_bytes(*bytes)),
                    _ => f64::from(i32::from_le_bytes(*bytes)),
                })
                .collect(),
        )
    }

    #[test]
    fn generates_every_kind_as_in_the_schema() {
        use BatchInputKind as Kind;
        // The schema's examples: two requests of 2 elements; a batch of 2 of [3, 1] and one of 1 of
        // [2, 2].
        let two: [&[i64]; 2] = [&[1, 2], &[1, 2]];
        let mixed: [&[i64]; 2] = [&[2, 3, 1], &[1, 2, 2]];
        for (kind, shapes, shape, values) in [
            (Kind::ElementCount, two, vec![2], vec![2.0, 2.0]),
            (Kind::AccumulatedElementCount, two, vec![2], vec![2.0, 4.0]),
            (Kind::AccumulatedElementCountWithZero, two, vec![3], vec![0.0, 2.0, 4.0]),
            (Kind::ElementCount, mixed, vec![2], vec![6.0, 4.0]),
            (Kind::MaxElementCountAsShape, mixed, vec![6], vec![0.0; 6]),
            (Kind::ItemShape, mixed, vec![3, 2], vec![3.0, 1.0, 3.0, 1.0, 2.0, 2.0]),
            (Kind::ItemShapeFlatten, mixed, vec![6], vec![3.0, 1.0, 3.0, 1.0, 2.0, 2.0]),
        ] {
            for datatype in [DataType::Int32, DataType::Fp32] {
                assert_eq!(
                    made(kind, datatype, &shapes, true),
                    (shape.clone(), values.clone()),
                    "{kind:?}"
                );
            }
        }
        assert_eq!(
            made(Kind::ItemShape, DataType::Int32, &[&[3, 1]], false),
            (vec![1, 2], vec![3.0, 1.0])
        );
    }

    #[test]
    fn refuses_tensors_that_are_too_large() {
        let input = BatchInput {
            kind: BatchInputKind::MaxElementCountAsShape,
            targets: Vec::new(),
            datatype: DataType::Fp32,
            source: 0,
        };
        assert_eq!(input.make(&[&[1, 1 << 40]], true), None);
        assert_eq!(input.make(&[&[i64::MAX, 2]], true), None);
    }
}
