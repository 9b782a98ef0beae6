//! The body of a response whose end is observed: what is counted and logged of a streamed response
//! is known when its body ends.

use std::error::Error as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Method, Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use pharos::error::{InferError, Reason};
use tonic::Code;

use super::SharedCall;
use crate::request_trace::Sending;

/// How a body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyEnd {
    /// After its data, without a status.
    Complete,
    /// With this code of gRPC.
    Code(u16),
    /// With an error that has this reason.
    Failed(Reason),
}

/// Returns the gRPC code of a response if it is known from its head: without messages, the headers
/// are the trailers, and a request that is not gRPC is refused with an HTTP status (INTERNAL).
pub(super) fn grpc_status_in_head<B>(response: &Response<B>) -> Option<u16> {
    code_in(response.headers())
        .or_else(|| (!response.status().is_success()).then_some(Code::Internal as u16))
}

/// Returns the gRPC code in headers or trailers: UNKNOWN if it is not valid.
fn code_in(headers: &HeaderMap) -> Option<u16> {
    const LAST: u16 = Code::Unauthenticated as u16;
    let known = |text: &str| text.parse().ok().filter(|code| *code <= LAST);
    let status = headers.get("grpc-status")?;
    Some(status.to_str().ok().and_then(known).unwrap_or(Code::Unknown as u16))
}

/// The body of the response to a call. It ends the call before the end of the body is sent. If it
/// is dropped before, because the client disconnected, the call is abandoned.
pub(super) struct CallBody<B, F> {
    pub(super) inner: B,
    /// `None` if the call has ended.
    pub(super) call: Option<SharedCall>,
    /// Present if the request is traced. The connection drops a body when it has read it.
    pub(super) _sending: Option<Sending>,
    /// Returns how an error ended the body.
    pub(super) failed: F,
}

impl<B, F> http_body::Body for CallBody<B, F>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    F: Fn(&B::Error) -> BodyEnd + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        let mut frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
        let end = match &mut frame {
            None => Some(BodyEnd::Complete),
            Some(Err(error)) => Some((this.failed)(error)),
            Some(Ok(frame)) => match frame.trailers_mut() {
                Some(trailers) => {
                    if let Some(call) = &this.call {
                        call.lock().report_load(trailers);
                    }
                    Some(code_in(trailers).map_or(BodyEnd::Complete, BodyEnd::Code))
                }
                // A body that says so is not polled again.
                None => this.inner.is_end_stream().then_some(BodyEnd::Complete),
            },
        };
        if let Some(end) = end
            && let Some(call) = this.call.take()
        {
            call.lock().end_body(end);
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

/// Returns whether the body of a response over HTTP is streamed: has no size in advance, and is
/// sent.
pub(super) fn is_streamed(response: &Response<Body>, method: &Method) -> bool {
    let has_no_body = *method == Method::HEAD
        || matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    !has_no_body
        && !response.body().is_end_stream()
        && response.body().size_hint().exact().is_none()
}

/// Returns the reason of an error of a body over HTTP.
pub(super) fn reason_of(error: &axum::Error) -> Reason {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<InferError>());
    cause.map_or(Reason::Internal, |cause| cause.reason)
}
