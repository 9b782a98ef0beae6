//! Backends in shared libraries, over the C interface of `include/pharos_backend.h`.
//!
//! Contract for `unsafe`: a library follows the rules of the header. It is called on one thread;
//! the instance's boxed handles live until its destroy function has returned; only [`Handle::run`]
//! passes batches to it.

mod abi;
mod foreign;
mod host;
mod library;
mod load;
mod metrics;
mod outputs;
mod responses;
mod running;
mod slots;

use std::ffi::c_void;
use std::path::Path;
use std::ptr;

use pharos::error::InferError;
use pharos_backend::{Backend, Batch, Context, Outputs, load_error};

use library::Functions;
use load::Load;
use metrics::MetricsHandle;
use running::Handle;

/// An instance that a library has created.
struct Native {
    functions: Functions,
    instance: *mut c_void,
    handle: Box<Handle>,
    /// Metrics that the library records; kept alive for it.
    _metrics: Box<MetricsHandle>,
    engine: String,
}

/// Loads the library and creates an instance with it.
///
/// # Errors
/// The library is not a backend, or cannot load the model.
pub(super) fn create(context: &Context<'_>, path: &Path) -> Result<Box<dyn Backend>, InferError> {
    let refused =
        |error: String| load_error(format!("backend library '{}' {error}", path.display()));
    let whole = std::path::absolute(path).map_err(|error| refused(error.to_string()))?;
    let functions = library::open(&whole).map_err(refused)?;
    let metrics = Box::new(MetricsHandle::new(context.metrics));
    let load = Load::new(context, (&raw const host::HOST).cast(), (&raw const *metrics).cast());
    let mut instance = ptr::null_mut();
    foreign::forget_error();
    // SAFETY: this module's contract; `load` and everything it refers to lives until after the
    // call.
    let code = unsafe { (functions.create)(load.context(), &raw mut instance) };
    if code != abi::OK {
        return Err(load.failure(code));
    }
    let engine = functions.engine.clone().unwrap_or_else(|| library::name(path));
    let handle = Box::new(Handle::new(context.config, context.runtime));
    Ok(Box::new(Native { functions, instance, handle, _metrics: metrics, engine }))
}

impl Backend for Native {
    fn engine(&self) -> String {
        self.engine.clone()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        // SAFETY: this module's contract; the handle belongs to this batch.
        self.handle.run(batch, outputs, |handle| unsafe {
            (self.functions.execute)(self.instance, handle.cast(), handle.cast())
        })
    }

    fn wants_details(&self) -> bool {
        self.functions.wants & abi::WANTS_DETAILS != 0
    }

    fn tolerates_concurrent_writes(&self) -> bool {
        self.functions.wants & abi::BEARS_CHANGES != 0
    }

    fn sequence_ended(&mut self, key: u64) {
        if let Some(sequence_ended) = self.functions.sequence_ended {
            // SAFETY: this module's contract.
            unsafe { sequence_ended(self.instance, key) };
        }
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        // SAFETY: this module's contract; the instance is not used afterwards.
        unsafe { (self.functions.destroy)(self.instance) };
    }
}
