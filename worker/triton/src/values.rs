//! Functions of the interface without an object: versions, names of values, and the log.

use std::ffi::{c_char, c_int};

use pharos::tensor::DataType;

use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::{put, text_or};

/// The versions of the interface: a backend needs the same major version and a minor version that is
/// not later.
const BACKEND_VERSION: (u32, u32) = (1, 19);
const SERVER_VERSION: (u32, u32) = (1, 34);

/// The kinds of memory. `TRITONSERVER_MemoryType`.
pub(crate) const CPU: c_int = 0;
pub(crate) const CPU_PINNED: c_int = 1;
pub(crate) const GPU: c_int = 2;

/// The kinds of instances. `TRITONSERVER_InstanceGroupKind`.
pub(crate) const KIND_CPU: c_int = 1;
pub(crate) const KIND_GPU: c_int = 2;

/// The level of `TRITONSERVER_LogLevel` that only `--log-verbose` shows.
const VERBOSE: c_int = 3;

interface! {
    /// `TRITONBACKEND_ApiVersion`.
    fn backend_version(major: *mut u32, minor: *mut u32) {
        put(major, BACKEND_VERSION.0)?;
        put(minor, BACKEND_VERSION.1)
    }

    /// `TRITONSERVER_ApiVersion`.
    fn server_version(major: *mut u32, minor: *mut u32) {
        put(major, SERVER_VERSION.0)?;
        put(minor, SERVER_VERSION.1)
    }

    /// `TRITONSERVER_LogMessage`. The server shows the line with its level; the place in the source
    /// stands before the text, as in Triton.
    fn log(level: c_int, file: *const c_char, line: c_int, message: *const c_char) {
        let letter = match level {
            0 => 'I',
            1 => 'W',
            2 => 'E',
            VERBOSE => 'V',
            _ => return Err(Fault::invalid(format!("the log level is {level}; 0 to 3 are allowed"))),
        };
        let file = text_or(file, "");
        let name = file.rsplit('/').next().unwrap_or_default();
        pharos_backend::log(letter, &format!("{name}:{line}] {}", text_or(message, "")));
        Ok(())
    }
}

/// `TRITONSERVER_LogIsEnabled`.
pub(crate) extern "C" fn log_is_enabled(level: c_int) -> bool {
    (0..VERBOSE).contains(&level) || (level == VERBOSE && crate::process::is_verbose())
}

/// Returns the datatype with this number.
pub(crate) fn datatype(number: c_int) -> Result<DataType, Fault> {
    u8::try_from(number)
        .ok()
        .and_then(DataType::from_number)
        .ok_or_else(|| Fault::invalid(format!("the datatype is {number}; 1 to 14 are allowed")))
}

/// `TRITONSERVER_DataTypeString`.
pub(crate) extern "C" fn datatype_string(number: c_int) -> *const c_char {
    let name = match number {
        1 => c"BOOL",
        2 => c"UINT8",
        3 => c"UINT16",
        4 => c"UINT32",
        5 => c"UINT64",
        6 => c"INT8",
        7 => c"INT16",
        8 => c"INT32",
        9 => c"INT64",
        10 => c"FP16",
        11 => c"FP32",
        12 => c"FP64",
        13 => c"BYTES",
        14 => c"BF16",
        _ => c"<invalid>",
    };
    name.as_ptr()
}

/// `TRITONSERVER_StringToDataType`; 0 for an unknown name.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe extern "C" fn datatype_of(name: *const c_char) -> c_int {
    // SAFETY: the caller guarantees it.
    let name = unsafe { text_or(name, "") };
    DataType::from_name(&name).map_or(0, |datatype| c_int::from(datatype.number()))
}

/// `TRITONSERVER_DataTypeByteSize`; 0 for BYTES and for unknown numbers.
pub(crate) extern "C" fn datatype_size(number: c_int) -> u32 {
    datatype(number)
        .ok()
        .and_then(DataType::size)
        .and_then(|size| u32::try_from(size).ok())
        .unwrap_or(0)
}

/// `TRITONSERVER_MemoryTypeString`.
pub(crate) extern "C" fn memory_string(kind: c_int) -> *const c_char {
    let name = match kind {
        CPU => c"CPU",
        CPU_PINNED => c"CPU_PINNED",
        GPU => c"GPU",
        _ => c"<invalid>",
    };
    name.as_ptr()
}

/// `TRITONSERVER_InstanceGroupKindString`.
pub(crate) extern "C" fn instance_kind_string(kind: c_int) -> *const c_char {
    let name = match kind {
        0 => c"AUTO",
        KIND_CPU => c"CPU",
        KIND_GPU => c"GPU",
        3 => c"MODEL",
        _ => c"<invalid>",
    };
    name.as_ptr()
}

/// `TRITONSERVER_ParameterTypeString`.
pub(crate) extern "C" fn parameter_string(kind: c_int) -> *const c_char {
    let name = match kind {
        0 => c"STRING",
        1 => c"INT",
        2 => c"BOOL",
        3 => c"DOUBLE",
        4 => c"BYTES",
        _ => c"<invalid>",
    };
    name.as_ptr()
}

/// `TRITONSERVER_InferenceTraceLevelString`.
pub(crate) extern "C" fn trace_level_string(level: c_int) -> *const c_char {
    let name = match level {
        0 => c"DISABLED",
        1 => c"MIN",
        2 => c"MAX",
        4 => c"TIMESTAMPS",
        8 => c"TENSORS",
        _ => c"<unknown>",
    };
    name.as_ptr()
}

/// `TRITONSERVER_InferenceTraceActivityString`.
pub(crate) extern "C" fn trace_activity_string(activity: c_int) -> *const c_char {
    let name = match activity {
        0 => c"REQUEST_START",
        1 => c"QUEUE_START",
        2 => c"COMPUTE_START",
        3 => c"COMPUTE_INPUT_END",
        4 => c"COMPUTE_OUTPUT_START",
        5 => c"COMPUTE_END",
        6 => c"REQUEST_END",
        7 => c"TENSOR_QUEUE_INPUT",
        8 => c"TENSOR_BACKEND_INPUT",
        9 => c"TENSOR_BACKEND_OUTPUT",
        10 => c"CUSTOM_ACTIVITY",
        _ => c"<unknown>",
    };
    name.as_ptr()
}

/// Says once that a function is not supported; returns the error.
pub(crate) fn unsupported(name: &'static str) -> Fault {
    let text = format!("{name} is not supported by this server");
    if crate::process::first_use_of(name) {
        pharos_backend::log('W', &text);
    }
    Fault::unsupported(text)
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn names_of_datatypes_are_the_names_of_the_protocol() {
        for datatype in DataType::ALL {
            let number = c_int::from(datatype.number());
            // SAFETY: a static string.
            let name = unsafe { CStr::from_ptr(datatype_string(number)) };
            assert_eq!(name.to_str(), Ok(datatype.name()));
            // SAFETY: as above.
            assert_eq!(unsafe { datatype_of(name.as_ptr()) }, number);
            assert_eq!(datatype_size(number) as usize, datatype.size().unwrap_or(0));
        }
        for unknown in [-1, 0, 15, 256] {
            // SAFETY: a static string.
            assert_eq!(unsafe { CStr::from_ptr(datatype_string(unknown)) }, c"<invalid>");
            assert_eq!(datatype_size(unknown), 0);
            assert!(datatype(unknown).is_err());
        }
    }
}
