//! ONNX models on ONNX Runtime. Its library is loaded when the worker starts and is not linked, so
//! a machine without it runs the same executable.
//!
//! Inputs are borrowed from the arena without a copy. The runtime writes outputs whose shape is
//! known before the run directly to the arena; other outputs (strings, shapes that depend on data)
//! are copied once from the runtime's memory. Contract for `unsafe`: [`Input::data`] and the memory
//! from [`Outputs`] are aligned to 64 bytes, have the length of their shape (checked, or
//! allocated so), and stay in place until `execute` returns, which is after the runtime's last
//! access. No other code accesses an output's memory meanwhile; the runtime writes it before it
//! reads it. On a GPU, tensors are on the device (see `device`).

mod device;
mod providers;
mod session;
pub(super) mod shared;

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use half::bf16;
use ort::environment::Environment;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{Session, SessionInputValue};
use ort::value::{
    DynValue, DynValueRefMut, IntoTensorElementType, PrimitiveTensorElementType, Shape,
    TensorRefMut, ValueType,
};
use ort::{AsPointer, sys};
use parking_lot::Mutex;
use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, byte_size, push_bytes_element};
use pharos_backend::onnx::{model_file, texts};
use pharos_backend::{
    Backend, Batch, Context, DeviceInputs, Input, Outputs, for_numbers, load_error, run_error,
};

use super::ready_gpu;
use crate::device::Cuda;
use device::{Computing, OnDevice};
use session::Wanted;

/// The environment variable with the path of ONNX Runtime's library; the frontend sets it for its
/// workers.
pub(super) const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

/// Advice for a library without the OpenVINO provider.
const NO_OPENVINO: &str = "; the provider openvino comes with `pip install onnxruntime-openvino`";

struct OnnxRuntime {
    opened: Opened,
    version: String,
    /// The names of the inputs of a batch.
    inputs: Vec<CString>,
    outputs: Vec<Output>,
}

/// A session and its device state, which is dropped after the session because the session computes
/// in one of its streams.
struct Opened {
    session: Session,
    device: Option<OnDevice>,
}

/// A configured output.
struct Output {
    name: CString,
    position: usize,
    datatype: DataType,
    /// The shape for a whole batch, if it is known before the run: -1 stands for the rows. `None`:
    /// the output is copied.
    shape: Option<Vec<i64>>,
}

/// An output's memory in the arena, as a value of the runtime; `None` if the runtime allocates
/// memory itself.
type ArenaOutput = Option<DynValueRefMut<'static>>;

