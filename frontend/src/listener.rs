//! One accept loop for every listener of the server: HTTP, metrics and gRPC.
//!
//! It owns the limits that protect a process from its clients' connections: time-outs, sizes of buffers and
//! windows. It knows no routes.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tower::Service;

use self::watch::{Watch, Watched};

mod watch;

/// How long a connection may wait for a request: for the head of its first one, and again after each answer. Clients keep
/// connections in pools for minutes and do not retry, so it must not be short. HTTP/2 connections have pings of their own
/// once they have carried a request.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often connections are looked at for that. hyper could keep a timer for each, but arms it anew for each request,
/// which costs a small inference 5 % of its time.
const LOOK: Duration = Duration::from_secs(15);
/// How often an idle HTTP/2 peer is asked whether it is still there, so that a vanished one frees its streams.
const PING_INTERVAL: Duration = Duration::from_secs(120);
/// How long it may take to answer that.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes that one HTTP/2 stream may send ahead. The protocol's 64 KiB would make a tensor of 1 MiB wait 16 round trips.
const STREAM_WINDOW: u32 = 4 << 20;
/// Bytes that one HTTP/2 connection may send ahead; bounds its memory, whatever its number of streams.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// The largest HTTP/2 frame.
const FRAME_SIZE: u32 = 1 << 20;
/// Concurrent streams of one HTTP/2 connection.
const STREAMS: u32 = 1024;
/// The read buffer of an HTTP/1 connection; larger bodies arrive in pieces of this size.
const READ_BUFFER: usize = 1 << 20;

/// Which versions of HTTP a listener speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaks {
    /// HTTP/1.1, and HTTP/2 by prior knowledge.
    Http,
    /// HTTP/2 only (gRPC).
    Http2,
}

/// Serves connections of `listener` with `service` until `shutdown` is ready; then stops accepting, lets the requests
/// in flight finish and returns. The caller bounds that wait. `refused` is told the HTTP status of each request that was
/// refused before the service could see it, because its head is none or too large.
pub async fn serve<S, B>(
    listener: TcpListener,
    speaks: Speaks,
    service: S,
    refused: impl Fn(u16) + Clone + Send + 'static,
    shutdown: impl Future<Output = ()>,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + Unpin + 'static,
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let builder = builder(speaks);
    let watch = Watch::start(PATIENCE, LOOK);
    let graceful = GracefulShutdown::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    refuse_for_now(&error).await;
                    continue;
                }
            },
            () = &mut shutdown => break,
        };
        spawn_connection(stream, &builder, (service.clone(), refused.clone()), (&graceful, &watch));
    }
    drop(listener);
    graceful.shutdown().await;
}

fn builder(speaks: Speaks) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    if speaks == Speaks::Http2 {
        builder = builder.http2_only();
    }
    // Without its own time-out: see `LOOK`.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(READ_BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_SIZE)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .max_concurrent_streams(STREAMS);
    builder
}

fn spawn_connection<S, B>(
    stream: TcpStream,
    builder: &Builder<TokioExecutor>,
    (service, refused): (S, impl Fn(u16) + Send + 'static),
    (graceful, watch): (&GracefulShutdown, &Watch),
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
    let builder = builder.clone();
    let watcher = graceful.watcher();
    let activity = watch.activity();
    let watched = Watched { service, activity: activity.clone() };
    let task = tokio::spawn(async move {
        let connection = builder.serve_connection(TokioIo::new(stream), watched);
        if let Err(error) = watcher.watch(connection.into_owned()).await {
            if let Some(status) = error.downcast_ref().and_then(refusal) {
                refused(status);
            }
            tracing::debug!(error, "a connection ended with an error");
        }
    });
    watch.add(activity, task.abort_handle());
}

/// The status that hyper has answered with when it could not read the head of an HTTP/1 request.
fn refusal(error: &hyper::Error) -> Option<u16> {
    match error {
        // Only the text tells them apart.
        error if error.is_parse_too_large() => Some(if error.to_string().contains("URI") { 414 } else { 431 }),
        error if error.is_parse() => Some(400),
        _ => None,
    }
}

/// Accepting failed. That the descriptors ran out passes when connections close; spinning until then would not help.
async fn refuse_for_now(error: &std::io::Error) {
    use std::io::ErrorKind;
    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted) {
        return;
    }
    tracing::warn!(%error, "cannot accept a connection; trying again in 50 ms");
    tokio::time::sleep(Duration::from_millis(50)).await;
}
