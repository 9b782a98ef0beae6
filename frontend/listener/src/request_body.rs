//! The body of a request, as its connection receives it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::EXPECT;
use http::{Request, Version};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::runtime::Handle;

use super::timeouts::Activity;

/// How long, and how many bytes of, the rest of a body is received and discarded.
const DRAIN_TIME: Duration = Duration::from_secs(10);
const DRAIN_BYTES: u64 = 1 << 30;
/// How long a client may send nothing meanwhile.
const DRAIN_PAUSE: Duration = Duration::from_secs(2);

/// The body of a request.
///
/// A handler may answer without reading it, for example if the path does not exist. Many HTTP/1
/// clients send the whole body before they read the response, and a closed connection would make
/// them fail without it. So what a handler leaves unread is received and discarded in the
/// background, within limits, while the response is sent. HTTP/2 needs no such thing: a server can
/// end one stream.
pub struct RequestBody {
    /// `None` only while it is dropped.
    body: Option<Incoming>,
    /// The connection if the rest of the body must be received: HTTP/1, before the end of the
    /// body.
    connection: Option<Arc<Activity>>,
    /// Whether the client does not send the body before the server reads it (`Expect:
    /// 100-continue`).
    is_held_back: bool,
}

impl RequestBody {
    /// Wraps the body of a request on this connection.
    pub(super) fn of(request: Request<Incoming>, connection: &Arc<Activity>) -> Request<Self> {
        let is_sent_first = request.version() < Version::HTTP_2 && !request.body().is_end_stream();
        let is_held_back = is_sent_first && request.headers().contains_key(EXPECT);
        let connection = is_sent_first.then(|| connection.clone());
        request.map(|body| Self { body: Some(body), connection, is_held_back })
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.is_held_back = false;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            self.connection = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Incoming::size_hint).unwrap_or_default()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        let Some(body) = self.body.take() else { return };
        if self.is_held_back || body.is_end_stream() || body.size_hint().lower() > DRAIN_BYTES {
            return;
        }
        if let Ok(event_loop) = Handle::try_current() {
            event_loop.spawn(async move {
                // No timeout of an idle connection applies meanwhile.
                let _busy = connection.busy();
                // A connection whose body is not received completely is closed.
                let _ = tokio::time::timeout(DRAIN_TIME, drain(body)).await;
            });
        }
    }
}

/// Receives and discards a body to its end, or up to the limits.
async fn drain(mut body: Incoming) {
    let mut left = DRAIN_BYTES;
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(DRAIN_PAUSE, body.frame()).await {
        let size = frame.data_ref().map_or(0, Bytes::len) as u64;
        left = match left.checked_sub(size) {
            Some(left) => left,
            None => return,
        };
    }
}
