//! One export: a message to an OpenTelemetry collector over HTTP/1.1 or gRPC, on a new connection (at one export every few
//! seconds, a pool would not help).

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderName, HeaderValue, TE};
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use pharos::trace::otlp;
use tokio::net::TcpStream;

use crate::trace::Collector;

/// The gRPC method that receives traces (OTLP 1).
const GRPC_PATH: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// The maximum size of a response, bytes.
const MAX_ANSWER: usize = 64 << 10;

/// gRPC status codes after which an export may be retried (OTLP 1, "Failures").
const GRPC_RETRY: [u16; 6] = [1, 4, 10, 11, 14, 15];

/// RESOURCE_EXHAUSTED: retried only if its details have a retry time. Otherwise the message is too long for any attempt.
const GRPC_EXHAUSTED: u16 = 8;

/// Why an export failed.
#[derive(Debug)]
pub(super) struct Failure {
    /// Whether the export may be retried.
    pub(super) retryable: bool,
    /// The error text.
    pub(super) text: String,
}

impl Failure {
    fn transient(error: impl std::fmt::Display) -> Self {
        Self { retryable: true, text: error.to_string() }
    }

    fn permanent(error: impl std::fmt::Display) -> Self {
        Self { retryable: false, text: error.to_string() }
    }
}

/// Sends a message. Returns the number of refused spans and the reason, if the collector refused any.
pub(super) async fn send(collector: &Collector, message: Vec<u8>) -> Result<Option<(u64, String)>, Failure> {
    let sent = async {
        let address = (collector.host.as_str(), collector.port);
        let stream = TokioIo::new(TcpStream::connect(address).await.map_err(Failure::transient)?);
        if collector.grpc { grpc(collector, stream, &message).await } else { plain(collector, stream, message).await }
    };
    let in_time = tokio::time::timeout(collector.timeout, sent).await;
    in_time
        .unwrap_or_else(|_| Err(Failure::transient(format!("no response within {} ms", collector.timeout.as_millis()))))
}

async fn plain(
    collector: &Collector,
    stream: TokioIo<TcpStream>,
    message: Vec<u8>,
) -> Result<Option<(u64, String)>, Failure> {
    let mut request = request(collector, &collector.path, "application/x-protobuf", message.into())?;
    let host = HeaderValue::from_str(&authority(collector)).map_err(Failure::permanent)?;
    request.headers_mut().insert(HOST, host);
    let (mut sender, connection) = http1::handshake(stream).await.map_err(Failure::transient)?;
    let driving = tokio::spawn(connection);
    let response = sender.send_request(request).await.map_err(Failure::transient);
    let (status, body, _) = read(response?).await?;
    driving.abort();
    match status {
        200..300 => Ok(otlp::refused(&body)),
        429 | 502 | 503 | 504 => Err(Failure::transient(format!("HTTP status {status}"))),
        _ => Err(Failure::permanent(format!("HTTP status {status}: {}", shortened(&body)))),
    }
}

async fn grpc(
    collector: &Collector,
    stream: TokioIo<TcpStream>,
    message: &[u8],
) -> Result<Option<(u64, String)>, Failure> {
    // A gRPC message: not compressed, length, payload.
    let length = u32::try_from(message.len()).map_err(Failure::permanent)?;
    let framed = [&[0], &length.to_be_bytes()[..], message].concat();
    let path = format!("http://{}{GRPC_PATH}", authority(collector));
    let mut request = request(collector, &path, "application/grpc", framed.into())?;
    request.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.map_err(Failure::transient)?;
    let driving = tokio::spawn(connection);
    let response = sender.send_request(request).await.map_err(Failure::transient);
    let (status, body, headers) = read(response?).await?;
    driving.abort();
    if status != 200 {
        return Err(Failure {
            retryable: matches!(status, 429 | 502 | 503 | 504),
            text: format!("HTTP status {status}"),
        });
    }
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match text("grpc-status").parse() {
        Ok(0) => Ok(body.get(5..).and_then(otlp::refused)),
        Ok(code) => {
            let text = format!("gRPC status {code}: {}", shortened(text("grpc-message").as_bytes()));
            let later = code == GRPC_EXHAUSTED && headers.contains_key("grpc-status-details-bin");
            Err(Failure { retryable: later || GRPC_RETRY.contains(&code), text })
        }
        Err(_) => Err(Failure::permanent("the response has no gRPC status: is this a gRPC port?")),
    }
}

fn authority(collector: &Collector) -> String {
    let Collector { host, port, .. } = collector;
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn request(
    collector: &Collector,
    uri: &str,
    content_type: &'static str,
    body: Bytes,
) -> Result<Request<Full<Bytes>>, Failure> {
    let builder = Request::builder().method(Method::POST).uri(uri).header(CONTENT_TYPE, content_type);
    let mut request = builder.body(Full::new(body)).map_err(Failure::permanent)?;
    for (name, value) in &collector.headers {
        let name: HeaderName = name.parse().map_err(|_| Failure::permanent(format!("invalid header name '{name}'")))?;
        let value = HeaderValue::from_str(value)
            .map_err(|_| Failure::permanent(format!("invalid value of header '{name}'")))?;
        request.headers_mut().insert(name, value);
    }
    Ok(request)
}

/// Reads a response: status, body, and headers with trailers.
async fn read(response: Response<Incoming>) -> Result<(u16, Bytes, HeaderMap), Failure> {
    let (head, body) = response.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await.map_err(Failure::transient)?;
    let mut headers = head.headers;
    headers.extend(body.trailers().cloned().unwrap_or_default());
    Ok((head.status.as_u16(), body.to_bytes(), headers))
}

fn shortened(text: &[u8]) -> String {
    String::from_utf8_lossy(text.get(..200).unwrap_or(text)).into_owned()
}
