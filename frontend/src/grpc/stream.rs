//! `ModelStreamInfer` for models that answer each request once: requests run side by side, at most [`IN_FLIGHT`] of a
//! stream, and their answers leave in the order in which they came. Errors are answers; the stream goes on.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::Parameter;
use pharos::timeline::Instant;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Sleep, sleep};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Status, Streaming};

use super::Engine;
use super::OpenStream;
use super::codec::{self, FINAL_RESPONSE};
use super::deadline;
use super::proto::{ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use super::seen::status;
use crate::engine::{Endpoint, Protocol, Route};

/// Requests of one stream that may be unanswered; beyond it the client waits.
const IN_FLIGHT: usize = 64;

/// One answer, with the error that it was made of.
struct Answer {
    message: ModelStreamInferResponse,
    failed: Option<(ErrorCode, Reason)>,
}

/// A request that is being answered. Dropped, it is cancelled and counted so.
struct Running {
    task: JoinHandle<Answer>,
    engine: Engine,
    counted: bool,
}

impl Running {
    fn count(&mut self, failed: Option<(ErrorCode, Reason)>) {
        self.counted = true;
        let code = failed.map_or(0, |(code, _)| u16::try_from(code.grpc_code()).unwrap_or_default());
        self.engine.record_answered(Protocol::Grpc, Route::StreamInfer, code, failed.map(|(_, reason)| reason));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.counted {
            self.task.abort();
            self.count(Some((ErrorCode::Cancelled, Reason::Cancelled)));
        }
    }
}

/// The answers of a stream.
pub(super) struct Answers {
    /// The requests in their order; an error is the last of them, what the client sent next is no request.
    queue: mpsc::Receiver<Result<Running, Status>>,
    first: Option<Running>,
    wants_status: bool,
    /// When the client waits no longer.
    deadline: Option<Pin<Box<Sleep>>>,
    ended: bool,
    _open: OpenStream,
}

/// What a client wants of a stream.
pub(super) struct Wishes {
    /// An error is to be the stream's status (`triton_grpc_error: true`).
    pub(super) wants_status: bool,
    /// How long it waits.
    pub(super) limit: Option<Duration>,
}

/// Starts answering the requests of a stream.
pub(super) fn answer(requests: Streaming<ModelInferRequest>, engine: Engine, wishes: Wishes) -> Answers {
    let (sender, queue) = mpsc::channel(IN_FLIGHT);
    let open = engine.stream_open(Protocol::Grpc);
    tokio::spawn(read(requests, engine, sender));
    let Wishes { wants_status, limit } = wishes;
    let deadline = limit.map(|limit| Box::pin(sleep(limit)));
    Answers { queue, first: None, wants_status, deadline, ended: false, _open: open }
}

/// Reads requests until the client ends its side, the connection breaks, or nobody reads the answers any more.
async fn read(
    mut requests: Streaming<ModelInferRequest>,
    engine: Engine,
    queue: mpsc::Sender<Result<Running, Status>>,
) {
    loop {
        // Room first: a request is not read before it can be taken.
        let Ok(room) = queue.reserve().await else { return };
        let message = tokio::select! {
            message = requests.message() => message,
            () = queue.closed() => return,
        };
        let received = engine.now();
        match message {
            Ok(Some(message)) => room.send(Ok(start(message, &engine, received).await)),
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(%error, "a stream of requests broke off");
                if error.code() != tonic::Code::Cancelled {
                    let code = error.code() as u16;
                    engine.record_answered(Protocol::Grpc, Route::StreamInfer, code, Some(Reason::Malformed));
                    room.send(Err(error));
                }
                return;
            }
        }
    }
}

/// Starts one request. It is polled once here, so that the requests of a stream reach the engine in their order, which
/// sequences rely on; only waiting for the answer is left to a task.
async fn start(message: ModelInferRequest, engine: &Engine, received: Instant) -> Running {
    let mut infer = Box::pin(infer_one(message, engine.clone(), received));
    let at_once = std::future::poll_fn(|cx| {
        Poll::Ready(match infer.as_mut().poll(cx) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        })
    });
    let task = match at_once.await {
        Some(answer) => tokio::spawn(std::future::ready(answer)),
        None => tokio::spawn(infer),
    };
    Running { task, engine: engine.clone(), counted: false }
}

async fn infer_one(message: ModelInferRequest, engine: Engine, received: Instant) -> Answer {
    let id = message.id.clone();
    let result = async {
        let mut request = codec::decode_for(message, &engine)?;
        request.timeline.received = received;
        request.timeline.request_start = engine.now();
        engine.infer(request, Endpoint::GrpcStream).await
    };
    match result.await {
        Ok(response) => Answer {
            message: ModelStreamInferResponse {
                error_message: String::new(),
                infer_response: Some(finally(codec::encode(response))),
            },
            failed: None,
        },
        Err(error) => failure(id, error),
    }
}

fn failure(id: String, error: InferError) -> Answer {
    let response = finally(ModelInferResponse { id, ..ModelInferResponse::default() });
    Answer {
        message: ModelStreamInferResponse { error_message: error.message, infer_response: Some(response) },
        failed: Some((error.code, error.reason)),
    }
}

fn finally(mut response: ModelInferResponse) -> ModelInferResponse {
    response.parameters.insert(FINAL_RESPONSE.to_owned(), codec::parameter(Parameter::Bool(true)));
    response
}

impl Stream for Answers {
    type Item = Result<ModelStreamInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        if this.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready()) {
            this.ended = true;
            this.queue.close();
            this.first = None;
            return Poll::Ready(Some(Err(status(deadline::exceeded()))));
        }
        if this.first.is_none() {
            this.first = match ready!(this.queue.poll_recv(cx)) {
                Some(Err(error)) => {
                    this.ended = true;
                    return Poll::Ready(Some(Err(error)));
                }
                next => next.and_then(Result::ok),
            };
        }
        let Some(running) = &mut this.first else {
            this.ended = true;
            return Poll::Ready(None);
        };
        let answer = ready!(Pin::new(&mut running.task).poll(cx)).unwrap_or_else(|error| {
            failure(String::new(), InferError::internal(format!("answering the request broke off: {error}")))
        });
        running.count(answer.failed);
        this.first = None;
        match answer.failed {
            Some((code, reason)) if this.wants_status => {
                this.ended = true;
                this.queue.close();
                Poll::Ready(Some(Err(status(InferError::new(code, reason, answer.message.error_message)))))
            }
            _ => Poll::Ready(Some(Ok(answer.message))),
        }
    }
}
