//! From `pb_utils.InferenceResponse` to what the server sends.

use pharos_backend::{Reply, ReplyOutput, Responder};
use pyo3::prelude::*;

use crate::error::TritonModelException;
use crate::model::Model;
use crate::response::InferenceResponse;
use crate::tensor::Tensor;

/// A response with the outputs that the client asks for: others that the model gives are left out, as are tensors that the
/// configuration has no output for. Elements that are on a device, and wanted on one, are copied there.
///
/// # Errors
/// There is no memory left for an output, or its elements cannot be had.
pub(crate) fn of(
    py: Python<'_>,
    (model, wanted): (&Model, &[u16]),
    responder: &Responder,
    response: &InferenceResponse,
) -> PyResult<Reply> {
    let parameters = response.parameters.clone();
    if let Some(error) = &response.error {
        return Ok(Reply { outputs: Vec::new(), parameters, error: Some(error.get().to_server()) });
    }
    // All are looked at before any is copied to where its client has it.
    let mut chosen: Vec<(usize, &Tensor)> = Vec::with_capacity(response.tensors.len());
    for tensor in &response.tensors {
        let tensor = tensor.get();
        let Some(output) = model.output(tensor.name()) else { continue };
        if !wanted.is_empty() && !wanted.iter().any(|wanted| usize::from(*wanted) == output) {
            continue;
        }
        check(model, output, tensor, &chosen)?;
        chosen.push((output, tensor));
    }
    let mut outputs = Vec::with_capacity(chosen.len());
    for (output, tensor) in chosen {
        let placed = tensor.placed(py, &model.runtime, |len| responder.place_on_device(output, len))?;
        let content = match placed {
            Some(placed) => placed,
            None => tensor.content(py, &model.runtime)?,
        };
        outputs.push(ReplyOutput { output, datatype: tensor.datatype(), shape: tensor.shape().to_vec(), content });
    }
    Ok(Reply { outputs, parameters, error: None })
}

/// Whether the server would take an output: else it would take the worker for a broken one.
fn check(model: &Model, output: usize, tensor: &Tensor, before: &[(usize, &Tensor)]) -> PyResult<()> {
    let name = tensor.name();
    let expected = model.config.outputs.get(output).map_or(tensor.datatype(), |output| output.datatype);
    if model.config.strict_output_types && tensor.datatype() != expected {
        let given = tensor.datatype();
        let text = format!("output '{name}' is {given}, the configuration says {expected}");
        return Err(TritonModelException::new_err(text));
    }
    if before.iter().any(|(before, _)| *before == output) {
        return Err(TritonModelException::new_err(format!("the response has the output '{name}' twice")));
    }
    Ok(())
}
