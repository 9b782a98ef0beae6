//! `TRITONBACKEND_Response`, `TRITONBACKEND_ResponseFactory` and `TRITONBACKEND_Output`.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use parking_lot::Mutex;
use pharos::infer::{Parameter, Parameters};
use pharos::tensor::{DataType, byte_size, format_shape};
use pharos_backend::{Content, Reply, ReplyOutput, run_error};

use crate::answer::Answer;
use crate::buffer::OutputBytes;
use crate::error::{self, ErrorPointer, interface};
use crate::fault::Fault;
use crate::foreign::{list, put, text};
use crate::memory::{AttributesPointer, BufferAttributes};
use crate::object::{self, Object, Objects, kinds};
use crate::request::Request;
use crate::values::{self, CPU};

/// The flag of the last response.
const FINAL: u32 = 1;

/// `TRITONBACKEND_ResponseFactory`: makes responses when the request may be released already.
pub(crate) struct Factory {
    answer: Arc<Answer>,
}

/// `TRITONBACKEND_Response`.
pub(crate) struct Response {
    answer: Arc<Answer>,
    /// With room for all outputs of the model. Locked to read or add one only.
    outputs: Mutex<Objects<Output>>,
    /// Locked to add a parameter only.
    parameters: Mutex<Parameters>,
}

/// `TRITONBACKEND_Output`.
pub(crate) struct Output {
    answer: Arc<Answer>,
    /// Its position in the configuration's outputs.
    position: usize,
    datatype: DataType,
    shape: Vec<i64>,
    /// Its bytes. Locked to set or take them only; the library writes there without the lock.
    bytes: Mutex<Option<OutputBytes>>,
    /// Created when the backend asks for them. Locked to read or write the pointer only.
    attributes: Mutex<Option<AttributesPointer>>,
}

kinds! {
    Factory = 13, "a response factory";
    Response = 14, "a response";
    Output = 15, "an output";
}

impl Response {
    fn new(answer: &Arc<Answer>) -> Self {
        let outputs = Mutex::new(Objects::with_room(answer.model.config.outputs.len()));
        Self { answer: answer.clone(), outputs, parameters: Mutex::default() }
    }

    fn parameter(&self, name: &str, value: Parameter) {
        let mut parameters = self.parameters.lock();
        match parameters.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => parameters.push((name.to_owned(), value)),
        }
    }

    /// Returns the response in the form of the worker, with the outputs that the client wants.
    fn into_reply(self) -> Result<(Arc<Answer>, Reply), Fault> {
        let Self { answer, outputs, parameters } = self;
        let mut outputs = outputs.into_inner();
        let mut made = Vec::with_capacity(outputs.len());
        for output in outputs.drain() {
            if answer.wants(output.position) {
                made.push(output.into_reply()?);
            }
        }
        let reply = Reply { outputs: made, parameters: parameters.into_inner(), error: None };
        Ok((answer, reply))
    }
}

impl Output {
    fn name(&self) -> &str {
        let output = self.answer.model.config.outputs.get(self.position);
        output.map_or("", |output| &output.name)
    }

    /// Checks the size of its buffer and returns it in the form of the worker.
    fn into_reply(self) -> Result<ReplyOutput, Fault> {
        let bytes = self.bytes.lock().take();
        let size = bytes.as_ref().map_or(0, OutputBytes::len);
        let needed = match self.datatype {
            DataType::Bytes => None,
            datatype => Some(byte_size(datatype, &self.shape).unwrap_or(u64::MAX)),
        };
        if needed.is_some_and(|needed| needed != size as u64) {
            return Err(Fault::internal(format!(
                "output '{}' has a buffer of {size} bytes; its shape {} of {} needs {}",
                self.name(),
                format_shape(&self.shape),
                self.datatype,
                needed.unwrap_or_default()
            )));
        }
        let content = match bytes {
            Some(bytes) => bytes.into_content(),
            None => Content::Memory(self.answer.model.runtime.memory(0)?),
        };
        let Self { position: output, datatype, shape, .. } = self;
        Ok(ReplyOutput { output, datatype, shape, content })
    }
}

/// Checks the flags of a response.
fn is_final(flags: u32) -> Result<bool, Fault> {
    match flags {
        0 => Ok(false),
        FINAL => Ok(true),
        flags => Err(Fault::invalid(format!(
            "the flags of a response are {flags}; 0 and 1 (final) are allowed"
        ))),
    }
}

interface! {
    /// `TRITONBACKEND_ResponseFactoryNew`.
    fn factory_new(factory: *mut *mut Object<Factory>, request: *const Object<Request>) {
        let answer = object::get(request)?.answer.clone();
        object::give(factory, Factory { answer })
    }

    /// `TRITONBACKEND_ResponseFactoryDelete`.
    fn factory_delete(factory: *mut Object<Factory>) {
        object::delete(factory)
    }

    /// `TRITONBACKEND_ResponseFactorySendFlags`.
    fn factory_send_flags(factory: *const Object<Factory>, flags: u32) {
        let answer = object::get(factory)?.answer.clone();
        if is_final(flags)? { answer.finish() } else { Ok(()) }
    }

    /// `TRITONBACKEND_ResponseFactoryIsCancelled`.
    fn factory_is_cancelled(factory: *const Object<Factory>, cancelled: *mut bool) {
        put(cancelled, object::get(factory)?.answer.is_cancelled())
    }

    /// `TRITONBACKEND_ResponseNew`.
    fn new(response: *mut *mut Object<Response>, request: *const Object<Request>) {
        object::give(response, Response::new(&object::get(request)?.answer))
    }

