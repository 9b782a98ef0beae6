//! Adds to the trace of a request when it was received and its response sent, with the activity names of the protocol.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use pharos::error::InferError;
use pharos::infer::InferRequest;
use pharos::request_trace::{Activity, Traced};
use pharos::timeline::Instant;

use pharos_os::clock;

/// The trace activities of a protocol, each as a start and an end.
pub struct Activities {
    receive: [Activity; 2],
    send: [Activity; 2],
}

/// The activities of HTTP.
pub const HTTP: Activities = Activities {
    receive: [Activity::HttpRecvStart, Activity::HttpRecvEnd],
    send: [Activity::HttpSendStart, Activity::HttpSendEnd],
};

/// The activities of gRPC.
pub const GRPC: Activities = Activities {
    receive: [Activity::GrpcWaitReadStart, Activity::GrpcWaitReadEnd],
    send: [Activity::GrpcSendStart, Activity::GrpcSendEnd],
};

impl Activities {
    /// Records that a valid request was read at `end`, and attaches the trace to it.
    pub fn received(&self, traced: Option<&Traced>, end: Instant, request: &mut InferRequest) {
        let Some(traced) = traced else { return };
        self.stamp_receive(traced, request.timeline.received, end);
        // Exemplars of latencies refer to this trace id.
        request.trace = request.trace.or(traced.traceparent().map(|parent| parent.trace));
        request.traced = Some(traced.clone());
    }

    fn stamp_receive(&self, traced: &Traced, start: Instant, end: Instant) {
        let [starts, ends] = self.receive;
        traced.stamp(starts, start);
        traced.stamp(ends, end);
    }

    /// Records that the request failed, possibly before it reached a model.
    pub fn refused(&self, traced: Option<&Traced>, received: Instant, error: &InferError) {
        if let Some(traced) = traced {
            let [starts, ends] = self.receive;
            traced.refused(&error.message, [(starts, received), (ends, clock::now())]);
        }
    }

    /// Records the start of sending the response.
    pub fn send_starts(&self, traced: &Traced) {
        traced.stamp(self.send[0], clock::now());
    }

    /// Returns the body of a traced response.
    pub fn sending_body<B>(&self, traced: Traced, body: B) -> SendingBody<B> {
        SendingBody { body, _sending: self.sending(traced) }
    }

    /// Returns a guard that records the end of sending when it is dropped.
    pub fn sending(&self, traced: Traced) -> Sending {
        Sending { traced, ends: self.send[1] }
    }
}

/// Records that the last response of the model, or an error, was received.
pub fn complete(traced: Option<&Traced>) {
    if let Some(traced) = traced {
        traced.last_response(clock::now());
    }
}

/// A response that is being sent; stamps the end of sending when dropped.
pub struct Sending {
    traced: Traced,
    ends: Activity,
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.traced.stamp(self.ends, clock::now());
    }
}

/// The body of a response that is being sent; dropped when the connection has read it.
pub struct SendingBody<B> {
    body: B,
    _sending: Sending,
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for SendingBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
