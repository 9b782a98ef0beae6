//! A batch while a library executes it: its requests and inputs, and the outputs that the library
//! produces.
//!
//! Contract for `unsafe`: `pharos_batch` and `pharos_outputs` of an instance are one [`Handle`],
//! which lives as long as the instance. The batch and the outputs are accessible only while
//! [`Handle::run`] runs, which keeps them borrowed; a call at any other time finds nothing and
//! fails. The lock allows one call at a time. Memory that is passed out stays in place until then:
//! vectors do not change once an element has been passed out.

use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pharos::error::InferError;
use pharos::infer::{CorrelationId, Parameter};
use pharos::model::ModelConfig;
use pharos::tensor::DataType;
use pharos::wire::BatchRequest;
use pharos_backend::{Batch, Outputs, Received, Responder, Response, Runtime, run_error};

use super::abi::{self, Code};
use super::foreign::{self, c_text, misuse, needed_text, outcome, outcome_of, put, reference};
use super::slots::{Answer, Pool, Responding, Slot};

/// The handle that represents an instance's batches and outputs.
pub(super) struct Handle {
    pub(super) names: Names,
    pub(super) runtime: Runtime,
    /// Responses that are being built.
    pub(super) responses: Pool<Answer>,
    /// Requests that the library answers individually.
    pub(super) responders: Pool<Arc<Responder>>,
    /// Inputs that the library keeps.
    pub(super) kept: Pool<Received>,
    // The library may call from any of its threads. Also locked while a response waits for its
    // client.
    running: Mutex<Option<Running>>,
}

/// Attributes of the configuration that are needed for each batch.
pub(super) struct Names {
    inputs: Vec<CString>,
    /// Configured outputs, followed by states that are not outputs.
    pub(super) outputs: Vec<(String, DataType)>,
    /// Whether outputs must have the configured datatype.
    pub(super) strict: bool,
}

/// The batch being executed.
pub(super) struct Running {
    /// Declared before `outputs`, because it borrows from them.
    pub(super) open: Option<(Response<'static, 'static>, *const Responding)>,
    batch: *const Batch<'static>,
    outputs: *mut Outputs<'static>,
    inputs: Vec<abi::Input>,
    /// Requests that the library has read.
    requests: Vec<Option<Box<RequestView>>>,
    /// Outputs allocated over the batch.
    pub(super) allocated: Vec<usize>,
    /// Outputs allocated in the open response.
    pub(super) allocated_in_response: Vec<usize>,
    /// The error set by fail_batch.
    pub(super) failure: Option<InferError>,
}

// SAFETY: the pointers refer to the batch that `Handle::run` keeps borrowed on its thread, which
// does not use it meanwhile; code that uses the pointers holds the lock.
unsafe impl Send for Running {}

/// A request as the library sees it.
struct RequestView {
    request: abi::Request,
    parameters: Vec<abi::Parameter>,
    names: Vec<CString>,
    /// The targets of string pointers.
    _texts: Vec<Vec<u8>>,
}

impl Handle {
    pub(super) fn new(config: &ModelConfig, runtime: &Runtime) -> Self {
        let inputs = (0..config.backend_inputs())
            .map(|at| c_text(config.input_name(at).unwrap_or_default()));
        let outputs = config.backend_outputs().map(|(name, datatype)| (name.to_owned(), datatype));
        Self {
            names: Names {
                inputs: inputs.collect(),
                outputs: outputs.collect(),
                strict: config.strict_output_types,
            },
            runtime: runtime.clone(),
            responses: Pool::default(),
            responders: Pool::default(),
            kept: Pool::default(),
            running: Mutex::new(None),
        }
    }

    /// Executes a batch by `call`, which receives the pointer to pass for both the batch and the
    /// outputs.
    ///
    /// # Errors
    /// The library's error, or the library returned an invalid code.
    pub(super) fn run(
        &self,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        call: impl FnOnce(*const Self) -> Code,
    ) -> Result<(), InferError> {
        foreign::forget_error();
        *self.lock() = Some(Running::new(batch, outputs, &self.names));
        let end = End(self);
        let code = call(self);
        let failure = self.lock().as_mut().and_then(|running| running.failure.take());
        drop(end);
        match (failure, code) {
            (Some(failure), _) => Err(failure),
            (None, abi::OK) => Ok(()),
            (None, code) => Err(unexplained(code)),
        }
    }

