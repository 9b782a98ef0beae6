//! `TRITONSERVER_InferenceRequest`, `TRITONSERVER_InferenceResponse`, `TRITONSERVER_ResponseAllocator`
//! and the functions of `TRITONSERVER_Server`: a backend calls other models of the server. A thread
//! for each call waits for its responses and calls the library back.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use pharos::error::InferError;
use pharos::id::CorrelationId;
use pharos::infer::{Parameter, Parameters};
use pharos::tensor::DataType;
use pharos_backend::{
    Call, CallInput, CallRequest, Called, CalledOutput, Canceller, Content, DeviceMemory, Pending,
    Runtime,
};

use crate::error::{self, ErrorPointer, interface};
use crate::fault::Fault;
use crate::foreign::{bytes, c_text, list, put, put_if_wanted, text};
use crate::fuzzed::{Argument, Source};
use crate::memory::{AttributesPointer, BufferAttributes};
use crate::message::OwnParameter;
use crate::model::Server;
use crate::object::{self, Object, kinds};
use crate::process;
use crate::request::{RequestParameter, SEQUENCE_END, SEQUENCE_START};
use crate::traces::Trace;
use crate::values::{self, CPU, GPU};

/// The version that means: by the model's version policy.
const ANY_VERSION: i64 = -1;
/// The flags of the last response and of the release of a request.
const FINAL: u32 = 1;
const RELEASE_ALL: u32 = 1;
/// The transaction properties of a model. `TRITONSERVER_ModelTxnPropertyFlag`.
const ONE_TO_ONE: u32 = 1;
const DECOUPLED: u32 = 2;

type AllocatorPointer = *mut Object<Allocator>;
type Allocate = unsafe extern "C-unwind" fn(
    AllocatorPointer,
    *const c_char,
    usize,
    c_int,
    i64,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut c_int,
    *mut i64,
) -> ErrorPointer;
type Release = unsafe extern "C-unwind" fn(
    AllocatorPointer,
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    i64,
) -> ErrorPointer;
type Start = unsafe extern "C-unwind" fn(AllocatorPointer, *mut c_void) -> ErrorPointer;
type Query = unsafe extern "C-unwind" fn(
    AllocatorPointer,
    *mut c_void,
    *const c_char,
    *mut usize,
    *mut c_int,
    *mut i64,
) -> ErrorPointer;
type SetAttributes = unsafe extern "C-unwind" fn(
    AllocatorPointer,
    *const c_char,
    *mut Object<BufferAttributes>,
    *mut c_void,
    *mut c_void,
) -> ErrorPointer;
type Responded = unsafe extern "C-unwind" fn(*mut Object<CallResponse>, u32, *mut c_void);
type Released = unsafe extern "C-unwind" fn(*mut Object<CallRequestObject>, u32, *mut c_void);

/// Functions of a library for fuzz targets: none, or one that does nothing.
macro_rules! callbacks {
    ($($type:ty: ($($argument:ty),*) $(-> $result:ty = $value:expr)?;)*) => { $(
        impl Argument for Option<$type> {
            fn take(source: &mut Source<'_>) -> Self {
                unsafe extern "C-unwind" fn idle($(_: $argument),*) $(-> $result)? { $($value)? }
                (source.byte() % 4 > 0).then_some(idle as $type)
            }
        }
    )* };
}

callbacks! {
    Allocate: (
        AllocatorPointer, *const c_char, usize, c_int, i64, *mut c_void, *mut *mut c_void,
        *mut *mut c_void, *mut c_int, *mut i64
    ) -> ErrorPointer = ptr::null_mut();
    Release: (AllocatorPointer, *mut c_void, *mut c_void, usize, c_int, i64)
        -> ErrorPointer = ptr::null_mut();
    Start: (AllocatorPointer, *mut c_void) -> ErrorPointer = ptr::null_mut();
    Query: (AllocatorPointer, *mut c_void, *const c_char, *mut usize, *mut c_int, *mut i64)
        -> ErrorPointer = ptr::null_mut();
    SetAttributes: (
        AllocatorPointer, *const c_char, *mut Object<BufferAttributes>, *mut c_void, *mut c_void
    ) -> ErrorPointer = ptr::null_mut();
    Responded: (*mut Object<CallResponse>, u32, *mut c_void);
    Released: (*mut Object<CallRequestObject>, u32, *mut c_void);
}

