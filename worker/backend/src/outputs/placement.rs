//! Outputs that clients want in their memory.
//!
//! A request whose region cannot be used, or was truncated meanwhile, fails without affecting the others.

use pharos::error::InferError;
use pharos::wire::{OutputBlock, Placement};

use super::Outputs;
use crate::client_memory::used_regions;
use crate::error::run_error;

impl Outputs<'_> {
    /// Fails the requests whose memory was truncated meanwhile. For the worker's runtime.
    #[doc(hidden)]
    pub fn check_client_memory(&mut self) {
        let Some(memory) = &self.client_memory else { return };
        let used = used_regions(self.execute).filter(|(request, _)| !self.has_failed(*request));
        let wrong: Vec<_> =
            used.filter_map(|(request, region)| Some((request, memory.regions().check(region).err()?))).collect();
        for (request, error) in wrong {
            self.fail_whole(request, error);
        }
    }

    /// Copies outputs to the locations that clients want, unless the backend wrote them there. If the whole batch failed,
    /// converts its error into errors of its requests.
    pub(super) fn place(&mut self, error: Option<InferError>) -> Option<InferError> {
        if self.client_memory.is_none() {
            return error;
        }
        let execute = self.execute;
        if let Some(error) = error {
            self.check_client_memory();
            for request in (0u32..).zip(&execute.requests).map(|(position, _)| position) {
                self.fail_whole(request, error.clone());
            }
            let made = std::mem::take(&mut self.blocks);
            self.withdrawn.extend(made.iter().filter(|block| !block.in_client_memory).map(|block| block.offset));
            return None;
        }
        for placement in &execute.placements {
            // A rescheduled request has no outputs yet.
            if self.has_failed(placement.request) || self.rescheduled.contains(&placement.request) {
                continue;
            }
            if let Err(error) = self.place_one(placement) {
                self.fail_whole(placement.request, error);
            }
        }
        self.check_client_memory();
        None
    }

    fn place_one(&self, placement: &Placement) -> Result<(), InferError> {
        let Some(memory) = &self.client_memory else { return Ok(()) };
        let name = self.output_name(placement.output);
        for block in self.blocks.iter().filter(|block| block.output == placement.output && !block.in_client_memory) {
            let bytes = self.bytes_of(block, name)?;
            if !block.requests.is_empty() && !block.requests.contains(&placement.request) {
                continue;
            }
            let part = memory.part(block, bytes, placement.request).and_then(|part| bytes.get(part));
            let part = part.ok_or_else(|| run_error(format!("cannot split output '{name}' by request")))?;
            memory.write(placement, name, part)?;
        }
        Ok(())
    }

    /// Writes a response of a decoupled model to the location that its client wants.
    pub(super) fn place_response(&self, request: u32, blocks: &[OutputBlock]) -> Result<(), InferError> {
        let Some(memory) = &self.client_memory else { return Ok(()) };
        for placement in self.execute.placements.iter().filter(|placement| placement.request == request) {
            for block in blocks.iter().filter(|block| block.output == placement.output) {
                let name = self.output_name(block.output);
                memory.write(placement, name, self.bytes_of(block, name)?)?;
            }
        }
        let mut regions = used_regions(self.execute).filter(|(user, _)| *user == request);
        regions.try_for_each(|(_, region)| memory.regions().check(region))
    }

    fn output_name(&self, output: u16) -> &str {
        self.config.outputs.get(usize::from(output)).map_or("", |output| &output.name)
    }

    fn bytes_of(&self, block: &OutputBlock, name: &str) -> Result<&[u8], InferError> {
        let bytes = self.arena.bytes(block.offset, block.len);
        bytes.ok_or_else(|| run_error(format!("output '{name}' is not in the arena")))
    }

    /// Whether a request, given by its position in the whole batch, has failed.
    pub(super) fn has_failed(&self, request: u32) -> bool {
        self.failed.iter().any(|(failed, _)| *failed == request)
    }

    /// Fails a request, given by its position in the whole batch, unless it has already failed.
    fn fail_whole(&mut self, request: u32, error: InferError) {
        self.rescheduled.retain(|other| *other != request);
        if !self.has_failed(request) {
            let part = std::mem::take(&mut self.part);
            self.fail(request as usize, error);
            self.part = part;
        }
    }
}
