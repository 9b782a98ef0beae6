//! The connection to the frontend: what has come over it, and the threads that wait for that.
//!
//! No thread is reserved for reading. A thread that waits for something (the main thread for its next batch, a thread for the
//! answer of another model, a sender for its reader) reads the socket while no other thread does, and hands what is for others
//! to them. So a worker that only executes batches pays nothing for this.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use pharos::error::InferError;
use pharos::timeline::Instant;
use pharos::wire::{Answer, CREDITS, Credits, Execute, Response, ToFrontend, ToWorker};

use crate::clock;
use crate::error::run_error;
use crate::frames::Reader;
use crate::received::{Arenas, Received};
use crate::streams::{Collected, RequestPlace, ResponseContent, Stream, Streams};

/// Unused output memory that stays with the process; more is handed back to the system.
const KEEP_OUTPUTS: u64 = 16 << 20;

/// The connection, and what came over it.
pub struct Connection {
    // Held for a few instructions, and while a frame is sent that must not be overtaken.
    state: Mutex<ConnectionState>,
    changed: Condvar,
    /// Used by the thread that has set [`ConnectionState::reading`].
    reader: Mutex<Reader>,
    arenas: Arc<Arenas>,
}

/// What has come.
#[derive(Default)]
pub(crate) struct ConnectionState {
    /// A thread reads the socket.
    reading: bool,
    /// How many threads wait for what it reads.
    waiting: usize,
    /// For the main thread.
    frames: VecDeque<ToWorker>,
    /// The frontend has asked whether the model is ready.
    pub(crate) readiness_asked: bool,
    /// Batches with requests that are answered on their own.
    batches: HashMap<u64, Streams>,
    /// What has come for calls that are under way.
    pub(crate) calls: HashMap<u64, VecDeque<Answer>>,
    /// The connection is over: by an error, or because the frontend has closed it.
    closed: Option<Result<(), String>>,
    /// The process is to end: the frontend reads no more answers.
    stopping: bool,
}

impl ConnectionState {
    /// Whether the frontend reads no more answers.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping || self.closed.is_some()
    }

    /// The streams of a request's batch.
    pub(crate) fn streams(&mut self, (batch, _): RequestPlace) -> Result<&mut Streams, InferError> {
        self.batches.get_mut(&batch).ok_or_else(|| run_error("the request is over"))
    }

    fn credit(&mut self, credits: &Credits) {
        if let Some(batch) = self.batches.get_mut(&credits.batch) {
            batch.take_credits(credits.request, credits.taken);
        }
    }

    /// Forgets a batch whose requests are all answered.
    fn tidy(&mut self, batch: u64) {
        if self.batches.get(&batch).is_some_and(Streams::is_over) {
            self.batches.remove(&batch);
        }
    }
}

