//! The clients of a simulation: they send requests, await or abandon the answers, and know what is right.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use pharos::id::CorrelationId;
use pharos::infer::{InferInput, InferRequest};
use pharos::tensor::{DataType, Tensor};
use pharos::timeline::{Instant, Timeline};

use super::models::QUEUE_TIMEOUT_US;
use super::worker::answer_to;
use super::world::{Event, World};
use crate::scheduler::Answer;

/// The most sequences of a model that clients run at the same time.
const SEQUENCES: usize = 6;

/// A request and its client.
pub(super) struct Call {
    pub(super) model: usize,
    future: Option<Pin<Box<dyn Future<Output = Answer>>>>,
    woken: Arc<Woken>,
    /// One value for each row; unique, except for the model with a response cache.
    pub(super) values: Vec<u64>,
    expected: Vec<u64>,
    pub(super) sent: Instant,
    /// How long it may wait in the queue, in microseconds.
    pub(super) timeout_us: Option<u64>,
    /// Its sequence.
    sequence: Option<usize>,
    /// How often a worker has received it.
    pub(super) executed: u32,
}

impl Call {
    /// Returns whether its client waits.
    pub(super) fn waits(&self) -> bool {
        self.future.is_some()
    }
}

/// A sequence of a client.
pub(super) struct Sequence {
    model: usize,
    id: u64,
    /// The sum of the values sent.
    total: u64,
    /// Whether no more steps are sent: its end was sent, or a step has failed.
    closed: bool,
    /// Whether a step was cancelled, so that the total is not known.
    disturbed: bool,
}