/// `TRITONSERVER_ResponseAllocator`: functions of a library that give memory for outputs.
pub(crate) struct Allocator {
    allocate: Allocate,
    release: Release,
    start: Option<Start>,
    /// Locked to read or write it only. The server has no use for the function: it knows the size
    /// of an output when it allocates it.
    query: Mutex<Option<Query>>,
    /// Locked to read or write it only.
    attributes: Mutex<Option<SetAttributes>>,
}

/// A pointer that a library gives and gets back.
#[derive(Clone, Copy)]
struct Token(*mut c_void);

// SAFETY: the pointer is only passed back to the library, whose callbacks may run on any thread.
unsafe impl Send for Token {}

/// What a library does with a response.
#[derive(Clone, Copy)]
struct OnResponse {
    allocator: AllocatorPointer,
    allocator_token: Token,
    call: Responded,
    token: Token,
}

// SAFETY: as for [`Token`]; objects may be used from any thread.
unsafe impl Send for OnResponse {}

/// An input of a request to another model.
struct OwnInput {
    name: String,
    datatype: DataType,
    shape: Vec<i64>,
    /// The buffers that the library has appended. They live until the request is released.
    parts: Vec<InputPart>,
}

/// A buffer that a library has appended to an input.
struct InputPart {
    base: *const c_char,
    size: usize,
    /// The GPU whose memory it is in.
    device: Option<u32>,
}

/// The content of a request to another model.
#[derive(Default)]
struct Description {
    request: CallRequest,
    id: CString,
    correlation: CString,
    flags: u32,
    inputs: Vec<OwnInput>,
    on_response: Option<OnResponse>,
    on_release: Option<(Released, Token)>,
    /// Cancels the call in progress.
    canceller: Option<Arc<Canceller>>,
}

// SAFETY: the pointers to inputs are read only while the library calls `ServerInferAsync`.
unsafe impl Send for Description {}

/// `TRITONSERVER_InferenceRequest`. Locked to read or change it only.
pub(crate) struct CallRequestObject {
    description: Mutex<Description>,
    cancelled: Arc<AtomicBool>,
}

/// An output in the library's memory.
struct PlacedOutput {
    name: CString,
    datatype: DataType,
    shape: Vec<i64>,
    buffer: *mut c_void,
    size: usize,
    memory: c_int,
    device: i64,
    token: *mut c_void,
    /// Deleted with the output.
    attributes: Option<AttributesPointer>,
}

/// `TRITONSERVER_InferenceResponse`.
pub(crate) struct CallResponse {
    error: Option<InferError>,
    model: CString,
    version: i64,
    id: CString,
    parameters: Vec<RequestParameter>,
    outputs: Vec<PlacedOutput>,
    allocator: AllocatorPointer,
}

kinds! {
    Allocator = 20, "a response allocator";
    CallRequestObject = 21, "an inference request";
    CallResponse = 22, "an inference response";
}

/// Returns the connection to the server.
fn runtime() -> Result<&'static Runtime, Fault> {
    process::runtime().ok_or_else(|| {
        Fault::unavailable("other models cannot be used while a configuration is completed")
    })
}

/// Returns a version in the form of the server.
fn version_text(version: i64) -> Result<String, Fault> {
    match version {
        ANY_VERSION => Ok(String::new()),
        1.. => Ok(version.to_string()),
        _ => Err(Fault::invalid(format!(
            "the version of a model is {version}; -1 and numbers from 1 are allowed"
        ))),
    }
}

impl Description {
    fn input(&mut self, name: &str) -> Result<&mut OwnInput, Fault> {
        let found = self.inputs.iter_mut().find(|input| input.name == name);
        found.ok_or_else(|| Fault::invalid(format!("the request has no input '{name}'")))
    }

    fn parameter(&mut self, name: &str, value: Parameter) {
        self.request.parameters.push((name.to_owned(), value));
    }

    /// Returns the call, with copies of the inputs, or the inputs themselves if they are inputs of
    /// a request to this model.
    ///
    /// # Safety
    /// The contract of this package: the appended buffers are valid.
    unsafe fn call(&self, runtime: &Runtime) -> Result<Call, Fault> {
        let mut inputs = Vec::with_capacity(self.inputs.len());
        for input in &self.inputs {
            let located = match input.parts.as_slice() {
                [InputPart { base, size, device: None }] => runtime.locate(base.addr(), *size),
                _ => None,
            };
            let content = match located {
                Some(received) => Content::Received(received),
                None => {
                    let size = input.parts.iter().map(|part| part.size).sum();
                    let mut memory = runtime.memory(size)?;
                    let mut rest: &mut [u8] = &mut memory;
                    for InputPart { base, size, device } in &input.parts {
                        let (place, after) = rest.split_at_mut(*size);
                        match device {
                            Some(device) => {
                                let address = base.expose_provenance() as u64;
                                let from = DeviceMemory::new(*device, address, *size);
                                runtime.read_device(from, place)?;
                            }
                            None => {
                                // SAFETY: the caller guarantees it.
                                let part = unsafe { bytes(*base, *size, "the data of an input") }?;
                                place.copy_from_slice(part);
                            }
                        }
                        rest = after;
                    }
                    Content::Memory(memory)
                }
            };
            inputs.push(CallInput {
                name: input.name.clone(),
                datatype: input.datatype,
                shape: input.shape.clone(),
                content,
            });
        }
        Ok(Call { request: self.request.clone(), inputs })
    }
}

