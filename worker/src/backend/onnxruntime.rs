//! ONNX models on ONNX Runtime, whose library is loaded when the worker starts: nothing of it is linked, and a machine
//! without it runs the same executable (see `tract`).
//!
//! Inputs are borrowed from the arena without a copy; outputs are copied once, from the runtime's memory to the arena.
//! Contract for `unsafe`: [`Input::data`] is aligned to 64 bytes, as long as its shape says (checked before), and stays
//! in place until `execute` returns, which is longer than the runtime looks at it.

use std::path::{Path, PathBuf};

use half::bf16;
use ort::environment::Environment;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, Shape, TensorRefMut};
use pharos::error::InferError;
use pharos::tensor::{DataType, byte_size, push_bytes_element};

use super::elements::{self, for_numbers};
use super::{Backend, Batch, Context, Input, Outputs, load_error, model_file, run_error};

/// The variable that names ONNX Runtime's library; the frontend sets it for its workers.
pub(super) const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

struct OnnxRuntime {
    session: Session,
    version: String,
    /// Name, position in the configuration and datatype of each configured output.
    outputs: Vec<(String, usize, DataType)>,
    _environment: Environment,
}

/// The library to load, if one is named.
pub(super) fn library() -> Option<PathBuf> {
    std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Loads the library and the model's file.
pub(super) fn create(context: &Context<'_>, library: &Path) -> Result<Box<dyn Backend>, InferError> {
    let path = model_file(context)?;
    let no_library = |error: &dyn std::fmt::Display| {
        load_error(format!(
            "ONNX Runtime cannot be loaded from '{}' ({LIBRARY_VARIABLE}): {error}; version 1.17 or later is needed, \
             `pip install onnxruntime` brings one, and `backend: \"tract\"` needs none",
            library.display()
        ))
    };
    let builder = ort::init_from(library).map_err(|error| no_library(&error))?;
    let environment = builder.with_telemetry(false).build().map_err(|error| no_library(&error))?;
    let session = open(&environment, context.threads, &path);
    let session =
        session.map_err(|error| load_error(format!("ONNX Runtime cannot load '{}': {error}", path.display())))?;
    let mut outputs = Vec::new();
    for (position, output) in context.config.outputs.iter().enumerate() {
        if !session.outputs().iter().any(|found| found.name() == output.name) {
            let names: Vec<_> = session.outputs().iter().map(|found| found.name()).collect();
            let text = format!("'{}' has no output '{}'; it has {}", path.display(), output.name, names.join(", "));
            return Err(load_error(text));
        }
        outputs.push((output.name.clone(), position, output.datatype));
    }
    let version = version_of(library);
    Ok(Box::new(OnnxRuntime { session, version, outputs, _environment: environment }))
}

/// A session that keeps to its threads: they do not spin while they wait, so that instances can share cores.
fn open(environment: &Environment, threads: usize, path: &Path) -> Result<Session, ort::Error> {
    let mut builder = Session::builder(environment)?
        .with_optimization_level(GraphOptimizationLevel::All)?
        .with_intra_threads(threads)?
        .with_inter_threads(1)?
        .with_config_entry("session.intra_op.allow_spinning", "0")?
        .with_config_entry("session.inter_op.allow_spinning", "0")?;
    builder.commit_from_file(path)
}

/// The version in the library's file name (`libonnxruntime.so.1.31.1`), else the runtime's own description.
fn version_of(library: &Path) -> String {
    let name = library.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let version = name.split_once(".so.").map(|(_, version)| version.to_owned());
    version.unwrap_or_else(|| "(unknown version)".to_owned())
}

impl Backend for OnnxRuntime {
    fn engine(&self) -> String {
        format!("onnxruntime {}", self.version)
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let failed = |error: ort::Error| run_error(format!("onnx runtime error: {error}"));
        let mut values: Vec<(&str, SessionInputValue<'_>)> = Vec::with_capacity(batch.inputs.len());
        for input in &batch.inputs {
            values.push((input.name, to_value(input, batch, outputs)?));
        }
        outputs.inputs_ready();
        let results = self.session.run(values).map_err(failed)?;
        outputs.computed();
        for (name, position, datatype) in self.outputs.iter().filter(|(_, position, _)| batch.wants(*position)) {
            if let Some(value) = results.get(name.as_str()) {
                from_value(value, (*position, *datatype), outputs)
                    .map_err(|error| run_error(format!("output '{name}': {error}")))?;
            }
        }
        Ok(())
    }
}

/// A value that borrows the input; BOOL and BYTES are copied, because their bytes must be made valid first.
fn to_value<'a>(
    input: &Input<'a>,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<SessionInputValue<'a>, InferError> {
    let failed = |error: ort::Error| run_error(format!("input '{}': {error}", input.name));
    let shape = Shape::new(input.shape.iter().copied());
    if let Some(expected) = byte_size(input.datatype, input.shape)
        && expected != input.data.len() as u64
    {
        return Err(run_error(format!("input '{}' has {} bytes instead of {expected}", input.name, input.data.len())));
    }
    let value = for_numbers!(input.datatype, Number => {
        let info = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::Default).map_err(failed)?;
        let data = input.data.as_ptr().cast_mut().cast();
        // SAFETY: the length was just compared with the shape; the rest is this module's contract. ONNX Runtime does not
        // write to its inputs.
        let tensor: TensorRefMut<'a, Number> = unsafe { TensorRefMut::from_raw(info, data, shape) }.map_err(failed)?;
        tensor.into()
    }, also Bf16 = bf16, otherwise match input.datatype {
        DataType::Bool => {
            let values: Vec<bool> = input.data.iter().map(|byte| *byte != 0).collect();
            ort::value::Tensor::from_array((shape, values)).map_err(failed)?.into()
        }
        _ => {
            let texts = elements::texts(input, batch, outputs)?;
            ort::value::Tensor::from_string_array((shape, texts.as_slice())).map_err(failed)?.into()
        }
    });
    Ok(value)
}

/// Copies an output to the arena.
fn from_value(
    value: &DynValue,
    (position, datatype): (usize, DataType),
    outputs: &mut Outputs<'_>,
) -> Result<(), InferError> {
    let failed = |error: ort::Error| run_error(error.to_string());
    if datatype == DataType::Bytes {
        let (shape, texts) = value.try_extract_strings().map_err(failed)?;
        let mut data = Vec::new();
        for text in texts {
            push_bytes_element(&mut data, text.as_bytes());
        }
        outputs.allocate(position, datatype, shape, data.len())?.copy_from_slice(&data);
        return Ok(());
    }
    for_numbers!(datatype, Number => {
        let (shape, values) = value.try_extract_tensor::<Number>().map_err(failed)?;
        let out = outputs.allocate_fixed(position, datatype, shape)?;
        for (bytes, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
            *bytes = value.to_le_bytes();
        }
    }, also Bf16 = bf16, otherwise {
        let (shape, values) = value.try_extract_tensor::<bool>().map_err(failed)?;
        for (byte, value) in outputs.allocate_fixed(position, datatype, shape)?.iter_mut().zip(values) {
            *byte = u8::from(*value);
        }
    });
    Ok(())
}
