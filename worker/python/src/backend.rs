//! The backend for Python models: loads a model, passes each batch to the model, and sends the
//! responses that the model returns.

use std::os::fd::IntoRawFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::model::ModelConfig;
use pharos_backend::{Backend, Batch, Context, DeviceInputs, Outputs, Readiness, load_error};
use pharos_worker::Worker;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyListMethods};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::answer::Answer;
use crate::batch;
use crate::error::{self, TritonModelException};
use crate::model::{self, Model};
use crate::parameters;
use crate::request::InferenceRequest;
use crate::response::InferenceResponse;

/// The backends whose models run in Python.
const NAMES: [&str; 7] =
    ["onnxruntime_genai", "python", "pytorch", "sklearn", "torchserve", "vllm", "xgboost"];

/// The time that the model has measured for copying the inputs of the current batch to a device, in
/// nanoseconds.
static INPUTS_TOOK: AtomicU64 = AtomicU64::new(0);

/// Reports how many seconds of the current batch were spent on copying its inputs to a device.
/// Statistics count this time as input, not as computation. For models that make these copies
/// themselves and measure them with events.
#[pyfunction]
fn inputs_took(seconds: f64) -> PyResult<()> {
    let took = Duration::try_from_secs_f64(seconds).map_err(|_| {
        TritonModelException::new_err(format!("{seconds} is not a valid duration of input copies"))
    })?;
    INPUTS_TOOK.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(0), Ordering::Relaxed);
    Ok(())
}

/// Adds the functions of this module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(end_with_the_server, module)?)?;
    module.add_function(wrap_pyfunction!(exit, module)?)?;
    module.add_function(wrap_pyfunction!(fail, module)?)?;
    module.add_function(wrap_pyfunction!(inputs_took, module)?)?;
    module.add_function(wrap_pyfunction!(open_process, module)?)?;
    module.add_function(wrap_pyfunction!(run, module)?)?;
    module.add_function(wrap_pyfunction!(set_arguments, module)?)
}

/// Ends this process when the server is gone, also while code runs that never releases the
/// interpreter.
#[pyfunction]
fn end_with_the_server() -> PyResult<()> {
    Ok(pharos_worker::end_with_the_frontend()?)
}

/// Runs the worker until the server ends it. Returns the exit status of the process.
#[pyfunction]
fn run(py: Python<'_>) -> u8 {
    let code = py.detach(|| {
        let worker =
            NAMES.into_iter().fold(Worker::new(), |worker, name| worker.backend(name, create));
        worker.fallback_backend(create).run()
    });
    // `ExitCode` has no accessor for its value, only equality.
    u8::from(code != ExitCode::SUCCESS)
}

/// Ends the process without ending the interpreter. Calls the functions of C's `atexit`, which
/// `os._exit` does not.
#[pyfunction]
fn exit(code: u8) {
    std::process::exit(i32::from(code))
}

/// Returns a descriptor of a child process (`pidfd_open(2)`). Python has this function only if it
/// was built for a new kernel.
#[pyfunction]
fn open_process(pid: i32) -> PyResult<i32> {
    let child = Pid::from_raw(pid).ok_or_else(|| {
        PyValueError::new_err(format!("{pid} is not a process id; these are greater than 0"))
    })?;
    Ok(pidfd_open(child, PidfdFlags::empty()).map_err(std::io::Error::from)?.into_raw_fd())
}

/// Replaces the command line of this process from the argument `from` on; `arguments` contains zero
/// bytes between arguments.
#[pyfunction]
fn set_arguments(from: &str, arguments: &str) -> PyResult<()> {
    Ok(pharos_worker::command_line::replace(from, arguments)?)
}

/// A model with Triton's Python interface.
struct PythonModel {
    model: Arc<Model>,
    /// `pharos_worker.driver.Loaded`.
    loaded: Py<PyAny>,
    execute: Py<PyAny>,
    engine: String,
    process: u32,
    /// The inputs that the model accepts in device memory.
    on_device: DeviceInputs,
    /// Rescheduled requests, kept until they are executed again: dropping them would fail them.
    rescheduled: Vec<Arc<Answer>>,
}

