//! One accept loop for every listener of the server: HTTP, metrics and gRPC.
//!
//! It owns what protects the process from its clients' connections: TLS, how many there may be, time-outs, sizes of
//! buffers and windows. It knows no routes. Whoever is refused finds that out by an answer where the protocol has one, the
//! operator by `pharos_connections_refused_total` and a line now and then.

pub mod access;
pub mod answering;
mod bind;
pub mod body_timeout;
mod certificates;
mod connection;
mod connection_limit;
mod connection_metrics;
pub mod http_service;
pub mod receiving;
mod refusal;
pub mod request_log;
pub mod request_trace;
pub mod routing;
mod timeouts;
mod tls;
mod traffic;
mod unread_responses;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use pharos::metrics::cache::Cache;
use pharos::metrics::labels::{Listener, Refused};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch as channel};
use tower::Service;

pub use self::bind::{bind, check};
pub use self::tls::{Tls, TlsFiles};

use self::connection::Accepted;
use self::connection_limit::Gate;
use self::connection_metrics::Meter;
use self::refusal::Speaker;
use self::timeouts::{Patience, Watch};

/// Bytes that one HTTP/2 stream may send ahead. The protocol's 64 KiB would make a tensor of 1 MiB wait 16 round trips.
const STREAM_WINDOW: u32 = 4 << 20;
/// Bytes that one HTTP/2 connection may send ahead; bounds its memory, whatever its number of streams.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// The largest HTTP/2 frame.
const FRAME_SIZE: u32 = 1 << 20;
/// Concurrent streams of one HTTP/2 connection.
const STREAMS: u32 = 1024;
/// Bytes of the headers of one HTTP/2 request.
const HEADER_LIST: u32 = 64 << 10;
/// The read buffer of an HTTP/1 connection; larger bodies arrive in pieces of this size, a larger head is refused.
const READ_BUFFER: usize = 1 << 20;

/// Which versions of HTTP a listener speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaks {
    /// HTTP/1.1, and HTTP/2 by prior knowledge or as agreed by TLS.
    Http,
    /// HTTP/2 only (gRPC).
    Http2,
}

impl Speaks {
    /// What a TLS client may choose from (ALPN).
    pub fn protocols(self) -> Vec<Vec<u8>> {
        match self {
            Self::Http => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            Self::Http2 => vec![b"h2".to_vec()],
        }
    }
}

/// How far the server is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It is not.
    Serving,
    /// New work is refused, apart from what finishes work that has begun: each answer asks its client to close the
    /// connection (HTTP/1) or not to use it any more (HTTP/2), and new connections are still taken.
    Draining,
    /// Nothing is left to do: no connection is taken any more, and those that wait are closed.
    Stopping,
}

/// Tells a listener and its connections of the phase.
pub type Life = channel::Receiver<Phase>;

/// What a listener allows its clients. A limit of zero is none.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// The time for a TLS handshake.
    pub handshake: Duration,
    /// The time for the head of an HTTP/1 request from its first byte on, and on a new connection for all of it.
    pub head: Duration,
    /// How long an HTTP/1 connection may wait for its next request. Clients keep connections in pools for minutes and do
    /// not retry, so it must not be short.
    pub idle: Duration,
    /// How long a client may take nothing of an answer.
    pub write: Duration,
    /// How often an idle HTTP/2 peer is asked whether it is still there, so that a vanished one frees its streams.
    pub ping_interval: Duration,
    /// How long it may take to answer that.
    pub ping_timeout: Duration,
    /// The age at which an HTTP/2 connection is asked to be replaced by a new one.
    pub age: Duration,
    /// How long its calls in flight may then take.
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

/// Who has sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// How a listener treats its connections.
#[derive(Clone)]
pub struct Settings {
    /// Which it is.
    pub listener: Listener,
    /// What it allows.
    pub limits: Limits,
    /// With TLS only.
    pub tls: Option<Arc<Tls>>,
    /// Where connections are counted.
    pub cache: Option<Arc<Cache>>,
    /// Whether each request has its [`Peer`] among its extensions.
    pub tells_peers: bool,
}

