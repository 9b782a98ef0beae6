//! Responses that a library sends individually: responses of a decoupled model while its batch is
//! executed, and of detached requests, from any thread and even after their batch is over.
//!
//! Contract for `unsafe`: responses, responders and kept inputs are slots of their instance's
//! [`Handle`], which live as long as the handle; pointers that are passed in follow the rules of
//! the header.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Arc;

use pharos::error::InferError;
use pharos_backend::{Content, Reply, ReplyOutput, Responder};

use super::abi::{Code, Output, Parameter};
use super::foreign::{misuse, outcome, outcome_of, parameter, put, reference};
use super::outputs::{Wanted, allocated_before, described, once, wanted};
use super::running::{Handle, Names, Running, act};
use super::slots::{Answer, Detached, Responding, Slot};

const RESPONSE: &str = "the response";
const RESPONDER: &str = "the responder";

/// Returns a slot and its instance.
///
/// # Safety
/// This module's contract.
unsafe fn found<'a, T>(
    slot: *const Slot<T>,
    what: &str,
) -> Result<(&'a Slot<T>, &'a Handle), InferError> {
    // SAFETY: the caller guarantees it.
    let slot = unsafe { reference(slot, what) }?;
    // SAFETY: as above.
    Ok((slot, unsafe { reference(slot.instance.cast::<Handle>(), "instance") }?))
}

/// # Safety
/// This module's contract, as for all functions below.
pub(super) unsafe extern "C" fn response_begin(
    outputs: *const Handle,
    request: usize,
    response: *mut *const Responding,
) -> Code {
    let begin = |running: &mut Running, _: &Names| {
        // SAFETY: the caller guarantees it.
        unsafe { put(response, ptr::null()) }?;
        let position = running.position(request)?;
        // SAFETY: as above.
        let instance = unsafe { reference(outputs, "outputs") }?;
        // SAFETY: the response is stored in `open`.
        let made = unsafe { running.outputs_for_response() }?.response(position)?;
        let slot = instance.responses.put(outputs.cast(), Answer::OfBatch);
        running.open = Some((made, slot));
        running.allocated_in_response.clear();
        // SAFETY: as above.
        unsafe { put(response, slot) }
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, begin) }
}

fn no_response() -> InferError {
    misuse("no response is open: it was sent or dropped")
}

/// Allocates an output of the open response.
fn allocate_open(
    running: &mut Running,
    names: &Names,
    wanted: &Wanted<'_>,
) -> Result<*mut u8, InferError> {
    let (response, _) = running.open.as_mut().ok_or_else(no_response)?;
    once(&mut running.allocated_in_response, wanted.index, names)?;
    let memory = response.allocate(wanted.index, wanted.datatype, wanted.shape, wanted.bytes);
    let memory = memory.map(|memory| memory.as_mut_ptr());
    memory.inspect_err(|_| running.allocated_in_response.retain(|index| *index != wanted.index))
}

