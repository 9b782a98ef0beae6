//! Requests that a backend answers by itself, from any thread and also after their batch is over.
//!
//! A request of a model that answers once is part of its batch's outcome while the batch is executed, and is answered by a
//! frame of its own afterwards. One of a decoupled model is always answered by frames of its own, and waits for its reader
//! when it has as many unread responses as [`CREDITS`] allows.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::infer::Parameters;
use pharos::model::ModelConfig;
use pharos::tensor::DataType;
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{self, CREDITS, Execute, OutputBlock, Placement, Resumed, ToFrontend, WireError};

use super::board::{Place, State};
use super::stash::in_memory;
use super::{Memory, Received, Shared, Stash};
use crate::backend::run_error;
use crate::clock;
use crate::instance::lent::{RegionRange, apart_from, range_of};
use crate::instance::wire_error;
use crate::regions::ReceivedOnDevice;

/// A response in the making.
#[derive(Default)]
pub struct Reply {
    /// Its outputs.
    pub outputs: Vec<ReplyOutput>,
    /// Its parameters.
    pub parameters: Parameters,
    /// It is an error; its outputs are not sent.
    pub error: Option<InferError>,
}

/// An output of a [`Reply`].
pub struct ReplyOutput {
    /// Position in the configuration's outputs.
    pub output: usize,
    /// What the elements are.
    pub datatype: DataType,
    /// Its shape, with the request's rows first if the model batches.
    pub shape: Vec<i64>,
    /// Its bytes: little-endian, row-major; BYTES elements length-prefixed.
    pub content: Content,
}

/// Where the bytes of an output are.
pub enum Content {
    /// In memory for answers, from [`Runtime::memory`](super::Runtime::memory).
    Memory(Memory),
    /// In an input, which is passed on: without a copy, if it is not in use any more when the batch is over.
    Received(Received),
    /// So many bytes where the client wants them, at [`Responder::place_on_device`].
    Placed(usize),
}

/// The requests of a batch that are answered on their own, or may be.
pub(super) struct Streams {
    requests: Vec<Stream>,
    /// The row of the flags that say who is given up, while the batch is executed.
    row: Option<u8>,
    /// The frontend knows how the batch has ended.
    announced: bool,
    decoupled: bool,
    start: Instant,
    input_end: Option<Instant>,
    stash: Stash,
}

/// One request.
#[derive(Clone, Default)]
struct Stream {
    /// Responses that cost credit, in earlier batches too.
    sent: u64,
    /// How many of them the client has taken, as far as is known.
    taken: u64,
    ended: bool,
    detached: bool,
    given_up: bool,
}

/// A response as it is sent.
#[derive(Default)]
pub(crate) struct Sent {
    pub(crate) outputs: Vec<OutputBlock>,
    pub(crate) parameters: Parameters,
    pub(crate) error: Option<WireError>,
    /// None follows.
    pub(crate) last: bool,
    /// It says nothing but that.
    pub(crate) empty: bool,
}

/// What is taken out of a batch when its execution is over.
#[derive(Default)]
pub(crate) struct Collected {
    pub(crate) stash: Stash,
    /// Requests that go on, ascending.
    pub(crate) open: Vec<u32>,
}

impl Streams {
    pub(super) fn take_credits(&mut self, request: u32, taken: u64) {
        if let Some(stream) = self.requests.get_mut(request as usize) {
            stream.taken = stream.taken.max(taken);
        }
    }

    pub(super) fn give_up(&mut self, request: u32) {
        if let Some(stream) = self.requests.get_mut(request as usize) {
            stream.given_up = true;
        }
    }

    fn stream(&mut self, request: u32) -> Result<&mut Stream, InferError> {
        let count = self.requests.len();
        let stream = self.requests.get_mut(request as usize);
        let stream = stream.ok_or_else(|| run_error(format!("there is no request {request} in a batch of {count}")))?;
        if stream.ended {
            return Err(run_error(format!("request {request} of the batch has had its last response")));
        }
        Ok(stream)
    }

    fn is_over(&self) -> bool {
        self.row.is_none() && self.requests.iter().all(|stream| stream.ended || !stream.detached)
    }