/// A call in progress, with what its thread needs.
struct Running {
    request: *mut Object<CallRequestObject>,
    on_response: OnResponse,
    on_release: (Released, Token),
    pending: Pending,
}

// SAFETY: objects may be used from any thread, and the callbacks may run on any thread.
unsafe impl Send for Running {}

impl Running {
    /// Waits for all responses and passes them to the library; then releases the request.
    fn run(mut self) {
        while let Some(response) = self.pending.next() {
            let last = self.pending.has_ended();
            let flags = if last { FINAL } else { 0 };
            let made = match response {
                Ok(response) if response.is_end => ptr::null_mut(),
                Ok(response) => object::make(CallResponse::of(response, &self.on_response)),
                Err(error) => object::make(CallResponse::failed(error, &self.on_response)),
            };
            // SAFETY: the contract of this package; the response belongs to the library.
            unsafe { (self.on_response.call)(made, flags, self.on_response.token.0) };
        }
        drop(self.pending);
        let (release, token) = self.on_release;
        // SAFETY: the contract of this package; the request belongs to the library afterwards.
        unsafe { release(self.request, RELEASE_ALL, token.0) };
    }
}

impl CallResponse {
    fn failed(error: InferError, on_response: &OnResponse) -> Self {
        Self {
            error: Some(error),
            model: CString::default(),
            version: ANY_VERSION,
            id: CString::default(),
            parameters: Vec::new(),
            outputs: Vec::new(),
            allocator: on_response.allocator,
        }
    }

    /// Returns a response whose outputs are in memory of the library.
    fn of(called: Called, on_response: &OnResponse) -> Self {
        let Called { model, version, id, parameters, outputs, .. } = called;
        let mut response = Self {
            error: None,
            model: c_text(&model),
            version: version.parse().unwrap_or(ANY_VERSION),
            id: c_text(&id),
            parameters: as_pointers(&parameters),
            outputs: Vec::with_capacity(outputs.len()),
            allocator: on_response.allocator,
        };
        // SAFETY: the contract of this package.
        let placed = unsafe { response.place(outputs, on_response.allocator_token) };
        if let Err(error) = placed {
            response.release();
            response.error = Some(error);
        }
        response
    }

    /// Copies outputs to memory of the library.
    ///
    /// # Safety
    /// The contract of this package.
    unsafe fn place(&mut self, outputs: Vec<CalledOutput>, token: Token) -> Result<(), InferError> {
        // SAFETY: the caller guarantees it.
        unsafe {
            let allocator = object::get(self.allocator)
                .map_err(|fault| InferError::internal(fault.text.into_owned()))?;
            if let Some(start) = allocator.start {
                done(start(self.allocator, token.0))?;
            }
            for output in outputs {
                let name = c_text(&output.name);
                let size = output.data.len();
                let mut placed = PlacedOutput {
                    name,
                    datatype: output.datatype,
                    shape: output.shape,
                    buffer: ptr::null_mut(),
                    size,
                    memory: CPU,
                    device: 0,
                    token: ptr::null_mut(),
                    attributes: None,
                };
                done((allocator.allocate)(
                    self.allocator,
                    placed.name.as_ptr(),
                    size,
                    CPU,
                    0,
                    token.0,
                    &raw mut placed.buffer,
                    &raw mut placed.token,
                    &raw mut placed.memory,
                    &raw mut placed.device,
                ))?;
                let buffer = placed.buffer;
                let wrong = match placed.memory {
                    GPU => Some("is in the memory of a GPU"),
                    _ if buffer.is_null() && size > 0 => Some("is NULL"),
                    _ => None,
                };
                let attributes = *allocator.attributes.lock();
                if let Some(attributes) = attributes {
                    let described = object::make(BufferAttributes::of_host(size));
                    let name = placed.name.as_ptr();
                    let token_of_buffer = placed.token;
                    placed.attributes = Some(AttributesPointer(described));
                    self.outputs.push(placed);
                    done(attributes(self.allocator, name, described, token.0, token_of_buffer))?;
                } else {
                    self.outputs.push(placed);
                }
                if let Some(wrong) = wrong {
                    return Err(InferError::internal(format!(
                        "the memory for the output '{}' {wrong}",
                        output.name
                    )));
                }
                if size > 0 {
                    ptr::copy_nonoverlapping(output.data.as_ptr(), buffer.cast(), size);
                }
            }
        }
        Ok(())
    }

