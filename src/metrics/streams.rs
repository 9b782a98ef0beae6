//! The responses of a decoupled model as streams: the time to the first response, the times between responses, their number
//! and their size. Only responses with data count: no errors, and no empty response that only marks the end of a request.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::atomic::Count;
use super::durations::{Buckets, definition};
use super::family::Registry;
use super::reading::{Details, Number, Reading};
use super::source::{ModelValue, StreamValue};
use crate::timeline::Instant;

/// The progress of one request's responses. They arrive one after the other.
#[derive(Debug, Default)]
pub struct StreamProgress {
    responses: AtomicU64,
    /// The arrival of the latest response.
    latest: AtomicU64,
}

impl StreamProgress {
    /// Counts a response. Returns the arrival of the previous one, or `None` for the first.
    fn advance(&self, now: Instant) -> Option<Instant> {
        let before = self.responses.fetch_add(1, Ordering::Relaxed);
        let latest = self.latest.swap(now.0, Ordering::Relaxed);
        (before > 0).then_some(Instant(latest))
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
    /// Creates the histograms that are defined and missing. `own` are the model's own buckets, by metric name.
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

    /// Counts a response with `bytes` bytes of tensors to the request that began at `started`.
    pub(super) fn response(&self, progress: &StreamProgress, (started, now): (Instant, Instant), bytes: u64) {
        match progress.advance(now) {
            None => observe(&self.first, now.ns_since(started)),
            Some(previous) => observe(&self.interval, now.ns_since(previous)),
        }
        self.responses.add(1);
        self.bytes.add(bytes);
    }

    /// Counts a request that has ended.
    pub(super) fn ended(&self, progress: &StreamProgress) {
        observe(&self.length, progress.responses.load(Ordering::Relaxed));
    }

    pub(super) fn read(&self, value: StreamValue, details: Details) -> Option<Reading> {
        let whole = |count: &Count| Some(Reading::Number(Number::Whole(count.get())));
        let histogram = |distribution: &Distribution| Some(Reading::Histogram(distribution.get()?.read(details)));
        match value {
            StreamValue::FirstResponse => histogram(&self.first),
            StreamValue::Interval => histogram(&self.interval),
            StreamValue::Length => histogram(&self.length),
            StreamValue::Responses => whole(&self.responses),
            StreamValue::Bytes => whole(&self.bytes),
        }
    }
}
