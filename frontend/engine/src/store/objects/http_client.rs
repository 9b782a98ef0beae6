//! The HTTP client for stores: hyper with rustls, which the server uses anyway. Every wait has a
//! timeout: for the connection, for the head of an answer, and between two pieces of its body.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector as Connector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use tokio::time::timeout;

use pharos_os::client::{self, HttpsClient, deepest};

/// The time limit of waiting for the next bytes of an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(15);

/// The limits in bytes of answers that are read as a whole: a listing or a token (a request with a
/// query), and an error.
const LISTING: u64 = 64 << 20;
const REFUSAL: u64 = 1 << 20;

/// The HTTP client for stores.
#[derive(Clone, Debug)]
pub(super) struct Http(HttpsClient);

impl Http {
    /// # Errors
    /// TLS cannot be set up.
    pub(super) fn new() -> Result<Self, String> {
        client::new().map(Self)
    }
}

impl Connector for Http {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

impl HttpService for Http {
    fn call<'own, 'call>(
        &'own self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'call>>
    where
        'own: 'call,
        Self: 'call,
    {
        Box::pin(async move {
            let is_object = is_object(request.uri().query());
            let answered = timeout(READ_TIMEOUT, self.0.request(request)).await;
            let response = answered.map_err(|_| timed_out("no answer"))?.map_err(|error| {
                let kind = if error.is_connect() {
                    HttpErrorKind::Connect
                } else {
                    HttpErrorKind::Request
                };
                HttpError::new(kind, Cause(deepest(&error)))
            })?;
            let (head, body) = response.into_parts();
            let longest = match head.status.is_success() {
                true if is_object => u64::MAX,
                true => LISTING,
                false => REFUSAL,
            };
            Ok(HttpResponse::from_parts(
                head,
                HttpResponseBody::new(StreamBody::new(pieces(body, longest))),
            ))
        })
    }
}

/// Returns whether a request with this query reads an object. Such a request has no query, or a
/// signature (Azure's shared access signature), which listings have too.
fn is_object(query: Option<&str>) -> bool {
    let has = |name: &str| {
        let mut names = query
            .unwrap_or_default()
            .split('&')
            .map(|pair| pair.split('=').next().unwrap_or_default());
        names.any(|found| found == name)
    };
    query.is_none() || has("sig") && !has("comp")
}

/// Returns the body of an answer, of at most `longest` bytes. An error ends the stream; it may be
/// polled after its end.
fn pieces(
    body: Incoming,
    longest: u64,
) -> impl stream::Stream<Item = Result<Frame<Bytes>, HttpError>> + Send + Sync {
    let pieces = stream::unfold(Some((body, longest)), |state| async move {
        let (mut body, left) = state?;
        let broken = |kind, text: String| Some((Err(HttpError::new(kind, Cause(text))), None));
        match timeout(READ_TIMEOUT, body.frame()).await {
            Ok(None) => None,
            Ok(Some(Ok(frame))) => {
                match left.checked_sub(frame.data_ref().map_or(0, |data| data.len() as u64)) {
                    Some(left) => Some((Ok(frame), Some((body, left)))),
                    None => broken(HttpErrorKind::Decode, "the answer is too long".to_owned()),
                }
            }
            Ok(Some(Err(error))) => broken(HttpErrorKind::Interrupted, deepest(&error)),
            Err(_) => Some((Err(timed_out("no more data of the answer")), None)),
        }
    });
    pieces.fuse()
}

/// The text of an error.
#[derive(Debug)]
struct Cause(String);

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Cause {}

fn timed_out(what: &str) -> HttpError {
    HttpError::new(
        HttpErrorKind::Timeout,
        Cause(format!("{what} for {} s", READ_TIMEOUT.as_secs())),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_objects_are_objects() {
        for (query, expected) in [
            (None, true),
            (Some("sv=2022-11-02&sp=rl&sig=x%3D"), true),
            (Some("restype=container&comp=list&prefix=m%2F&sv=2022-11-02&sig=x%3D"), false),
            (Some("list-type=2&prefix=sig"), false),
            (Some("api-version=2019-08-01&resource=x"), false),
        ] {
            assert_eq!(is_object(query), expected, "{query:?}");
        }
    }
}
