//! Graphs on ONNX Runtime.

use std::path::Path;

use half::f16;
use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, TensorElementType, TensorRef, ValueType};
use pharos::error::InferError;
use pharos_backend::{Context, load_error, run_error};
use pharos_worker::open_session;

use crate::graph::{Computed, Graph, Port};

/// A graph in a session.
struct OnSession {
    session: Session,
    version: String,
    inputs: Vec<Port>,
    /// Whether each input has integers of 32 bits.
    is_narrow: Vec<bool>,
    outputs: Vec<Port>,
}

/// Opens a graph.
///
/// # Errors
/// ONNX Runtime cannot load it, or it has an input that is not of integers.
pub(crate) fn open(context: &Context<'_>, path: &Path) -> Result<Box<dyn Graph>, InferError> {
    let (session, version) = open_session(context, path)?;
    let mut is_narrow = Vec::new();
    for input in session.inputs() {
        is_narrow.push(match input.dtype() {
            ValueType::Tensor { ty: TensorElementType::Int64, .. } => false,
            ValueType::Tensor { ty: TensorElementType::Int32, .. } => true,
            other => {
                return Err(load_error(format!(
                    "the graph '{}' has the input '{}' of the type {other}; a text model has inputs of \
                     INT64 or INT32",
                    path.display(),
                    input.name()
                )));
            }
        });
    }
    let ports = |found: &[ort::value::Outlet]| {
        let port = |outlet: &ort::value::Outlet| Port {
            name: outlet.name().to_owned(),
            rank: outlet.dtype().tensor_shape().map(|shape| shape.len()),
        };
        found.iter().map(port).collect()
    };
    let (inputs, outputs) = (ports(session.inputs()), ports(session.outputs()));
    Ok(Box::new(OnSession { session, version, inputs, is_narrow, outputs }))
}

impl Graph for OnSession {
    fn engine(&self) -> String {
        format!("onnxruntime {}", self.version)
    }

    fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    fn run(
        &mut self,
        rows: usize,
        length: usize,
        inputs: &[Vec<i64>],
        output: usize,
        read: &mut dyn FnMut(Computed<'_>) -> Result<(), InferError>,
    ) -> Result<(), InferError> {
        let failed = |error: ort::Error| run_error(format!("onnx runtime error: {error}"));
        let narrow: Vec<Vec<i32>> = inputs
            .iter()
            .zip(&self.is_narrow)
            .map(|(values, is_narrow)| match is_narrow {
                // Numbers of tokens and positions.
                true => values.iter().map(|value| *value as i32).collect(),
                false => Vec::new(),
            })
            .collect();
        let mut values: Vec<SessionInputValue<'_>> = Vec::with_capacity(inputs.len());
        for ((wide, narrow), is_narrow) in inputs.iter().zip(&narrow).zip(&self.is_narrow) {
            let shape = [rows, length];
            values.push(match is_narrow {
                true => TensorRef::from_array_view((shape, narrow.as_slice())).map_err(failed)?.into(),
                false => TensorRef::from_array_view((shape, wide.as_slice())).map_err(failed)?.into(),
            });
        }
        let results = self.session.run(values.as_slice()).map_err(failed)?;
        let missing = || run_error("onnx runtime has not computed an output");
        let (_, value) = results.iter().nth(output).ok_or_else(missing)?;
        read_numbers(&value, read)
    }
}

/// Calls a function with the numbers in a value.
fn read_numbers(
    value: &DynValue,
    read: &mut dyn FnMut(Computed<'_>) -> Result<(), InferError>,
) -> Result<(), InferError> {
    let sizes = |shape: &[i64]| -> Vec<usize> {
        shape.iter().map(|size| usize::try_from(*size).unwrap_or(0)).collect()
    };
    if let Ok((shape, values)) = value.try_extract_tensor::<f32>() {
        return read(Computed { shape: &sizes(shape), values });
    }
    match value.try_extract_tensor::<f16>() {
        Ok((shape, values)) => {
            let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
            read(Computed { shape: &sizes(shape), values: &values })
        }
        Err(_) => Err(run_error(format!(
            "the output of the graph has the type {}; a text model has outputs of FP32 or FP16",
            value.dtype()
        ))),
    }
}
