//! The tensors that every contract has: texts and tokens.

use pharos::infer::InferInput;
use pharos::tensor::{DataType, Tensor, push_bytes_element};

use crate::error::ApiError;

/// Returns texts as the data of a tensor of strings.
///
/// # Errors
/// A text is too long.
pub(crate) fn texts<'t>(texts: impl IntoIterator<Item = &'t str>) -> Result<Vec<u8>, ApiError> {
    let mut data = Vec::new();
    for text in texts {
        if !push_bytes_element(&mut data, text.as_bytes()) {
            return Err(ApiError::invalid_request("a text of the request has 4 GiB or more"));
        }
    }
    Ok(data)
}

/// Returns token ids as the data of a tensor of integers.
pub(crate) fn tokens(datatype: DataType, tokens: &[u32]) -> Vec<u8> {
    match datatype {
        DataType::Int64 | DataType::Uint64 => {
            tokens.iter().flat_map(|id| u64::from(*id).to_le_bytes()).collect()
        }
        _ => tokens.iter().flat_map(|id| id.to_le_bytes()).collect(),
    }
}

/// Returns an input with this many elements in its last dimension. The `rank` includes the dimension
/// of a batch; all other dimensions are 1.
pub(crate) fn input(
    name: &str,
    datatype: DataType,
    rank: usize,
    elements: usize,
    data: Vec<u8>,
) -> InferInput {
    let mut shape = vec![1; rank];
    if let Some(last) = shape.last_mut() {
        *last = elements as i64;
    }
    InferInput { name: name.to_owned(), tensor: Tensor { datatype, shape, data: data.into() } }
}

/// Returns the error of a field for which a model has no tensor.
pub(crate) fn no_tensor(model: &str, field: &str, tensor: &str) -> ApiError {
    ApiError::invalid_field(
        field,
        format!("{field} is not available with the model '{model}': it has no tensor '{tensor}'"),
    )
}
