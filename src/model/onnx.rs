//! Reads the inputs and outputs that a model file for ONNX Runtime declares: an ONNX file, or one
//! in ORT format.
//!
//! Declares only the required fields; the decoder skips the others, including the weights, without
//! copying them. Source of the field numbers: `onnx.proto3` of the ONNX project.

mod flatbuffer;
mod ort_format;

use prost::Message;

use crate::tensor::DataType;

/// The file within a model file that is a directory. As in Triton, such a directory holds an ONNX
/// file and its external data.
pub const FILE_IN_DIRECTORY: &str = "model.onnx";

/// The extensions of files whose signature [`signature`] reads.
pub const EXTENSIONS: [&str; 2] = ["onnx", ort_format::EXTENSION];

/// Returns whether a file of this name is in ORT format, which only ONNX Runtime reads.
pub fn is_ort_format(file_name: &str) -> bool {
    file_name.rsplit_once('.').is_some_and(|(_, extension)| extension == ort_format::EXTENSION)
}

/// One input or output of a model file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignatureTensor {
    /// Its name.
    pub name: String,
    /// The datatype of its elements.
    pub datatype: DataType,
    /// All dimensions, including the batch; -1 for a variable dimension. `None` if the file does
    /// not declare a shape.
    pub dims: Option<Vec<i64>>,
    /// The name of the first dimension, if it is variable and has one. Dimensions of the same name
    /// have the same size.
    pub first_dim_name: Option<String>,
}

/// The inputs and outputs of a model file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelSignature {
    /// Inputs that a request must provide, in the file's order.
    pub inputs: Vec<SignatureTensor>,
    /// Outputs that are tensors, in the file's order.
    pub outputs: Vec<SignatureTensor>,
    /// Names of outputs that are not tensors and therefore cannot be served: sequences and maps,
    /// which classifiers converted from scikit-learn have.
    pub omitted_outputs: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, optional, tag = "7")]
    graph: Option<GraphProto>,
}

#[derive(Clone, PartialEq, Message)]
struct GraphProto {
    #[prost(message, repeated, tag = "5")]
    initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    output: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "15")]
    sparse_initializer: Vec<SparseTensorProto>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorProto {
    #[prost(string, tag = "8")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct SparseTensorProto {
    #[prost(message, optional, tag = "1")]
    values: Option<TensorProto>,
}

#[derive(Clone, PartialEq, Message)]
struct ValueInfoProto {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    r#type: Option<TypeProto>,
}

#[derive(Clone, PartialEq, Message)]
struct TypeProto {
    #[prost(message, optional, tag = "1")]
    tensor_type: Option<TensorTypeProto>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorTypeProto {
    #[prost(int32, tag = "1")]
    elem_type: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<TensorShapeProto>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorShapeProto {
    #[prost(message, repeated, tag = "1")]
    dim: Vec<DimensionProto>,
}

/// A dimension with a name or without a value is variable.
#[derive(Clone, PartialEq, Message)]
struct DimensionProto {
    #[prost(int64, optional, tag = "1")]
    dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    dim_param: Option<String>,
}

/// A graph as either format declares it.
#[derive(Debug, Default)]
struct Graph<'a> {
    /// The names of the weights, which may be among the inputs.
    weights: Vec<&'a str>,
    inputs: Vec<Value<'a>>,
    outputs: Vec<Value<'a>>,
}

/// An input or output of a graph.
#[derive(Debug)]
struct Value<'a> {
    name: &'a str,
    /// `None` for a sequence or a map.
    tensor: Option<Tensor<'a>>,
}

/// The type of a tensor.
#[derive(Debug)]
struct Tensor<'a> {
    /// A number of ONNX's `TensorProto.DataType`.
    element_type: i32,
    /// `None` if the file does not declare a shape.
    dims: Option<Vec<Dimension<'a>>>,
}

/// A dimension of a tensor.
#[derive(Clone, Copy, Debug)]
enum Dimension<'a> {
    Fixed(i64),
    Named(&'a str),
    Unknown,
}

/// The beginning of the names that `tf2onnx` makes for dimensions of unknown size, a new name for
/// each: `unk__12`.
const UNKNOWN: &str = "unk__";

impl<'a> Dimension<'a> {
    fn of(value: Option<i64>, name: Option<&'a str>) -> Self {
        match (value, name) {
            (Some(value), _) if value > 0 => Self::Fixed(value),
            (_, Some(name)) if !name.is_empty() && !name.starts_with(UNKNOWN) => Self::Named(name),
            _ => Self::Unknown,
        }
    }
}

impl ValueInfoProto {
    fn value(&self) -> Value<'_> {
        let tensor = self.r#type.as_ref().and_then(|kind| kind.tensor_type.as_ref());
        Value { name: &self.name, tensor: tensor.map(TensorTypeProto::tensor) }
    }
}

