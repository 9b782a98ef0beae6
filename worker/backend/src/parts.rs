//! The parts of a batch's inputs that belong to each request, for backends that pass requests
//! individually to a model.

use std::ops::Range;

use pharos::batch_split;
use pharos::error::InferError;
use pharos::tensor::{DataType, byte_size, element_count};

use crate::batch::{Batch, Input, ReceivedPiece};
use crate::session::Runtime;

/// One request's part of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestPart {
    /// Its shape, with the request's rows first if the model batches.
    pub shape: Vec<i64>,
    /// Its range in [`Input::data`].
    pub bytes: Range<usize>,
}

/// One request's part of an input, which outlives the batch.
pub struct ReceivedPart {
    /// Its shape, with the request's rows first if the model batches.
    pub shape: Vec<i64>,
    /// Its bytes. Memory on a device is aligned; see
    /// [`ReceivedOnDevice::is_aligned`](crate::ReceivedOnDevice::is_aligned).
    pub bytes: ReceivedPiece,
}

impl Batch<'_> {
    /// Whether an input has a part for each request: an input of the configuration, a sequence
    /// control or a state. The inputs of `batch_input` describe the batch as a whole.
    pub fn has_parts(&self, input: &Input<'_>) -> bool {
        let config = self.config();
        input.index < config.inputs.len() || input.index >= config.first_control()
    }

    /// Returns each request's part of the input at this position of [`Batch::inputs`], as handles
    /// that outlive the batch. A part in a client's memory on a device stays there if it is aligned,
    /// and is copied to the process otherwise.
    ///
    /// # Errors
    /// There is no such input, it contradicts its description, or the driver cannot copy it.
    pub fn received_parts(
        &self,
        position: usize,
        runtime: &Runtime,
    ) -> Result<Vec<ReceivedPart>, InferError> {
        let missing = || InferError::internal(format!("input {position} is missing in the batch"));
        let input = self.inputs.get(position).ok_or_else(missing)?;
        if input.pieces.is_empty() {
            let all = self.received(position).ok_or_else(missing)?;
            return self.cut(input, |shape, bytes| {
                let part = if bytes.len() == all.len() { all.clone() } else { all.slice(bytes) };
                ReceivedPart { shape, bytes: ReceivedPiece::Host(part) }
            });
        }
        let shapes = self.shapes_of(input);
        if shapes.len() != input.pieces.len() {
            return Err(missing());
        }
        let parts = shapes.into_iter().zip(input.pieces).enumerate().map(|(at, (shape, piece))| {
            if byte_size(input.datatype, &shape) != Some(piece.len() as u64) {
                return Err(contradicts(input));
            }
            let bytes = match self.received_piece(position, at).ok_or_else(missing)? {
                ReceivedPiece::Device(kept) if !kept.is_aligned() => {
                    ReceivedPiece::Host(runtime.fetch(kept.memory())?)
                }
                bytes => bytes,
            };
            Ok(ReceivedPart { shape, bytes })
        });
        parts.collect()
    }

    /// Returns each request's part of an input that is in the process's memory.
    ///
    /// # Errors
    /// The input contradicts its description.
    pub fn parts_of(&self, input: &Input<'_>) -> Result<Vec<RequestPart>, InferError> {
        self.cut(input, |shape, bytes| RequestPart { shape, bytes })
    }

    /// Calls `make` with each request's shape, and its range of bytes, of an input in the process's
    /// memory.
    fn cut<T>(
        &self,
        input: &Input<'_>,
        mut make: impl FnMut(Vec<i64>, Range<usize>) -> T,
    ) -> Result<Vec<T>, InferError> {
        if let Some(shapes) = self.ragged_shapes(input) {
            let ends = ragged_ends(input, &shapes)?;
            return Ok(between(&ends, shapes.into_iter(), make));
        }
        let mut whole = || make(input.shape.to_vec(), 0..input.data.len());
        if let [_] = self.requests {
            return Ok(vec![whole()]);
        }
        let rows: Vec<u64> = self.requests.iter().map(|request| u64::from(request.rows)).collect();
        let all = rows.iter().sum::<u64>();
        if !self.config().batches()
            || input.shape.first().is_none_or(|first| u64::try_from(*first) != Ok(all))
        {
            return Ok(self.requests.iter().map(|_| whole()).collect());
        }
        let ends = match input.datatype {
            DataType::Bytes => {
                batch_split::text_ends(input.data, element_count(input.shape).unwrap_or(0), &rows)
            }
            _ => Some(batch_split::fixed_ends(input.data.len(), &rows)),
        };
        let ends = ends.ok_or_else(|| contradicts(input))?;
        let shapes = rows.iter().map(|rows| {
            let rest = input.shape.iter().skip(1).copied();
            std::iter::once(rows.cast_signed()).chain(rest).collect()
        });
        Ok(between(&ends, shapes, make))
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

/// Returns the ends, in bytes, of the parts of an input whose requests have these shapes.
fn ragged_ends(input: &Input<'_>, shapes: &[Vec<i64>]) -> Result<Vec<usize>, InferError> {
    let counts: Vec<u64> = shapes.iter().map(|shape| element_count(shape).unwrap_or(0)).collect();
    let ends = match input.datatype {
        DataType::Bytes => batch_split::text_ends(input.data, counts.iter().sum(), &counts),
        _ => Some(batch_split::fixed_ends(input.data.len(), &counts)),
    };
    ends.ok_or_else(|| contradicts(input))
}

fn contradicts(input: &Input<'_>) -> InferError {
    InferError::internal(format!("input '{}' does not match its shape", input.name))
}

/// Calls `make` for the parts that end at these bytes, each of which begins at the end of the
/// previous one.
fn between<T>(
    ends: &[usize],
    shapes: impl Iterator<Item = Vec<i64>>,
    mut make: impl FnMut(Vec<i64>, Range<usize>) -> T,
) -> Vec<T> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let ranges = starts.zip(ends.iter().copied()).map(|(start, end)| start..end);
    ranges.zip(shapes).map(|(bytes, shape)| make(shape, bytes)).collect()
}
