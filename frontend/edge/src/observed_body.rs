//! Observes the end of a response: what is counted and logged of a streamed response is known when its body ends.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Response};
use http_body::{Frame, SizeHint};

/// Statuses of gRPC, and the last one.
const UNKNOWN: u16 = 2;
const INTERNAL: u16 = 13;
const LAST: u16 = 16;

/// How a body ended.
#[derive(Debug)]
pub enum BodyEnd<'a, E> {
    /// After its data, without trailers.
    Complete,
    /// With these trailers.
    Trailers(&'a HeaderMap),
    /// With an error.
    Failed(&'a E),
}

impl<E> BodyEnd<'_, E> {
    /// Returns the status of a gRPC response whose body ended so; `of_error` returns that of an error. Without one it is UNKNOWN, as
    /// clients read it.
    pub fn grpc_status(&self, of_error: impl FnOnce(&E) -> u16) -> u16 {
        match self {
            Self::Trailers(trailers) => status_in(trailers).unwrap_or(UNKNOWN),
            Self::Failed(error) => of_error(error),
            Self::Complete => UNKNOWN,
        }
    }
}

/// Returns the gRPC status of a response if it is known from its head: without messages, the headers are the trailers, and a request
/// that is not gRPC is refused with an HTTP status (INTERNAL).
pub fn grpc_status_in_head<B>(response: &Response<B>) -> Option<u16> {
    status_in(response.headers()).or_else(|| (!response.status().is_success()).then_some(INTERNAL))
}

fn status_in(headers: &HeaderMap) -> Option<u16> {
    let known = |text: &str| text.parse().ok().filter(|code| *code <= LAST);
    let status = headers.get("grpc-status")?;
    Some(status.to_str().ok().and_then(known).unwrap_or(UNKNOWN))
}

/// A body that calls a function when it ends, before the end is sent. If it is dropped before, because the client disconnected,
/// the function is dropped uncalled.
#[derive(Debug)]
pub struct ObservedBody<B, F> {
    inner: B,
    ended: Option<F>,
}

impl<B, F> ObservedBody<B, F>
where
    B: http_body::Body,
    F: FnOnce(BodyEnd<'_, B::Error>),
{
    /// Calls `ended` when `inner` ends.
    pub fn new(inner: B, ended: F) -> Self {
        Self { inner, ended: Some(ended) }
    }
}

impl<B, F> http_body::Body for ObservedBody<B, F>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    F: FnOnce(BodyEnd<'_, B::Error>) + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let end = match &frame {
            None => Some(BodyEnd::Complete),
            Some(Err(error)) => Some(BodyEnd::Failed(error)),
            Some(Ok(frame)) => match frame.trailers_ref() {
                Some(trailers) => Some(BodyEnd::Trailers(trailers)),
                // A body that says so is not polled again.
                None => self.inner.is_end_stream().then_some(BodyEnd::Complete),
            },
        };
        if let Some(end) = end
            && let Some(ended) = self.ended.take()
        {
            ended(end);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
