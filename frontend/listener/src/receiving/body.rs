//! Reads the complete body of an HTTP request, up to a limit.

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use pharos::data::{Collector, Data};
use pharos::error::{ErrorCode, InferError, Reason};

use super::{Budget, Full};
use crate::body_timeout::Fault;

/// The result of reading a request's body.
pub enum Read {
    /// The complete body.
    Whole(Data),
    /// The body is longer than allowed: at least this many bytes. Without a declared size, these
    /// are the bytes received so far.
    TooLarge(u64),
}

/// Reads a body of at most `limit` bytes, within the memory budget. The listener discards the rest
/// of a body after an error.
///
/// # Errors
/// The client disconnected, stalled or broke the framing, or the budget is exhausted.
pub async fn read(budget: &Budget, mut body: Body, limit: u64) -> Result<Read, InferError> {
    let declared = http_body::Body::size_hint(&body);
    if declared.lower() > limit {
        return Ok(Read::TooLarge(declared.lower()));
    }
    // A body that arrives in one piece is not copied.
    let Some(first) = frame(&mut body).await? else { return Ok(Read::Whole(Data::new())) };
    if http_body::Body::is_end_stream(&body) && first.len() as u64 <= limit {
        return Ok(Read::Whole(first.into()));
    }
    let mut whole = Collector::default();
    let mut reservation = budget.reserve();
    let mut next = Some(first);
    while let Some(piece) = next {
        let length = (whole.len() + piece.len()) as u64;
        if length > limit {
            return Ok(Read::TooLarge(length));
        }
        reservation.grow(piece.len()).map_err(no_memory)?;
        whole.push(piece);
        next = frame(&mut body).await?;
    }
    Ok(Read::Whole(whole.finish()))
}

/// Reads a body of at most `limit` bytes, within the memory budget.
///
/// # Errors
/// As for [`read`], or the body is longer: the text of the error names the limit.
pub async fn read_within(budget: &Budget, body: Body, limit: u64) -> Result<Data, InferError> {
    match read(budget, body, limit).await? {
        Read::Whole(body) => Ok(body),
        Read::TooLarge(size) => {
            let text = format!("the body of {size} bytes is too large: allowed are {limit} bytes");
            Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text))
        }
    }
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