/// Returns the path of the library to load, if it is set.
pub(super) fn library() -> Option<PathBuf> {
    std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Loads the library and the model's file.
pub(super) fn create(
    context: &Context<'_>,
    cuda: &Arc<Cuda>,
    library: &Path,
) -> Result<Box<dyn Backend>, InferError> {
    let path = model_file(context)?;
    let environment = loaded_environment(library)?;
    let opened = session(&environment, context, cuda, &path)?;
    let outputs =
        outputs_of(&opened.session, context.config).map_err(|text| in_file(&path, &text))?;
    let names = (0..context.config.backend_inputs())
        .filter_map(|position| context.config.input_name(position));
    let inputs =
        names.map(c_name).collect::<Result<_, _>>().map_err(|text| in_file(&path, &text))?;
    let version = version_of(library) + if opened.device.is_some() { " on CUDA" } else { "" };
    Ok(Box::new(OnnxRuntime { opened, version, inputs, outputs }))
}

/// Like [`environment`], with an error for the author of a model.
fn loaded_environment(library: &Path) -> Result<Environment, InferError> {
    environment(library).map_err(|error| {
        load_error(format!(
            "ONNX Runtime cannot be loaded from '{}' ({LIBRARY_VARIABLE}): {error}; it needs \
             version 1.17 or later, which `pip install onnxruntime` provides",
            library.display()
        ))
    })
}

/// Returns the environment of this process, which can have only one. Loads the library first if
/// that has not happened.
fn environment(library: &Path) -> Result<Environment, Box<dyn std::error::Error>> {
    static ONLY: Mutex<Option<Environment>> = Mutex::new(None);
    let mut only = ONLY.lock();
    match &*only {
        Some(environment) => Ok(environment.clone()),
        None => Ok(only.insert(ort::init_from(library)?.with_telemetry(false).build()?).clone()),
    }
}

/// Loads the library and the objects that it builds for its first session, so that copies of this
/// process share it. Starts no threads. Returns the path of the library, if it is set; a model
/// reports why it cannot be loaded.
pub(super) fn preload() -> Option<PathBuf> {
    let library = library()?;
    if let Ok(environment) = environment(&library) {
        // An error only leaves more to do for the copies.
        let _ = Session::builder(&environment)
            .and_then(|builder| Ok(builder.with_intra_threads(1)?.with_inter_threads(1)?))
            .and_then(|mut builder| builder.commit_from_memory(&identity()));
    }
    Some(library)
}

/// Returns a model with one node `Identity`, from the input `x` to the output `y`, which are
/// vectors of one FP32 element. The field numbers are defined by `ModelProto` in `onnx.proto` of
/// ONNX.
fn identity() -> Vec<u8> {
    let fields: [&[u8]; 5] = [
        // The version 8 of the format, and the length of the graph.
        b"\x08\x08\x3a\x37",
        // The node and the name of the graph.
        b"\x0a\x10\x0a\x01x\x12\x01y\x22\x08Identity\x12\x01g",
        // The input: name, type and shape.
        b"\x5a\x0f\x0a\x01x\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01",
        // The output.
        b"\x62\x0f\x0a\x01y\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01",
        // The operators of version 13.
        b"\x42\x02\x10\x0d",
    ];
    fields.concat()
}

/// Opens a session with the model's file, on the instance's GPU if it has one.
fn session(
    environment: &Environment,
    context: &Context<'_>,
    cuda: &Arc<Cuda>,
    path: &Path,
) -> Result<Opened, InferError> {
    let options =
        context.config.session_options().map_err(|error| load_error(error.to_string()))?;
    let wanted =
        Wanted { options: &options, threads: context.threads, path, directory: context.directory };
    let on_processors = || {
        let accelerators = providers::of_processors(context.config);
        let advice = if accelerators.is_empty() { "" } else { NO_OPENVINO };
        let session = wanted.open(environment, accelerators).map_err(|error| {
            load_error(format!("ONNX Runtime cannot load '{}': {error}{advice}", path.display()))
        })?;
        Ok(Opened { session, device: None })
    };
    if !context.on_gpu {
        return on_processors();
    }
    let mut on_device = providers::of(context.config)
        .map_err(|text| load_error(format!("{}: {text}", context.instance)))?;
    if providers::drop_graphs(&mut on_device) {
        eprintln!(
            "{} runs without CUDA graphs: they would replay a batch with the addresses of another",
            context.instance
        );
    }
    let on_gpu = || -> Result<Opened, InferError> {
        let cuda = ready_gpu(cuda)?;
        let mut device = OnDevice::new(cuda, context)?;
        let session = wanted.open(environment, device.dispatches(&on_device)).map_err(|error| {
            let error = error.to_string();
            // The code of this error is the general one, so only the text gives the reason.
            let lacks = error.contains("Failed to load library");
            let advice = "; the provider and the libraries of CUDA and cuDNN that it needs come \
                          with `pip install onnxruntime-gpu[cuda,cudnn]`";
            let advice = if lacks { advice } else { "" };
            load_error(format!(
                "ONNX Runtime cannot load '{}' on its GPU: {error}{advice}",
                path.display()
            ))
        })?;
        device.find_returned_inputs(&session, context);
        Ok(Opened { session, device: Some(device) })
    };
    match on_gpu() {
        Ok(opened) => Ok(opened),
        Err(error)
            if context
                .config
                .allows_cpu_fallback()
                .map_err(|error| load_error(error.to_string()))? =>
        {
            let fallback = ModelConfig::CPU_FALLBACK;
            eprintln!(
                "{} runs on processors, as {fallback} allows: {}",
                context.instance, error.message
            );
            on_processors()
        }
        Err(error) => Err(error),
    }
}

fn in_file(path: &Path, text: &str) -> InferError {
    load_error(format!("'{}' {text}", path.display()))
}

/// Converts a name for the runtime.
fn c_name(name: &str) -> Result<CString, String> {
    CString::new(name)
        .map_err(|_| format!("cannot have the name '{}' with a NUL byte", name.escape_debug()))
}

/// Returns the configured outputs, each of which must exist in the file.
fn outputs_of(session: &Session, config: &ModelConfig) -> Result<Vec<Output>, String> {
    let found = config.backend_outputs().enumerate().map(|(position, (name, datatype))| {
        let Some(found) = session.outputs().iter().find(|found| found.name() == name) else {
            let names: Vec<_> = session.outputs().iter().map(|found| found.name()).collect();
            return Err(format!("has no output '{name}'; it has {}", names.join(", ")));
        };
        // For an input that is also an output, the runtime returns the input's memory, whatever
        // memory it was given.
        let passed_through = session.inputs().iter().any(|input| input.name() == name);
        let shape = known_shape(found.dtype(), datatype, config.max_batch_size > 0)
            .filter(|_| !passed_through);
        Ok(Output { name: c_name(name)?, position, datatype, shape })
    });
    found.collect()
}

/// Returns the shape that a file declares, if only its row dimension is variable.
///
/// A file without a declared shape looks like one that declares a scalar; neither gets memory in
/// the arena.
fn known_shape(declared: &ValueType, datatype: DataType, batches: bool) -> Option<Vec<i64>> {
    let ValueType::Tensor { ty, shape, .. } = declared else { return None };
    let configured = for_numbers!(datatype, Number => Number::into_tensor_element_type(), also Bf16 = bf16, otherwise {
        (datatype == DataType::Bool).then(bool::into_tensor_element_type)?
    });
    let (first, rest) = shape.split_first()?;
    let known = (*first >= 0 || batches) && rest.iter().all(|dim| *dim >= 0);
    (known && *ty == configured).then(|| shape.to_vec())
}

/// Returns the version in the library's file name (`libonnxruntime.so.1.31.1`), if it has one.
fn version_of(library: &Path) -> String {
    let name = library.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let version = name.split_once(".so.").map(|(_, version)| version.to_owned());
    version.unwrap_or_else(|| "(unknown version)".to_owned())
}

impl Backend for OnnxRuntime {
    fn engine(&self) -> String {
        format!("onnxruntime {}", self.version)
    }

    /// On a GPU, each input is copied once.
    fn tolerates_concurrent_writes(&self) -> bool {
        self.opened.device.is_some()
    }

    fn takes_device_memory(&self) -> DeviceInputs {
        if self.opened.device.is_some() { DeviceInputs::Pieces } else { DeviceInputs::Never }
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let Opened { session, device } = &mut self.opened;
        if let Some(device) = device {
            let wanted =
                self.outputs.iter_mut().filter(|output| batch.wants(output.position)).collect();
            device.execute(Computing { session, names: &self.inputs, wanted }, batch, outputs)?;
            outputs.sort();
            return Ok(());
        }
        let mut inputs = Vec::with_capacity(batch.inputs.len());
        for input in &batch.inputs {
            let name = self
                .inputs
                .get(input.index)
                .ok_or_else(|| run_error("an input is not configured"))?;
            inputs.push((name.as_c_str(), to_value(input, batch, outputs)?));
        }
        outputs.inputs_ready();
        let mut wanted: Vec<_> =
            self.outputs.iter_mut().filter(|output| batch.wants(output.position)).collect();
        let mut places = Vec::with_capacity(wanted.len());
        for output in &wanted {
            places.push(output.place(batch.rows(), outputs)?);
        }
        let results = run_or_withdraw(session, &inputs, &mut wanted, &mut places, outputs)?;
        outputs.computed();
        wanted
            .iter()
            .zip(results)
            .try_for_each(|(output, value)| output.copy(value.as_ref(), outputs))?;
        // Outputs with known shapes were allocated before the others.
        outputs.sort();
        Ok(())
    }
}

impl Output {
    /// Returns the shape for this number of rows, if it is known.
    fn shape_of(&self, rows: u64) -> Option<Vec<i64>> {
        let mut shape = self.shape.clone()?;
        if let Some(first) = shape.first_mut().filter(|first| **first < 0) {
            *first = i64::try_from(rows).unwrap_or(i64::MAX);
        }
        Some(shape)
    }

    fn failed(&self, why: &dyn std::fmt::Display) -> InferError {
        run_error(format!("output '{}': {why}", self.name.to_string_lossy()))
    }

    /// Copies an output that the runtime has allocated itself to the arena; does nothing for
    /// `None`.
    fn copy(&self, value: Option<&DynValue>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let Some(value) = value else { return Ok(()) };
        from_value(value, self.position, self.datatype, outputs)
            .map_err(|error| self.failed(&error))
    }

    /// Allocates memory in the arena, if the shape is known.
    fn place(&self, rows: u64, outputs: &mut Outputs<'_>) -> Result<ArenaOutput, InferError> {
        let Some(shape) = self.shape_of(rows) else { return Ok(None) };
        let memory = outputs.allocate_fixed(self.position, self.datatype, &shape)?.as_mut_ptr();
        let place = for_numbers!(self.datatype, Number => {
            // SAFETY: the memory was just allocated for this shape and only for this output; the
            // rest is this module's contract.
            unsafe { borrow::<Number>(AllocationDevice::CPU, memory, &shape) }
        }, also Bf16 = bf16, otherwise {
            // SAFETY: as above; a shape is known for BOOL, which has one byte for each element, but
            // not for BYTES.
            unsafe { borrow::<bool>(AllocationDevice::CPU, memory, &shape) }
        });
        Ok(Some(place.map_err(|error| self.failed(&error))?))
    }
}

/// Runs the session. If that fails with outputs in the arena, repeats the run without them and
/// clears `places`.
fn run_or_withdraw(
    session: &mut Session,
    inputs: &[(&CStr, SessionInputValue<'_>)],
    wanted: &mut [&mut Output],
    places: &mut [ArenaOutput],
    outputs: &mut Outputs<'_>,
) -> Result<Vec<Option<DynValue>>, InferError> {
    let mut results = run(session, inputs, wanted, places);
    if results.is_err() && places.iter().any(Option::is_some) {
        // The cause cannot be determined: the runtime has no separate code for an undeclared shape,
        // and its messages differ between versions. A batch that would fail anyway fails twice.
        wanted.iter().for_each(|output| outputs.withdraw(output.position));
        let mut no_places: Vec<ArenaOutput> = wanted.iter().map(|_| None).collect();
        results = run(session, inputs, wanted, &mut no_places);
        if let Ok(values) = &results {
            switch_to_copies(wanted, places, values);
        }
        places.iter_mut().for_each(|place| *place = None);
    }
    results.map_err(|error| run_error(format!("onnx runtime error: {error}")))
}

/// Called after a run that failed with outputs in the arena and succeeded without. Outputs with a
/// shape other than the file declares are always copied from now on; if all shapes are as declared,
/// all outputs are.
fn switch_to_copies(
    wanted: &mut [&mut Output],
    places: &[ArenaOutput],
    values: &[Option<DynValue>],
) {
    let as_declared: Vec<bool> = places
        .iter()
        .zip(values)
        .map(|pair| match pair {
            (Some(place), Some(value)) => {
                place.dtype().tensor_shape() == value.dtype().tensor_shape()
            }
            _ => true,
        })
        .collect();
    let all = as_declared.iter().all(|as_declared| *as_declared);
    for (output, as_declared) in wanted.iter_mut().zip(as_declared) {
        if all || !as_declared {
            output.shape = None;
        }
    }
}

/// Runs the session for the outputs `wanted`. Outputs with memory in `places` are `None` in the
/// result; the runtime allocates the others. `ort` cannot lend memory for outputs: it requires
/// values that it can own.
fn run(
    session: &mut Session,
    inputs: &[(&CStr, SessionInputValue<'_>)],
    wanted: &[&mut Output],
    places: &mut [ArenaOutput],
) -> Result<Vec<Option<DynValue>>, ort::Error> {
    let input_names: Vec<_> = inputs.iter().map(|(name, _)| name.as_ptr()).collect();
    let input_values: Vec<*const sys::OrtValue> =
        inputs.iter().map(|(_, value)| value.ptr()).collect();
    let output_names: Vec<_> = wanted.iter().map(|output| output.name.as_ptr()).collect();
    let place = |place: &ArenaOutput| {
        place.as_ref().map_or(ptr::null_mut(), |value| value.ptr().cast_mut())
    };
    let mut values: Vec<*mut sys::OrtValue> = places.iter().map(place).collect();
    assert_eq!(values.len(), output_names.len(), "every wanted output has an entry in places");
    // SAFETY: each pointer refers to a value that its owner keeps until this function returns, each
    // length is the length of its array, and `&mut Session` guarantees that no other run is in
    // progress. Values that the runtime stores in place of null pointers are owned here; on an
    // error it stores none.
    unsafe {
        let status = (ort::api().Run)(
            session.ptr().cast_mut(),
            ptr::null(),
            input_names.as_ptr(),
            input_values.as_ptr(),
            input_values.len(),
            output_names.as_ptr(),
            output_names.len(),
            values.as_mut_ptr(),
        );
        ort::Error::result_from_status(status)?;
        let allocator = session.allocator();
        let value =
            |value| NonNull::new(value).map(|value| DynValue::from_ptr(value, Some(allocator)));
        let values = values.into_iter().zip(places);
        Ok(values.map(|(ptr, place)| if place.is_some() { None } else { value(ptr) }).collect())
    }
}

/// Returns a tensor over memory of this process or its device 0.
///
/// # Safety
/// The memory has the length of the shape, is aligned for `Number`, and stays in place without
/// other accesses while the runtime uses the tensor; for outputs it is writable.
unsafe fn borrow<'a, Number>(
    device: AllocationDevice<'static>,
    memory: *mut u8,
    shape: &[i64],
) -> Result<DynValueRefMut<'a>, ort::Error>
where
    Number: PrimitiveTensorElementType + std::fmt::Debug,
{
    let info = MemoryInfo::new(device, 0, AllocatorType::Device, MemoryType::Default)?;
    let shape = Shape::new(shape.iter().copied());
    // SAFETY: the caller guarantees it.
    let tensor: TensorRefMut<'a, Number> =
        unsafe { TensorRefMut::from_raw(info, memory.cast(), shape) }?;
    Ok(tensor.into_dyn())
}

/// Returns a value that borrows the input; BOOL and BYTES are copied, because their bytes must
/// first be made valid.
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
        return Err(wrong_size(input, input.data.len(), expected));
    }
    let value = for_numbers!(input.datatype, Number => {
        // SAFETY: the length was just compared with the shape; the rest is this module's contract.
        // ONNX Runtime does not write to its inputs.
        let value = unsafe {
            borrow::<Number>(AllocationDevice::CPU, input.data.as_ptr().cast_mut(), input.shape)
        };
        value.map_err(failed)?.into()
    }, also Bf16 = bf16, otherwise match input.datatype {
        DataType::Bool => {
            let values: Vec<bool> = input.data.iter().map(|byte| *byte != 0).collect();
            ort::value::Tensor::from_array((shape, values)).map_err(failed)?.into()
        }
        _ => {
            let texts = texts(input, batch, outputs)?;
            ort::value::Tensor::from_string_array((shape, texts.as_slice())).map_err(failed)?.into()
        }
    });
    Ok(value)
}

fn wrong_size(input: &Input<'_>, len: usize, expected: u64) -> InferError {
    run_error(format!("input '{}' has {len} bytes instead of {expected}", input.name))
}

/// Copies an output to the arena.
fn from_value(
    value: &DynValue,
    position: usize,
    datatype: DataType,
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
