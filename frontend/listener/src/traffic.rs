//! A connection's bytes, in clear text or under TLS, with a note of when they move.
//!
//! HTTP/2 cuts an answer into frames, of 16 KiB for most clients, and the library writes and flushes each by itself: 33
//! system calls for half a megabyte. What it writes in one go of the connection's task is held back here and written
//! together ([`Held`]); whoever polls the connection lets it go afterwards ([`Sluice`]).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::timeouts::Activity;

/// Bytes that are held back at most: eight times fewer system calls, and what is copied for that stays in a core's cache.
const HELD: usize = 128 << 10;
/// The memory that a connection keeps for them while it has nothing to write.
const KEPT: usize = 4 << 10;

/// What bytes go over.
pub(super) enum Stream {
    Clear(TcpStream),
    // A connection of TLS has buffers and keys of some kilobytes.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    pub(super) fn clear(stream: TcpStream) -> Self {
        Self::Clear(stream)
    }

    pub(super) fn tls(stream: TlsStream<TcpStream>) -> Self {
        Self::Tls(Box::new(stream))
    }
}

/// A stream that tells how it moves.
pub(super) struct Traffic {
    wire: Arc<Mutex<Wire>>,
    activity: Arc<Activity>,
}

/// A stream and what is to be written to it.
struct Wire {
    stream: Stream,
    /// What the connection has written and the system has not; `None` if everything is passed on at once.
    held: Option<Held>,
}

/// Bytes to be written, from `sent` on.
#[derive(Default)]
struct Held {
    bytes: Vec<u8>,
    sent: usize,
    /// Something was written since the stream was flushed.
    unflushed: bool,
}

impl Traffic {
    /// Over this stream; if `holds` is set, what is written waits for the [`Sluice`].
    pub(super) fn new(stream: Stream, activity: Arc<Activity>, holds: bool) -> (Self, Sluice) {
        let wire = Arc::new(Mutex::new(Wire { stream, held: holds.then(Held::default) }));
        let sluice = Sluice { wire: holds.then(|| wire.clone()), activity: activity.clone() };
        (Self { wire, activity }, sluice)
    }
}

// Nobody waits for the lock: the connection and its sluice are polled by one task.
fn lock(wire: &Mutex<Wire>) -> MutexGuard<'_, Wire> {
    wire.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes whether a write had to wait.
fn noted<T>(activity: &Activity, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
    match &result {
        Poll::Ready(_) => activity.writes(),
        Poll::Pending => activity.waits_to_write(),
    }
    result
}

impl Stream {
    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Clear(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(&mut self, cx: &mut Context<'_>, pieces: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self {
            Self::Clear(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Clear(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }
}

impl Wire {
    /// Writes what is held back, and flushes.
    fn let_go(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(held) = &mut self.held else { return Poll::Ready(Ok(())) };
        while let Some(rest) = held.bytes.get(held.sent..).filter(|rest| !rest.is_empty()) {
            match ready!(self.stream.poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => held.sent += count,
            }
        }
        ready!(self.stream.poll_flush(cx))?;
        held.bytes.clear();
        held.bytes.shrink_to(KEPT);
        (held.sent, held.unflushed) = (0, false);
        Poll::Ready(Ok(()))
    }

    fn write(&mut self, cx: &mut Context<'_>, pieces: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let count = pieces.iter().map(|piece| piece.len()).sum::<usize>();
        let fits = |held: &Held| held.bytes.len() + count <= HELD;
        if !self.held.as_ref().is_some_and(fits) {
            ready!(self.let_go(cx))?;
        }
        if let Some(held) = &mut self.held {
            held.unflushed = true;
        }
        match &mut self.held {
            Some(held) if fits(held) => {
                // Who writes a frame of a large answer writes more of them.
                if count > KEPT && held.bytes.capacity() < HELD {
                    held.bytes.reserve_exact(HELD - held.bytes.len());
                }
                pieces.iter().for_each(|piece| held.bytes.extend_from_slice(piece));
                Poll::Ready(Ok(count))
            }
            _ => self.stream.poll_write_vectored(cx, pieces),
        }
    }
}

impl AsyncRead for Traffic {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = match &mut lock(&self.wire).stream {
            Stream::Clear(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        };
        if buffer.filled().len() > before {
            self.activity.reads();
        }
        result
    }
}

impl AsyncWrite for Traffic {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        noted(&self.activity, lock(&self.wire).write(cx, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        let wire = lock(&self.wire);
        wire.held.is_some() || matches!(&wire.stream, Stream::Clear(stream) if stream.is_write_vectored())
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let wire = &mut *lock(&self.wire);
        match (&wire.held, &mut wire.stream) {
            // The sluice's affair.
            (Some(_), _) => Poll::Ready(Ok(())),
            // What was written to a socket is the system's.
            (None, stream @ Stream::Clear(_)) => stream.poll_flush(cx),
            (None, stream) => noted(&self.activity, stream.poll_flush(cx)),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut wire = lock(&self.wire);
        let result = match wire.let_go(cx) {
            Poll::Ready(Ok(())) => match &mut wire.stream {
                Stream::Clear(stream) => Pin::new(stream).poll_shutdown(cx),
                Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            },
            other => other,
        };
        noted(&self.activity, result)
    }
}

/// Lets go what a connection holds back.
pub(super) struct Sluice {
    wire: Option<Arc<Mutex<Wire>>>,
    activity: Arc<Activity>,
}

impl Sluice {
    /// The connection, which is to be polled in no other way: each time what it has written goes out.
    pub(super) fn of<C: Future>(&self, connection: Pin<&mut C>) -> impl Future<Output = C::Output> {
        let mut connection = connection;
        std::future::poll_fn(move |cx| {
            let ended = connection.as_mut().poll(cx);
            // An error comes up again where the connection reads or writes next.
            if let (Poll::Pending, Some(wire)) = (&ended, &self.wire) {
                let _ = self.let_go(&mut lock(wire), cx);
            }
            ended
        })
    }

    fn let_go(&self, wire: &mut Wire, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &wire.held {
            Some(held) if held.unflushed => noted(&self.activity, wire.let_go(cx)),
            _ => Poll::Ready(Ok(())),
        }
    }
}
