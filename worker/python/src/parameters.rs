//! Parameters of requests and responses: JSON strings in `pb_utils`, named values in the server.

use pharos::infer::{Parameter, Parameters};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};
use serde_json::{Map, Value};

use crate::error::TritonModelException;

/// Returns parameters as a JSON string.
pub(crate) fn to_json(parameters: &Parameters) -> String {
    let value = |parameter: &Parameter| match parameter {
        Parameter::Bool(value) => Value::from(*value),
        Parameter::Int(value) => Value::from(*value),
        Parameter::Uint(value) => Value::from(*value),
        Parameter::Double(value) => Value::from(*value),
        Parameter::String(value) => Value::from(value.as_str()),
    };
    // Built manually, because serde_json's map would sort the names.
    let entries = parameters
        .iter()
        .map(|(name, parameter)| format!("{}:{}", Value::from(name.as_str()), value(parameter)));
    format!("{{{}}}", entries.collect::<Vec<_>>().join(","))
}

/// Whether numbers may have a fraction. As in Triton, numbers of responses may not.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fractions {
    Allowed,
    Refused,
}

/// Reads the parameters from a Python dictionary; `None` gives no parameters.
///
/// # Errors
/// The argument is not a dictionary, a name is not a string, or a value is not a bool, an allowed
/// number or a string.
pub(crate) fn from_python(
    given: Option<&Bound<'_, PyAny>>,
    fractions: Fractions,
) -> PyResult<Parameters> {
    let Some(given) = given.filter(|given| !given.is_none()) else { return Ok(Vec::new()) };
    let given = given.cast::<PyDict>().map_err(|_| {
        TritonModelException::new_err(format!(
            "parameters must be a dict, not {}",
            given.get_type()
        ))
    })?;
    given.iter().map(|(name, value)| Ok((name_of(&name)?, value_of(&value, fractions)?))).collect()
}

fn name_of(name: &Bound<'_, PyAny>) -> PyResult<String> {
    let text = name.cast::<PyString>().map_err(|_| {
        let kind = name.get_type();
        TritonModelException::new_err(format!(
            "Expect parameters keys to have type str, found type {kind}"
        ))
    })?;
    text.extract()
}

fn value_of(value: &Bound<'_, PyAny>, fractions: Fractions) -> PyResult<Parameter> {
    if value.is_instance_of::<PyBool>() {
        return value.extract().map(Parameter::Bool);
    }
    if value.is_instance_of::<PyInt>() {
        return value
            .extract()
            .map(Parameter::Int)
            .or_else(|_| value.extract().map(Parameter::Uint));
    }
    if fractions == Fractions::Allowed && value.is_instance_of::<PyFloat>() {
        return value.extract().map(Parameter::Double);
    }
    if value.is_instance_of::<PyString>() {
        return value.extract().map(Parameter::String);
    }
    let kinds = if fractions == Fractions::Allowed { "bool/int/float/str" } else { "bool/int/str" };
    let kind = value.get_type();
    Err(TritonModelException::new_err(format!(
        "Expect parameters values to have type {kinds}, found type {kind}"
    )))
}

/// Reads the files of `load_model`, which become parameters of the repository extension.
///
/// # Errors
/// The argument is not a dictionary of strings to strings or bytes.
pub(crate) fn files(given: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<(String, Vec<u8>)>> {
    let Some(given) = given.filter(|given| !given.is_none()) else { return Ok(Vec::new()) };
    let wrong = || {
        let kind = given.get_type();
        TritonModelException::new_err(format!(
            "failed to load model: files should be a dictionary of file paths and file contents \
             (str or bytes), not {kind}"
        ))
    };
    let given = given.cast::<PyDict>().map_err(|_| wrong())?;
    let mut files = Vec::with_capacity(given.len());
    for (name, value) in given.iter() {
        let content = match value.extract::<String>() {
            Ok(text) => text.into_bytes(),
            Err(_) => value.extract::<Vec<u8>>().map_err(|_| wrong())?,
        };
        files.push((name.extract()?, content));
    }
    Ok(files)
}

/// Returns a JSON object of strings, for data that Python reads once.
pub(crate) fn object<const N: usize>(entries: [(&str, String); N]) -> String {
    let entries: Map<String, Value> =
        entries.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    Value::Object(entries).to_string()
}
