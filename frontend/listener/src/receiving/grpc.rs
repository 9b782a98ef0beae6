//! Receives the messages of gRPC calls. tonic allocates the declared length of a message, so it
//! gets only complete messages. [`Limits`] bounds each message, and [`Budget`] all data being
//! received. Compressed messages are decompressed here, on threads that serve no sockets.

pub mod bounded;
pub mod fields;
pub mod messages;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body::Frame;
use pharos::data::Data;
use pharos_os::blocking;
use tonic::Status;

use self::messages::{Head, Partial, whole};
use super::coding::{Format, InflateError, inflate};
use super::{Budget, Full, Reservation};
use crate::body_timeout::{BoxError, Fault, Pace};

/// The maximum sizes of a message, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// As received.
    pub received: usize,
    /// After decompression.
    pub inflated: usize,
    /// The setting that raises the limits, for error texts; `None` if they are fixed.
    pub setting: Option<&'static str>,
}

/// The largest message in both directions: the maximum of the protocol's signed lengths. Triton has
/// no limit either.
pub const MAX_MESSAGE: usize = i32::MAX as usize;

/// The maximum size of a decompressed message unless `--grpc-max-input-size` is given.
const MAX_INFLATED: usize = 64 << 20;

/// The maximum size of a message that is empty or names a model.
const MAX_SMALL: usize = 64 << 10;

impl Limits {
    /// Returns the limits for a value of `--grpc-max-input-size`.
    pub fn new(most: Option<u64>) -> Self {
        let most = most.map(|most| usize::try_from(most).unwrap_or(usize::MAX).min(MAX_MESSAGE));
        let received = most.unwrap_or(MAX_MESSAGE);
        let inflated = most.unwrap_or(MAX_INFLATED);
        Self { received, inflated, setting: Some("--grpc-max-input-size") }
    }

    /// Returns the limits for messages that are empty or name a model.
    pub fn small() -> Self {
        Self { received: MAX_SMALL, inflated: MAX_SMALL, setting: None }
    }

    /// Returns these limits as the end of an error text.
    fn advice(self) -> String {
        self.setting
            .map_or_else(String::new, |setting| format!(" Use {setting} to increase the limit."))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::new(None)
    }
}

/// The time limit of the messages of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageTimeout {
    /// The maximum time without data; zero for no limit. Data must also arrive at a minimum rate.
    pub idle: Duration,
    /// Whether the client may wait for any time before it begins a message.
    pub is_stream: bool,
}

/// Wraps the body of a call to bound its messages.
pub fn received<B>(
    request: Request<B>,
    budget: &Budget,
    limits: Limits,
    timeout: MessageTimeout,
) -> Request<Received<B>> {
    let (parts, body) = request.into_parts();
    let body = Received::new(body, &parts.headers, budget, limits, timeout);
    Request::from_parts(parts, body)
}

/// Returns the format of a call's compressed messages; `None` without one, or for one that tonic
/// refuses.
pub(super) fn format(headers: &HeaderMap) -> Option<Format> {
    match headers.get("grpc-encoding")?.as_bytes() {
        b"gzip" => Some(Format::Gzip),
        b"deflate" => Some(Format::Zlib),
        _ => None,
    }
}

type Inflating = Pin<Box<dyn Future<Output = Result<(Data, Reservation), Status>> + Send>>;

/// A body that yields only complete messages.
pub struct Received<B> {
    body: B,
    budget: Budget,
    limits: Limits,
    format: Option<Format>,
    /// Received data that is not parsed yet.
    rest: Bytes,
    partial: Partial,
    /// The memory of the message that is being collected or decompressed.
    reservation: Reservation,
    /// The memory of `ready`.
    given: Reservation,
    inflating: Option<Inflating>,
    ready: VecDeque<Bytes>,
    /// A head is not valid. Passes it and the rest to tonic, which reports the error.
    wrong: bool,
    pace: Pace,
    is_stream: bool,
}

impl<B> Received<B> {
    /// Wraps the body of a call with these headers.
    pub(crate) fn new(
        body: B,
        headers: &HeaderMap,
        budget: &Budget,
        limits: Limits,
        timeout: MessageTimeout,
    ) -> Self {
        Self {
            body,
            budget: budget.clone(),
            limits,
            format: format(headers),
            rest: Bytes::new(),
            partial: Partial::default(),
            reservation: budget.reserve(),
            given: budget.reserve(),
            inflating: None,
            ready: VecDeque::new(),
            wrong: false,
            pace: Pace::new(timeout.idle),
            is_stream: timeout.is_stream,
        }
    }

    /// Parses received data, up to the end of the first compressed message.
    fn advance(&mut self) -> Result<(), Status> {
        while !self.rest.is_empty() && self.inflating.is_none() {
            if self.wrong {
                self.ready.push_back(std::mem::take(&mut self.rest));
                break;
            }
            if self.partial.is_empty() {
                // Complete messages are passed on without a copy.
                let limits = self.limits;
                let format = self.format;
                let plain =
                    whole(&self.rest, |head| check(limits, head).map(|()| is_plain(head, format)))?;
                if plain > 0 {
                    self.ready.push_back(self.rest.split_to(plain));
                    continue;
                }
                if self.is_stream {
                    // A message begins: earlier ones and the pause before it do not count.
                    self.pace.restart();
                }
            }
            self.collect()?;
        }
        Ok(())
    }

