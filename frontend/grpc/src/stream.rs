//! `ModelStreamInfer`. As many requests run concurrently as the [window](super::window) admits.
//! Answers of ordinary models keep the order of their requests; responses of decoupled models are
//! sent as they are produced. An error is an answer and does not end the stream.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::Parameter;
use pharos::request_trace::Traced;
use pharos::service::{OpenStream, Protocol, Responses, SharedService, Streamed, UNREAD_RESPONSES};
use pharos_os::clock;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Sleep, sleep};
use tonic::codegen::tokio_stream::Stream;
use tonic::metadata::MetadataMap;
use tonic::{Status, Streaming};

use super::call::status;
use super::codec::{self, FINAL_RESPONSE};
use super::large_tensors::Inputs;
use super::proto::{ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use super::window::{OpenRequest, Window};
use pharos_edge::{Call, Sending, SharedCall, deadline};

/// The number of responses of all decoupled models of one stream that may wait to be sent.
const WAITING: usize = 4;

/// One answer and, if it is an error, its cause.
struct Answer {
    message: ModelStreamInferResponse,
    failed: Option<(ErrorCode, Reason)>,
    /// The trace of the request, if it is sampled.
    traced: Option<Traced>,
}

impl Answer {
    /// Returns the size of the answer's tensors in bytes.
    fn bytes(&self) -> u64 {
        let outputs =
            self.message.infer_response.iter().flat_map(|response| &response.raw_output_contents);
        outputs.map(|output| output.len() as u64).sum()
    }
}

/// A request to an ordinary model that is being answered. Dropping it cancels the request.
struct Running {
    task: JoinHandle<Answer>,
    call: Call,
    _place: OpenRequest,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The answers of a stream.
pub(super) struct Answers {
    /// The requests in order. An error is the last entry: the data that followed could not be read
    /// as a request.
    queue: mpsc::UnboundedReceiver<Result<Running, Status>>,
    first: Option<Running>,
    /// Whether the queue is closed and empty.
    queue_ended: bool,
    /// The responses of decoupled models.
    produced: mpsc::Receiver<Answer>,
    /// Whether a decoupled model was polled last; alternating prevents one kind from starving the
    /// other.
    produced_last: bool,
    window: Window,
    errors_as_status: bool,
    /// The last answer handed out; polling for the next one means that it was sent.
    sending: Option<Sending>,
    /// The client's deadline.
    deadline: Option<Pin<Box<Sleep>>>,
    ended: bool,
    _open: OpenStream,
}

/// The client's options for a stream.
pub(super) struct StreamOptions {
    /// Whether an error ends the stream as its status (`triton_grpc_error: true`).
    pub(super) errors_as_status: bool,
    /// The metadata of the call.
    pub(super) metadata: MetadataMap,
    /// The call, which leaves the count to its requests.
    pub(super) call: SharedCall,
}

/// Starts answering the requests of a stream.
pub(super) fn answer(
    requests: Streaming<ModelInferRequest>,
    service: SharedService,
    options: StreamOptions,
) -> Answers {
    let (sender, queue) = mpsc::unbounded_channel();
    let (producer, produced) = mpsc::channel(WAITING);
    let open = service.stream_open(Protocol::Grpc);
    let StreamOptions { errors_as_status, metadata, call } = options;
    let deadline = call.lock().deadline().map(|deadline| Box::pin(sleep(deadline.limit)));
    let window = Window::default();
    let reading =
        Reading { service, queue: sender, producer, window: window.clone(), metadata, call };
    tokio::spawn(reading.read(requests));
    Answers {
        queue,
        first: None,
        queue_ended: false,
        produced,
        produced_last: false,
        window,
        errors_as_status,
        sending: None,
        deadline,
        ended: false,
        _open: open,
    }
}

/// The part of a stream that reads requests.
struct Reading {
    service: SharedService,
    /// Bounded by the number of places in the window.
    queue: mpsc::UnboundedSender<Result<Running, Status>>,
    producer: mpsc::Sender<Answer>,
    window: Window,
    metadata: MetadataMap,
    call: SharedCall,
}

impl Reading {
    /// Reads requests until the client ends its side, the connection fails, or the answers are no
    /// longer read.
    async fn read(self, mut requests: Streaming<ModelInferRequest>) {
        loop {
            // Wait for a place first: a request must not be read before it can be admitted.
            let read = async {
                let place = self.window.admit().await;
                (place, requests.message().await)
            };
            let (place, message) = tokio::select! {
                read = read => read,
                () = self.queue.closed() => return,
            };
            let received = self.service.now();
            match message {
                Ok(Some(message)) => {
                    let mut call = {
                        let mut call = self.call.lock();
                        call.name_model(&message.model_name, &message.model_version);
                        call.child(received)
                    };
                    // As in Triton, an error before execution has no model name: the model may not
                    // exist.
                    let refused = Named { id: message.id.clone(), model: String::new() };
                    let begun = tokio::select! {
                        begun = self.begin(message, &mut call) => begun,
                        () = self.queue.closed() => return,
                    };
                    match begun {
                        Ok(begun) if begun.responses.is_decoupled() => {
                            tokio::spawn(begun.forward(
                                call,
                                self.producer.clone(),
                                self.window.clone(),
                                place,
                            ));
                        }
                        Ok(begun) => {
                            let answer = begun.only(call.traced().cloned(), self.window.clone());
                            let _ = self.queue.send(Ok(running(call, answer, place).await));
                        }
                        Err(error) => {
                            let answer = std::future::ready(failure(&refused, error, true));
                            let _ = self.queue.send(Ok(running(call, answer, place).await));
                        }
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(%error, "reading a request stream failed");
                    if error.code() != tonic::Code::Cancelled {
                        self.call.lock().child(received).count_and_log_code(error.code() as u16);
                        let _ = self.queue.send(Err(error));
                    }
                    return;
                }
            }
        }
    }

    /// Passes a request to the engine. Its error is counted with the answer.
    async fn begin(
        &self,
        message: ModelInferRequest,
        call: &mut Call,
    ) -> Result<Begun, InferError> {
        let request = Named { id: message.id.clone(), model: message.model_name.clone() };
        call.begin_trace(&message.model_name, self.metadata.as_ref());
        let begun = self.begin_traced(message, call).await;
        let (responses, wants_empty) = begun.inspect_err(|error| call.has_failed(error))?;
        Ok(Begun { request, responses, wants_empty })
    }

    /// Returns the responses to a request, and whether an empty final response is sent too.
    async fn begin_traced(
        &self,
        message: ModelInferRequest,
        call: &mut Call,
    ) -> Result<(Box<dyn Responses>, bool), InferError> {
        let mut decoded = codec::decode_for(message, Inputs::default(), &*self.service).await?;
        call.describe_client_in(&mut decoded, self.service.now());
        let wants_empty = decoded.empty_final_response;
        // The next request of the stream waits too, because the requests of a sequence must stay in
        // order.
        self.service
            .demand(&decoded.model_name, &decoded.model_version, decoded.timeout_us)
            .await?;
        Ok((self.service.stream(*decoded)?, wants_empty))
    }
}

/// Starts to answer a request of an ordinary model. Polls the answer once in place, so that the
/// requests of a stream reach the engine in order, as sequences require; a task then waits for the
/// answer.
async fn running(
    call: Call,
    answer: impl Future<Output = Answer> + Send + 'static,
    place: OpenRequest,
) -> Running {
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
    Running { task, call, _place: place }
}

/// The fields of a request that its answers repeat.
struct Named {
    id: String,
    model: String,
}

/// A request that the engine has accepted.
struct Begun {
    request: Named,
    responses: Box<dyn Responses>,
    /// Whether an empty final response is sent too.
    wants_empty: bool,
}

impl Begun {
    /// Returns the answer of an ordinary model. The request is counted when the answer is sent.
    fn only(
        self,
        traced: Option<Traced>,
        window: Window,
    ) -> impl Future<Output = Answer> + Send + 'static {
        let Self { request, mut responses, .. } = self;
        async move {
            let answer = match responses.next_response().await {
                Some(streamed) => message(&request, streamed),
                None => failure(&request, InferError::internal("the model sent no response"), true),
            };
            if let Some(traced) = &traced {
                traced.last_response(clock::now());
            }
            window.record_size(answer.bytes());
            Answer { traced, ..answer }
        }
    }

    /// Forwards the responses of a decoupled model until the last one, or until the answers are no
    /// longer read. `_place` counts the request as open for as long.
    async fn forward(
        mut self,
        mut call: Call,
        to: mpsc::Sender<Answer>,
        window: Window,
        _place: OpenRequest,
    ) {
        let mut failed = None;
        let mut bytes = 0;
        let mut largest = 0;
        loop {
            let next = tokio::select! {
                next = self.responses.next_response() => next,
                () = to.closed() => return,
            };
            let Some(streamed) = next else { break };
            let last = streamed.last;
            let silent = streamed.empty && !self.wants_empty;
            let answer = message(&self.request, streamed);
            failed = failed.or(answer.failed);
            // At most `UNREAD_RESPONSES` responses may wait to be read.
            bytes += answer.bytes();
            largest = largest.max(answer.bytes());
            window.record_size(bytes.min(largest.saturating_mul(UNREAD_RESPONSES.into())));
            if last {
                // Count before the last response is sent, as for other requests.
                end(&mut call, failed);
                call.has_responded();
            }
            let answer = Answer { traced: call.traced().cloned(), ..answer };
            if !silent && to.send(answer).await.is_err() {
                return;
            }
        }
    }
}

/// Ends a request with its last answer.
fn end(call: &mut Call, failed: Option<(ErrorCode, Reason)>) {
    let code = failed.map_or(0, |(code, _)| u16::try_from(code.grpc_code()).unwrap_or_default());
    call.count_and_log(code, failed.map(|(_, reason)| reason));
}

fn message(request: &Named, streamed: Streamed) -> Answer {
    let Streamed { answer, last, empty } = streamed;
    match answer {
        Ok(response) if empty => {
            let id = response.id;
            let model_name = response.model_name;
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
    let id = request.id.clone();
    let model_name = request.model.clone();
    let response =
        finally(ModelInferResponse { id, model_name, ..ModelInferResponse::default() }, last);
    Answer {
        message: ModelStreamInferResponse {
            error_message: error.message,
            infer_response: Some(response),
        },
        failed: Some((error.code, error.reason)),
        traced: None,
    }
}

fn finally(mut response: ModelInferResponse, last: bool) -> ModelInferResponse {
    response.parameters.insert(FINAL_RESPONSE.to_owned(), codec::parameter(Parameter::Bool(last)));
    response
}

impl Answers {
    /// Polls the next answer of an ordinary model, in the order of the requests; `None` after the
    /// last.
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
            failure(
                &unnamed,
                InferError::internal(format!("the task that answers the request failed: {error}")),
                true,
            )
        });
        end(&mut running.call, answer.failed);
        self.first = None;
        Poll::Ready(Some(Ok(answer)))
    }

    /// Polls the next answer of either kind.
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

    /// Ends the stream and cancels all open requests.
    fn end(&mut self) {
        self.ended = true;
        self.queue.close();
        self.produced.close();
        self.first = None;
        self.sending = None;
    }
}

impl Stream for Answers {
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
        this.window.set_starved(answer.is_pending());
        match ready!(answer) {
            None => {
                this.end();
                Poll::Ready(None)
            }
            Some(Err(error)) => {
                this.end();
                Poll::Ready(Some(Err(error)))
            }
            Some(Ok(Answer { message, failed: Some((code, reason)), .. }))
                if this.errors_as_status =>
            {
                this.end();
                Poll::Ready(Some(Err(status(InferError::new(code, reason, message.error_message)))))
            }
            Some(Ok(answer)) => {
                this.sending = answer.traced.map(|traced| Sending::begin(Protocol::Grpc, traced));
                Poll::Ready(Some(Ok(answer.message)))
            }
        }
    }
}
