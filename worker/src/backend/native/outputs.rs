//! Outputs and errors that a library produces for a batch.
//!
//! Contract for `unsafe`: the contract of `running`; pointers that are passed in follow the rules
//! of the header.

use std::ffi::{c_char, c_void};
use std::ptr;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::tensor::{DataType, byte_size, element_count, format_shape};
use pharos_backend::run_error;

use super::abi::{self, Code, Output, Parameter};
use super::foreign::{list, misuse, parameter, put, sized, text};
use super::running::{Handle, Names, Running, act};

/// A checked request for an output.
pub(super) struct Wanted<'a> {
    pub(super) index: usize,
    pub(super) datatype: DataType,
    pub(super) shape: &'a [i64],
    pub(super) bytes: usize,
}

/// Reads and checks a request for an output.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// There is no such output, or its attributes are invalid.
pub(super) unsafe fn wanted<'a>(
    names: &Names,
    output: *const Output,
) -> Result<Wanted<'a>, InferError> {
    // SAFETY: the caller guarantees it.
    let output = unsafe { sized(output, "output") }?;
    let Some((name, configured)) = names.outputs.get(output.index) else {
        let count = names.outputs.len();
        return Err(misuse(format!(
            "there is no output {}: the model has {count}, counted from 0",
            output.index
        )));
    };
    let datatype = u8::try_from(output.datatype).ok().and_then(DataType::from_number);
    let wrong = |text: String| misuse(format!("output '{name}' {text}"));
    let datatype = datatype
        .ok_or_else(|| wrong(format!("has datatype {}; 1 to 14 are allowed", output.datatype)))?;
    if names.strict && datatype != *configured {
        return Err(wrong(format!("is {datatype}, but its configured datatype is {configured}")));
    }
    // SAFETY: the caller guarantees it.
    let shape = unsafe { list(output.shape, output.rank, "the output's shape") }?;
    let elements = element_count(shape)
        .ok_or_else(|| wrong(format!("has shape {}, which has no size", format_shape(shape))))?;
    let bytes = match byte_size(datatype, shape).map(usize::try_from) {
        Some(Ok(size)) if output.bytes == 0 || output.bytes == size => size,
        None if datatype == DataType::Bytes && output.bytes as u64 / 4 >= elements => output.bytes,
        _ => {
            let text = format!(
                "has {} bytes, which does not match its shape {}",
                output.bytes,
                format_shape(shape)
            );
            return Err(wrong(text));
        }
    };
    Ok(Wanted { index: output.index, datatype, shape, bytes })
}

/// Records that an output is allocated.
///
/// # Errors
/// It is already allocated.
pub(super) fn once(
    allocated: &mut Vec<usize>,
    output: usize,
    names: &Names,
) -> Result<(), InferError> {
    if allocated.contains(&output) {
        return Err(allocated_before(output, names));
    }
    allocated.push(output);
    Ok(())
}

/// Returns the error of an output that is allocated a second time.
pub(super) fn allocated_before(output: usize, names: &Names) -> InferError {
    let name = names.outputs.get(output).map_or("", |(name, _)| name.as_str());
    let text = format!("output '{name}' is allocated already");
    InferError::new(ErrorCode::AlreadyExists, Reason::Backend, text)
}

/// # Safety
/// This module's contract, as for all functions below.
pub(super) unsafe extern "C" fn allocate(
    outputs: *const Handle,
    output: *const Output,
    data: *mut *mut c_void,
) -> Code {
    let make = |running: &mut Running, names: &Names| {
        // SAFETY: the caller guarantees it.
        unsafe { put(data, ptr::null_mut()) }?;
        // SAFETY: as above.
        let wanted = unsafe { wanted(names, output) }?;
        running.outputs()?;
        once(&mut running.allocated, wanted.index, names)?;
        let memory = running
            .outputs()?
            .allocate(wanted.index, wanted.datatype, wanted.shape, wanted.bytes)
            .inspect_err(|_| running.allocated.retain(|index| *index != wanted.index))?;
        // SAFETY: as above.
        unsafe { put(data, memory.as_mut_ptr().cast()) }
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, make) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn withdraw(outputs: *const Handle, output: usize) -> Code {
    let withdraw_one = |running: &mut Running, _: &Names| {
        running.outputs()?;
        let place = running
            .allocated
            .iter()
            .position(|index| *index == output)
            .ok_or_else(|| misuse(format!("output {output} is not allocated")))?;
        running.allocated.swap_remove(place);
        running.outputs()?.withdraw(output);
        Ok(())
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, withdraw_one) }
}

/// Returns the error that a library describes.
///
/// # Safety
/// This module's contract.
pub(super) unsafe fn described(
    code: Code,
    message: *const c_char,
) -> Result<InferError, InferError> {
    // SAFETY: the caller guarantees it.
    let message = unsafe { text(message) };
    abi::error_of(code, message.unwrap_or_else(|| "the backend gave no reason".to_owned()))
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn fail(
    outputs: *const Handle,
    request: usize,
    code: Code,
    message: *const c_char,
) -> Code {
    let set_error = |running: &mut Running, _: &Names| {
        let position = running.position(request)?;
        // SAFETY: the caller guarantees it.
        let error = unsafe { described(code, message) }?;
        running.outputs()?.fail(position, error);
        Ok(())
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, set_error) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn fail_batch(
    outputs: *const Handle,
    code: Code,
    message: *const c_char,
) -> Code {
    let set_error = |running: &mut Running, _: &Names| {
        // SAFETY: the caller guarantees it.
        let error =
            unsafe { described(code, message) }.unwrap_or_else(|wrong| run_error(wrong.message));
        running.failure = Some(error.clone());
        Err(error)
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, set_error) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn set_parameter(
    outputs: *const Handle,
    request: usize,
    given: *const Parameter,
) -> Code {
    let add = |running: &mut Running, _: &Names| {
        let position = running.position(request)?;
        // SAFETY: the caller guarantees it.
        let (name, value) = unsafe { parameter(given) }?;
        running.outputs()?.parameter(position, &name, value);
        Ok(())
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, add) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn reschedule(outputs: *const Handle, request: usize) -> Code {
    let reschedule_one = |running: &mut Running, _: &Names| {
        let position = running.position(request)?;
        running.outputs()?.reschedule(position)
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, reschedule_one) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn inputs_ready(outputs: *const Handle) {
    // SAFETY: the caller guarantees it.
    unsafe {
        act(outputs, |running, _| {
            running.outputs()?.inputs_ready();
            Ok(())
        })
    };
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn computed(outputs: *const Handle) {
    // SAFETY: the caller guarantees it.
    unsafe {
        act(outputs, |running, _| {
            running.outputs()?.computed();
            Ok(())
        })
    };
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn finish(outputs: *const Handle, request: usize) -> Code {
    let end = |running: &mut Running, _: &Names| {
        let position = running.position(request)?;
        running.outputs()?.finish(position)
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, end) }
}
