//! The texts of all requests that a model computes: threads that take texts of similar lengths, of
//! different requests, and answer each request when its last text is computed.
//!
//! Nothing waits for a batch: a thread that is done takes the next texts, among them the oldest one.

use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use pharos::error::InferError;
use pharos_backend::{Responder, Runtime, load_error};

use crate::batches;
use crate::computer::{Computer, Prepared};
use crate::metrics::TextMetrics;
use crate::results::{Places, RowResult, reply};

/// The most texts that are compared to find similar lengths: the time grows with the square of it.
const MAX_CANDIDATES: usize = 256;
/// The fewest tokens that are divided among threads.
const FEW_TOKENS: usize = 64;

/// How much is computed together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The threads, each of which runs the graph.
    pub(crate) threads: usize,
    /// The most tokens of a run, with those that pad.
    pub(crate) batch_tokens: usize,
}

/// A request whose texts are computed.
pub(crate) struct Request {
    pub(crate) responder: Responder,
    pub(crate) texts: Vec<Prepared>,
    /// The positions of the outputs that are wanted.
    pub(crate) wanted: Vec<usize>,
}

/// The threads of a model.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    computer: Computer,
    metrics: TextMetrics,
    places: Places,
    runtime: Runtime,
    limits: Limits,
    state: Mutex<State>,
    /// Signalled when there are texts, or when the threads end.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Texts in the order of their arrival.
    waiting: Vec<Waiting>,
    /// The threads that compute.
    busy: usize,
    is_closed: bool,
}

/// A text that waits.
struct Waiting {
    request: Arc<Open>,
    /// Its position in its request.
    at: usize,
    text: Prepared,
}

/// A request with texts that are not computed yet.
struct Open {
    responder: Responder,
    wanted: Vec<usize>,
    progress: Mutex<Progress>,
}

struct Progress {
    results: Vec<Option<RowResult>>,
    /// The texts without a result.
    left: usize,
    /// The request was answered, with its results or with an error.
    is_answered: bool,
}

