//! Limits on the idle time, the minimum rate and the chunk count of request bodies.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use pharos::timeline::Instant;
use tokio::time::Sleep;

use pharos_os::clock;

/// The maximum number of non-empty chunks of a body (Triton's limit).
pub(crate) const MAX_CHUNKS: u32 = 65_536;
/// Only pieces below this size count as chunks. hyper yields a large chunk in several pieces, as
/// the network delivers them, but those are about as large as a packet.
const SMALL: usize = 512;
/// The minimum rate, in bytes per second, of bodies that take longer than the idle timeout.
const RATE: u64 = 240;

/// The error type of bodies and services.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// A violation of the limits by a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No data arrived for this time.
    Stalled(Duration),
    /// Only this number of bytes arrived within the last time.
    TooSlow(u64, Duration),
    /// The body has too many chunks.
    TooManyChunks,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stalled(time) => {
                write!(f, "the request's body stalled for {} seconds", time.as_secs_f32())
            }
            Self::TooSlow(bytes, time) => write!(
                f,
                "the request's body is too slow: {bytes} bytes in the last {} seconds; at least \
                 {RATE} a second are expected",
                time.as_secs()
            ),
            Self::TooManyChunks => write!(
                f,
                "Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send \
                 fewer or larger HTTP chunks."
            ),
        }
    }
}

impl Error for Fault {}

/// The limits of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyLimits {
    /// The maximum time without data; zero for no limit.
    pub idle_timeout: Duration,
    /// Whether the body is chunked (HTTP/1.1, `Transfer-Encoding: chunked`).
    pub chunked: bool,
}

/// Limits the time of waiting for data, and the rate.
#[derive(Debug)]
pub(crate) struct Pace {
    /// The maximum time without data; zero for no limit.
    idle_timeout: Duration,
    /// The bytes since `began`.
    received: u64,
    /// The time of the first wait for data, or of one after the idle timeout at which the rate so
    /// far was high enough.
    began: Option<Instant>,
    /// Set while waiting for data.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Pace {
    pub(crate) fn new(idle_timeout: Duration) -> Self {
        Self { idle_timeout, received: 0, began: None, timer: None }
    }

    /// Records received data.
    pub(crate) fn receive(&mut self, length: usize) {
        self.timer = None;
        self.received += length as u64;
    }

    /// Forgets the data and the waits so far.
    pub(crate) fn restart(&mut self) {
        *self = Self::new(self.idle_timeout);
    }

    /// Sets the first wait to this time ago.
    #[cfg(test)]
    pub(crate) fn set_waiting_for(&mut self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.began = Some(Instant(clock::now().0 - nanoseconds));
        self.timer = None;
    }

    /// Waits for data; ready if a limit is exceeded.
    pub(crate) fn wait(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        let timeout = self.idle_timeout;
        if timeout.is_zero() {
            return Poll::Pending;
        }
        if self.timer.is_none() {
            let now = clock::now();
            let taken = now - *self.began.get_or_insert(now);
            if taken > timeout + Duration::from_secs(self.received / RATE) {
                self.began = None;
                return Poll::Ready(Fault::TooSlow(self.received, taken));
            }
            // A fast beginning does not permit a slow rest.
            if taken > timeout
                && u128::from(self.received) * 1000 >= u128::from(RATE) * taken.as_millis()
            {
                self.began = Some(now);
                self.received = 0;
            }
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        match timer.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                self.timer = None;
                Poll::Ready(Fault::Stalled(timeout))
            }
        }
    }
}

/// A body with limits. After an error, reading continues with the next data.
pub struct LimitedBody<B> {
    body: B,
    limits: BodyLimits,
    chunks: u32,
    pace: Pace,
}

impl<B> LimitedBody<B> {
    /// Applies the limits to `body`. Its errors are a [`Fault`], or those of `body`.
    pub fn new(body: B, limits: BodyLimits) -> Self {
        Self { body, limits, chunks: 0, pace: Pace::new(limits.idle_timeout) }
    }

