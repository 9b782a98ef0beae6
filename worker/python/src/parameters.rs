//! Parameters of requests and responses: JSON texts in `pb_utils`, named values on the server's side.

use pharos::infer::{Parameter, Parameters};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};
use serde_json::{Map, Value};

use crate::error::TritonModelException;

/// The JSON text of parameters.
pub(crate) fn to_json(parameters: &Parameters) -> String {
    let value = |parameter: &Parameter| match parameter {
        Parameter::Bool(value) => Value::from(*value),
        Parameter::Int(value) => Value::from(*value),
        Parameter::Uint(value) => Value::from(*value),
        Parameter::Double(value) => Value::from(*value),
        Parameter::String(value) => Value::from(value.as_str()),
    };
    // A map of serde_json's sorts, so the text is put together here.
    let entries =
        parameters.iter().map(|(name, parameter)| format!("{}:{}", Value::from(name.as_str()), value(parameter)));
    format!("{{{}}}", entries.collect::<Vec<_>>().join(","))
}

/// Whether a value may be a number with a fraction: not in responses, as in Triton.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fractions {
    Allowed,
    Refused,
}

/// The parameters of a dictionary that a model gave; none for `None`.
///
/// # Errors
/// It is no dictionary, a name is no text, or a value is neither a truth value, a number that is allowed, nor a text.
pub(crate) fn from_python(given: Option<&Bound<'_, PyAny>>, fractions: Fractions) -> PyResult<Parameters> {
    let Some(given) = given.filter(|given| !given.is_none()) else { return Ok(Vec::new()) };
    let given = given
        .cast::<PyDict>()
        .map_err(|_| TritonModelException::new_err(format!("parameters must be a dict, not {}", given.get_type())))?;
    given.iter().map(|(name, value)| Ok((name_of(&name)?, value_of(&value, fractions)?))).collect()
}

fn name_of(name: &Bound<'_, PyAny>) -> PyResult<String> {
    let text = name.cast::<PyString>().map_err(|_| {
        let kind = name.get_type();
        TritonModelException::new_err(format!("Expect parameters keys to have type str, found type {kind}"))
    })?;
    text.extract()
}

fn value_of(value: &Bound<'_, PyAny>, fractions: Fractions) -> PyResult<Parameter> {
    if value.is_instance_of::<PyBool>() {
        return value.extract().map(Parameter::Bool);
    }
    if value.is_instance_of::<PyInt>() {
        return value.extract().map(Parameter::Int).or_else(|_| value.extract().map(Parameter::Uint));
    }
    if fractions == Fractions::Allowed && value.is_instance_of::<PyFloat>() {
        return value.extract().map(Parameter::Double);
    }
    if value.is_instance_of::<PyString>() {
        return value.extract().map(Parameter::String);
    }
    let kinds = if fractions == Fractions::Allowed { "bool/int/float/str" } else { "bool/int/str" };
    let kind = value.get_type();
    Err(TritonModelException::new_err(format!("Expect parameters values to have type {kinds}, found type {kind}")))
}

/// The files of `load_model`, which are parameters as the repository extension has them.
///
/// # Errors
/// It is no dictionary of texts to texts or bytes.
pub(crate) fn files(given: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<(String, Vec<u8>)>> {
    let Some(given) = given.filter(|given| !given.is_none()) else { return Ok(Vec::new()) };
    let wrong = || {
        let kind = given.get_type();
        TritonModelException::new_err(format!(
            "failed to load model: files should be a dictionary of file paths and file contents (str or bytes), not {kind}"
        ))
    };
    let given = given.cast::<PyDict>().map_err(|_| wrong())?;
    let content = |value: &Bound<'_, PyAny>| match value.extract::<String>() {
        Ok(text) => Ok(text.into_bytes()),
        Err(_) => value.extract::<Vec<u8>>().map_err(|_| wrong()),
    };
    given.iter().map(|(name, value)| Ok((name.extract()?, content(&value)?))).collect()
}

/// A JSON object of texts, for what Python is told once.
pub(crate) fn object<const N: usize>(entries: [(&str, String); N]) -> String {
    let entries: Map<String, Value> =
        entries.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    Value::Object(entries).to_string()
}
