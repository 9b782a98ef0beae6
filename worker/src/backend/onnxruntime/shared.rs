//! A session that several threads use, for backends of other crates: its inputs are integers, and its
//! outputs floating-point numbers. On a GPU, the runtime copies both from and to the memory of the
//! process.
//!
//! Contract for `unsafe`: the runtime allows concurrent runs of a session; a run changes nothing of
//! it that another run or a safe function of the binding reads.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::ptr::{self, NonNull};

use half::f16;
use ort::session::Session;
use ort::value::{DynValue, Outlet, TensorElementType, TensorRef, ValueType};
use ort::{AsPointer, sys};
use pharos::error::InferError;
use pharos_backend::{Context, load_error, run_error};

use super::{c_name, in_file, library, loaded_environment, providers, session::Wanted, version_of};

/// An input or output of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphTensor {
    /// Its name.
    pub name: String,
    /// The number of its dimensions; `None` if the file does not say it.
    pub rank: Option<usize>,
}

/// Reads an output: its shape, and its numbers in row-major order.
pub type ReadOutput<'a> = &'a mut dyn FnMut(&[usize], &[f32]) -> Result<(), InferError>;

/// A graph whose inputs are integers.
pub struct SharedSession {
    session: Session,
    version: String,
    inputs: Vec<GraphTensor>,
    input_names: Vec<CString>,
    /// Whether each input has integers of 32 bits.
    is_narrow: Vec<bool>,
    outputs: Vec<GraphTensor>,
    output_names: Vec<CString>,
}

impl SharedSession {
    /// Opens a graph with the options of a model.
    ///
    /// # Errors
    /// The library is not configured or cannot load the file, or an input is not of integers.
    pub fn open(context: &Context<'_>, path: &Path) -> Result<Self, InferError> {
        let library =
            library().ok_or_else(|| load_error("the library of ONNX Runtime is not configured"))?;
        let environment = loaded_environment(&library)?;
        let options =
            context.config.session_options().map_err(|error| load_error(error.to_string()))?;
        let directory = context.directory;
        let wanted = Wanted { options: &options, threads: context.threads, path, directory };
        let providers = if context.on_gpu {
            let of_gpu = providers::of(context.config)
                .map_err(|text| load_error(format!("{}: {text}", context.instance)))?;
            providers::own_streams(&of_gpu)
        } else {
            providers::of_processors(context.config)
        };
        let session = wanted.open(&environment, providers).map_err(|error| {
            load_error(format!("ONNX Runtime cannot load '{}': {error}", path.display()))
        })?;
        let is_narrow = session.inputs().iter().map(is_narrow).collect::<Result<_, _>>();
        let names = |found: &[Outlet]| -> Result<Vec<CString>, InferError> {
            let names = found.iter().map(|one| c_name(one.name())).collect::<Result<_, _>>();
            names.map_err(|text| in_file(path, &text))
        };
        Ok(Self {
            is_narrow: is_narrow.map_err(|text| in_file(path, &text))?,
            inputs: tensors(session.inputs()),
            input_names: names(session.inputs())?,
            outputs: tensors(session.outputs()),
            output_names: names(session.outputs())?,
            version: version_of(&library) + if context.on_gpu { " on CUDA" } else { "" },
            session,
        })
    }

    /// The engine with the version of the library.
    pub fn engine(&self) -> String {
        format!("onnxruntime {}", self.version)
    }

    /// The inputs.
    pub fn inputs(&self) -> &[GraphTensor] {
        &self.inputs
    }

    /// The outputs.
    pub fn outputs(&self) -> &[GraphTensor] {
        &self.outputs
    }

