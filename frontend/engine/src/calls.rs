//! Calls that models make to the server while they run: requests to other models, and loading,
//! unloading and readiness of models.
//!
//! A call is an ordinary request to the other model. It is counted and scheduled there, and traced
//! as a step of the calling request. The response is copied once, into the memory of the calling
//! worker. Responses before the last one wait while the caller has [`CREDITS`] responses that it
//! has not read yet.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{InferInput, InferRequest, InferResponse, RequestedOutput};
use pharos::model::{CodeOrigin, Isolation, SandboxChoice};
use pharos::request_trace::Traced;
use pharos::tensor::Tensor;
use pharos::wire::{Answer, CREDITS, Call, CallInput, Manage, ToWorker, Verb};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::memory::overlap;
use crate::scheduler::{Driver, Streamed};
use crate::wire::SharedLink;
use pharos_os::clock;

/// A future that runs in the background.
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The models that may be called.
pub(crate) trait Models: Send + Sync {
    /// Starts a request to one of them.
    ///
    /// # Errors
    /// The model cannot infer now, the request does not fit it, or it is decoupled and
    /// `may_be_many` is false.
    fn infer(
        self: Arc<Self>,
        request: InferRequest,
        may_be_many: bool,
    ) -> Result<Box<dyn CallResponses>, InferError>;

    /// Loads or unloads a model for a worker, or answers a question about it.
    fn manage(
        self: Arc<Self>,
        caller: Arc<Caller>,
        model: String,
        verb: Verb,
    ) -> BoxFuture<Result<bool, InferError>>;
}

/// The model whose worker calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller {
    /// The name of the model.
    pub(crate) model: String,
    /// The source of its code.
    pub(crate) origin: CodeOrigin,
    /// The sandbox of the worker.
    pub(crate) sandbox: SandboxChoice,
}

impl Caller {
    /// Returns whether the model has less rights than a model of the operator without a sandbox.
    pub(crate) fn is_restricted(&self) -> bool {
        self.origin == CodeOrigin::Request || self.sandbox.isolation != Isolation::None
    }
}

/// The responses to a request. Dropping it before the last response cancels the request.
pub(crate) trait CallResponses: Send {
    /// Returns the next response, or `None` after the last. Polling again means that the caller has
    /// taken the previous one.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>>;
}

/// The calls of one worker. Dropping it cancels them.
pub(crate) struct Calls {
    context: Arc<CallContext>,
}

struct CallContext {
    link: SharedLink,
    driver: Arc<Driver>,
    models: Weak<dyn Models>,
    caller: Arc<Caller>,
    // Held only for short lookups and changes of the map.
    under_way: Mutex<HashMap<u64, CallInProgress>>,
}

struct CallInProgress {
    task: Option<AbortHandle>,
    /// The number of further responses that may be sent before the caller reads some.
    credit: Arc<Semaphore>,
    taken: u64,
}

impl Calls {
    /// Creates the call table of the worker at the other end of `link`, which runs an instance of
    /// `driver`.
    pub(crate) fn new(
        link: SharedLink,
        driver: Arc<Driver>,
        models: Weak<dyn Models>,
        caller: Arc<Caller>,
    ) -> Self {
        Self {
            context: Arc::new(CallContext {
                link,
                driver,
                models,
                caller,
                under_way: Mutex::default(),
            }),
        }
    }

    /// Starts a request to another model.
    pub(crate) fn infer(&self, call: Call) {
        let number = call.call;
        let credit = Arc::new(Semaphore::new(CREDITS as usize));
        let request = self.context.request(&call);
        let decoupled = call.request.decoupled;
        let context = self.context.clone();
        let own = credit.clone();
        self.begin(number, credit, async move {
            let outcome = match request {
                Ok(request) => context.infer(number, decoupled, request, &own).await,
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                context.fail(number, error);
            }
            context.lock().remove(&number);
        });
    }

    /// Starts a repository request: load, unload or readiness of a model.
    pub(crate) fn manage(&self, manage: Manage) {
        let Manage { call, model, verb } = manage;
        let context = self.context.clone();
        self.begin(call, Arc::new(Semaphore::new(0)), async move {
            let outcome = match context.models.upgrade() {
                Some(models) => models.manage(context.caller.clone(), model, verb).await,
                None => Err(InferError::cancelled()),
            };
            match outcome {
                Ok(holds) => context.answer(Answer {
                    call,
                    holds,
                    last: true,
                    empty: true,
                    ..Answer::default()
                }),
                Err(error) => context.fail(call, error),
            }
            context.lock().remove(&call);
        });
    }

    fn begin(
        &self,
        call: u64,
        credit: Arc<Semaphore>,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let known =
            self.context.lock().insert(call, CallInProgress { task: None, credit, taken: 0 });
        if let Some(task) = known.and_then(|known| known.task) {
            task.abort();
        }
        let task = tokio::spawn(work).abort_handle();
        // The task may have ended already.
        if let Some(under_way) = self.context.lock().get_mut(&call) {
            under_way.task = Some(task);
        }
    }

    /// Handles the caller's notice that it has read `taken` responses of the call in total.
    pub(crate) fn taken(&self, call: u64, taken: u64) {
        if let Some(under_way) = self.context.lock().get_mut(&call) {
            let more = taken.saturating_sub(under_way.taken).min(CREDITS.into());
            under_way.taken = taken.max(under_way.taken);
            under_way.credit.add_permits(usize::try_from(more).unwrap_or(0));
        }
    }

