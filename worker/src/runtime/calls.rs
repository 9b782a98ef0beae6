//! Other models of the server, as a backend uses them: to infer, and to be loaded, unloaded and asked for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pharos::error::InferError;
use pharos::id::CorrelationId;
use pharos::infer::Parameters;
use pharos::tensor::DataType;
use pharos::wire::{self, Answer, Manage, ToFrontend, Verb};

use super::stash::copied;
use super::{Content, Loan, Memory, Received, Runtime, Shared};
use crate::backend::run_error;

/// A request to another model.
#[derive(Default)]
pub struct Call {
    /// The model.
    pub model: String,
    /// Its version; empty for the latest.
    pub version: String,
    /// The request's id; may be empty.
    pub id: String,
    /// The id of the sequence that it is a step of.
    pub correlation: CorrelationId,
    /// It is the first step of its sequence.
    pub start: bool,
    /// It is the last step of its sequence.
    pub end: bool,
    /// Its priority; 0 for the model's default.
    pub priority: u64,
    /// How long it may wait in its queue, microseconds; 0 for any time.
    pub timeout_us: u64,
    /// Its inputs.
    pub inputs: Vec<CallInput>,
    /// The outputs that are asked for; empty for all.
    pub outputs: Vec<String>,
    /// Free parameters.
    pub parameters: Parameters,
    /// Any number of answers may come. If not, a decoupled model refuses it.
    pub decoupled: bool,
    /// The request that it is made for, if it is to be seen in that one's trace; see [`Responder::place`](super::Responder::place).
    pub parent: Option<(u64, u32)>,
}

/// An input of a [`Call`].
pub struct CallInput {
    /// Its name.
    pub name: String,
    /// What the elements are.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its bytes, as those of outputs.
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
    /// Its outputs; none in a response that only says that it is the last.
    pub outputs: Vec<CalledOutput>,
}

/// An output of a [`Called`].
pub struct CalledOutput {
    /// Its name.
    pub name: String,
    /// What the elements are.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its bytes.
    pub data: Received,
}

/// The answers of a call that is under way. Dropped before the last of them, the call is cancelled.
pub struct Pending {
    shared: Arc<Shared>,
    call: u64,
    model: String,
    id: String,
    taken: u64,
    ended: bool,
    /// Inputs that are passed on, while they may be read.
    _lent: Vec<Received>,
}

/// Cancels a call, from any thread, also while another one waits for its answers. Those that the server has sent are still given;
/// the last one is the error of a cancelled request.
pub struct Canceller {
    shared: Arc<Shared>,
    call: u64,
}

impl Canceller {
    /// Gives the call up. Without effect when its last answer is on its way.
    pub fn cancel(&self) {
        self.shared.send(&ToFrontend::Abandoned(self.call));
    }
}

impl Runtime {
    /// Has another model infer. The request is under way when this returns.
    ///
    /// # Errors
    /// There is no memory for an input, or its texts are too long for a message. What the other model says against it is an
    /// answer.
    pub fn call(&self, call: Call) -> Result<Pending, InferError> {
        let number = self.begin_call();
        let (mut inputs, mut memories, mut lent) = (Vec::new(), Vec::new(), Vec::new());
        for input in call.inputs {
            let CallInput { name, datatype, shape, content } = input;
            let passed_on = match content {
                Content::Received(bytes) => {
                    match bytes.loan().and_then(|loan| Some((loan.offset_of(&bytes)?, loan.key))) {
                        Some((offset, key)) => {
                            let len = bytes.len() as u64;
                            inputs.push(wire::CallInput { name, datatype, shape, offset, len, lent: Some(key) });
                            lent.push(bytes);
                            continue;
                        }
                        None => copied(&self.0, &bytes),
                    }
                }
                Content::Memory(memory) => Ok(memory),
                Content::Placed(_) => Err(run_error("an input of a call cannot be in a client's memory")),
            };
            let memory = passed_on.inspect_err(|_| self.end_call(number))?;
            let (offset, len) = memory.place();
            inputs.push(wire::CallInput { name, datatype, shape, offset, len, lent: None });
            memories.push(memory);
        }
        let (model, id) = (call.model.clone(), call.id.clone());
        let frame = ToFrontend::Call(wire::Call {
            call: number,
            model: call.model,
            version: call.version,
            id: call.id,
            correlation: call.correlation,
            start: call.start,
            end: call.end,
            priority: call.priority,
            timeout_us: call.timeout_us,
            inputs,
            outputs: call.outputs,
            parameters: call.parameters,
            decoupled: call.decoupled,
            parent: call.parent,
        });
        self.0.send_if_it_fits(&frame).inspect_err(|_| self.end_call(number))?;
        memories.into_iter().for_each(Memory::sent);
        Ok(Pending { shared: self.0.clone(), call: number, model, id, taken: 0, ended: false, _lent: lent })
    }