impl Connection {
    pub(crate) fn new(reader: Reader, arenas: Arc<Arenas>) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), reader: Mutex::new(reader), arenas }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next frame for the main thread; `None` when the frontend has closed the connection.
    ///
    /// # Errors
    /// The connection is broken, or what came is no frame.
    pub fn receive(&self) -> io::Result<Option<ToWorker>> {
        match self.wait(|state| state.frames.pop_front()) {
            Some(frame) => Ok(Some(frame)),
            None => match &self.lock().closed {
                Some(Err(error)) => Err(io::Error::other(error.clone())),
                _ => Ok(None),
            },
        }
    }

    /// Waits until `look` finds something, and reads the socket meanwhile if no other thread does; `None` if the connection
    /// ends before.
    pub(crate) fn wait<T>(&self, look: impl FnMut(&mut ConnectionState) -> Option<T>) -> Option<T> {
        self.wait_reading(true, look)
    }

    /// As [`Connection::wait`], for what the main thread does and no frame brings: a thread that read the socket meanwhile
    /// would not see it.
    pub(crate) fn wait_for_main<T>(&self, look: impl FnMut(&mut ConnectionState) -> Option<T>) -> Option<T> {
        self.wait_reading(false, look)
    }

    fn wait_reading<T>(&self, may_read: bool, mut look: impl FnMut(&mut ConnectionState) -> Option<T>) -> Option<T> {
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
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Takes what has come, without waiting.
    pub(crate) fn poll(&self) {
        let mut state = self.lock();
        while !state.reading && state.closed.is_none() && self.has_some() {
            state = self.read_one(state);
        }
    }

    /// The number of the batch that is executed next, if its frame has come (the frontend sends it while this one is
    /// executed), and its inputs as far as they are in the arena.
    pub(crate) fn next_inputs(&self) -> Option<(u64, Vec<Received>)> {
        self.poll();
        let state = self.lock();
        let execute = state.frames.iter().find_map(|frame| match frame {
            ToWorker::Execute(execute) => Some(execute),
            _ => None,
        })?;
        let in_arena = execute.inputs.iter().filter(|input| input.pieces.is_empty() && input.len > 0);
        let inputs = in_arena.filter_map(|input| Received::of_sent(&self.arenas, input.offset, input.len));
        Some((execute.batch, inputs.collect()))
    }

    fn has_some(&self) -> bool {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner).has_some()
    }

    /// Reads one frame, without the lock, and puts it where it belongs.
    fn read_one<'s>(&'s self, mut state: MutexGuard<'s, ConnectionState>) -> MutexGuard<'s, ConnectionState> {
        state.reading = true;
        drop(state);
        let frame = self.reader.lock().unwrap_or_else(PoisonError::into_inner).read();
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
            ToWorker::GivenUp(batch, request) => {
                if let Some(batch) = state.batches.get_mut(&batch) {
                    batch.cancel(request);
                }
            }
            ToWorker::Answer(answer) => match state.calls.get_mut(&answer.call) {
                Some(call) => call.push_back(answer),
                // The call is over.
                None if answer.loan != 0 => self.arenas.send(&ToFrontend::Returned(vec![answer.loan])),
                None => {}
            },
            ToWorker::AskReady => state.readiness_asked = true,
            frame => {
                state.stopping |= frame == ToWorker::Shutdown;
                state.frames.push_back(frame);
            }
        }
    }
    /// A batch begins to be executed, of which requests may be answered on their own.
    pub(crate) fn batch_begins(&self, execute: &Execute, decoupled: bool, start: Instant) {
        self.lock().batches.insert(execute.batch, Streams::new(execute, decoupled, start));
    }

    /// The execution of a batch is over, and went well or not; these requests are executed once more.
    pub(crate) fn batch_ends(&self, batch: u64, went_well: bool, rescheduled: &[u32]) -> Collected {
        let mut state = self.lock();
        let Some(streams) = state.batches.get_mut(&batch) else { return Collected::default() };
        let collected = streams.collect(went_well, rescheduled);
        state.tidy(batch);
        collected
    }

    /// The frame that says how a batch has ended is sent.
    pub fn batch_announced(&self, batch: u64) {
        if let Some(streams) = self.lock().batches.get_mut(&batch) {
            streams.announced = true;
            self.changed.notify_all();
        }
    }

    /// The inputs of a batch are where the model wants them.
    pub(crate) fn inputs_ready(&self, batch: u64, at: Instant) {
        if let Some(streams) = self.lock().batches.get_mut(&batch) {
            streams.inputs_ready(at);
        }
    }

    /// Waits until a request of a decoupled model may have one more response.
    ///
    /// # Errors
    /// [`InferError::cancelled`] if the request is cancelled; it is over, or there is no such request.
    pub(crate) fn wait_for_credit(&self, place: RequestPlace) -> Result<(), InferError> {
        let may = |state: &mut ConnectionState| {
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
                Ok((_, stream)) => (stream.sent.saturating_sub(stream.taken) < CREDITS.into()).then_some(Ok(())),
            }
        };
        self.wait(may).unwrap_or_else(|| Err(InferError::cancelled()))
    }

    /// Whether a request is cancelled, by a frame or by its flag in this row.
    pub(crate) fn is_cancelled(&self, row: Option<u8>, stream: &Stream, request: u32) -> bool {
        let flagged = |row| self.arenas.inputs.flags(row).is_set(request as usize);
        stream.cancelled || row.is_some_and(flagged)
    }

    /// Sends the response of one request. Holds the lock meanwhile, so that responses keep their order.
    ///
    /// # Errors
    /// The request is over, or its parameters are too long for a message: then it goes on without this response.
    pub(crate) fn send_response(&self, place: RequestPlace, content: ResponseContent) -> Result<(), InferError> {
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
