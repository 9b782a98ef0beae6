//! The responses of a decoupled model as streams: the time to the first response, the times between
//! responses, their number and their size. Only responses with data count: no errors, and no empty
//! response that only marks the end of a request.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use pharos_base::timeline::Instant;

use super::atomic::Count;
use super::durations::{Buckets, copy_of, definition};
use super::family::Registry;
use super::reading::{Details, Number, Reading};
use super::source::{ModelValue, StreamValue};

/// The progress of one request's responses. They arrive one after the other.
#[derive(Debug, Default)]
pub struct StreamProgress {
    responses: AtomicU64,
    /// The arrival of the latest response.
    latest: AtomicU64,
}

impl StreamProgress {
    /// Counts a response. Returns the arrival of the previous one, or `None` for the first.
    pub(super) fn advance(&self, now: Instant) -> Option<Instant> {
        let before = self.responses.fetch_add(1, Ordering::Relaxed);
        let latest = self.latest.swap(now.0, Ordering::Relaxed);
        (before > 0).then_some(Instant(latest))
    }

    /// Returns the number of responses so far.
    pub(super) fn responses(&self) -> u64 {
        self.responses.load(Ordering::Relaxed)
    }
}

/// A histogram of nanoseconds or of numbers, created when a definition first enables its metric.
type Distribution = OnceLock<Buckets>;

fn observe(distribution: &Distribution, value: u64) {
    if let Some(buckets) = distribution.get() {
        buckets.observe(value);
    }
}

/// The streams of one decoupled model.
#[derive(Debug, Default)]
pub(super) struct StreamCells {
    first: Distribution,
    interval: Distribution,
    length: Distribution,
    responses: Count,
    bytes: Count,
}

impl StreamCells {
    /// Returns the values of this moment, with the requested details.
    pub(super) fn copy(&self, details: Details) -> Self {
        Self {
            first: copy_of(&self.first, details),
            interval: copy_of(&self.interval, details),
            length: copy_of(&self.length, details),
            responses: self.responses.clone(),
            bytes: self.bytes.clone(),
        }
    }

    /// Returns the values of this moment without the distributions.
    pub(super) fn copy_counts(&self) -> Self {
        Self { responses: self.responses.clone(), bytes: self.bytes.clone(), ..Self::default() }
    }

    /// Creates the histograms that are defined and missing. `own` are the model's own buckets, by
    /// metric name.
    pub(super) fn define(&self, registry: &Registry, own: &[(String, Vec<f64>)]) {
        for (value, distribution) in [
            (StreamValue::FirstResponse, &self.first),
            (StreamValue::Interval, &self.interval),
            (StreamValue::Length, &self.length),
        ] {
            if let Some((spec, unit)) = definition(registry, ModelValue::Stream(value)) {
                distribution.get_or_init(|| Buckets::new(own, &spec, unit));
            }
        }
    }

    /// Counts the first response to a request, `ns` after the request's start, with `bytes` bytes
    /// of tensors.
    pub(super) fn first_response(&self, ns: u64, bytes: u64) {
        observe(&self.first, ns);
        self.add_response(bytes);
    }

    /// Counts a further response to a request, `ns` after the previous one.
    pub(super) fn later_response(&self, ns: u64, bytes: u64) {
        observe(&self.interval, ns);
        self.add_response(bytes);
    }

    fn add_response(&self, bytes: u64) {
        self.responses.add(1);
        self.bytes.add(bytes);
    }

    /// Counts a request that has ended after this number of responses.
    pub(super) fn ended(&self, responses: u64) {
        observe(&self.length, responses);
    }

    pub(super) fn read(&self, value: StreamValue, details: Details) -> Option<Reading> {
        let whole = |count: &Count| Some(Reading::Number(Number::Whole(count.get())));
        let histogram = |distribution: &Distribution| {
            Some(Reading::Histogram(distribution.get()?.read(details)))
        };
        match value {
            StreamValue::FirstResponse => histogram(&self.first),
            StreamValue::Interval => histogram(&self.interval),
            StreamValue::Length => histogram(&self.length),
            StreamValue::Responses => whole(&self.responses),
            StreamValue::Bytes => whole(&self.bytes),
        }
    }
}
