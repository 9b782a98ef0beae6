//! The structures and function types of `include/pharos_backend.h`, field by field; the header
//! documents them. Keep both files in step; `tests/python/backends/native/testing.c` compares the
//! sizes.
//!
//! Contract of the functions: the caller follows the rules of the header; each pointer is null or
//! valid for its documented target.

use std::ffi::{c_char, c_void};

use pharos::error::{ErrorCode, InferError, Reason};

/// `PHAROS_BACKEND_ABI_VERSION`.
pub(super) const VERSION: u32 = 1;

/// `pharos_code`.
pub(super) type Code = i32;

/// `PHAROS_OK`.
pub(super) const OK: Code = 0;
/// `PHAROS_UNAVAILABLE`.
pub(super) const UNAVAILABLE: Code = 5;

/// Returns the number of an error's code.
pub(super) fn code_of(error: &InferError) -> Code {
    Code::from(error.code.to_wire()) + 1
}

/// Converts a code number to an error.
///
/// # Errors
/// The number is not an error code.
pub(super) fn error_of(code: Code, message: String) -> Result<InferError, InferError> {
    let known = u8::try_from(code)
        .ok()
        .and_then(|code| ErrorCode::from_wire(code.checked_sub(1)?))
        .ok_or_else(|| {
            InferError::invalid(format!("{code} is not an error code; allowed are 1 to 10"))
        })?;
    let reason = if known == ErrorCode::Cancelled { Reason::Cancelled } else { Reason::Backend };
    Ok(InferError::new(known, reason, message))
}

/// `pharos_context`.
#[repr(C)]
pub(super) struct Context {
    pub(super) size: usize,
    /// A `pharos_host`.
    pub(super) host: *const c_void,
    /// A `pharos_metrics`.
    pub(super) metrics: *const c_void,
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

// Functions that a library exports. A C++ exception that leaves one ends the process instead of
// being undefined behavior.

/// `pharos_backend_abi_version`.
pub(super) type AbiVersion = unsafe extern "C-unwind" fn() -> u32;
/// `pharos_backend_create`.
pub(super) type Create = unsafe extern "C-unwind" fn(*const Context, *mut *mut c_void) -> Code;
/// `pharos_backend_execute`.
pub(super) type Execute =
    unsafe extern "C-unwind" fn(*mut c_void, *const c_void, *const c_void) -> Code;
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
