//! `TRITONBACKEND_Request` and `TRITONBACKEND_Input`.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use parking_lot::Mutex;
use pharos::id::CorrelationId;
use pharos::infer::Parameter;
use pharos::tensor::DataType;
use pharos_backend::{Memory, ReceivedPiece};

use crate::answer::Answer;
use crate::buffer;
use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::{c_text, list, put, put_if_wanted, text};
use crate::memory::{AttributesPointer, BufferAttributes, Place};
use crate::message::{BOOL, DOUBLE, INT, STRING};
use crate::model::Model;
use crate::object::{self, Object, Objects, kinds};
use crate::traces::Trace;
use crate::values::CPU;

/// The flags of the first and the last request of a sequence.
pub(crate) const SEQUENCE_START: u32 = 1;
pub(crate) const SEQUENCE_END: u32 = 2;
/// The flags with which a backend releases a request.
const RELEASE_ALL: u32 = 1;
const RELEASE_RESCHEDULE: u32 = 2;

/// `TRITONBACKEND_Input`: one input of one request.
pub(crate) struct Input {
    pub(crate) model: Arc<Model>,
    /// Its position in the inputs that a backend receives.
    pub(crate) position: usize,
    pub(crate) datatype: DataType,
    pub(crate) shape: Vec<i64>,
    pub(crate) data: ReceivedPiece,
    /// Created when the backend asks for them. Locked to read or write the pointer only.
    pub(crate) attributes: Mutex<Option<AttributesPointer>>,
}

/// A parameter in the form of the interface: the name, the kind and the value.
pub(crate) struct RequestParameter {
    name: CString,
    kind: c_int,
    value: Value,
}

enum Value {
    Bool(bool),
    Int(i64),
    Double(f64),
    Text(CString),
}

impl RequestParameter {
    pub(crate) fn new(name: &str, value: &Parameter) -> Self {
        let (kind, value) = match value {
            Parameter::Bool(value) => (BOOL, Value::Bool(*value)),
            Parameter::Int(value) => (INT, Value::Int(*value)),
            // The interface has no unsigned numbers.
            Parameter::Uint(value) => (STRING, Value::Text(c_text(&value.to_string()))),
            Parameter::Double(value) => (DOUBLE, Value::Double(*value)),
            Parameter::String(value) => (STRING, Value::Text(c_text(value))),
        };
        Self { name: c_text(name), kind, value }
    }

    /// Writes its name, kind and value.
    ///
    /// # Safety
    /// The contract of this package.
    pub(crate) unsafe fn put(
        &self,
        name: *mut *const c_char,
        kind: *mut c_int,
        value: *mut *const c_void,
    ) -> Result<(), Fault> {
        // SAFETY: the caller guarantees it.
        unsafe {
            put(name, self.name.as_ptr())?;
            put(kind, self.kind)?;
            put(value, self.pointer())
        }
    }

    fn pointer(&self) -> *const c_void {
        match &self.value {
            Value::Bool(value) => ptr::from_ref(value).cast(),
            Value::Int(value) => ptr::from_ref(value).cast(),
            Value::Double(value) => ptr::from_ref(value).cast(),
            Value::Text(value) => value.as_ptr().cast(),
        }
    }
}

/// `TRITONBACKEND_Request`.
pub(crate) struct Request {
    pub(crate) answer: Arc<Answer>,
    id: Cow<'static, CStr>,
    correlation: Result<u64, CString>,
    flags: u32,
    timeout_us: u64,
    parameters: Vec<RequestParameter>,
    inputs: Objects<Input>,
    /// Null if the request is not traced.
    trace: *mut Object<Trace>,
    /// The states that the backend has created. Locked to add one only.
    pub(crate) states: Mutex<Vec<StatePointer>>,
}

/// `TRITONBACKEND_State`. It belongs to its request.
pub(crate) struct State {
    pub(crate) answer: Arc<Answer>,
    /// Its position in the configuration's states.
    pub(crate) position: usize,
    pub(crate) datatype: DataType,
    pub(crate) shape: Vec<i64>,
    /// Its bytes. Locked to set or take them only; the library writes there without the lock.
    pub(crate) memory: Mutex<Option<Memory>>,
    /// Created when the backend asks for them. Locked to read or write the pointer only.
    pub(crate) attributes: Mutex<Option<AttributesPointer>>,
}

/// A state that belongs to a request.
pub(crate) struct StatePointer(pub(crate) *mut Object<State>);

// SAFETY: the object may be used from any thread.
unsafe impl Send for StatePointer {}

