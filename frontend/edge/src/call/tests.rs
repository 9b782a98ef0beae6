//! Every call is counted once, with its answer or as abandoned.

#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use pharos::service::Service;
use pharos_service_double::EchoService;

use super::*;
use crate::access::Access;
use crate::policy::ServerPolicy;
use crate::response_timing::ResponseTiming;

/// The policy of a port that counts calls over gRPC at their end.
struct CountsAtEnd(ServerPolicy);

impl Policy for CountsAtEnd {
    fn service(&self) -> &dyn Service {
        self.0.service()
    }

    fn timing(&self) -> &ResponseTiming {
        self.0.timing()
    }

    fn check(&self, _: Protocol, _: Route, _: &HeaderMap) -> Result<(), Refusal> {
        Err(Refusal::new(7, "no", Reason::Restricted))
    }

    fn counts_calls_at_end(&self) -> bool {
        true
    }
}

fn server_policy(service: &EchoService) -> ServerPolicy {
    ServerPolicy {
        service: service.shared(),
        access: Access::default(),
        restricted: Arc::default(),
        timing: ResponseTiming::default(),
    }
}

fn incoming(headers: &[(&'static str, &'static str)]) -> Incoming<()> {
    let request = headers
        .iter()
        .fold(Request::builder(), |request, (name, value)| request.header(*name, *value));
    Incoming { request: request.body(()).unwrap(), line: None }
}

/// Returns a call of the route [`Route::Infer`].
fn call(
    service: &EchoService,
    protocol: Protocol,
    headers: &[(&'static str, &'static str)],
) -> Call {
    let policy: Arc<dyn Policy> = Arc::new(server_policy(service));
    Call::admit(protocol, Route::Infer, &mut incoming(headers), &policy).unwrap()
}

fn counted(service: &EchoService) -> Vec<(u16, Option<Reason>)> {
    let records = service.records().into_iter();
    records.map(|(_, _, code, reason)| (code, reason)).collect()
}

#[test]
fn a_call_without_an_answer_is_counted_as_abandoned() {
    for (protocol, headers, expected) in [
        (Protocol::Http, &[][..], (499, Reason::Cancelled)),
        (Protocol::Grpc, &[][..], (1, Reason::Cancelled)),
        (Protocol::Grpc, &[("grpc-timeout", "9H")][..], (1, Reason::Cancelled)),
        (Protocol::Grpc, &[("grpc-timeout", "0n")][..], (4, Reason::Timeout)),
    ] {
        let service = EchoService::default();
        drop(call(&service, protocol, headers));
        assert_eq!(counted(&service), [(expected.0, Some(expected.1))], "{protocol:?} {headers:?}");
    }
}

#[test]
fn a_refusal_is_counted() {
    let service = EchoService::default();
    let policy: Arc<dyn Policy> = Arc::new(CountsAtEnd(server_policy(&service)));
    let refused = Call::admit(Protocol::Grpc, Route::Infer, &mut incoming(&[]), &policy);
    assert_eq!(refused.err().map(|refusal| refusal.code), Some(7));
    assert_eq!(counted(&service), [(7, Some(Reason::Restricted))]);
}

#[test]
fn an_answer_is_counted_with_its_status_and_reason() {
    let service = EchoService::default();
    let response = call(&service, Protocol::Http, &[]).finish(Response::default(), None);
    drop(call(&service, Protocol::Http, &[]).finish(response, Some(Reason::Invalid)));
    drop(call(&service, Protocol::Http, &[]).finish_unknown(Response::default()));
    let expected = [(200, None), (200, Some(Reason::Invalid)), (200, Some(Reason::Unsupported))];
    assert_eq!(counted(&service), expected);
    assert_eq!(service.records()[2].1, Route::Unknown);
}

#[test]
fn the_requests_of_a_call_are_counted_in_its_place() {
    let service = EchoService::default();
    let mut stream = call(&service, Protocol::Grpc, &[]);
    stream.do_not_count();
    stream.child(Instant(1)).count_and_log(0, None);
    drop(stream.child(Instant(2)));
    drop(stream);
    assert_eq!(counted(&service), [(0, None), (1, Some(Reason::Cancelled))]);
}

/// A response in two parts; the second is `last`.
fn parts(last: Result<&'static str, InferError>) -> Response {
    let part = |part: &'static str| Frame::data(Bytes::from_static(part.as_bytes()));
    Response::new(Body::new(StreamBody::new(stream::iter([Ok(part("a")), last.map(part)]))))
}

