//! Compresses the messages of an answer for clients that request it. Large messages are compressed
//! on blocking threads.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use flate2::Compression;
use http::header::HeaderValue;
use http::{HeaderMap, Response};
use http_body::Frame;
use pharos::data::Data;
use pharos_os::blocking;
use tonic::Status;
use tonic::body::Body;

use pharos_listener::receiving::Budget;
use pharos_listener::receiving::coding::{Format, deflate};
use pharos_listener::receiving::grpc::messages::{Head, Partial};

/// Messages of more bytes are compressed on a blocking thread.
const LONG: usize = 64 << 10;

/// Returns the first supported format in `grpc-accept-encoding`.
pub(super) fn accepted(headers: &HeaderMap) -> Option<Format> {
    let names = headers.get("grpc-accept-encoding")?.to_str().ok()?;
    names.split(',').find_map(|name| match name.trim() {
        "gzip" => Some(Format::Gzip),
        "deflate" => Some(Format::Zlib),
        _ => None,
    })
}

/// Compresses an answer. An answer that consists only of a status is returned unchanged.
pub(super) fn compressed(
    mut response: Response<Body>,
    format: Format,
    budget: &Budget,
) -> Response<Body> {
    if response.headers().contains_key("grpc-status") || !response.status().is_success() {
        return response;
    }
    let name = match format {
        Format::Gzip => "gzip",
        Format::Zlib => "deflate",
    };
    response.headers_mut().insert("grpc-encoding", HeaderValue::from_static(name));
    let budget = budget.clone();
    let whole = |body| Compressed {
        body,
        format,
        budget,
        rest: Bytes::new(),
        partial: Partial::default(),
        working: None,
        ready: VecDeque::new(),
    };
    response.map(|body| Body::new(whole(body)))
}

type Working = Pin<Box<dyn Future<Output = Result<Bytes, Status>> + Send>>;

struct Compressed {
    body: Body,
    format: Format,
    budget: Budget,
    /// Received but not yet parsed.
    rest: Bytes,
    partial: Partial,
    working: Option<Working>,
    ready: VecDeque<Bytes>,
}

impl Compressed {
    /// Parses the next message as far as it has been received, and starts compressing a complete
    /// one.
    fn advance(&mut self) -> Result<(), Status> {
        if self.partial.head().is_none() {
            self.partial.take_head(&mut self.rest);
        }
        let Some((_, message)) = self.partial.take(&mut self.rest) else { return Ok(()) };
        let format = self.format;
        if message.len() <= LONG {
            self.ready.push_back(pack(&message, format)?);
            return Ok(());
        }
        let budget = self.budget.clone();
        self.working = Some(Box::pin(async move {
            let permit = budget.coder().await;
            let work = blocking::run(move || {
                let _permit = permit;
                pack(&message, format)
            });
            work.await.unwrap_or_else(|error| {
                Err(Status::internal(format!("compressing a message failed: {error}")))
            })
        }));
        Ok(())
    }
}

/// Returns a message compressed, with its head.
fn pack(message: &Data, format: Format) -> Result<Bytes, Status> {
    // The level that the gRPC libraries use.
    let packed = deflate(message.pieces().iter(), format, Compression::new(6));
    let packed =
        packed.map_err(|error| Status::internal(format!("cannot compress a message: {error}")))?;
    let mut whole = BytesMut::from(&*Head { flag: 1, length: packed.len() }.bytes());
    whole.extend_from_slice(&packed);
    Ok(whole.freeze())
}

impl http_body::Body for Compressed {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if let Some(data) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if let Some(working) = &mut this.working {
                let packed = ready!(working.as_mut().poll(cx));
                this.working = None;
                this.ready.push_back(packed?);
                continue;
            }
            if !this.rest.is_empty() {
                this.advance()?;
                continue;
            }
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let nothing_here = self.ready.is_empty() && self.rest.is_empty() && self.working.is_none();
        nothing_here && self.body.is_end_stream()
    }
}
