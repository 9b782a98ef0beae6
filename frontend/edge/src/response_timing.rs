//! The times of a request in its answer: `Server-Timing` (W3C) as a header over HTTP and as
//! metadata over gRPC. Answers also return the client's `traceparent`.
//!
//! The times are those of the timeline from which the statistics are counted, in full precision, so
//! that sums over answers and the statistics agree.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue, TE};
use pharos::id::TraceId;
use pharos::timeline::{CacheLookup, Timeline};

use crate::headers::TRACEPARENT;

/// The header, and over gRPC the metadata, with the times.
pub const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// The header, or the metadata, with which a client requests them: `true`.
const REQUEST_TIMING: HeaderName = HeaderName::from_static("request-timing");

/// The answers that carry times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// All, or a sample of them, and those to clients that request them.
    Always,
    /// Those to clients that request them.
    #[default]
    OnRequest,
    /// None. Answers do not return `traceparent` either, unless the server traces the request.
    Off,
}

/// The setting `--response-timing`. Clones share the sample.
#[derive(Clone, Debug, Default)]
pub struct ResponseTiming {
    mode: Mode,
    /// Present if only one of several answers carries times.
    sample: Option<Arc<Sample>>,
}

/// Selects one of `rate` requests.
#[derive(Debug)]
struct Sample {
    rate: u64,
    requests: AtomicU64,
}

impl ResponseTiming {
    /// Creates the setting. With [`Mode::Always`], one of `rate` answers carries times; 0 means the
    /// same as 1.
    pub fn new(mode: Mode, rate: u32) -> Self {
        let sampled = mode == Mode::Always && rate > 1;
        Self {
            mode,
            sample: sampled
                .then(|| Arc::new(Sample { rate: rate.into(), requests: AtomicU64::new(0) })),
        }
    }

    /// Returns what the answer to a request with these headers carries.
    pub fn of(&self, headers: &HeaderMap) -> AnswerTiming {
        let (trace, traceparent) = trace(headers).unzip();
        if self.mode == Mode::Off {
            return AnswerTiming { trace, ..AnswerTiming::default() };
        }
        let sampled = || match &self.sample {
            Some(sample) => {
                sample.requests.fetch_add(1, Ordering::Relaxed).is_multiple_of(sample.rate)
            }
            None => self.mode == Mode::Always,
        };
        let requested = headers
            .get(REQUEST_TIMING)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"));
        AnswerTiming { times: requested || sampled(), trace, traceparent }
    }
}

/// Returns the trace that the client's `traceparent` names, and the header. A header that is
/// repeated or invalid does not count.
fn trace(headers: &HeaderMap) -> Option<(TraceId, Box<HeaderValue>)> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let value = values.next()?;
    if values.next().is_some() {
        return None;
    }
    let trace = TraceId::from_traceparent(value.to_str().ok()?)?;
    Some((trace, Box::new(value.clone())))
}

/// Returns whether a client accepts trailers behind the body (RFC 9110, 6.5.1).
pub fn accepts_trailers(headers: &HeaderMap) -> bool {
    let listed = |value: &HeaderValue| {
        let text = value.to_str().unwrap_or_default();
        text.split(',').any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
    };
    headers.get_all(TE).iter().any(listed)
}

/// What one answer carries.
#[derive(Clone, Debug, Default)]
pub struct AnswerTiming {
    times: bool,
    trace: Option<TraceId>,
    // In a box, because each request has room for it, and few requests bring it.
    traceparent: Option<Box<HeaderValue>>,
}

impl AnswerTiming {
    /// Returns the trace that the client's `traceparent` names.
    pub fn trace(&self) -> Option<TraceId> {
        self.trace
    }

    /// Returns whether the answer carries times.
    pub fn has_times(&self) -> bool {
        self.times
    }

    /// Returns the header's value for a successful request, or `None` if the answer carries no
    /// times.
    pub fn value(&self, timeline: &Timeline) -> Option<HeaderValue> {
        if !self.times {
            return None;
        }
        let mut value = HeaderValue::from_bytes(server_timing(timeline).text()).ok()?;
        // HTTP/2 then leaves it out of its table of headers (RFC 7541, 7.1.3), where a value that
        // never occurs again takes the room of others.
        value.set_sensitive(true);
        Some(value)
    }

    /// Adds the client's `traceparent` and the times to the headers, or metadata, of an answer.
    pub fn add_to(self, headers: &mut HeaderMap, value: Option<HeaderValue>) {
        if let Some(traceparent) = self.traceparent {
            headers.insert(TRACEPARENT, *traceparent);
        }
        if let Some(value) = value {
            headers.insert(SERVER_TIMING, value);
        }
    }
}

/// The text of a header, of limited length. It needs no memory until the header is complete.
struct Line {
    bytes: [u8; LONGEST],
    length: usize,
}

/// The greatest length of the times: five with 21 characters each, their names, the cache and the
/// batch size.
const LONGEST: usize = 256;

impl Line {
    fn push(&mut self, text: &[u8]) {
        if let Some(room) = self.bytes.get_mut(self.length..self.length + text.len()) {
            room.copy_from_slice(text);
            self.length += text.len();
        }
    }

    /// Adds a number of nanoseconds as milliseconds, exactly and without trailing zeros: over
    /// HTTP/2, each character is encoded.
    fn push_ms(&mut self, ns: u64) {
        self.push_number(ns / 1_000_000);
        let mut decimals = *b".000000";
        let mut rest = ns % 1_000_000;
        if rest == 0 {
            return;
        }
        for digit in decimals.iter_mut().skip(1).rev() {
            *digit += (rest % 10) as u8;
            rest /= 10;
        }
        let zeros = decimals.iter().rev().take_while(|digit| **digit == b'0').count();
        self.push(decimals.get(..decimals.len() - zeros).unwrap_or_default());
    }