    /// Returns the memory of the outputs to the library.
    fn release(&mut self) {
        // SAFETY: the contract of this package.
        let Ok(allocator) = (unsafe { object::get(self.allocator) }) else { return };
        let release = allocator.release;
        for output in self.outputs.drain(..) {
            let PlacedOutput { buffer, token, size, memory, device, .. } = output;
            // SAFETY: as above; the buffer was allocated by the same allocator.
            let failed = unsafe { release(self.allocator, buffer, token, size, memory, device) };
            // SAFETY: as above.
            if let Err(error) = unsafe { done(failed) } {
                pharos_backend::log(
                    'W',
                    &format!("a response allocator failed: {}", error.message),
                );
            }
        }
    }
}

/// Returns the error of a function of the library.
///
/// # Safety
/// The contract of this package.
unsafe fn done(failed: ErrorPointer) -> Result<(), InferError> {
    if failed.is_null() {
        return Ok(());
    }
    // SAFETY: the caller guarantees it.
    Err(unsafe { error::consume(failed) })
}

fn as_pointers(parameters: &Parameters) -> Vec<RequestParameter> {
    parameters.iter().map(|(name, value)| RequestParameter::new(name, value)).collect()
}

/// Starts a call.
///
/// # Safety
/// The contract of this package.
unsafe fn infer(
    request: *mut Object<CallRequestObject>,
    trace: *mut Object<Trace>,
) -> Result<(), Fault> {
    // SAFETY: the caller guarantees it.
    let this = unsafe { object::get(request) }?;
    let runtime = runtime()?;
    let mut description = this.description.lock();
    let on_response = description.on_response.ok_or_else(|| {
        Fault::invalid("the request has no response callback; set one before the inference")
    })?;
    let on_release = description.on_release.ok_or_else(|| {
        Fault::invalid("the request has no release callback; set one before the inference")
    })?;
    // SAFETY: as above.
    let mut call = unsafe { description.call(runtime) }?;
    if !trace.is_null() {
        // SAFETY: as above; the trace belongs to the server from here on.
        call.request.parent = unsafe { object::take(trace) }?.place;
    }
    call.request.decoupled = true;
    let pending = runtime.call(call)?;
    let canceller = Arc::new(pending.canceller());
    if this.cancelled.load(Ordering::Acquire) {
        canceller.cancel();
    }
    description.canceller = Some(canceller);
    drop(description);
    let running = Running { request, on_response, on_release, pending };
    thread::Builder::new()
        .name("call".to_owned())
        .spawn(move || running.run())
        .map_err(|error| Fault::unavailable(format!("cannot start a thread: {error}")))?;
    Ok(())
}

/// Loads a model with parameters in the form of the repository extension.
///
/// # Safety
/// The contract of this package.
unsafe fn load(
    name: *const c_char,
    parameters: &[*const Object<OwnParameter>],
) -> Result<(), Fault> {
    // SAFETY: the caller guarantees it.
    let name = unsafe { text(name, "the name of a model") }?;
    let mut files = Vec::new();
    for parameter in parameters {
        // SAFETY: as above.
        let parameter = unsafe { object::get(*parameter) }?;
        let content = match &parameter.value {
            Some(Parameter::String(text)) => text.clone().into_bytes(),
            Some(_) => {
                return Err(Fault::invalid(format!(
                    "the parameter '{}' of a load is neither a string nor bytes",
                    parameter.name
                )));
            }
            None => {
                let (base, size) = parameter.bytes;
                // SAFETY: as above: the bytes live as long as the parameter.
                unsafe { bytes(base, size, "the bytes of a parameter") }?.to_vec()
            }
        };
        files.push((parameter.name.clone(), content));
    }
    Ok(runtime()?.load_model(name, files)?)
}

interface! {
    /// `TRITONSERVER_ResponseAllocatorNew`.
    fn allocator_new(
        allocator: *mut AllocatorPointer,
        allocate: Option<Allocate>,
        release: Option<Release>,
        start: Option<Start>,
    ) {
        let missing = || Fault::invalid("a response allocator needs both functions for memory");
        let allocate = allocate.ok_or_else(missing)?;
        let release = release.ok_or_else(missing)?;
        let query = Mutex::new(None);
        let attributes = Mutex::new(None);
        object::give(allocator, Allocator { allocate, release, start, query, attributes })
    }