impl Drop for StatePointer {
    fn drop(&mut self) {
        // SAFETY: created by `make` and deleted here only.
        drop(unsafe { object::discard(self.0) });
    }
}

kinds! {
    Input = 11, "an input";
    Request = 12, "a request";
    State = 24, "a state";
}

impl Request {
    pub(crate) fn new(
        answer: Arc<Answer>,
        request: &pharos::wire::BatchRequest,
        inputs: Vec<Object<Input>>,
    ) -> Self {
        let details = request.details.as_deref();
        let traced = details.filter(|details| details.traced);
        let trace = traced.map_or(ptr::null_mut(), |details| {
            object::make(Trace {
                place: Some(answer.place()),
                context: details.trace_context.as_deref().map(c_text),
            })
        });
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        Self {
            answer,
            id: match request.id.as_str() {
                "" => Cow::Borrowed(c""),
                id => Cow::Owned(c_text(id)),
            },
            correlation: match details.map(|details| &details.correlation) {
                None => Ok(0),
                Some(CorrelationId::Uint(number)) => Ok(*number),
                Some(CorrelationId::String(text)) if text.is_empty() => Ok(0),
                Some(CorrelationId::String(text)) => Err(c_text(text)),
            },
            flags: details.map_or(0, |details| {
                flag(details.start, SEQUENCE_START) | flag(details.end, SEQUENCE_END)
            }),
            timeout_us: details.map_or(0, |details| details.timeout_us),
            parameters: request
                .parameters
                .iter()
                .map(|(name, value)| RequestParameter::new(name, value))
                .collect(),
            inputs: inputs.into(),
            trace,
            states: Mutex::default(),
        }
    }

    /// Returns the input at this index.
    fn input(&self, index: u32) -> Result<*mut Object<Input>, Fault> {
        self.inputs.pointer(index as usize).ok_or_else(|| {
            Fault::invalid(format!(
                "out of bounds index {index}: request has {} inputs",
                self.inputs.len()
            ))
        })
    }

    fn output_count(&self) -> usize {
        match self.answer.wanted() {
            [] => self.answer.model.outputs.len(),
            wanted => wanted.len(),
        }
    }

    /// Returns the name of the requested output at this index.
    fn output_name(&self, index: u32) -> Option<&CString> {
        let index = index as usize;
        let position = match self.answer.wanted() {
            [] => index,
            wanted => usize::from(*wanted.get(index)?),
        };
        self.answer.model.outputs.get(position)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.trace.is_null() {
            // SAFETY: created by `make` and deleted here only.
            drop(unsafe { object::discard(self.trace) });
        }
    }
}

impl Input {
    /// Returns the only buffer. An input without bytes has none, but its first buffer may be asked
    /// for, as in Triton.
    fn buffer(&self, index: u32) -> Result<&ReceivedPiece, Fault> {
        if index == 0 {
            return Ok(&self.data);
        }
        Err(Fault::invalid(format!(
            "out of bounds index {index}: input '{}' has {} buffers",
            self.name().to_string_lossy(),
            self.buffers()
        )))
    }

    fn buffers(&self) -> u32 {
        u32::from(!self.data.is_empty())
    }

    fn name(&self) -> &CStr {
        self.model.inputs.get(self.position).map_or(c"", CString::as_c_str)
    }
}

/// The properties of an input that a backend asks for; each pointer may be null.
#[derive(Clone, Copy)]
struct Properties {
    name: *mut *const c_char,
    datatype: *mut c_int,
    shape: *mut *const i64,
    rank: *mut u32,
    bytes: *mut u64,
    buffers: *mut u32,
}

/// # Safety
/// The contract of this package.
unsafe fn properties(input: *const Object<Input>, places: Properties) -> Result<(), Fault> {
    // SAFETY: the caller guarantees it.
    unsafe {
        let input = object::get(input)?;
        put_if_wanted(places.name, input.name().as_ptr());
        put_if_wanted(places.datatype, c_int::from(input.datatype.number()));
        put_if_wanted(places.shape, input.shape.as_ptr());
        put_if_wanted(places.rank, u32::try_from(input.shape.len()).unwrap_or(u32::MAX));
        put_if_wanted(places.bytes, input.data.len() as u64);
        put_if_wanted(places.buffers, input.buffers());
    }
    Ok(())
}