impl TensorTypeProto {
    fn tensor(&self) -> Tensor<'_> {
        let dims = self
            .shape
            .as_ref()
            .map(|shape| shape.dim.iter().map(DimensionProto::dimension).collect());
        Tensor { element_type: self.elem_type, dims }
    }
}

impl DimensionProto {
    fn dimension(&self) -> Dimension<'_> {
        Dimension::of(self.dim_value, self.dim_param.as_deref())
    }
}

/// Reads the signature of a model in ONNX's format or, if the bytes have its mark, in ORT format.
///
/// # Errors
/// The bytes are not such a model, or an input is of a kind or datatype that the protocol does not
/// support. Never panics.
pub fn signature(bytes: &[u8]) -> Result<ModelSignature, String> {
    if ort_format::is_marked(bytes) {
        return signature_of(ort_format::graph(bytes)?);
    }
    let model = ModelProto::decode(bytes).map_err(|error| format!("not an ONNX model: {error}"))?;
    let graph = model.graph.ok_or("not an ONNX model: it has no graph")?;
    let mut weights: Vec<&str> =
        graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
    weights.extend(
        graph
            .sparse_initializer
            .iter()
            .filter_map(|sparse| Some(sparse.values.as_ref()?.name.as_str())),
    );
    let inputs = graph.input.iter().map(ValueInfoProto::value).collect();
    signature_of(Graph {
        weights,
        inputs,
        outputs: graph.output.iter().map(ValueInfoProto::value).collect(),
    })
}

fn signature_of(graph: Graph<'_>) -> Result<ModelSignature, String> {
    let Graph { mut weights, inputs, outputs } = graph;
    weights.sort_unstable();
    let mut signature = ModelSignature::default();
    for value in &inputs {
        // Before version 4 of ONNX's format, every weight is listed as an input too.
        if weights.binary_search(&value.name).is_ok() {
            continue;
        }
        let tensor = tensor(value, "input")?;
        signature.inputs.push(
            tensor.ok_or_else(|| {
                format!("input '{}' of the ONNX model is not a tensor", value.name)
            })?,
        );
    }
    for value in &outputs {
        match tensor(value, "output")? {
            Some(tensor) => signature.outputs.push(tensor),
            None => signature.omitted_outputs.push(value.name.to_owned()),
        }
    }
    if signature.outputs.is_empty() {
        return Err("the ONNX model has no output that is a tensor".to_owned());
    }
    Ok(signature)
}

fn tensor(value: &Value<'_>, role: &str) -> Result<Option<SignatureTensor>, String> {
    let Some(tensor) = &value.tensor else { return Ok(None) };
    let datatype = datatype(tensor.element_type).ok_or_else(|| {
        format!(
            "{role} '{}' of the ONNX model has element type {}, which the protocol cannot carry",
            value.name, tensor.element_type
        )
    })?;
    let first_dim_name = match tensor.dims.as_deref() {
        Some([Dimension::Named(name), ..]) => Some((*name).to_owned()),
        _ => None,
    };
    let dims = tensor.dims.as_ref().map(|dims| {
        dims.iter().map(|dim| if let Dimension::Fixed(size) = dim { *size } else { -1 }).collect()
    });
    Ok(Some(SignatureTensor { name: value.name.to_owned(), datatype, dims, first_dim_name }))
}