    /// Loads a model, or loads it anew; `files` take the place of its own, by the names of the repository extension:
    /// `config` for its configuration as JSON, `file:PATH` for a file of its directory.
    ///
    /// # Errors
    /// The server's reason, or the files together are more than fits into a message ([`pharos::wire::MAX_FRAME`]).
    pub fn load_model(&self, name: &str, files: Vec<(String, Vec<u8>)>) -> Result<(), InferError> {
        self.manage(name, Verb::Load(files)).map(drop)
    }

    /// Unloads a model, and with `dependents` what only it needs.
    ///
    /// # Errors
    /// The server's reason.
    pub fn unload_model(&self, name: &str, dependents: bool) -> Result<(), InferError> {
        self.manage(name, Verb::Unload(dependents)).map(drop)
    }

    /// Whether a version of a model (empty: any) can infer.
    ///
    /// # Errors
    /// The version is no number, or the server ends.
    pub fn model_ready(&self, name: &str, version: &str) -> Result<bool, InferError> {
        self.manage(name, Verb::IsReady(version.to_owned())).map(|answer| answer.ready)
    }

    fn manage(&self, model: &str, verb: Verb) -> Result<Answer, InferError> {
        let call = self.begin_call();
        let frame = ToFrontend::Manage(Manage { call, model: model.to_owned(), verb });
        let answer = self.0.send_if_it_fits(&frame).map(|()| self.0.next_answer(call));
        self.end_call(call);
        let answer = answer?.ok_or_else(InferError::cancelled)?;
        answer.error.clone().map_or(Ok(answer), |error| Err(error.into()))
    }

    fn begin_call(&self) -> u64 {
        let call = self.0.next_call.fetch_add(1, Ordering::Relaxed);
        self.0.board.lock().calls.insert(call, VecDeque::new());
        call
    }

    fn end_call(&self, call: u64) {
        self.0.forget_call(call);
    }
}

impl Shared {
    /// The next answer to a call; `None` if the connection is over.
    fn next_answer(&self, call: u64) -> Option<Answer> {
        self.wait(|state| match state.calls.get_mut(&call) {
            Some(answers) => answers.pop_front().map(Some),
            None => Some(None),
        })?
    }

    /// Nobody waits for its answers any more: what they hold is given back.
    fn forget_call(&self, call: u64) {
        let unread = self.board.lock().calls.remove(&call).unwrap_or_default();
        let loans: Vec<u64> = unread.iter().map(|answer| answer.loan).filter(|loan| *loan != 0).collect();
        if !loans.is_empty() {
            self.send(&ToFrontend::Returned(loans));
        }
    }
}

/// The next answer, for which it waits; none after the last. A last response without content is given too.
impl Iterator for Pending {
    type Item = Result<Called, InferError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let Some(answer) = self.shared.next_answer(self.call) else {
            self.ended = true;
            return Some(Err(InferError::cancelled()));
        };
        self.taken += 1;
        self.ended = answer.last;
        if !answer.last {
            self.shared.send(&ToFrontend::Taken(self.call, self.taken));
        }
        Some(self.called(answer))
    }
}

impl Pending {
    /// What cancels it.
    pub fn canceller(&self) -> Canceller {
        Canceller { shared: self.shared.clone(), call: self.call }
    }

    fn called(&self, answer: Answer) -> Result<Called, InferError> {
        let blocks = answer.outputs.iter().map(|output| (output.offset, output.len));
        let loan = (answer.loan != 0).then(|| Loan::new(&self.shared, answer.loan, blocks));
        if let Some(loan) = &loan {
            loan.hold();
        }
        if let Some(error) = answer.error {
            return Err(error.into());
        }
        let output = |output: wire::AnswerOutput| {
            let data = match &loan {
                Some(loan) => Received::of_loan(loan, output.offset, output.len),
                None => (output.len == 0).then(Received::empty),
            };
            let wire::AnswerOutput { name, datatype, shape, .. } = output;
            let data = data.ok_or_else(|| run_error(format!("output '{name}' is not in the arena")))?;
            Ok(CalledOutput { name, datatype, shape, data })
        };
        let outputs = answer.outputs.into_iter().map(output).collect::<Result<_, InferError>>()?;
        let (version, parameters) = (answer.version, answer.parameters);
        Ok(Called { model: self.model.clone(), version, id: self.id.clone(), parameters, outputs })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.ended {
            self.shared.send(&ToFrontend::Abandoned(self.call));
        }
        self.shared.forget_call(self.call);
    }
}
