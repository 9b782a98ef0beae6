//! The body of a `generate_stream` answer: one server-sent event per response, written when the
//! connection has capacity.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http::header::HeaderValue;
use http_body::Frame;
use pharos::error::InferError;
use pharos::infer::InferResponse;
use pharos::service::{OpenStream, Responses, Streamed};

use super::convert;
use crate::infer::{LONG, on_a_thread};
use pharos_edge::response_timing::{AnswerTiming, SERVER_TIMING};
use pharos_edge::{Call, Sending};

/// The events of one request. Dropping it before the last event, because the client disconnected,
/// cancels the request.
pub(super) struct Events {
    responses: Box<dyn Responses>,
    /// The first response, received before the body began.
    first: Option<Streamed>,
    /// Ends when the last response arrives.
    call: Call,
    /// Present if the times of the request are sent in a trailer.
    timing: Option<AnswerTiming>,
    /// The times, once they are known.
    times: Option<HeaderValue>,
    ended: bool,
    /// The event of a large response, which is written on another thread.
    writing: Option<Writing>,
    _sending: Option<Sending>,
    _open: OpenStream,
}

/// The JSON of a response, and how to send it.
type Writing = Pin<Box<dyn Future<Output = (Result<Vec<u8>, InferError>, Sent)> + Send>>;

/// The JSON of a response, written at once or by another thread.
enum Written {
    AtOnce(Result<Vec<u8>, InferError>, Sent),
    Later(Writing),
}

/// How a response is sent.
#[derive(Clone, Copy)]
struct Sent {
    last: bool,
    empty: bool,
}

impl Events {
    /// Returns the events of a request whose head has been [begun](Call::begin_stream).
    pub(super) fn new(
        responses: Box<dyn Responses>,
        first: Option<Streamed>,
        call: Call,
        trailer: Option<AnswerTiming>,
        sending: Option<Sending>,
        open: OpenStream,
    ) -> Self {
        Self {
            responses,
            first,
            call,
            timing: trailer,
            times: None,
            ended: false,
            writing: None,
            _sending: sending,
            _open: open,
        }
    }

    /// Writes a response, a large one on another thread.
    fn write(&mut self, streamed: Streamed) -> Written {
        let Streamed { answer, last, empty } = streamed;
        let sent = Sent { last, empty };
        if let (true, Ok(response), Some(timing)) = (last, &answer, &self.timing) {
            self.times = timing.value(&response.timeline);
        }
        let bytes = |response: &InferResponse| -> usize {
            response.outputs.iter().map(|output| output.tensor.data.bytes_here()).sum()
        };
        match answer {
            Ok(response) if bytes(&response) > LONG => Written::Later(Box::pin(async move {
                (on_a_thread(move || convert::response(&response)).await, sent)
            })),
            answer => {
                Written::AtOnce(answer.and_then(|response| convert::response(&response)), sent)
            }
        }
    }

    /// Returns the event for a response; `None` for an empty response that only marks the end.
    fn event(
        &mut self,
        json: Result<Vec<u8>, InferError>,
        Sent { last, empty }: Sent,
    ) -> Option<Bytes> {
        let json = json.unwrap_or_else(|error| {
            self.call.note_reason(error.reason);
            error_json(&error)
        });
        if last {
            self.end();
        }
        (!empty).then(|| [b"data: ", json.as_slice(), b"\n\n"].concat().into())
    }

    fn end(&mut self) {
        self.ended = true;
        self.call.has_responded();
        self.call.end_stream();
    }
}

fn error_json(error: &InferError) -> Vec<u8> {
    let text = serde_json::to_string(&error.message).unwrap_or_else(|_| "\"\"".to_owned());
    format!("{{\"error\":{text}}}").into_bytes()
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        while !this.ended {
            let (json, sent) = match &mut this.writing {
                Some(writing) => {
                    let written = ready!(writing.as_mut().poll(cx));
                    this.writing = None;
                    written
                }
                None => {
                    let next = match this.first.take() {
                        Some(first) => Some(first),
                        None => ready!(this.responses.poll_next(cx)),
                    };
                    let Some(streamed) = next else {
                        this.end();
                        break;
                    };
                    match this.write(streamed) {
                        Written::AtOnce(json, sent) => (json, sent),
                        Written::Later(writing) => {
                            this.writing = Some(writing);
                            continue;
                        }
                    }
                }
            };
            if let Some(event) = this.event(json, sent) {
                return Poll::Ready(Some(Ok(Frame::data(event))));
            }
        }
        Poll::Ready(this.times.take().map(|times| {
            let mut trailers = HeaderMap::with_capacity(1);
            trailers.insert(SERVER_TIMING, times);
            Ok(Frame::trailers(trailers))
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.times.is_none()
    }
}
