//! Reads the complete body of an HTTP request, up to a limit.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use pharos::data::{Collector, Data};
use pharos::error::{ErrorCode, InferError, Reason};

use super::{Budget, Full};
use crate::body_timeout::Fault;

/// The limits of draining a body that is too large, so that its sender receives the error and not a connection reset.
const DRAIN_TIME: Duration = Duration::from_secs(10);
const DRAIN_BYTES: u64 = 1 << 30;

/// The result of reading a request's body.
pub enum Read {
    /// The complete body.
    Whole(Data),
    /// The body is longer than allowed: at least this many bytes.
    TooLarge(u64),
}

/// Reads a body of at most `limit` bytes, within the memory budget. `waits` is whether the client waits for permission to send
/// (`Expect: 100-continue`).
///
/// # Errors
/// The client disconnected, stalled or broke the framing, or the budget is exhausted.
pub async fn read(budget: &Budget, mut body: Body, limit: u64, waits: bool) -> Result<Read, InferError> {
    let declared = http_body::Body::size_hint(&body);
    if declared.lower() > limit {
        if !waits && declared.lower() <= DRAIN_BYTES {
            drain(&mut body, DRAIN_BYTES).await;
        }
        return Ok(Read::TooLarge(declared.lower()));
    }
    // A body that arrives in one piece is not copied.
    let Some(first) = frame(&mut body).await? else { return Ok(Read::Whole(Data::new())) };
    if http_body::Body::is_end_stream(&body) && first.len() as u64 <= limit {
        return Ok(Read::Whole(first.into()));
    }
    let (mut whole, mut reservation) = (Collector::default(), budget.reserve());
    let mut next = Some(first);
    while let Some(piece) = next {
        let length = (whole.len() + piece.len()) as u64;
        if length > limit {
            drop(whole);
            return Ok(Read::TooLarge(length + drain(&mut body, DRAIN_BYTES).await));
        }
        if let Err(full) = reservation.grow(piece.len()) {
            drop((whole, reservation));
            drain(&mut body, DRAIN_BYTES).await;
            return Err(no_memory(full));
        }
        whole.push(piece);
        next = match frame(&mut body).await {
            Err(error) if error.reason == Reason::TooLarge => {
                drop(whole);
                drain(&mut body, DRAIN_BYTES).await;
                return Err(error);
            }
            next => next?,
        };
    }
    Ok(Read::Whole(whole.finish()))
}

/// Returns the error of a request that exceeds the memory budget.
pub fn no_memory(full: Full) -> InferError {
    InferError::new(ErrorCode::Unavailable, Reason::TooLarge, full.to_string())
}

/// Reads the next piece of data; `None` at the end.
async fn frame(body: &mut Body) -> Result<Option<Bytes>, InferError> {
    loop {
        match body.frame().await {
            None => return Ok(None),
            Some(Err(error)) => return Err(broken(error)),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

/// Returns the error of a body that cannot be read further.
fn broken(error: axum::Error) -> InferError {
    let error = error.into_inner();
    match error.downcast_ref() {
        Some(fault @ Fault::TooManyChunks) => {
            InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, fault.to_string())
        }
        Some(fault) => InferError::new(ErrorCode::InvalidArg, Reason::Timeout, fault.to_string()),
        None => InferError::malformed(format!("the request's body broke off: {error}")),
    }
}

/// Reads and discards data; returns its size.
async fn drain(body: &mut Body, most: u64) -> u64 {
    let mut drained = 0u64;
    let all = async {
        while let Ok(Some(piece)) = frame(body).await {
            drained += piece.len() as u64;
            if drained > most {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(DRAIN_TIME, all).await;
    drained
}
