//! Closes connections that wait too long for a request, without a timer for each of them.
//!
//! Every connection notes the tick at which it began to wait; a task looks at all of them every now and then. So a
//! request costs two stores, and a connection is closed within one look after its time.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, Version};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::task::AbortHandle;
use tower::Service;

/// The connections of one listener. The looking ends when it is dropped.
pub(super) struct Watch(Arc<Connections>);

struct Connections {
    /// Looks so far, from 1.
    tick: Arc<AtomicU32>,
    open: Mutex<Vec<(Arc<Activity>, AbortHandle)>>,
}

/// What one connection is doing.
pub(super) struct Activity {
    tick: Arc<AtomicU32>,
    /// Requests in flight in the upper half: while there is one, the connection may take its time. In the lower half the
    /// tick since which it waits.
    state: AtomicU64,
}

/// One request in flight.
const ONE: u64 = 1 << 32;
/// The connection has carried an HTTP/2 request and looks after itself.
const HTTP2: u64 = 1 << 63;

impl Watch {
    /// Closes connections that have waited for `patience`, looking each `look`.
    pub(super) fn start(patience: Duration, look: Duration) -> Self {
        let connections = Arc::new(Connections { tick: Arc::new(AtomicU32::new(1)), open: Mutex::default() });
        let ticks = u32::try_from(patience.as_nanos().div_ceil(look.as_nanos().max(1))).unwrap_or(u32::MAX);
        let weak = Arc::downgrade(&connections);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(look).await;
                let Some(connections) = weak.upgrade() else { return };
                connections.look(ticks);
            }
        });
        Self(connections)
    }

    /// For a new connection, which waits for its first request.
    pub(super) fn activity(&self) -> Arc<Activity> {
        let state = u64::from(self.0.tick.load(Ordering::Relaxed));
        Arc::new(Activity { tick: self.0.tick.clone(), state: AtomicU64::new(state) })
    }

    /// From now on the connection is looked at; `task` serves it.
    pub(super) fn add(&self, activity: Arc<Activity>, task: AbortHandle) {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner).push((activity, task));
    }
}

impl Connections {
    fn look(&self, ticks: u32) {
        let now = self.tick.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(activity, task)| {
            let state = activity.state.load(Ordering::Relaxed);
            let waits = state < ONE && now.wrapping_sub(state as u32) > ticks;
            if waits {
                task.abort();
            }
            !waits && !task.is_finished()
        });
        open.shrink_to(64);
    }
}

impl Activity {
    fn end(&self) {
        let tick = u64::from(self.tick.load(Ordering::Relaxed));
        let finished = |state: u64| Some((state - ONE) & !(ONE - 1) | tick);
        // The closure never gives `None`, so this cannot fail.
        let _ = self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, finished);
    }
}

/// One request, from its head to the end of its answer.
struct Busy(Arc<Activity>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A connection's service, with a note of when it works.
pub(super) struct Watched<S> {
    pub(super) service: S,
    pub(super) activity: Arc<Activity>,
}

impl<S, B> hyper::service::Service<Request<Incoming>> for Watched<S>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone,
    S::Future: Unpin,
    B: http_body::Body + Unpin,
{
    type Response = Response<Body<B>>;
    type Error = Infallible;
    type Future = Answer<S::Future>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let busy = if request.version() == Version::HTTP_2 {
            self.activity.state.fetch_or(HTTP2, Ordering::Relaxed);
            None
        } else {
            self.activity.state.fetch_add(ONE, Ordering::Relaxed);
            Some(Busy(self.activity.clone()))
        };
        // The services of this server are ready at all times.
        Answer { answer: self.service.clone().call(request), busy }
    }
}

/// An answer in the making.
pub(super) struct Answer<F> {
    answer: F,
    busy: Option<Busy>,
}

impl<F, B> Future for Answer<F>
where
    F: Future<Output = Result<Response<B>, Infallible>> + Unpin,
{
    type Output = Result<Response<Body<B>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(answer) = Pin::new(&mut self.answer).poll(cx) else { return Poll::Pending };
        let busy = self.busy.take();
        Poll::Ready(answer.map(|answer| answer.map(|body| Body { body, _busy: busy })))
    }
}

/// An answer's body; when it has been handed over, the connection waits again.
pub(super) struct Body<B> {
    body: B,
    _busy: Option<Busy>,
}

impl<B: http_body::Body + Unpin> http_body::Body for Body<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
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
    use super::*;

    /// A connection that lasts until it is closed.
    fn connection(watch: &Watch) -> (Arc<Activity>, tokio::task::JoinHandle<()>) {
        let activity = watch.activity();
        let task = tokio::spawn(std::future::pending());
        watch.add(activity.clone(), task.abort_handle());
        (activity, task)
    }

    async fn closed(task: tokio::task::JoinHandle<()>) {
        let ended = tokio::time::timeout(Duration::from_secs(20), task).await;
        assert!(ended.unwrap().unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn only_connections_that_wait_too_long_are_closed() {
        let watch = Watch::start(Duration::from_millis(50), Duration::from_millis(10));
        let [waiting, working, answered, http2] = [(); 4].map(|()| connection(&watch));
        working.0.state.fetch_add(ONE, Ordering::Relaxed);
        answered.0.state.fetch_add(ONE, Ordering::Relaxed);
        http2.0.state.fetch_or(HTTP2, Ordering::Relaxed);
        closed(waiting.1).await;
        assert!(!working.1.is_finished() && !answered.1.is_finished() && !http2.1.is_finished());
        drop(Busy(answered.0));
        closed(answered.1).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!working.1.is_finished() && !http2.1.is_finished());
        assert_eq!(watch.0.open.lock().unwrap().len(), 2);
    }
}
