//! The byte stream of a connection, in clear text or TLS, which records when bytes move.
//!
//! HTTP/2 splits a response into frames, of 16 KiB for most clients, and the library writes and
//! flushes each separately: 33 system calls for half a megabyte. [`Held`] buffers the writes of one
//! poll of the connection, and [`WriteFlusher`] writes them together after the poll.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::timeouts::Activity;
use pharos_os::event_loops;

/// The maximum number of buffered bytes: saves seven of eight system calls, and the copy stays in
/// the core's cache.
const MAX_HELD: usize = 128 << 10;
/// The buffer capacity that an idle connection keeps.
const IDLE_CAPACITY: usize = 4 << 10;

/// The transport of a connection.
pub(super) enum Stream {
    Clear(TcpStream),
    // Boxed, because a TLS stream has buffers and keys of several kilobytes.
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

/// A stream that records its activity.
pub(super) struct Traffic {
    wire: Arc<Mutex<Wire>>,
    activity: Arc<Activity>,
}

/// A stream and its write buffer.
struct Wire {
    stream: Stream,
    /// Buffered writes; `None` if writes are not buffered.
    held: Option<Held>,
}

/// Buffered bytes; those from `sent` on are not written yet.
#[derive(Default)]
struct Held {
    bytes: Vec<u8>,
    sent: usize,
    /// Whether bytes were buffered since the last flush.
    unflushed: bool,
}

impl Traffic {
    /// Wraps a stream. If `holds` is set, writes are buffered until the [`WriteFlusher`] flushes
    /// them.
    pub(super) fn new(
        stream: Stream,
        activity: Arc<Activity>,
        holds: bool,
    ) -> (Self, WriteFlusher) {
        let wire = Arc::new(Mutex::new(Wire { stream, held: holds.then(Held::default) }));
        let flusher =
            WriteFlusher { wire: holds.then(|| wire.clone()), activity: activity.clone() };
        (Self { wire, activity }, flusher)
    }
}

// Never contended: one task polls the connection and its flusher.
fn lock(wire: &Mutex<Wire>) -> MutexGuard<'_, Wire> {
    wire.lock()
}

/// Records whether a write had to wait.
fn record<T>(activity: &Activity, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
    match &result {
        Poll::Ready(_) => activity.record_write(),
        Poll::Pending => activity.record_blocked_write(),
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

    fn poll_write_vectored(
        &mut self,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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
    /// Writes the buffered bytes and flushes the stream.
    fn flush_held(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(held) = &mut self.held else { return Poll::Ready(Ok(())) };
        while let Some(rest) = held.bytes.get(held.sent..).filter(|rest| !rest.is_empty()) {
            match ready!(self.stream.poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => held.sent += count,
            }
        }
        ready!(self.stream.poll_flush(cx))?;
        held.bytes.clear();
        held.bytes.shrink_to(IDLE_CAPACITY);
        held.sent = 0;
        held.unflushed = false;
        Poll::Ready(Ok(()))
    }

    fn write(
        &mut self,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let count = pieces.iter().map(|piece| piece.len()).sum::<usize>();
        let fits = |held: &Held| held.bytes.len() + count <= MAX_HELD;
        if !self.held.as_ref().is_some_and(fits) {
            ready!(self.flush_held(cx))?;
        }
        if let Some(held) = &mut self.held {
            held.unflushed = true;
        }
        match &mut self.held {
            Some(held) if fits(held) => {
                // A large frame is usually followed by more frames of the same response.
                if count > IDLE_CAPACITY && held.bytes.capacity() < MAX_HELD {
                    held.bytes.reserve_exact(MAX_HELD - held.bytes.len());
                }
                pieces.iter().for_each(|piece| held.bytes.extend_from_slice(piece));
                Poll::Ready(Ok(count))
            }
            _ => self.stream.poll_write_vectored(cx, pieces),
        }
    }
}

impl AsyncRead for Traffic {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        event_loops::count_read();
        let before = buffer.filled().len();
        let result = match &mut lock(&self.wire).stream {
            Stream::Clear(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        };
        if buffer.filled().len() > before {
            self.activity.record_read();
        }
        result
    }
}

impl AsyncWrite for Traffic {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        record(&self.activity, lock(&self.wire).write(cx, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        let wire = lock(&self.wire);
        wire.held.is_some()
            || matches!(&wire.stream, Stream::Clear(stream) if stream.is_write_vectored())
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let wire = &mut *lock(&self.wire);
        match (&wire.held, &mut wire.stream) {
            // The flusher flushes.
            (Some(_), _) => Poll::Ready(Ok(())),
            // A socket has no buffer in this process.
            (None, stream @ Stream::Clear(_)) => stream.poll_flush(cx),
            (None, stream) => record(&self.activity, stream.poll_flush(cx)),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut wire = lock(&self.wire);
        let result = match wire.flush_held(cx) {
            Poll::Ready(Ok(())) => match &mut wire.stream {
                Stream::Clear(stream) => Pin::new(stream).poll_shutdown(cx),
                Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            },
            other => other,
        };
        record(&self.activity, result)
    }
}

/// Flushes the buffered writes of a connection.
pub(super) struct WriteFlusher {
    wire: Option<Arc<Mutex<Wire>>>,
    activity: Arc<Activity>,
}

impl WriteFlusher {
    /// Polls the connection and flushes its writes after each poll. The connection must not be
    /// polled in any other way.
    pub(super) fn poll_and_flush<C: Future>(
        &self,
        connection: Pin<&mut C>,
    ) -> impl Future<Output = C::Output> {
        let mut connection = connection;
        std::future::poll_fn(move |cx| {
            let ended = connection.as_mut().poll(cx);
            // The connection gets an error at its next read or write.
            if let (Poll::Pending, Some(wire)) = (&ended, &self.wire) {
                let _ = self.flush(&mut lock(wire), cx);
            }
            ended
        })
    }

    fn flush(&self, wire: &mut Wire, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &wire.held {
            Some(held) if held.unflushed => record(&self.activity, wire.flush_held(cx)),
            _ => Poll::Ready(Ok(())),
        }
    }
}
