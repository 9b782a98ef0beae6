//! Observes the end of a response: what is counted and logged of a streamed response is known when its body ends.

use std::error::Error;

use axum::body::Body;
use axum::response::Response;
use http::{Method, StatusCode};
use http_body::Body as _;
use pharos::error::{InferError, Reason};
use pharos_edge::observed_body::{BodyEnd, ObservedBody};

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

    use bytes::Bytes;
    use futures_util::stream;
    use http_body::Frame;
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
