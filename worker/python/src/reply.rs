//! Converts a `pb_utils.InferenceResponse` to a reply of the worker.

use pharos_backend::{Content, Reply, ReplyOutput, Responder, Runtime};
use pyo3::prelude::*;

use crate::error::TritonModelException;
use crate::model::Model;
use crate::output;
use crate::response::InferenceResponse;
use crate::tensor::Tensor;

/// Builds a reply with the requested outputs. Ignores other outputs and tensors that are not in the
/// configuration. Copies elements on a device to device memory where the client has requested that.
///
/// # Errors
/// Memory allocation failed, or elements cannot be read.
pub(crate) fn of(
    py: Python<'_>,
    model: &Model,
    wanted: &[u16],
    responder: &Responder,
    response: &InferenceResponse,
) -> PyResult<Reply> {
    let parameters = response.parameters.clone();
    if let Some(error) = &response.error {
        return Ok(Reply { outputs: Vec::new(), parameters, error: Some(error.get().to_server()) });
    }
    // Check all outputs before copying any into client memory.
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
        let placed =
            tensor.placed(py, &model.runtime, |len| responder.place_on_device(output, len))?;
        let content = match placed {
            Some(placed) => placed,
            None => tensor.content(py, &model.runtime)?,
        };
        outputs.push(ReplyOutput {
            output,
            datatype: tensor.datatype(),
            shape: tensor.shape().to_vec(),
            content,
        });
    }
    Ok(Reply { outputs, parameters, error: None })
}

/// Copies the outputs that are views of inputs: the model may write to these after it has sent the
/// response.
///
/// # Errors
/// Memory allocation failed.
pub(crate) fn copy_inputs(py: Python<'_>, reply: &mut Reply, runtime: &Runtime) -> PyResult<()> {
    for output in &mut reply.outputs {
        if let Content::Received(bytes) = &output.content {
            let mut memory = output::allocate(runtime, bytes.len())?;
            py.detach(|| memory.copy_from_slice(bytes));
            output.content = Content::Memory(memory);
        }
    }
    Ok(())
}

/// Checks an output as the server does, which would take the worker for broken otherwise.
fn check(
    model: &Model,
    output: usize,
    tensor: &Tensor,
    before: &[(usize, &Tensor)],
) -> PyResult<()> {
    let name = tensor.name();
    let expected =
        model.config.outputs.get(output).map_or(tensor.datatype(), |output| output.datatype);
    if model.config.strict_output_types && tensor.datatype() != expected {
        let given = tensor.datatype();
        let text = format!("output '{name}' is {given}, but its configured datatype is {expected}");
        return Err(TritonModelException::new_err(text));
    }
    if before.iter().any(|(before, _)| *before == output) {
        return Err(TritonModelException::new_err(format!(
            "the response has the output '{name}' twice"
        )));
    }
    Ok(())
}