    fn stamps(&self, output_start: Instant, end: Instant) -> ComputeStamps {
        let input_end = self.input_end.unwrap_or(self.start);
        ComputeStamps { start: self.start, input_end, output_start: output_start.max(input_end), end }
    }
}

impl State {
    fn streams(&mut self, (batch, _): Place) -> Result<&mut Streams, InferError> {
        self.batches.get_mut(&batch).ok_or_else(|| run_error("the request is over"))
    }

    /// Forgets a batch of which nothing goes on.
    fn tidy(&mut self, batch: u64) {
        if self.batches.get(&batch).is_some_and(Streams::is_over) {
            self.batches.remove(&batch);
        }
    }
}

impl Shared {
    /// A batch begins to be executed, of which requests may be answered on their own.
    pub(crate) fn batch_begins(&self, execute: &Execute, decoupled: bool, start: Instant) {
        let mut requests = vec![Stream::default(); execute.requests.len()];
        for &Resumed { request, sent, taken } in &execute.resumed {
            if let Some(stream) = requests.get_mut(request as usize) {
                *stream = Stream { sent, taken, ..Stream::default() };
            }
        }
        let (row, stash) = (Some(execute.flags), Stash::default());
        let streams = Streams { requests, row, announced: false, decoupled, start, input_end: None, stash };
        self.board.lock().batches.insert(execute.batch, streams);
    }

    /// The execution of a batch is over, and went well or not; these are executed once more.
    pub(crate) fn batch_ends(&self, batch: u64, went_well: bool, rescheduled: &[u32]) -> Collected {
        let mut state = self.board.lock();
        let Some(streams) = state.batches.get_mut(&batch) else { return Collected::default() };
        streams.row = None;
        let stash = std::mem::take(&mut streams.stash);
        for (position, stream) in (0..).zip(&mut streams.requests) {
            stream.detached &= went_well && !rescheduled.contains(&position);
        }
        let open = (0..).zip(&streams.requests).filter(|(_, stream)| stream.detached && !stream.ended);
        let open = open.map(|(position, _)| position).collect();
        state.tidy(batch);
        Collected { stash, open }
    }

    /// The frontend has been told how a batch has ended.
    pub(crate) fn batch_announced(&self, batch: u64) {
        if let Some(streams) = self.board.lock().batches.get_mut(&batch) {
            streams.announced = true;
            self.board.wake();
        }
    }

    /// The inputs of a batch are where the model wants them.
    pub(crate) fn inputs_ready(&self, batch: u64, at: Instant) {
        if let Some(streams) = self.board.lock().batches.get_mut(&batch) {
            streams.input_end.get_or_insert(at);
        }
    }

    /// Waits until a request of a decoupled model may have one more response.
    ///
    /// # Errors
    /// [`InferError::cancelled`] when nobody waits for it any more; it is over, or there is no such request.
    pub(crate) fn wait_for_credit(&self, place: Place) -> Result<(), InferError> {
        let may = |state: &mut State| {
            let stopping = state.is_stopping();
            let found = state.streams(place).and_then(|streams| {
                let row = streams.row;
                Ok((row, streams.stream(place.1)?.clone()))
            });
            match found {
                Err(error) => Some(Err(error)),
                Ok((row, stream)) if stopping || self.is_given_up(row, &stream, place.1) => {
                    Some(Err(InferError::cancelled()))
                }
                Ok((_, stream)) => (stream.sent.saturating_sub(stream.taken) < CREDITS.into()).then_some(Ok(())),
            }
        };
        self.wait(may).unwrap_or_else(|| Err(InferError::cancelled()))
    }

    fn is_given_up(&self, row: Option<u8>, stream: &Stream, request: u32) -> bool {
        let flagged = |row| self.inputs.flags(row).is_set(request as usize);
        stream.given_up || row.is_some_and(flagged)
    }