/// Allocates an output of a response to a detached request.
fn allocate_own(
    instance: &Handle,
    reply: &mut Reply,
    wanted: &Wanted<'_>,
) -> Result<*mut u8, InferError> {
    if reply.outputs.iter().any(|made| made.output == wanted.index) {
        return Err(allocated_before(wanted.index, &instance.names));
    }
    let mut memory = instance.runtime.memory(wanted.bytes)?;
    let start = memory.as_mut_ptr();
    let shape = wanted.shape.to_vec();
    reply.outputs.push(ReplyOutput {
        output: wanted.index,
        datatype: wanted.datatype,
        shape,
        content: Content::Memory(memory),
    });
    Ok(start)
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_allocate(
    response: *const Responding,
    output: *const Output,
    data: *mut *mut c_void,
) -> Code {
    // SAFETY: the caller guarantees it for each of the pointers.
    outcome_of(|| unsafe {
        put(data, ptr::null_mut())?;
        let (slot, instance) = found(response, RESPONSE)?;
        let wanted = wanted(&instance.names, output)?;
        let memory = slot.with(RESPONSE, |answer| match answer {
            Answer::OfBatch => {
                instance.call(|running, names| allocate_open(running, names, &wanted))
            }
            Answer::Own(_, reply) => allocate_own(instance, reply, &wanted),
        })?;
        put(data, memory.cast())
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_set_parameter(
    response: *const Responding,
    given: *const Parameter,
) -> Code {
    // SAFETY: the caller guarantees it for each of the pointers.
    outcome_of(|| unsafe {
        let (slot, instance) = found(response, RESPONSE)?;
        let (name, value) = parameter(given)?;
        slot.with(RESPONSE, |answer| match answer {
            Answer::OfBatch => instance.call(|running, _| {
                running.open.as_mut().ok_or_else(no_response)?.0.parameter(&name, value);
                Ok(())
            }),
            Answer::Own(_, reply) => {
                reply.parameters.push((name, value));
                Ok(())
            }
        })
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_send(response: *const Responding, last: i32) -> Code {
    outcome_of(|| {
        // SAFETY: the caller guarantees it.
        let (slot, instance) = unsafe { found(response, RESPONSE) }?;
        match instance.responses.take(slot, RESPONSE)? {
            Answer::OfBatch => instance.call(|running, _| {
                let (made, _) = running.open.take().ok_or_else(no_response)?;
                if last == 0 { made.send() } else { made.send_last() }
            }),
            Answer::Own(responder, reply) => responder.respond(reply, last != 0),
        }
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_send_error(
    response: *const Responding,
    code: Code,
    message: *const c_char,
) -> Code {
    outcome_of(|| {
        // SAFETY: the caller guarantees it.
        let (slot, instance) = unsafe { found(response, RESPONSE) }?;
        // SAFETY: as above.
        let error = unsafe { described(code, message) }?;
        match instance.responses.take(slot, RESPONSE)? {
            Answer::OfBatch => instance.call(|running, _| {
                let (made, _) = running.open.take().ok_or_else(no_response)?;
                made.send_error(error)
            }),
            Answer::Own(responder, _) => {
                responder.respond(Reply { error: Some(error), ..Reply::default() }, false)
            }
        }
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn response_drop(response: *const Responding) {
    outcome_of(|| {
        // SAFETY: the caller guarantees it.
        let (slot, instance) = unsafe { found(response, RESPONSE) }?;
        match instance.responses.take(slot, RESPONSE)? {
            Answer::OfBatch => {
                instance.call(|running, _| running.open.take().map(drop).ok_or_else(no_response))
            }
            Answer::Own(..) => Ok(()),
        }
    });
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn detach(
    outputs: *const Handle,
    request: usize,
    responder: *mut *const Detached,
) -> Code {
    let take = |running: &mut Running, _: &Names| {
        // SAFETY: the caller guarantees it.
        unsafe { put(responder, ptr::null()) }?;
        let position = running.position(request)?;
        // SAFETY: as above.
        let instance = unsafe { reference(outputs, "outputs") }?;
        let detached = Arc::new(running.outputs()?.detach(position)?);
        // SAFETY: as above.
        unsafe { put(responder, instance.responders.put(outputs.cast(), detached)) }
    };
    // SAFETY: the caller guarantees it.
    unsafe { act(outputs, take) }
}

/// Returns the responder in a slot.
///
/// # Safety
/// This module's contract.
unsafe fn responder_in(
    responder: *const Detached,
) -> Result<(Arc<Responder>, *const Handle), InferError> {
    // SAFETY: the caller guarantees it.
    let slot = unsafe { reference(responder, RESPONDER) }?;
    Ok((slot.with(RESPONDER, |responder| Ok(responder.clone()))?, slot.instance.cast()))
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn responder_begin(
    responder: *const Detached,
    response: *mut *const Responding,
) -> Code {
    // SAFETY: the caller guarantees it for each of the pointers.
    outcome_of(|| unsafe {
        put(response, ptr::null())?;
        let (responder, instance) = responder_in(responder)?;
        let answer = Answer::Own(responder, Reply::default());
        put(response, reference(instance, "instance")?.responses.put(instance.cast(), answer))
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn responder_fail(
    responder: *const Detached,
    code: Code,
    message: *const c_char,
) -> Code {
    // SAFETY: the caller guarantees it for each of the pointers.
    outcome_of(|| unsafe {
        let (responder, _) = responder_in(responder)?;
        responder.fail(described(code, message)?);
        Ok(())
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn responder_finish(responder: *const Detached) -> Code {
    // SAFETY: the caller guarantees it.
    outcome(unsafe { responder_in(responder) }.and_then(|(responder, _)| responder.finish()))
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn responder_is_cancelled(responder: *const Detached) -> i32 {
    // SAFETY: the caller guarantees it.
    match unsafe { responder_in(responder) } {
        Ok((responder, _)) => responder.is_cancelled().into(),
        Err(error) => {
            outcome(Err(error));
            0
        }
    }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn responder_ready(responder: *const Detached) -> i32 {
    // SAFETY: the caller guarantees it.
    match unsafe { responder_in(responder) } {
        Ok((responder, _)) => responder.is_ready().into(),
        Err(error) => {
            outcome(Err(error));
            0
        }
    }
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn responder_hold(responder: *const Detached, hold: i32) {
    outcome_of(|| {
        // SAFETY: the caller guarantees it.
        let (responder, _) = unsafe { responder_in(responder) }?;
        responder.hold_responses(hold != 0);
        Ok(())
    });
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn responder_drop(responder: *const Detached) {
    outcome_of(|| {
        // SAFETY: the caller guarantees it.
        let (slot, instance) = unsafe { found(responder, RESPONDER) }?;
        instance.responders.take(slot, RESPONDER).map(drop)
    });
}