    /// Collects data of the incomplete message.
    fn collect(&mut self) -> Result<(), Status> {
        if self.partial.head().is_none() {
            self.partial.take_head(&mut self.rest);
            let Some(head) = self.partial.head() else { return Ok(()) };
            check(self.limits, head)?;
            if !is_known(head, self.format) {
                self.wrong = true;
                self.ready.push_back(head.bytes());
                self.partial = Partial::default();
                return Ok(());
            }
        }
        self.reservation.grow(self.partial.missing_bytes(self.rest.len())).map_err(full)?;
        let Some((head, message)) = self.partial.take(&mut self.rest) else { return Ok(()) };
        match self.format.filter(|_| head.flag == 1) {
            None => {
                let reservation = std::mem::replace(&mut self.reservation, self.budget.reserve());
                self.give(head, message, reservation);
            }
            Some(format) => self.inflating = Some(self.inflate(format, message)),
        }
        Ok(())
    }

    /// Waits for data; ready if the client is too slow.
    fn wait(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        if self.is_stream && self.partial.is_empty() { Poll::Pending } else { self.pace.wait(cx) }
    }

    /// Drops the data of a message that cannot be received, and returns the error.
    fn fail(&mut self, status: Status) -> BoxError {
        self.rest = Bytes::new();
        self.partial = Partial::default();
        self.reservation.release();
        status.into()
    }

    /// Queues a message, in its pieces.
    fn give(&mut self, head: Head, message: Data, reservation: Reservation) {
        self.given.absorb(reservation);
        self.ready.push_back(head.bytes());
        self.ready.extend(message.pieces().iter().filter(|piece| !piece.is_empty()).cloned());
    }

    fn inflate(&mut self, format: Format, message: Data) -> Inflating {
        let budget = self.budget.clone();
        let limits = self.limits;
        let mut reservation = std::mem::replace(&mut self.reservation, budget.reserve());
        Box::pin(async move {
            let permit = budget.coder().await;
            let work = blocking::run(move || {
                let _permit = permit;
                let inflated = inflate(message, format, limits.inflated as u64, &mut reservation);
                inflated.map(|inflated| (inflated, reservation))
            });
            match work.await {
                Ok(Ok(done)) => Ok(done),
                Ok(Err(InflateError::TooLarge)) => Err(Status::resource_exhausted(format!(
                    "a message exceeds the maximum allowed value of {} bytes when it is \
                     decompressed.{}",
                    limits.inflated,
                    limits.advice()
                ))),
                Ok(Err(InflateError::Full(reason))) => Err(full(reason)),
                Ok(Err(InflateError::Broken(error))) => {
                    Err(Status::internal(format!("Error decompressing: {error}")))
                }
                Err(error) => {
                    Err(Status::internal(format!("decompressing a message failed: {error}")))
                }
            }
        })
    }
}

/// Returns whether the flag of a head is supported.
fn is_known(head: Head, format: Option<Format>) -> bool {
    head.flag == 0 || (head.flag == 1 && format.is_some())
}

/// Returns whether a message is passed on without decompression.
fn is_plain(head: Head, format: Option<Format>) -> bool {
    head.flag == 0 || !is_known(head, format)
}

fn check(limits: Limits, head: Head) -> Result<(), Status> {
    if head.length <= limits.received {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "Received message larger than max ({} vs. {}).{}",
        head.length,
        limits.received,
        limits.advice()
    )))
}

fn full(full: Full) -> Status {
    Status::resource_exhausted(full.to_string())
}

impl<B> http_body::Body for Received<B>
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
        let this = &mut *self;
        loop {
            if let Some(data) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if let Some(inflating) = &mut this.inflating {
                let inflated = ready!(inflating.as_mut().poll(cx));
                this.inflating = None;
                match inflated {
                    Ok((message, reservation)) => {
                        this.give(Head { flag: 0, length: message.len() }, message, reservation);
                    }
                    Err(status) => return Poll::Ready(Some(Err(this.fail(status)))),
                }
                continue;
            }
            this.given.release();
            if !this.rest.is_empty() {
                if let Err(status) = this.advance() {
                    return Poll::Ready(Some(Err(this.fail(status))));
                }
                continue;
            }
            let Poll::Ready(next) = Pin::new(&mut this.body).poll_frame(cx) else {
                let fault = ready!(this.wait(cx));
                return Poll::Ready(Some(Err(
                    this.fail(Status::invalid_argument(fault.to_string()))
                )));
            };
            match next {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        this.pace.receive(data.len());
                        this.rest = data;
                    }
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None if this.partial.is_empty() => return Poll::Ready(None),
                None => {
                    let status = Status::internal("Unexpected EOF decoding stream.");
                    return Poll::Ready(Some(Err(this.fail(status))));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let nothing_here =
            self.ready.is_empty() && self.rest.is_empty() && self.inflating.is_none();
        nothing_here && self.partial.is_empty() && self.body.is_end_stream()
    }
}

#[cfg(test)]
#[path = "grpc_tests.rs"]
mod tests;
