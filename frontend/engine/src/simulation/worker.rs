//! A simulated worker process: the other end of a real link. It reads frames from the ring and inputs from the arena, and writes
//! outputs into the arena, as a worker does.

use std::collections::{HashMap, VecDeque};

use pharos::arena::{Arena, Block};
use pharos::shm::SharedMemory;
use pharos::tensor::DataType;
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{Done, Execute, OutputBlock, ToWorker, WireError};

use crate::memory;
use crate::wire::SharedLink;
use crate::wire::worker_end::{self, WorkerEnd};

/// The bytes of one element.
const ELEMENT: usize = 8;

/// What the models answer to a value, unless they accumulate.
pub(super) fn answer_to(value: u64) -> u64 {
    value.wrapping_mul(3).wrapping_add(1)
}

/// A simulated process.
pub(super) struct Worker {
    pub(super) link: SharedLink,
    end: WorkerEnd,
    inputs: SharedMemory,
    outputs: SharedMemory,
    arena: Arena,
    /// Outputs that the frontend has not released, by offset.
    lent: HashMap<u64, Block>,
    /// Batches in the order of arrival; the first one executes.
    pub(super) batches: VecDeque<Execute>,
    /// The totals of sequences, by key.
    totals: HashMap<u64, u64>,
}

/// The values of the requests of a batch: those of each request, in order.
pub(super) type Values = Vec<Vec<u64>>;

impl Worker {
    /// Starts a process that is connected to the frontend.
    pub(super) fn start() -> Self {
        let (link, end) = worker_end::connect();
        let capacity = usize::try_from(memory::CAPACITY).unwrap();
        Self {
            inputs: SharedMemory::map(&end.inputs, capacity).unwrap(),
            outputs: SharedMemory::map(&end.outputs, capacity).unwrap(),
            link,
            end,
            arena: Arena::new(memory::CAPACITY),
            lent: HashMap::new(),
            batches: VecDeque::new(),
            totals: HashMap::new(),
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
                ToWorker::SequenceEnded(keys) => self.totals.retain(|key, _| !keys.contains(key)),
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
