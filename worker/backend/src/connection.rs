//! The connection to the frontend: received messages, and the threads that wait for them.
//!
//! No thread is reserved for reading. A thread that waits for something (the main thread for its
//! next batch, a thread for the answer of another model, a sender for its client) reads the ring
//! while no other thread does, and passes on messages for other threads. So a worker that only
//! executes batches has no extra cost.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};
use pharos::error::InferError;
use pharos::timeline::Instant;
use pharos::wire::{Answer, CREDITS, Credits, Execute, Response, ToFrontend, ToWorker};
use rustc_hash::FxHashMap;

use crate::clock;
use crate::error::run_error;
use crate::frames::Reader;
use crate::received::{Arenas, Received};
use crate::streams::{Collected, RequestPlace, ResponseContent, Stream, Streams};

/// Unused output memory that the process keeps, in bytes; the rest is returned to the system.
const KEEP_OUTPUTS: u64 = 16 << 20;

/// The connection and the messages received over it.
pub struct Connection {
    // Held for a few instructions, and while a frame is sent whose order matters.
    state: Mutex<ConnectionState>,
    changed: Condvar,
    /// Used by the thread that has set [`ConnectionState::reading`].
    reader: Mutex<Reader>,
    arenas: Arc<Arenas>,
}

/// Received messages.
#[derive(Default)]
pub(crate) struct ConnectionState {
    /// A thread is reading the ring.
    reading: bool,
    /// Number of threads that wait for frames of the reader.
    waiting: usize,
    /// Frames for the main thread.
    frames: VecDeque<ToWorker>,
    /// The frontend has asked whether the model is ready.
    pub(crate) readiness_asked: bool,
    /// Batches with requests that are answered individually.
    batches: FxHashMap<u64, Streams>,
    /// Answers received for calls in progress.
    pub(crate) calls: FxHashMap<u64, VecDeque<Answer>>,
    /// The connection is closed, by an error or by the frontend.
    closed: Option<Result<(), String>>,
    /// The process is shutting down: the frontend reads no more answers.
    stopping: bool,
}

impl ConnectionState {
    /// Whether the frontend reads no more answers.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping || self.closed.is_some()
    }

    /// Returns the streams of a request's batch.
    pub(crate) fn streams(&mut self, (batch, _): RequestPlace) -> Result<&mut Streams, InferError> {
        self.batches.get_mut(&batch).ok_or_else(|| run_error("the request is over"))
    }

    /// Returns the stream of a request, if the request is not answered yet. Unlike
    /// [`Streams::stream`], it builds no error text for a request that is answered.
    pub(crate) fn open_stream(&self, (batch, request): RequestPlace) -> Option<&Stream> {
        let stream = self.batches.get(&batch)?.requests.get(request as usize)?;
        (!stream.ended).then_some(stream)
    }

    fn credit(&mut self, credits: &Credits) {
        if let Some(batch) = self.batches.get_mut(&credits.batch) {
            batch.take_credits(credits.request, credits.taken);
        }
    }

    /// Removes a batch whose requests are all answered.
    fn tidy(&mut self, batch: u64) {
        if self.batches.get(&batch).is_some_and(Streams::is_over) {
            self.batches.remove(&batch);
        }
    }
}

