//! Shapes between models that batch and models that do not, as in Triton's ensemble scheduler.

/// The shape that a model (or the ensemble's response) takes a tensor in. `dims` are its dimensions without the batch,
/// `batches` says whether it has one; `shape` is what the tensor has, and `batch` its batch if what made it has one.
///
/// Only `[1, ...]` and `[...]` turn into each other. Everything else stays as it is: it fits, or the model refuses it.
pub fn fit(dims: &[i64], batches: bool, shape: &[i64], batch: Option<i64>) -> Vec<i64> {
    match (batches, batch) {
        (true, None) if agree(dims, shape) => std::iter::once(1).chain(shape.iter().copied()).collect(),
        (false, Some(1)) if !agree(dims, shape) => shape.get(1..).unwrap_or_default().to_vec(),
        _ => shape.to_vec(),
    }
}

/// Whether dimensions can be the same; -1 is any.
pub(super) fn agree(left: &[i64], right: &[i64]) -> bool {
    left.len() == right.len() && left.iter().zip(right).all(|(l, r)| l == r || *l == -1 || *r == -1)
}
