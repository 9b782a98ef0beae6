//! Adds to the trace of a request when it was received and its response sent, with the activity
//! names of the protocol.

use pharos::error::InferError;
use pharos::infer::InferRequest;
use pharos::request_trace::{Activity, Traced};
use pharos::service::Protocol;
use pharos::timeline::Instant;
use pharos_os::clock;

/// The trace activities of a protocol, each as a start and an end.
pub(crate) struct Activities {
    receive: [Activity; 2],
    send: [Activity; 2],
}

/// The activities of HTTP.
const HTTP: Activities = Activities {
    receive: [Activity::HttpRecvStart, Activity::HttpRecvEnd],
    send: [Activity::HttpSendStart, Activity::HttpSendEnd],
};

/// The activities of gRPC.
const GRPC: Activities = Activities {
    receive: [Activity::GrpcWaitReadStart, Activity::GrpcWaitReadEnd],
    send: [Activity::GrpcSendStart, Activity::GrpcSendEnd],
};

impl Activities {
    /// Returns the activities of a protocol.
    pub(crate) fn of(protocol: Protocol) -> &'static Self {
        match protocol {
            Protocol::Http => &HTTP,
            Protocol::Grpc => &GRPC,
        }
    }

    /// Records that a valid request was read at `end`, and attaches the trace to it.
    pub(crate) fn received(
        &self,
        traced: Option<&Traced>,
        end: Instant,
        request: &mut InferRequest,
    ) {
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
    pub(crate) fn refused(&self, traced: Option<&Traced>, received: Instant, error: &InferError) {
        if let Some(traced) = traced {
            let [starts, ends] = self.receive;
            traced.refused(&error.message, [(starts, received), (ends, clock::now())]);
        }
    }
}

/// A response that is being sent; stamps the end of sending when dropped.
pub struct Sending {
    traced: Traced,
    ends: Activity,
}

impl Sending {
    /// Stamps the start of sending the response to a traced request.
    pub fn begin(protocol: Protocol, traced: Traced) -> Self {
        let [starts, ends] = Activities::of(protocol).send;
        traced.stamp(starts, clock::now());
        Self { traced, ends }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.traced.stamp(self.ends, clock::now());
    }
}
