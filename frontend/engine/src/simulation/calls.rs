//! The clients of a simulation: they send requests, await or abandon the answers, and know what is
//! right.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use pharos::error::{InferError, Reason};
use pharos::id::CorrelationId;
use pharos::infer::{InferInput, InferRequest};
use pharos::service::Streamed;
use pharos::tensor::{DataType, Tensor};
use pharos::timeline::{Instant, Timeline};

use super::models::QUEUE_TIMEOUT_US;
use super::worker::{answer_to, responses_to};
use super::world::{Event, World};
use crate::scheduler::{InferResult, InstanceResponses};

/// The most sequences of a model that clients run at the same time.
const SEQUENCES: usize = 6;

/// A request and its client.
pub(super) struct Call {
    pub(super) model: usize,
    answers: Option<Answers>,
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
    reader: Reader,
}

/// The client of a stream.
#[derive(Default)]
struct Reader {
    /// The number of responses that it has read.
    responses: u64,
    pauses: bool,
}

/// What a client waits for.
enum Answers {
    One(Pin<Box<dyn Future<Output = InferResult>>>),
    Many(InstanceResponses),
}

impl Call {
    /// Returns whether its client waits.
    pub(super) fn waits(&self) -> bool {
        self.answers.is_some()
    }

    /// Its client no longer pauses.
    pub(super) fn read_on(&mut self) {
        self.reader.pauses = false;
        self.woken.set();
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
    /// Whether the total is not known: a step was cancelled, or the sequence may begin again
    /// without notice.
    disturbed: bool,
}

/// Whether a request is to be polled.
#[derive(Debug)]
pub(super) struct Woken(AtomicBool);

impl Woken {
    /// Returns the flag of a new request, which is to be polled.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(AtomicBool::new(true)))
    }

    /// Lets the request be polled.
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Returns whether the request is to be polled, once.
    pub(super) fn take(&self) -> bool {
        // Mostly it is not: reading costs less than an exchange.
        self.0.load(Ordering::SeqCst) && self.0.swap(false, Ordering::SeqCst)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.set();
    }
}

/// Returns whether a request was refused before it entered a queue. Like Triton, the server counts
/// it in no statistic.
pub(super) fn is_refused(error: &InferError) -> bool {
    let refused = ["must specify the START flag", "Exceeds maximum queue size"];
    refused.iter().any(|text| error.message.contains(text))
}

/// Returns the values of a tensor.
pub(super) fn values_of(tensor: &Tensor) -> Vec<u64> {
    let bytes = tensor.data.pieces().concat();
    bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().unwrap())).collect()
}

impl World {
    /// Sends a request to a model.
    pub(super) fn send(&mut self, model: usize) {
        let mut request = InferRequest::default();
        let name = self.models[model].name;
        let rows = if self.models[model].config.max_batch_size == 0
            || self.models[model].has_sequences()
        {
            1
        } else {
            1 + self.random.below(2)
        };
        let values: Vec<u64> = (0..rows).map(|_| self.value(name == "cached")).collect();
        let sequence = self.models[model]
            .has_sequences()
            .then(|| self.next_step(model, values[0], &mut request));
        let expected = match sequence {
            Some(number) => vec![self.sequences[number].total],
            None => values.iter().copied().map(answer_to).collect(),
        };
        let starts = request.sequence_start;
        let mut timeout_us = None;
        if name == "levels" {
            request.priority = self.random.below(3);
            request.timeout_us =
                if self.random.chance(3) { 1_000 + self.random.below(1_000) } else { 0 };
            timeout_us =
                Some(if request.timeout_us == 0 { QUEUE_TIMEOUT_US } else { request.timeout_us });
        }
        let batches = self.models[model].config.max_batch_size > 0;
        let shape = if batches { vec![i64::try_from(rows).unwrap(), 1] } else { vec![1] };
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = Tensor { datatype: DataType::Uint64, shape, data: data.into() };
        request.inputs = vec![InferInput { name: "IN".into(), tensor }];
        request.timeline = Timeline { request_start: self.now, ..Timeline::default() };
        let driver = self.models[model].driver.clone();
        let checked = driver.config.check(&mut request).unwrap();
        let answers = match driver.config.decoupled {
            true => Answers::Many(driver.stream(request, checked)),
            false => {
                Answers::One(Box::pin(
                    async move { driver.infer(Box::new(request), checked).await },
                ))
            }
        };
        self.models[model].counted.sent += 1;
        let woken = Woken::new();
        let answers = Some(answers);
        let sent = self.now;
        let executed = 0;
        let reader = Reader::default();
        self.open.push(self.calls.len());
        self.calls.push(Call {
            model,
            answers,
            woken,
            values,
            expected,
            sent,
            timeout_us,
            sequence,
            executed,
            reader,
        });
        // A sequence without its start is refused.
        if self.random.chance(self.faults.cancel) && !starts {
            let after = self.random.below(8_000);
            self.after(after, Event::Cancel(self.calls.len() - 1));
        }
    }