#[tokio::test]
async fn a_streamed_response_ends_its_call_with_its_body() {
    let failed = || Err(InferError::internal("broken"));
    let no_content = || {
        let mut response = parts(Ok("b"));
        *response.status_mut() = StatusCode::NO_CONTENT;
        response
    };
    let whole = || Response::new(Body::from("whole"));
    for (response, method, is_read, expected) in [
        (parts(Ok("b")), Method::POST, true, (200, None)),
        (parts(failed()), Method::POST, true, (200, Some(Reason::Internal))),
        // The client disconnects.
        (parts(Ok("b")), Method::POST, false, (499, Some(Reason::Cancelled))),
        // The server does not read these bodies.
        (parts(Ok("b")), Method::HEAD, false, (200, None)),
        (no_content(), Method::POST, false, (204, None)),
        (whole(), Method::POST, false, (200, None)),
    ] {
        let service = EchoService::default();
        let response =
            call(&service, Protocol::Http, &[]).finish_with_body(response, None, &method);
        if is_read {
            let _ = response.into_body().collect().await;
        } else {
            drop(response);
        }
        assert_eq!(counted(&service), [expected], "{method} {is_read}");
    }
}

/// A response over gRPC with a message, which ends with this status.
fn message(status: &'static str) -> http::Response<tonic::body::Body> {
    let trailers =
        HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static(status))]);
    let body = Full::new(Bytes::from_static(b"data"))
        .with_trailers(std::future::ready(Some(Ok(trailers))));
    http::Response::new(tonic::body::Body::new(body))
}

#[tokio::test]
async fn a_call_over_grpc_is_counted_when_its_policy_says_so() {
    for (counts_at_end, status, is_read, expected) in [
        (false, "0", true, (0, None)),
        (false, "5", true, (0, None)),
        (false, "0", false, (0, None)),
        (true, "0", true, (0, None)),
        (true, "5", true, (5, Some(Reason::Malformed))),
        (true, "99", true, (2, Some(Reason::Malformed))),
        (true, "0", false, (1, Some(Reason::Cancelled))),
    ] {
        let service = EchoService::default();
        let server = server_policy(&service);
        let policy: Arc<dyn Policy> =
            if counts_at_end { Arc::new(CountsAtEnd(server)) } else { Arc::new(server) };
        let admitted =
            Call::admit_if(Ok(()), Protocol::Grpc, Route::Infer, &mut incoming(&[]), &policy);
        let response = SharedCall::new(admitted.unwrap()).finish(message(status));
        if is_read {
            let _ = response.into_body().collect().await;
        } else {
            drop(response);
        }
        assert_eq!(counted(&service), [expected], "{counts_at_end} {status} {is_read}");
    }
}

#[test]
fn a_status_has_the_reason_of_its_error() {
    for (status, expected) in [
        (status_for(Code::Unavailable, "", Reason::NotReady), (14, Some(Reason::NotReady))),
        (Status::unimplemented(""), (12, Some(Reason::Unsupported))),
        (Status::invalid_argument(""), (3, Some(Reason::Malformed))),
    ] {
        let service = EchoService::default();
        drop(SharedCall::new(call(&service, Protocol::Grpc, &[])).finish(status.into_http()));
        assert_eq!(counted(&service), [expected]);
    }
}

#[tokio::test]
async fn a_load_report_follows_the_messages_or_the_status_in_the_headers() {
    const REQUEST: (&str, &str) = ("endpoint-load-metrics-format", "text");
    const TRAILER: &str = "endpoint-load-metrics-bin";
    let call = |headers: &[(&'static str, &'static str)]| {
        let call = call(&EchoService::default(), Protocol::Grpc, headers);
        SharedCall::new(call)
    };
    for (headers, expected) in [(&[REQUEST][..], true), (&[][..], false)] {
        let collected = call(headers).finish(message("0")).into_body().collect().await.unwrap();
        let trailers = collected.trailers().unwrap();
        assert_eq!(
            (trailers.len(), trailers.contains_key(TRAILER)),
            (1 + usize::from(expected), expected)
        );
        assert_eq!(collected.to_bytes(), "data");
        let failed = call(headers).finish(Status::internal("").into_http());
        assert_eq!(failed.headers().contains_key(TRAILER), expected);
    }
}