    fn push_number(&mut self, number: u64) {
        match u8::try_from(number) {
            Ok(digit @ 0..=9) => self.push(&[b'0' + digit]),
            _ => self.push(itoa::Buffer::new().format(number).as_bytes()),
        }
    }

    fn text(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// Formats the times of a request in milliseconds, exactly.
fn server_timing(timeline: &Timeline) -> Line {
    let (input, infer, output) = timeline.compute.durations_ns();
    let mut line = Line { bytes: [0; LONGEST], length: 0 };
    for (name, ns) in [
        ("queue;dur=", timeline.queue_ns()),
        (", compute_input;dur=", input),
        (", infer;dur=", infer),
        (", output;dur=", output),
        (", total;dur=", timeline.charged_ns()),
    ] {
        line.push(name.as_bytes());
        line.push_ms(ns);
    }
    match timeline.cache {
        Some(CacheLookup::Hit) => line.push(b", cache;desc=hit"),
        Some(CacheLookup::Miss) => line.push(b", cache;desc=miss"),
        None => {}
    }
    if timeline.batch_size > 0 {
        line.push(b", batch;desc=\"");
        line.push_number(timeline.batch_size);
        line.push(b"\"");
    }
    line
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::timeline::{ComputeStamps, Instant};

    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(pairs: &[(HeaderName, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.clone(), HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn times_have_all_nanoseconds() {
        let compute = ComputeStamps {
            start: Instant(1_100_000),
            input_end: Instant(1_100_001),
            output_start: Instant(3_100_001),
            end: Instant(3_150_001),
        };
        let timeline = Timeline {
            request_start: Instant(1_000_000),
            queue_start: Instant(1_020_000),
            compute,
            request_end: Instant(1_003_000_000),
            ..Timeline::default()
        };
        let server_timing = |timeline: &Timeline| {
            String::from_utf8(server_timing(timeline).text().to_vec()).unwrap()
        };
        let common =
            "queue;dur=0.08, compute_input;dur=0.000001, infer;dur=2, output;dur=0.05, total;dur=";
        assert_eq!(server_timing(&timeline), format!("{common}1002"));
        let missed =
            Timeline { insertion_ns: 5, cache: Some(CacheLookup::Miss), batch_size: 8, ..timeline };
        assert_eq!(
            server_timing(&missed),
            format!("{common}1002.000005, cache;desc=miss, batch;desc=\"8\"")
        );
        let hit = Timeline { cache: Some(CacheLookup::Hit), ..timeline };
        assert_eq!(server_timing(&hit), format!("{common}1002, cache;desc=hit"));
        let most = Timeline {
            request_end: Instant(u64::MAX),
            batch_size: u64::MAX,
            insertion_ns: u64::MAX,
            ..missed
        };
        let most = server_timing(&Timeline {
            queue_start: Instant(0),
            compute: ComputeStamps { end: Instant(u64::MAX), start: Instant(u64::MAX), ..compute },
            ..most
        });
        assert!(
            most.ends_with("batch;desc=\"18446744073709551615\""),
            "the longest times fit: {most}"
        );
    }

    #[test]
    fn answers_carry_times_as_the_mode_says() {
        let requested = headers(&[(REQUEST_TIMING, "True")]);
        let other = headers(&[(REQUEST_TIMING, "false")]);
        for (mode, expected) in [
            (Mode::Always, [true, true]),
            (Mode::OnRequest, [true, false]),
            (Mode::Off, [false, false]),
        ] {
            let timing = ResponseTiming::new(mode, 1);
            let times = [&requested, &other].map(|headers| timing.of(headers).has_times());
            assert_eq!(times, expected, "{mode:?}");
            assert_eq!(
                timing.of(&other).value(&Timeline::default()).is_some(),
                expected[1],
                "{mode:?}"
            );
        }
        let sampled = ResponseTiming::new(Mode::Always, 3);
        let clone = sampled.clone();
        let times: Vec<bool> = [&sampled, &clone]
            .iter()
            .cycle()
            .take(6)
            .map(|timing| timing.of(&other).has_times())
            .collect();
        assert_eq!(times, [true, false, false, true, false, false], "clones share the sample");
        assert!((0..3).all(|_| sampled.of(&requested).has_times()));
    }

    #[test]
    fn a_valid_traceparent_is_returned() {
        let returned = |mode, pairs: &[(HeaderName, &'static str)]| {
            let timing = ResponseTiming::new(mode, 1).of(&headers(pairs));
            let trace = timing.trace().is_some();
            let mut answer = HeaderMap::new();
            timing.add_to(&mut answer, None);
            (trace, answer.get(TRACEPARENT).map(|value| value.to_str().unwrap().to_owned()))
        };
        let one = [(TRACEPARENT, PARENT)];
        assert_eq!(returned(Mode::OnRequest, &one), (true, Some(PARENT.to_owned())));
        assert_eq!(returned(Mode::Off, &one), (true, None));
        for wrong in [
            &[(TRACEPARENT, "00-1-2-01")][..],
            &[(TRACEPARENT, PARENT), (TRACEPARENT, PARENT)],
            &[],
        ] {
            assert_eq!(returned(Mode::Always, wrong), (false, None));
        }
    }

    #[test]
    fn trailers_are_accepted_if_the_client_says_so() {
        for (given, expected) in
            [("trailers", true), ("gzip, Trailers", true), ("gzip;q=1", false), ("", false)]
        {
            assert_eq!(accepts_trailers(&headers(&[(TE, given)])), expected, "{given}");
        }
    }
}
