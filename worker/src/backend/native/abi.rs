//! The structures and function types of `include/pharos_backend.h`, field by field: what is said there is not repeated
//! here. A change there is a change here, and the other way round; `tests/python/native/everything.c` compares the sizes.
//!
//! Contract of the functions: the caller keeps to the header; each pointer is null or valid for what it is said to be.

use std::ffi::{c_char, c_void};

use pharos::error::{ErrorCode, InferError, Reason};

use super::super::Received;
use super::load::Load;
use super::metrics::{MetricHandle, MetricsHandle, SeriesHandle};
use super::responses::{Detached, Responding};
use super::running::Handle;
use super::slots::Slot;

/// `PHAROS_BACKEND_ABI_VERSION`.
pub(super) const VERSION: u32 = 1;

/// `pharos_code`.
pub(super) type Code = i32;

/// `PHAROS_OK`.
pub(super) const OK: Code = 0;
/// `PHAROS_UNAVAILABLE`.
pub(super) const UNAVAILABLE: Code = 5;

/// The number of an error's code.
pub(super) fn code_of(error: &InferError) -> Code {
    Code::from(error.code.to_wire()) + 1
}

/// The error of a number.
///
/// # Errors
/// The number is no code of an error.
pub(super) fn error_of(code: Code, message: String) -> Result<InferError, InferError> {
    let known = u8::try_from(code).ok().and_then(|code| ErrorCode::from_wire(code.checked_sub(1)?));
    let known = known.ok_or_else(|| InferError::invalid(format!("{code} is no code of an error; 1 to 9 are")))?;
    let reason = if known == ErrorCode::Cancelled { Reason::Cancelled } else { Reason::Backend };
    Ok(InferError::new(known, reason, message))
}

/// `pharos_context`.
#[repr(C)]
pub(super) struct Context {
    pub(super) size: usize,
    pub(super) host: *const Host,
    pub(super) metrics: *const MetricsHandle,
    pub(super) config: *const c_char,
    pub(super) directory: *const c_char,
    pub(super) model: *const c_char,
    pub(super) instance: *const c_char,
    pub(super) version: u64,
    pub(super) threads: u32,
    pub(super) max_batch_size: u32,
    pub(super) decoupled: i32,
}

/// `pharos_tensor`.
#[repr(C)]
pub(super) struct Tensor {
    pub(super) size: usize,
    pub(super) name: *const c_char,
    pub(super) dims: *const i64,
    pub(super) rank: usize,
    pub(super) datatype: i32,
    pub(super) optional: i32,
}

/// `pharos_input`.
#[repr(C)]
pub(super) struct Input {
    pub(super) size: usize,
    pub(super) name: *const c_char,
    pub(super) data: *const c_void,
    pub(super) bytes: usize,
    pub(super) shape: *const i64,
    pub(super) rank: usize,
    pub(super) index: usize,
    pub(super) datatype: i32,
}

/// `pharos_request`.
#[repr(C)]
pub(super) struct Request {
    pub(super) size: usize,
    pub(super) id: *const c_char,
    pub(super) id_length: usize,
    pub(super) parameters: usize,
    pub(super) sequence_key: u64,
    pub(super) rows: u32,
    pub(super) in_sequence: i32,
    pub(super) sequence_start: i32,
    pub(super) sequence_end: i32,
    pub(super) correlation_id: u64,
    pub(super) correlation_text: *const c_char,
    pub(super) priority: u64,
    pub(super) timeout_us: u64,
}

/// `pharos_parameter`.
#[repr(C)]
pub(super) struct Parameter {
    pub(super) size: usize,
    pub(super) name: *const c_char,
    pub(super) text: *const c_char,
    pub(super) text_length: usize,
    pub(super) integer: i64,
    pub(super) natural: u64,
    pub(super) real: f64,
    pub(super) boolean: i32,
    pub(super) kind: i32,
}

/// `pharos_output`.
#[repr(C)]
pub(super) struct Output {
    pub(super) size: usize,
    pub(super) index: usize,
    pub(super) shape: *const i64,
    pub(super) rank: usize,
    pub(super) bytes: usize,
    pub(super) datatype: i32,
}

/// `pharos_metric_spec`.
#[repr(C)]
pub(super) struct MetricSpec {
    pub(super) size: usize,
    pub(super) name: *const c_char,
    pub(super) unit: *const c_char,
    pub(super) dimensions: *const *const c_char,
    pub(super) dimension_count: usize,
    pub(super) kind: i32,
}

/// A function that a library calls.
macro_rules! host_fn {
    (($($argument:ty),*) $(-> $result:ty)?) => { unsafe extern "C" fn($($argument),*) $(-> $result)? };
}

