//! `pb_utils.InferenceRequest`: a request of the batch, or a request of the model to another model.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use pharos::error::InferError;
use pharos::id::CorrelationId;
use pharos::infer::Parameters;
use pharos_backend::{Call, CallInput, CallRequest, Runtime};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySet, PyString};

use crate::answer::{Answer, InferenceResponseSender};
use crate::arguments::{NotNone, Text};
use crate::call;
use crate::error::TritonModelException;
use crate::parameters::{self, Fractions};
use crate::tensor::Tensor;

/// The flag of the first request of a sequence.
pub(crate) const SEQUENCE_START: u32 = 1;
/// The flag of the last request of a sequence.
pub(crate) const SEQUENCE_END: u32 = 2;
/// The release flag of a completed request.
const RELEASE_ALL: u32 = 1;
/// The release flag of a request to be executed again.
const RELEASE_RESCHEDULE: u32 = 2;

/// The trace of a request, to be passed to requests that are made on its behalf.
#[pyclass(frozen, module = "triton_python_backend_utils", from_py_object)]
#[derive(Clone, Default)]
pub(crate) struct InferenceTrace {
    pub(crate) place: Option<(u64, u32)>,
    /// W3C Trace Context as JSON, for a trace that goes to a collector.
    context: Option<Arc<str>>,
}

#[pymethods]
impl InferenceTrace {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The context of the trace for other tracers: a JSON object with `traceparent`, and
    /// `tracestate` if the client sent one (W3C Trace Context). `None` unless the server's trace
    /// mode is `opentelemetry` and the request is sampled.
    fn get_context(&self) -> Option<&str> {
        self.context.as_deref()
    }
}

/// The preferred memory of the outputs of a request to another model. Ignored: this server returns
/// them in host memory.
#[pyclass(frozen, module = "triton_python_backend_utils", from_py_object)]
#[derive(Clone)]
pub(crate) struct PreferredMemory {
    #[pyo3(get)]
    preferred_memory_type: i32,
    #[pyo3(get)]
    preferred_device_id: i64,
}

#[pymethods]
impl PreferredMemory {
    #[new]
    #[pyo3(signature = (preferred_memory_type, preferred_device_id = 0))]
    fn new(preferred_memory_type: i32, preferred_device_id: i64) -> Self {
        Self { preferred_memory_type, preferred_device_id }
    }
}

/// An inference request.
#[pyclass(frozen, subclass, module = "triton_python_backend_utils")]
pub(crate) struct InferenceRequest {
    pub(crate) fields: RequestFields,
    pub(crate) inputs: Vec<Py<Tensor>>,
    flags: AtomicU32,
    release: AtomicU32,
    preferred_memory: Option<PreferredMemory>,
    trace: InferenceTrace,
    /// For a request of the batch: its response channel. `None` after the batch, unless the model
    /// has requested a sender.
    answer: Mutex<Option<Arc<Answer>>>,
}

/// The metadata of a request.
pub(crate) struct RequestFields {
    pub(crate) id: String,
    pub(crate) correlation: CorrelationId,
    pub(crate) model_name: String,
    pub(crate) model_version: i64,
    pub(crate) timeout_us: u64,
    pub(crate) parameters: Parameters,
    /// The requested outputs; all outputs if the client requested none in particular.
    pub(crate) outputs: Vec<String>,
    /// The W3C trace context, for other tracers.
    pub(crate) trace_context: Option<Arc<str>>,
    /// The number of its sequence, if the model has sequences. A request that is rescheduled keeps
    /// it.
    pub(crate) sequence: Option<u64>,
}

impl InferenceRequest {
    /// Creates a request of the batch.
    pub(crate) fn received(
        fields: RequestFields,
        flags: u32,
        inputs: Vec<Py<Tensor>>,
        answer: Arc<Answer>,
    ) -> Self {
        let trace =
            InferenceTrace { place: Some(answer.place()), context: fields.trace_context.clone() };
        let flags = AtomicU32::new(flags);
        let release = AtomicU32::new(RELEASE_ALL);
        Self {
            fields,
            inputs,
            flags,
            release,
            preferred_memory: None,
            trace,
            answer: Mutex::new(Some(answer)),
        }
    }

    /// Whether the model has rescheduled the request.
    pub(crate) fn is_rescheduled(&self) -> bool {
        self.release.load(Ordering::Relaxed) == RELEASE_RESCHEDULE
    }

