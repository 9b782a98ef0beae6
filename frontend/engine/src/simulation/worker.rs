//! A simulated worker process: the other end of a real link. It reads frames from the ring and
//! inputs from the arena, and writes outputs into the arena, as a worker does.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;

use pharos::arena::{Arena, Block};
use pharos::shm::SharedMemory;
use pharos::tensor::DataType;
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{
    CREDITS, Credits, Done, Execute, OutputBlock, Response, ToWorker, WireError, flags,
};

use crate::memory;
use crate::wire::SharedLink;
use crate::wire::worker_end::{self, WorkerEnd};

/// The bytes of one element.
const ELEMENT: usize = 8;

/// What the models answer to a value, unless they accumulate.
pub(super) fn answer_to(value: u64) -> u64 {
    value.wrapping_mul(3).wrapping_add(1)
}

/// The number of responses of the decoupled model to a value: for some, more than a client may
/// leave unread.
pub(super) fn responses_to(value: u64) -> u64 {
    if value.is_multiple_of(13) { 3 * u64::from(CREDITS) } else { value % 4 }
}

/// How the responses to a value end: with the last one that has data, with one that has none, or
/// with the batch.
enum Ending {
    Data,
    Empty,
    Batch,
}

fn ending_of(value: u64) -> Ending {
    match value % 3 {
        0 if responses_to(value) > 0 => Ending::Data,
        2 => Ending::Batch,
        _ => Ending::Empty,
    }
}

/// The responses to one request of the batch that executes.
struct Stream {
    values: Vec<u64>,
    sent: u64,
    taken: u64,
    ended: bool,
}

impl Stream {
    fn has_data(&self) -> bool {
        !self.ended && self.sent < responses_to(self.values[0])
    }
}

/// What a process of the decoupled model does next.
pub(super) enum Step {
    Respond(Response),
    /// All clients have as many unread responses as they may have.
    Wait,
    /// All responses are sent.
    End,
}

/// A simulated process.
pub(super) struct Worker<L = SharedLink> {
    /// The frontend's end, if the simulation has it.
    pub(super) link: L,
    pub(super) end: WorkerEnd,
    inputs: SharedMemory,
    outputs: SharedMemory,
    arena: Arena,
    /// Outputs that the frontend has not released, by offset.
    lent: HashMap<u64, Block>,
    /// Batches in the order of arrival; the first one executes.
    pub(super) batches: VecDeque<Execute>,
    /// The totals of sequences, by key.
    totals: HashMap<u64, u64>,
    /// The streams of the batch that executes, if the model is decoupled.
    streams: Vec<Stream>,
    /// Whether it waits for clients, and whether one has read responses or is gone since.
    waits: bool,
    woken: bool,
    /// Whether it was asked to load a model, and to stop.
    pub(super) to_load: bool,
    pub(super) to_stop: bool,
}

/// The values of the requests of a batch: those of each request, in order.
pub(super) type Values = Vec<Vec<u64>>;

impl Worker {
    /// Starts a process that is connected to the frontend.
    pub(super) fn start() -> Self {
        let (link, end) = worker_end::connect();
        Self::of(link, end)
    }
}

impl<L> Worker<L> {
    /// Returns a process that has this end of a connection.
    pub(super) fn of(link: L, end: WorkerEnd) -> Self {
        let capacity = usize::try_from(memory::CAPACITY).unwrap();
        Self {
            inputs: SharedMemory::map(&end.inputs, capacity).unwrap(),
            outputs: SharedMemory::map(&end.outputs, capacity).unwrap(),
            link,
            end,
            to_load: false,
            to_stop: false,
            arena: Arena::new(memory::CAPACITY),
            lent: HashMap::new(),
            batches: VecDeque::new(),
            totals: HashMap::new(),
            streams: Vec::new(),
            waits: false,
            woken: false,
        }
    }

