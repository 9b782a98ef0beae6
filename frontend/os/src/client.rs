//! The HTTP client of the server: hyper with rustls, which the server links anyway.

use std::error::Error;
use std::time::Duration;

use hyper::body::Body;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const CONNECT: Duration = Duration::from_secs(5);
/// The time for which an idle connection is kept.
const IDLE: Duration = Duration::from_secs(30);

/// Creates a client that trusts the system's certificates, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
///
/// # Errors
/// TLS cannot be set up. Missing certificates are not an error here; connections that need them fail.
pub fn new<B>() -> Result<Client<HttpsConnector<HttpConnector>, B>, String>
where
    B: Body + Send,
    B::Data: Send,
{
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(native.certs);
    if let Some(error) = native.errors.first().filter(|_| roots.is_empty()) {
        tracing::warn!("no trusted certificates found, HTTPS connections will fail: {error}");
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
    Ok(client.build(connector.wrap_connector(tcp)))
}

/// Formats an error with its root cause: the outer errors only say that something failed.
pub fn deepest(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    match cause.to_string() == error.to_string() {
        true => error.to_string(),
        false => format!("{error}: {cause}"),
    }
}