    /// Returns the current flags.
    pub(crate) fn flag_bits(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// Returns the trace position that nested requests belong to.
    pub(crate) fn parent(&self) -> Option<(u64, u32)> {
        self.trace.place
    }

    fn answer(&self) -> Option<Arc<Answer>> {
        self.answer.lock().clone()
    }

    /// Fails the request, if it can still fail.
    pub(crate) fn fail(&self, error: &InferError) {
        if let Some(answer) = self.answer().filter(|answer| answer.may_fail()) {
            answer.fail(error.clone());
        }
    }

    /// Returns the input of this name.
    pub(crate) fn input(&self, py: Python<'_>, name: &str) -> Option<Py<Tensor>> {
        self.inputs.iter().find(|input| input.get().name() == name).map(|input| input.clone_ref(py))
    }
}

#[pymethods]
impl InferenceRequest {
    /// Creates a request to another model.
    #[new]
    #[pyo3(signature = (request_id = Text::default(), correlation_id = NotNone(None), inputs = NotNone(None),
        requested_output_names = NotNone(None), model_name = NotNone(None), model_version = -1, flags = 0, timeout = 0,
        preferred_memory = NotNone(None), trace = NotNone(None), parameters = None))]
    #[allow(clippy::too_many_arguments)] // Triton's.
    fn new(
        request_id: Text,
        correlation_id: NotNone<Bound<'_, PyAny>>,
        inputs: NotNone<Bound<'_, PyAny>>,
        requested_output_names: NotNone<Vec<Text>>,
        model_name: NotNone<Text>,
        model_version: i64,
        flags: u32,
        timeout: u64,
        preferred_memory: NotNone<PreferredMemory>,
        trace: NotNone<InferenceTrace>,
        parameters: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let missing = |what: &str| PyTypeError::new_err(format!("InferenceRequest() needs {what}"));
        let inputs = inputs.0.ok_or_else(|| missing("inputs"))?;
        let outputs = requested_output_names.0.ok_or_else(|| missing("requested_output_names"))?;
        let model_name = model_name.0.ok_or_else(|| missing("model_name"))?.0;
        let of = format!(
            "for request with id '{}' and model name '{model_name}' should not be empty.",
            request_id.0
        );
        let inputs = inputs_of(&inputs, &of)?;
        let outputs: Vec<String> = outputs.into_iter().map(|name| name.0).collect();
        if outputs.iter().any(String::is_empty) {
            return Err(TritonModelException::new_err(format!("Requested output name {of}")));
        }
        let fields = RequestFields {
            correlation: correlation_of(correlation_id.0.as_ref())?,
            id: request_id.0,
            model_name,
            model_version,
            timeout_us: timeout,
            parameters: parameters::from_python(parameters, Fractions::Allowed)?,
            outputs,
            trace_context: None,
            sequence: None,
        };
        let flags = AtomicU32::new(flags);
        let release = AtomicU32::new(RELEASE_ALL);
        let trace = trace.0.unwrap_or_default();
        let answer = Mutex::new(None);
        let preferred_memory = preferred_memory.0;
        Ok(Self { fields, inputs, flags, release, preferred_memory, trace, answer })
    }

    /// The inputs.
    #[pyo3(name = "inputs")]
    fn py_inputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.inputs.iter().map(|input| input.bind(py)))
    }

    /// The client's id; may be empty.
    fn request_id(&self) -> &str {
        &self.fields.id
    }

    /// The id of the sequence, a number or a string; 0 for none.
    fn correlation_id(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(match &self.fields.correlation {
            CorrelationId::Uint(id) => id.into_pyobject(py)?.into_any().unbind(),
            CorrelationId::String(id) => id.into_pyobject(py)?.into_any().unbind(),
        })
    }

    /// The model's name.
    fn model_name(&self) -> &str {
        &self.fields.model_name
    }

    /// The model's version; -1 for the latest.
    fn model_version(&self) -> i64 {
        self.fields.model_version
    }

    /// `TRITONSERVER_REQUEST_FLAG_SEQUENCE_START` and `_END`.
    fn flags(&self) -> u32 {
        self.flag_bits()
    }

    fn set_flags(&self, flags: u32) {
        self.flags.store(flags, Ordering::Relaxed);
    }

    /// The client's timeout in microseconds; 0 for none.
    fn timeout(&self) -> u64 {
        self.fields.timeout_us
    }

    /// The parameters as a JSON string.
    #[pyo3(name = "parameters")]
    fn py_parameters(&self) -> String {
        parameters::to_json(&self.fields.parameters)
    }

    /// The preferred memory of the outputs.
    fn preferred_memory(&self) -> Option<PreferredMemory> {
        self.preferred_memory.clone()
    }

    /// The trace to pass to requests made on behalf of this one.
    fn trace(&self) -> InferenceTrace {
        self.trace.clone()
    }

    /// The requested outputs.
    fn requested_output_names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PySet>> {
        PySet::new(py, &self.fields.outputs)
    }

    /// Whether the request is cancelled.
    fn is_cancelled(&self) -> bool {
        self.answer().is_some_and(|answer| answer.is_cancelled())
    }

    /// Returns a sender that responds to the request on any thread, at any time.
    fn get_response_sender(&self) -> PyResult<InferenceResponseSender> {
        let text = "only a request passed to execute() has a response sender";
        self.answer()
            .map(InferenceResponseSender::new)
            .ok_or_else(|| TritonModelException::new_err(text))
    }

    /// Sets the release flags: with `TRITONSERVER_REQUEST_RELEASE_RESCHEDULE` the request is
    /// executed again.
    fn set_release_flags(&self, flags: u32) -> PyResult<()> {
        if flags != RELEASE_ALL && flags != RELEASE_RESCHEDULE {
            let text = format!(
                "{flags} is not a release flag: allowed are TRITONSERVER_REQUEST_RELEASE_ALL or \
                 TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"
            );
            return Err(TritonModelException::new_err(text));
        }
        self.release.store(flags, Ordering::Relaxed);
        Ok(())
    }

    /// Executes the request and waits for the response. With `decoupled`, returns an iterator over
    /// the responses.
    #[pyo3(signature = (decoupled = false))]
    fn exec(&self, py: Python<'_>, decoupled: bool) -> PyResult<Py<PyAny>> {
        call::exec(py, decoupled, |runtime| call_of(py, runtime, self, decoupled))
    }

    /// The awaitable form of `exec`.
    #[pyo3(signature = (decoupled = false))]
    fn async_exec<'py>(slf: &Bound<'py, Self>, decoupled: bool) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let event_loop =
            py.import(intern!(py, "asyncio"))?.call_method0(intern!(py, "get_running_loop"))?;
        let exec = slf.getattr(intern!(py, "exec"))?;
        event_loop.call_method1(intern!(py, "run_in_executor"), (py.None(), exec, decoupled))
    }

    fn __repr__(&self) -> String {
        format!("<InferenceRequest '{}' to '{}'>", self.fields.id, self.fields.model_name)
    }
}

