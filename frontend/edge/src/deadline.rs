//! `grpc-timeout`: the deadline of a gRPC client. When it has passed, calls of the v2 protocol end,
//! so that nothing is computed for a client that has given up. Other calls end when the client
//! resets them.

use std::thread;
use std::time::Duration;

use http::HeaderMap;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::is_late;
use pharos::service::Protocol;
use pharos::timeline::Instant;
use pharos_os::clock;

/// The name of the header.
const HEADER: &str = "grpc-timeout";

/// The deadline of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    /// The time from the reception of the call to its deadline.
    pub limit: Duration,
    /// From when on a client that leaves does so at its deadline.
    pub leaves_at: Instant,
}

impl Deadline {
    /// Returns the deadline of a call that has just been received; `None` if it is missing or
    /// malformed (gRPC over HTTP/2: up to eight digits and a unit).
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let limit = parse(headers.get(HEADER)?.to_str().ok()?)?;
        Some(Self { limit, leaves_at: leaves_at(clock::now(), limit) })
    }
}

fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

/// The longest time that a call is expected to take to arrive.
const ARRIVAL: Duration = Duration::from_millis(10);

/// Returns from when on a client that leaves does so at its deadline. By its own clock, the
/// deadline is earlier by the time that the call took to arrive, which is taken as at most a tenth
/// of a short limit, and because clients round the limit up: gRPC's C++ and Python clients by up to
/// a hundredth (`timeout_encoding.cc`).
fn leaves_at(received: Instant, limit: Duration) -> Instant {
    received + limit.saturating_sub(ARRIVAL.min(limit / 10) + limit / 100)
}

/// Returns the error and the reason with which a request counts that is dropped at `now`, because
/// its client has left or its handler panics. `leaves_at` is the field of the request's
/// [`Deadline`].
fn abandoned(leaves_at: Option<Instant>, now: Instant) -> (ErrorCode, Reason) {
    if thread::panicking() {
        return (ErrorCode::Internal, Reason::Internal);
    }
    match is_late(leaves_at, now) {
        true => (ErrorCode::DeadlineExceeded, Reason::Timeout),
        false => (ErrorCode::Cancelled, Reason::Cancelled),
    }
}

/// The status that an HTTP request has in counts and logs if its client left before the response,
/// so that no status was sent: nginx's "client closed request".
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Returns the HTTP status or the gRPC code, and the reason, with which a request without an answer
/// that is dropped at `now` is counted and logged. `leaves_at` is the field of the request's
/// [`Deadline`].
pub fn abandoned_status(
    protocol: Protocol,
    leaves_at: Option<Instant>,
    now: Instant,
) -> (u16, Reason) {
    let (error, reason) = abandoned(leaves_at, now);
    match protocol {
        // The client gets this answer from `handler_panic`.
        Protocol::Http if error == ErrorCode::Internal => (500, reason),
        Protocol::Http => (CLIENT_CLOSED_REQUEST, reason),
        Protocol::Grpc => (error.grpc_code().unsigned_abs() as u16, reason),
    }
}

/// Returns the error for a call whose deadline has passed.
pub fn exceeded() -> InferError {
    InferError::new(ErrorCode::DeadlineExceeded, Reason::Timeout, "Deadline Exceeded")
}

/// Runs `work` until the deadline. Dropping unfinished work cancels its request.
///
/// # Errors
/// The errors of `work`, or [`exceeded`].
pub async fn within<T>(
    limit: Option<Duration>,
    work: impl Future<Output = Result<T, InferError>>,
) -> Result<T, InferError> {
    match limit {
        None => work.await,
        Some(limit) => tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(exceeded())),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn clients_leave_earlier_by_the_time_until_the_arrival() {
        for (limit_ms, expected_ms) in [(30_000, 29_690), (1_000, 980), (100, 89), (0, 0)] {
            let left = leaves_at(Instant(0), Duration::from_millis(limit_ms));
            assert_eq!(left, Instant(expected_ms * 1_000_000), "{limit_ms} ms");
        }
    }

    #[test]
    fn the_status_of_a_client_that_left_depends_on_protocol_and_deadline() {
        let status = |protocol, deadline: Option<u64>| {
            abandoned_status(protocol, deadline.map(Instant), Instant(7))
        };
        assert_eq!(status(Protocol::Http, None), (499, Reason::Cancelled));
        assert_eq!(status(Protocol::Grpc, None), (1, Reason::Cancelled));
        assert_eq!(status(Protocol::Grpc, Some(8)), (1, Reason::Cancelled));
        assert_eq!(status(Protocol::Grpc, Some(6)), (4, Reason::Timeout));
    }

    #[test]
    fn a_panic_of_a_handler_is_a_fault_of_the_server() {
        struct Dropped<'d>(&'d mut Vec<(u16, Reason)>);
        impl Drop for Dropped<'_> {
            fn drop(&mut self) {
                let status = |protocol| abandoned_status(protocol, Some(Instant(1)), Instant(2));
                self.0.extend([status(Protocol::Http), status(Protocol::Grpc)]);
            }
        }
        let mut counted = Vec::new();
        let handler = AssertUnwindSafe(|| {
            let _dropped = Dropped(&mut counted);
            panic!("a fault of the handler")
        });
        assert!(catch_unwind(handler).is_err());
        assert_eq!(counted, [(500, Reason::Internal), (13, Reason::Internal)]);
    }

    #[test]
    fn parses_the_header_as_specified() {
        for (text, expected) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("99999999m", Some(Duration::from_millis(99_999_999))),
            ("5u", Some(Duration::from_micros(5))),
            ("0n", Some(Duration::ZERO)),
            ("100000000m", None),
            ("5", None),
            ("", None),
            ("m", None),
            ("-1S", None),
            ("1s", None),
            ("1\u{b5}", None),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
    }
}