    /// Runs an action on the batch being executed.
    ///
    /// # Errors
    /// No batch is being executed, or the action's error.
    pub(super) fn call<T>(
        &self,
        action: impl FnOnce(&mut Running, &Names) -> Result<T, InferError>,
    ) -> Result<T, InferError> {
        match self.lock().as_mut() {
            Some(running) => action(running, &self.names),
            None => Err(misuse("no batch is being executed: pharos_backend_execute has returned")),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock()
    }
}

/// Removes the batch from the handle when the library's call returns or unwinds.
struct End<'h>(&'h Handle);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let open = self.0.lock().take().and_then(|running| running.open);
        if let Some((response, slot)) = open {
            drop(response);
            // SAFETY: a slot of this handle's pool.
            let _ = self.0.responses.take(unsafe { &*slot }, "response");
        }
    }
}

/// Returns the error of a library that has returned a code without a reason.
fn unexplained(code: Code) -> InferError {
    let text = foreign::last_error_of(code)
        .unwrap_or_else(|| format!("the backend returned the code {code} and gave no reason"));
    abi::error_of(code, text).unwrap_or_else(|_| {
        run_error(format!("the backend returned {code}, which is not a valid code"))
    })
}

impl Running {
    fn new(batch: &Batch<'_>, outputs: &mut Outputs<'_>, names: &Names) -> Self {
        let inputs = batch
            .inputs
            .iter()
            .map(|input| abi::Input {
                size: size_of::<abi::Input>(),
                name: names.inputs.get(input.index).map_or(c"".as_ptr(), |name| name.as_ptr()),
                data: input.data.as_ptr().cast(),
                bytes: input.data.len(),
                shape: input.shape.as_ptr(),
                rank: input.shape.len(),
                index: input.index,
                datatype: input.datatype.number().into(),
            })
            .collect();
        let requests = batch.requests.iter().map(|_| None).collect();
        let batch = ptr::from_ref(batch).cast();
        let outputs = ptr::from_mut(outputs).cast();
        Self {
            open: None,
            batch,
            outputs,
            inputs,
            requests,
            allocated: Vec::new(),
            allocated_in_response: Vec::new(),
            failure: None,
        }
    }

    pub(super) fn batch(&self) -> &Batch<'_> {
        // SAFETY: `Handle::run` borrows it and is running, since `self` exists only then.
        unsafe { &*self.batch }
    }

    /// Returns the outputs for use outside the open response.
    ///
    /// # Errors
    /// A response is open.
    pub(super) fn outputs(&mut self) -> Result<&mut Outputs<'static>, InferError> {
        // SAFETY: this borrow ends with the borrow of `self`.
        unsafe { self.outputs_for_response() }
    }

    /// Returns the outputs for a response that is stored in `open`.
    ///
    /// # Safety
    /// Values derived from them must be stored only in `open`.
    ///
    /// # Errors
    /// A response is open.
    pub(super) unsafe fn outputs_for_response<'o>(
        &mut self,
    ) -> Result<&'o mut Outputs<'static>, InferError> {
        if self.open.is_some() {
            return Err(misuse("a response is open: send or drop it first"));
        }
        // SAFETY: as in `batch`; exclusive, because this module's lock is held and no response is
        // open.
        Ok(unsafe { &mut *self.outputs })
    }

    /// Checks the position of a request.
    ///
    /// # Errors
    /// There is no such request.
    pub(super) fn position(&self, request: usize) -> Result<usize, InferError> {
        let count = self.requests.len();
        let wrong = || {
            misuse(format!("there is no request {request} in a batch of {count}, counted from 0"))
        };
        (request < count).then_some(request).ok_or_else(wrong)
    }

    fn view(&mut self, request: usize) -> Result<&RequestView, InferError> {
        let position = self.position(request)?;
        // SAFETY: as in `batch`.
        let batch = unsafe { &*self.batch };
        let (Some(place), Some(request)) =
            (self.requests.get_mut(position), batch.requests.get(position))
        else {
            return Err(misuse(format!("there is no request {request}")));
        };
        Ok(place.get_or_insert_with(|| Box::new(RequestView::new(request))))
    }
}

