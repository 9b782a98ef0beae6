//! Arguments of `pb_utils` as Triton's Python backend takes them: `bytes` for texts, and `None` only where it is allowed.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A text, as `str` or as the `bytes` of its UTF-8.
#[derive(Default)]
pub(crate) struct Text(pub(crate) String);

impl<'a, 'py> FromPyObject<'a, 'py> for Text {
    type Error = PyErr;

    fn extract(argument: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match argument.cast::<PyBytes>() {
            Ok(bytes) => match std::str::from_utf8(bytes.as_bytes()) {
                Ok(text) => Ok(Self(text.to_owned())),
                Err(error) => Err(PyValueError::new_err(format!("bytes that stand for a text must be UTF-8: {error}"))),
            },
            Err(_) => argument.extract().map(Self),
        }
    }
}

/// An argument that may be left out, but not be `None`.
pub(crate) struct NotNone<T>(pub(crate) Option<T>);

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for NotNone<T> {
    type Error = PyErr;

    fn extract(argument: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if argument.is_none() {
            return Err(PyTypeError::new_err("it must not be None"));
        }
        T::extract(argument).map(|value| Self(Some(value))).map_err(Into::into)
    }
}