/// Returns the datatype for a number of ONNX's `TensorProto.DataType`.
fn datatype(number: i32) -> Option<DataType> {
    Some(match number {
        1 => DataType::Fp32,
        2 => DataType::Uint8,
        3 => DataType::Int8,
        4 => DataType::Uint16,
        5 => DataType::Int16,
        6 => DataType::Int32,
        7 => DataType::Int64,
        8 => DataType::Bytes,
        9 => DataType::Bool,
        10 => DataType::Fp16,
        11 => DataType::Fp64,
        12 => DataType::Uint32,
        13 => DataType::Uint64,
        16 => DataType::Bf16,
        _ => return None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value(name: &str, elem_type: i32, dims: Option<&[Option<i64>]>) -> ValueInfoProto {
        let shape = dims.map(|dims| TensorShapeProto {
            dim: dims
                .iter()
                .map(|&dim_value| DimensionProto { dim_value, dim_param: None })
                .collect(),
        });
        let tensor_type = Some(TensorTypeProto { elem_type, shape });
        ValueInfoProto { name: name.to_owned(), r#type: Some(TypeProto { tensor_type }) }
    }

    fn graph() -> GraphProto {
        let weight = |name: &str| TensorProto { name: name.to_owned() };
        GraphProto {
            initializer: vec![weight("w")],
            sparse_initializer: vec![SparseTensorProto { values: Some(weight("s")) }],
            input: vec![
                value("w", 1, Some(&[Some(3)])),
                value("image", 1, Some(&[None, Some(64), Some(-1)])),
                value("s", 1, Some(&[])),
            ],
            output: vec![
                value("label", 7, None),
                ValueInfoProto {
                    name: "probabilities".to_owned(),
                    r#type: Some(TypeProto { tensor_type: None }),
                },
            ],
        }
    }

    fn bytes(graph: GraphProto) -> Vec<u8> {
        ModelProto { graph: Some(graph) }.encode_to_vec()
    }

    #[test]
    fn the_signature_leaves_weights_and_non_tensors_out() {
        let image = SignatureTensor {
            name: "image".to_owned(),
            datatype: DataType::Fp32,
            dims: Some(vec![-1, 64, -1]),
            first_dim_name: None,
        };
        let label = SignatureTensor {
            name: "label".to_owned(),
            datatype: DataType::Int64,
            dims: None,
            first_dim_name: None,
        };
        let expected = ModelSignature {
            inputs: vec![image],
            outputs: vec![label],
            omitted_outputs: vec!["probabilities".to_owned()],
        };
        assert_eq!(signature(&bytes(graph())).unwrap(), expected);
    }

    /// A model as written by the ONNX project's library, with fields that are not declared here:
    /// versions, a producer, a node, weights as raw data, a named dimension and an operator set.
    #[test]
    fn undeclared_fields_are_skipped() {
        let mut model = vec![0x08, 0x08, 0x12, 0x04];
        model.extend(b"test");
        let mut inner = Vec::new();
        // node { input: "x" output: "y" }, then name: "graph"
        inner.extend([0x0a, 0x06, 0x0a, 0x01, b'x', 0x12, 0x01, b'y', 0x12, 0x01, b'g']);
        // initializer { dims: 2 data_type: 1 name: "w" raw_data: 8 bytes }
        inner.extend([
            0x2a, 0x11, 0x08, 0x02, 0x10, 0x01, 0x42, 0x01, b'w', 0x4a, 0x08, 1, 2, 3, 4, 5, 6, 7,
            8,
        ]);
        // input and output { name type { tensor_type { elem_type: 1 shape { dim { dim_param: "N" }
        // dim { dim_value: 2 } } } } }
        for (tag, name) in [(0x5a, b'x'), (0x62, b'y')] {
            inner.extend([
                tag, 0x16, 0x0a, 0x01, name, 0x12, 0x11, 0x0a, 0x0f, 0x08, 0x01, 0x12, 0x0b,
            ]);
            inner.extend([0x0a, 0x03, 0x12, 0x01, b'N', 0x0a, 0x04, 0x08, 0x02, 0x1a, 0x00]);
        }
        model.extend([0x3a, u8::try_from(inner.len()).unwrap()]);
        model.extend(inner);
        model.extend([0x42, 0x02, 0x10, 0x15]);
        let signature = signature(&model).unwrap();
        let tensor = |name: &str| SignatureTensor {
            name: name.to_owned(),
            datatype: DataType::Fp32,
            dims: Some(vec![-1, 2]),
            first_dim_name: Some("N".to_owned()),
        };
        assert_eq!((signature.inputs, signature.outputs), (vec![tensor("x")], vec![tensor("y")]));
    }

    #[test]
    fn refuses_models_that_cannot_be_served() {
        let change = |change: fn(&mut GraphProto)| {
            let mut graph = graph();
            change(&mut graph);
            signature(&bytes(graph)).unwrap_err()
        };
        assert_eq!(
            change(|graph| graph.input[1] = value("z", 14, None)),
            "input 'z' of the ONNX model has element type 14, which the protocol cannot carry"
        );
        assert_eq!(
            change(|graph| graph.input[1].r#type = None),
            "input 'image' of the ONNX model is not a tensor"
        );
        assert_eq!(
            change(|graph| graph.output.clear()),
            "the ONNX model has no output that is a tensor"
        );
        assert_eq!(signature(b"").unwrap_err(), "not an ONNX model: it has no graph");
        assert!(
            signature(b"PK\x03\x04 a zip file").unwrap_err().starts_with("not an ONNX model: ")
        );
    }

    proptest! {
        #[test]
        fn hostile_bytes_do_not_panic(noise in prop::collection::vec(any::<u8>(), 0..200), at in 0usize..200, byte: u8) {
            let _ = signature(&noise);
            let mut model = bytes(graph());
            if let Some(place) = model.get_mut(at) {
                *place = byte;
            }
            let _ = signature(&model);
            model.truncate(at);
            let _ = signature(&model);
        }
    }
}
