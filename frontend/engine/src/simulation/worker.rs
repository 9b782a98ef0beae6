//! A simulated worker process: the other end of a real link. It reads frames from the ring and inputs from the arena, and writes
//! outputs into the arena, as a worker does.

use std::collections::{HashMap, VecDeque};
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;

use pharos::arena::{Arena, Block};
use pharos::shm::SharedMemory;
use pharos::tensor::DataType;
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::ring::{self, Consumer};
use pharos::wire::{Done, Execute, OutputBlock, PREFIX, ToWorker, WireError, decode_to_worker, payload_length};
use tokio::net::UnixStream;

use crate::memory;
use crate::wire::{Link, LinkParts, SharedLink};
use pharos_os::event_loops::EventLoops;
use pharos_telemetry::metrics::Ring;

/// The bytes of one element.
const ELEMENT: usize = 8;

/// What the models answer to a value, unless they accumulate.
pub(super) fn answer_to(value: u64) -> u64 {
    value.wrapping_mul(3).wrapping_add(1)
}

/// A simulated process.
pub(super) struct Worker {
    pub(super) link: SharedLink,
    frames: Consumer,
    inputs: SharedMemory,
    outputs: SharedMemory,
    arena: Arena,
    /// Outputs that the frontend has not released, by offset.
    lent: HashMap<u64, Block>,
    /// Batches in the order of arrival; the first one executes.
    pub(super) batches: VecDeque<Execute>,
    /// The totals of sequences, by key.
    totals: HashMap<u64, u64>,
    /// Whether the process was asked to end.
    pub(super) ending: bool,
    _sockets: (StdStream, StdStream),
}

/// The values of the requests of a batch: those of each request, in order; empty for padding.
pub(super) type Values = Vec<Vec<u64>>;

impl Worker {
    /// Starts a process that is connected to the frontend.
    pub(super) fn start() -> Self {
        let (ours, theirs) = StdStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let frames = ring::create().unwrap();
        let (arenas, inputs, outputs) = memory::create().unwrap();
        let (ring, _, _) = Ring::create("simulated").unwrap();
        let (regions, other) = StdStream::pair().unwrap();
        let parts = LinkParts {
            socket: UnixStream::from_std(ours).unwrap(),
            event_loop: EventLoops::default().of_link(),
            frames: ring::of_frontend(&frames).unwrap(),
            regions: regions.into(),
            arenas,
            ring,
        };
        let capacity = usize::try_from(memory::CAPACITY).unwrap();
        Self {
            link: Arc::new(Link::new(parts)),
            frames: ring::of_worker(&frames).unwrap().1,
            inputs: SharedMemory::map(&inputs, capacity).unwrap(),
            outputs: SharedMemory::map(&outputs, capacity).unwrap(),
            arena: Arena::new(memory::CAPACITY),
            lent: HashMap::new(),
            batches: VecDeque::new(),
            totals: HashMap::new(),
            ending: false,
            _sockets: (theirs, other),
        }
    }

    /// Reads the frames that have arrived, and returns the number of new batches.
    pub(super) fn read(&mut self) -> usize {
        let mut bytes = Vec::new();
        self.frames.read_all(&mut bytes).unwrap();
        let (mut rest, mut count) = (bytes.as_slice(), 0);
        while let Some((prefix, after)) = rest.split_first_chunk::<PREFIX>() {
            let (payload, after) = after.split_at(payload_length(*prefix).unwrap());
            rest = after;
            match decode_to_worker(payload).unwrap() {
                ToWorker::Execute(mut execute) => {
                    self.release(&std::mem::take(&mut execute.released));
                    self.batches.push_back(execute);
                    count += 1;
                }
                ToWorker::Release(offsets) => self.release(&offsets),
                ToWorker::SequenceEnded(keys) => self.totals.retain(|key, _| !keys.contains(key)),
                ToWorker::Shutdown => self.ending = true,
                _ => {}
            }
        }
        count
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

    /// Executes the first batch: removes it and returns its reply. Models with sequences answer with the totals of their
    /// sequences.
    ///
    /// # Errors
    /// A step of a sequence arrived that this process has not seen the start of.
    pub(super) fn execute(&mut self, (sequences, failed): (bool, &[u32]), now: Instant) -> Result<Done, String> {
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
                        return Err(format!("key {} is executed, but did not start in this process", step.key));
                    };
                    *total += values[0];
                    answers.push(*total);
                    if step.end {
                        self.totals.remove(&step.key);
                    }
                }
            }
        }
        let block = self.arena.allocate((answers.len() * ELEMENT) as u64).expect("room for outputs");
        let bytes: Vec<u8> = answers.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(self.outputs.copy_in(usize::try_from(block.offset).unwrap(), &bytes));
        self.lent.insert(block.offset, block);
        let shape = match execute.inputs[0].shape.len() {
            1 => vec![1],
            _ => vec![i64::try_from(answers.len()).unwrap(), 1],
        };
        let output = OutputBlock {
            output: 0,
            requests: Vec::new(),
            datatype: DataType::Uint64,
            shape,
            offset: block.offset,
            len: bytes.len() as u64,
            in_client_memory: false,
            loan: None,
        };
        let error = wire_error("this request fails");
        let failed = failed.iter().map(|position| (*position, error.clone())).collect();
        Ok(Done { outputs: vec![output], failed, ..done(execute.batch, now) })
    }

    /// Removes the first batch and returns a reply that the whole batch has failed.
    pub(super) fn fail(&mut self, now: Instant) -> Done {
        let execute = self.batches.pop_front().expect("a batch");
        Done { error: Some(wire_error("this batch fails")), ..done(execute.batch, now) }
    }
}

fn wire_error(message: &str) -> WireError {
    pharos::error::InferError::internal(message).into()
}

fn done(batch: u64, now: Instant) -> Done {
    let stamps = ComputeStamps { start: now, input_end: now, output_start: now, end: now };
    let (failed, outputs, parameters) = (Vec::new(), Vec::new(), Vec::new());
    let (rescheduled, open) = (Vec::new(), Vec::new());
    Done { batch, stamps, error: None, failed, outputs, parameters, rescheduled, open, held: false }
}
