//! The parts of a batch's inputs that belong to each request, for backends that pass requests
//! individually to a model.

use std::ops::Range;

use pharos::batch_split;
use pharos::error::InferError;
use pharos::tensor::{DataType, element_count};

use crate::batch::{Batch, Input};

/// One request's part of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPart {
    /// Its shape, with the request's rows first if the model batches.
    pub shape: Vec<i64>,
    /// Its range in [`Input::data`].
    pub bytes: Range<usize>,
}

impl Batch<'_> {
    /// Whether an input has a part for each request: an input of the configuration, a sequence
    /// control or a state. The inputs of `batch_input` describe the batch as a whole.
    pub fn has_parts(&self, input: &Input<'_>) -> bool {
        let config = self.config();
        input.index < config.inputs.len() || input.index >= config.first_control()
    }

    /// Returns each request's part of an input that is in the process's memory.
    ///
    /// # Errors
    /// The input contradicts its description.
    pub fn parts_of(&self, input: &Input<'_>) -> Result<Vec<RequestPart>, InferError> {
        let whole = || RequestPart { shape: input.shape.to_vec(), bytes: 0..input.data.len() };
        if let Some(shapes) = self.ragged_shapes(input) {
            return cut_ragged(input, shapes);
        }
        let rows: Vec<u64> = self.requests.iter().map(|request| u64::from(request.rows)).collect();
        let all = rows.iter().sum::<u64>();
        if !self.config().batches()
            || input.shape.first().is_none_or(|first| u64::try_from(*first) != Ok(all))
        {
            return Ok(self.requests.iter().map(|_| whole()).collect());
        }
        if rows.len() == 1 {
            return Ok(vec![whole()]);
        }
        let ends = match input.datatype {
            DataType::Bytes => {
                batch_split::text_ends(input.data, element_count(input.shape).unwrap_or(0), &rows)
            }
            _ => Some(batch_split::fixed_ends(input.data.len(), &rows)),
        };
        let ends = ends.ok_or_else(|| {
            InferError::internal(format!("input '{}' does not match its shape", input.name))
        })?;
        let shapes = rows.iter().map(|rows| {
            let rest = input.shape.iter().skip(1).copied();
            std::iter::once(rows.cast_signed()).chain(rest).collect()
        });
        Ok(between(&ends, shapes))
    }

    /// Returns the shape of each request's part of an input.
    pub fn shapes_of(&self, input: &Input<'_>) -> Vec<Vec<i64>> {
        if let Some(shapes) = self.ragged_shapes(input) {
            return shapes;
        }
        self.requests
            .iter()
            .map(|request| match input.shape {
                [_, rest @ ..] if self.config().batches() => {
                    std::iter::once(i64::from(request.rows)).chain(rest.iter().copied()).collect()
                }
                shape => shape.to_vec(),
            })
            .collect()
    }

    /// Returns the shapes of each request's part of a ragged input; `None` for other inputs.
    fn ragged_shapes(&self, input: &Input<'_>) -> Option<Vec<Vec<i64>>> {
        let spec = self.config().inputs.get(input.index)?;
        if !self.config().batches() || !spec.allow_ragged_batch {
            return None;
        }
        self.requests
            .iter()
            .map(|request| {
                let mut ragged = request.details.as_ref()?.ragged.iter();
                ragged
                    .find(|(position, _)| usize::from(*position) == input.index)
                    .map(|(_, shape)| shape.clone())
            })
            .collect()
    }
}

/// Returns a request's inputs, which have these positions in the configuration, in the client's
/// order ([`Details::input_order`](pharos::wire::Details::input_order)). Inputs that are not from
/// the client follow.
pub fn in_clients_order<T>(inputs: Vec<T>, positions: &[usize], order: &[u16]) -> Vec<T> {
    if order.is_empty() {
        return inputs;
    }
    let place = |position: usize| {
        order.iter().position(|at| usize::from(*at) == position).unwrap_or(order.len())
    };
    let mut placed: Vec<_> =
        positions.iter().map(|position| place(*position)).zip(inputs).collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, input)| input).collect()
}

/// Returns the parts of an input whose requests have these shapes.
fn cut_ragged(input: &Input<'_>, shapes: Vec<Vec<i64>>) -> Result<Vec<RequestPart>, InferError> {
    let counts: Vec<u64> = shapes.iter().map(|shape| element_count(shape).unwrap_or(0)).collect();
    let ends = match input.datatype {
        DataType::Bytes => batch_split::text_ends(input.data, counts.iter().sum(), &counts),
        _ => Some(batch_split::fixed_ends(input.data.len(), &counts)),
    };
    let ends = ends.ok_or_else(|| {
        InferError::internal(format!("input '{}' does not match its shapes", input.name))
    })?;
    Ok(between(&ends, shapes.into_iter()))
}

/// Returns the parts that end at these bytes, each beginning at the end of the previous one.
fn between(ends: &[usize], shapes: impl Iterator<Item = Vec<i64>>) -> Vec<RequestPart> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let ranges = starts.zip(ends.iter().copied()).map(|(start, end)| start..end);
    ranges.zip(shapes).map(|(bytes, shape)| RequestPart { shape, bytes }).collect()
}
