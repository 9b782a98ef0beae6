//! The native part of the Python package `pharos-worker`: the worker's runtime with a backend for
//! models with Triton's Python interface, and the classes of `triton_python_backend_utils` used in
//! each request.
//!
//! The request path is implemented here. Features used once (configurations, metric families,
//! loading of `model.py`) are implemented in Python. Releases the interpreter while waiting for the
//! server and during large copies.

mod answer;
mod arguments;
#[allow(unsafe_code)]
mod array;
mod backend;
mod batch;
mod bodies;
mod call;
#[allow(unsafe_code)]
mod datatype;
#[allow(unsafe_code)]
mod dlpack;
mod error;
mod metrics;
mod model;
mod output;
mod parameters;
mod reply;
mod request;
mod response;
mod strings;
mod tensor;
mod utils;
mod yaml;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<tensor::Tensor>()?;
    module.add_class::<request::InferenceRequest>()?;
    module.add_class::<request::InferenceTrace>()?;
    module.add_class::<request::PreferredMemory>()?;
    module.add_class::<response::InferenceResponse>()?;
    module.add_class::<answer::InferenceResponseSender>()?;
    module.add_class::<call::ResponseIterator>()?;
    module.add_class::<error::TritonError>()?;
    module.add_class::<metrics::Recorder>()?;
    module.add_class::<metrics::Series>()?;
    module.add_class::<metrics::Family>()?;
    module.add("TritonModelException", module.py().get_type::<error::TritonModelException>())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("WIRE_VERSION", pharos::wire::VERSION)?;
    utils::register(module)?;
    bodies::register(module)?;
    metrics::register(module)?;
    yaml::register(module)?;
    backend::register(module)
}
