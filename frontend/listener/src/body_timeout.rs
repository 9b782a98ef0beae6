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

/// Chunks of a chunked body that are not empty (Triton's limit).
pub(crate) const MOST_CHUNKS: u32 = 65_536;
/// What is counted as a chunk. hyper gives chunks as the network brings them: a large one comes in pieces, which are none.
/// A piece of this size is as long as what came in one packet, and no work to speak of.
const SMALL: usize = 512;
/// The least bytes a second, on average, once the patience is over.
const RATE: u64 = 240;

/// Errors of bodies and of services, as the crates between them hand them on.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// What is wrong with the way in which a body comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing came for so long.
    Stalled(Duration),
    /// So few bytes came in so much time.
    TooSlow(u64, Duration),
    /// It has too many chunks.
    TooManyChunks,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stalled(time) => write!(f, "the request's body stalled for {} seconds", time.as_secs_f32()),
            Self::TooSlow(bytes, time) => write!(
                f,
                "the request's body is too slow: {bytes} bytes in {} seconds; at least {RATE} a second are expected",
                time.as_secs()
            ),
            Self::TooManyChunks => write!(
                f,
                "Chunked request body exceeds maximum of {MOST_CHUNKS} non-empty chunks. Send fewer or larger HTTP \
                 chunks."
            ),
        }
    }
}

impl Error for Fault {}

/// What is asked of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// How long nothing may come; zero for ever.
    pub patience: Duration,
    /// Whether it comes in chunks (HTTP/1.1, `Transfer-Encoding: chunked`).
    pub chunked: bool,
}

/// A body of which that is asked. Where it fails, reading on gives what comes after.
pub struct Paced<B> {
    body: B,
    pace: Pace,
    /// The error that a fault becomes.
    tell: fn(Fault) -> BoxError,
    chunks: u32,
    received: u64,
    /// When it first had to be waited for.
    began: Option<Instant>,
    /// Set while it is waited for.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl<B> Paced<B> {
    /// Asks that of `body`; `tell` makes errors of faults.
    pub fn new(body: B, pace: Pace, tell: fn(Fault) -> BoxError) -> Self {
        Self { body, pace, tell, chunks: 0, received: 0, began: None, alarm: None }
    }

    /// Data came.
    fn receive(&mut self, length: usize) -> Result<(), Fault> {
        self.alarm = None;
        self.received += length as u64;
        if self.pace.chunked && (1..SMALL).contains(&length) {
            self.chunks += 1;
            if self.chunks > MOST_CHUNKS {
                self.pace.chunked = false;
                return Err(Fault::TooManyChunks);
            }
        }
        Ok(())
    }

    /// Data is waited for.
    fn wait(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        let patience = self.pace.patience;
        if patience.is_zero() {
            return Poll::Pending;
        }
        if self.alarm.is_none() {
            let now = clock::now();
            let taken = now - *self.began.get_or_insert(now);
            if taken > patience + Duration::from_secs(self.received / RATE) {
                self.began = None;
                return Poll::Ready(Fault::TooSlow(self.received, taken));
            }
        }
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        match alarm.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                self.alarm = None;
                Poll::Ready(Fault::Stalled(patience))
            }
        }
    }
}

impl<B> http_body::Body for Paced<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let tell = self.tell;
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let received = self.receive(frame.data_ref().map_or(0, Bytes::len));
                Poll::Ready(Some(received.map(|()| frame).map_err(tell)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => self.wait(cx).map(|fault| Some(Err(tell(fault)))),
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

    /// Pieces of these sizes; at a `None` it never goes on.
    struct Pieces(VecDeque<Option<usize>>);

    impl http_body::Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
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

    async fn read(pieces: impl IntoIterator<Item = Option<usize>>, pace: Pace) -> Result<u64, Fault> {
        let mut body = Paced::new(Pieces(pieces.into_iter().collect()), pace, |fault| Box::new(fault));
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
    async fn chunks_are_counted_where_they_are_chunks() {
        let pace = |chunked| Pace { patience: Duration::from_secs(60), chunked };
        let small = |count: usize| vec![Some(1); count];
        assert_eq!(read(small(65_536), pace(true)).await, Ok(65_536));
        assert_eq!(read(small(65_537), pace(true)).await, Err(Fault::TooManyChunks));
        assert_eq!(read(small(65_537), pace(false)).await, Ok(65_537));
        assert_eq!(read(vec![Some(512); 70_000], pace(true)).await, Ok(512 * 70_000));
        assert!(Fault::TooManyChunks.to_string().contains("exceeds maximum of 65536 non-empty chunks"));
    }

    #[tokio::test]
    async fn a_body_that_does_not_go_on_is_given_up() {
        let patience = Duration::from_millis(20);
        let stalled = read([Some(1), None], Pace { patience, chunked: false }).await;
        assert_eq!(stalled, Err(Fault::Stalled(patience)));
        let mut patient =
            Paced::new(Pieces([None].into()), Pace { patience: Duration::ZERO, chunked: false }, |fault| {
                Box::new(fault)
            });
        let waited = tokio::time::timeout(Duration::from_millis(50), patient.frame()).await;
        assert!(waited.is_err(), "with patience 0 it is waited for");
    }

    #[tokio::test]
    async fn a_trickle_is_given_up() {
        let pace = Pace { patience: Duration::from_secs(5), chunked: false };
        let mut body = Paced::new(Pieces([None].into()), pace, |fault| Box::new(fault));
        body.received = 240 * 10;
        let now = clock::now();
        body.began = Some(Instant(now.0 - 14_000_000_000));
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(body.wait(&mut cx).is_pending(), "14 s for 10 s of bytes and 5 s of patience");
        body.alarm = None;
        body.began = Some(Instant(now.0 - 16_000_000_000));
        assert!(matches!(body.wait(&mut cx), Poll::Ready(Fault::TooSlow(2400, _))));
    }
}