    /// Cancels a call that the caller has cancelled or dropped. A caller that still reads gets an
    /// error as the last response.
    pub(crate) fn abandon(&self, call: u64) {
        let under_way = self.context.lock().remove(&call);
        if let Some(CallInProgress { task: Some(task), .. }) = under_way {
            task.abort();
            self.context.fail(call, InferError::cancelled());
        }
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        for (_, under_way) in self.context.lock().drain() {
            if let Some(task) = under_way.task {
                task.abort();
            }
        }
    }
}

impl CallContext {
    /// Builds the request of a call. Releases all memory that the call names, even if the request
    /// is invalid, unless its inputs overlap: a worker that follows the protocol never sends that.
    fn request(&self, call: &Call) -> Result<InferRequest, InferError> {
        let link = &self.link;
        let own = call.inputs.iter().filter(|input| input.loan.is_none());
        if overlap(own.map(|input| (input.offset, input.len))) {
            return Err(InferError::internal("the inputs of a call overlap"));
        }
        let data: Vec<Option<Bytes>> =
            call.inputs.iter().map(|input| bytes_of(link, input)).collect();
        let mut inputs = Vec::new();
        for (input, data) in call.inputs.iter().zip(data) {
            let CallInput { name, datatype, shape, .. } = input;
            let data = data.ok_or_else(|| {
                InferError::internal(format!("input '{name}' is not in shared memory"))
            })?;
            let tensor = Tensor { datatype: *datatype, shape: shape.clone(), data: data.into() };
            inputs.push(InferInput { name: name.clone(), tensor });
        }
        let mut outputs = Vec::new();
        for name in &call.request.outputs {
            outputs.push(RequestedOutput { name: name.clone(), ..RequestedOutput::default() });
        }
        let mut request = InferRequest {
            model_name: call.request.model.clone(),
            model_version: call.request.version.clone(),
            id: call.request.id.clone(),
            inputs,
            outputs,
            parameters: call.request.parameters.clone(),
            priority: call.request.priority,
            timeout_us: call.request.timeout_us,
            correlation_id: call.request.correlation.clone(),
            sequence_start: call.request.start,
            sequence_end: call.request.end,
            ..InferRequest::default()
        };
        if let Some(parent) = call
            .request
            .parent
            .and_then(|(batch, position)| self.driver.request_at(batch, position))
        {
            request.tenant = parent.request.tenant;
            request.trace = parent.request.trace;
            request.leaves_at = parent.request.leaves_at;
            request.traced = parent.request.traced.as_ref().map(Traced::step);
        }
        let now = clock::now();
        request.timeline.received = now;
        request.timeline.request_start = now;
        Ok(request)
    }

    async fn infer(
        &self,
        call: u64,
        may_be_many: bool,
        request: InferRequest,
        credit: &Semaphore,
    ) -> Result<(), InferError> {
        let models = self.models.upgrade().ok_or_else(InferError::cancelled)?;
        let mut answers = models.infer(request, may_be_many)?;
        while let Some(streamed) = poll_fn(|cx| answers.poll_next(cx)).await {
            if !streamed.last {
                credit.acquire().await.map_err(|_| InferError::cancelled())?.forget();
            }
            let last = streamed.last;
            self.respond(call, streamed);
            if last {
                return Ok(());
            }
        }
        Err(InferError::internal("the model's responses ended without a final response"))
    }

    fn respond(&self, call: u64, Streamed { answer, last, empty }: Streamed) {
        let lent = answer.and_then(|response| {
            let InferResponse { model_version, parameters, outputs, .. } = response;
            let (loan, outputs) = self.link.lend_tensors(outputs)?;
            Ok(Answer {
                call,
                version: model_version,
                outputs,
                loan,
                parameters,
                empty,
                last,
                ..Answer::default()
            })
        });
        match lent {
            Ok(answer) => self.answer(answer),
            Err(error) => {
                self.answer(Answer { call, error: Some(error.into()), last, ..Answer::default() })
            }
        }
    }

    fn fail(&self, call: u64, error: InferError) {
        self.answer(Answer { call, error: Some(error.into()), last: true, ..Answer::default() });
    }

    fn answer(&self, answer: Answer) {
        let call = answer.call;
        let loan = answer.loan;
        let last = answer.last;
        if !self.link.send(&ToWorker::Answer(answer)) {
            self.link.give_back(&[loan]);
            let text = "the ids and parameters of the response are too long for the calling worker";
            let error = Some(InferError::new(ErrorCode::Internal, Reason::TooLarge, text).into());
            self.link.send(&ToWorker::Answer(Answer { call, error, last, ..Answer::default() }));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, CallInProgress>> {
        self.under_way.lock()
    }
}

/// The error of a request that was refused before it reached the model; Triton's text.
pub(crate) fn refused(model: &str, error: InferError) -> InferError {
    let text = format!("Model {model} - Error when running inference: {}", error.message);
    error.with_message(text)
}

/// The text of a model that is not ready; Triton's text.
pub(crate) fn not_ready(model: &str) -> String {
    format!("Failed for execute the inference request. Model '{model}' is not ready.")
}

/// The text of a decoupled model that was called without `decoupled=True`; Triton's text.
pub(crate) fn decoupled(model: &str) -> String {
    format!(
        "Model {model} is using the decoupled. The current BLS request call doesn't support \
         models using the decoupled transaction policy. Please use 'decoupled=True' argument to \
         the 'exec' or 'async_exec' calls for decoupled models.'"
    )
}

/// Returns the bytes of an input that a worker passes.
fn bytes_of(link: &SharedLink, input: &CallInput) -> Option<Bytes> {
    match input.loan {
        Some(key) => link.passed_on(key, input.offset, input.len),
        None => link.arenas.outputs.take(input.offset, input.len),
    }
}
