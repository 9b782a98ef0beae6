//! One accept loop for every listener of the server: HTTP, metrics and gRPC.
//!
//! It protects the process from its clients: TLS, connection limits, timeouts, sizes of buffers and
//! windows. It has no routes. A refused client gets a response if its protocol has one;
//! `pharos_connections_refused_total` and rate-limited log lines report refusals to the operator.

mod bind;
pub mod body_timeout;
mod certificates;
mod connection;
mod connection_limit;
mod connection_metrics;
mod handler_panic;
mod peer;
pub mod receiving;
mod refusal;
mod request_body;
mod service;
mod timeouts;
mod tls;
mod traffic;
mod unread_responses;
mod watched;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use pharos::metrics::cache::Cache;
use pharos::metrics::labels::{Listener, Refused};
use pharos_os::event_loops::EventLoops;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch as channel};
use tower::Service;

pub use self::bind::{bind, check};
pub use self::peer::Peer;
pub use self::request_body::RequestBody;
pub use self::service::{Answer, AnswerBody, GrpcAnswer, HttpAnswer};
pub use self::tls::{Tls, TlsFiles};

use self::connection::Accepted;
use self::connection_limit::ConnectionLimit;
use self::connection_metrics::ConnectionMetrics;
use self::refusal::RefusalSender;
use self::service::Handler;
use self::timeouts::{Timeouts, Watch};

/// Flow-control window of an HTTP/2 stream. With the protocol's default of 64 KiB, a tensor of 1
/// MiB takes 16 round trips.
const STREAM_WINDOW: u32 = 4 << 20;
/// Flow-control window of an HTTP/2 connection; bounds its memory over all streams.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// The largest HTTP/2 frame.
const FRAME_SIZE: u32 = 1 << 20;
/// Maximum number of concurrent streams of one HTTP/2 connection.
const STREAMS: u32 = 1024;
/// Maximum size of the headers of one HTTP/2 request.
const HEADER_LIST: u32 = 64 << 10;
/// The read buffer of an HTTP/1 connection. Larger bodies arrive in pieces of this size; larger
/// heads are refused.
const READ_BUFFER: usize = 1 << 20;

/// The HTTP versions of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpVersions {
    /// HTTP/1.1, and HTTP/2 by prior knowledge or ALPN.
    Http,
    /// HTTP/2 only (gRPC).
    Http2,
}

impl HttpVersions {
    /// Returns the versions of a listener.
    pub fn of(listener: Listener) -> Self {
        match listener {
            Listener::Http | Listener::Metrics => Self::Http,
            Listener::Grpc => Self::Http2,
        }
    }

    /// Returns the ALPN protocols to offer to TLS clients.
    pub fn protocols(self) -> Vec<Vec<u8>> {
        match self {
            Self::Http => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            Self::Http2 => vec![b"h2".to_vec()],
        }
    }
}

/// The phase of the server's shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The server is not shutting down.
    Serving,
    /// The server still answers all requests. A listener that shares its port is closed, so that
    /// the other servers get the new connections, and its open connections are shut down as in
    /// `Draining`.
    Leaving,
    /// Requests are refused unless they continue running work. Responses ask clients to close the
    /// connection (HTTP/1), or connections are shut down gracefully (HTTP/2). New connections are
    /// still accepted, unless the port is shared.
    Draining,
    /// All work is done: no connections are accepted, and idle ones are closed.
    Stopping,
}

/// Receives the phase of the shutdown.
pub type PhaseReceiver = channel::Receiver<Phase>;