    /// Reads the frames that have arrived, and returns the number of new batches.
    pub(super) fn read(&mut self) -> usize {
        let mut count = 0;
        for frame in self.end.received() {
            match frame {
                ToWorker::Execute(mut execute) => {
                    self.release(&std::mem::take(&mut execute.released));
                    self.batches.push_back(execute);
                    count += 1;
                }
                ToWorker::Release(offsets) => self.release(&offsets),
                ToWorker::Credits(credits) => self.on_credits(credits),
                ToWorker::Load(_) => self.to_load = true,
                ToWorker::Shutdown => self.to_stop = true,
                ToWorker::SequenceEnded(keys) => self.totals.retain(|key, _| !keys.contains(key)),
                _ => {}
            }
        }
        count
    }

    fn on_credits(&mut self, credits: Credits) {
        self.release(&credits.released);
        if self.batches.front().is_some_and(|batch| batch.batch == credits.batch)
            && let Some(stream) = self.streams.get_mut(credits.request as usize)
        {
            stream.taken = stream.taken.max(credits.taken);
            self.woken = true;
        }
    }

    /// Returns whether it has waited for clients, and goes on now.
    pub(super) fn goes_on(&mut self) -> bool {
        let goes_on = self.waits && self.woken;
        self.waits &= !goes_on;
        goes_on
    }

    fn release(&mut self, offsets: &[u64]) {
        for offset in offsets {
            let block = self.lent.remove(offset).expect("a block is released once");
            self.arena.release(block);
        }
    }

    /// Returns the number of bytes that the frontend has not released.
    pub(super) fn lent(&self) -> u64 {
        self.arena.used()
    }

    /// Returns the values of the requests of a batch.
    pub(super) fn values(&self, execute: &Execute) -> Values {
        let input = execute.inputs.first().expect("a batch has an input");
        let mut at = usize::try_from(input.offset).unwrap();
        let mut of = |rows: u32| -> Vec<u64> {
            let mut values = Vec::new();
            for _ in 0..rows.max(1) {
                let mut bytes = [0; ELEMENT];
                assert!(self.inputs.copy_out(at, &mut bytes), "the input is inside the arena");
                values.push(u64::from_le_bytes(bytes));
                at += ELEMENT;
            }
            values
        };
        execute.requests.iter().map(|request| of(request.rows)).collect()
    }

    /// Begins to execute the first batch of a decoupled model.
    pub(super) fn begin_streams(&mut self) {
        let values = self.batches.front().map(|batch| self.values(batch)).unwrap_or_default();
        let stream = |values| Stream { values, sent: 0, taken: 0, ended: false };
        self.streams = values.into_iter().map(stream).collect();
        self.waits = false;
    }

    /// Returns the next response of the first batch, to a request that `choice` selects; with
    /// `fails`, an error that ends it.
    pub(super) fn next_step(&mut self, choice: u64, fails: bool, now: Instant) -> Step {
        let batch = self.batches.front().expect("a batch");
        let number = batch.batch;
        let row = batch.flags;
        let cancelled: Vec<bool> =
            (0..self.streams.len()).map(|position| self.is_cancelled(row, position)).collect();
        for (stream, cancelled) in self.streams.iter_mut().zip(cancelled) {
            stream.ended |= cancelled;
            stream.ended |=
                !stream.has_data() && matches!(ending_of(stream.values[0]), Ending::Batch);
        }
        let open = |stream: &Stream| !stream.ended;
        // An end without data needs no credit.
        let can = |stream: &Stream| {
            open(stream) && (!stream.has_data() || stream.sent < stream.taken + u64::from(CREDITS))
        };
        let able: Vec<usize> =
            (0..self.streams.len()).filter(|at| can(&self.streams[*at])).collect();
        self.waits = able.is_empty() && self.streams.iter().any(open);
        self.woken = false;
        if able.is_empty() {
            return if self.waits { Step::Wait } else { Step::End };
        }
        let at = able[usize::try_from(choice % able.len() as u64).unwrap()];
        let response = self.response(number, at, fails, now);
        self.streams[at].ended |= response.last;
        Step::Respond(response)
    }

