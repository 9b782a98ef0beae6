//! Reads the body of an HTTP request whole, with a limit.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use pharos::data::{Collector, Data};
use pharos::error::{ErrorCode, InferError, Reason};

use super::{Budget, Full};
use crate::body_timeout::Fault;

/// How long and how much of a body that is too large is read on, so that its sender reads the refusal and not a reset.
const DRAIN_TIME: Duration = Duration::from_secs(10);
const DRAIN_BYTES: u64 = 1 << 30;

/// A request's body as far as it could be read.
pub enum Read {
    /// All of it.
    Whole(Data),
    /// It is longer than allowed: at least this many bytes.
    TooLarge(u64),
}

/// Reads a body of at most `limit` bytes, within the budget of all that is being received. `waits` says that the client waits
/// to be told to send (`Expect: 100-continue`).
///
/// # Errors
/// The client went away, stalled, or broke the framing; or the server receives too much at a time.
pub async fn read(budget: &Budget, mut body: Body, limit: u64, waits: bool) -> Result<Read, InferError> {
    let declared = http_body::Body::size_hint(&body);
    if declared.lower() > limit {
        if !waits && declared.lower() <= DRAIN_BYTES {
            drain(&mut body, DRAIN_BYTES).await;
        }
        return Ok(Read::TooLarge(declared.lower()));
    }
    // A body that came in one piece is used as it is.
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

/// The refusal of a request for which there is no memory now.
pub fn no_memory(full: Full) -> InferError {
    InferError::new(ErrorCode::Unavailable, Reason::TooLarge, full.to_string())
}

/// The next piece of data; `None` at the end.
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

/// Why a body cannot be read on.
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

/// Reads on without keeping anything; returns how much it was.
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
