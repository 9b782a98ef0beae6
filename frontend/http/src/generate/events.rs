//! The body of a `generate_stream` answer: one server-sent event per response, written when the connection has capacity.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::HeaderValue;
use http::{HeaderMap, StatusCode};
use http_body::Frame;
use pharos::error::{InferError, Reason};
use pharos::request_trace::Traced;
use pharos::service::{Responses, Service, Streamed};

use super::{TracedResponses, convert};
use crate::Edge;
use pharos_listener::answering::Account;
use pharos_listener::request_trace;
use pharos_listener::response_timing::{AnswerTiming, SERVER_TIMING};

/// The events of one request. Dropping it before the last event, because the client disconnected, cancels the request.
pub(super) struct Events<S: Service> {
    responses: S::Responses,
    /// The first response, received before the body began.
    first: Option<Streamed>,
    /// Counts the request when its last response arrives.
    account: Option<(Account<Edge<S>>, StatusCode)>,
    /// The reason for which the request or one of its responses failed.
    reason: Option<Reason>,
    traced: Option<Traced>,
    /// Present if the times of the request are sent in a trailer.
    timing: Option<AnswerTiming>,
    /// The times, once they are known.
    times: Option<HeaderValue>,
    ended: bool,
    _open: S::OpenStream,
}

impl<S: Service> Events<S> {
    pub(super) fn new(
        begun: TracedResponses<S::Responses>,
        first: Option<Streamed>,
        account: (Account<Edge<S>>, StatusCode),
        open: S::OpenStream,
    ) -> Self {
        let TracedResponses { responses, traced, trailer: timing } = begun;
        let (account, ended) = (Some(account), false);
        Self { responses, first, account, reason: None, traced, timing, times: None, ended, _open: open }
    }

    /// Returns the event for a response; `None` for an empty response that only marks the end.
    fn event(&mut self, streamed: Streamed) -> Option<Bytes> {
        let Streamed { answer, last, empty } = streamed;
        if let (true, Ok(response), Some(timing)) = (last, &answer, &self.timing) {
            self.times = timing.value(&response.timeline);
        }
        let json = answer.and_then(|response| convert::response(&response));
        let json = json.unwrap_or_else(|error| {
            self.reason.get_or_insert(error.reason);
            error_json(&error)
        });
        if last {
            self.end();
        }
        (!empty).then(|| [b"data: ", json.as_slice(), b"\n\n"].concat().into())
    }

    fn end(&mut self) {
        self.ended = true;
        request_trace::complete(self.traced.take().as_ref());
        if let Some((account, status)) = self.account.take() {
            account.end(status.as_u16(), self.reason);
        }
    }
}

fn error_json(error: &InferError) -> Vec<u8> {
    let text = serde_json::to_string(&error.message).unwrap_or_else(|_| "\"\"".to_owned());
    format!("{{\"error\":{text}}}").into_bytes()
}

impl<S: Service> http_body::Body for Events<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        while !this.ended {
            let next = match this.first.take() {
                Some(first) => Some(first),
                None => ready!(this.responses.poll_next(cx)),
            };
            let Some(streamed) = next else {
                this.end();
                break;
            };
            if let Some(event) = this.event(streamed) {
                return Poll::Ready(Some(Ok(Frame::data(event))));
            }
        }
        Poll::Ready(this.times.take().map(|times| {
            let mut trailers = HeaderMap::with_capacity(1);
            trailers.insert(SERVER_TIMING, times);
            Ok(Frame::trailers(trailers))
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.times.is_none()
    }
}