impl RequestView {
    fn new(request: &BatchRequest) -> Self {
        let with_end = |text: &str| [text.as_bytes(), b"\0"].concat();
        let id = with_end(&request.id);
        let names: Vec<CString> = request.parameters.iter().map(|(name, _)| c_text(name)).collect();
        let mut texts = Vec::new();
        let parameters: Vec<_> = request
            .parameters
            .iter()
            .zip(&names)
            .map(|((_, value), name)| {
                let mut shown = parameter_of(name, value);
                if let Parameter::String(text) = value {
                    let text = with_end(text);
                    shown.text = text.as_ptr().cast();
                    texts.push(text);
                }
                shown
            })
            .collect();
        let step = request.sequence;
        let details = request.details.as_deref();
        let correlation = details.map(|details| match &details.correlation {
            CorrelationId::Uint(number) => (*number, ptr::null()),
            CorrelationId::String(text) => {
                let text = with_end(text);
                let place = text.as_ptr();
                texts.push(text);
                (0, place)
            }
        });
        let (correlation_id, correlation_text) = correlation.unwrap_or((0, ptr::null()));
        let shown = abi::Request {
            size: size_of::<abi::Request>(),
            id: id.as_ptr().cast(),
            id_length: request.id.len(),
            parameters: parameters.len(),
            sequence_key: step.map_or(0, |step| step.key),
            rows: request.rows,
            in_sequence: step.is_some().into(),
            sequence_start: step.is_some_and(|step| step.start).into(),
            sequence_end: step.is_some_and(|step| step.end).into(),
            correlation_id,
            correlation_text: correlation_text.cast(),
            priority: details.map_or(0, |details| details.priority),
            timeout_us: details.map_or(0, |details| details.timeout_us),
        };
        texts.push(id);
        Self { request: shown, parameters, names, _texts: texts }
    }
}

/// Converts a parameter, without the pointer to its string.
fn parameter_of(name: &CString, value: &Parameter) -> abi::Parameter {
    let empty = abi::Parameter {
        size: size_of::<abi::Parameter>(),
        name: name.as_ptr(),
        text: ptr::null(),
        text_length: 0,
        integer: 0,
        natural: 0,
        real: 0.0,
        boolean: 0,
        kind: 0,
    };
    match value {
        Parameter::Bool(value) => abi::Parameter { kind: 1, boolean: i32::from(*value), ..empty },
        Parameter::Int(value) => abi::Parameter { kind: 2, integer: *value, ..empty },
        Parameter::Uint(value) => abi::Parameter { kind: 3, natural: *value, ..empty },
        Parameter::Double(value) => abi::Parameter { kind: 4, real: *value, ..empty },
        Parameter::String(text) => abi::Parameter { kind: 5, text_length: text.len(), ..empty },
    }
}

/// Runs an action on the batch being executed and returns its outcome.
///
/// # Safety
/// This module's contract: the handle belongs to a living instance.
pub(super) unsafe fn act(
    handle: *const Handle,
    action: impl FnOnce(&mut Running, &Names) -> Result<(), InferError>,
) -> Code {
    // SAFETY: the caller guarantees it.
    outcome(unsafe { with(handle, action) })
}

/// Reads a value of the batch being executed; returns `absent` after an error.
///
/// # Safety
/// As for [`act`].
unsafe fn query<T>(
    handle: *const Handle,
    absent: T,
    question: impl FnOnce(&mut Running, &Names) -> Result<T, InferError>,
) -> T {
    // SAFETY: the caller guarantees it.
    unsafe { with(handle, question) }.unwrap_or_else(|error| {
        outcome(Err(error));
        absent
    })
}

