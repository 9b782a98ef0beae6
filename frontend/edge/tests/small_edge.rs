//! A whole edge with one route on a real listener: `POST /reverse` answers with the text of the
//! request in reverse. The page "Edges" of the internals explains the parts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::StatusCode;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::metrics::labels::Listener;
use pharos::service::{Protocol, Route, SharedService};
use pharos_edge::access::Access;
use pharos_edge::http_service::{HttpService, count_unparsed};
use pharos_edge::response_timing::ResponseTiming;
use pharos_edge::routing::{Builder, Fallbacks, Methods, Routed, Routes, handler};
use pharos_edge::{Call, Refusal, ServerPolicy};
use pharos_listener::receiving::Budget;
use pharos_listener::receiving::body::{self, Read};
use pharos_listener::{Phase, PhaseReceiver, Settings};
use pharos_service_double::EchoService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What all handlers of the edge share. The handlers of an edge with verbs of the engine find its
/// [`SharedService`] here.
#[derive(Clone)]
struct Edge {
    /// The memory for bodies that are being received.
    budget: Budget,
}

/// The maximum bytes of a text.
const MAX_TEXT: u64 = 64 << 10;

/// Answers `POST /reverse`. A call is finished with its response and, if the request failed, the
/// reason.
async fn reverse(edge: Edge, call: Call, routed: Routed) -> Response {
    match read_text(&edge, routed.request.into_body()).await {
        Ok(text) => {
            let reversed: String = text.chars().rev().collect();
            call.finish(response(StatusCode::OK, reversed), None)
        }
        Err(error) => {
            let status = StatusCode::from_u16(error.code.http_status());
            let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            call.finish(response(status, error.message), Some(error.reason))
        }
    }
}

/// Reads the body of a request, which holds memory of the budget until it is complete.
async fn read_text(edge: &Edge, body: Body) -> Result<String, InferError> {
    let body = match body::read(&edge.budget, body, MAX_TEXT).await? {
        Read::Whole(body) => body.join(),
        Read::TooLarge(size) => {
            let text = format!("a text of {size} bytes is too large: allowed are {MAX_TEXT} bytes");
            return Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text));
        }
    };
    String::from_utf8(body.to_vec())
        .map_err(|error| InferError::malformed(format!("the text is not UTF-8: {error}")))
}

fn response(status: StatusCode, text: impl Into<Body>) -> Response {
    let mut response = Response::new(text.into());
    *response.status_mut() = status;
    response
}

/// Returns the answer to a request without access to its route.
fn no_access(refusal: Refusal) -> Response {
    response(StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::FORBIDDEN), refusal.text)
}

/// Returns the table of the edge: every path with its route, which decides on access, and its
/// handlers.
fn routes(service: SharedService) -> Routes<Edge> {
    let policy = ServerPolicy {
        service,
        access: Access::default(),
        restricted: Arc::default(),
        timing: ResponseTiming::default(),
    };
    let fallbacks = Fallbacks {
        not_found: || response(StatusCode::NOT_FOUND, "no such path"),
        wrong_method: || response(StatusCode::METHOD_NOT_ALLOWED, "only POST is allowed"),
        refused: no_access,
    };
    Builder::default().route("/reverse", Route::Infer, Methods::post(handler(reverse))).build(
        Edge { budget: Budget::default() },
        Arc::new(policy),
        fallbacks,
    )
}

/// Spawns a task that serves the edge until `phases` says that the server stops.
fn serve(
    listener: TcpListener,
    service: SharedService,
    connections: Settings,
    phases: PhaseReceiver,
) -> JoinHandle<()> {
    let refused = count_unparsed(service.clone());
    let http = HttpService::new(routes(service), Duration::from_secs(60));
    tokio::spawn(pharos_listener::serve(listener, connections, http, refused, phases))
}

/// Sends a request whose response ends the connection. Returns the status line and the body.
async fn exchange(address: SocketAddr, request: &str, text: &[u8]) -> (String, String) {
    let mut connection = TcpStream::connect(address).await.expect("the edge listens");
    let length = text.len();
    let head = format!("{request} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n");
    let head = format!("{head}content-length: {length}\r\n\r\n");
    connection.write_all(head.as_bytes()).await.expect("the head is sent");
    connection.write_all(text).await.expect("the text is sent");
    let mut received = String::new();
    connection.read_to_string(&mut received).await.expect("a response");
    let (head, body) = received.split_once("\r\n\r\n").expect("a head");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

#[tokio::test]
async fn every_request_is_answered_and_counted_once() {
    let service = EchoService::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("its address");
    let (stop, phases) = tokio::sync::watch::channel(Phase::Serving);
    let edge = serve(listener, service.shared(), Settings::new(Listener::Http), phases);

    for (request, text, status, body) in [
        ("POST /reverse", "abc é".as_bytes(), "200 OK", "é cba"),
        ("POST /reverse", b"\xff", "400 Bad Request", "the text is not UTF-8"),
        ("GET /reverse", b"", "405 Method Not Allowed", "only POST is allowed"),
        ("POST /other", b"", "404 Not Found", "no such path"),
    ] {
        let (line, received) = exchange(address, request, text).await;
        assert_eq!(line, format!("HTTP/1.1 {status}"), "{request}");
        assert!(received.starts_with(body), "{request}: {received}");
    }

    let unknown = |status| (Protocol::Http, Route::Unknown, status, Some(Reason::Unsupported));
    let infer = |status, reason| (Protocol::Http, Route::Infer, status, reason);
    assert_eq!(
        service.records(),
        [infer(200, None), infer(400, Some(Reason::Malformed)), unknown(405), unknown(404)]
    );
    stop.send(Phase::Stopping).expect("the edge runs");
    edge.await.expect("the edge ends");
}
