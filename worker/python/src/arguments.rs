//! Arguments of `pb_utils`, converted as in Triton's Python backend: `bytes` for strings, and
//! `None` only where allowed.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A string, from `str` or UTF-8 `bytes`.
#[derive(Default)]
pub(crate) struct Text(pub(crate) String);

impl<'a, 'py> FromPyObject<'a, 'py> for Text {
    type Error = PyErr;

    fn extract(argument: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match argument.cast::<PyBytes>() {
            Ok(bytes) => match std::str::from_utf8(bytes.as_bytes()) {
                Ok(text) => Ok(Self(text.to_owned())),
                Err(error) => Err(PyValueError::new_err(format!(
                    "bytes given as a string must be UTF-8: {error}"
                ))),
            },
            Err(_) => argument.extract().map(Self),
        }
    }
}

/// An optional argument that must not be `None`.
pub(crate) struct NotNone<T>(pub(crate) Option<T>);

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for NotNone<T> {
    type Error = PyErr;

    fn extract(argument: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if argument.is_none() {
            return Err(PyTypeError::new_err("must not be None"));
        }
        T::extract(argument).map(|value| Self(Some(value))).map_err(Into::into)
    }
}