    /// `TRITONSERVER_ResponseAllocatorDelete`.
    fn allocator_delete(allocator: AllocatorPointer) {
        object::delete(allocator)
    }

    /// `TRITONSERVER_ResponseAllocatorSetQueryFunction`.
    fn allocator_set_query(allocator: AllocatorPointer, query: Option<Query>) {
        *object::get(allocator)?.query.lock() = query;
        Ok(())
    }

    /// `TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction`.
    fn allocator_set_attributes(allocator: AllocatorPointer, attributes: Option<SetAttributes>) {
        *object::get(allocator)?.attributes.lock() = attributes;
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestNew`.
    fn request_new(
        request: *mut *mut Object<CallRequestObject>,
        server: *const Object<Server>,
        model: *const c_char,
        version: i64,
    ) {
        object::get(server)?;
        let model = text(model, "the name of a model")?.to_owned();
        let version = version_text(version)?;
        if !runtime()?.model_ready(&model, &version)? {
            return Err(Fault::not_found(format!(
                "Request for unknown model: '{model}' is not found or not ready"
            )));
        }
        let request_of_call = CallRequest { model, version, ..CallRequest::default() };
        let description = Description { request: request_of_call, ..Description::default() };
        let cancelled = Arc::default();
        object::give(request, CallRequestObject { description: Mutex::new(description), cancelled })
    }

    /// `TRITONSERVER_InferenceRequestDelete`.
    fn request_delete(request: *mut Object<CallRequestObject>) {
        object::delete(request)
    }

    /// `TRITONSERVER_InferenceRequestId`.
    fn request_id(request: *const Object<CallRequestObject>, id: *mut *const c_char) {
        put(id, object::get(request)?.description.lock().id.as_ptr())
    }

    /// `TRITONSERVER_InferenceRequestSetId`.
    fn request_set_id(request: *const Object<CallRequestObject>, id: *const c_char) {
        let id = text(id, "the id of a request")?;
        let mut description = object::get(request)?.description.lock();
        id.clone_into(&mut description.request.id);
        description.id = c_text(id);
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestFlags`.
    fn request_flags(request: *const Object<CallRequestObject>, flags: *mut u32) {
        put(flags, object::get(request)?.description.lock().flags)
    }

    /// `TRITONSERVER_InferenceRequestSetFlags`.
    fn request_set_flags(request: *const Object<CallRequestObject>, flags: u32) {
        if flags & !(SEQUENCE_START | SEQUENCE_END) != 0 {
            return Err(Fault::invalid(format!(
                "the flags of a request are {flags}; 0 to 3 are allowed"
            )));
        }
        let mut description = object::get(request)?.description.lock();
        description.flags = flags;
        description.request.start = flags & SEQUENCE_START != 0;
        description.request.end = flags & SEQUENCE_END != 0;
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestCorrelationId`.
    fn request_correlation(request: *const Object<CallRequestObject>, id: *mut u64) {
        match object::get(request)?.description.lock().request.correlation {
            CorrelationId::Uint(number) => put(id, number),
            CorrelationId::String(_) => {
                Err(Fault::invalid("given request's correlation id is not an unsigned int"))
            }
        }
    }

    /// `TRITONSERVER_InferenceRequestCorrelationIdString`.
    fn request_correlation_string(
        request: *const Object<CallRequestObject>,
        id: *mut *const c_char,
    ) {
        let description = object::get(request)?.description.lock();
        match description.request.correlation {
            CorrelationId::String(_) => put(id, description.correlation.as_ptr()),
            CorrelationId::Uint(_) => {
                Err(Fault::invalid("given request's correlation id is not a string"))
            }
        }
    }

    /// `TRITONSERVER_InferenceRequestSetCorrelationId`.
    fn request_set_correlation(request: *const Object<CallRequestObject>, id: u64) {
        object::get(request)?.description.lock().request.correlation = CorrelationId::Uint(id);
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestSetCorrelationIdString`.
    fn request_set_correlation_string(
        request: *const Object<CallRequestObject>,
        id: *const c_char,
    ) {
        let id = text(id, "the correlation id of a request")?;
        let mut description = object::get(request)?.description.lock();
        description.request.correlation = CorrelationId::String(id.to_owned());
        description.correlation = c_text(id);
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestPriority`.
    fn request_priority(request: *const Object<CallRequestObject>, priority: *mut u32) {
        let value = object::get(request)?.description.lock().request.priority;
        put(priority, u32::try_from(value).unwrap_or(u32::MAX))
    }

    /// `TRITONSERVER_InferenceRequestPriorityUInt64`.
    fn request_priority_long(request: *const Object<CallRequestObject>, priority: *mut u64) {
        put(priority, object::get(request)?.description.lock().request.priority)
    }

    /// `TRITONSERVER_InferenceRequestSetPriority`.
    fn request_set_priority(request: *const Object<CallRequestObject>, priority: u32) {
        object::get(request)?.description.lock().request.priority = priority.into();
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestSetPriorityUInt64`.
    fn request_set_priority_long(request: *const Object<CallRequestObject>, priority: u64) {
        object::get(request)?.description.lock().request.priority = priority;
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestTimeoutMicroseconds`.
    fn request_timeout(request: *const Object<CallRequestObject>, timeout: *mut u64) {
        put(timeout, object::get(request)?.description.lock().request.timeout_us)
    }

    /// `TRITONSERVER_InferenceRequestSetTimeoutMicroseconds`.
    fn request_set_timeout(request: *const Object<CallRequestObject>, timeout: u64) {
        object::get(request)?.description.lock().request.timeout_us = timeout;
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestSetStringParameter`.
    fn request_set_string(
        request: *const Object<CallRequestObject>,
        name: *const c_char,
        value: *const c_char,
    ) {
        let value = Parameter::String(text(value, "the value of a parameter")?.to_owned());
        let name = text(name, "the name of a parameter")?;
        object::get(request)?.description.lock().parameter(name, value);
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestSetIntParameter`.
    fn request_set_int(
        request: *const Object<CallRequestObject>,
        name: *const c_char,
        value: i64,
    ) {
        let name = text(name, "the name of a parameter")?;
        object::get(request)?.description.lock().parameter(name, Parameter::Int(value));
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestSetBoolParameter`.
    fn request_set_bool(
        request: *const Object<CallRequestObject>,
        name: *const c_char,
        value: bool,
    ) {
        let name = text(name, "the name of a parameter")?;
        object::get(request)?.description.lock().parameter(name, Parameter::Bool(value));
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestSetDoubleParameter`.
    fn request_set_double(
        request: *const Object<CallRequestObject>,
        name: *const c_char,
        value: f64,
    ) {
        let name = text(name, "the name of a parameter")?;
        object::get(request)?.description.lock().parameter(name, Parameter::Double(value));
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestAddInput`.
    fn request_add_input(
        request: *const Object<CallRequestObject>,
        name: *const c_char,
        datatype: c_int,
        shape: *const i64,
        rank: u64,
    ) {
        let name = text(name, "the name of an input")?.to_owned();
        let datatype = values::datatype(datatype)?;
        let shape = list(shape, rank, "the shape of an input")?.to_vec();
        let mut description = object::get(request)?.description.lock();
        if description.input(&name).is_ok() {
            return Err(Fault::invalid(format!("input '{name}' already exists in request")));
        }
        description.inputs.push(OwnInput { name, datatype, shape, parts: Vec::new() });
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestRemoveInput`.
    fn request_remove_input(request: *const Object<CallRequestObject>, name: *const c_char) {
        let name = text(name, "the name of an input")?;
        let mut description = object::get(request)?.description.lock();
        description.input(name)?;
        description.inputs.retain(|input| input.name != name);
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestRemoveAllInputs`.
    fn request_remove_inputs(request: *const Object<CallRequestObject>) {
        object::get(request)?.description.lock().inputs.clear();
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestAppendInputData`. The bytes are not copied here: they belong
    /// to the library until the request is released.
    fn request_append(
        request: *const Object<CallRequestObject>,
        name: *const c_char,
        base: *const c_char,
        size: usize,
        memory: c_int,
        device: i64,
    ) {
        append(request, name, base, size, memory, device)
    }

    /// `TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy`. All policies have the same
    /// data.
    fn request_append_for_policy(
        request: *const Object<CallRequestObject>,
        name: *const c_char,
        base: *const c_char,
        size: usize,
        memory: c_int,
        device: i64,
        _policy: *const c_char,
    ) {
        append(request, name, base, size, memory, device)
    }

    /// `TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes`.
    fn request_append_with_attributes(
        request: *const Object<CallRequestObject>,
        name: *const c_char,
        base: *const c_char,
        attributes: *const Object<BufferAttributes>,
    ) {
        let place = object::get(attributes)?.place();
        append(request, name, base, place.bytes, place.memory, place.device)
    }

    /// `TRITONSERVER_InferenceRequestRemoveAllInputData`.
    fn request_remove_data(request: *const Object<CallRequestObject>, name: *const c_char) {
        let name = text(name, "the name of an input")?;
        object::get(request)?.description.lock().input(name)?.parts.clear();
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestAddRequestedOutput`.
    fn request_add_output(request: *const Object<CallRequestObject>, name: *const c_char) {
        let name = text(name, "the name of an output")?.to_owned();
        object::get(request)?.description.lock().request.outputs.push(name);
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestRemoveRequestedOutput`.
    fn request_remove_output(request: *const Object<CallRequestObject>, name: *const c_char) {
        let name = text(name, "the name of an output")?;
        object::get(request)?.description.lock().request.outputs.retain(|output| output != name);
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs`.
    fn request_remove_outputs(request: *const Object<CallRequestObject>) {
        object::get(request)?.description.lock().request.outputs.clear();
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestSetReleaseCallback`.
    fn request_set_release(
        request: *const Object<CallRequestObject>,
        released: Option<Released>,
        token: *mut c_void,
    ) {
        let released = released.map(|released| (released, Token(token)));
        object::get(request)?.description.lock().on_release = released;
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestSetResponseCallback`.
    fn request_set_response(
        request: *const Object<CallRequestObject>,
        allocator: AllocatorPointer,
        allocator_token: *mut c_void,
        responded: Option<Responded>,
        token: *mut c_void,
    ) {
        object::get(allocator)?;
        let on_response = responded.map(|call| OnResponse {
            allocator,
            allocator_token: Token(allocator_token),
            call,
            token: Token(token),
        });
        object::get(request)?.description.lock().on_response = on_response;
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestCancel`.
    fn request_cancel(request: *const Object<CallRequestObject>) {
        let request = object::get(request)?;
        request.cancelled.store(true, Ordering::Release);
        let canceller = request.description.lock().canceller.clone();
        if let Some(canceller) = canceller {
            canceller.cancel();
        }
        Ok(())
    }

    /// `TRITONSERVER_InferenceRequestIsCancelled`.
    fn request_is_cancelled(request: *const Object<CallRequestObject>, cancelled: *mut bool) {
        put(cancelled, object::get(request)?.cancelled.load(Ordering::Acquire))
    }

    /// `TRITONSERVER_ServerInferAsync`. After success, the request belongs to the server until the
    /// release callback; the trace belongs to the server.
    fn server_infer(
        server: *const Object<Server>,
        request: *mut Object<CallRequestObject>,
        trace: *mut Object<Trace>,
    ) {
        object::get(server)?;
        infer(request, trace)
    }

    /// `TRITONSERVER_ServerIsLive`.
    fn server_is_live(server: *const Object<Server>, live: *mut bool) {
        object::get(server)?;
        put(live, true)
    }

    /// `TRITONSERVER_ServerIsReady`: a model that executes is served by a running server.
    fn server_is_ready(server: *const Object<Server>, ready: *mut bool) {
        object::get(server)?;
        put(ready, true)
    }

    /// `TRITONSERVER_ServerModelIsReady`.
    fn server_model_is_ready(
        server: *const Object<Server>,
        name: *const c_char,
        version: i64,
        ready: *mut bool,
    ) {
        object::get(server)?;
        let name = text(name, "the name of a model")?;
        put(ready, runtime()?.model_ready(name, &version_text(version)?)?)
    }

    /// `TRITONSERVER_ServerModelTransactionProperties`.
    fn server_model_properties(
        server: *const Object<Server>,
        name: *const c_char,
        version: i64,
        flags: *mut u32,
        reserved: *mut *mut c_void,
    ) {
        object::get(server)?;
        let name = text(name, "the name of a model")?;
        let decoupled = runtime()?.model_is_decoupled(name, &version_text(version)?)?;
        put_if_wanted(reserved, ptr::null_mut());
        put(flags, if decoupled { DECOUPLED } else { ONE_TO_ONE })
    }

    /// `TRITONSERVER_ServerLoadModel`.
    fn server_load(server: *const Object<Server>, name: *const c_char) {
        object::get(server)?;
        load(name, &[])
    }

    /// `TRITONSERVER_ServerLoadModelWithParameters`.
    fn server_load_with(
        server: *const Object<Server>,
        name: *const c_char,
        parameters: *const *const Object<OwnParameter>,
        count: u64,
    ) {
        object::get(server)?;
        load(name, list(parameters, count, "the list of parameters")?)
    }

    /// `TRITONSERVER_ServerUnloadModel`.
    fn server_unload(server: *const Object<Server>, name: *const c_char) {
        object::get(server)?;
        Ok(runtime()?.unload_model(text(name, "the name of a model")?, false)?)
    }

    /// `TRITONSERVER_ServerUnloadModelAndDependents`.
    fn server_unload_dependents(server: *const Object<Server>, name: *const c_char) {
        object::get(server)?;
        Ok(runtime()?.unload_model(text(name, "the name of a model")?, true)?)
    }

    /// `TRITONSERVER_InferenceResponseDelete`: returns the memory of the outputs to the allocator.
    fn response_delete(response: *mut Object<CallResponse>) {
        object::take(response)?.release();
        Ok(())
    }

    /// `TRITONSERVER_InferenceResponseError`. The error belongs to the caller; null without one.
    fn response_error(response: *const Object<CallResponse>) {
        match &object::get(response)?.error {
            Some(error) => Err(error.clone().into()),
            None => Ok(()),
        }
    }

    /// `TRITONSERVER_InferenceResponseModel`.
    fn response_model(
        response: *const Object<CallResponse>,
        name: *mut *const c_char,
        version: *mut i64,
    ) {
        let response = object::get(response)?;
        put(name, response.model.as_ptr())?;
        put(version, response.version)
    }

    /// `TRITONSERVER_InferenceResponseId`.
    fn response_id(response: *const Object<CallResponse>, id: *mut *const c_char) {
        put(id, object::get(response)?.id.as_ptr())
    }

    /// `TRITONSERVER_InferenceResponseParameterCount`.
    fn response_parameters(response: *const Object<CallResponse>, count: *mut u32) {
        put(count, u32::try_from(object::get(response)?.parameters.len()).unwrap_or(u32::MAX))
    }

    /// `TRITONSERVER_InferenceResponseParameter`.
    fn response_parameter(
        response: *const Object<CallResponse>,
        index: u32,
        name: *mut *const c_char,
        kind: *mut c_int,
        value: *mut *const c_void,
    ) {
        let parameters = &object::get(response)?.parameters;
        let found = parameters.get(index as usize).ok_or_else(|| {
            Fault::invalid(format!(
                "out of bounds index {index}: response has {} parameters",
                parameters.len()
            ))
        })?;
        found.put(name, kind, value)
    }

    /// `TRITONSERVER_InferenceResponseOutputCount`.
    fn response_outputs(response: *const Object<CallResponse>, count: *mut u32) {
        put(count, u32::try_from(object::get(response)?.outputs.len()).unwrap_or(u32::MAX))
    }

    /// `TRITONSERVER_InferenceResponseOutput`.
    fn response_output(
        response: *const Object<CallResponse>,
        index: u32,
        name: *mut *const c_char,
        datatype: *mut c_int,
        shape: *mut *const i64,
        rank: *mut u64,
        base: *mut *const c_void,
        size: *mut usize,
        memory: *mut c_int,
        device: *mut i64,
        token: *mut *mut c_void,
    ) {
        let outputs = &object::get(response)?.outputs;
        let output = outputs.get(index as usize).ok_or_else(|| {
            Fault::invalid(format!(
                "out of bounds index {index}: response has {} outputs",
                outputs.len()
            ))
        })?;
        put(name, output.name.as_ptr())?;
        put(datatype, c_int::from(output.datatype.number()))?;
        put(shape, output.shape.as_ptr())?;
        put(rank, output.shape.len() as u64)?;
        put(base, output.buffer.cast_const())?;
        put(size, output.size)?;
        put(memory, output.memory)?;
        put(device, output.device)?;
        put_if_wanted(token, output.token);
        Ok(())
    }
}

/// Appends bytes to an input.
///
/// # Safety
/// The contract of this package.
unsafe fn append(
    request: *const Object<CallRequestObject>,
    name: *const c_char,
    base: *const c_char,
    size: usize,
    memory: c_int,
    device: i64,
) -> Result<(), Fault> {
    // SAFETY: the caller guarantees it.
    let request = unsafe { object::get(request) }?;
    // SAFETY: as above.
    let name = unsafe { text(name, "the name of an input") }?;
    let device = match memory {
        GPU => Some(u32::try_from(device).map_err(|_| {
            Fault::invalid(format!("the data of input '{name}' is on the device {device}"))
        })?),
        _ => {
            // SAFETY: as above.
            unsafe { bytes(base, size, "the data of an input") }?;
            None
        }
    };
    let mut description = request.description.lock();
    let input = description.input(name)?;
    if size > 0 {
        input.parts.push(InputPart { base, size, device });
    }
    Ok(())
}
