//! What a library makes of a batch: outputs, errors, responses of decoupled models.
//!
//! Contract for `unsafe`: that of `running`, and the header's for pointers that are passed in.

use std::ffi::{c_char, c_void};
use std::ptr;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::tensor::{DataType, byte_size, element_count, format_shape};

use super::super::{Response, run_error};
use super::abi::{self, Code, Output, Parameter};
use super::foreign::{list, misuse, parameter, put, sized, text};
use super::running::{Handle, Names, Responding, Running, act};

/// An output that is to be made, as far as it can be made.
struct Wanted<'a> {
    index: usize,
    datatype: DataType,
    shape: &'a [i64],
    bytes: usize,
}

/// Reads and checks what a library wants to make.
///
/// # Safety
/// This module's contract.
///
/// # Errors
/// There is no such output, or it cannot be like that.
unsafe fn wanted<'a>(names: &Names, output: *const Output) -> Result<Wanted<'a>, InferError> {
    // SAFETY: the caller's promise.
    let output = unsafe { sized(output, "output") }?;
    let Some((name, configured)) = names.outputs.get(output.index) else {
        let count = names.outputs.len();
        return Err(misuse(format!("there is no output {}: the model has {count}, counted from 0", output.index)));
    };
    let datatype = u8::try_from(output.datatype).ok().and_then(DataType::from_number);
    let wrong = |text: String| misuse(format!("output '{name}' {text}"));
    let datatype = datatype.ok_or_else(|| wrong(format!("has datatype {}; 1 to 14 are allowed", output.datatype)))?;
    if datatype != *configured {
        return Err(wrong(format!("is {datatype}, the configuration says {configured}")));
    }
    // SAFETY: the caller's promise.
    let shape = unsafe { list(output.shape, output.rank, "the output's shape") }?;
    let elements = element_count(shape);
    let elements = elements.ok_or_else(|| wrong(format!("has shape {}, which has no size", format_shape(shape))))?;
    let bytes = match byte_size(datatype, shape).map(usize::try_from) {
        Some(Ok(size)) if output.bytes == 0 || output.bytes == size => size,
        None if datatype == DataType::Bytes && output.bytes as u64 / 4 >= elements => output.bytes,
        _ => {
            let text = format!("has {} bytes, which is not what its shape {} needs", output.bytes, format_shape(shape));
            return Err(wrong(text));
        }
    };
    Ok(Wanted { index: output.index, datatype, shape, bytes })
}

/// Notes that an output is allocated.
///
/// # Errors
/// It was before.
fn once(allocated: &mut Vec<usize>, output: usize, names: &Names) -> Result<(), InferError> {
    if !allocated.contains(&output) {
        allocated.push(output);
        return Ok(());
    }
    let name = names.outputs.get(output).map_or("", |(name, _)| name.as_str());
    let text = format!("output '{name}' is allocated already");
    Err(InferError::new(ErrorCode::AlreadyExists, Reason::Backend, text))
}

