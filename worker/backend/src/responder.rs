//! Requests that a backend answers individually, from any thread and even after their batch is
//! over.
//!
//! A request of a non-decoupled model is part of its batch's outcome while the batch is executed,
//! and is answered by a separate frame afterwards. A request of a decoupled model is always
//! answered by separate frames. It waits for its client when it has as many unread responses as
//! [`CREDITS`](pharos::wire::CREDITS) allows.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::timeline::Instant;
use pharos::wire::{Execute, OutputBlock, Placement};

use crate::client_memory::{claim, input_ranges, write_placed};
use crate::clock;
use crate::connection::ConnectionState;
use crate::deferred::in_memory;
use crate::device::{ReceivedOnDevice, RegionRange};
use crate::error::{run_error, wire_error};
use crate::received::Memory;
use crate::reply::Reply;
use crate::session::Session;
use crate::streams::{RequestPlace, ResponseContent};

/// Sends the responses of one request individually; see
/// [`Outputs::detach`](crate::Outputs::detach). The instance takes its next batch even if the
/// request is not answered yet. Dropping the responder before the last response fails the request.
pub struct Responder {
    session: Arc<Session>,
    place: RequestPlace,
    decoupled: bool,
    /// Locations for its outputs in client memory, and the names of the outputs.
    placements: Vec<(Placement, String)>,
    /// Client memory that the batch reads. `None` if outputs are not written to client memory
    /// before the response is sent.
    read: Option<Vec<RegionRange>>,
}

impl Responder {
    /// Creates the responder of a request in the batch being executed.
    ///
    /// # Errors
    /// There is no such request, or it already has a responder.
    pub(crate) fn new(
        session: &Arc<Session>,
        config: &ModelConfig,
        execute: &Execute,
        request: u32,
    ) -> Result<Self, InferError> {
        let place = (execute.batch, request);
        let decoupled = {
            let mut state = session.connection.lock();
            let streams = state.streams(place)?;
            let stream = streams.stream(request)?;
            if std::mem::replace(&mut stream.detached, true) {
                return Err(run_error(format!(
                    "request {request} of the batch already has a responder"
                )));
            }
            streams.decoupled
        };
        let mut placements = Vec::new();
        for placement in execute.placements.iter().filter(|placement| placement.request == request)
        {
            let output = config.outputs.get(usize::from(placement.output));
            let name = output.map(|output| output.name.clone()).unwrap_or_default();
            placements.push((placement.clone(), name));
        }
        // Otherwise a response may have to wait for its client, or is discarded when the request is
        // rescheduled.
        let at_once = !placements.is_empty() && !decoupled && !config.has_iterative_sequences();
        let read = at_once.then(|| input_ranges(execute).collect());
        Ok(Self { session: session.clone(), place, decoupled, placements, read })
    }

    /// Sends a response; more may follow unless it is the last. For a model that is not decoupled,
    /// the first response is the last. For a decoupled model, waits while the client has too many
    /// unread responses.
    ///
    /// # Errors
    /// [`InferError::cancelled`] if the request is cancelled, which the last response ends
    /// nevertheless. Also fails if the request has had its last response, if there is no memory for
    /// the response, or if an output occurs twice; nothing is sent then.
    pub fn respond(&self, reply: Reply, last: bool) -> Result<(), InferError> {
        let output_start = clock::now();
        let outputs = || reply.outputs.iter().map(|output| output.output);
        if let Some((_, output)) =
            outputs().enumerate().find(|(at, output)| outputs().take(*at).any(|o| o == *output))
        {
            return Err(run_error(format!("output {output} is in the response twice")));
        }
        let last = last || !self.decoupled;
        let ends_only = last && reply.error.is_some();
        if self.decoupled {
            if !ends_only {
                let credit = self.session.connection.wait_for_credit(self.place);
                credit.inspect_err(|_| drop(last.then(|| self.finish())))?;
            }
            return self.send(reply, last, output_start);
        }
        match self.defer(reply)? {
            Some(reply) => self.send(reply, last, output_start),
            None => Ok(()),
        }
    }

    fn send(&self, reply: Reply, last: bool, output_start: Instant) -> Result<(), InferError> {
        let Reply { outputs, parameters, error } = reply;
        let outputs = if error.is_none() { outputs } else { Vec::new() };
        let mut blocks = Vec::new();
        let mut memories = Vec::new();
        for output in outputs {
            let (block, memory) = in_memory(&self.session.arenas, output)?;
            blocks.push(block);
            memories.push(memory);
        }
        let error = match error {
            None => self.place_outputs(&blocks, &memories).err(),
            error => error,
        };
        if error.is_some() {
            blocks.clear();
            memories.clear();
        }
        let error = error.map(wire_error);
        let content = ResponseContent {
            outputs: blocks,
            parameters,
            error,
            last,
            empty: false,
            output_start,
        };
        let sent = self.session.connection.send_response(self.place, content);
        if sent.is_ok() {
            memories.into_iter().flatten().for_each(Memory::sent);
        }
        sent
    }

