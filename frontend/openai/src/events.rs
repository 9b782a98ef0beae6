//! The body of a streamed response: server-sent events, written when the connection has capacity.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use pharos::error::InferError;
use pharos::service::OpenStream;
use pharos_edge::{Call, Sending};
use tokio::time::{Instant, Sleep, sleep};

use crate::error::ApiError;
use crate::generation::{Deltas, Generation};
use crate::response::{DONE_EVENT, KEEP_ALIVE, Usage};

/// The time without an event after which a comment keeps the connection open.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(15);

/// Responses of the model that are ready together are sent together, up to this many bytes.
const MAX_FRAME: usize = 16 << 10;

/// Writes the chunks of a stream.
pub(crate) trait Chunks: Send + Unpin + 'static {
    /// What follows the last event.
    const END: &'static [u8] = DONE_EVENT;

    /// Appends the events for what a response of the model adds.
    fn write(&mut self, deltas: Deltas, usage: Option<Usage>, out: &mut Vec<u8>);

    /// Appends the event that follows the last choice, if the client wants one.
    fn write_end(&mut self, usage: Option<Usage>, out: &mut Vec<u8>);

    /// Appends the event of a failure that ends the stream.
    fn write_error(&mut self, error: &ApiError, _usage: Option<Usage>, out: &mut Vec<u8>) {
        out.extend(error.to_event());
    }
}

/// Where the events of a stream come from.
pub(crate) trait Source: Send + Unpin + 'static {
    /// Appends the events for the next response of the model.
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<Written>;
}

/// What a [`Source`] has written.
pub(crate) enum Written {
    /// The events of a response, if it has any; more may follow.
    Response,
    /// The end of the stream.
    End,
    /// The failure that ends the stream, and its end.
    Failure(InferError),
}

/// The events for the choices of a request.
pub(crate) struct Generated<C> {
    pub(crate) generation: Generation,
    /// What the first response adds, which was received before the body began.
    pub(crate) first: Option<Result<Deltas, InferError>>,
    pub(crate) chunks: C,
}

impl<C: Chunks> Source for Generated<C> {
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<Written> {
        let next = match self.first.take() {
            Some(first) => Some(first),
            None => ready!(self.generation.poll_next(cx)),
        };
        let usage = self.generation.usage();
        let written = match next {
            Some(Ok(deltas)) => {
                self.chunks.write(deltas, usage, out);
                return Poll::Ready(Written::Response);
            }
            Some(Err(error)) => {
                let failure = self.generation.failure(error.clone());
                self.chunks.write_error(&failure.error, usage, out);
                Written::Failure(error)
            }
            None => {
                self.chunks.write_end(usage, out);
                Written::End
            }
        };
        out.extend_from_slice(C::END);
        Poll::Ready(written)
    }
}

/// The body of a streamed response. Dropping it before the last event, because the client
/// disconnected, cancels the request.
pub(crate) struct Events<S> {
    source: S,
    /// Ends with the last event.
    call: Call,
    keep_alive: Pin<Box<Sleep>>,
    /// Whether there was no event since the last tick of `keep_alive`.
    is_idle: bool,
    ended: bool,
    _sending: Option<Sending>,
    _open: OpenStream,
}

impl<S: Source> Events<S> {
    /// Returns the events of a request whose head has been [begun](Call::begin_stream).
    pub(crate) fn new(source: S, call: Call, sending: Option<Sending>, open: OpenStream) -> Self {
        Self {
            source,
            call,
            keep_alive: Box::pin(sleep(KEEP_ALIVE_AFTER)),
            is_idle: false,
            ended: false,
            _sending: sending,
            _open: open,
        }
    }

    /// Ends the request after its last event.
    fn end(&mut self, failure: Option<&InferError>) {
        if let Some(error) = failure {
            self.call.note_reason(error.reason);
            self.call.has_failed(error);
        }
        self.ended = true;
        self.call.has_responded();
        self.call.end_stream();
    }
}

impl<S: Source> http_body::Body for Events<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let mut out = Vec::new();
        while !this.ended && out.len() < MAX_FRAME {
            match this.source.poll_events(cx, &mut out) {
                Poll::Ready(Written::Response) => {}
                Poll::Ready(Written::End) => this.end(None),
                Poll::Ready(Written::Failure(error)) => this.end(Some(&error)),
                Poll::Pending => break,
            }
        }
        if !out.is_empty() {
            this.is_idle = false;
            return Poll::Ready(Some(Ok(Frame::data(out.into()))));
        }
        if this.ended {
            return Poll::Ready(None);
        }
        // One timer a stream, not one an event: a tick without an event since the last one.
        while this.keep_alive.as_mut().poll(cx).is_ready() {
            this.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE_AFTER);
            if std::mem::replace(&mut this.is_idle, true) {
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(KEEP_ALIVE)))));
            }
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}
