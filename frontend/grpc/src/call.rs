//! The layer in front of every method: makes a [`Call`] of each request, also if the message cannot
//! be decoded or the method does not exist. The status of an error.

use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use pharos::error::{Cause, InferError};
use pharos::service::{Protocol, Route};
use pharos_edge::access::Forward;
use pharos_edge::access::routes::of_grpc;
use pharos_edge::request_log::{FIELDS, LogLine};
use pharos_edge::{Call, Incoming, Policy, SharedCall, status_for};
use tonic::body::Body;
use tonic::{Code, Status};

use super::Answering;

/// A service whose calls are admitted by a policy.
#[derive(Clone)]
pub(super) struct Admission<D> {
    pub(super) policy: Arc<dyn Policy>,
    pub(super) forward: Forward,
    pub(super) inner: D,
}

impl<D> Admission<D> {
    /// Answers a call.
    pub(super) fn answer<B>(&mut self, mut incoming: Incoming<B>) -> Answering
    where
        D: tower::Service<Request<B>, Response = Response<Body>, Error = Infallible>,
        D::Future: Send + 'static,
    {
        let route = of_grpc(incoming.request.uri().path());
        let mut call = match Call::admit(Protocol::Grpc, route, &mut incoming, &self.policy) {
            Ok(call) => call,
            Err(refusal) => return Box::pin(ready(Ok(refusal.into_status().into_http()))),
        };
        let mut request = incoming.request;
        if matches!(route, Route::Infer | Route::StreamInfer)
            && let Err(error) = call.forward(&self.forward, request.headers())
        {
            let reason = error.reason;
            let status = status(error);
            call.count_and_log(status.code() as u16, Some(reason));
            return Box::pin(ready(Ok(status.into_http())));
        }
        let call = SharedCall::new(call);
        request.extensions_mut().insert(call.clone());
        let answer = self.inner.call(request);
        Box::pin(async move { Ok(call.finish(answer.await?)) })
    }
}

impl<D, B> tower::Service<Request<B>> for Admission<D>
where
    D: tower::Service<Request<B>, Response = Response<Body>, Error = Infallible>,
    D::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let line =
            LogLine::begin(&FIELDS, Protocol::Grpc, None, || request.uri().path().to_owned());
        self.answer(Incoming { request, line })
    }
}

/// Returns the gRPC status of an error.
pub(super) fn status(error: InferError) -> Status {
    let code = Code::from_i32(error.code.grpc_code());
    // The header of gRPC's retry policies (proposal A6), in milliseconds.
    let pushback = match error.cause {
        Cause::RateLimited { retry_after_s } => Some(retry_after_s.saturating_mul(1000)),
        _ => None,
    };
    let text = match error.cause {
        // Triton's text for this differs between the protocols.
        Cause::Exiting => {
            "GRPC server is shutting down and has stopped accepting new requests.".to_owned()
        }
        _ => shortened(error.message),
    };
    let mut status = status_for(code, text, error.reason);
    if let Some(pushback) = pushback {
        status.metadata_mut().insert("grpc-retry-pushback-ms", pushback.into());
    }
    status
}

/// The maximum encoded size of a status message in bytes. It is sent as a header; clients reject
/// headers of more than 8 KiB in total (gRPC's soft limit) and then report that instead of the
/// actual error.
const MAX_TEXT: usize = 6 << 10;

/// Truncates a text that is too long for a header: names, ids and shapes in it have any length that
/// the client chooses.
fn shortened(text: String) -> String {
    // All other characters are percent-encoded on the wire.
    let on_the_wire = |c: char| if c.is_ascii_alphanumeric() { 1 } else { 3 * c.len_utf8() };
    let mut size = 0usize;
    let cut = text.char_indices().find(|(_, c)| {
        size += on_the_wire(*c);
        size > MAX_TEXT
    });
    match cut.and_then(|(at, _)| text.get(..at)) {
        Some(start) => format!("{start}... ({} bytes in all)", text.len()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_truncated_between_characters() {
        for (text, kept) in
            [("x".repeat(6144), 6144), ("x".repeat(6145), 6144), ("\u{65e5}".repeat(4000), 3 * 682)]
        {
            let message = status(InferError::invalid(text.clone())).message().to_owned();
            if kept == text.len() {
                assert_eq!(message, text);
            } else {
                let expected = format!("... ({} bytes in all)", text.len());
                assert_eq!(message.strip_prefix(&text[..kept]), Some(expected.as_str()));
            }
        }
    }
}
