//! Answers a request whose handler panicked. Without it, hyper would close the connection, and all
//! of its other requests would fail.

use std::convert::Infallible;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};

/// The answer; the text of the panic, which may have details of other requests, is only in the log.
const TEXT: &str =
    "internal error: the handler of the request panicked; the log of the server has the reason";

/// The status INTERNAL of gRPC.
const GRPC_INTERNAL: HeaderValue = HeaderValue::from_static("13");

/// The format of error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http,
    Grpc,
}

impl Protocol {
    /// Returns the protocol of a request with these headers.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        if content_type.starts_with(b"application/grpc") { Self::Grpc } else { Self::Http }
    }
}

/// A body: that of the handler, or the text of an error.
pub(super) enum Content<B> {
    Handler(B),
    Error(Option<Bytes>),
}

/// The future of a response whose handler may panic.
pub(super) struct Guarded<F> {
    answer: F,
    protocol: Protocol,
}

impl<F> Guarded<F> {
    pub(super) fn new(answer: F, protocol: Protocol) -> Self {
        Self { answer, protocol }
    }
}

impl<F, B> Future for Guarded<F>
where
    F: Future<Output = Result<Response<B>, Infallible>> + Unpin,
{
    type Output = Response<Content<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let protocol = self.protocol;
        // After a panic the future is only dropped.
        let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(&mut self.answer).poll(cx)));
        let Ok(polled) = polled else { return Poll::Ready(failed(protocol)) };
        let Ok(answer) = ready!(polled);
        Poll::Ready(answer.map(Content::Handler))
    }
}

/// Returns the answer to a request whose handler panicked.
fn failed<B>(protocol: Protocol) -> Response<Content<B>> {
    match protocol {
        Protocol::Http => {
            let text = Bytes::from(format!("{{\"error\":\"{TEXT}\"}}"));
            let length = text.len();
            let mut answer = Response::new(Content::Error(Some(text)));
            *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            answer.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
            answer
        }
        Protocol::Grpc => {
            let mut answer = Response::new(Content::Error(None));
            answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            answer.headers_mut().insert("grpc-status", GRPC_INTERNAL);
            answer.headers_mut().insert("grpc-message", HeaderValue::from_static(TEXT));
            answer
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Content<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match &mut *self {
            Self::Handler(body) => Pin::new(body).poll_frame(cx),
            Self::Error(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Handler(body) => body.is_end_stream(),
            Self::Error(text) => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Handler(body) => body.size_hint(),
            Self::Error(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http_body_util::{BodyExt, Full};

    use super::*;

    type Answer = Result<Response<Full<Bytes>>, Infallible>;

    fn panicking() -> Pin<Box<dyn Future<Output = Answer>>> {
        Box::pin(async {
            tokio::task::yield_now().await;
            panic!("a fault of the handler")
        })
    }

    #[tokio::test]
    async fn a_panic_is_answered_in_the_format_of_the_protocol() {
        let answer = Guarded::new(panicking(), Protocol::Http).await;
        assert_eq!(answer.status(), 500);
        assert_eq!(
            answer.headers()[CONTENT_LENGTH].to_str().unwrap(),
            answer.body().size_hint().exact().unwrap().to_string()
        );
        let text = answer.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(text, format!("{{\"error\":\"{TEXT}\"}}"));

        let answer = Guarded::new(panicking(), Protocol::Grpc).await;
        assert_eq!(
            (answer.status(), &answer.headers()["grpc-status"]),
            (StatusCode::OK, &GRPC_INTERNAL)
        );
        assert!(answer.body().is_end_stream());
    }

    #[tokio::test]
    async fn an_answer_passes_unchanged() {
        let handler = Box::pin(async { Answer::Ok(Response::new(Full::from("text"))) });
        let answer = Guarded::new(handler, Protocol::Http).await;
        assert_eq!((answer.status(), answer.body().size_hint().exact()), (StatusCode::OK, Some(4)));
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "text");
    }

    #[test]
    fn the_content_type_names_the_protocol() {
        let of = |kind: &'static str| {
            Protocol::of(&HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(kind))]))
        };
        assert_eq!(of("application/grpc+proto"), Protocol::Grpc);
        assert_eq!(
            (of("application/json"), Protocol::of(&HeaderMap::new())),
            (Protocol::Http, Protocol::Http)
        );
    }
}