    /// Computes an output from all inputs, which have this shape, and calls `read` with its shape and
    /// its numbers in row-major order.
    ///
    /// # Errors
    /// The runtime fails, the output is not of floating-point numbers, or `read` fails.
    pub fn run(
        &self,
        shape: [usize; 2],
        inputs: &[Vec<i64>],
        output: usize,
        read: ReadOutput<'_>,
    ) -> Result<(), InferError> {
        let failed = |error: ort::Error| run_error(format!("onnx runtime error: {error}"));
        let narrow: Vec<Vec<i32>> = inputs
            .iter()
            .zip(&self.is_narrow)
            .map(|(values, is_narrow)| match is_narrow {
                // Numbers of tokens and positions.
                true => values.iter().map(|value| *value as i32).collect(),
                false => Vec::new(),
            })
            .collect();
        let mut values = Vec::with_capacity(inputs.len());
        for ((wide, narrow), is_narrow) in inputs.iter().zip(&narrow).zip(&self.is_narrow) {
            values.push(match is_narrow {
                true => TensorRef::from_array_view((shape, narrow.as_slice()))
                    .map_err(failed)?
                    .into_dyn(),
                false => {
                    TensorRef::from_array_view((shape, wide.as_slice())).map_err(failed)?.into_dyn()
                }
            });
        }
        let name = self.output_names.get(output);
        let name = name.ok_or_else(|| run_error("the graph does not have this output"))?;
        let names: Vec<_> = self.input_names.iter().map(|name| name.as_ptr()).collect();
        if names.len() != values.len() {
            return Err(run_error("the graph has another number of inputs"));
        }
        let pointers: Vec<*const sys::OrtValue> = values.iter().map(|value| value.ptr()).collect();
        // SAFETY: see `compute`; each name has a value, and the values live until it returns.
        let value = unsafe { compute(&self.session, &names, &pointers, name) }.map_err(failed)?;
        read_numbers(&value, read)
    }
}

/// Runs a session for one output.
///
/// # Safety
/// `names` and `values` have the same length, and their pointers are valid until this returns.
unsafe fn compute(
    session: &Session,
    names: &[*const std::ffi::c_char],
    values: &[*const sys::OrtValue],
    output: &CStr,
) -> Result<DynValue, ort::Error> {
    let mut found: *mut sys::OrtValue = ptr::null_mut();
    // SAFETY: the caller guarantees the arrays; the module's contract allows a shared session. A value
    // that the runtime stores in place of the null pointer is owned here; on an error it stores none.
    unsafe {
        let status = (ort::api().Run)(
            session.ptr().cast_mut(),
            ptr::null(),
            names.as_ptr(),
            values.as_ptr(),
            values.len(),
            &output.as_ptr(),
            1,
            &raw mut found,
        );
        ort::Error::result_from_status(status)?;
        let found = NonNull::new(found).ok_or_else(|| ort::Error::new("no output was computed"))?;
        Ok(DynValue::from_ptr(found, Some(session.allocator())))
    }
}

fn tensors(found: &[Outlet]) -> Vec<GraphTensor> {
    let tensor = |outlet: &Outlet| GraphTensor {
        name: outlet.name().to_owned(),
        rank: outlet.dtype().tensor_shape().map(|shape| shape.len()),
    };
    found.iter().map(tensor).collect()
}

/// Returns whether an input has integers of 32 bits.
fn is_narrow(input: &Outlet) -> Result<bool, String> {
    match input.dtype() {
        ValueType::Tensor { ty: TensorElementType::Int64, .. } => Ok(false),
        ValueType::Tensor { ty: TensorElementType::Int32, .. } => Ok(true),
        other => Err(format!(
            "has the input '{}' of the type {other}; inputs of INT64 and INT32 are possible",
            input.name()
        )),
    }
}

/// Calls a function with the shape and the numbers of a value.
fn read_numbers(value: &DynValue, read: ReadOutput<'_>) -> Result<(), InferError> {
    let sizes = |shape: &[i64]| -> Vec<usize> {
        shape.iter().map(|size| usize::try_from(*size).unwrap_or(0)).collect()
    };
    if let Ok((shape, values)) = value.try_extract_tensor::<f32>() {
        return read(&sizes(shape), values);
    }
    match value.try_extract_tensor::<f16>() {
        Ok((shape, values)) => {
            let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
            read(&sizes(shape), &values)
        }
        Err(_) => Err(run_error(format!(
            "the output of the graph has the type {}; outputs of FP32 and FP16 are possible",
            value.dtype()
        ))),
    }
}