fn inputs_of(given: &Bound<'_, PyAny>, of: &str) -> PyResult<Vec<Py<Tensor>>> {
    let tensor = |item: Bound<'_, PyAny>| {
        if item.is_none() {
            return Err(TritonModelException::new_err(format!("Input tensor {of}")));
        }
        let wrong = PyTypeError::new_err(format!(
            "inputs must be a list of Tensor, not of {}",
            item.get_type()
        ));
        item.cast_into::<Tensor>().map(Bound::unbind).map_err(|_| wrong)
    };
    given.try_iter()?.map(|item| tensor(item?)).collect()
}

fn correlation_of(given: Option<&Bound<'_, PyAny>>) -> PyResult<CorrelationId> {
    let Some(given) = given else { return Ok(CorrelationId::default()) };
    if given.is_instance_of::<PyString>() {
        let checked = CorrelationId::from_text(given.extract::<String>()?);
        return checked.map_err(|error| TritonModelException::new_err(error.message));
    }
    let number = given.extract::<u64>();
    number
        .map(CorrelationId::Uint)
        .map_err(|_| TritonModelException::new_err("Correlation ID must be integer or string"))
}

/// The request as a call of another model.
fn call_of(
    py: Python<'_>,
    runtime: &Runtime,
    request: &InferenceRequest,
    decoupled: bool,
) -> PyResult<Call> {
    if request.fields.model_name.is_empty() {
        return Err(PyTypeError::new_err("InferenceRequest() needs model_name to be executed"));
    }
    let fields = &request.fields;
    let flags = request.flag_bits();
    let inputs = request
        .inputs
        .iter()
        .map(|tensor| -> PyResult<CallInput> {
            let tensor = tensor.get();
            Ok(CallInput {
                name: tensor.name().to_owned(),
                datatype: tensor.datatype(),
                shape: tensor.shape().to_vec(),
                content: tensor.content(py, runtime)?,
            })
        })
        .collect::<PyResult<_>>()?;
    let request = CallRequest {
        model: fields.model_name.clone(),
        version: if fields.model_version < 0 {
            String::new()
        } else {
            fields.model_version.to_string()
        },
        id: fields.id.clone(),
        correlation: fields.correlation.clone(),
        start: flags & SEQUENCE_START != 0,
        end: flags & SEQUENCE_END != 0,
        priority: 0,
        timeout_us: fields.timeout_us,
        outputs: fields.outputs.clone(),
        parameters: fields.parameters.clone(),
        decoupled,
        parent: request.parent(),
    };
    Ok(Call { request, inputs })
}
