//! The responses of decoupled steps of one stage, which come from any number of requests at once.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use pharos::ensemble::CallId;
use pharos::error::InferError;

use super::slots::Place;
use crate::repository::Responses;
use crate::scheduler::Streamed;

/// Responses that everything has been made of may wait for one before them, so many of a request; beyond it the request's
/// next responses are not taken.
const BEHIND: usize = 256;

/// A decoupled step under way.
pub(super) struct Stream {
    pub(super) id: CallId,
    pub(super) responses: Responses,
    pub(super) place: Place,
}

/// The next response of a step, with the step.
struct Next(Option<Stream>);

impl Future for Next {
    type Output = Option<(Stream, Streamed)>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(stream) = &mut self.0 else { return Poll::Ready(None) };
        let streamed = ready!(stream.poll_next(cx));
        Poll::Ready(self.0.take().map(|stream| (stream, streamed)))
    }
}

impl Stream {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Streamed> {
        let none = || Err(InferError::internal("a model's responses have ended without a last one"));
        let next = ready!(self.responses.poll_next(cx));
        Poll::Ready(next.unwrap_or_else(|| Streamed { answer: none(), last: true, empty: false }))
    }
}

/// The decoupled steps of one stage.
///
/// Responses are taken in the order in which they come: one of another request only when the request before it has none.
/// A model with one instance answers its requests one after the other, and its responses must leave like that.
#[derive(Default)]
pub(super) struct Streams {
    /// The request whose response was taken last.
    current: Option<Stream>,
    /// A response of another, which came when `current` had none.
    held: Option<(Stream, Streamed)>,
    others: FuturesUnordered<Next>,
    /// Too far ahead of what is made of their responses.
    parked: Vec<Stream>,
}

impl Streams {
    /// One more request.
    pub(super) fn push(&mut self, stream: Stream) {
        match &self.current {
            None if self.others.is_empty() && self.held.is_none() => self.current = Some(stream),
            _ => self.others.push(Next(Some(stream))),
        }
    }

    /// The next response, with its step; with the step's place if it was the last. `waiting` says how many responses of a step
    /// wait for one before them.
    pub(super) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        waiting: impl Fn(CallId) -> usize,
    ) -> Poll<(CallId, Streamed, Place)> {
        let is_ahead = |stream: &mut Stream| waiting(stream.id) >= BEHIND;
        for stream in self.parked.extract_if(.., |stream| !is_ahead(stream)) {
            self.others.push(Next(Some(stream)));
        }
        self.parked.extend(self.current.take_if(is_ahead));
        loop {
            if let Some(mut stream) = self.current.take() {
                match stream.poll_next(cx) {
                    Poll::Ready(streamed) => return Poll::Ready(self.given(stream, streamed)),
                    Poll::Pending => self.current = Some(stream),
                }
            }
            if let Some((stream, streamed)) = self.held.take() {
                self.others.extend(self.current.take().map(|stream| Next(Some(stream))));
                return Poll::Ready(self.given(stream, streamed));
            }
            let Poll::Ready(Some(next)) = self.others.poll_next_unpin(cx) else { return Poll::Pending };
            // What the current one has got meanwhile was there before.
            self.held = next;
        }
    }

    fn given(&mut self, stream: Stream, streamed: Streamed) -> (CallId, Streamed, Place) {
        let id = stream.id;
        if streamed.last {
            return (id, streamed, stream.place);
        }
        self.current = Some(stream);
        (id, streamed, None)
    }

    /// Gives up the step whose response was given last.
    pub(super) fn give_up(&mut self, id: CallId) {
        drop(self.current.take_if(|stream| stream.id == id));
    }
}