#[derive(Debug)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl World {
    /// Sends a request to a model.
    pub(super) fn send(&mut self, model: usize) {
        let mut request = InferRequest::default();
        let name = self.models[model].name;
        let rows = if self.models[model].config.max_batch_size == 0 || self.models[model].has_sequences() {
            1
        } else {
            1 + self.random.below(2)
        };
        let values: Vec<u64> = (0..rows).map(|_| self.value(name == "cached")).collect();
        let (mut expected, mut sequence) = (values.iter().copied().map(answer_to).collect(), None);
        if self.models[model].has_sequences() {
            let number = self.sequence(model);
            let last = self.random.chance(5);
            let open = &mut self.sequences[number];
            request.correlation_id = CorrelationId::Uint(open.id);
            request.sequence_start = open.total == 0;
            request.sequence_end = last;
            open.total += values[0];
            open.closed = last;
            expected = vec![open.total];
            sequence = Some(number);
            self.coverage.steps += 1;
        }
        let starts = request.sequence_start;
        let mut timeout_us = None;
        if name == "levels" {
            request.priority = self.random.below(3);
            request.timeout_us = if self.random.chance(3) { 1_000 + self.random.below(1_000) } else { 0 };
            timeout_us = Some(if request.timeout_us == 0 { QUEUE_TIMEOUT_US } else { request.timeout_us });
        }
        let batches = self.models[model].config.max_batch_size > 0;
        let shape = if batches { vec![i64::try_from(rows).unwrap(), 1] } else { vec![1] };
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = Tensor { datatype: DataType::Uint64, shape, data: data.into() };
        request.inputs = vec![InferInput { name: "IN".into(), tensor }];
        request.timeline = Timeline { request_start: self.now, ..Timeline::default() };
        let driver = self.models[model].driver.clone();
        let checked = driver.config.check(&mut request).unwrap();
        let future = Box::pin(async move { driver.infer(request, checked).await });
        self.models[model].counted.sent += 1;
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        let (future, sent, executed) = (Some(future as _), self.now, 0);
        self.calls.push(Call { model, future, woken, values, expected, sent, timeout_us, sequence, executed });
        // A sequence without its start is refused.
        if self.random.chance(self.faults.cancel) && !starts {
            let after = self.random.below(8_000);
            self.after(after, Event::Cancel(self.calls.len() - 1));
        }
    }

    /// Returns the next value, or one of a few.
    fn value(&mut self, common: bool) -> u64 {
        if common {
            return self.random.below(12);
        }
        self.next_value += 1;
        self.next_value
    }

    /// Returns an open sequence of a model, or begins one.
    fn sequence(&mut self, model: usize) -> usize {
        let sequences = self.sequences.iter().enumerate();
        let open: Vec<usize> =
            sequences.filter(|(_, one)| one.model == model && !one.closed).map(|(number, _)| number).collect();
        if open.len() >= SEQUENCES || (!open.is_empty() && self.random.chance(2)) {
            return open[usize::try_from(self.random.below(open.len() as u64)).unwrap()];
        }
        let number = self.sequences.len();
        self.sequences.push(Sequence { model, id: number as u64 + 1, total: 0, closed: false, disturbed: false });
        number
    }

    /// The client of a request goes away.
    pub(super) fn cancel(&mut self, call: usize) {
        let one = &mut self.calls[call];
        if one.future.take().is_some() {
            self.models[one.model].counted.cancelled += 1;
            // Its sequence has a step that may not be executed.
            if let Some(sequence) = one.sequence {
                self.sequences[sequence].closed = true;
                self.sequences[sequence].disturbed = true;
            }
        }
    }

    /// Polls the requests that were woken. Returns whether any was.
    ///
    /// # Errors
    /// An answer is wrong.
    pub(super) fn poll_calls(&mut self) -> Result<bool, String> {
        let mut changed = false;
        while self.calls.get(self.first_open).is_some_and(|call| !call.waits()) {
            self.first_open += 1;
        }
        for number in self.first_open..self.calls.len() {
            let call = &mut self.calls[number];
            let Some(future) = call.future.as_mut().filter(|_| call.woken.0.swap(false, Ordering::SeqCst)) else {
                continue;
            };
            changed = true;
            let waker = Waker::from(call.woken.clone());
            if let Poll::Ready(answer) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                call.future = None;
                self.on_answer(number, answer)?;
            }
        }
        Ok(changed)
    }

    fn on_answer(&mut self, number: usize, answer: Answer) -> Result<(), String> {
        let call = &self.calls[number];
        let model = &mut self.models[call.model];
        match answer {
            Ok(response) => {
                let output = response.outputs.first().expect("an answer has an output");
                let bytes = output.tensor.data.pieces().concat();
                let chunks = bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().unwrap()));
                let got: Vec<u64> = chunks.collect();
                let known = call.sequence.is_none_or(|number| !self.sequences[number].disturbed);
                if got != call.expected && known {
                    return Err(format!(
                        "request {number} to '{}' has the answer {got:?}, not {:?}",
                        model.name, call.expected
                    ));
                }
                model.counted.succeeded += 1;
                if model.name != "cached" {
                    model.answered.insert(call.values[0]);
                }
                self.check_order(number)?;
            }
            Err(error) => {
                if error.message.contains("bug in the server") {
                    return Err(format!("request {number}: {}", error.message));
                }
                if let Some(sequence) = call.sequence {
                    self.sequences[sequence].closed = true;
                }
                // Triton counts requests that never enter a queue in no statistic.
                let refused = ["must specify the START flag", "Exceeds maximum queue size"];
                if refused.iter().any(|text| error.message.contains(text)) {
                    model.counted.refused += 1;
                } else {
                    model.counted.failed += 1;
                }
            }
        }
        self.note(number as u64);
        Ok(())
    }

    /// Checks that answers of a model with `preserve_ordering` arrive in the order of their requests.
    fn check_order(&self, number: usize) -> Result<(), String> {
        let model = self.calls[number].model;
        if self.models[model].name != "ordered" {
            return Ok(());
        }
        let overtaken =
            self.calls[..number].iter().position(|call| call.model == model && call.waits() && call.executed > 0);
        overtaken.map_or(Ok(()), |first| Err(format!("request {number} is answered before request {first}")))
    }
}
