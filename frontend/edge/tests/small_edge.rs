//! A whole edge with one route on a real listener: `POST /reverse` answers with the text of the
//! request in reverse. The page "Edges" of the internals explains the parts.

use std::net::SocketAddr;

use axum::body::Body;
use axum::response::Response;
use http::StatusCode;
use pharos::error::{InferError, Reason};
use pharos::metrics::labels::Listener;
use pharos::service::{Protocol, Route, SharedService};
use pharos_edge::headers::check_encoding;
use pharos_edge::http_settings::HttpSettings;
use pharos_edge::routing::{Builder, Fallbacks, Methods, Routed, Routes, handler};
use pharos_edge::{Call, answer_error, answer_refusal, http_service};
use pharos_listener::receiving::body;
use pharos_listener::{Phase, PhaseReceiver, Settings};
use pharos_service_double::EchoService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What all handlers of the edge share. The handlers of an edge with verbs of the engine find its
/// [`SharedService`] here.
#[derive(Clone)]
struct Edge {
    settings: HttpSettings,
}

/// Answers `POST /reverse`. A call is finished with its response and, if the request failed, the
/// reason.
async fn reverse(edge: Edge, call: Call, routed: Routed) -> Response {
    match read_text(&edge, routed).await {
        Ok(text) => {
            let reversed: String = text.chars().rev().collect();
            call.finish(response(StatusCode::OK, reversed), None)
        }
        Err(error) => call.finish(answer_error(&error, error.message.clone()), Some(error.reason)),
    }
}

/// Reads the body of a request, within the limit and the memory budget.
async fn read_text(edge: &Edge, routed: Routed) -> Result<String, InferError> {
    check_encoding(routed.request.headers())?;
    let HttpSettings { budget, max_input_size, .. } = &edge.settings;
    let body = body::read_within(budget, routed.request.into_body(), *max_input_size).await?;
    String::from_utf8(body.join().to_vec())
        .map_err(|error| InferError::malformed(format!("the text is not UTF-8: {error}")))
}

fn response(status: StatusCode, text: impl Into<Body>) -> Response {
    let mut response = Response::new(text.into());
    *response.status_mut() = status;
    response
}

/// Returns the table of the edge: every path with its route, which decides on access, and its
/// handlers.
fn routes(service: SharedService, settings: HttpSettings) -> Routes<Edge> {
    let policy = settings.policy(service);
    let fallbacks = Fallbacks {
        not_found: |_| response(StatusCode::NOT_FOUND, "no such path"),
        wrong_method: || response(StatusCode::METHOD_NOT_ALLOWED, "only POST is allowed"),
        refused: |refusal| answer_refusal(&refusal, refusal.text.clone()),
    };
    Builder::default().route("/reverse", Route::Infer, Methods::post(handler(reverse))).build(
        Edge { settings },
        policy,
        fallbacks,
    )
}

/// Spawns a task that serves the edge until `phases` says that the server stops.
fn serve(
    listener: TcpListener,
    service: SharedService,
    settings: HttpSettings,
    connections: Settings,
    phases: PhaseReceiver,
) -> JoinHandle<()> {
    let body_timeout = settings.body_timeout;
    let routes = routes(service.clone(), settings);
    http_service::serve(listener, routes, service, body_timeout, connections, phases)
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
    let connections = Settings::new(Listener::Http);
    let edge = serve(listener, service.shared(), HttpSettings::default(), connections, phases);

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