/// # Safety
/// The contract of this package.
unsafe fn put_buffer(
    input: *const Object<Input>,
    index: u32,
    place: *mut *const c_void,
    bytes: *mut u64,
    memory: *mut c_int,
    device: *mut i64,
) -> Result<(), Fault> {
    // SAFETY: the caller guarantees it.
    unsafe {
        // As in Triton, a buffer that does not exist also sets the results.
        let input = object::get(input)?;
        let found = input.buffer(index);
        put(place, found.as_ref().map_or(ptr::null(), |found| buffer::start(found)))?;
        put(bytes, found.as_ref().map_or(0, |found| found.len() as u64))?;
        buffer::place(&input.data, &input.model.runtime).put(memory, device)?;
        found.map(drop)
    }
}

interface! {
    /// `TRITONBACKEND_RequestId`.
    fn id(request: *const Object<Request>, id: *mut *const c_char) {
        put(id, object::get(request)?.id.as_ptr())
    }

    /// `TRITONBACKEND_RequestCorrelationId`.
    fn correlation(request: *const Object<Request>, id: *mut u64) {
        match &object::get(request)?.correlation {
            Ok(number) => put(id, *number),
            Err(_) => Err(Fault::invalid("correlation ID in request is not an unsigned int")),
        }
    }

    /// `TRITONBACKEND_RequestCorrelationIdString`.
    fn correlation_string(request: *const Object<Request>, id: *mut *const c_char) {
        match &object::get(request)?.correlation {
            Err(text) => put(id, text.as_ptr()),
            Ok(_) => Err(Fault::invalid("correlation ID in request is not a string")),
        }
    }

    /// `TRITONBACKEND_RequestFlags`.
    fn flags(request: *const Object<Request>, flags: *mut u32) {
        put(flags, object::get(request)?.flags)
    }

    /// `TRITONBACKEND_InferenceRequestTimeoutMicroseconds`.
    fn timeout(request: *const Object<Request>, timeout: *mut u64) {
        put(timeout, object::get(request)?.timeout_us)
    }

    /// `TRITONBACKEND_RequestIsCancelled`.
    fn is_cancelled(request: *const Object<Request>, cancelled: *mut bool) {
        put(cancelled, object::get(request)?.answer.is_cancelled())
    }

    /// `TRITONBACKEND_RequestTrace`: null if the request is not traced. The trace belongs to the
    /// request.
    fn trace(request: *const Object<Request>, trace: *mut *mut Object<Trace>) {
        put(trace, object::get(request)?.trace)
    }

    /// `TRITONBACKEND_RequestParameterCount`.
    fn parameter_count(request: *const Object<Request>, count: *mut u32) {
        put(count, u32::try_from(object::get(request)?.parameters.len()).unwrap_or(u32::MAX))
    }

    /// `TRITONBACKEND_RequestParameter`.
    fn parameter(
        request: *const Object<Request>,
        index: u32,
        name: *mut *const c_char,
        kind: *mut c_int,
        value: *mut *const c_void,
    ) {
        let parameters = &object::get(request)?.parameters;
        let found = parameters.get(index as usize).ok_or_else(|| {
            Fault::invalid(format!(
                "out of bounds index {index}: request has {} parameters",
                parameters.len()
            ))
        })?;
        found.put(name, kind, value)
    }

    /// `TRITONBACKEND_RequestInputCount`.
    fn input_count(request: *const Object<Request>, count: *mut u32) {
        put(count, u32::try_from(object::get(request)?.inputs.len()).unwrap_or(u32::MAX))
    }

    /// `TRITONBACKEND_RequestInputName`.
    fn input_name(request: *const Object<Request>, index: u32, name: *mut *const c_char) {
        let input = object::get(request)?.input(index)?;
        put(name, object::get(input)?.name().as_ptr())
    }

    /// `TRITONBACKEND_RequestInput`.
    fn input(
        request: *const Object<Request>,
        name: *const c_char,
        input: *mut *mut Object<Input>,
    ) {
        let name = text(name, "the name of an input")?;
        let request = object::get(request)?;
        let position =
            request.inputs.iter().position(|found| found.name().to_bytes() == name.as_bytes());
        if let Some(found) = position.and_then(|position| request.inputs.pointer(position)) {
            return put(input, found);
        }
        put(input, ptr::null_mut())?;
        Err(Fault::invalid(format!("unknown request input name {name}")))
    }

    /// `TRITONBACKEND_RequestInputByIndex`.
    fn input_by_index(
        request: *const Object<Request>,
        index: u32,
        input: *mut *mut Object<Input>,
    ) {
        put(input, object::get(request)?.input(index)?)
    }

