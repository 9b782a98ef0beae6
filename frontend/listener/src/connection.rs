//! Serves one connection, from its first byte to its end.

use std::error::Error;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::iter::successors;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use pharos::metrics::labels::Refused;
use tokio::io::{Interest, ReadBuf};
use tokio::net::TcpStream;

use super::peer::{Peer, certificate_name};
use super::service::Handler;
use super::timeouts::Activity;
use super::traffic::{Stream, Traffic, WriteFlusher};
use super::watched::Watched;
use super::{CountRefused, HttpVersions, Shared};

/// The first byte of a TLS handshake record (RFC 8446, 5.1).
const HANDSHAKE: u8 = 0x16;
/// The start of the preface of HTTP/2 (RFC 9113, 3.4); no request of HTTP/1 starts so.
const PREFACE: [u8; 3] = *b"PRI";
/// The ALPN identifier of HTTP/2.
const H2: &[u8] = b"h2";

/// A connection within the connection limit.
pub(super) struct Accepted {
    pub(super) shared: Arc<Shared>,
    pub(super) activity: Arc<Activity>,
}

impl Accepted {
    /// Serves requests until the connection ends.
    pub(super) async fn serve(
        self,
        stream: TcpStream,
        service: Arc<dyn Handler>,
        refused: CountRefused,
    ) {
        let peer = stream.peer_addr().ok();
        let opened = tokio::select! {
            biased;
            opened = self.open(stream) => opened,
            // The server stops, and the client has sent no request.
            () = self.activity.wait_for_shutdown() => return,
        };
        let Some((stream, name)) = opened else { return };
        let (traffic, flusher) =
            Traffic::new(stream, self.activity.clone(), self.activity.is_http2());
        let address = peer.filter(|_| self.shared.settings.adds_peer);
        let is_known = address.is_some() || name.is_some();
        let client = is_known.then_some(Peer { address, certificate_name: name });
        let service = Watched { service, activity: self.activity.clone(), peer: client };
        let connection = pin!(self.shared.builder.serve_connection(TokioIo::new(traffic), service));
        let Err(error) = self.until_end(connection, &flusher).await else { return };
        if let Some(status) = error.downcast_ref().and_then(refusal) {
            refused(status);
        } else if is_violation(&*error) {
            self.shared.metrics.refused(Refused::Protocol, &peer, || describe(&*error));
        }
        tracing::debug!(error, "connection ended with an error");
    }

    /// Detects the client's protocol, and performs the TLS handshake. Returns the stream, and the
    /// name in the client's certificate if it has one. `None` if the connection was refused or
    /// lost.
    async fn open(&self, stream: TcpStream) -> Option<(Stream, Option<Arc<str>>)> {
        let shared = &*self.shared;
        let mut first = [0; PREFACE.len()];
        let count = peek(&stream, &mut first).await.ok()?;
        let first = first.get(..count).filter(|first| !first.is_empty())?;
        let is_tls = first.starts_with(&[HANDSHAKE]);
        if shared.settings.tls.is_some() {
            if is_tls {
                return self.handshake(stream).await;
            }
            let why = || "the client does not use TLS, which this port requires".to_owned();
            shared.metrics.refused(Refused::NotTls, &stream, why);
            shared.refusals.clear_text(stream, first);
            return None;
        }
        if is_tls {
            let why = || "the client uses TLS, which this port does not support".to_owned();
            shared.metrics.refused(Refused::UnexpectedTls, &stream, why);
            shared.refusals.tls(stream);
            return None;
        }
        if shared.versions == HttpVersions::Http2 || first == PREFACE {
            self.activity.set_http2();
        }
        Some((Stream::clear(stream), None))
    }