/// Loads `model.py`, or the runner for the model's file format.
fn create(context: &Context<'_>) -> Result<Box<dyn Backend>, InferError> {
    check_states(context.config)?;
    let model = Arc::new(Model::new(context));
    let model = model::install(model);
    let described = parameters::object([
        ("config", context.config.to_json()),
        ("backend", context.config.backend.clone()),
        ("directory", context.directory.to_string_lossy().into_owned()),
        ("name", context.config.name.clone()),
        ("instance", context.instance.to_owned()),
        ("version", context.version.to_string()),
        ("file", context.config.default_model_filename.clone()),
        ("threads", context.threads.to_string()),
        ("kind", if context.on_gpu { "GPU" } else { "CPU" }.to_owned()),
    ]);
    Python::attach(|py| {
        let load = || -> PyResult<PythonModel> {
            let loaded = py.import("pharos_worker.driver")?.call_method1("load", (described,))?;
            let execute = loaded.getattr("execute")?.unbind();
            let engine = loaded.getattr("engine")?.extract()?;
            let takes_device_tensors = loaded.getattr("takes_device_tensors")?.extract::<bool>()?;
            let on_device =
                if takes_device_tensors { DeviceInputs::Pieces } else { DeviceInputs::Never };
            let process = std::process::id();
            Ok(PythonModel {
                model,
                loaded: loaded.unbind(),
                execute,
                engine,
                process,
                on_device,
                rescheduled: Vec::new(),
            })
        };
        let loaded = load().map_err(|error| {
            error::log(py, &error);
            InferError::new(ErrorCode::Unavailable, Reason::Backend, error::shortened(py, &error))
        })?;
        loaded.model.set_open(true);
        Ok(Box::new(loaded) as Box<dyn Backend>)
    })
}

/// Refuses models with states: the server stores them with the batch, but models in Python answer
/// requests individually.
fn check_states(config: &ModelConfig) -> Result<(), InferError> {
    match config.states.first() {
        None => Ok(()),
        Some(state) => Err(load_error(format!(
            "the backend '{}' has no implicit state (sequence_batching.state, output '{}'): keep \
             the state in the model, by correlation_id(), or use the backend onnxruntime or \
             tract, or a shared library",
            config.backend, state.output_name
        ))),
    }
}

impl Backend for PythonModel {
    fn engine(&self) -> String {
        self.engine.clone()
    }

    fn takes_device_memory(&self) -> DeviceInputs {
        self.on_device
    }

    fn wants_details(&self) -> bool {
        true
    }

    fn records_its_times(&self) -> bool {
        self.model.config.backend == "torchserve"
    }

    fn readiness(&self) -> Option<Readiness> {
        let loaded = Python::attach(|py| {
            let asks = self
                .loaded
                .bind(py)
                .getattr("has_is_ready")
                .and_then(|has| has.extract())
                .unwrap_or(false);
            asks.then(|| self.loaded.clone_ref(py))
        })?;
        Some(Box::new(move || {
            Python::attach(|py| {
                let said = loaded.bind(py).call_method0("is_ready").and_then(|said| said.extract());
                said.unwrap_or_else(|error| {
                    error::log(py, &error);
                    false
                })
            })
        }))
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        self.rescheduled.clear();
        let answers = batch::answers(&self.model, batch, outputs)?;
        Python::attach(|py| {
            let requests = batch::requests(py, &self.model, batch, &answers)?;
            outputs.inputs_ready();
            let result = self.executed(py, &requests);
            outputs.computed();
            outputs.inputs_took(Duration::from_nanos(INPUTS_TOOK.swap(0, Ordering::Relaxed)));
            self.exit_if_forked(py);
            let result = result
                .map_err(Failure::from)
                .and_then(|returned| self.answer(&returned, &requests, &answers, outputs));
            if let Err(failure) = result {
                let error = failed(&self.model, &failure.report(py));
                answers
                    .iter()
                    .filter(|answer| answer.may_fail())
                    .for_each(|answer| answer.fail(error.clone()));
            }
            self.rescheduled =
                answers.into_iter().filter(|answer| answer.is_rescheduled()).collect();
            Ok(())
        })
    }
}