    /// Returns the location where the client wants an output of this many bytes, if that is on a
    /// device. The backend writes there directly before it sends the response with
    /// [`Content::Placed`](crate::Content::Placed). `None` if the range overlaps an input of the
    /// batch, from which other outputs may still be computed, and for requests that may have
    /// several responses or be rescheduled.
    pub fn place_on_device(&self, output: usize, len: usize) -> Option<ReceivedOnDevice> {
        let len = len as u64;
        let mut all = self.placements.iter().map(|(placement, _)| placement);
        let place = all.find(|place| usize::from(place.output) == output && len <= place.len)?;
        let range = claim(
            self.read.as_ref()?,
            RegionRange { region: place.region, offset: place.offset, len },
        )?;
        self.session.devices.keep_on_device(range)
    }

    /// Keeps a single answer until the end of the batch while the batch is executed; otherwise
    /// returns it for sending.
    fn defer(&self, reply: Reply) -> Result<Option<Reply>, InferError> {
        let mut reply = Some(reply);
        let request = self.place.1;
        let deferred = self.session.connection.wait_for_main(|state| {
            let streams = match state.streams(self.place) {
                Ok(streams) => streams,
                Err(error) => return Some(Err(error)),
            };
            if streams.row.is_none() {
                return streams.announced.then_some(Ok(()));
            }
            match streams.stream(request) {
                Ok(stream) => stream.ended = true,
                Err(error) => return Some(Err(error)),
            }
            let Reply { outputs, parameters, error } = reply.take()?;
            let deferred = &mut streams.deferred;
            match error {
                Some(error) => deferred.failed.push((request, wire_error(error))),
                None => {
                    deferred.outputs.extend(outputs.into_iter().map(|output| (request, output)));
                    deferred
                        .parameters
                        .extend((!parameters.is_empty()).then_some((request, parameters)));
                }
            }
            Some(Ok(()))
        });
        deferred.unwrap_or_else(|| Err(InferError::cancelled()))?;
        Ok(reply)
    }

    /// Copies outputs to the locations that the client wants.
    fn place_outputs(
        &self,
        blocks: &[OutputBlock],
        memories: &[Option<Memory>],
    ) -> Result<(), InferError> {
        for (placement, name) in &self.placements {
            let made =
                blocks.iter().zip(memories).filter(|(block, _)| block.output == placement.output);
            for memory in made.filter_map(|(_, memory)| memory.as_ref()) {
                write_placed(placement, name, memory, |at, bytes| {
                    self.session.devices.write_region(at.region, at.offset, bytes)
                })?;
            }
        }
        Ok(())
    }

    /// Ends the responses without sending another one. For a model that is not decoupled, the
    /// request fails because it has no response.
    ///
    /// # Errors
    /// The request has had its last response.
    pub fn finish(&self) -> Result<(), InferError> {
        if !self.decoupled {
            return self
                .respond(Reply { error: Some(run_error(UNANSWERED)), ..Reply::default() }, true);
        }
        let end = ResponseContent {
            last: true,
            empty: true,
            output_start: clock::now(),
            ..ResponseContent::default()
        };
        self.session.connection.send_response(self.place, end)
    }

    /// Ends the responses with an error. Ignored if they have already ended.
    pub fn fail(&self, error: InferError) {
        let _ = self.respond(Reply { error: Some(error), ..Reply::default() }, true);
    }

    /// Whether the request is cancelled: its client has disconnected, or its deadline has passed.
    pub fn is_cancelled(&self) -> bool {
        let look = |state: &mut ConnectionState| {
            let streams = state.streams(self.place).ok()?;
            Some((streams.row, streams.requests.get(self.place.1 as usize)?.clone()))
        };
        let known = look(&mut self.session.connection.lock());
        let known = match known {
            Some((None, stream)) if !stream.cancelled && !stream.ended => {
                self.session.connection.poll();
                look(&mut self.session.connection.lock())
            }
            known => known,
        };
        known.is_some_and(|(row, stream)| {
            !stream.ended && self.session.connection.is_cancelled(row, &stream, self.place.1)
        })
    }

    /// Whether [`Responder::respond`] would send a response without waiting for the client. A thread
    /// that answers many requests asks first, and collects what a slow reader has not read yet.
    pub fn is_ready(&self) -> bool {
        !self.decoupled || self.session.connection.has_credit(self.place)
    }

    /// Holds the responses of this process, of all requests, until it is called with `false`, which
    /// sends them together. A thread that answers many requests at once saves the server a wake-up
    /// for each. Hold them for microseconds only.
    pub fn hold_responses(&self, hold: bool) {
        self.session.arenas.sender.hold(hold);
    }

    /// Whether the request has had its last response.
    pub fn ended(&self) -> bool {
        self.session.connection.lock().open_stream(self.place).is_none()
    }

    /// Returns the number of the request's batch and its position there, for the `parent` of a
    /// call.
    pub fn place(&self) -> (u64, u32) {
        self.place
    }
}

/// The error of a request whose responder is dropped before it has answered.
const UNANSWERED: &str = "the model released the request without answering it";

impl Drop for Responder {
    fn drop(&mut self) {
        let state = self.session.connection.lock();
        let is_open = state.open_stream(self.place).is_some_and(|stream| stream.detached);
        drop(state);
        if is_open {
            self.fail(match self.is_cancelled() {
                true => InferError::cancelled(),
                false => run_error(UNANSWERED),
            });
        }
    }
}
