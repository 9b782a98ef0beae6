//! The data that a library creates an instance from, and functions to read it: the configuration in
//! parts, so that a backend in C does not need to parse JSON.
//!
//! Contract for `unsafe`: a [`Load`] lives until `pharos_backend_create` has returned, and the
//! library does not use it afterwards.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use parking_lot::Mutex;
use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos_backend::{Context, Runtime, load_error};

use super::abi::{self, Code, Tensor};
use super::foreign::{c_text, needed_text, outcome, reference};

/// `pharos_context`, and the data that its pointers refer to.
#[repr(C)]
pub(super) struct Load<'a> {
    context: abi::Context,
    config: &'a ModelConfig,
    runtime: &'a Runtime,
    /// The strings of `context`.
    _texts: [CString; 4],
    parameters: Vec<(&'a str, CString)>,
    inputs: Tensors,
    outputs: Tensors,
    // The message of fail_load, which the library may call from any thread.
    failure: Mutex<Option<String>>,
}

/// Tensors of the configuration, and their names.
#[derive(Default)]
struct Tensors {
    tensors: Vec<Tensor>,
    names: Vec<CString>,
}

impl Tensors {
    fn add(&mut self, name: &str, dims: &[i64], datatype: i32, optional: bool) {
        let name = c_text(name);
        let size = size_of::<Tensor>();
        let rank = dims.len();
        self.tensors.push(Tensor {
            size,
            name: name.as_ptr(),
            dims: dims.as_ptr(),
            rank,
            datatype,
            optional: i32::from(optional),
        });
        self.names.push(name);
    }
}

impl<'a> Load<'a> {
    pub(super) fn new(context: &Context<'a>, host: *const c_void, metrics: *const c_void) -> Self {
        let config = context.config;
        let directory = context.directory.to_string_lossy();
        let texts =
            [config.to_json().as_str(), &directory, &config.name, context.instance].map(c_text);
        let [json, directory, model, instance] = texts.each_ref().map(|text| text.as_ptr());
        let public = abi::Context {
            size: size_of::<abi::Context>(),
            host,
            metrics,
            config: json,
            directory,
            model,
            instance,
            version: context.version,
            threads: u32::try_from(context.threads).unwrap_or(u32::MAX),
            max_batch_size: config.max_batch_size,
            decoupled: config.decoupled.into(),
        };
        let mut inputs = Tensors::default();
        for input in &config.inputs {
            inputs.add(&input.name, &input.dims, input.datatype.number().into(), input.optional);
        }
        let mut outputs = Tensors::default();
        for output in &config.outputs {
            outputs.add(&output.name, &output.dims, output.datatype.number().into(), false);
        }
        for state in config.states.iter().filter(|state| state.output >= config.outputs.len()) {
            outputs.add(&state.output_name, &state.dims, state.datatype.number().into(), false);
        }
        let parameters =
            config.parameters.iter().map(|(name, text)| (name.as_str(), c_text(text))).collect();
        let failure = Mutex::new(None);
        let runtime = context.runtime;
        Self {
            context: public,
            config,
            runtime,
            _texts: texts,
            parameters,
            inputs,
            outputs,
            failure,
        }
    }

    /// Returns the context for the library.
    pub(super) fn context(&self) -> *const abi::Context {
        ptr::from_ref(self).cast()
    }

    /// Returns the reason why the library has not created an instance.
    pub(super) fn failure(&self, code: Code) -> InferError {
        let reason = self.failure.lock().take().or_else(|| super::foreign::last_error_of(code));
        let no_reason = || {
            format!(
                "the backend '{}' returned the code {code} and gave no reason",
                self.config.backend
            )
        };
        load_error(reason.unwrap_or_else(no_reason))
    }
}

/// # Safety
/// This module's contract.
pub(super) unsafe extern "C" fn config_parameter(
    load: *const Load<'static>,
    name: *const c_char,
) -> *const c_char {
    // SAFETY: the caller guarantees it.
    let found = unsafe { reference(load, "context") }.and_then(|load| {
        // SAFETY: as above.
        let name = unsafe { needed_text(name, "name") }?;
        Ok(load
            .parameters
            .iter()
            .find(|(known, _)| *known == name)
            .map_or(ptr::null(), |(_, text)| text.as_ptr()))
    });
    found.unwrap_or_else(|error| {
        outcome(Err(error));
        ptr::null()
    })
}

/// # Safety
/// This module's contract.
pub(super) unsafe extern "C" fn config_input(
    load: *const Load<'static>,
    position: usize,
) -> *const Tensor {
    // SAFETY: the caller guarantees it.
    unsafe { tensor(load, |load| load.inputs.tensors.get(position)) }
}

/// # Safety
/// This module's contract.
pub(super) unsafe extern "C" fn config_output(
    load: *const Load<'static>,
    position: usize,
) -> *const Tensor {
    // SAFETY: the caller guarantees it.
    unsafe { tensor(load, |load| load.outputs.tensors.get(position)) }
}

/// # Safety
/// This module's contract.
unsafe fn tensor<'a>(
    load: *const Load<'static>,
    find: impl FnOnce(&'a Load<'static>) -> Option<&'a Tensor>,
) -> *const Tensor {
    // SAFETY: the caller guarantees it.
    match unsafe { reference(load, "context") } {
        Ok(load) => find(load).map_or(ptr::null(), ptr::from_ref),
        Err(error) => {
            outcome(Err(error));
            ptr::null()
        }
    }
}

/// # Safety
/// This module's contract.
pub(super) unsafe extern "C" fn fail_load(
    load: *const Load<'static>,
    message: *const c_char,
) -> Code {
    // SAFETY: the caller guarantees it.
    let failed = unsafe { reference(load, "context") }.and_then(|load| {
        // SAFETY: as above.
        let message = unsafe { needed_text(message, "message") }?;
        *load.failure.lock() = Some(message);
        Ok(())
    });
    match failed {
        Ok(()) => abi::UNAVAILABLE,
        Err(error) => outcome(Err(error)),
    }
}

/// # Safety
/// This module's contract.
pub(super) unsafe extern "C" fn report_load_progress(
    load: *const Load<'static>,
    fraction: f64,
) -> Code {
    // SAFETY: the caller guarantees it.
    let load = unsafe { reference(load, "context") };
    outcome(load.and_then(|load| load.runtime.report_load_progress(fraction)))
}
