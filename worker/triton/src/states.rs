//! `TRITONBACKEND_State`: the new value of an implicit state of a sequence.

use std::ffi::{c_char, c_int, c_void};

use parking_lot::Mutex;

use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::{list, put, text};
use crate::kept::Part;
use crate::memory::{AttributesPointer, BufferAttributes, Place};
use crate::object::{self, Object};
use crate::request::{Request, State, StatePointer};
use crate::values::{self, CPU};

interface! {
    /// `TRITONBACKEND_StateNew`.
    fn new(
        state: *mut *mut Object<State>,
        request: *const Object<Request>,
        name: *const c_char,
        datatype: c_int,
        shape: *const i64,
        rank: u32,
    ) {
        let request = object::get(request)?;
        let answer = &request.answer;
        let config = &answer.model.config;
        if config.states.is_empty() {
            return Err(Fault::invalid(format!(
                "State configuration is missing for model '{}'.",
                config.name
            )));
        }
        let name = text(name, "the name of a state")?;
        let position = config.states.iter().position(|state| state.output_name == name);
        let position = position
            .ok_or_else(|| Fault::invalid(format!("state '{name}' is not a valid state name.")))?;
        let made = object::make(State {
            answer: answer.clone(),
            position,
            datatype: values::datatype(datatype)?,
            shape: list(shape, rank.into(), "the shape of a state")?.to_vec(),
            memory: Mutex::new(None),
            attributes: Mutex::new(None),
        });
        request.states.lock().push(StatePointer(made));
        put(state, made)
    }

    /// `TRITONBACKEND_StateBuffer`. The buffer is valid until the update.
    fn buffer(
        state: *const Object<State>,
        buffer: *mut *mut c_void,
        bytes: u64,
        memory: *mut c_int,
        device: *mut i64,
    ) {
        let state = object::get(state)?;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut place = state.memory.lock();
        let allocated = place.insert(state.answer.model.runtime.memory(size)?);
        put(buffer, allocated.as_mut_ptr().cast())?;
        put(memory, CPU)?;
        put(device, 0)
    }

    /// `TRITONBACKEND_StateBufferAttributes`. The attributes belong to the state.
    fn buffer_attributes(
        state: *const Object<State>,
        attributes: *mut *mut Object<BufferAttributes>,
    ) {
        let state = object::get(state)?;
        let runtime = &state.answer.model.runtime;
        let place = state.memory.lock().as_ref().map(|memory| Place::of_host(memory, runtime));
        let place = place.ok_or_else(|| Fault::invalid("a state has no buffer"))?;
        put(attributes, AttributesPointer::of(&state.attributes, place))
    }

    /// `TRITONBACKEND_StateUpdate`: the buffer becomes the value of the state when the batch ends.
    /// A state that is not updated keeps its value.
    fn update(state: *const Object<State>) {
        let state = object::get(state)?;
        let memory = state.memory.lock().take();
        let memory = memory
            .ok_or_else(|| Fault::invalid("a state is updated that has no buffer, or twice"))?;
        let kept = state.answer.kept();
        let kept = kept.ok_or_else(|| Fault::internal("the model has no states"))?;
        let part = Part { datatype: state.datatype, shape: state.shape.clone(), memory };
        kept.update(state.position, part);
        Ok(())
    }
}
