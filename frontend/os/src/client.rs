//! The HTTP client of the server: hyper with rustls, which the server links anyway.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body, Incoming};
use hyper::{Request, Response};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::{self, legacy::Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tower::Service;

const CONNECT: Duration = Duration::from_secs(5);
/// The time for which an idle connection is kept.
const IDLE: Duration = Duration::from_secs(30);

/// A client for http:// and https://. Its bodies are trait objects: the code of hyper for a
/// connection is then compiled once, in this package, and not again for each type of body in the
/// packages that use it.
#[derive(Clone, Debug)]
pub struct HttpsClient(Client<HttpsConnector<HttpConnector>, RequestBody>);

type RequestBody = UnsyncBoxBody<Bytes, Box<dyn Error + Send + Sync>>;

/// The future of a response.
pub type Responding =
    Pin<Box<dyn Future<Output = Result<Response<Incoming>, client::legacy::Error>> + Send>>;

impl HttpsClient {
    /// Sends a request.
    pub fn request<B>(&self, request: Request<B>) -> Responding
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        self.send(request.map(|body| body.map_err(Into::into).boxed_unsync()))
    }

    fn send(&self, request: Request<RequestBody>) -> Responding {
        Box::pin(self.0.request(request))
    }
}

impl<B> Service<Request<B>> for HttpsClient
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Response = Response<Incoming>;
    type Error = client::legacy::Error;
    type Future = Responding;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // A request waits for its connection itself.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Responding {
        self.request(request)
    }
}

/// The version of HTTP that a client uses, without negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, as gRPC needs.
    Http2,
}

/// The files, in PEM, that verify servers and identify this client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// Certificates of the trusted authorities; `None` for the authorities of the system.
    pub authorities: Option<PathBuf>,
    /// The certificate chain of this client, and its private key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Creates a client for HTTP/1.1 that trusts the system's certificates, or the certificates of
/// `SSL_CERT_FILE` and `SSL_CERT_DIR`.
///
/// # Errors
/// TLS cannot be set up. Missing certificates are not an error here; connections that need them
/// fail.
pub fn new() -> Result<HttpsClient, String> {
    with(&ClientTls::default(), Version::Http1)
}

/// The time after which an HTTP/2 connection with open requests is checked by a ping, and the time
/// limit of the answer. A connection whose server vanished without a word would otherwise be used
/// until the kernel gives up, after some 15 minutes.
#[derive(Clone, Copy, Debug)]
struct KeepAlive {
    interval: Duration,
    timeout: Duration,
}

const KEEP_ALIVE: KeepAlive =
    KeepAlive { interval: Duration::from_secs(5), timeout: Duration::from_secs(3) };

/// Creates a client with these certificates.
///
/// # Errors
/// A file cannot be read or contains no certificate or key, or TLS cannot be set up.
pub fn with(files: &ClientTls, version: Version) -> Result<HttpsClient, String> {
    build(files, version, KEEP_ALIVE)
}

fn build(
    files: &ClientTls,
    version: Version,
    keep_alive: KeepAlive,
) -> Result<HttpsClient, String> {
    let tls = configuration(files)?;
    let mut tcp = HttpConnector::new();
    tcp.set_connect_timeout(Some(CONNECT));
    tcp.set_nodelay(true);
    tcp.enforce_http(false);
    let builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
    let connector = match version {
        Version::Http1 => builder.enable_http1().wrap_connector(tcp),
        Version::Http2 => builder.enable_http2().wrap_connector(tcp),
    };
    let mut client = Client::builder(TokioExecutor::new());
    client.timer(TokioTimer::new()).pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE);
    client.http2_only(version == Version::Http2);
    client
        .http2_keep_alive_interval(keep_alive.interval)
        .http2_keep_alive_timeout(keep_alive.timeout);
    Ok(HttpsClient(client.build(connector)))
}

fn configuration(files: &ClientTls) -> Result<ClientConfig, String> {
    let tls = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots(files.authorities.as_deref())?);
    match &files.identity {
        None => Ok(tls.with_no_client_auth()),
        Some((certificate, key)) => tls
            .with_client_auth_cert(chain(certificate)?, private_key(key)?)
            .map_err(|error| format!("cannot use the key '{}': {error}", key.display())),
    }
}

/// TLS for connections to one server, without an event loop.
#[derive(Clone, Debug)]
pub struct BlockingTls {
    configuration: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl BlockingTls {
    /// Reads the files. `server` is the host name or the IP address that the server's certificate
    /// must have.
    ///
    /// # Errors
    /// `server` is neither, a file cannot be read or contains no certificate or key, or TLS cannot
    /// be set up.
    pub fn new(files: &ClientTls, server: &str) -> Result<Self, String> {
        let Ok(server) = ServerName::try_from(server.to_owned()) else {
            return Err(format!(
                "'{server}' is not the name of a server: expected the name of a host or an IP \
                 address"
            ));
        };
        Ok(Self { configuration: configuration(files)?.into(), server })
    }

    /// Uses TLS on a connection; the first write shakes hands.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn on(&self, connection: TcpStream) -> io::Result<impl Read + Write + use<>> {
        let session = ClientConnection::new(self.configuration.clone(), self.server.clone());
        Ok(StreamOwned::new(session.map_err(io::Error::other)?, connection))
    }
}

/// Returns the authorities of a file, or of the system.
fn roots(file: Option<&Path>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    if let Some(file) = file {
        for certificate in chain(file)? {
            roots.add(certificate).map_err(|error| {
                format!("'{}' contains an invalid certificate: {error}", file.display())
            })?;
        }
        return Ok(roots);
    }
    let native = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(native.certs);
    if let Some(error) = native.errors.first().filter(|_| roots.is_empty()) {
        tracing::warn!("no trusted certificates found, HTTPS connections will fail: {error}");
    }
    Ok(roots)
}

fn chain(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(file).and_then(Iterator::collect).map_err(|error| {
            format!("cannot read the certificates in '{}': {error}", file.display())
        })?;
    if certificates.is_empty() {
        return Err(format!(
            "'{}' has no certificate in PEM (-----BEGIN CERTIFICATE-----)",
            file.display()
        ));
    }
    Ok(certificates)
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(file)
        .map_err(|error| format!("cannot read the private key in '{}': {error}", file.display()))
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::TcpListener;

    use tokio::runtime::Builder;

    use super::*;

    /// The server accepts the connection and sends nothing, like one that has vanished.
    #[test]
    fn an_http2_connection_without_answers_is_given_up() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = format!("http://{}/", silent.local_addr().unwrap());
        let time = Duration::from_millis(20);
        let ended = Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let keep_alive = KeepAlive { interval: time, timeout: time };
            let client = build(&ClientTls::default(), Version::Http2, keep_alive).unwrap();
            let request = Request::post(target).body(String::new()).unwrap();
            tokio::time::timeout(Duration::from_secs(30), client.request(request)).await
        });
        assert!(ended.unwrap().is_err());
    }
}
