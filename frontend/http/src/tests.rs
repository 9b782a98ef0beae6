//! Tests of the HTTP edge through its routes, over a service that echoes.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use pharos::error::Reason;
use pharos::service::{Protocol, Route};

use super::*;
use pharos_edge::http_service::Handle;
use pharos_edge::routing::Routes;
use pharos_service_double::EchoService;

struct Got {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Got {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

fn table(service: &EchoService, settings: Settings) -> Routes<Edge> {
    Dispatch::new(service.shared(), settings, models()).routes
}

/// Returns models without chat templates.
pub(crate) fn models() -> Arc<Models> {
    struct None;
    impl pharos_openai::renderer::Launch for None {
        fn launch(&self) -> std::io::Result<pharos_openai::renderer::Process> {
            Err(std::io::ErrorKind::Unsupported.into())
        }
    }
    Arc::new(Models::new(Arc::new(None)))
}

/// Returns the response of a table.
async fn answer<T: Clone + Send + Sync + 'static>(
    routes: Routes<T>,
    request: Request<Body>,
) -> Response {
    let Ok(response) = routes.handle(request).await;
    response
}

async fn send(service: &EchoService, request: Request<Body>) -> Got {
    let settings = Settings { max_input_size: 1 << 16, ..Settings::default() };
    let response = answer(table(service, settings), request).await;
    let (parts, body) = response.into_parts();
    Got {
        status: parts.status,
        headers: parts.headers,
        body: body.collect().await.unwrap().to_bytes(),
    }
}

async fn ask(service: &EchoService, method: &str, path: &str, body: impl Into<Body>) -> Got {
    send(service, Request::builder().method(method).uri(path).body(body.into()).unwrap()).await
}

const INFER: &str = "/v2/models/echo/infer";
const NOT_ONE: &str = "{\"error\":\"generate expects model to produce exactly 1 response, use";
const GOOD: &str =
    r#"{"id":"7","inputs":[{"name":"INPUT0","shape":[2],"datatype":"INT32","data":[1,2]}]}"#;

/// Method, path and body; the expected status and the expected beginning of the body.
#[tokio::test]
#[allow(clippy::too_many_lines)] // a table
async fn every_route_answers_and_is_counted_once() {
    const TRACE: &str = r#"{"trace_rate":7,"trace_level":["OFF"]}"#;
    let dir = r#"{"name":"echo","versions":["1"],"platform":"builtin","inputs":[{"name":"INPUT0","datatype":"FP32","shape":[-1]}],"outputs":[{"name":"OUTPUT0","datatype":"FP32","shape":[-1]}]}"#;
    let unknown = r#"{"error":"Request for unknown model: 'nope' is not found"}"#;
    for (method, path, body, status, expected, route, reason) in [
        ("GET", "/v2/health/live", "", 200, r#"{"live":true}"#, Route::Live, None),
        ("GET", "/v2/health/ready?x=1", "", 200, r#"{"ready":true}"#, Route::Ready, None),
        ("GET", "/v2", "", 200, "{\"name\":\"triton\",\"version\":", Route::ServerMetadata, None),
        ("GET", "/v2/models/echo", "", 200, dir, Route::ModelMetadata, None),
        ("GET", "/v2/models/echo/versions/1?a=b", "", 200, dir, Route::ModelMetadata, None),
        (
            "GET",
            "/v2/models/nope",
            "",
            400,
            unknown,
            Route::ModelMetadata,
            Some(Reason::UnknownModel),
        ),
        ("GET", "/v2/models/echo/ready", "", 200, "", Route::ModelReady, None),
        (
            "GET",
            "/v2/models/nope/ready",
            "",
            400,
            r#"{"error":"Model version not ready"}"#,
            Route::ModelReady,
            Some(Reason::UnknownModel),
        ),
        ("GET", "/v2/models/echo/config", "", 200, r#"{"name":"echo"}"#, Route::ModelConfig, None),
        (
            "GET",
            "/v2/models/echo/versions/1/config",
            "",
            200,
            r#"{"name":"echo"}"#,
            Route::ModelConfig,
            None,
        ),
        (
            "GET",
            "/v2/models/stats",
            "",
            200,
            "{\"model_stats\":[{\"name\":\"echo\",\"version\":\"1\",\"last_inference\":0,",
            Route::ModelStatistics,
            None,
        ),
        (
            "GET",
            "/v2/models/echo/versions/1/stats",
            "",
            200,
            "{\"model_stats\":[{",
            Route::ModelStatistics,
            None,
        ),
        (
            "POST",
            INFER,
            GOOD,
            200,
            r#"{"id":"7","model_name":"echo","model_version":"1","outputs":[{"name":"OUTPUT0","datatype":"INT32","shape":[2],"data":[1,2]}]}"#,
            Route::Infer,
            None,
        ),
        (
            "POST",
            "/v2/models/echo/versions/1/infer",
            GOOD,
            200,
            "{\"id\":\"7\"",
            Route::Infer,
            None,
        ),
        (
            "GET",
            "/v1/models",
            "",
            200,
            r#"{"models":["echo"],"object":"list","data":[{"id":"echo","object":"model","created":"#,
            Route::Models,
            None,
        ),
        (
            "GET",
            "/v1/models/echo",
            "",
            200,
            r#"{"name":"echo","ready":true,"id":"echo","object":"model","created":"#,
            Route::ModelReady,
            None,
        ),
        (
            "POST",
            "/v1/chat/completions",
            "{}",
            400,
            r#"{"error":{"message":"the required field `messages` is missing","type":"invalid_request_error","#,
            Route::ChatCompletion,
            Some(Reason::Invalid),
        ),
        (
            "POST",
            "/v1/responses",
            "{}",
            404,
            r#"{"error":{"message":"this server does not have OpenAI's API /v1/responses yet: send POST /v1/chat/completions "#,
            Route::Unknown,
            Some(Reason::Unsupported),
        ),
        (
            "POST",
            "/v2/models/nope/infer",
            GOOD,
            400,
            unknown,
            Route::Infer,
            Some(Reason::UnknownModel),
        ),
        (
            "POST",
            "/v2/models/nope/infer",
            "{",
            400,
            unknown,
            Route::Infer,
            Some(Reason::UnknownModel),
        ),
        (
            "POST",
            INFER,
            "{",
            500,
            "{\"error\":\"failed to parse the request JSON buffer: ",
            Route::Infer,
            Some(Reason::Malformed),
        ),
        (
            "POST",
            "/v2/repository/index",
            "",
            200,
            r#"[{"name":"echo","version":"1","state":"READY"},{"name":"never"}]"#,
            Route::RepositoryIndex,
            None,
        ),
        (
            "POST",
            "/v2/repository/index",
            r#"{"ready":true}"#,
            200,
            r#"[{"name":"echo","version":"1","state":"READY"}]"#,
            Route::RepositoryIndex,
            None,
        ),
        (
            "POST",
            "/v2/repository/index",
            "\u{feff}{\"ready\":true}",
            200,
            r#"[{"name":"echo","version":"1","state":"READY"}]"#,
            Route::RepositoryIndex,
            None,
        ),
        (
            "POST",
            "/v2/repository/index",
            r#"{"ready":5}"#,
            400,
            r#"{"error":"Invalid value for 'ready': expected a boolean"}"#,
            Route::RepositoryIndex,
            Some(Reason::Malformed),
        ),
        ("POST", "/v2/repository/models/echo/load", "", 200, "", Route::RepositoryLoad, None),
        ("POST", "/v2/repository/models/echo/unload", "{}", 200, "", Route::RepositoryUnload, None),
        (
            "POST",
            "/v2/models/echo/generate",
            r#"{"INPUT0":5}"#,
            200,
            r#"{"OUTPUT0":5.0,"model_name":"echo","model_version":"1"}"#,
            Route::Generate,
            None,
        ),
        (
            "POST",
            "/v2/models/many/generate",
            r#"{"INPUT0":5}"#,
            200,
            r#"{"OUT":5,"model_name":"#,
            Route::Generate,
            None,
        ),
        (
            "POST",
            "/v2/models/many/generate",
            r#"{"INPUT0":[]}"#,
            400,
            NOT_ONE,
            Route::Generate,
            Some(Reason::Invalid),
        ),
        (
            "POST",
            "/v2/models/many/generate",
            r#"{"INPUT0":[1,2]}"#,
            400,
            NOT_ONE,
            Route::Generate,
            Some(Reason::Invalid),
        ),
        (
            "POST",
            "/v2/models/many/versions/1/generate_stream",
            r#"{"INPUT0":[1,255],"id":"x"}"#,
            200,
            "data: {\"OUT\":1,\"id\":\"x\",\"model_name\":\"many\",\"model_version\":\"1\"}\n\n\
             data: {\"error\":\"asked to fail\"}\n\n",
            Route::GenerateStream,
            Some(Reason::Internal),
        ),
        (
            "POST",
            "/v2/models/many/generate_stream",
            r#"{"INPUT0":255}"#,
            500,
            "data: {\"error\":\"asked to fail\"}\n\n",
            Route::GenerateStream,
            Some(Reason::Internal),
        ),
        (
            "POST",
            "/v2/models/many/generate_stream",
            r#"{"INPUT0":[]}"#,
            200,
            "",
            Route::GenerateStream,
            None,
        ),
        (
            "GET",
            "/v2/systemsharedmemory/status",
            "",
            200,
            "[]",
            Route::SystemSharedMemoryStatus,
            None,
        ),
        ("GET", "/v2/cudasharedmemory/status", "", 200, "[]", Route::CudaSharedMemoryStatus, None),
        (
            "POST",
            "/v2/systemsharedmemory/unregister",
            "",
            200,
            "",
            Route::SystemSharedMemoryUnregister,
            None,
        ),
        (
            "POST",
            "/v2/cudasharedmemory/unregister",
            "",
            200,
            "",
            Route::CudaSharedMemoryUnregister,
            None,
        ),
        (
            "POST",
            "/v2/cudasharedmemory/region/r/unregister",
            "",
            200,
            "",
            Route::CudaSharedMemoryUnregister,
            None,
        ),
        (
            "GET",
            "/v2/cudasharedmemory/region/r/status",
            "",
            404,
            r#"{"error":"Unable to find cuda shared memory region: 'r'"}"#,
            Route::CudaSharedMemoryStatus,
            Some(Reason::SharedMemory),
        ),
        (
            "POST",
            "/v2/systemsharedmemory/region/r/register",
            "{}",
            400,
            "Shared memory register request has no 'key' field",
            Route::SystemSharedMemoryRegister,
            Some(Reason::Malformed),
        ),
        (
            "GET",
            "/v2/trace/setting",
            "",
            200,
            r#""trace_mode":"triton""#,
            Route::TraceSetting,
            None,
        ),
        (
            "POST",
            "/v2/models/echo/trace/setting",
            TRACE,
            200,
            r#""trace_rate":"7""#,
            Route::TraceSetting,
            None,
        ),
        (
            "POST",
            "/v2/trace/setting",
            r#"{"a":1}"#,
            400,
            "'a'",
            Route::TraceSetting,
            Some(Reason::Invalid),
        ),
        ("POST", "/v2/logging", "{}", 200, "\"log_format\"", Route::LogSettings, None),
        (
            "POST",
            "/v2/models/nope/generate",
            "",
            400,
            unknown,
            Route::Generate,
            Some(Reason::UnknownModel),
        ),
        (
            "POST",
            "/v2/models/nope/generate_stream",
            "",
            400,
            unknown,
            Route::GenerateStream,
            Some(Reason::UnknownModel),
        ),
        (
            "GET",
            "/foo",
            "",
            404,
            r#"{"error":"Not Found"}"#,
            Route::Unknown,
            Some(Reason::Unsupported),
        ),
        (
            "GET",
            "/v2/models/%ff/ready",
            "",
            404,
            r#"{"error":"Not Found"}"#,
            Route::Unknown,
            Some(Reason::Unsupported),
        ),
        (
            "GET",
            INFER,
            "",
            405,
            r#"{"error":"Method Not Allowed"}"#,
            Route::Unknown,
            Some(Reason::Unsupported),
        ),
        (
            "DELETE",
            "/v2",
            "",
            405,
            r#"{"error":"Method Not Allowed"}"#,
            Route::Unknown,
            Some(Reason::Unsupported),
        ),
    ] {
        let service = EchoService::default();
        let got = ask(&service, method, path, body).await;
        assert_eq!(got.status.as_u16(), status, "{method} {path}: {}", got.text());
        let fits =
            if expected.is_empty() { got.body.is_empty() } else { got.text().contains(expected) };
        assert!(fits, "{method} {path}: got {}, expected {expected}", got.text());
        if !got.body.is_empty() {
            let events = path.ends_with("/generate_stream") && got.text().starts_with("data: ");
            let expected =
                if events { "text/event-stream; charset=utf-8" } else { "application/json" };
            assert_eq!(got.header("content-type"), Some(expected), "{method} {path}");
        }
        assert_eq!(service.records(), [(Protocol::Http, route, status, reason)], "{method} {path}");
    }
}

fn infer_request() -> http::request::Builder {
    Request::builder().method("POST").uri(INFER)
}

#[tokio::test]
async fn binary_data_is_received_and_sent() {
    let json = r#"{"parameters":{"binary_data_output":true},"inputs":[{"name":"INPUT0","shape":[3],"datatype":"UINT8","parameters":{"binary_data_size":3}}]}"#;
    let body = [json.as_bytes(), &[7, 8, 9]].concat();
    let request =
        infer_request().header("Inference-Header-Content-Length", json.len()).body(body.into());
    let got = send(&EchoService::default(), request.unwrap()).await;
    assert_eq!(got.status, 200);
    assert_eq!(got.header("content-type"), Some("application/octet-stream"));
    let length: usize = got.header("inference-header-content-length").unwrap().parse().unwrap();
    let (head, blob) = got.body.split_at(length);
    assert!(head.ends_with(b"\"parameters\":{\"binary_data_size\":3}}]}"));
    assert_eq!(blob, [7, 8, 9]);
}

#[tokio::test]
async fn requests_and_responses_may_be_compressed() {
    use compression::{Coding, compress, decompress};
    let plain = Bytes::from(GOOD);
    for (coding, name) in [(Coding::Gzip, "gzip"), (Coding::Deflate, "deflate")] {
        let body = compress(std::iter::once(&plain), coding).unwrap();
        let request = infer_request()
            .header("content-encoding", name)
            .header("accept-encoding", name)
            .body(body.into());
        let got = send(&EchoService::default(), request.unwrap()).await;
        assert_eq!((got.status.as_u16(), got.header("content-encoding")), (200, Some(name)));
        let text = decompress(
            got.body.into(),
            coding,
            1 << 20,
            &mut pharos_listener::receiving::Budget::default().reserve(),
        )
        .unwrap()
        .unwrap()
        .join();
        assert!(text.ends_with(b"\"data\":[1,2]}]}"));
    }
    let service = EchoService::default();
    let got =
        send(&service, infer_request().header("content-encoding", "br").body(GOOD.into()).unwrap())
            .await;
    assert_eq!((got.status.as_u16(), got.header("accept-encoding")), (501, Some("gzip, deflate")));
    assert_eq!(got.text(), r#"{"error":"Unsupported compression type"}"#);
    assert_eq!(service.records(), [(Protocol::Http, Route::Infer, 501, Some(Reason::Unsupported))]);
}

#[tokio::test]
async fn refuses_bodies_over_the_limit_in_every_form() {
    use compression::{Coding, compress};
    let big = Bytes::from(vec![b' '; (1 << 16) + 1]);
    let json = "request JSON size of 65537 bytes exceeds the maximum allowed input size of 65536 \
                bytes. Use --http-max-input-size";
    let raw = "exceeds the maximum allowed value";
    let bomb = compress(std::iter::once(&Bytes::from(vec![b' '; 1 << 22])), Coding::Gzip).unwrap();
    let chunked = || {
        let pieces = vec![Bytes::from(vec![b' '; 1 << 15]); 3];
        Body::new(pieces::Pieces::new(Bytes::new(), pieces).map_err(|never| match never {}))
    };
    for (request, expected) in [
        (infer_request().body(Body::from(big.clone())), json),
        (infer_request().header("inference-header-content-length", "0").body(Body::from(big)), raw),
        (
            infer_request().header("content-encoding", "gzip").body(Body::from(bomb)),
            "exceeds the maximum allowed",
        ),
        (infer_request().body(chunked()), "request JSON size of 98304 bytes"),
    ] {
        let service = EchoService::default();
        let got = send(&service, request.unwrap()).await;
        assert!(
            got.status == 400 && got.text().contains(expected),
            "{}: {}",
            got.status,
            got.text()
        );
        assert_eq!(
            service.records(),
            [(Protocol::Http, Route::Infer, 400, Some(Reason::TooLarge))]
        );
    }
}

#[tokio::test]
async fn binary_data_may_reach_the_limit_in_addition_to_the_json() {
    let json = r#"{"inputs":[{"name":"INPUT0","shape":[65536],"datatype":"UINT8","parameters":{"binary_data_size":65536}}],"outputs":[{"name":"OUTPUT0","parameters":{"binary_data":true}}]}"#;
    let body = [json.as_bytes(), &[1; 65536]].concat();
    let request =
        infer_request().header("inference-header-content-length", json.len()).body(body.into());
    let got = send(&EchoService::default(), request.unwrap()).await;
    assert_eq!(got.status, 200, "{}", got.text());
}

#[tokio::test]
async fn a_client_disconnect_is_counted_as_cancelled() {
    let service = EchoService::default();
    let request = Request::builder()
        .method("POST")
        .uri("/v2/models/slow/infer")
        .body(Body::from(GOOD))
        .unwrap();
    let call = table(&service, Settings::default()).handle(request);
    let waited = tokio::time::timeout(Duration::from_millis(20), call).await;
    assert!(waited.is_err(), "the model never answers");
    assert_eq!(service.records(), [(Protocol::Http, Route::Infer, 499, Some(Reason::Cancelled))]);
}

#[tokio::test]
async fn metrics_have_their_own_listener() {
    let call = async |path: &str, accept: &str| {
        let request =
            Request::builder().uri(path).header("accept", accept).body(Body::empty()).unwrap();
        let response = answer(metrics::router(EchoService::default().shared()), request).await;
        let content_type = response.headers()["content-type"].to_str().unwrap().to_owned();
        (
            response.status().as_u16(),
            content_type,
            response.into_body().collect().await.unwrap().to_bytes(),
        )
    };
    let (status, content_type, body) = call("/metrics?name=x", "*/*").await;
    assert_eq!(
        (status, content_type.as_str(), &body[..]),
        (200, "text/plain; version=0.0.4; charset=utf-8", &b"nv_x 1\n"[..])
    );
    let (_, content_type, body) = call("/metrics", "application/openmetrics-text").await;
    assert!(content_type.starts_with("application/openmetrics-text") && body == "# EOF\n");
    let protobuf = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; \
                    encoding=delimited";
    let (_, content_type, body) =
        call("/metrics", &format!("{protobuf};q=0.5,text/plain;q=0.2")).await;
    assert_eq!((content_type.as_str(), &body[..]), (protobuf, &b"\x06\x0a\x04nv_x"[..]));
    assert_eq!(call("/", "*/*").await.0, 404);
}

/// Uses a socket, because the service does not receive these requests: malformed and oversized
/// heads are answered and counted.
#[tokio::test]
async fn malformed_heads_are_counted() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = EchoService::default();
    let (stop, life) = tokio::sync::watch::channel(listener::Phase::Serving);
    let server =
        serve(listener, service.shared(), Settings::default(), models(), connections(), life);
    let heads = [
        (400, "NONSENSE\r\n\r\n".to_owned()),
        (400, "POST /v2 HTTP/1.1\r\nContent-Length: -1\r\n\r\n".to_owned()),
        (414, format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(70_000))),
        (431, format!("GET /v2 HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(150))),
    ];
    for (status, head) in &heads {
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        client.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
    stop.send(listener::Phase::Stopping).unwrap();
    server.await.unwrap();
    let expected = heads.map(|(status, _)| {
        let reason = if status == 400 { Reason::Malformed } else { Reason::TooLarge };
        (Protocol::Http, Route::Unknown, status, Some(reason))
    });
    assert_eq!(service.records(), expected);
}

/// A malformed header does not count as absent.
#[tokio::test]
async fn malformed_body_headers_are_refused() {
    for (headers, status, text) in [
        (
            &[("inference-header-content-length", &b"\xff"[..])][..],
            400,
            "Unable to parse Inference-Header-Content-Length",
        ),
        (
            &[("inference-header-content-length", b"5"), ("inference-header-content-length", b"6")],
            400,
            "Unable to parse Inference-Header-Content-Length, got: 5, 6",
        ),
        (&[("content-encoding", b"\xff")], 501, "Unsupported compression type"),
        (
            &[("content-encoding", b"identity"), ("content-encoding", b"gzip")],
            501,
            "Unsupported compression type",
        ),
        (&[("content-encoding", b"IDENTITY")], 200, "model_name"),
    ] {
        let mut request = infer_request();
        for (name, value) in headers {
            request = request.header(*name, http::HeaderValue::from_bytes(value).unwrap());
        }
        let got = send(&EchoService::default(), request.body(Body::from(GOOD)).unwrap()).await;
        assert_eq!(got.status, status, "{headers:?}: {}", got.text());
        assert!(got.text().contains(text), "{headers:?}: {}", got.text());
    }
}

/// Uses a socket: kept-alive connections, a request in flight at shutdown, and no new connections
/// after it.
#[tokio::test]
async fn shutdown_lets_requests_finish() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, life) = tokio::sync::watch::channel(listener::Phase::Serving);
    let server = serve(
        listener,
        EchoService::default().shared(),
        Settings::default(),
        models(),
        connections(),
        life,
    );
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    let head =
        format!("POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", GOOD.len());
    let mut buffer = vec![0; 4096];
    client.write_all(format!("{head}{GOOD}").as_bytes()).await.unwrap();
    let first = client.read(&mut buffer).await.unwrap();
    assert!(buffer[..first].starts_with(b"HTTP/1.1 200 OK"));
    client.write_all(head.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    stop.send(listener::Phase::Draining).unwrap();
    stop.send(listener::Phase::Stopping).unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!server.is_finished(), "a request is in flight");
    client.write_all(GOOD.as_bytes()).await.unwrap();
    let second = client.read(&mut buffer).await.unwrap();
    assert!(buffer[..second].starts_with(b"HTTP/1.1 200 OK"), "the request in flight is answered");
    assert!(String::from_utf8_lossy(&buffer[..second]).contains("connection: close\r\n"));
    server.await.unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn loads_and_unloads_have_parameters() {
    let load = "/v2/repository/models/other%20one/load";
    let unload = "/v2/repository/models/other/unload";
    let many = format!(r#"{{"parameters":{{"config":"{}"}}}}"#, "x".repeat(1 << 16));
    for (path, body, status, expected) in [
        (load, "", 500, "other one with "),
        (load, r#"{"parameters":{}}"#, 500, "other one with "),
        (
            load,
            r#"{"other":1,"parameters":{"config":"{}","file:1/x":"AAEC"}}"#,
            500,
            "other one with config=2 file:1/x=3",
        ),
        (load, r#"{"parameters":{"config":"\u00fc"}}"#, 500, "other one with config=2"),
        (
            load,
            r#"{"parameters":{"file:1/x":"AAE"}}"#,
            400,
            "the value of 'file:1/x' is not base64",
        ),
        (
            load,
            r#"{"parameters":{"unknown":"x"}}"#,
            500,
            "unexpected error on creating Triton parameter: 'unknown'",
        ),
        (
            load,
            r#"{"parameters":{"unknown":1}}"#,
            500,
            "parameter 'unknown': attempt to access JSON non-string as string",
        ),
        (
            load,
            r#"{"parameters":{"config":{}}}"#,
            500,
            "parameter 'config': attempt to access JSON non-string as string",
        ),
        (load, r#"{"parameters":[]}"#, 500, "attempt to get members for non-object"),
        (load, r#"{"parameters":null}"#, 500, "attempt to get members for non-object"),
        (load, "not json", 500, "failed to parse the request JSON buffer"),
        (load, "[]", 500, "failed to parse the request JSON buffer"),
        (
            load,
            &many,
            400,
            "exceeds the maximum allowed input size of 65536 bytes. Use --http-max-input-size to \
             increase",
        ),
        ("/v2/repository/models/a/../b/load", "", 500, "a/../b with "),
        ("/v2/repository/models//load", "", 500, " with "),
        ("/v2/repository/models/m/other", "", 404, "Not Found"),
        ("/v2/repository/models/load", "", 404, "Not Found"),
        ("/v2/repository/models/%ff/load", "", 404, "Not Found"),
        (unload, "", 500, "other false"),
        (unload, r#"{"parameters":{"unload_dependents":true,"unknown":[]}}"#, 500, "other true"),
        (
            unload,
            r#"{"parameters":{"unload_dependents":1}}"#,
            500,
            "attempt to access JSON non-boolean as boolean",
        ),
        (unload, "x", 500, "failed to parse the request JSON buffer"),
    ] {
        let got = ask(&EchoService::default(), "POST", path, body.to_owned()).await;
        assert_eq!(got.status.as_u16(), status, "{path} {body}: {}", got.text());
        assert!(got.text().contains(expected), "{path} {body}: {}", got.text());
    }
}