/// `pharos_host`.
#[repr(C)]
pub(super) struct Host {
    pub(super) size: usize,
    pub(super) last_error: host_fn!(() -> *const c_char),
    pub(super) log: host_fn!((i32, *const c_char)),
    pub(super) config_parameter: host_fn!((*const Load<'static>, *const c_char) -> *const c_char),
    pub(super) config_input: host_fn!((*const Load<'static>, usize) -> *const Tensor),
    pub(super) config_output: host_fn!((*const Load<'static>, usize) -> *const Tensor),
    pub(super) fail_load: host_fn!((*const Load<'static>, *const c_char) -> Code),
    pub(super) request_count: host_fn!((*const Handle) -> usize),
    pub(super) input_count: host_fn!((*const Handle) -> usize),
    pub(super) input: host_fn!((*const Handle, usize) -> *const Input),
    pub(super) request: host_fn!((*const Handle, usize) -> *const Request),
    pub(super) request_parameter: host_fn!((*const Handle, usize, usize) -> *const Parameter),
    pub(super) find_parameter: host_fn!((*const Handle, usize, *const c_char) -> *const Parameter),
    pub(super) is_wanted: host_fn!((*const Handle, usize) -> i32),
    pub(super) is_cancelled: host_fn!((*const Handle, usize) -> i32),
    pub(super) allocate: host_fn!((*const Handle, *const Output, *mut *mut c_void) -> Code),
    pub(super) withdraw: host_fn!((*const Handle, usize) -> Code),
    pub(super) fail: host_fn!((*const Handle, usize, Code, *const c_char) -> Code),
    pub(super) fail_batch: host_fn!((*const Handle, Code, *const c_char) -> Code),
    pub(super) set_parameter: host_fn!((*const Handle, usize, *const Parameter) -> Code),
    pub(super) reschedule: host_fn!((*const Handle, usize) -> Code),
    pub(super) inputs_ready: host_fn!((*const Handle)),
    pub(super) computed: host_fn!((*const Handle)),
    pub(super) response_begin: host_fn!((*const Handle, usize, *mut *const Responding) -> Code),
    pub(super) response_allocate: host_fn!((*const Responding, *const Output, *mut *mut c_void) -> Code),
    pub(super) response_set_parameter: host_fn!((*const Responding, *const Parameter) -> Code),
    pub(super) response_send: host_fn!((*const Responding, i32) -> Code),
    pub(super) response_send_error: host_fn!((*const Responding, Code, *const c_char) -> Code),
    pub(super) response_drop: host_fn!((*const Responding)),
    pub(super) finish: host_fn!((*const Handle, usize) -> Code),
    pub(super) metric_add: host_fn!((*const MetricsHandle, *const MetricSpec, *mut *const MetricHandle) -> Code),
    pub(super) metric_get: host_fn!((*const MetricsHandle, i32, *const c_char, *mut *const MetricHandle) -> Code),
    pub(super) metric_series: host_fn!((*const MetricHandle, *const *const c_char, usize, *mut *const SeriesHandle) -> Code),
    pub(super) add_or_update: host_fn!((*const SeriesHandle, f64, i64) -> Code),
    pub(super) metrics_flush: host_fn!((*const MetricsHandle) -> Code),
    pub(super) detach: host_fn!((*const Handle, usize, *mut *const Detached) -> Code),
    pub(super) responder_begin: host_fn!((*const Detached, *mut *const Responding) -> Code),
    pub(super) responder_fail: host_fn!((*const Detached, Code, *const c_char) -> Code),
    pub(super) responder_finish: host_fn!((*const Detached) -> Code),
    pub(super) responder_is_cancelled: host_fn!((*const Detached) -> i32),
    pub(super) responder_drop: host_fn!((*const Detached)),
    pub(super) keep_input: host_fn!((*const Handle, usize, *mut *const c_void, *mut *const Slot<Received>) -> Code),
    pub(super) release_input: host_fn!((*const Slot<Received>)),
}

// What a library exports. A C++ exception that leaves it ends the process in place of being undefined.

/// `pharos_backend_abi_version`.
pub(super) type AbiVersion = unsafe extern "C-unwind" fn() -> u32;
/// `pharos_backend_create`.
pub(super) type Create = unsafe extern "C-unwind" fn(*const Context, *mut *mut c_void) -> Code;
/// `pharos_backend_execute`.
pub(super) type Execute = unsafe extern "C-unwind" fn(*mut c_void, *const Handle, *const Handle) -> Code;
/// `pharos_backend_destroy`.
pub(super) type Destroy = unsafe extern "C-unwind" fn(*mut c_void);
/// `pharos_backend_sequence_ended`.
pub(super) type SequenceEnded = unsafe extern "C-unwind" fn(*mut c_void, u64);
/// `pharos_backend_wants`.
pub(super) type Wants = unsafe extern "C-unwind" fn() -> u32;
/// `PHAROS_WANTS_DETAILS`.
pub(super) const WANTS_DETAILS: u32 = 1;
/// `PHAROS_BEARS_CHANGES`.
pub(super) const BEARS_CHANGES: u32 = 2;
/// `pharos_backend_engine`.
pub(super) type Engine = unsafe extern "C-unwind" fn() -> *const c_char;
