//! The JSON of the generate extension (spec 2.12), as pure functions over bytes. The members of a
//! request are the model's inputs and parameters; those of a response its outputs and parameters.
//! Error texts and codes are Triton's.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{InferInput, InferRequest, InferResponse};
use pharos::model::generation::ADAPTER;
use pharos::model::{ModelMetadata, TensorMetadata};
use pharos::tensor::{DataType, Tensor, element_count};
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::json::{
    Members, as_members, as_parameter, as_string, check_depth, from_relaxed, parse_error,
    type_error, unreadable, without_byte_order_mark,
};
use crate::parse::reserved_parameter;
use crate::{data, render};

/// The object whose members are treated as members of the request itself.
const NESTED: &str = "parameters";

/// Fills `request` from the JSON of its body, for the inputs of `model`.
///
/// # Errors
/// Fails if the text is not a JSON object, if a member does not match the model's input of its
/// name, or is not a valid parameter.
pub(crate) fn request(
    json: &[u8],
    model: &ModelMetadata,
    request: &mut InferRequest,
) -> Result<(), InferError> {
    let json = std::str::from_utf8(without_byte_order_mark(json))
        .map_err(|error| parse_error(format!("Invalid encoding in string. {error}")))?;
    check_depth(json)?;
    let relaxed = OnceCell::new();
    let members: Members<'_> =
        from_relaxed(json, &relaxed).map_err(|(error, text)| diagnose(text, &error))?;
    for (key, value) in members.0 {
        match &*key {
            NESTED => nested(value, model, request)?,
            "id" => request.id = as_string(value, "Unable to parse 'id'")?.into_owned(),
            key => member(key, value, model, request)?,
        }
    }
    Ok(())
}

fn diagnose(json: &str, error: &serde_json::Error) -> InferError {
    if error.is_data() && !json.trim_start().starts_with('{') {
        let text = "attempt to get members for non-object";
        return InferError::new(ErrorCode::Internal, Reason::Malformed, text);
    }
    unreadable(error)
}

fn nested(
    value: &RawValue,
    model: &ModelMetadata,
    request: &mut InferRequest,
) -> Result<(), InferError> {
    let members = as_members(value, || {
        type_error(
            "Expected JSON object for keyword: 'parameters'",
            "attempt to access JSON non-object as object",
        )
    })?;
    for (key, value) in members.0 {
        member(&key, value, model, request).map_err(|error| {
            let message = format!("Converting keyword: '{NESTED}': {}", error.message);
            error.with_message(message)
        })?;
    }
    Ok(())
}

/// Adds one member: an input if the model has one of this name, else a parameter.
fn member(
    key: &str,
    value: &RawValue,
    model: &ModelMetadata,
    request: &mut InferRequest,
) -> Result<(), InferError> {
    if let Some(input) = model.inputs.iter().find(|input| input.name == key) {
        let tensor = tensor(input, value.get())?;
        request.inputs.push(InferInput { name: key.to_owned(), tensor });
        return Ok(());
    }
    // Triton permits other names of this form here.
    if key == ADAPTER {
        return Err(reserved_parameter());
    }
    request.parameters.push((key.to_owned(), as_parameter(key, value)?));
    Ok(())
}

/// Returns the tensor that a scalar or a flat array represents.
fn tensor(input: &TensorMetadata, json: &str) -> Result<Tensor, InferError> {
    let TensorMetadata { name, datatype, shape } = input;
    let datatype = DataType::from_name(datatype).ok_or_else(|| {
        InferError::internal(format!("input '{name}' has the unknown datatype {datatype}"))
    })?;
    let wrapped;
    let (array, count) = match json.starts_with('[') {
        true => {
            (json, serde_json::from_str::<Vec<IgnoredAny>>(json).map_err(parse_error)?.len() as u64)
        }
        false => {
            wrapped = format!("[{json}]");
            (wrapped.as_str(), 1)
        }
    };
    let flatten = |elements| data::flatten(name, array, datatype, elements);
    // Use Triton's order of checks: strings are parsed before the shape, other elements after it.
    let early = if datatype == DataType::Bytes { Some(flatten(count)?) } else { None };
    let shape = fit(shape, count).ok_or_else(|| {
        InferError::invalid(format!(
            "The schema can not convert input '{name}' to tensor with proper shape"
        ))
    })?;
    let bytes = match early {
        Some(bytes) => bytes,
        // An empty array has no elements to check.
        None if count == 0 => Vec::new(),
        None => flatten(element_count(&shape).unwrap_or(count))?,
    };
    Ok(Tensor { datatype, shape, data: bytes.into() })
}

/// Returns the shape for `elements` elements: fixed dimensions stay, the innermost variable one
/// takes the rest, the others are 1.
fn fit(dims: &[i64], elements: u64) -> Option<Vec<i64>> {
    let mut left = i64::try_from(elements).ok()?;
    for &dim in dims.iter().filter(|dim| **dim != -1) {
        if left.checked_rem(dim)? != 0 {
            return None;
        }
        left /= dim;
    }
    let mut shape = dims.to_vec();
    for dim in shape.iter_mut().rev().filter(|dim| **dim == -1) {
        *dim = std::mem::replace(&mut left, 1);
    }
    (left == 1).then_some(shape)
}

/// Returns the JSON of a response: an object whose members are sorted by name. An output of one
/// element is a scalar, others are flat arrays. If names collide, the first of id, model, outputs
/// and parameters wins: a client chooses the names of echoed parameters and must not be able to
/// hide an output.
///
/// # Errors
/// Fails if JSON cannot represent an output.
pub(crate) fn response(response: &InferResponse) -> Result<Vec<u8>, InferError> {
    let mut members = BTreeMap::<&str, Vec<u8>>::new();
    let mut put = |name, fill: &dyn Fn(&mut Vec<u8>) -> Result<(), InferError>| {
        let mut value = Vec::new();
        fill(&mut value)?;
        members.entry(name).or_insert(value);
        Ok::<(), InferError>(())
    };
    if !response.id.is_empty() {
        put("id", &|out| render::value(out, &response.id))?;
    }
    put("model_name", &|out| render::value(out, &response.model_name))?;
    put("model_version", &|out| render::value(out, &response.model_version))?;
    for output in &response.outputs {
        let scalar = element_count(&output.tensor.shape) == Some(1);
        put(&output.name, &|out| {
            out.extend_from_slice(if scalar { b"" } else { b"[" });
            render::data(out, output)?;
            out.extend_from_slice(if scalar { b"" } else { b"]" });
            Ok(())
        })?;
    }
    for (name, parameter) in &response.parameters {
        put(name, &|out| render::parameter(out, parameter))?;
    }
    let mut json = Vec::with_capacity(256);
    for (name, value) in members {
        json.push(if json.is_empty() { b'{' } else { b',' });
        render::value(&mut json, name)?;
        json.push(b':');
        json.extend_from_slice(&value);
    }
    json.push(b'}');
    Ok(json)
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
