//! HTTP for stores: hyper's client with rustls, which the tree has anyway. Every wait has an end: for the connection, for the
//! head of an answer, and between two pieces of its body.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector as Connector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};
use tokio::time::timeout;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const CONNECT: Duration = Duration::from_secs(5);
/// The longest wait for the next bytes of an answer.
const SILENCE: Duration = Duration::from_secs(15);
/// How long a connection may be kept for the next request.
const IDLE: Duration = Duration::from_secs(30);

/// How long an answer may be that is read as a whole, in bytes: a listing, which requests with a query ask for, and what a
/// store says when it refuses.
const LISTING: u64 = 64 << 20;
const REFUSAL: u64 = 1 << 20;

/// Speaks to stores.
#[derive(Clone, Debug)]
pub(super) struct Http(Client<HttpsConnector<HttpConnector>, HttpRequestBody>);

impl Http {
    /// Trusts the system's certificates, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    ///
    /// # Errors
    /// TLS cannot be set up. Certificates that are not there are told by the connection that needs them.
    pub(super) fn new() -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        let native = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(native.certs);
        if let Some(error) = native.errors.first().filter(|_| roots.is_empty()) {
            tracing::warn!("no certificates to trust, stores are reached over HTTP only: {error}");
        }
        let tls = ClientConfig::builder_with_provider(ring::default_provider().into());
        let tls = tls.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
        let tls = tls.with_root_certificates(roots).with_no_client_auth();
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_nodelay(true);
        tcp.enforce_http(false);
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
        let mut client = Client::builder(TokioExecutor::new());
        client.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE);
        Ok(Self(client.build(connector.wrap_connector(tcp))))
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
            let longest = if request.uri().query().is_some() { LISTING } else { u64::MAX };
            let response = timeout(SILENCE, self.0.request(request)).await;
            let response = response.map_err(|_| silent("no answer"))?.map_err(|error| {
                let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Request };
                HttpError::new(kind, Cause(deepest(&error)))
            })?;
            let (head, body) = response.into_parts();
            let longest = if head.status.is_success() { longest } else { REFUSAL };
            Ok(HttpResponse::from_parts(head, HttpResponseBody::new(StreamBody::new(pieces(body, longest)))))
        })
    }
}

/// The body of an answer, of at most so many bytes. An error ends it; it may be asked for more after its end.
fn pieces(body: Incoming, longest: u64) -> impl stream::Stream<Item = Result<Frame<Bytes>, HttpError>> + Send + Sync {
    let pieces = stream::unfold(Some((body, longest)), |state| async move {
        let (mut body, left) = state?;
        let broken = |kind, text: String| Some((Err(HttpError::new(kind, Cause(text))), None));
        match timeout(SILENCE, body.frame()).await {
            Ok(None) => None,
            Ok(Some(Ok(frame))) => match left.checked_sub(frame.data_ref().map_or(0, |data| data.len() as u64)) {
                Some(left) => Some((Ok(frame), Some((body, left)))),
                None => broken(HttpErrorKind::Decode, "the answer is too long".to_owned()),
            },
            Ok(Some(Err(error))) => broken(HttpErrorKind::Interrupted, deepest(&error)),
            Err(_) => Some((Err(silent("the answer stopped")), None)),
        }
    });
    pieces.fuse()
}

/// What went wrong, in words.
#[derive(Debug)]
struct Cause(String);

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Cause {}

fn silent(what: &str) -> HttpError {
    HttpError::new(HttpErrorKind::Timeout, Cause(format!("{what}, for {} s", SILENCE.as_secs())))
}

/// The first cause of an error: what is above it says only that something failed.
fn deepest(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    match cause.to_string() == error.to_string() {
        true => error.to_string(),
        false => format!("{error}: {cause}"),
    }
}