impl Engine {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn start(
        computer: Computer,
        metrics: TextMetrics,
        places: Places,
        runtime: Runtime,
        limits: Limits,
    ) -> Result<Self, InferError> {
        let state = Mutex::default();
        let changed = Condvar::new();
        let shared =
            Arc::new(Shared { computer, metrics, places, runtime, limits, state, changed });
        let mut engine = Self { shared, threads: Vec::new() };
        for number in 0..limits.threads {
            let shared = Arc::clone(&engine.shared);
            let thread = std::thread::Builder::new()
                .name(format!("compute-{number}"))
                .spawn(move || shared.work())
                .map_err(|error| load_error(format!("a thread cannot be started: {error}")))?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    pub(crate) fn computer(&self) -> &Computer {
        &self.shared.computer
    }

    pub(crate) fn metrics(&self) -> &TextMetrics {
        &self.shared.metrics
    }

    pub(crate) fn places(&self) -> &Places {
        &self.shared.places
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.shared.runtime
    }

    /// Adds requests.
    pub(crate) fn add(&self, requests: Vec<Request>) {
        let mut state = self.shared.state.lock();
        for Request { responder, texts, wanted } in requests {
            let count = texts.len();
            let results = vec![None; count];
            let progress = Mutex::new(Progress { results, left: count, is_answered: false });
            let request = Arc::new(Open { responder, wanted, progress });
            state.waiting.extend((0..).zip(texts).map(|(at, text)| Waiting {
                request: Arc::clone(&request),
                at,
                text,
            }));
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.state.lock().is_closed = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Computes texts until the engine is dropped.
    fn work(&self) {
        while let Some(group) = self.next() {
            let group: Vec<&Waiting> = group.iter().collect();
            if let Err(error) = self.compute(&group) {
                match group.as_slice() {
                    [only] => self.store(only, Err(error)),
                    // One of the texts may be the cause, which does not concern other requests.
                    _ => {
                        for waiting in group {
                            if let Err(error) = self.compute(&[waiting]) {
                                self.store(waiting, Err(error));
                            }
                        }
                    }
                }
            }
            self.state.lock().busy -= 1;
        }
    }

    /// Computes texts together, and stores their results.
    ///
    /// # Errors
    /// The graph fails; nothing is stored then.
    fn compute(&self, group: &[&Waiting]) -> Result<(), InferError> {
        let texts: Vec<&Prepared> = group.iter().map(|waiting| &waiting.text).collect();
        let values = self.computer.run(&texts)?;
        let lengths = texts.iter().map(|text| text.tokens.ids.len());
        let tokens: usize = lengths.clone().sum();
        let padded = lengths.max().unwrap_or(0) * texts.len();
        self.metrics.ran(tokens, padded.saturating_sub(tokens));
        for (waiting, value) in group.iter().zip(values) {
            let tokens = u32::try_from(waiting.text.tokens.ids.len()).unwrap_or(u32::MAX);
            self.store(waiting, value.map(|value| RowResult { value, tokens }));
        }
        Ok(())
    }

    /// Waits for texts, and takes those that are computed next; `None` when the engine is dropped.
    fn next(&self) -> Option<Vec<Waiting>> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            state.waiting.retain(|waiting| waiting.request.is_open());
            if !state.waiting.is_empty() {
                break;
            }
            self.changed.wait(&mut state);
        }
        let idle = self.limits.threads.saturating_sub(state.busy).max(1);
        state.busy += 1;
        Some(state.take(self.limits.batch_tokens, idle))
    }

    /// Stores the result of a text, and answers its request if it is the last one.
    fn store(&self, waiting: &Waiting, result: Result<RowResult, InferError>) {
        let request = &*waiting.request;
        let mut progress = request.progress.lock();
        if progress.is_answered {
            return;
        }
        let answer = match result {
            Err(error) => Err(error),
            Ok(result) => {
                if let Some(place) = progress.results.get_mut(waiting.at) {
                    *place = Some(result);
                }
                progress.left = progress.left.saturating_sub(1);
                if progress.left > 0 {
                    return;
                }
                let model = &self.computer.model;
                reply(&progress.results, model, &self.places, &request.wanted, &self.runtime)
            }
        };
        progress.is_answered = true;
        // A response fails if its request has ended already, or if there is no memory for it.
        match answer {
            Ok(reply) => {
                if let Err(error) = request.responder.respond(reply, true) {
                    request.responder.fail(error);
                }
            }
            Err(error) => request.responder.fail(error),
        }
    }
}

impl State {
    /// Takes texts of similar lengths, among them the oldest one: at most `most` tokens with those
    /// that pad, and such that `idle` threads have work.
    fn take(&mut self, most: usize, idle: usize) -> Vec<Waiting> {
        let length = |waiting: &Waiting| waiting.text.tokens.ids.len();
        let mut order: Vec<usize> = (0..self.waiting.len().min(MAX_CANDIDATES)).collect();
        order.sort_by_key(|at| self.waiting.get(*at).map(length));
        let lengths: Vec<usize> =
            order.iter().filter_map(|at| self.waiting.get(*at).map(length)).collect();
        let share = lengths.iter().sum::<usize>().div_ceil(idle).max(FEW_TOKENS);
        let groups = batches::split(&lengths, most.min(share));
        let mut groups = groups.into_iter().filter_map(|range| order.get(range));
        let mut chosen = groups.find(|group| group.contains(&0)).unwrap_or_default().to_vec();
        chosen.sort_unstable();
        // From the last one, so that the positions of the others stay.
        chosen.into_iter().rev().map(|at| self.waiting.remove(at)).collect()
    }
}

impl Open {
    /// Returns whether the request waits for a result. A request that its client has cancelled is
    /// ended.
    fn is_open(&self) -> bool {
        let mut progress = self.progress.lock();
        if !progress.is_answered && self.responder.is_cancelled() {
            progress.is_answered = true;
            self.responder.fail(InferError::cancelled());
        }
        !progress.is_answered
    }
}