/// The limits of a listener; zero disables a limit.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The maximum number of connections.
    pub connections: usize,
    /// The timeout of a TLS handshake.
    pub handshake: Duration,
    /// The timeout of the head of an HTTP/1 request from its first byte; on a new connection, from
    /// the start.
    pub head: Duration,
    /// The maximum time that an HTTP/1 connection waits for its next request. Clients keep
    /// connections in pools for minutes and do not retry, so it must not be short.
    pub idle: Duration,
    /// The maximum time without progress of a client that reads a response.
    pub write: Duration,
    /// The interval of keepalive pings on idle HTTP/2 connections, which detect vanished peers and
    /// free their streams.
    pub ping_interval: Duration,
    /// The timeout of a keepalive ping.
    pub ping_timeout: Duration,
    /// The age at which an HTTP/2 connection is shut down gracefully.
    pub age: Duration,
    /// The maximum time for its calls in flight after that.
    pub age_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            connections: 0,
            handshake: seconds(10),
            head: seconds(60),
            idle: seconds(300),
            write: seconds(300),
            ping_interval: seconds(120),
            ping_timeout: seconds(20),
            age: Duration::ZERO,
            age_grace: Duration::ZERO,
        }
    }
}

/// The settings of a listener.
#[derive(Clone)]
pub struct Settings {
    /// The listener, for metrics and logs.
    pub listener: Listener,
    /// The limits of its connections.
    pub limits: Limits,
    /// TLS, which is then required.
    pub tls: Option<Arc<Tls>>,
    /// The metrics cache that counts the connections.
    pub cache: Option<Arc<Cache>>,
    /// Whether [`Peer`] has the client's address.
    pub adds_peer: bool,
    /// The event loops that serve the connections.
    pub event_loops: EventLoops,
    /// Whether other servers may listen on the same port (see [`bind()`]).
    pub shares_port: bool,
}

impl Settings {
    /// Clear text, with the default limits.
    pub fn new(listener: Listener) -> Self {
        let event_loops = EventLoops::default();
        Self {
            listener,
            limits: Limits::default(),
            tls: None,
            cache: None,
            adds_peer: false,
            event_loops,
            shares_port: false,
        }
    }
}

/// The state shared by all connections of a listener.
struct Shared {
    settings: Settings,
    versions: HttpVersions,
    builder: Builder<TokioExecutor>,
    watch: Watch,
    connection_limit: Arc<ConnectionLimit>,
    metrics: ConnectionMetrics,
    refusals: RefusalSender,
}

/// Serves connections of `listener` with `service` until `phases` is [`Phase::Stopping`]; then
/// waits for the requests in flight and returns. The caller bounds that wait. Calls `refused` with
/// the HTTP status of each request that hyper refused because its head is malformed or too large.
pub fn serve<S>(
    listener: TcpListener,
    settings: Settings,
    service: S,
    refused: impl Fn(u16) + Send + Sync + 'static,
    phases: PhaseReceiver,
) -> Serving
where
    S: Service<Request<RequestBody>> + Clone + Send + Sync + 'static,
    S::Future: Into<Answer>,
{
    boxed(listener, settings, Arc::new(service), Arc::new(refused), phases)
}

/// The future of a listener.
pub type Serving = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Counts a request that hyper refused, by its HTTP status.
type CountRefused = Arc<dyn Fn(u16) + Send + Sync>;

/// Boxes the future in a function without type parameters, which is compiled in this package.
fn boxed(
    listener: TcpListener,
    settings: Settings,
    service: Arc<dyn Handler>,
    refused: CountRefused,
    phases: PhaseReceiver,
) -> Serving {
    Box::pin(accept_all(listener, settings, service, refused, phases))
}

async fn accept_all(
    listener: TcpListener,
    settings: Settings,
    service: Arc<dyn Handler>,
    refused: CountRefused,
    mut phases: PhaseReceiver,
) {
    let shared = Arc::new(Shared::new(settings));
    let (alive, mut all_closed) = mpsc::channel::<Infallible>(1);
    let mut listener = Some(listener);
    loop {
        let phase = *phases.borrow_and_update();
        if phase == Phase::Stopping {
            break;
        }
        let waiting = listener.take_if(|_| phase != Phase::Serving && shared.settings.shares_port);
        for stream in waiting.into_iter().flat_map(bind::accept_waiting) {
            shared.accept(stream, service.clone(), refused.clone(), alive.clone());
        }
        shared.watch.set_phase(if phase == Phase::Leaving && listener.is_none() {
            Phase::Draining
        } else {
            phase
        });
        while let Some(stream) = next(listener.as_ref(), &mut phases).await {
            shared.accept(stream, service.clone(), refused.clone(), alive.clone());
        }
        if phases.has_changed().is_err() {
            break;
        }
    }
    drop((listener, alive));
    shared.watch.set_phase(Phase::Stopping);
    // Ends when the last connection has dropped its sender.
    let _ = all_closed.recv().await;
}

