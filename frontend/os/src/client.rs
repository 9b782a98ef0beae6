//! The HTTP client of the server: hyper's with rustls, which the tree has anyway.

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
/// How long a connection may be kept for the next request.
const IDLE: Duration = Duration::from_secs(30);

/// Trusts the system's certificates, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
///
/// # Errors
/// TLS cannot be set up. Certificates that are not there are told by the connection that needs them.
pub fn new<B>() -> Result<Client<HttpsConnector<HttpConnector>, B>, String>
where
    B: Body + Send,
    B::Data: Send,
{
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(native.certs);
    if let Some(error) = native.errors.first().filter(|_| roots.is_empty()) {
        tracing::warn!("no certificates to trust, others are reached over HTTP only: {error}");
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

/// The first cause of an error: what is above it says only that something failed.
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