    /// Sends a response of a request of its own. Under the lock, so that none overtakes another.
    ///
    /// # Errors
    /// The request is over, or its parameters are too long for a message: then it goes on without this response.
    pub(crate) fn send_response(
        &self,
        place: Place,
        (content, output_start): (Sent, Instant),
    ) -> Result<(), InferError> {
        let Sent { outputs, parameters, error, last, empty } = content;
        let mut state = self.board.lock();
        let streams = state.streams(place)?;
        let stamps = streams.stamps(output_start, clock::now());
        let stream = streams.stream(place.1)?;
        // What only ends a request needs no credit.
        let credits = u64::from(!(last && (empty || error.is_some())));
        let (batch, request) = place;
        let response = wire::Response { batch, request, outputs, parameters, error, last, empty, stamps };
        self.send_if_it_fits(&ToFrontend::Response(response))?;
        stream.ended = last;
        stream.sent += credits;
        state.tidy(batch);
        Ok(())
    }
}

/// The answers of one request, in the backend's own hands; see [`Outputs::detach`](crate::backend::Outputs::detach). The
/// instance takes its next batch although it is not answered. A request whose responder is dropped unended fails.
pub struct Responder {
    shared: Arc<Shared>,
    place: Place,
    decoupled: bool,
    /// Where its outputs go in memory of clients, and their names.
    placements: Vec<(Placement, String)>,
    /// What the batch reads in memory of clients. `None` if nothing is written there before its time.
    read: Option<Vec<RegionRange>>,
}