/// Returns the next connection; `None` if the phase changes first.
async fn next(listener: Option<&TcpListener>, phases: &mut PhaseReceiver) -> Option<TcpStream> {
    loop {
        let accepted = async {
            match listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            accepted = accepted => match accepted {
                Ok((stream, _)) => return Some(stream),
                Err(error) => pause(&error).await,
            },
            // An error means that the sender was dropped, so the server ends.
            _ = phases.changed() => return None,
        }
    }
}

impl Shared {
    fn new(settings: Settings) -> Self {
        let versions = HttpVersions::of(settings.listener);
        let metrics = ConnectionMetrics::new(settings.listener, settings.cache.clone());
        let builder = builder(versions, &settings.limits);
        let Limits { head, idle, write, .. } = settings.limits;
        let watch = Watch::start(Timeouts { head, idle, write }, metrics.clone());
        let connection_limit = ConnectionLimit::new(settings.limits.connections, metrics.clone());
        Self {
            settings,
            versions,
            builder,
            watch,
            connection_limit,
            metrics,
            refusals: RefusalSender::new(),
        }
    }

    /// Spawns a task that serves the connection, or refuses it.
    fn accept(
        self: &Arc<Self>,
        stream: TcpStream,
        service: Arc<dyn Handler>,
        refused: CountRefused,
        alive: mpsc::Sender<Infallible>,
    ) {
        // Responses are written at once, so Nagle's algorithm would only delay them.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "connection lost before it was served");
            return;
        }
        let Some(permit) = self.connection_limit.enter() else {
            let most = self.settings.limits.connections;
            self.metrics.refused(Refused::Limit, &stream, || {
                format!("the limit of {most} connections is reached")
            });
            let text =
                format!("the server has reached its limit of {most} connections; try again later");
            return self.refusals.overloaded(
                stream,
                self.versions,
                self.settings.tls.is_some(),
                &text,
            );
        };
        let activity = self.watch.activity(stream.peer_addr().ok());
        let accepted = Accepted { shared: self.clone(), activity: activity.clone() };
        let event_loop = Arc::new(self.settings.event_loops.of_connection());
        let assigned = event_loop.clone();
        let task = event_loop.spawn(async move {
            let _held = (permit, alive, assigned);
            // The socket reports its events to the loop of this task from now on.
            match stream.into_std().and_then(TcpStream::from_std) {
                Ok(stream) => accepted.serve(stream, service, refused).await,
                Err(error) => tracing::debug!(%error, "connection lost before it was served"),
            }
        });
        self.watch.add(activity, task.abort_handle());
    }
}

fn builder(versions: HttpVersions, limits: &Limits) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    if versions == HttpVersions::Http2 {
        builder = builder.http2_only();
    }
    // `timeouts` closes slow connections instead of hyper's timer.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(READ_BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval((!limits.ping_interval.is_zero()).then_some(limits.ping_interval))
        .keep_alive_timeout(limits.ping_timeout)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_SIZE)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .max_header_list_size(HEADER_LIST)
        .max_concurrent_streams(STREAMS);
    builder
}

/// Pauses after a failed accept: if descriptors ran out, retrying at once fails until connections
/// close.
async fn pause(error: &std::io::Error) {
    use std::io::ErrorKind;
    if matches!(
        error.kind(),
        ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted
    ) {
        return;
    }
    tracing::warn!(%error, "accept failed; retrying in 50 ms");
    tokio::time::sleep(Duration::from_millis(50)).await;
}