    async fn handshake(&self, stream: TcpStream) -> Option<(Stream, Option<Arc<str>>)> {
        let shared = &*self.shared;
        let peer = stream.peer_addr().ok();
        let acceptor = shared.settings.tls.as_ref()?.acceptor();
        let limit = shared.settings.limits.handshake;
        let limit = if limit.is_zero() { Duration::MAX } else { limit };
        match tokio::time::timeout(limit, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => {
                let session = stream.get_ref().1;
                let agreed = session.alpn_protocol();
                let certificate = session.peer_certificates().and_then(<[_]>::first);
                let name = certificate.and_then(|certificate| certificate_name(certificate));
                if agreed == Some(H2) || shared.versions == HttpVersions::Http2 {
                    self.activity.set_http2();
                }
                Some((Stream::tls(stream), name))
            }
            Ok(Err(error)) => {
                shared.metrics.refused(Refused::Handshake, &peer, || {
                    format!("the TLS handshake failed: {error}")
                });
                None
            }
            Err(_) => {
                let why = || format!("the TLS handshake took more than {} s", limit.as_secs_f32());
                shared.metrics.refused(Refused::HandshakeTimeout, &peer, why);
                None
            }
        }
    }

    /// Serves until the client disconnects; shuts down gracefully when the server drains or the
    /// connection is too old.
    async fn until_end(
        &self,
        mut connection: Pin<&mut auto::Connection<'_, TokioIo<Traffic>, Watched, TokioExecutor>>,
        flusher: &WriteFlusher,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let limits = &self.shared.settings.limits;
        let grace = {
            let mut shutdown = pin!(self.wait_for_shutdown());
            tokio::select! {
                // Most wake-ups are for the connection, so poll it first.
                biased;
                ended = flusher.poll_and_flush(connection.as_mut()) => return ended,
                grace = shutdown.as_mut() => grace,
            }
        };
        connection.as_mut().graceful_shutdown();
        match grace {
            Some(grace) if !grace.is_zero() => {
                let ended = tokio::time::timeout(grace, flusher.poll_and_flush(connection)).await;
                ended.unwrap_or_else(|_| {
                    tracing::debug!(
                        "closed a connection of age {} s with calls in flight",
                        limits.age.as_secs()
                    );
                    Ok(())
                })
            }
            _ => flusher.poll_and_flush(connection).await,
        }
    }

    /// Waits until the connection must shut down: because the server drains (`None`), or because
    /// the connection has reached its maximum age (the time limit for calls in flight).
    async fn wait_for_shutdown(&self) -> Option<Duration> {
        let limits = &self.shared.settings.limits;
        if limits.age.is_zero() {
            self.activity.wait_for_shutdown().await;
            return None;
        }
        tokio::select! {
            () = self.activity.wait_for_shutdown() => None,
            () = tokio::time::sleep(self.activity.spread(limits.age)) => Some(limits.age_grace),
        }
    }
}

/// Reads the first bytes of a connection and leaves them in the stream: as many as tell TLS, HTTP/1
/// and HTTP/2 apart, or fewer if the client sends no more. Returns their number. The timeouts of a
/// new connection limit the wait.
async fn peek(stream: &TcpStream, first: &mut [u8; PREFACE.len()]) -> io::Result<usize> {
    loop {
        let is_last = stream.ready(Interest::READABLE).await?.is_read_closed();
        // `WouldBlock` makes `ready` wait for more bytes than those that were read.
        let peeked = poll_fn(|cx| {
            Poll::Ready(stream.try_io(Interest::READABLE, || {
                let mut buffer = ReadBuf::new(&mut *first);
                match stream.poll_peek(cx, &mut buffer)? {
                    Poll::Ready(count) if is_last || is_decisive(buffer.filled()) => Ok(count),
                    Poll::Ready(_) => Err(ErrorKind::WouldBlock.into()),
                    Poll::Pending => Err(ErrorKind::Interrupted.into()),
                }
            }))
        });
        match peeked.await {
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            peeked => return peeked,
        }
    }
}

/// Returns whether the first bytes of a connection show its protocol, or are its end.
fn is_decisive(first: &[u8]) -> bool {
    first.is_empty() || first == PREFACE || !PREFACE.starts_with(first)
}

/// Returns the status of hyper's response to an HTTP/1 request with an invalid head.
fn refusal(error: &hyper::Error) -> Option<u16> {
    match error {
        // hyper has one type for both, so only the text distinguishes them.
        error if error.is_parse_too_large() => {
            Some(if error.to_string().contains("URI") { 414 } else { 431 })
        }
        error if error.is_parse() => Some(400),
        _ => None,
    }
}

