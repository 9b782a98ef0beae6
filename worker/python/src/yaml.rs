//! YAML parsing for Python code without a YAML package, for `model-config.yaml` of TorchServe
//! archives.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Map, Number, Value};
use serde_yaml::Value as Yaml;

/// Adds the function of this module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(yaml_to_json, module)?)
}

/// Converts a YAML document to a JSON string; `null` for an empty document.
///
/// # Errors
/// The text is not YAML, or a mapping key cannot be converted to a string.
#[pyfunction]
fn yaml_to_json(text: &str) -> PyResult<String> {
    let document: Yaml =
        serde_yaml::from_str(text).map_err(|error| PyValueError::new_err(error.to_string()))?;
    json(document).map(|value| value.to_string())
}

fn json(value: Yaml) -> PyResult<Value> {
    Ok(match value {
        Yaml::Null => Value::Null,
        Yaml::Bool(value) => Value::Bool(value),
        Yaml::Number(number) => number_of(&number),
        Yaml::String(text) => Value::String(text),
        Yaml::Sequence(items) => {
            Value::Array(items.into_iter().map(json).collect::<PyResult<_>>()?)
        }
        Yaml::Mapping(entries) => Value::Object(
            entries
                .into_iter()
                .map(|(key, value)| Ok((key_of(&key)?, json(value)?)))
                .collect::<PyResult<Map<String, Value>>>()?,
        ),
        Yaml::Tagged(tagged) => json(tagged.value)?,
    })
}

fn number_of(number: &serde_yaml::Number) -> Value {
    let whole = number.as_i64().map(Number::from).or_else(|| number.as_u64().map(Number::from));
    let number = whole.or_else(|| Number::from_f64(number.as_f64()?));
    number.map_or(Value::Null, Value::Number)
}

fn key_of(key: &Yaml) -> PyResult<String> {
    match key {
        Yaml::String(text) => Ok(text.clone()),
        Yaml::Bool(value) => Ok(value.to_string()),
        Yaml::Number(number) => Ok(number.to_string()),
        _ => Err(PyValueError::new_err("a key of a mapping must be a string, a number or a bool")),
    }
}
