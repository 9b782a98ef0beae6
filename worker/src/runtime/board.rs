//! What has come over the socket, and who waits for it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use pharos::wire::{Answer, Credits, ToFrontend, ToWorker};

use super::responder::Streams;
use super::{Received, Shared};
use crate::wire::{Reader, Sender};

/// Output memory that stays with the process when nobody uses it; more is handed back to the system.
const KEEP_OUTPUTS: u64 = 16 << 20;

/// A request: the number of its batch, and its position there.
pub(crate) type Place = (u64, u32);

/// The connection, and what came over it.
pub(crate) struct Board {
    // Held for a few instructions, and while a frame is sent that must not be overtaken.
    state: Mutex<State>,
    changed: Condvar,
    /// Used by who has set [`State::reading`].
    reader: Mutex<Reader>,
    pub(super) sender: Sender,
}

/// What has come.
#[derive(Default)]
pub(super) struct State {
    /// Somebody reads the socket.
    reading: bool,
    /// How many wait for what he reads.
    waiting: usize,
    /// For the main thread.
    frames: VecDeque<ToWorker>,
    /// It is asked whether the model is ready.
    pub(super) asked: bool,
    /// Batches with requests that are answered on their own.
    pub(super) batches: HashMap<u64, Streams>,
    /// What has come for calls that are under way.
    pub(super) calls: HashMap<u64, VecDeque<Answer>>,
    /// The connection is over: by an error, or because the frontend has closed it.
    closed: Option<Result<(), String>>,
    /// Nobody will read any more answers: the process ends.
    stopping: bool,
}

impl State {
    /// Whether nobody will read any more answers.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping || self.closed.is_some()
    }

    fn credit(&mut self, credits: &Credits) {
        if let Some(batch) = self.batches.get_mut(&credits.batch) {
            batch.take_credits(credits.request, credits.taken);
        }
    }
}

impl Board {
    pub(super) fn new(reader: Reader, sender: Sender) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), reader: Mutex::new(reader), sender }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has those who wait look again.
    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }
}

impl Shared {
    /// The next frame for the main thread; `None` when the frontend has closed the connection.
    ///
    /// # Errors
    /// The connection is broken, or what came is no frame.
    pub(crate) fn receive(&self) -> io::Result<Option<ToWorker>> {
        match self.wait(|state| state.frames.pop_front()) {
            Some(frame) => Ok(Some(frame)),
            None => match &self.board.lock().closed {
                Some(Err(error)) => Err(io::Error::other(error.clone())),
                _ => Ok(None),
            },
        }
    }

    /// Waits until there is what is looked for, and reads the socket meanwhile if nobody else does; `None` if the connection
    /// is over before.
    pub(super) fn wait<T>(&self, look: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        self.wait_reading(true, look)
    }

    /// As [`Shared::wait`], for what the main thread does and no frame brings: who read the socket meanwhile would not see it.
    pub(super) fn wait_for_main<T>(&self, look: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        self.wait_reading(false, look)
    }

    fn wait_reading<T>(&self, may_read: bool, mut look: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let mut state = self.board.lock();
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
            state = self.board.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Takes what has come, without waiting.
    pub(super) fn poll(&self) {
        let mut state = self.board.lock();
        while !state.reading && state.closed.is_none() && self.has_some() {
            state = self.read_one(state);
        }
    }

    /// The number of the batch that is executed next, if its frame has come (the frontend sends it while this one is
    /// executed), and its inputs as far as they are in the arena.
    pub(crate) fn next_inputs(self: &Arc<Self>) -> Option<(u64, Vec<Received>)> {
        self.poll();
        let state = self.board.lock();
        let execute = state.frames.iter().find_map(|frame| match frame {
            ToWorker::Execute(execute) => Some(execute),
            _ => None,
        })?;
        let in_arena = execute.inputs.iter().filter(|input| input.pieces.is_empty() && input.len > 0);
        let inputs = in_arena.filter_map(|input| Received::of_sent(self, input.offset, input.len));
        Some((execute.batch, inputs.collect()))
    }

    fn has_some(&self) -> bool {
        self.board.reader.lock().unwrap_or_else(PoisonError::into_inner).has_some()
    }

    /// Reads one frame, without the lock, and puts it where it belongs.
    fn read_one<'s>(&'s self, mut state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        state.reading = true;
        drop(state);
        let frame = self.board.reader.lock().unwrap_or_else(PoisonError::into_inner).read();
        let mut state = self.board.lock();
        state.reading = false;
        match frame {
            Ok(Some(frame)) => self.dispatch(frame, &mut state),
            Ok(None) => state.closed = Some(Ok(())),
            Err(error) => state.closed = Some(Err(error.to_string())),
        }
        if state.waiting > 0 {
            self.board.wake();
        }
        state
    }

    fn dispatch(&self, frame: ToWorker, state: &mut State) {
        match frame {
            ToWorker::Credits(credits) => {
                self.outputs.release(&credits.released);
                state.credit(&credits);
            }
            ToWorker::Release(offsets) => {
                self.outputs.release(&offsets);
                self.outputs.trim(KEEP_OUTPUTS);
            }
            ToWorker::GivenUp(batch, request) => {
                if let Some(batch) = state.batches.get_mut(&batch) {
                    batch.give_up(request);
                }
            }
            ToWorker::Answer(answer) => match state.calls.get_mut(&answer.call) {
                Some(call) => call.push_back(answer),
                // Nobody waits for it any more.
                None if answer.loan != 0 => self.send(&ToFrontend::Returned(vec![answer.loan])),
                None => {}
            },
            ToWorker::AskReady => state.asked = true,
            frame => {
                state.stopping |= frame == ToWorker::Shutdown;
                state.frames.push_back(frame);
            }
        }
    }
}
