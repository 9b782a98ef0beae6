//! What an edge adds to the trace of a request: when the request was received and the response sent, by the names of its
//! protocol.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use pharos::error::InferError;
use pharos::infer::InferRequest;
use pharos::request_trace::{Activity, Traced};
use pharos::timeline::Instant;

use pharos_os::clock;

/// The activities of a protocol, each with its start and end.
pub struct Activities {
    receive: [Activity; 2],
    send: [Activity; 2],
}

/// Those of HTTP.
pub const HTTP: Activities = Activities {
    receive: [Activity::HttpRecvStart, Activity::HttpRecvEnd],
    send: [Activity::HttpSendStart, Activity::HttpSendEnd],
};

/// Those of gRPC.
pub const GRPC: Activities = Activities {
    receive: [Activity::GrpcWaitReadStart, Activity::GrpcWaitReadEnd],
    send: [Activity::GrpcSendStart, Activity::GrpcSendEnd],
};

impl Activities {
    /// The request was read at `end` and is valid: it carries its trace from now on.
    pub fn received(&self, traced: Option<&Traced>, end: Instant, request: &mut InferRequest) {
        let Some(traced) = traced else { return };
        self.stamp_receive(traced, request.timeline.received, end);
        // The exemplars of latencies refer to it.
        request.trace = request.trace.or(traced.traceparent().map(|parent| parent.trace));
        request.traced = Some(traced.clone());
    }

    fn stamp_receive(&self, traced: &Traced, start: Instant, end: Instant) {
        let [starts, ends] = self.receive;
        traced.stamp(starts, start);
        traced.stamp(ends, end);
    }

    /// The request failed, possibly before it reached a model.
    pub fn refused(&self, traced: Option<&Traced>, received: Instant, error: &InferError) {
        if let Some(traced) = traced {
            let [starts, ends] = self.receive;
            traced.refused(&error.message, [(starts, received), (ends, clock::now())]);
        }
    }

    /// Sending the response starts.
    pub fn send_starts(&self, traced: &Traced) {
        traced.stamp(self.send[0], clock::now());
    }

    /// The body of a traced response.
    pub fn sending_body<B>(&self, traced: Traced, body: B) -> SendingBody<B> {
        SendingBody { body, _sending: self.sending(traced) }
    }

    /// Sending the response ends when what is returned is dropped.
    pub fn sending(&self, traced: Traced) -> Sending {
        Sending { traced, ends: self.send[1] }
    }
}

/// The last response of the model is here, or an error in its place.
pub fn complete(traced: Option<&Traced>) {
    if let Some(traced) = traced {
        traced.complete(clock::now());
    }
}

/// A response on its way: stamps the end of sending when it is dropped.
pub struct Sending {
    traced: Traced,
    ends: Activity,
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.traced.stamp(self.ends, clock::now());
    }
}

/// The body of a response on its way; dropped when the connection has taken it.
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
