//! Progress of the requests of a batch that are, or may be, answered individually.

use pharos::error::InferError;
use pharos::infer::Parameters;
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{Execute, OutputBlock, Resumed, WireError};

use crate::deferred::DeferredReplies;
use crate::error::run_error;

/// A request: the number of its batch, and its position there.
pub(crate) type RequestPlace = (u64, u32);

/// The requests of a batch that are, or may be, answered individually.
pub(crate) struct Streams {
    pub(crate) requests: Vec<Stream>,
    /// The row of the cancellation flags, while the batch is executed.
    pub(crate) row: Option<u8>,
    /// The frontend has been sent the outcome of the batch.
    pub(crate) announced: bool,
    pub(crate) decoupled: bool,
    start: Instant,
    input_end: Option<Instant>,
    pub(crate) deferred: DeferredReplies,
}

/// One request.
#[derive(Clone, Default)]
pub(crate) struct Stream {
    /// Responses that used credit, including those in earlier batches.
    pub(crate) sent: u64,
    /// Responses that the client has read, according to the latest frame.
    pub(crate) taken: u64,
    pub(crate) ended: bool,
    pub(crate) detached: bool,
    pub(crate) cancelled: bool,
}

/// A response as it is sent.
#[derive(Default)]
pub(crate) struct ResponseContent {
    pub(crate) outputs: Vec<OutputBlock>,
    pub(crate) parameters: Parameters,
    pub(crate) error: Option<WireError>,
    /// No response follows.
    pub(crate) last: bool,
    /// It only ends the stream.
    pub(crate) empty: bool,
    /// The time at which the model had computed it.
    pub(crate) output_start: Instant,
}

/// Data removed from a batch when its execution is over.
#[derive(Default)]
pub(crate) struct Collected {
    pub(crate) deferred: DeferredReplies,
    /// Requests that are not answered yet, ascending.
    pub(crate) open: Vec<u32>,
}

impl Streams {
    /// Creates the streams of a batch that begins to execute.
    pub(crate) fn new(execute: &Execute, decoupled: bool, start: Instant) -> Self {
        let mut requests = vec![Stream::default(); execute.requests.len()];
        for &Resumed { request, sent, taken } in &execute.resumed {
            if let Some(stream) = requests.get_mut(request as usize) {
                *stream = Stream { sent, taken, ..Stream::default() };
            }
        }
        let row = Some(execute.flags);
        let deferred = DeferredReplies::default();
        Self { requests, row, announced: false, decoupled, start, input_end: None, deferred }
    }

    /// Records that the client has read this many responses to a request in total.
    pub(crate) fn take_credits(&mut self, request: u32, taken: u64) {
        if let Some(stream) = self.requests.get_mut(request as usize) {
            stream.taken = stream.taken.max(taken);
        }
    }

    /// Marks a request as cancelled.
    pub(crate) fn cancel(&mut self, request: u32) {
        if let Some(stream) = self.requests.get_mut(request as usize) {
            stream.cancelled = true;
        }
    }

    /// Records that the inputs are where the model needs them.
    pub(crate) fn inputs_ready(&mut self, at: Instant) {
        self.input_end.get_or_insert(at);
    }

    /// Returns the stream of a request that is not answered yet.
    pub(crate) fn stream(&mut self, request: u32) -> Result<&mut Stream, InferError> {
        let count = self.requests.len();
        let stream = self.requests.get_mut(request as usize).ok_or_else(|| {
            run_error(format!("there is no request {request} in a batch of {count}"))
        })?;
        if stream.ended {
            return Err(run_error(format!(
                "request {request} of the batch has had its last response"
            )));
        }
        Ok(stream)
    }

    /// Ends the execution; the `rescheduled` requests are executed again.
    pub(crate) fn collect(&mut self, went_well: bool, rescheduled: &[u32]) -> Collected {
        self.row = None;
        let deferred = std::mem::take(&mut self.deferred);
        for (position, stream) in (0..).zip(&mut self.requests) {
            stream.detached &= went_well && !rescheduled.contains(&position);
        }
        let open = (0..).zip(&self.requests).filter(|(_, stream)| stream.detached && !stream.ended);
        Collected { deferred, open: open.map(|(position, _)| position).collect() }
    }

    /// Whether every request is answered, or is not answered individually.
    pub(crate) fn is_over(&self) -> bool {
        self.row.is_none() && self.requests.iter().all(|stream| stream.ended || !stream.detached)
    }

    /// Returns the stamps of a response.
    pub(crate) fn stamps(&self, output_start: Instant, end: Instant) -> ComputeStamps {
        let input_end = self.input_end.unwrap_or(self.start);
        ComputeStamps {
            start: self.start,
            input_end,
            output_start: output_start.max(input_end),
            end,
        }
    }
}
