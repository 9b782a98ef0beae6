//! Graphs of text models.

use std::path::Path;

use parking_lot::Mutex;
use pharos::error::InferError;
use pharos_backend::{Context, load_error, run_error};
use pharos_text::graph::Graph;
use pharos_worker::{GraphTensor, ReadOutput};
use tract_onnx::prelude::{DatumType, TValue, TVec, Tensor, TractResult};
use tract_onnx::tract_hir::infer::Factoid;

use crate::{InferenceFact, InferenceModel, Plans, graph_names, readable};

/// A graph.
struct TractGraph {
    plans: Mutex<Plans>,
    inputs: Vec<GraphTensor>,
    /// Whether each input has integers of 32 bits.
    is_narrow: Vec<bool>,
    outputs: Vec<GraphTensor>,
}

/// Opens the graph of a text model.
///
/// # Errors
/// tract cannot run it.
pub(crate) fn open(_: &Context<'_>, path: &Path) -> Result<Box<dyn Graph>, InferError> {
    let unusable = |error: &dyn std::fmt::Display| {
        load_error(format!("tract cannot load '{}': {error}", path.display()))
    };
    let model = readable(path).map_err(|error| unusable(&error))?;
    let graph = graph(model).map_err(|error| unusable(&format!("{error:#}")))?;
    Ok(Box::new(graph.map_err(|error| unusable(&error))?))
}

fn graph(mut model: InferenceModel) -> TractResult<Result<TractGraph, String>> {
    let (inputs, outputs) = graph_names(&model)?;
    let mut is_narrow = Vec::new();
    for (index, name) in inputs.iter().enumerate() {
        let datum = model.input_fact(index)?.datum_type.concretize();
        is_narrow.push(match datum {
            Some(DatumType::I32) => true,
            None | Some(DatumType::I64 | DatumType::TDim) => false,
            Some(other) => {
                return Ok(Err(format!(
                    "it has the input '{name}' of the type {other:?}; inputs of INT64 and INT32 are \
                     possible"
                )));
            }
        });
    }
    let ranks: Vec<Option<usize>> = (0..outputs.len())
        .map(|index| {
            let fact = model.output_fact(index).ok()?;
            fact.shape.rank().concretize().and_then(|rank| usize::try_from(rank).ok())
        })
        .collect();
    // Output facts in the file can be wrong; tract derives them itself.
    for output in 0..outputs.len() {
        model = model.with_output_fact(output, InferenceFact::default())?;
    }
    let named = |names: Vec<String>, ranks: Vec<Option<usize>>| {
        names.into_iter().zip(ranks).map(|(name, rank)| GraphTensor { name, rank }).collect()
    };
    let unknown = vec![None; inputs.len()];
    Ok(Plans::new(model).map(|plans| TractGraph {
        plans: Mutex::new(plans),
        inputs: named(inputs, unknown),
        is_narrow,
        outputs: named(outputs, ranks),
    }))
}

impl Graph for TractGraph {
    fn engine(&self) -> String {
        "tract 0.23".to_owned()
    }

    fn inputs(&self) -> &[GraphTensor] {
        &self.inputs
    }

    fn outputs(&self) -> &[GraphTensor] {
        &self.outputs
    }

    fn run(
        &self,
        rows: usize,
        length: usize,
        inputs: &[Vec<i64>],
        output: usize,
        read: ReadOutput<'_>,
    ) -> Result<(), InferError> {
        let failed = |error| run_error(format!("tract: {error:#}"));
        let shape = [rows, length];
        let tensors = inputs.iter().zip(&self.is_narrow).map(|(values, is_narrow)| {
            let tensor = match is_narrow {
                // Numbers of tokens and positions.
                true => {
                    let values: Vec<i32> = values.iter().map(|value| *value as i32).collect();
                    Tensor::from_shape(&shape, &values)
                }
                false => Tensor::from_shape(&shape, values),
            };
            tensor.map(TValue::from)
        });
        let tensors: TVec<TValue> = tensors.collect::<TractResult<_>>().map_err(failed)?;
        let plan = self.plans.lock().plan(&tensors).map_err(failed)?;
        let results = plan.run(tensors).map_err(failed)?;
        let result = results.get(output);
        let result = result.ok_or_else(|| run_error("the graph does not have this output"))?;
        let result = result.cast_to::<f32>().map_err(failed)?;
        let view = result.try_as_plain_ram().map_err(failed)?;
        read(result.shape(), view.as_slice::<f32>().map_err(failed)?)
    }
}