impl Settings {
    /// In clear text, with the usual limits.
    pub fn new(listener: Listener) -> Self {
        Self { listener, limits: Limits::default(), tls: None, cache: None, tells_peers: false }
    }
}

/// What all connections of a listener share.
struct Shared {
    settings: Settings,
    speaks: Speaks,
    builder: Builder<TokioExecutor>,
    watch: Watch,
    gate: Arc<Gate>,
    meter: Meter,
    speaker: Speaker,
}

/// Serves connections of `listener` with `service` until `life` says to stop; then lets the requests in flight finish and
/// returns. The caller bounds that wait. `refused` is told the HTTP status of each request that was refused before the
/// service could see it, because its head is none or too large.
pub async fn serve<S, B>(
    listener: TcpListener,
    (speaks, settings): (Speaks, Settings),
    service: S,
    refused: impl Fn(u16) + Clone + Send + 'static,
    mut life: Life,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + Unpin + 'static,
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let shared = Arc::new(Shared::new(speaks, settings));
    let (alive, mut all_closed) = mpsc::channel::<Infallible>(1);
    while *life.borrow_and_update() != Phase::Stopping {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    pause(&error).await;
                    continue;
                }
            },
            changed = life.changed() => {
                shared.watch.tell(*life.borrow());
                if changed.is_err() {
                    break;
                }
                continue;
            }
        };
        shared.accept(stream, service.clone(), refused.clone(), alive.clone());
    }
    drop((listener, alive));
    shared.watch.tell(Phase::Stopping);
    // Ends when the last connection has dropped its sender.
    let _ = all_closed.recv().await;
}

impl Shared {
    fn new(speaks: Speaks, settings: Settings) -> Self {
        let meter = Meter::new(settings.listener, settings.cache.clone());
        let builder = builder(speaks, &settings.limits);
        let Limits { head, idle, write, .. } = settings.limits;
        let watch = Watch::start(Patience { head, idle, write }, meter.clone());
        let gate = Gate::new(settings.limits.connections, meter.clone());
        Self { settings, speaks, builder, watch, gate, meter, speaker: Speaker::new() }
    }

    /// Serves a connection in a task of its own, or refuses it.
    fn accept<S, B>(
        self: &Arc<Self>,
        stream: TcpStream,
        service: S,
        refused: impl Fn(u16) + Send + 'static,
        alive: mpsc::Sender<Infallible>,
    ) where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + Unpin + 'static,
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        // Answers are written whole; waiting to fill packets would only delay them.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection was lost before it was served");
            return;
        }
        let Some(permit) = self.gate.enter() else {
            let most = self.settings.limits.connections;
            self.meter.refused(Refused::Limit, &stream, || format!("there are {most} connections, as many as allowed"));
            let text = format!("the server has as many connections as it may ({most}); try again later");
            return self.speaker.overloaded(stream, (self.speaks, self.settings.tls.is_some()), &text);
        };
        let activity = self.watch.activity(stream.peer_addr().ok());
        let accepted = Accepted { shared: self.clone(), activity: activity.clone() };
        let task = tokio::spawn(async move {
            let _held = (permit, alive);
            accepted.serve(stream, service, refused).await;
        });
        self.watch.add(activity, task.abort_handle());
    }
}

fn builder(speaks: Speaks, limits: &Limits) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    if speaks == Speaks::Http2 {
        builder = builder.http2_only();
    }
    // Without its own time-out: see `watch`.
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

/// Accepting failed. That the descriptors ran out passes when connections close; spinning until then would not help.
async fn pause(error: &std::io::Error) {
    use std::io::ErrorKind;
    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted) {
        return;
    }
    tracing::warn!(%error, "cannot accept a connection; trying again in 50 ms");
    tokio::time::sleep(Duration::from_millis(50)).await;
}
