//! From `pb_utils.InferenceResponse` to what the server sends.

use pharos_worker::backend::{Reply, ReplyOutput};
use pyo3::prelude::*;

use crate::model::Model;
use crate::response::InferenceResponse;

/// A response with the outputs that the client asks for: others that the model gives are left out, as are tensors that the
/// configuration has no output for.
///
/// # Errors
/// There is no memory left for an output, or its elements cannot be had.
pub(crate) fn of(py: Python<'_>, model: &Model, wanted: &[u16], response: &InferenceResponse) -> PyResult<Reply> {
    let parameters = response.parameters.clone();
    if let Some(error) = &response.error {
        return Ok(Reply { outputs: Vec::new(), parameters, error: Some(error.get().to_server()) });
    }
    let mut outputs = Vec::with_capacity(response.tensors.len());
    for tensor in &response.tensors {
        let tensor = tensor.get();
        let Some(output) = model.output(tensor.name()) else { continue };
        if !wanted.is_empty() && !wanted.iter().any(|wanted| usize::from(*wanted) == output) {
            continue;
        }
        let content = tensor.content(py, &model.runtime)?;
        outputs.push(ReplyOutput { output, datatype: tensor.datatype(), shape: tensor.shape().to_vec(), content });
    }
    Ok(Reply { outputs, parameters, error: None })
}
