//! Events of the requests to decoupled models, whose responses are streams.

use super::super::series::ModelSeries;
use super::super::streams::StreamProgress;
use pharos_base::timeline::Instant;

/// Counts a response with data: `bytes` bytes of tensors, at the second time, to the request that began at the first.
///
/// Call before the response is sent, and neither for errors nor for an empty response that only marks the end.
pub fn stream_response(series: &ModelSeries, progress: &StreamProgress, times: (Instant, Instant), bytes: u64) {
    let (started, now) = times;
    let previous = progress.advance(now);
    series.record(move |series| match previous {
        None => series.cells.streams.first_response(now.ns_since(started), bytes),
        Some(previous) => series.cells.streams.later_response(now.ns_since(previous), bytes),
    });
}

/// Counts a request that has ended, also if it failed or was cancelled after it entered the queue.
///
/// Call once for each request, before its last response is sent.
pub fn stream_ended(series: &ModelSeries, progress: &StreamProgress) {
    let responses = progress.responses();
    series.record(move |series| series.cells.streams.ended(responses));
}
