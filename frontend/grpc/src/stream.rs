//! `ModelStreamInfer`. Requests run side by side, as many as the [window](super::window) has places: those of ordinary
//! models are answered in the order in which they came; the responses of decoupled models leave as they are produced.
//! Errors are answers; the stream goes on.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::Parameter;
use pharos::request_trace::Traced;
use pharos::service::{Protocol, Responses, Route, Service, Streamed, UNREAD_RESPONSES};
use pharos::timeline::Instant;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Sleep, sleep};
use tonic::codegen::tokio_stream::Stream;
use tonic::metadata::MetadataMap;
use tonic::{Status, Streaming};

use super::call_accounting::{Forwarded, status};
use super::codec::{self, FINAL_RESPONSE};
use super::deadline;
use super::large_tensors::Inputs;
use super::proto::{ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use super::trace;
use super::window::{Place, Window};
use pharos_listener::request_trace::{self, GRPC, Sending};

/// Responses of all decoupled models of one stream that wait to be sent.
const WAITING: usize = 4;

/// One answer, with the error that it was made of.
struct Answer {
    message: ModelStreamInferResponse,
    failed: Option<(ErrorCode, Reason)>,
    /// Collects what becomes of it, if its request is traced.
    traced: Option<Traced>,
}

impl Answer {
    /// The bytes of its tensors.
    fn bytes(&self) -> u64 {
        let outputs = self.message.infer_response.iter().flat_map(|response| &response.raw_output_contents);
        outputs.map(|output| output.len() as u64).sum()
    }
}

/// That a request is counted once, when its last answer is there; dropped before, as cancelled.
struct Counting<S: Service> {
    service: S,
    counted: bool,
}

impl<S: Service> Counting<S> {
    fn count(&mut self, failed: Option<(ErrorCode, Reason)>) {
        self.counted = true;
        let code = failed.map_or(0, |(code, _)| u16::try_from(code.grpc_code()).unwrap_or_default());
        self.service.record_answered(Protocol::Grpc, Route::StreamInfer, code, failed.map(|(_, reason)| reason));
    }
}

impl<S: Service> Drop for Counting<S> {
    fn drop(&mut self) {
        if !self.counted {
            self.count(Some((ErrorCode::Cancelled, Reason::Cancelled)));
        }
    }
}

/// A request to an ordinary model that is being answered. Dropped, it is cancelled.
struct Running<S: Service> {
    task: JoinHandle<Answer>,
    counting: Counting<S>,
    _place: Place,
}

impl<S: Service> Drop for Running<S> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The answers of a stream.
pub(super) struct Answers<S: Service> {
    /// The requests in their order; an error is the last of them, what the client sent next is no request.
    queue: mpsc::UnboundedReceiver<Result<Running<S>, Status>>,
    first: Option<Running<S>>,
    /// No request to an ordinary model is open or to come.
    queue_ended: bool,
    /// What decoupled models answer.
    produced: mpsc::Receiver<Answer>,
    /// Whether a decoupled model was the last to be asked for an answer: so that neither kind waits for the other.
    produced_last: bool,
    window: Window,
    wants_status: bool,
    /// The answer that was given out last: who asks for the next has taken it.
    sending: Option<Sending>,
    /// When the client waits no longer.
    deadline: Option<Pin<Box<Sleep>>>,
    ended: bool,
    _open: S::OpenStream,
}

/// What a client wants of a stream.
pub(super) struct Wishes {
    /// An error is to be the stream's status (`triton_grpc_error: true`).
    pub(super) wants_status: bool,
    /// How long it waits.
    pub(super) limit: Option<Duration>,
    /// The stream's headers that are parameters of each of its requests.
    pub(super) forwarded: Forwarded,
    /// What came with the call.
    pub(super) metadata: MetadataMap,
}

/// Starts answering the requests of a stream.
pub(super) fn answer<S: Service>(requests: Streaming<ModelInferRequest>, service: S, wishes: Wishes) -> Answers<S> {
    let (sender, queue) = mpsc::unbounded_channel();
    let (producer, produced) = mpsc::channel(WAITING);
    let open = service.stream_open(Protocol::Grpc);
    let Wishes { wants_status, limit, forwarded, metadata } = wishes;
    let window = Window::default();
    let reading = Reading { service, queue: sender, producer, window: window.clone(), forwarded, metadata };
    tokio::spawn(reading.read(requests));
    let deadline = limit.map(|limit| Box::pin(sleep(limit)));
    Answers {
        queue,
        first: None,
        queue_ended: false,
        produced,
        produced_last: false,
        window,
        wants_status,
        sending: None,
        deadline,
        ended: false,
        _open: open,
    }
}

/// The side of a stream that reads requests.
struct Reading<S: Service> {
    service: S,
    /// As many as the window has places.
    queue: mpsc::UnboundedSender<Result<Running<S>, Status>>,
    producer: mpsc::Sender<Answer>,
    window: Window,
    forwarded: Forwarded,
    metadata: MetadataMap,
}

impl<S: Service> Reading<S> {
    /// Reads requests until the client ends its side, the connection breaks, or nobody reads the answers any more.
    async fn read(self, mut requests: Streaming<ModelInferRequest>) {
        loop {
            // A place first: a request is not read before it can be taken.
            let read = async {
                let place = self.window.place().await;
                (place, requests.message().await)
            };
            let (place, message) = tokio::select! {
                read = read => read,
                () = self.queue.closed() => return,
            };
            let received = self.service.now();
            match message {
                Ok(Some(message)) => {
                    // A refusal names no model, as in Triton: there may be none of this name.
                    let refused = Named { id: message.id.clone(), model: String::new() };
                    match self.begin(message, received) {
                        Ok(begun) if begun.responses.is_decoupled() => {
                            tokio::spawn(begun.forward(self.producer.clone(), (self.window.clone(), place)));
                        }
                        Ok(begun) => {
                            let running = self.running(begun.only(self.window.clone()), place).await;
                            let _ = self.queue.send(Ok(running));
                        }
                        Err(error) => {
                            let answer = std::future::ready(failure(&refused, error, true));
                            let _ = self.queue.send(Ok(self.running(answer, place).await));
                        }
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(%error, "a stream of requests broke off");
                    if error.code() != tonic::Code::Cancelled {
                        let code = error.code() as u16;
                        self.service.record_answered(Protocol::Grpc, Route::StreamInfer, code, Some(Reason::Malformed));
                        let _ = self.queue.send(Err(error));
                    }
                    return;
                }
            }
        }
    }

    /// Hands a request to the engine.
    fn begin(&self, message: ModelInferRequest, received: Instant) -> Result<Begun<S>, InferError> {
        let request = Named { id: message.id.clone(), model: message.model_name.clone() };
        let traced = trace::begin(&self.service, &message.model_name, &self.metadata);
        let begun = self.begin_traced(message, received, traced.as_ref());
        let (responses, wants_empty) = begun.inspect_err(|error| GRPC.refused(traced.as_ref(), received, error))?;
        Ok(Begun { request, responses, wants_empty, traced, counting: self.counting() })
    }

    /// The responses to a request, and whether an end without outputs is told too.
    fn begin_traced(
        &self,
        message: ModelInferRequest,
        received: Instant,
        traced: Option<&Traced>,
    ) -> Result<(S::Responses, bool), InferError> {
        let mut decoded = codec::decode_for((message, Inputs::default()), &self.service)?;
        self.forwarded.add_to(&mut decoded);
        decoded.timeline.received = received;
        GRPC.received(traced, self.service.now(), &mut decoded);
        decoded.timeline.request_start = self.service.now();
        let wants_empty = decoded.empty_final_response;
        Ok((self.service.stream(decoded)?, wants_empty))
    }

    fn counting(&self) -> Counting<S> {
        Counting { service: self.service.clone(), counted: false }
    }

    /// Starts to answer a request of an ordinary model. It is polled once here, so that the requests of a stream reach the
    /// engine in their order, which sequences rely on; only waiting for the answer is left to a task.
    async fn running(&self, answer: impl Future<Output = Answer> + Send + 'static, place: Place) -> Running<S> {
        let mut answer = Box::pin(answer);
        let at_once = std::future::poll_fn(|cx| {
            Poll::Ready(match answer.as_mut().poll(cx) {
                Poll::Ready(answer) => Some(answer),
                Poll::Pending => None,
            })
        });
        let task = match at_once.await {
            Some(answer) => tokio::spawn(std::future::ready(answer)),
            None => tokio::spawn(answer),
        };
        Running { task, counting: self.counting(), _place: place }
    }
}

/// What the answers to a request repeat of it.
struct Named {
    id: String,
    model: String,
}

/// A request that the engine has taken.
struct Begun<S: Service> {
    request: Named,
    responses: S::Responses,
    /// An end without outputs is told too.
    wants_empty: bool,
    traced: Option<Traced>,
    counting: Counting<S>,
}

impl<S: Service> Begun<S> {
    /// The answer of an ordinary model. It is counted where it leaves.
    fn only(mut self, window: Window) -> impl Future<Output = Answer> + Send + 'static {
        self.counting.counted = true;
        async move {
            let answer = match self.responses.next().await {
                Some(streamed) => message(&self.request, streamed),
                None => failure(&self.request, InferError::internal("the model gave no answer"), true),
            };
            request_trace::complete(self.traced.as_ref());
            window.saw(answer.bytes());
            Answer { traced: self.traced, ..answer }
        }
    }

    /// Passes the responses of a decoupled model on as they come, until the last, or until nobody reads them.
    async fn forward(mut self, to: mpsc::Sender<Answer>, (window, _place): (Window, Place)) {
        let (mut failed, mut bytes, mut largest) = (None, 0, 0);
        loop {
            let next = tokio::select! {
                next = self.responses.next() => next,
                () = to.closed() => return,
            };
            let Some(streamed) = next else { break };
            let (last, silent) = (streamed.last, streamed.empty && !self.wants_empty);
            let answer = message(&self.request, streamed);
            failed = failed.or(answer.failed);
            // So much of them may wait to be read.
            (bytes, largest) = (bytes + answer.bytes(), answer.bytes().max(largest));
            window.saw(bytes.min(largest.saturating_mul(UNREAD_RESPONSES.into())));
            if last {
                // Before the last response leaves, as ever.
                self.counting.count(failed);
                request_trace::complete(self.traced.as_ref());
            }
            let answer = Answer { traced: self.traced.clone(), ..answer };
            if !silent && to.send(answer).await.is_err() {
                return;
            }
        }
    }
}

fn message(request: &Named, streamed: Streamed) -> Answer {
    let Streamed { answer, last, empty } = streamed;
    match answer {
        Ok(response) if empty => {
            let (id, model_name) = (response.id, response.model_name);
            let response = ModelInferResponse { id, model_name, ..ModelInferResponse::default() };
            let infer_response = Some(finally(response, last));
            Answer {
                message: ModelStreamInferResponse { error_message: String::new(), infer_response },
                failed: None,
                traced: None,
            }
        }
        Ok(response) => Answer {
            message: ModelStreamInferResponse {
                error_message: String::new(),
                infer_response: Some(finally(codec::encode(response), last)),
            },
            failed: None,
            traced: None,
        },
        Err(error) => failure(request, error, last),
    }
}

fn failure(request: &Named, error: InferError, last: bool) -> Answer {
    let (id, model_name) = (request.id.clone(), request.model.clone());
    let response = finally(ModelInferResponse { id, model_name, ..ModelInferResponse::default() }, last);
    Answer {
        message: ModelStreamInferResponse { error_message: error.message, infer_response: Some(response) },
        failed: Some((error.code, error.reason)),
        traced: None,
    }
}

fn finally(mut response: ModelInferResponse, last: bool) -> ModelInferResponse {
    response.parameters.insert(FINAL_RESPONSE.to_owned(), codec::parameter(Parameter::Bool(last)));
    response
}

impl<S: Service> Answers<S> {
    /// The next answer of an ordinary model, in the order of the requests; `None` when there will be no more.
    fn poll_ordered(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Answer, Status>>> {
        if self.queue_ended {
            return Poll::Ready(None);
        }
        if self.first.is_none() {
            match ready!(self.queue.poll_recv(cx)) {
                Some(Ok(running)) => self.first = Some(running),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.queue_ended = true,
            }
        }
        let Some(running) = &mut self.first else { return Poll::Ready(None) };
        let answer = ready!(Pin::new(&mut running.task).poll(cx)).unwrap_or_else(|error| {
            let unnamed = Named { id: String::new(), model: String::new() };
            failure(&unnamed, InferError::internal(format!("answering the request broke off: {error}")), true)
        });
        running.counting.count(answer.failed);
        self.first = None;
        Poll::Ready(Some(Ok(answer)))
    }

    /// The next answer of either kind.
    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Answer, Status>>> {
        let mut over = true;
        for turn in 0..2 {
            let next = match self.produced_last == (turn == 0) {
                true => self.poll_ordered(cx),
                false => self.produced.poll_recv(cx).map(|answer| answer.map(Ok)),
            };
            match next {
                Poll::Ready(Some(answer)) => {
                    self.produced_last = self.produced_last != (turn == 0);
                    return Poll::Ready(Some(answer));
                }
                Poll::Ready(None) => {}
                Poll::Pending => over = false,
            }
        }
        if over { Poll::Ready(None) } else { Poll::Pending }
    }

    /// Nothing follows: what is still open is given up.
    fn end(&mut self) {
        self.ended = true;
        self.queue.close();
        self.produced.close();
        self.first = None;
        self.sending = None;
    }
}

impl<S: Service> Stream for Answers<S> {
    type Item = Result<ModelStreamInferResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        this.sending = None;
        if this.ended {
            return Poll::Ready(None);
        }
        if this.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready()) {
            this.end();
            return Poll::Ready(Some(Err(status(deadline::exceeded()))));
        }
        let answer = this.poll_answer(cx);
        this.window.starved(answer.is_pending());
        match ready!(answer) {
            None => {
                this.end();
                Poll::Ready(None)
            }
            Some(Err(error)) => {
                this.end();
                Poll::Ready(Some(Err(error)))
            }
            Some(Ok(Answer { message, failed: Some((code, reason)), .. })) if this.wants_status => {
                this.end();
                Poll::Ready(Some(Err(status(InferError::new(code, reason, message.error_message)))))
            }
            Some(Ok(answer)) => {
                this.sending = answer.traced.map(|traced| {
                    GRPC.send_starts(&traced);
                    GRPC.sending(traced)
                });
                Poll::Ready(Some(Ok(answer.message)))
            }
        }
    }
}
