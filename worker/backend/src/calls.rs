//! Calls from a backend to other models of the server: inference, loading, unloading and readiness.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pharos::error::InferError;
use pharos::infer::Parameters;
use pharos::tensor::DataType;
use pharos::wire::{self, Answer, CallRequest, Manage, ToFrontend, Verb};

use crate::error::run_error;
use crate::received::{Loan, Memory, Received};
use crate::reply::Content;
use crate::session::{Runtime, Session};

/// A request to another model.
#[derive(Default)]
pub struct Call {
    /// The model and version to call, and the request's attributes. Its `parent` is the
    /// [`Responder::place`](crate::Responder::place) of the request on whose behalf the call is
    /// made.
    pub request: CallRequest,
    /// Its inputs.
    pub inputs: Vec<CallInput>,
}

/// An input of a [`Call`].
pub struct CallInput {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its bytes, in the format of outputs.
    pub content: Content,
}

/// An answer to a [`Call`].
pub struct Called {
    /// The model that has answered.
    pub model: String,
    /// Its version.
    pub version: String,
    /// The request's id.
    pub id: String,
    /// The response's parameters.
    pub parameters: Parameters,
    /// Its outputs; empty in a response that only marks the end.
    pub outputs: Vec<CalledOutput>,
    /// Whether it only marks the end of the responses.
    pub is_end: bool,
}

/// An output of a [`Called`].
pub struct CalledOutput {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its bytes.
    pub data: Received,
}

/// The answers of a call in progress. Dropping this before the last answer cancels the call.
pub struct Pending {
    session: Arc<Session>,
    call: u64,
    model: String,
    id: String,
    taken: u64,
    ended: bool,
    /// Inputs that are passed on, kept alive while they may be read.
    _lent: Vec<Received>,
}

/// Cancels a call from any thread, even while another thread waits for its answers. Answers that
/// the server has already sent are still delivered; the last one is the error of a cancelled
/// request.
pub struct Canceller {
    session: Arc<Session>,
    call: u64,
}

impl Canceller {
    /// Cancels the call. Has no effect once its last answer has been sent.
    pub fn cancel(&self) {
        self.session.arenas.send(&ToFrontend::CancelCall(self.call));
    }
}

impl Runtime {
    /// Starts an inference by another model. The request is in progress when this returns.
    ///
    /// # Errors
    /// There is no memory for an input, or its strings are too long for a message. Errors of the
    /// other model are returned as answers.
    pub fn call(&self, call: Call) -> Result<Pending, InferError> {
        let number = self.begin_call();
        let mut inputs = Vec::new();
        let mut memories = Vec::new();
        let mut lent = Vec::new();
        for input in call.inputs {
            let CallInput { name, datatype, shape, content } = input;
            let passed_on = match content {
                Content::Received(bytes) => {
                    match bytes.loan().and_then(|loan| Some((loan.offset_of(&bytes)?, loan.key))) {
                        Some((offset, key)) => {
                            inputs.push(wire::CallInput {
                                name,
                                datatype,
                                shape,
                                offset,
                                len: bytes.len() as u64,
                                loan: Some(key),
                            });
                            lent.push(bytes);
                            continue;
                        }
                        None => Memory::copy_of(&self.session().arenas, &bytes),
                    }
                }
                Content::Memory(memory) => Ok(memory),
                Content::Placed(_) => {
                    Err(run_error("an input of a call cannot be in a client's memory"))
                }
            };
            let memory = passed_on.inspect_err(|_| self.end_call(number))?;
            let (offset, len) = memory.place();
            inputs.push(wire::CallInput { name, datatype, shape, offset, len, loan: None });
            memories.push(memory);
        }
        let model = call.request.model.clone();
        let id = call.request.id.clone();
        let frame = ToFrontend::Call(wire::Call { call: number, request: call.request, inputs });
        self.session()
            .arenas
            .sender
            .send_if_it_fits(&frame)
            .inspect_err(|_| self.end_call(number))?;
        memories.into_iter().for_each(Memory::sent);
        Ok(Pending {
            session: self.session().clone(),
            call: number,
            model,
            id,
            taken: 0,
            ended: false,
            _lent: lent,
        })
    }

    /// Loads or reloads a model. `files` override the model's files and are named as in the
    /// repository extension: `config` for its configuration as JSON, `file:PATH` for a file of its
    /// directory.
    ///
    /// # Errors
    /// The server's reason, or the files together exceed the size limit of a message
    /// ([`pharos::wire::MAX_FRAME`]).
    pub fn load_model(&self, name: &str, files: Vec<(String, Vec<u8>)>) -> Result<(), InferError> {
        self.manage(name, Verb::Load(files)).map(drop)
    }

