//! Reads the graph of a file in ORT format, into which ONNX Runtime converts ONNX files (`.ort`).
//!
//! Source of the field numbers: `ort.fbs` of ONNX Runtime. A table's fields are numbered in their
//! order; a union has two numbers.

use std::collections::HashMap;

use super::flatbuffer::{Buffer, Damaged, Table};
use super::{Dimension, Graph, Tensor, Value};

/// The extension of file names.
pub(super) const EXTENSION: &str = "ort";

/// The mark of the format, after the first four bytes.
const MARK: &[u8] = b"ORTM";

/// The variant of `TypeInfoValue` for tensors; the others are sequences and maps.
const TENSOR: u8 = 1;

/// The kinds of dimensions in `DimensionValueType`.
const VALUE: u8 = 1;
const PARAM: u8 = 2;

/// Returns whether the bytes begin as a file in ORT format.
pub(super) fn is_marked(bytes: &[u8]) -> bool {
    bytes.get(4..8) == Some(MARK)
}

/// Reads the inputs, outputs and names of weights.
///
/// # Errors
/// The bytes are not a file in ORT format, or have no graph.
pub(super) fn graph(bytes: &[u8]) -> Result<Graph<'_>, String> {
    match read(&Buffer::new(bytes)) {
        Ok(Some(graph)) => Ok(graph),
        Ok(None) => Err("not a model in ORT format: it has no graph".to_owned()),
        Err(Damaged) => {
            Err("not a model in ORT format: the file is damaged or incomplete".to_owned())
        }
    }
}

fn read<'a>(buffer: &Buffer<'a>) -> Result<Option<Graph<'a>>, Damaged> {
    let session = buffer.root()?;
    let Some(model) = session.table(1)? else { return Ok(None) };
    let Some(graph) = model.table(7)? else { return Ok(None) };
    let mut weights = Vec::new();
    for weight in graph.tables(0)? {
        weights.push(weight?.text(0)?);
    }
    for sparse in graph.tables(7)? {
        if let Some(values) = sparse?.table(0)? {
            weights.push(values.text(0)?);
        }
    }
    let mut types = HashMap::new();
    for info in graph.tables(1)? {
        let info = info?;
        types.insert(info.text(0)?, info.table(2)?);
    }
    let values = |number: usize| -> Result<Vec<Value<'a>>, Damaged> {
        let mut values = Vec::new();
        for name in graph.texts(number)? {
            let name = name?;
            let tensor = types.get(name).copied().flatten().map(tensor).transpose()?.flatten();
            values.push(Value { name, tensor });
        }
        Ok(values)
    };
    let inputs = values(5)?;
    let outputs = values(6)?;
    Ok(Some(Graph { weights, inputs, outputs }))
}

/// Reads a `TypeInfo`; `None` for a sequence or a map.
fn tensor<'a>(kind: Table<'_, 'a>) -> Result<Option<Tensor<'a>>, Damaged> {
    let Some(tensor) = kind.table(2)?.filter(|_| kind.byte(1) == Ok(TENSOR)) else {
        return Ok(None);
    };
    let dims = match tensor.table(1)? {
        None => None,
        Some(shape) => {
            let mut dims = Vec::new();
            for dim in shape.tables(0)? {
                dims.push(dimension(dim?)?);
            }
            Some(dims)
        }
    };
    Ok(Some(Tensor { element_type: tensor.int32(0)?, dims }))
}

fn dimension<'a>(dim: Table<'_, 'a>) -> Result<Dimension<'a>, Damaged> {
    let Some(value) = dim.table(0)? else { return Ok(Dimension::Unknown) };
    Ok(match value.byte(0)? {
        VALUE => Dimension::of(Some(value.int64(1)?), None),
        PARAM => Dimension::of(None, Some(value.text(2)?)),
        _ => Dimension::Unknown,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::super::{ModelSignature, SignatureTensor, signature};
    use crate::tensor::DataType;

    /// Written by ONNX Runtime 1.32 for an ONNX file with the input `x` of `[N, 4]`, the outputs `y
    /// = MatMul(x, w)`, `z = ArgMax(y)` and `s = SequenceConstruct(x)`, and the weight `w`.
    const FILE: &[u8] = include_bytes!("../testdata/matmul.ort");

    #[test]
    fn reads_a_file_of_onnxruntime() {
        let tensor = |name: &str, datatype, dims: Option<&[i64]>| SignatureTensor {
            name: name.to_owned(),
            datatype,
            first_dim_name: dims.map(|_| "N".to_owned()),
            dims: dims.map(<[i64]>::to_vec),
        };
        let expected = ModelSignature {
            inputs: vec![tensor("x", DataType::Fp32, Some(&[-1, 4]))],
            outputs: vec![
                tensor("y", DataType::Fp32, Some(&[-1, 3])),
                tensor("z", DataType::Int64, Some(&[-1])),
            ],
            omitted_outputs: vec!["s".to_owned()],
        };
        assert_eq!(signature(FILE).unwrap(), expected);
    }

    #[test]
    fn refuses_what_is_not_a_whole_file() {
        for length in [8, 40, FILE.len() / 2] {
            let error = signature(&FILE[..length]).unwrap_err();
            assert_eq!(
                error, "not a model in ORT format: the file is damaged or incomplete",
                "{length} bytes"
            );
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_do_not_panic(changes in prop::collection::vec((0..FILE.len(), any::<u8>()), 0..8), end in 0..=FILE.len()) {
            let mut bytes = FILE.to_vec();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            let _ = signature(&bytes[..end]);
        }
    }
}