/// Returns whether a connection ended because its client violated HTTP/2.
fn is_violation(error: &(dyn Error + 'static)) -> bool {
    let causes = successors(Some(error), |&error| error.source());
    let mut causes = causes.filter_map(|cause| cause.downcast_ref::<h2::Error>());
    causes.any(|cause| cause.is_go_away() && cause.is_library())
}

/// Formats an error with its causes.
fn describe(error: &(dyn Error + Send + Sync + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use hyper::body::Incoming;
    use hyper::service::service_fn;
    use pharos::metrics::labels::Listener;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::sync::watch;

    use super::*;
    use crate::{HttpAnswer, RequestBody};
    use crate::{Phase, Settings};

    /// Returns both ends of a new connection, the client's first.
    async fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        client.set_nodelay(true).unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn the_protocol_is_decided_by_enough_bytes() {
        for (start, rest, expected) in [
            ("P", "RI * HTTP/2.0", "PRI"),
            ("PR", "I * HTTP/2.0", "PRI"),
            ("PR", "OPFIND / HTTP/1.1", "PRO"),
            ("P", "", "P"),
        ] {
            let ((mut client, server), mut first) = (connection().await, [0; 3]);
            client.write_all(start.as_bytes()).await.unwrap();
            server.readable().await.unwrap();
            let mut peeked = Box::pin(peek(&server, &mut first));
            let is_pending = poll_fn(|cx| Poll::Ready(peeked.as_mut().poll(cx).is_pending())).await;
            assert!(is_pending, "{start}");
            client.write_all(rest.as_bytes()).await.unwrap();
            client.shutdown().await.unwrap();
            let count = peeked.await.unwrap();
            assert_eq!(&first[..count], expected.as_bytes(), "{start} {rest}");
        }
    }

    #[tokio::test]
    async fn one_byte_decides_if_it_can() {
        for (start, expected) in
            [("G", "G"), ("\x16", "\x16"), ("PO", "PO"), ("PRI", "PRI"), ("POST /", "POS")]
        {
            let ((mut client, server), mut first) = (connection().await, [0; 3]);
            client.write_all(start.as_bytes()).await.unwrap();
            let count = peek(&server, &mut first).await.unwrap();
            assert_eq!(&first[..count], expected.as_bytes());
        }
        let ((client, server), mut first) = (connection().await, [0; 3]);
        drop(client);
        assert_eq!(peek(&server, &mut first).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_connection_without_a_request_ends_when_the_server_stops() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut settings = Settings::new(Listener::Http);
        settings.limits.head = Duration::ZERO;
        settings.limits.idle = Duration::ZERO;
        let service = tower::service_fn(|_: Request<RequestBody>| {
            let answer: HttpAnswer = Box::pin(std::future::ready(Ok(Response::default())));
            answer
        });
        let (phase, phases) = watch::channel(Phase::Serving);
        let serving = tokio::spawn(crate::serve(listener, settings, service, |_| {}, phases));
        let mut silent = TcpStream::connect(address).await.unwrap();
        // Connections are accepted in order.
        let mut other = TcpStream::connect(address).await.unwrap();
        other.write_all(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").await.unwrap();
        other.read_to_end(&mut Vec::new()).await.unwrap();
        phase.send_replace(Phase::Stopping);
        tokio::time::timeout(Duration::from_secs(60), serving).await.unwrap().unwrap();
        assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
    }

    /// Returns whether a connection on which the client sends these bytes ends with a violation of
    /// HTTP/2.
    async fn violates(bytes: &[u8]) -> bool {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        client.write_all(bytes).await.unwrap();
        let service = service_fn(|_: Request<Incoming>| async {
            Ok::<_, Infallible>(Response::new(String::new()))
        });
        let builder = auto::Builder::new(TokioExecutor::new());
        let ended = builder.serve_connection(TokioIo::new(server), service).await;
        is_violation(&*ended.unwrap_err())
    }

    #[tokio::test]
    async fn violations_of_http2_are_recognized() {
        const SETTINGS: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        let data_on_stream_0 = b"\0\0\0\0\0\0\0\0\0";
        assert!(violates(&[SETTINGS, data_on_stream_0].concat()).await);
        assert!(!violates(b"GET nonsense\r\n\r\n").await);
    }
}