impl PythonModel {
    /// Calls `execute`; awaits the result if that is a coroutine.
    fn executed<'py>(
        &self,
        py: Python<'py>,
        requests: &Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let returned = self.execute.bind(py).call1((requests,))?;
        if returned.is_none() || returned.is_instance_of::<PyList>() {
            return Ok(returned);
        }
        let decoupled = self.model.config.decoupled;
        self.loaded.bind(py).call_method1(intern!(py, "settle"), (returned, decoupled, requests))
    }

    /// Sends the responses that `execute` returned. A response that cannot be sent fails only its
    /// request.
    fn answer(
        &self,
        returned: &Bound<'_, PyAny>,
        requests: &Bound<'_, PyList>,
        answers: &[Arc<Answer>],
        outputs: &mut Outputs<'_>,
    ) -> Result<(), Failure> {
        let wrong = |text: String| Err(Failure::Wrong(text));
        if returned.is_none() {
            return Ok(batch::reschedule(requests, answers, outputs)?);
        }
        if self.model.config.decoupled {
            let name = &self.model.instance;
            return wrong(format!(
                "Python model '{name}' is using the decoupled mode and the execute function must \
                 return None."
            ));
        }
        let Ok(responses) = returned.cast::<PyList>() else {
            return wrong(format!(
                "Expected a list in the execute return, found type '{}'.",
                returned.get_type()
            ));
        };
        if responses.len() != answers.len() {
            return wrong(format!(
                "Number of InferenceResponse objects do not match the number of InferenceRequest \
                 objects. InferenceRequest(s) size is:{}, and InferenceResponse(s) size is:{}\n",
                answers.len(),
                responses.len()
            ));
        }
        for ((response, request), answer) in responses.iter().zip(requests.iter()).zip(answers) {
            if response.is_none() {
                continue;
            }
            let kind = response.get_type();
            if request
                .cast::<InferenceRequest>()
                .is_ok_and(|request| request.get().is_rescheduled())
            {
                return wrong(format!(
                    "Expected a None object in the execute function return list for reschduled \
                     request, found type '{kind}'."
                ));
            }
            let Ok(response) = response.cast::<InferenceResponse>() else {
                return wrong(format!(
                    "Expected an 'InferenceResponse' object in the execute function return list, \
                     found type '{kind}'."
                ));
            };
            if let Err(error) = answer.respond(response.py(), response.get()) {
                answer.fail(failed(&self.model, &Failure::Raised(error).report(response.py())));
            }
        }
        Ok(batch::reschedule(requests, answers, outputs)?)
    }

    /// Exits a process that the model has forked in `execute`: the connection to the server belongs
    /// to the parent.
    fn exit_if_forked(&self, py: Python<'_>) {
        if std::process::id() != self.process {
            eprintln!("a process forked by the model returned from execute; exiting it");
            // `_exit` skips exit handlers that the parent has registered.
            if py.import("os").and_then(|os| os.call_method1("_exit", (0,))).is_err() {
                std::process::abort();
            }
        }
    }
}

/// Returns the error for all requests of a failed batch.
fn failed(model: &Model, message: &str) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::Backend, model.failed(message))
}

/// Fails requests with an exception that was raised after `execute` returned.
#[pyfunction]
fn fail(py: Python<'_>, requests: &Bound<'_, PyList>, error: Bound<'_, PyAny>) -> PyResult<()> {
    let error = PyErr::from_value(error);
    error::log(py, &error);
    let message = failed(model::model()?, &error::shortened(py, &error));
    for request in requests.iter() {
        if let Ok(request) = request.cast::<InferenceRequest>() {
            request.get().fail(&message);
        }
    }
    Ok(())
}

/// The reason that a batch has no responses.
enum Failure {
    /// The model has raised an exception.
    Raised(PyErr),
    /// It has returned an invalid value.
    Wrong(String),
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

impl Failure {
    /// Logs the whole error and returns the message for the client.
    fn report(self, py: Python<'_>) -> String {
        match self {
            Self::Raised(error) => {
                error::log(py, &error);
                error::shortened(py, &error)
            }
            Self::Wrong(text) => {
                eprintln!("{text}");
                text
            }
        }
    }
}

impl Drop for PythonModel {
    fn drop(&mut self) {
        Python::attach(|py| {
            self.model.set_open(false);
            if let Err(error) = self.loaded.bind(py).call_method0("finalize") {
                error::log(py, &error);
            }
        });
    }
}
