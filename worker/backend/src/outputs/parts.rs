//! Batches that are executed in parts, and outputs that are not sent. For the worker's runtime.

use pharos::error::InferError;
use pharos::tensor::DataType;

use super::Outputs;
use crate::error::run_error;

/// An output that a backend has produced.
pub struct MadeOutput<'o> {
    /// Position in the backend's outputs.
    pub output: usize,
    /// The type of its elements.
    pub datatype: DataType,
    /// Its shape.
    pub shape: &'o [i64],
    /// Its bytes.
    pub data: &'o [u8],
}

impl Outputs<'_> {
    /// Limits the following outputs to the requests at these positions of the batch; empty means all.
    #[doc(hidden)]
    pub fn begin_part(&mut self, positions: &[u32]) {
        self.part = positions.to_vec();
        self.part_from = self.blocks.len();
    }

    /// Fails the requests of this part and releases its outputs.
    #[doc(hidden)]
    pub fn fail_part(&mut self, error: &InferError) {
        let made = self.blocks.split_off(self.part_from.min(self.blocks.len()));
        self.withdrawn.extend(made.iter().filter(|block| !block.in_client_memory).map(|block| block.offset));
        for position in 0..self.part.len() {
            self.fail(position, error.clone());
        }
    }

    /// Whether the request at this position of the part has failed.
    #[doc(hidden)]
    pub fn has_failed_in_part(&self, position: usize) -> bool {
        self.has_failed(self.position(position))
    }

    /// Returns the wanted outputs of this part.
    ///
    /// # Errors
    /// One of them is not in the arena.
    #[doc(hidden)]
    pub fn made(&self, wanted: impl Fn(usize) -> bool) -> Result<Vec<MadeOutput<'_>>, InferError> {
        let made = self.blocks.get(self.part_from..).unwrap_or_default();
        let made = made.iter().filter(|block| wanted(usize::from(block.output))).map(|block| {
            let data = self.arena.bytes(block.offset, block.len)?;
            let (output, datatype) = (usize::from(block.output), block.datatype);
            Some(MadeOutput { output, datatype, shape: &block.shape, data })
        });
        made.collect::<Option<_>>().ok_or_else(|| run_error("an output is not in the arena"))
    }
}