    /// Unloads a model and, with `dependents`, the models that only it needs.
    ///
    /// # Errors
    /// The server's reason.
    pub fn unload_model(&self, name: &str, dependents: bool) -> Result<(), InferError> {
        self.manage(name, Verb::Unload(dependents)).map(drop)
    }

    /// Returns whether a version of a model (empty: any version) is ready for inference.
    ///
    /// # Errors
    /// The version is not a number, or the server is stopping.
    pub fn model_ready(&self, name: &str, version: &str) -> Result<bool, InferError> {
        self.manage(name, Verb::IsReady(version.to_owned())).map(|answer| answer.holds)
    }

    /// Returns whether a version of a model (empty: the latest) may send any number of responses to
    /// a request.
    ///
    /// # Errors
    /// The version is not a number, or the model is not ready.
    pub fn model_is_decoupled(&self, name: &str, version: &str) -> Result<bool, InferError> {
        self.manage(name, Verb::IsDecoupled(version.to_owned())).map(|answer| answer.holds)
    }

    fn manage(&self, model: &str, verb: Verb) -> Result<Answer, InferError> {
        let call = self.begin_call();
        let frame = ToFrontend::Manage(Manage { call, model: model.to_owned(), verb });
        let answer = self
            .session()
            .arenas
            .sender
            .send_if_it_fits(&frame)
            .map(|()| self.session().next_answer(call));
        self.end_call(call);
        let answer = answer?.ok_or_else(InferError::cancelled)?;
        answer.error.clone().map_or(Ok(answer), |error| Err(error.into()))
    }

    fn begin_call(&self) -> u64 {
        let call = self.session().next_call.fetch_add(1, Ordering::Relaxed);
        self.session().connection.lock().calls.insert(call, VecDeque::new());
        call
    }

    fn end_call(&self, call: u64) {
        self.session().forget_call(call);
    }
}

impl Session {
    /// Returns the next answer to a call; `None` if the connection is closed.
    fn next_answer(&self, call: u64) -> Option<Answer> {
        self.connection.wait(|state| match state.calls.get_mut(&call) {
            Some(answers) => answers.pop_front().map(Some),
            None => Some(None),
        })?
    }

    /// Removes a finished call and returns the loans that its unread answers hold.
    fn forget_call(&self, call: u64) {
        let unread = self.connection.lock().calls.remove(&call).unwrap_or_default();
        let loans: Vec<u64> =
            unread.iter().map(|answer| answer.loan).filter(|loan| *loan != 0).collect();
        if !loans.is_empty() {
            self.arenas.send(&ToFrontend::Returned(loans));
        }
    }
}

/// Waits for each answer; ends after the last one. A last response without content is returned as
/// well.
impl Iterator for Pending {
    type Item = Result<Called, InferError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let Some(answer) = self.session.next_answer(self.call) else {
            self.ended = true;
            return Some(Err(InferError::cancelled()));
        };
        self.taken += 1;
        self.ended = answer.last;
        if !answer.last {
            self.session.arenas.send(&ToFrontend::Taken(self.call, self.taken));
        }
        Some(self.called(answer))
    }
}

impl Pending {
    /// Whether the last answer has been returned.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Returns a handle that cancels the call.
    pub fn canceller(&self) -> Canceller {
        Canceller { session: self.session.clone(), call: self.call }
    }

    fn called(&self, answer: Answer) -> Result<Called, InferError> {
        let blocks = answer.outputs.iter().map(|output| (output.offset, output.len));
        let loan = (answer.loan != 0).then(|| Loan::new(&self.session.arenas, answer.loan, blocks));
        if let Some(loan) = &loan {
            loan.hold();
        }
        if let Some(error) = answer.error {
            return Err(error.into());
        }
        let outputs = answer
            .outputs
            .into_iter()
            .map(|output| {
                let data = match &loan {
                    Some(loan) => Received::of_loan(loan, output.offset, output.len),
                    None => (output.len == 0).then(Received::empty),
                };
                let wire::AnswerOutput { name, datatype, shape, .. } = output;
                let data =
                    data.ok_or_else(|| run_error(format!("output '{name}' is not in the arena")))?;
                Ok(CalledOutput { name, datatype, shape, data })
            })
            .collect::<Result<_, InferError>>()?;
        Ok(Called {
            model: self.model.clone(),
            version: answer.version,
            id: self.id.clone(),
            parameters: answer.parameters,
            outputs,
            is_end: answer.empty,
        })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.ended {
            self.session.arenas.send(&ToFrontend::CancelCall(self.call));
        }
        self.session.forget_call(self.call);
    }
}