    /// `TRITONBACKEND_ResponseNewFromFactory`.
    fn new_from_factory(response: *mut *mut Object<Response>, factory: *const Object<Factory>) {
        object::give(response, Response::new(&object::get(factory)?.answer))
    }

    /// `TRITONBACKEND_ResponseDelete`: discards the response.
    fn delete(response: *mut Object<Response>) {
        object::delete(response)
    }

    /// `TRITONBACKEND_ResponseSetStringParameter`.
    fn set_string(response: *const Object<Response>, name: *const c_char, value: *const c_char) {
        let value = text(value, "the value of a parameter")?.to_owned();
        object::get(response)?
            .parameter(text(name, "the name of a parameter")?, Parameter::String(value));
        Ok(())
    }

    /// `TRITONBACKEND_ResponseSetIntParameter`.
    fn set_int(response: *const Object<Response>, name: *const c_char, value: i64) {
        object::get(response)?
            .parameter(text(name, "the name of a parameter")?, Parameter::Int(value));
        Ok(())
    }

    /// `TRITONBACKEND_ResponseSetBoolParameter`.
    fn set_bool(response: *const Object<Response>, name: *const c_char, value: bool) {
        object::get(response)?
            .parameter(text(name, "the name of a parameter")?, Parameter::Bool(value));
        Ok(())
    }

    /// `TRITONBACKEND_ResponseSetDoubleParameter`.
    fn set_double(response: *const Object<Response>, name: *const c_char, value: f64) {
        object::get(response)?
            .parameter(text(name, "the name of a parameter")?, Parameter::Double(value));
        Ok(())
    }

    /// `TRITONBACKEND_ResponseOutput`: adds an output of the model. The output belongs to the
    /// response.
    fn output(
        response: *const Object<Response>,
        output: *mut *mut Object<Output>,
        name: *const c_char,
        datatype: c_int,
        shape: *const i64,
        rank: u32,
    ) {
        let response = object::get(response)?;
        let answer = &response.answer;
        let name = text(name, "the name of an output")?;
        let config = &answer.model.config;
        let position = answer.model.output_at(name).ok_or_else(|| {
            Fault::invalid(format!("model '{}' has no output '{name}'", config.name))
        })?;
        let datatype = values::datatype(datatype)?;
        let shape = list(shape, rank.into(), "the shape of an output")?.to_vec();
        let specified = config.outputs.get(position).map(|output| output.datatype);
        if config.strict_output_types && specified.is_some_and(|specified| specified != datatype) {
            return Err(Fault::invalid(format!(
                "output '{name}' is {datatype}; its configured datatype is {}",
                specified.unwrap_or(datatype)
            )));
        }
        let mut outputs = response.outputs.lock();
        let exists =
            || Fault::exists(format!("the response has the output '{name}' already"));
        if outputs.iter().any(|other| other.position == position) {
            return Err(exists());
        }
        let made = outputs.add(Output {
            answer: answer.clone(),
            position,
            datatype,
            shape,
            bytes: Mutex::new(None),
            attributes: Mutex::new(None),
        });
        // There is room for each output of the model once.
        put(output, made.ok_or_else(exists)?)
    }

    /// `TRITONBACKEND_OutputBuffer`: allocates the bytes of an output, in memory that the server
    /// reads, or on the GPU if both the backend and the client want that. The results say where the
    /// buffer is.
    fn output_buffer(
        output: *const Object<Output>,
        buffer: *mut *mut c_void,
        bytes: u64,
        memory: *mut c_int,
        device: *mut i64,
    ) {
        let output = object::get(output)?;
        let mut bytes_of_output = output.bytes.lock();
        if bytes_of_output.is_some() {
            return Err(Fault::exists(format!("output '{}' has a buffer already", output.name())));
        }
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let preferred = list(memory.cast_const(), 1, "the preferred kind of memory")?;
        let preferred = preferred.first().copied().unwrap_or(CPU);
        let allocated = OutputBytes::allocate(&output.answer, output.position, size, preferred)?;
        let allocated = bytes_of_output.insert(allocated);
        put(buffer, allocated.start())?;
        allocated.place(&output.answer.model.runtime).put(memory, device)
    }

    /// `TRITONBACKEND_OutputBufferAttributes`. The attributes belong to the output.
    fn output_buffer_attributes(
        output: *const Object<Output>,
        attributes: *mut *mut Object<BufferAttributes>,
    ) {
        let output = object::get(output)?;
        let runtime = &output.answer.model.runtime;
        let place = output.bytes.lock().as_ref().map(|bytes| bytes.place(runtime));
        let place = place
            .ok_or_else(|| Fault::invalid(format!("output '{}' has no buffer", output.name())))?;
        put(attributes, AttributesPointer::of(&output.attributes, place))
    }

    /// `TRITONBACKEND_ResponseSend`: sends and deletes the response. The error, if there is one,
    /// is sent in place of the outputs and stays with the caller.
    fn send(response: *mut Object<Response>, flags: u32, failure: ErrorPointer) {
        let last = is_final(flags)?;
        let failure = if failure.is_null() { None } else { Some(error::read(failure)) };
        let response = object::take(response)?;
        let answer = response.answer.clone();
        if let Some(failure) = failure {
            drop(response);
            let reply = Reply { error: Some(failure), ..Reply::default() };
            return answer.respond(reply, last);
        }
        match response.into_reply() {
            Ok((answer, reply)) => answer.respond(reply, last),
            // The backend gets the error, and the client too.
            Err(fault) => {
                let failure = run_error(fault.text.to_string());
                answer.respond(Reply { error: Some(failure), ..Reply::default() }, last)?;
                Err(fault)
            }
        }
    }
}
