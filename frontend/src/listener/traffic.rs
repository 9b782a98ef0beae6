//! A connection's bytes, in clear text or under TLS, with a note of when they move.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::watch::Activity;

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
    stream: Stream,
    activity: Arc<Activity>,
}

impl Traffic {
    pub(super) fn new(stream: Stream, activity: Arc<Activity>) -> Self {
        Self { stream, activity }
    }

    /// Notes whether a write had to wait.
    fn written<T>(&self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match &result {
            Poll::Ready(_) => self.activity.writes(),
            Poll::Pending => self.activity.waits_to_write(),
        }
        result
    }
}

impl AsyncRead for Traffic {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = match &mut self.stream {
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
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = match &mut self.stream {
            Stream::Clear(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        };
        self.written(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = match &mut self.stream {
            Stream::Clear(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
        };
        self.written(result)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Clear(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            // What was written to a socket is the system's.
            Stream::Clear(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => {
                let result = Pin::new(stream).poll_flush(cx);
                self.written(result)
            }
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = match &mut self.stream {
            Stream::Clear(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        };
        self.written(result)
    }
}
