//! The backends of this crate for the configuration's `backend: "NAME"`, one file for each. The
//! registry selects one by name.

mod builtin;
mod elements;
#[allow(unsafe_code)]
mod native;
mod on_gpu;
#[allow(unsafe_code)]
mod onnxruntime;
mod registry;

use std::path::PathBuf;
use std::sync::Arc;

use pharos::error::InferError;
use pharos_backend::load_error;

use crate::device::Cuda;

pub use onnxruntime::shared::{GraphTensor, ReadOutput, SharedSession};
pub use registry::CreateFromLibrary;
pub(crate) use registry::{OtherLibraries, Registry};

#[cfg(test)]
pub(crate) use on_gpu::tests::kernel as test_kernel;

/// The environment variable with the path of the library of the model's backend; the frontend sets
/// it for its workers.
const LIBRARY_VARIABLE: &str = "PHAROS_BACKEND_LIBRARY";

/// Returns the path of the library of the model's backend, if it is in a library.
pub(crate) fn library() -> Option<PathBuf> {
    std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Loads ONNX Runtime for copies of this process; returns the path of its library, if one is
/// configured.
pub(crate) fn load_onnxruntime() -> Option<PathBuf> {
    onnxruntime::preload()
}

/// Whether a library of ONNX Runtime is configured.
#[cfg(test)]
pub(crate) fn has_onnxruntime() -> bool {
    onnxruntime::library().is_some()
}

/// Returns the GPU of the instance, initialized.
///
/// # Errors
/// The instance has no GPU, or the GPU cannot be used.
fn ready_gpu(cuda: &Arc<Cuda>) -> Result<Arc<Cuda>, InferError> {
    if cuda.device().is_none() {
        return Err(load_error("the instance has no GPU"));
    }
    cuda.open().map_err(|fault| load_error(fault.to_string()))?;
    Ok(cuda.clone())
}