/// # Safety
/// This module's contract, as for all functions below.
pub(super) unsafe extern "C" fn allocate(
    outputs: *const Handle,
    output: *const Output,
    data: *mut *mut c_void,
) -> Code {
    let make = |running: &mut Running, names: &Names| {
        // SAFETY: the caller's promise.
        unsafe { put(data, ptr::null_mut()) }?;
        // SAFETY: as above.
        let wanted = unsafe { wanted(names, output) }?;
        running.outputs()?;
        once(&mut running.allocated, wanted.index, names)?;
        let memory = running.outputs()?.allocate(wanted.index, wanted.datatype, wanted.shape, wanted.bytes);
        let memory = memory.inspect_err(|_| running.allocated.retain(|index| *index != wanted.index))?;
        // SAFETY: as above.
        unsafe { put(data, memory.as_mut_ptr().cast()) }
    };
    // SAFETY: the caller's promise.
    unsafe { act(outputs, make) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn withdraw(outputs: *const Handle, output: usize) -> Code {
    let take_back = |running: &mut Running, _: &Names| {
        running.outputs()?;
        let place = running.allocated.iter().position(|index| *index == output);
        let place = place.ok_or_else(|| misuse(format!("output {output} is not allocated")))?;
        running.allocated.swap_remove(place);
        running.outputs()?.withdraw(output);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { act(outputs, take_back) }
}

/// The error that a library describes.
///
/// # Safety
/// This module's contract.
unsafe fn described(code: Code, message: *const c_char) -> Result<InferError, InferError> {
    // SAFETY: the caller's promise.
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
    let tell = |running: &mut Running, _: &Names| {
        let position = running.position(request)?;
        // SAFETY: the caller's promise.
        let error = unsafe { described(code, message) }?;
        running.outputs()?.fail(position, error);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { act(outputs, tell) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn fail_batch(outputs: *const Handle, code: Code, message: *const c_char) -> Code {
    let tell = |running: &mut Running, _: &Names| {
        // SAFETY: the caller's promise.
        let error = unsafe { described(code, message) }.unwrap_or_else(|wrong| run_error(wrong.message));
        running.failure = Some(error.clone());
        Err(error)
    };
    // SAFETY: the caller's promise.
    unsafe { act(outputs, tell) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn set_parameter(outputs: *const Handle, request: usize, given: *const Parameter) -> Code {
    let add = |running: &mut Running, _: &Names| {
        let position = running.position(request)?;
        // SAFETY: the caller's promise.
        let (name, value) = unsafe { parameter(given) }?;
        running.outputs()?.parameter(position, &name, value);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { act(outputs, add) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn reschedule(outputs: *const Handle, request: usize) -> Code {
    let again = |running: &mut Running, _: &Names| {
        let position = running.position(request)?;
        running.outputs()?.reschedule(position)
    };
    // SAFETY: the caller's promise.
    unsafe { act(outputs, again) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn inputs_ready(outputs: *const Handle) {
    // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise.
    unsafe {
        act(outputs, |running, _| {
            running.outputs()?.computed();
            Ok(())
        })
    };
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_begin(
    outputs: *const Handle,
    request: usize,
    response: *mut *const Responding,
) -> Code {
    let begin = |running: &mut Running, _: &Names| {
        // SAFETY: the caller's promise.
        unsafe { put(response, ptr::null()) }?;
        let position = running.position(request)?;
        // SAFETY: the response goes into `open`.
        let made = unsafe { running.outputs_for_response() }?.response(position)?;
        running.open = Some(made);
        running.allocated_in_response.clear();
        // SAFETY: as above.
        unsafe { put(response, outputs.cast()) }
    };
    // SAFETY: the caller's promise.
    unsafe { act(outputs, begin) }
}

/// Does something with the response that is open.
///
/// # Safety
/// This module's contract.
unsafe fn respond(
    response: *const Responding,
    action: impl FnOnce(&mut Running, &Names) -> Result<(), InferError>,
) -> Code {
    // SAFETY: the caller's promise; a response is its batch's handle.
    unsafe { act(response.cast::<Handle>(), action) }
}

fn no_response() -> InferError {
    misuse("no response is open: it was sent or dropped")
}

fn open(running: &mut Running) -> Result<&mut Response<'static, 'static>, InferError> {
    running.open.as_mut().ok_or_else(no_response)
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_allocate(
    response: *const Responding,
    output: *const Output,
    data: *mut *mut c_void,
) -> Code {
    let make = |running: &mut Running, names: &Names| {
        // SAFETY: the caller's promise.
        unsafe { put(data, ptr::null_mut()) }?;
        // SAFETY: as above.
        let wanted = unsafe { wanted(names, output) }?;
        open(running)?;
        once(&mut running.allocated_in_response, wanted.index, names)?;
        let memory = open(running)?.allocate(wanted.index, wanted.datatype, wanted.shape, wanted.bytes);
        let memory = memory.map(|memory| memory.as_mut_ptr());
        let memory = memory.inspect_err(|_| running.allocated_in_response.retain(|index| *index != wanted.index))?;
        // SAFETY: as above.
        unsafe { put(data, memory.cast()) }
    };
    // SAFETY: the caller's promise.
    unsafe { respond(response, make) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_set_parameter(response: *const Responding, given: *const Parameter) -> Code {
    let add = |running: &mut Running, _: &Names| {
        // SAFETY: the caller's promise.
        let (name, value) = unsafe { parameter(given) }?;
        open(running)?.parameter(&name, value);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { respond(response, add) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_send(response: *const Responding, last: i32) -> Code {
    let send = |running: &mut Running, _: &Names| {
        let made = running.open.take().ok_or_else(no_response)?;
        if last == 0 { made.send() } else { made.send_last() }
    };
    // SAFETY: the caller's promise.
    unsafe { respond(response, send) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_send_error(
    response: *const Responding,
    code: Code,
    message: *const c_char,
) -> Code {
    let send = |running: &mut Running, _: &Names| {
        // SAFETY: the caller's promise.
        let error = unsafe { described(code, message) }?;
        running.open.take().ok_or_else(no_response)?.send_error(error)
    };
    // SAFETY: the caller's promise.
    unsafe { respond(response, send) }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_drop(response: *const Responding) {
    // SAFETY: the caller's promise.
    unsafe { respond(response, |running, _| running.open.take().map(drop).ok_or_else(no_response)) };
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn finish(outputs: *const Handle, request: usize) -> Code {
    let end = |running: &mut Running, _: &Names| {
        let position = running.position(request)?;
        running.outputs()?.finish(position)
    };
    // SAFETY: the caller's promise.
    unsafe { act(outputs, end) }
}