    /// Makes a request the next step of a sequence, which adds a value to its total. Returns the
    /// number of the sequence.
    fn next_step(&mut self, model: usize, value: u64, request: &mut InferRequest) -> usize {
        let number = self.sequence(model);
        let last = self.random.chance(5);
        let open = &mut self.sequences[number];
        request.correlation_id = CorrelationId::Uint(open.id);
        request.sequence_start = open.total == 0 && !self.models[model].starts_implicitly();
        request.sequence_end = last;
        open.total += value;
        open.closed = last;
        self.coverage.steps += 1;
        number
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
        let open: Vec<usize> = sequences
            .filter(|(_, one)| one.model == model && !one.closed)
            .map(|(number, _)| number)
            .collect();
        if open.len() >= SEQUENCES || (!open.is_empty() && self.random.chance(2)) {
            return open[usize::try_from(self.random.below(open.len() as u64)).unwrap()];
        }
        let number = self.sequences.len();
        let disturbed = self.models[model].starts_implicitly();
        self.sequences.push(Sequence {
            model,
            id: number as u64 + 1,
            total: 0,
            closed: false,
            disturbed,
        });
        number
    }

    /// The client of a request goes away.
    pub(super) fn cancel(&mut self, call: usize) {
        let one = &mut self.calls[call];
        if one.answers.take().is_some() {
            self.models[one.model].counted.cancelled += 1;
            // Its sequence has a step that may not be executed. With implicit starts the others
            // continue.
            if let Some(sequence) = one.sequence {
                self.sequences[sequence].closed |= !self.models[one.model].starts_implicitly();
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
        let calls = &self.calls;
        self.open.retain(|number| calls[*number].waits());
        for at in 0..self.open.len() {
            let number = self.open[at];
            let call = &mut self.calls[number];
            if call.reader.pauses || !call.woken.take() {
                continue;
            }
            let waker = Waker::from(call.woken.clone());
            let mut context = Context::from_waker(&waker);
            match &mut call.answers {
                None => continue,
                Some(Answers::One(future)) => {
                    if let Poll::Ready(answer) = future.as_mut().poll(&mut context) {
                        call.answers = None;
                        self.on_answer(number, answer)?;
                    }
                }
                Some(Answers::Many(responses)) => {
                    if let Poll::Ready(response) = responses.poll_next(&mut context) {
                        // There may be more.
                        call.woken.set();
                        self.on_response(number, response.ok_or("a stream has no last response")?)?;
                    }
                }
            }
            changed = true;
        }
        Ok(changed)
    }

    /// A client reads a response of a stream.
    fn on_response(&mut self, number: usize, streamed: Streamed) -> Result<(), String> {
        let call = &mut self.calls[number];
        let values = call.values.clone();
        let name = self.models[call.model].name;
        if streamed.last {
            call.answers = None;
        } else if self.random.chance(6) {
            call.reader.pauses = true;
            let pause = self.random.below(3_000);
            self.after(pause, Event::Read(number));
        }
        let call = &mut self.calls[number];
        match streamed.answer {
            Ok(response) => {
                if !streamed.empty {
                    let expected: Vec<u64> = values
                        .iter()
                        .map(|value| answer_to(value + call.reader.responses))
                        .collect();
                    let got = values_of(&response.outputs[0].tensor);
                    if got != expected {
                        return Err(format!(
                            "request {number} to '{name}' has the response {got:?}, not \
                             {expected:?}"
                        ));
                    }
                    call.reader.responses += 1;
                    self.models[call.model].answered.insert(values[0]);
                }
                if streamed.last {
                    if call.reader.responses != responses_to(values[0]) {
                        return Err(format!(
                            "request {number} to '{name}' ends after {} responses",
                            call.reader.responses
                        ));
                    }
                    self.models[call.model].counted.succeeded += 1;
                }
            }
            Err(error) if streamed.last => self.on_error(number, &error)?,
            Err(error) => {
                return Err(format!(
                    "request {number} to '{name}' goes on after an error: {}",
                    error.message
                ));
            }
        }
        self.note(number as u64);
        Ok(())
    }

    fn on_answer(&mut self, number: usize, answer: InferResult) -> Result<(), String> {
        let call = &self.calls[number];
        let model = &mut self.models[call.model];
        match answer {
            Ok(response) => {
                let got = values_of(&response.outputs[0].tensor);
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
            Err(error) => self.on_error(number, &error)?,
        }
        self.note(number as u64);
        Ok(())
    }

    fn on_error(&mut self, number: usize, error: &InferError) -> Result<(), String> {
        let call = &self.calls[number];
        if error.message.contains("bug in the server") {
            return Err(format!("request {number}: {}", error.message));
        }
        if let Some(sequence) = call.sequence {
            self.sequences[sequence].closed = true;
            if error.reason == Reason::Timeout {
                return Err(format!(
                    "request {number} has no timeout, but its sequence: {}",
                    error.message
                ));
            }
        }
        let counted = &mut self.models[call.model].counted;
        if is_refused(error) {
            counted.refused += 1;
        } else {
            counted.failed += 1;
        }
        Ok(())
    }

    /// Checks that answers of a model with `preserve_ordering` arrive in the order of their
    /// requests.
    fn check_order(&self, number: usize) -> Result<(), String> {
        let model = self.calls[number].model;
        if self.models[model].name != "ordered" {
            return Ok(());
        }
        let overtaken = self.open.iter().find(|earlier| {
            let call = &self.calls[**earlier];
            **earlier < number && call.model == model && call.waits() && call.executed > 0
        });
        overtaken.map_or(Ok(()), |first| {
            Err(format!("request {number} is answered before request {first}"))
        })
    }
}