impl Responder {
    /// Of a request of a batch that is executed.
    ///
    /// # Errors
    /// There is no such request, or it has one already.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        (config, execute): (&ModelConfig, &Execute),
        request: u32,
    ) -> Result<Self, InferError> {
        let place = (execute.batch, request);
        let decoupled = {
            let mut state = shared.board.lock();
            let streams = state.streams(place)?;
            let stream = streams.stream(request)?;
            if std::mem::replace(&mut stream.detached, true) {
                return Err(run_error(format!("request {request} of the batch is answered by another responder")));
            }
            streams.decoupled
        };
        let own = execute.placements.iter().filter(|placement| placement.request == request);
        let name = |output: u16| config.outputs.get(usize::from(output)).map(|output| output.name.clone());
        let placements = own.map(|placement| (placement.clone(), name(placement.output).unwrap_or_default()));
        let placements: Vec<_> = placements.collect();
        // A response may have to wait for its reader, or be thrown away when the request is executed once more.
        let at_once = !placements.is_empty() && !decoupled && !config.has_iterative_sequences();
        let pieces = execute.inputs.iter().flat_map(|input| &input.pieces).filter(|piece| piece.region != 0);
        let read = at_once.then(|| pieces.map(range_of).collect());
        Ok(Self { shared: shared.clone(), place, decoupled, placements, read })
    }

    /// Sends a response; more may follow if it is not the last. For a model that is not decoupled the first is the last.
    /// Waits for the client if the model is decoupled and the client has read too little of what it was sent.
    ///
    /// # Errors
    /// [`InferError::cancelled`] when nobody waits for the request any more, it has had its last response, or there is no
    /// memory for it; an output is there twice, and nothing is sent.
    pub fn respond(&self, reply: Reply, last: bool) -> Result<(), InferError> {
        let output_start = clock::now();
        let outputs = || reply.outputs.iter().map(|output| output.output);
        if let Some((_, output)) = outputs().enumerate().find(|(at, output)| outputs().take(*at).any(|o| o == *output))
        {
            return Err(run_error(format!("output {output} is in the response twice")));
        }
        let last = last || !self.decoupled;
        let ends_only = last && reply.error.is_some();
        if self.decoupled {
            if !ends_only {
                self.shared.wait_for_credit(self.place)?;
            }
            return self.send(reply, last, output_start);
        }
        match self.stash(reply)? {
            Some(reply) => self.send(reply, last, output_start),
            None => Ok(()),
        }
    }

    fn send(&self, reply: Reply, last: bool, output_start: Instant) -> Result<(), InferError> {
        let Reply { outputs, parameters, error } = reply;
        let outputs = if error.is_none() { outputs } else { Vec::new() };
        let (mut blocks, mut memories) = (Vec::new(), Vec::new());
        for output in outputs {
            let (block, memory) = in_memory(&self.shared, output)?;
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
        let sent = Sent { outputs: blocks, parameters, error: error.map(wire_error), last, empty: false };
        let sent = self.shared.send_response(self.place, (sent, output_start));
        if sent.is_ok() {
            memories.into_iter().flatten().for_each(Memory::sent);
        }
        sent
    }

    /// Where the client wants an output of so many bytes, if that is on a device: what is written there before the response
    /// is given here, as [`Content::Placed`], goes through nobody's hands. None where a request of the batch has an input, which
    /// other outputs may yet be made of; and none for requests that may have several responses or be executed once more.
    pub fn place_on_device(&self, output: usize, len: usize) -> Option<ReceivedOnDevice> {
        let len = len as u64;
        let mut all = self.placements.iter().map(|(placement, _)| placement);
        let place = all.find(|place| usize::from(place.output) == output && len <= place.len)?;
        apart_from(self.read.as_ref()?, (place.region, place.offset, len))?;
        self.shared.regions().kept_on_device(place.region, place.offset, len)
    }

    /// Keeps the one answer for the end of the batch if that is executed; else gives it back, when it may be sent.
    fn stash(&self, reply: Reply) -> Result<Option<Reply>, InferError> {
        let mut reply = Some(reply);
        let request = self.place.1;
        let stashed = self.shared.wait_for_main(|state| {
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
            let stash = &mut streams.stash;
            match error {
                Some(error) => stash.failed.push((request, wire_error(error))),
                None => {
                    stash.outputs.extend(outputs.into_iter().map(|output| (request, output)));
                    stash.parameters.extend((!parameters.is_empty()).then_some((request, parameters)));
                }
            }
            Some(Ok(()))
        });
        stashed.unwrap_or_else(|| Err(InferError::cancelled()))?;
        Ok(reply)
    }

    /// Writes outputs where the client wants them.
    fn place_outputs(&self, blocks: &[OutputBlock], memories: &[Option<Memory>]) -> Result<(), InferError> {
        for (placement, name) in &self.placements {
            let made = blocks.iter().zip(memories).filter(|(block, _)| block.output == placement.output);
            for memory in made.filter_map(|(_, memory)| memory.as_ref()) {
                self.shared.write_placed((placement, name), memory)?;
            }
        }
        Ok(())
    }

    /// Ends the responses, without another one. A request of a model that is not decoupled fails: it has had none.
    ///
    /// # Errors
    /// It has had its last response.
    pub fn finish(&self) -> Result<(), InferError> {
        if !self.decoupled {
            return self.respond(Reply { error: Some(run_error(UNANSWERED)), ..Reply::default() }, true);
        }
        let end = Sent { last: true, empty: true, ..Sent::default() };
        self.shared.send_response(self.place, (end, clock::now()))
    }

    /// Ends the responses with an error. One that has ended already has no place for it.
    pub fn fail(&self, error: InferError) {
        let _ = self.respond(Reply { error: Some(error), ..Reply::default() }, true);
    }

    /// Whether nobody waits for the request any more: its client has gone away, or its time is over.
    pub fn is_cancelled(&self) -> bool {
        let look = |state: &mut State| {
            let streams = state.streams(self.place).ok()?;
            Some((streams.row, streams.requests.get(self.place.1 as usize)?.clone()))
        };
        let known = look(&mut self.shared.board.lock());
        let known = match known {
            Some((None, stream)) if !stream.given_up && !stream.ended => {
                self.shared.poll();
                look(&mut self.shared.board.lock())
            }
            known => known,
        };
        known.is_some_and(|(row, stream)| !stream.ended && self.shared.is_given_up(row, &stream, self.place.1))
    }

    /// Whether it has had its last response.
    pub fn ended(&self) -> bool {
        let mut state = self.shared.board.lock();
        state.streams(self.place).and_then(|streams| streams.stream(self.place.1).map(drop)).is_err()
    }

    /// The number of its batch and its position there, for [`Call::parent`](super::Call::parent).
    pub fn place(&self) -> (u64, u32) {
        self.place
    }
}

/// What becomes of a request that nobody answers.
const UNANSWERED: &str = "the model has let go of the request without answering it";

impl Drop for Responder {
    fn drop(&mut self) {
        let detached = |state: &mut State| {
            let streams = state.streams(self.place).ok()?;
            streams.stream(self.place.1).ok().map(|stream| stream.detached)
        };
        let open = detached(&mut self.shared.board.lock());
        if open == Some(true) {
            self.fail(run_error(UNANSWERED));
        }
    }
}
