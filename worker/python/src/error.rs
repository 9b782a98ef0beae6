//! Conversion of errors between Python and the server: Triton's exception classes, and the text of
//! exceptions for clients.

use pharos::error::{ErrorCode, InferError, Reason};
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTraceback};

use crate::arguments::Text;

create_exception!(
    triton_python_backend_utils,
    TritonModelException,
    PyException,
    "A call to the server failed."
);

/// The error codes in the order of Triton's numbers.
const CODES: [ErrorCode; 8] = [
    ErrorCode::Unknown,
    ErrorCode::Internal,
    ErrorCode::NotFound,
    ErrorCode::InvalidArg,
    ErrorCode::Unavailable,
    ErrorCode::Unsupported,
    ErrorCode::AlreadyExists,
    ErrorCode::Cancelled,
];

/// `pb_utils.TritonError`: an error that a response has instead of outputs.
#[pyclass(frozen, subclass, module = "triton_python_backend_utils")]
pub(crate) struct TritonError {
    message: String,
    code: u8,
}

impl TritonError {
    /// Converts an error of the server.
    pub(crate) fn from_server(error: &InferError) -> Self {
        let code = CODES.iter().position(|code| *code == error.code);
        Self {
            message: error.message.clone(),
            code: code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1),
        }
    }

    /// Converts to an error of the server.
    pub(crate) fn to_server(&self) -> InferError {
        let code = CODES.get(usize::from(self.code)).copied().unwrap_or(ErrorCode::Internal);
        let reason = if code == ErrorCode::Cancelled { Reason::Cancelled } else { Reason::Backend };
        InferError::new(code, reason, self.message.clone())
    }
}

#[pymethods]
impl TritonError {
    #[classattr]
    const UNKNOWN: u8 = 0;
    #[classattr]
    const INTERNAL: u8 = 1;
    #[classattr]
    const NOT_FOUND: u8 = 2;
    #[classattr]
    const INVALID_ARG: u8 = 3;
    #[classattr]
    const UNAVAILABLE: u8 = 4;
    #[classattr]
    const UNSUPPORTED: u8 = 5;
    #[classattr]
    const ALREADY_EXISTS: u8 = 6;
    #[classattr]
    const CANCELLED: u8 = 7;

    #[new]
    #[pyo3(signature = (message, code = 1))]
    fn new(message: Text, code: u8) -> PyResult<Self> {
        if usize::from(code) >= CODES.len() {
            let most = CODES.len() - 1;
            let text = format!(
                "invalid TritonError code {code}: allowed are 0 to {most}, such as \
                 TritonError.INTERNAL"
            );
            return Err(pyo3::exceptions::PyValueError::new_err(text));
        }
        Ok(Self { message: message.0, code })
    }

    /// The message.
    fn message(&self) -> &str {
        &self.message
    }

    /// The code: one of the constants of the class.
    fn code(&self) -> u8 {
        self.code
    }

    fn __repr__(&self) -> String {
        format!("<TritonError {}: {}>", self.code, self.message)
    }

    fn __str__(&self) -> &str {
        &self.message
    }
}

/// Converts an error of the server to an exception.
pub(crate) fn model_exception(error: &InferError) -> PyErr {
    TritonModelException::new_err(error.message.clone())
}

/// Formats an exception for clients: its type and message, then the locations in the model's code,
/// innermost first. Triton's Python backend has the same format.
pub(crate) fn shortened(py: Python<'_>, error: &PyErr) -> String {
    let kind =
        error.get_type(py).name().map_or_else(|_| "Exception".to_owned(), |name| name.to_string());
    let value = error
        .value(py)
        .str()
        .map_or_else(|_| "<no message>".to_owned(), |text| text.to_string_lossy().into_owned());
    let mut text = format!("{kind}: {value}");
    let places = error
        .traceback(py)
        .map(|traceback| places(&traceback).unwrap_or_default())
        .unwrap_or_default();
    if !places.is_empty() {
        text.push_str("\n\nAt:\n");
        places.iter().rev().for_each(|place| text.push_str(place));
    }
    text
}

/// Returns the frames of a traceback, outermost first, without the frames of this package.
fn places(traceback: &Bound<'_, PyTraceback>) -> PyResult<Vec<String>> {
    let py = traceback.py();
    let own = package_folder(py).unwrap_or_default();
    let mut places = Vec::new();
    let mut next = traceback.clone().into_any();
    while !next.is_none() {
        let code = next.getattr("tb_frame")?.getattr("f_code")?;
        let file =
            code.getattr("co_filename")?.cast_into::<PyString>()?.to_string_lossy().into_owned();
        // Skip this package and the import system.
        if !(file.starts_with("<frozen ") || !own.is_empty() && file.starts_with(&own)) {
            let line = next.getattr("tb_lineno")?;
            let name = code.getattr("co_name")?;
            places.push(format!("  {file}({line}): {name}\n"));
        }
        next = next.getattr("tb_next")?;
    }
    Ok(places)
}

/// Returns the folder of the package `pharos_worker`.
fn package_folder(py: Python<'_>) -> PyResult<String> {
    let file: String = py.import("pharos_worker")?.getattr("__file__")?.extract()?;
    Ok(file.strip_suffix("__init__.py").unwrap_or_default().to_owned())
}

/// Prints an exception with its traceback to standard error, which is the server's log.
pub(crate) fn log(py: Python<'_>, error: &PyErr) {
    if print_with_traceback(py, error).is_err() {
        eprintln!("{error}");
    }
}

fn print_with_traceback(py: Python<'_>, error: &PyErr) -> PyResult<()> {
    let lines = py.import("traceback")?.call_method1(
        "format_exception",
        (error.get_type(py), error.value(py), error.traceback(py)),
    )?;
    let text = PyString::new(py, "").call_method1("join", (lines,))?;
    py.import("pharos_worker.logger")?.call_method1("whole", (text,))?;
    Ok(())
}
