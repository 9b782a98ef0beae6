//! The service of a connection: records in its [`Activity`] when requests begin and end, and passes
//! them on.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue};
use http::{Request, Response, Version};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;

use super::handler_panic::{Content, Guarded, Protocol};
use super::peer::Peer;
use super::request_body::RequestBody;
use super::service::{Answer, AnswerBody, Handler};
use super::timeouts::{Activity, Busy};
use super::unread_responses::Pieces;

/// A connection's service that records its activity.
pub(super) struct Watched {
    pub(super) service: Arc<dyn Handler>,
    pub(super) activity: Arc<Activity>,
    /// The client, added to the extensions of each request.
    pub(super) peer: Option<Peer>,
}

impl hyper::service::Service<Request<Incoming>> for Watched {
    type Response = Response<Body<Content<AnswerBody>>>;
    type Error = Infallible;
    type Future = ResponseFuture<Answer>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        if let Some(peer) = &self.peer {
            request.extensions_mut().insert(peer.clone());
        }
        self.activity.begin();
        let busy = if request.version() == Version::HTTP_2 {
            self.activity.set_http2();
            None
        } else {
            Some(self.activity.busy())
        };
        let http2 = busy.is_none().then(|| self.activity.clone());
        let protocol = Protocol::of(request.headers());
        let request = RequestBody::of(request, &self.activity);
        ResponseFuture { answer: Guarded::new(self.service.handle(request), protocol), busy, http2 }
    }
}

/// The future of a response.
pub(super) struct ResponseFuture<F> {
    answer: Guarded<F>,
    busy: Option<Busy>,
    http2: Option<Arc<Activity>>,
}

impl<F, B> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Response<B>, Infallible>> + Unpin,
{
    type Output = Result<Response<Body<Content<B>>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut answer = ready!(Pin::new(&mut self.answer).poll(cx));
        let busy = self.busy.take();
        if busy.as_ref().is_some_and(|busy| busy.is_closing()) {
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let http2 = self.http2.take().map(|activity| (Wait::begun(activity), Pieces::default()));
        Poll::Ready(Ok(answer.map(|body| Body { body, _busy: busy, http2 })))
    }
}

/// The body of a response; dropping it ends the request.
pub(super) struct Body<B> {
    body: B,
    _busy: Option<Busy>,
    /// Tracks the progress of the client.
    http2: Option<(Wait, Pieces)>,
}

/// Whether a response waits until its client grants a window. hyper does not poll the body of a
/// response meanwhile.
struct Wait {
    activity: Arc<Activity>,
    /// The period in which the wait began, as counted.
    since: Option<usize>,
}

impl Wait {
    fn begun(activity: Arc<Activity>) -> Self {
        let mut wait = Self { activity, since: None };
        wait.begin();
        wait
    }

    fn begin(&mut self) {
        let (unread, tick) = self.activity.unread();
        self.since = Some(unread.begins_wait(tick.load(Ordering::Relaxed)));
    }

    fn end(&mut self) {
        if let Some(since) = self.since.take() {
            self.activity.unread().0.ends_wait(since);
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.end();
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for Body<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let Self { body, http2, .. } = &mut *self;
        let Some((wait, pieces)) = http2 else { return Pin::new(body).poll_frame(cx) };
        wait.end();
        if let Some(rest) = pieces.next() {
            wait.begin();
            return Poll::Ready(Some(Ok(Frame::data(rest))));
        }
        let frame = Pin::new(body).poll_frame(cx);
        if frame.is_ready() {
            wait.begin();
        }
        let (unread, tick) = wait.activity.unread();
        frame.map_ok(|frame| frame.map_data(|piece| pieces.cut(piece, unread, tick)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && self.http2.as_ref().is_none_or(|(_, pieces)| pieces.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        let left = self.http2.as_ref().map_or(0, |(_, pieces)| pieces.left());
        let hint = self.body.size_hint();
        let mut whole = SizeHint::new();
        whole.set_lower(hint.lower() + left);
        if let Some(upper) = hint.upper() {
            whole.set_upper(upper + left);
        }
        whole
    }
}
