//! A response streamed in parts. If a part fails, the connection is closed: the status has already been sent.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Frame;
use pharos::error::InferError;
use pharos::service::{Responses, Streamed};

use super::ended::EndedSequences;
use crate::handler_call::{self, Answer, check_size};
use crate::registry::InFlight;

/// The body of a streamed response.
pub(super) struct Parts {
    first: Option<Bytes>,
    responses: Box<dyn Responses>,
    ended: bool,
    /// The largest part, in bytes.
    most: u64,
    sequences: Option<EndedSequences>,
    _entered: InFlight,
}

impl Parts {
    /// Creates a body of the first part and all that follow.
    pub(super) fn new(
        first: Bytes,
        responses: Box<dyn Responses>,
        (entered, sequences, most): (InFlight, Option<EndedSequences>, u64),
    ) -> Self {
        Self { first: Some(first), responses, ended: false, most, sequences, _entered: entered }
    }

    fn part(&mut self, streamed: Streamed) -> Result<Bytes, InferError> {
        self.ended = streamed.last;
        let Answer { body, headers, .. } = handler_call::answer(streamed.answer?)?;
        if let Some(sequences) = &self.sequences {
            sequences.close(&headers);
        }
        check_size(&body, self.most)?;
        Ok(body)
    }
}

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = InferError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, InferError>>> {
        if let Some(first) = self.first.take().filter(|first| !first.is_empty()) {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        loop {
            if self.ended {
                return Poll::Ready(None);
            }
            let Some(streamed) = ready!(self.responses.poll_next(cx)) else { return Poll::Ready(None) };
            match self.part(streamed) {
                // Skip: an empty chunk would end the body.
                Ok(part) if part.is_empty() => {}
                Ok(part) => return Poll::Ready(Some(Ok(Frame::data(part)))),
                Err(error) => {
                    self.ended = true;
                    tracing::warn!("streamed response aborted: {error}");
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }
}
