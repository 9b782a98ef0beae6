//! The service of a listener, as a trait object: the code of hyper for a connection is then compiled
//! once, in this package, and not again for each service in the packages that have one.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use tower::Service;

use super::request_body::RequestBody;

type Boxed<B> = Pin<Box<dyn Future<Output = Result<Response<B>, Infallible>> + Send>>;

/// The future of a response over HTTP.
pub type HttpAnswer = Boxed<axum::body::Body>;

/// The future of a response over gRPC.
pub type GrpcAnswer = Boxed<tonic::body::Body>;

/// The future of a response. An enum: a box around either would be another allocation for each
/// request.
pub enum Answer {
    /// Over HTTP.
    Http(HttpAnswer),
    /// Over gRPC.
    Grpc(GrpcAnswer),
}

impl From<HttpAnswer> for Answer {
    fn from(answer: HttpAnswer) -> Self {
        Self::Http(answer)
    }
}

impl From<GrpcAnswer> for Answer {
    fn from(answer: GrpcAnswer) -> Self {
        Self::Grpc(answer)
    }
}

impl Future for Answer {
    type Output = Result<Response<AnswerBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match &mut *self {
            Self::Http(answer) => {
                ready!(answer.as_mut().poll(cx)).map(|response| response.map(AnswerBody::Http))
            }
            Self::Grpc(answer) => {
                ready!(answer.as_mut().poll(cx)).map(|response| response.map(AnswerBody::Grpc))
            }
        })
    }
}

/// The body of a response.
pub enum AnswerBody {
    /// Over HTTP.
    Http(axum::body::Body),
    /// Over gRPC.
    Grpc(tonic::body::Body),
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            Self::Http(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            Self::Grpc(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http(body) => body.is_end_stream(),
            Self::Grpc(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http(body) => body.size_hint(),
            Self::Grpc(body) => body.size_hint(),
        }
    }
}

/// Answers the requests of a listener. The services of this server are always ready, so
/// `poll_ready` is not called.
pub(super) trait Handler: Send + Sync {
    fn handle(&self, request: Request<RequestBody>) -> Answer;
}

impl<S> Handler for S
where
    S: Service<Request<RequestBody>> + Clone + Send + Sync,
    S::Future: Into<Answer>,
{
    fn handle(&self, request: Request<RequestBody>) -> Answer {
        self.clone().call(request).into()
    }
}
