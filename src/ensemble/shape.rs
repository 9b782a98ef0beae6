//! Shapes between models that batch and models that do not, as in Triton's ensemble scheduler.

/// Returns the shape of a tensor as a model (or the ensemble's response) receives it. `dims` are
/// the receiver's dimensions without the batch, and `batches` is whether it has a batch dimension.
/// `shape` is the tensor's shape, and `batch` its batch size if its producer has a batch dimension.
///
/// Only `[1, ...]` and `[...]` are converted to each other. Any other shape is unchanged: it fits,
/// or the model refuses it.
pub fn fit(dims: &[i64], batches: bool, shape: &[i64], batch: Option<i64>) -> Vec<i64> {
    match (batches, batch) {
        (true, None) if agree(dims, shape) => {
            std::iter::once(1).chain(shape.iter().copied()).collect()
        }
        (false, Some(1)) if !agree(dims, shape) => shape.get(1..).unwrap_or_default().to_vec(),
        _ => shape.to_vec(),
    }
}

/// Returns whether dimensions can be equal; -1 matches any.
pub(super) fn agree(left: &[i64], right: &[i64]) -> bool {
    left.len() == right.len() && left.iter().zip(right).all(|(l, r)| l == r || *l == -1 || *r == -1)
}