/// # Safety
/// As for [`act`].
unsafe fn with<T>(
    handle: *const Handle,
    action: impl FnOnce(&mut Running, &Names) -> Result<T, InferError>,
) -> Result<T, InferError> {
    // SAFETY: the caller guarantees it.
    unsafe { reference(handle, "batch or outputs") }?.call(action)
}

/// # Safety
/// This module's contract, as for all functions below.
pub(super) unsafe extern "C" fn request_count(batch: *const Handle) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { query(batch, 0, |running, _| Ok(running.requests.len())) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn input_count(batch: *const Handle) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { query(batch, 0, |running, _| Ok(running.inputs.len())) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn input(batch: *const Handle, position: usize) -> *const abi::Input {
    let find = |running: &mut Running, _: &Names| {
        Ok(running.inputs.get(position).map_or(ptr::null(), ptr::from_ref))
    };
    // SAFETY: the caller guarantees it.
    unsafe { query(batch, ptr::null(), find) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn request(
    batch: *const Handle,
    position: usize,
) -> *const abi::Request {
    // SAFETY: the caller guarantees it.
    unsafe {
        query(batch, ptr::null(), |running, _| Ok(ptr::from_ref(&running.view(position)?.request)))
    }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn request_parameter(
    batch: *const Handle,
    request: usize,
    position: usize,
) -> *const abi::Parameter {
    let find = |running: &mut Running, _: &Names| {
        Ok(running.view(request)?.parameters.get(position).map_or(ptr::null(), ptr::from_ref))
    };
    // SAFETY: the caller guarantees it.
    unsafe { query(batch, ptr::null(), find) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn find_parameter(
    batch: *const Handle,
    request: usize,
    name: *const c_char,
) -> *const abi::Parameter {
    let find = |running: &mut Running, _: &Names| {
        // SAFETY: the caller guarantees it.
        let name = c_text(&unsafe { needed_text(name, "name") }?);
        let view = running.view(request)?;
        let mut named =
            view.names.iter().zip(&view.parameters).filter(|(known, _)| **known == name);
        Ok(named.next().map_or(ptr::null(), |(_, parameter)| ptr::from_ref(parameter)))
    };
    // SAFETY: the caller guarantees it.
    unsafe { query(batch, ptr::null(), find) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn is_wanted(batch: *const Handle, output: usize) -> i32 {
    let wanted = |running: &mut Running, names: &Names| {
        Ok(output < names.outputs.len() && running.batch().wants(output))
    };
    // SAFETY: the caller guarantees it.
    unsafe { query(batch, false, wanted) }.into()
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn is_cancelled(batch: *const Handle, request: usize) -> i32 {
    let cancelled = |running: &mut Running, _: &Names| {
        Ok(running.batch().is_cancelled(running.position(request)?))
    };
    // SAFETY: the caller guarantees it.
    unsafe { query(batch, false, cancelled) }.into()
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn keep_input(
    batch: *const Handle,
    position: usize,
    data: *mut *const c_void,
    kept: *mut *const Slot<Received>,
) -> Code {
    let keep = |running: &mut Running, _: &Names| {
        // SAFETY: the caller guarantees it.
        unsafe {
            put(data, ptr::null())?;
            put(kept, ptr::null())?;
        }
        let count = running.inputs.len();
        let received = running.batch().received(position).ok_or_else(|| {
            misuse(format!("there is no input {position}: the batch has {count}"))
        })?;
        let start = received.as_ptr();
        // SAFETY: as above.
        let instance = unsafe { reference(batch, "batch") }?;
        // SAFETY: as above.
        unsafe {
            put(data, start.cast())?;
            put(kept, instance.kept.put(batch.cast(), received))
        }
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(batch, keep) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn release_input(kept: *const Slot<Received>) {
    outcome_of(|| {
        // SAFETY: the caller guarantees it.
        let slot = unsafe { reference(kept, "kept") }?;
        // SAFETY: as above.
        unsafe { reference(slot.instance.cast::<Handle>(), "instance") }?
            .kept
            .take(slot, "the kept input")
            .map(drop)
    });
}