impl Connection {
    pub(crate) fn new(reader: Reader, arenas: Arc<Arenas>) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            reader: Mutex::new(reader),
            arenas,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock()
    }

    /// Waits for the next frame for the main thread; `None` when the frontend has closed the
    /// connection.
    ///
    /// # Errors
    /// The connection is broken, or the received bytes are not a frame.
    pub fn receive(&self) -> io::Result<Option<ToWorker>> {
        match self.wait(|state| state.frames.pop_front()) {
            Some(frame) => Ok(Some(frame)),
            None => match &self.lock().closed {
                Some(Err(error)) => Err(io::Error::other(error.clone())),
                _ => Ok(None),
            },
        }
    }

    /// Waits until `look` finds something, and reads the ring meanwhile if no other thread does.
    /// Returns `None` if the connection closes first.
    pub(crate) fn wait<T>(&self, look: impl FnMut(&mut ConnectionState) -> Option<T>) -> Option<T> {
        self.wait_reading(true, look)
    }

    /// Like [`Connection::wait`], for events that the main thread causes and that arrive in no
    /// frame: a thread reading the ring would not notice them.
    pub(crate) fn wait_for_main<T>(
        &self,
        look: impl FnMut(&mut ConnectionState) -> Option<T>,
    ) -> Option<T> {
        self.wait_reading(false, look)
    }

    fn wait_reading<T>(
        &self,
        may_read: bool,
        mut look: impl FnMut(&mut ConnectionState) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            if state.closed.is_some() {
                return None;
            }
            if may_read && !state.reading {
                state = self.read_one(state);
                continue;
            }
            state.waiting += 1;
            self.changed.wait(&mut state);
            state.waiting -= 1;
        }
    }

    /// Reads frames that have already arrived, without waiting.
    pub(crate) fn poll(&self) {
        let mut state = self.lock();
        while !state.reading && state.closed.is_none() && self.has_some() {
            state = self.read_one(state);
        }
    }

    /// Returns the number of the next batch, if its frame has arrived (the frontend sends it while
    /// the current one is executed), and the inputs of that batch that are in the arena.
    pub(crate) fn next_inputs(&self) -> Option<(u64, Vec<Received>)> {
        self.poll();
        let state = self.lock();
        let execute = state.frames.iter().find_map(|frame| match frame {
            ToWorker::Execute(execute) => Some(execute),
            _ => None,
        })?;
        let in_arena =
            execute.inputs.iter().filter(|input| input.pieces.is_empty() && input.len > 0);
        let inputs =
            in_arena.filter_map(|input| Received::of_sent(&self.arenas, input.offset, input.len));
        Some((execute.batch, inputs.collect()))
    }

    fn has_some(&self) -> bool {
        self.reader.lock().has_some()
    }

    /// Reads one frame without holding the lock, and dispatches it.
    fn read_one<'s>(
        &'s self,
        mut state: MutexGuard<'s, ConnectionState>,
    ) -> MutexGuard<'s, ConnectionState> {
        state.reading = true;
        drop(state);
        let frame = self.reader.lock().read();
        let mut state = self.lock();
        state.reading = false;
        match frame {
            Ok(Some(frame)) => self.dispatch(frame, &mut state),
            Ok(None) => state.closed = Some(Ok(())),
            Err(error) => state.closed = Some(Err(error.to_string())),
        }
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        state
    }

    fn dispatch(&self, frame: ToWorker, state: &mut ConnectionState) {
        match frame {
            ToWorker::Credits(credits) => {
                self.arenas.outputs.release(&credits.released);
                state.credit(&credits);
            }
            ToWorker::Release(offsets) => {
                self.arenas.outputs.release(&offsets);
                self.arenas.outputs.trim(KEEP_OUTPUTS);
            }
            ToWorker::CancelRequest(batch, request) => {
                if let Some(batch) = state.batches.get_mut(&batch) {
                    batch.cancel(request);
                }
            }
            ToWorker::Answer(answer) => match state.calls.get_mut(&answer.call) {
                Some(call) => call.push_back(answer),
                // The call is over.
                None if answer.loan != 0 => {
                    self.arenas.send(&ToFrontend::Returned(vec![answer.loan]))
                }
                None => {}
            },
            ToWorker::CheckReadiness => state.readiness_asked = true,
            frame => {
                state.stopping |= frame == ToWorker::Shutdown;
                state.frames.push_back(frame);
            }
        }
    }
    /// Registers a batch that begins to execute and whose requests may be answered individually.
    pub(crate) fn batch_begins(&self, execute: &Execute, decoupled: bool, start: Instant) {
        self.lock().batches.insert(execute.batch, Streams::new(execute, decoupled, start));
    }

    /// Records the end of a batch's execution, successful or not. The `rescheduled` requests are
    /// executed again.
    pub(crate) fn batch_ends(&self, batch: u64, went_well: bool, rescheduled: &[u32]) -> Collected {
        let mut state = self.lock();
        let Some(streams) = state.batches.get_mut(&batch) else { return Collected::default() };
        let collected = streams.collect(went_well, rescheduled);
        state.tidy(batch);
        collected
    }

    /// Records that the frame with the outcome of a batch has been sent.
    pub fn batch_announced(&self, batch: u64) {
        if let Some(streams) = self.lock().batches.get_mut(&batch) {
            streams.announced = true;
            self.changed.notify_all();
        }
    }

    /// Records that the inputs of a batch are where the model needs them.
    pub(crate) fn inputs_ready(&self, batch: u64, at: Instant) {
        if let Some(streams) = self.lock().batches.get_mut(&batch) {
            streams.inputs_ready(at);
        }
    }

    /// Waits until a request of a decoupled model may send one more response.
    ///
    /// # Errors
    /// [`InferError::cancelled`] if the request is cancelled; also fails if it is over or does not
    /// exist.
    pub(crate) fn wait_for_credit(&self, place: RequestPlace) -> Result<(), InferError> {
        self.wait(|state| self.credit(state, place)).unwrap_or_else(|| Err(InferError::cancelled()))
    }

    /// Returns whether [`Connection::wait_for_credit`] would return at once.
    pub(crate) fn has_credit(&self, place: RequestPlace) -> bool {
        let has_credit = || self.credit(&mut self.lock(), place).is_some();
        has_credit() || {
            self.poll();
            has_credit()
        }
    }

    /// Returns whether a request of a decoupled model may send one more response; `None` while its
    /// client has too many unread ones.
    fn credit(
        &self,
        state: &mut ConnectionState,
        place: RequestPlace,
    ) -> Option<Result<(), InferError>> {
        let stopping = state.is_stopping();
        let found = state.streams(place).and_then(|streams| {
            let row = streams.row;
            Ok((row, streams.stream(place.1)?.clone()))
        });
        match found {
            Err(error) => Some(Err(error)),
            Ok((row, stream)) if stopping || self.is_cancelled(row, &stream, place.1) => {
                Some(Err(InferError::cancelled()))
            }
            Ok((_, stream)) => {
                (stream.sent.saturating_sub(stream.taken) < CREDITS.into()).then_some(Ok(()))
            }
        }
    }

    /// Whether a request is cancelled, by a frame or by its flag in this row.
    pub(crate) fn is_cancelled(&self, row: Option<u8>, stream: &Stream, request: u32) -> bool {
        stream.cancelled
            || row.is_some_and(|row| self.arenas.inputs.flags(row).is_set(request as usize))
    }

    /// Sends the response of one request. Holds the lock while sending, so that responses keep
    /// their order.
    ///
    /// # Errors
    /// The request is over, or its parameters are too long for a message; the request then
    /// continues without this response.
    pub(crate) fn send_response(
        &self,
        place: RequestPlace,
        content: ResponseContent,
    ) -> Result<(), InferError> {
        let ResponseContent { outputs, parameters, error, last, empty, output_start } = content;
        let mut state = self.lock();
        let streams = state.streams(place)?;
        let stamps = streams.stamps(output_start, clock::now());
        let stream = streams.stream(place.1)?;
        // A frame that only ends a request needs no credit.
        let credits = u64::from(!(last && (empty || error.is_some())));
        let (batch, request) = place;
        let response = Response { batch, request, outputs, parameters, error, last, empty, stamps };
        self.arenas.sender.send_if_it_fits(&ToFrontend::Response(response))?;
        stream.ended = last;
        stream.sent += credits;
        state.tidy(batch);
        Ok(())
    }
}