    /// `TRITONBACKEND_RequestOutputCount`: of the requested outputs; all if the client named none.
    fn output_count(request: *const Object<Request>, count: *mut u32) {
        put(count, u32::try_from(object::get(request)?.output_count()).unwrap_or(u32::MAX))
    }

    /// `TRITONBACKEND_RequestOutputName`.
    fn output_name(request: *const Object<Request>, index: u32, name: *mut *const c_char) {
        let request = object::get(request)?;
        let found = request.output_name(index).ok_or_else(|| {
            Fault::invalid(format!(
                "out of bounds index {index}: request has {} requested outputs",
                request.output_count()
            ))
        })?;
        put(name, found.as_ptr())
    }

    /// `TRITONBACKEND_RequestOutputBufferProperties`: where an output of this size goes if the
    /// backend has no preference. The name and the size may be null.
    fn output_buffer_properties(
        request: *const Object<Request>,
        name: *const c_char,
        bytes: *const usize,
        memory: *mut c_int,
        device: *mut i64,
    ) {
        let answer = &object::get(request)?.answer;
        let size = list(bytes, u64::from(!bytes.is_null()), "the size of an output")?;
        let named = if name.is_null() { None } else { Some(text(name, "the name of an output")?) };
        let position = named.and_then(|name| answer.model.output_at(name));
        let kept = position
            .and_then(|output| answer.place_on_device(output, size.first().copied().unwrap_or(0)));
        match kept {
            Some(kept) => Place::of_device(&kept).put(memory, device),
            None => {
                put(memory, CPU)?;
                put(device, 0)
            }
        }
    }

    /// `TRITONBACKEND_RequestRelease`. A request can be rescheduled while its batch is executed.
    fn release(request: *mut Object<Request>, flags: u32) {
        let answer = object::get(request)?.answer.clone();
        match flags {
            RELEASE_ALL => {}
            RELEASE_RESCHEDULE if answer.model.config.has_iterative_sequences() => {
                answer.reschedule()?;
            }
            RELEASE_RESCHEDULE => {
                return Err(Fault::invalid(
                    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the \
                     model is not configured to handle such a flag.",
                ));
            }
            flags => {
                return Err(Fault::invalid(format!(
                    "the flags of a release are {flags}; 1 (all) and 2 (reschedule) are allowed"
                )));
            }
        }
        answer.release();
        object::discard(request)
    }

    /// `TRITONBACKEND_InputProperties`.
    fn input_properties(
        input: *const Object<Input>,
        name: *mut *const c_char,
        datatype: *mut c_int,
        shape: *mut *const i64,
        rank: *mut u32,
        bytes: *mut u64,
        buffers: *mut u32,
    ) {
        properties(input, Properties { name, datatype, shape, rank, bytes, buffers })
    }

    /// `TRITONBACKEND_InputPropertiesForHostPolicy`. All policies have the same buffers.
    fn input_properties_for_policy(
        input: *const Object<Input>,
        _policy: *const c_char,
        name: *mut *const c_char,
        datatype: *mut c_int,
        shape: *mut *const i64,
        rank: *mut u32,
        bytes: *mut u64,
        buffers: *mut u32,
    ) {
        properties(input, Properties { name, datatype, shape, rank, bytes, buffers })
    }

    /// `TRITONBACKEND_InputBuffer`.
    fn input_buffer(
        input: *const Object<Input>,
        index: u32,
        place: *mut *const c_void,
        bytes: *mut u64,
        memory: *mut c_int,
        device: *mut i64,
    ) {
        put_buffer(input, index, place, bytes, memory, device)
    }

    /// `TRITONBACKEND_InputBufferForHostPolicy`. All policies have the same buffers.
    fn input_buffer_for_policy(
        input: *const Object<Input>,
        _policy: *const c_char,
        index: u32,
        place: *mut *const c_void,
        bytes: *mut u64,
        memory: *mut c_int,
        device: *mut i64,
    ) {
        put_buffer(input, index, place, bytes, memory, device)
    }

    /// `TRITONBACKEND_InputBufferAttributes`. The attributes belong to the input.
    fn input_buffer_attributes(
        input: *const Object<Input>,
        index: u32,
        place: *mut *const c_void,
        attributes: *mut *mut Object<BufferAttributes>,
    ) {
        let input = object::get(input)?;
        let bytes = input.buffer(index)?;
        put(place, buffer::start(bytes))?;
        let described = buffer::place(bytes, &input.model.runtime);
        put(attributes, AttributesPointer::of(&input.attributes, described))
    }
}
