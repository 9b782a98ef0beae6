//! Observes the end of a response: what is counted and logged of a streamed response is known when its body ends.

use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use pharos::error::{InferError, Reason};

/// How a body ended.
pub(crate) enum BodyEnd<'a, E> {
    /// After its data, without trailers.
    Complete,
    /// With these trailers.
    Trailers(&'a HeaderMap),
    /// With an error.
    Failed(&'a E),
}

/// A body that calls a function when it ends, before the end is sent. If it is dropped before, because the client disconnected,
/// the function is dropped uncalled.
pub(crate) struct ObservedBody<B, F> {
    inner: B,
    ended: Option<F>,
}

impl<B, F> ObservedBody<B, F>
where
    B: http_body::Body,
    F: FnOnce(BodyEnd<'_, B::Error>),
{
    pub(crate) fn new(inner: B, ended: F) -> Self {
        Self { inner, ended: Some(ended) }
    }
}

impl<B, F> http_body::Body for ObservedBody<B, F>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    F: FnOnce(BodyEnd<'_, B::Error>) + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let end = match &frame {
            None => Some(BodyEnd::Complete),
            Some(Err(error)) => Some(BodyEnd::Failed(error)),
            Some(Ok(frame)) => match frame.trailers_ref() {
                Some(trailers) => Some(BodyEnd::Trailers(trailers)),
                // A body that says so is not polled again.
                None => self.inner.is_end_stream().then_some(BodyEnd::Complete),
            },
        };
        if let Some(end) = end
            && let Some(ended) = self.ended.take()
        {
            ended(end);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Calls `ended` at the end of a response to a request with this method: now if the body is complete, at the end of the body if it
/// is streamed. `ended` gets the reason for which a streamed body failed.
pub(super) fn at_end(
    response: Response,
    method: &Method,
    ended: impl FnOnce(Option<Reason>) + Send + Unpin + 'static,
) -> Response {
    if !is_streamed(&response, method) {
        ended(None);
        return response;
    }
    let ended = move |end: BodyEnd<'_, axum::Error>| match end {
        BodyEnd::Complete | BodyEnd::Trailers(_) => ended(None),
        BodyEnd::Failed(error) => ended(Some(reason_of(error))),
    };
    response.map(|body| Body::new(ObservedBody::new(body, ended)))
}

/// Whether the body of a response is streamed: has no size in advance, and is sent.
fn is_streamed(response: &Response, method: &Method) -> bool {
    let has_no_body =
        *method == Method::HEAD || matches!(response.status(), StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    !has_no_body && !response.body().is_end_stream() && response.body().size_hint().exact().is_none()
}

/// Returns the reason of an error of a body.
fn reason_of(error: &axum::Error) -> Reason {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<InferError>());
    cause.map_or(Reason::Internal, |cause| cause.reason)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::{Arc, Mutex};

    use futures_util::stream;
    use http_body_util::{BodyExt as _, StreamBody};

    use super::*;

    /// A response in two parts; the second is `last`.
    fn parts(last: Result<&'static str, InferError>) -> Response {
        let part = |part: &'static str| Frame::data(Bytes::from_static(part.as_bytes()));
        Response::new(Body::new(StreamBody::new(stream::iter([Ok(part("a")), last.map(part)]))))
    }

    /// The reasons that `at_end` reports for a response, and whether reading the body failed; without reading, nothing is read.
    async fn check(response: Response, method: Method, is_read: bool) -> (Vec<Option<Reason>>, bool) {
        let ends: Arc<Mutex<Vec<Option<Reason>>>> = Arc::default();
        let noted = ends.clone();
        let response = at_end(response, &method, move |reason| noted.lock().unwrap().push(reason));
        let failed = is_read && response.into_body().collect().await.is_err();
        (ends.lock().unwrap().clone(), failed)
    }

    #[tokio::test]
    async fn a_streamed_response_ends_once_with_its_body() {
        let failed = || Err(InferError::internal("broken"));
        let no_content = || {
            let mut response = parts(Ok("b"));
            *response.status_mut() = StatusCode::NO_CONTENT;
            response
        };
        for (response, method, is_read, expected) in [
            (parts(Ok("b")), Method::POST, true, (vec![None], false)),
            (parts(failed()), Method::POST, true, (vec![Some(Reason::Internal)], true)),
            // The client disconnects.
            (parts(Ok("b")), Method::POST, false, (vec![], false)),
            // The server does not read these bodies.
            (parts(Ok("b")), Method::HEAD, false, (vec![None], false)),
            (no_content(), Method::POST, false, (vec![None], false)),
            (Response::new(Body::from("whole")), Method::POST, false, (vec![None], false)),
        ] {
            assert_eq!(check(response, method.clone(), is_read).await, expected, "{method} {is_read}");
        }
    }
}