    /// Records received data.
    fn receive(&mut self, length: usize) -> Result<(), Fault> {
        self.pace.receive(length);
        if self.limits.chunked && (1..SMALL).contains(&length) {
            self.chunks += 1;
            if self.chunks > MAX_CHUNKS {
                self.limits.chunked = false;
                return Err(Fault::TooManyChunks);
            }
        }
        Ok(())
    }
}

impl<B> http_body::Body for LimitedBody<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let received = self.receive(frame.data_ref().map_or(0, Bytes::len));
                Poll::Ready(Some(received.map(|()| frame).map_err(Into::into)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => self.pace.wait(cx).map(|fault| Some(Err(fault.into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use http_body_util::BodyExt;

    use super::*;

    /// A body of pieces of these sizes; a `None` never becomes ready.
    struct Pieces(VecDeque<Option<usize>>);

    impl http_body::Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            match self.0.pop_front() {
                None => Poll::Ready(None),
                Some(None) => {
                    self.0.push_front(None);
                    Poll::Pending
                }
                Some(Some(size)) => Poll::Ready(Some(Ok(Frame::data(vec![0; size].into())))),
            }
        }
    }

    async fn read(
        pieces: impl IntoIterator<Item = Option<usize>>,
        limits: BodyLimits,
    ) -> Result<u64, Fault> {
        let mut body = LimitedBody::new(Pieces(pieces.into_iter().collect()), limits);
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            match frame {
                Ok(frame) => length += frame.data_ref().unwrap().len() as u64,
                Err(error) => return Err(*error.downcast::<Fault>().unwrap()),
            }
        }
        Ok(length)
    }

    #[tokio::test]
    async fn counts_chunks_of_chunked_bodies_only() {
        let limits = |chunked| BodyLimits { idle_timeout: Duration::from_secs(60), chunked };
        let small = |count: usize| vec![Some(1); count];
        assert_eq!(read(small(65_536), limits(true)).await, Ok(65_536));
        assert_eq!(read(small(65_537), limits(true)).await, Err(Fault::TooManyChunks));
        assert_eq!(read(small(65_537), limits(false)).await, Ok(65_537));
        assert_eq!(read(vec![Some(512); 70_000], limits(true)).await, Ok(512 * 70_000));
        assert!(
            Fault::TooManyChunks.to_string().contains("exceeds maximum of 65536 non-empty chunks")
        );
    }

    #[tokio::test]
    async fn a_stalled_body_fails_after_the_timeout() {
        let timeout = Duration::from_millis(20);
        let stalled =
            read([Some(1), None], BodyLimits { idle_timeout: timeout, chunked: false }).await;
        assert_eq!(stalled, Err(Fault::Stalled(timeout)));
        let mut unlimited = LimitedBody::new(
            Pieces([None].into()),
            BodyLimits { idle_timeout: Duration::ZERO, chunked: false },
        );
        let waited = tokio::time::timeout(Duration::from_millis(50), unlimited.frame()).await;
        assert!(waited.is_err(), "a timeout of 0 is no limit");
    }

    #[tokio::test]
    async fn a_slow_body_fails() {
        let mut pace = Pace::new(Duration::from_secs(5));
        pace.receive(240 * 10);
        pace.set_waiting_for(Duration::from_secs(14));
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(pace.wait(&mut cx).is_pending(), "14 s for bytes of 10 s, with a timeout of 5 s");
        pace.set_waiting_for(Duration::from_secs(16));
        assert!(matches!(pace.wait(&mut cx), Poll::Ready(Fault::TooSlow(2400, _))));
    }

    #[tokio::test]
    async fn a_body_with_a_fast_beginning_must_not_become_slow() {
        let mut pace = Pace::new(Duration::from_secs(5));
        let mut cx = Context::from_waker(std::task::Waker::noop());
        for _ in 0..3 {
            pace.receive(1 << 20);
            pace.set_waiting_for(Duration::from_secs(6));
            assert!(pace.wait(&mut cx).is_pending(), "a megabyte in 6 s");
        }
        pace.receive(1);
        pace.set_waiting_for(Duration::from_secs(6));
        assert!(matches!(pace.wait(&mut cx), Poll::Ready(Fault::TooSlow(1, _))));
    }
}