    fn response(&mut self, batch: u64, at: usize, fails: bool, now: Instant) -> Response {
        let stream = &mut self.streams[at];
        let has_data = stream.has_data() && !fails;
        let answers: Vec<u64> =
            stream.values.iter().map(|value| answer_to(value + stream.sent)).collect();
        stream.sent += u64::from(has_data);
        let last = !has_data
            || (!stream.has_data() && matches!(ending_of(stream.values[0]), Ending::Data));
        let rows = answers.len();
        let outputs =
            if has_data { vec![self.output(&answers, vec![rows as i64, 1])] } else { Vec::new() };
        let Done { stamps, .. } = done(batch, now);
        let error = fails.then(|| wire_error("this request fails"));
        let request = u32::try_from(at).unwrap();
        let empty = !has_data && !fails;
        Response { batch, request, outputs, parameters: Vec::new(), error, last, empty, stamps }
    }

    fn is_cancelled(&self, row: u8, position: usize) -> bool {
        let (word, bit) = flags::bit(row, position).expect("a small batch");
        self.inputs.words()[word].load(Ordering::Relaxed) & bit != 0
    }

    /// Removes the first batch of a decoupled model and returns its reply.
    pub(super) fn end_streams(&mut self, now: Instant) -> Done {
        self.streams.clear();
        let execute = self.batches.pop_front().expect("a batch");
        done(execute.batch, now)
    }

    /// Executes the first batch: removes it and returns its reply. Models with sequences answer
    /// with the totals of their sequences.
    ///
    /// # Errors
    /// A step of a sequence arrived that this process has not seen the start of.
    pub(super) fn execute(
        &mut self,
        sequences: bool,
        failed: &[u32],
        now: Instant,
    ) -> Result<Done, String> {
        let execute = self.batches.pop_front().expect("a batch");
        let mut answers = Vec::new();
        for (request, values) in execute.requests.iter().zip(self.values(&execute)) {
            match (sequences, request.sequence) {
                (false, _) => answers.extend(values.into_iter().map(answer_to)),
                (true, None) => answers.extend(values.iter().map(|_| 0)),
                (true, Some(step)) => {
                    if step.start {
                        self.totals.insert(step.key, 0);
                    }
                    let Some(total) = self.totals.get_mut(&step.key) else {
                        return Err(format!(
                            "key {} is executed, but did not start in this process",
                            step.key
                        ));
                    };
                    *total += values[0];
                    answers.push(*total);
                    if step.end {
                        self.totals.remove(&step.key);
                    }
                }
            }
        }
        let shape = match execute.inputs[0].shape.len() {
            1 => vec![1],
            _ => vec![i64::try_from(answers.len()).unwrap(), 1],
        };
        let output = self.output(&answers, shape);
        let error = wire_error("this request fails");
        let failed = failed.iter().map(|position| (*position, error.clone())).collect();
        Ok(Done { outputs: vec![output], failed, ..done(execute.batch, now) })
    }

    /// Writes an output.
    fn output(&mut self, answers: &[u64], shape: Vec<i64>) -> OutputBlock {
        let block =
            self.arena.allocate((answers.len() * ELEMENT) as u64).expect("room for outputs");
        let bytes: Vec<u8> = answers.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(self.outputs.copy_in(usize::try_from(block.offset).unwrap(), &bytes));
        let offset = block.offset;
        let len = bytes.len() as u64;
        self.lent.insert(offset, block);
        OutputBlock {
            output: 0,
            requests: Vec::new(),
            datatype: DataType::Uint64,
            shape,
            offset,
            len,
            in_client_memory: false,
            loan: None,
        }
    }

    /// Removes the first batch and returns a reply that the whole batch has failed.
    pub(super) fn fail(&mut self, now: Instant) -> Done {
        self.streams.clear();
        let execute = self.batches.pop_front().expect("a batch");
        Done { error: Some(wire_error("this batch fails")), ..done(execute.batch, now) }
    }
}

fn wire_error(message: &str) -> WireError {
    pharos::error::InferError::internal(message).into()
}

fn done(batch: u64, now: Instant) -> Done {
    let stamps = ComputeStamps { start: now, input_end: now, output_start: now, end: now };
    let failed = Vec::new();
    let outputs = Vec::new();
    let parameters = Vec::new();
    let rescheduled = Vec::new();
    let open = Vec::new();
    Done { batch, stamps, error: None, failed, outputs, parameters, rescheduled, open, held: false }
}
