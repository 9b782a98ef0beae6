//! OTLP over HTTP/1.1, with protobuf.

use std::io::Write;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{HeaderMap, Method, Request, Uri};
use http_body_util::{BodyExt, Full, Limited};
use pharos_os::client::{self, HttpsClient, Version, deepest};
use pharos_os::{blocking, clock};

use super::{Endpoint, Failure, MAX_ANSWER, shortened};

/// A client of one URL.
pub(super) struct Client {
    client: HttpsClient,
    target: Uri,
    headers: HeaderMap,
    gzip: bool,
}

impl Client {
    pub(super) fn new(endpoint: &Endpoint, mut headers: HeaderMap) -> Result<Self, String> {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        if endpoint.gzip {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        let client = client::with(&endpoint.tls, Version::Http1)?;
        Ok(Self { client, target: endpoint.target.clone(), headers, gzip: endpoint.gzip })
    }

    /// Sends a message and returns the body of the response.
    pub(super) async fn post(&self, message: Bytes) -> Result<Bytes, Failure> {
        let body = if self.gzip {
            let compressed = blocking::run(move || compressed(&message)).await;
            compressed.map_err(Failure::permanent)?.map_err(Failure::permanent)?
        } else {
            message
        };
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.target.clone();
        *request.headers_mut() = self.headers.clone();
        let response = self
            .client
            .request(request)
            .await
            .map_err(|error| Failure::transient(deepest(&error)))?;
        let (head, body) = response.into_parts();
        let body =
            Limited::new(body, MAX_ANSWER).collect().await.map_err(Failure::transient)?.to_bytes();
        match head.status.as_u16() {
            200..300 => Ok(body),
            status @ (429 | 502 | 503 | 504) => {
                let header = head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
                let after = header.and_then(|text| retry_after(text, clock::wall_ms()));
                Err(Failure { retryable: true, after, text: format!("HTTP status {status}") })
            }
            status => {
                Err(Failure::permanent(format!("HTTP status {status}: {}", shortened(&body))))
            }
        }
    }
}

fn compressed(message: &[u8]) -> std::io::Result<Bytes> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(message)?;
    encoder.finish().map(Bytes::from)
}

/// Returns the time until a `Retry-After` (RFC 9110, 10.2.3): seconds, or a date.
fn retry_after(text: &str, now_ms: u64) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = jiff::fmt::rfc2822::parse(text.trim()).ok()?.timestamp().as_millisecond();
    Some(Duration::from_millis(u64::try_from(at).ok()?.saturating_sub(now_ms)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_a_number_or_a_date() {
        let now = 1_445_412_480_000;
        for (text, expected) in [
            ("120", Some(120)),
            ("Wed, 21 Oct 2015 07:28:30 GMT", Some(30)),
            ("Wed, 21 Oct 2015 07:27:00 GMT", Some(0)),
            ("-1", None),
            ("soon", None),
        ] {
            assert_eq!(retry_after(text, now), expected.map(Duration::from_secs), "{text}");
        }
    }

    #[test]
    fn compressed_messages_are_shorter() {
        let message = vec![7; 10_000];
        let small = compressed(&message).unwrap();
        assert!(small.len() < 100 && small.starts_with(&[0x1f, 0x8b]), "{}", small.len());
    }
}
