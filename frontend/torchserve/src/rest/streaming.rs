//! A response streamed in parts. If a part fails, the connection is closed: the status has already
//! been sent.

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
    /// The first part, until it is sent.
    pub(super) first: Option<Bytes>,
    /// The parts that follow.
    pub(super) responses: Box<dyn Responses>,
    /// Whether the last part is sent.
    pub(super) has_ended: bool,
    /// The largest part, in bytes.
    pub(super) max_size: u64,
    /// Closes the sequences that a response names as ended.
    pub(super) sequences: Option<EndedSequences>,
    pub(super) _in_flight: InFlight,
}

impl Parts {
    fn part(&mut self, streamed: Streamed) -> Result<Bytes, InferError> {
        self.has_ended = streamed.last;
        let Answer { body, headers, .. } = handler_call::answer(streamed.answer?)?;
        if let Some(sequences) = &self.sequences {
            sequences.close(&headers);
        }
        check_size(&body, self.max_size)?;
        Ok(body)
    }
}

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = InferError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, InferError>>> {
        if let Some(first) = self.first.take().filter(|first| !first.is_empty()) {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        loop {
            if self.has_ended {
                return Poll::Ready(None);
            }
            let Some(streamed) = ready!(self.responses.poll_next(cx)) else {
                return Poll::Ready(None);
            };
            match self.part(streamed) {
                // Skip: an empty chunk would end the body.
                Ok(part) if part.is_empty() => {}
                Ok(part) => return Poll::Ready(Some(Ok(Frame::data(part)))),
                Err(error) => {
                    self.has_ended = true;
                    tracing::warn!("streamed response aborted: {error}");
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }
}
