//! Tensors of the v2 protocol for models that take documents: a request to a TorchServe model is
//! converted to the JSON document that its envelope `kservev2` reads, and an answer with `outputs`
//! is converted back to tensors.
//!
//! Such a model has one input, `data`, whose only element is a body, and one output, `prediction`.
//! A request with the input `data` is passed on unchanged. An element of a BYTES tensor that is not
//! UTF-8 is encoded as base64.

use serde_json::{Map, Number, Value, json};

use crate::data::Data;
use crate::error::{ErrorCode, InferError, Reason};
use crate::infer::{
    InferInput, InferOutput, InferRequest, InferResponse, Parameter, RequestedOutput,
};
use crate::tensor::{DataType, Tensor, bytes_elements, element_count, push_bytes_element};

/// The backend of these models.
pub const BACKEND: &str = "torchserve";
/// The parameter of requests and responses that contains metadata of the body.
pub const PARAMETER: &str = "torchserve";
/// The name of the input: a body.
pub const INPUT: &str = "data";
/// The name of the output: a body.
pub const OUTPUT: &str = "prediction";

/// The outputs that a client requested, saved when its request was converted to a document.
#[derive(Clone, Debug, Default)]
pub struct RequestedOutputs(Vec<RequestedOutput>);

/// Returns a BYTES tensor with this one element, for a model that batches.
pub fn body(bytes: &[u8]) -> Option<Tensor> {
    let mut data = Vec::with_capacity(bytes.len() + 4);
    push_bytes_element(&mut data, bytes).then(|| Tensor {
        datatype: DataType::Bytes,
        shape: vec![1, 1],
        data: data.into(),
    })
}

/// Converts a request's tensors to a document. Returns `None` if the request already is one.
///
/// # Errors
/// The tensors are in shared memory, or do not match their datatypes.
pub fn to_document(request: &mut InferRequest) -> Result<Option<RequestedOutputs>, InferError> {
    let is_body = matches!(request.inputs.as_slice(), [input] if input.name == INPUT);
    if is_body || request.raw_body.is_some() || request.inputs.is_empty() {
        return Ok(None);
    }
    let inputs = request.inputs.iter().map(input_value).collect::<Result<Vec<_>, _>>()?;
    let mut document = Map::new();
    if !request.id.is_empty() {
        document.insert("id".into(), json!(request.id));
    }
    let parameters: Map<String, Value> = request
        .parameters
        .iter()
        .map(|(name, value)| (name.clone(), parameter_value(value)))
        .collect();
    if !parameters.is_empty() {
        document.insert("parameters".into(), parameters.into());
    }
    document.insert("inputs".into(), inputs.into());
    if !request.outputs.is_empty() {
        let names = request.outputs.iter().map(|output| json!({ "name": output.name }));
        document.insert("outputs".into(), names.collect());
    }
    let text = Value::Object(document).to_string();
    let metadata = json!({
        "headers": {},
        "parts": [{ "name": "body", "content_type": "application/json", "length": text.len() }],
        "describe": false,
        "explain": false,
    });
    let tensor = body(text.as_bytes()).ok_or_else(|| {
        InferError::invalid(format!("the tensors make a document of {} bytes", text.len()))
    })?;
    request.inputs = vec![InferInput { name: INPUT.to_owned(), tensor }];
    request.parameters.push((PARAMETER.to_owned(), Parameter::String(metadata.to_string())));
    Ok(Some(RequestedOutputs(std::mem::take(&mut request.outputs))))
}

/// Converts the document in a model's answer to tensors. Any other answer is unchanged.
///
/// # Errors
/// The `outputs` of the document are invalid, or a requested output is missing.
pub fn from_document(
    response: &mut InferResponse,
    requested: &RequestedOutputs,
) -> Result<(), InferError> {
    let Some(document) = document(response) else { return Ok(()) };
    let Some(Value::Array(outputs)) = document.get("outputs") else { return Ok(()) };
    let mut tensors = outputs.iter().map(output_tensor).collect::<Result<Vec<_>, _>>()?;
    for wanted in &requested.0 {
        if !tensors.iter().any(|output| output.name == wanted.name) {
            let names: Vec<&str> = tensors.iter().map(|output| output.name.as_str()).collect();
            let text = format!(
                "the model's answer has no output '{}'; it has: {}",
                wanted.name,
                names.join(", ")
            );
            return Err(InferError::invalid(text));
        }
    }
    if !requested.0.is_empty() {
        tensors.retain(|output| requested.0.iter().any(|wanted| wanted.name == output.name));
    }
    response.parameters.retain(|(name, _)| name != PARAMETER);
    response.outputs = tensors;
    Ok(())
}

/// Returns the answer's body if it is a JSON object.
fn document(response: &InferResponse) -> Option<Map<String, Value>> {
    let output = response.outputs.iter().find(|output| output.name == OUTPUT)?;
    let data = output.tensor.data.as_slice();
    let body = bytes_elements(&data).next()?.ok()?;
    if !body.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    serde_json::from_slice(body).ok()
}

fn parameter_value(parameter: &Parameter) -> Value {
    match parameter {
        Parameter::Bool(flag) => json!(flag),
        Parameter::Int(number) => json!(number),
        Parameter::Uint(number) => json!(number),
        Parameter::Double(number) => json!(number),
        Parameter::String(text) => json!(text),
    }
}

fn input_value(input: &InferInput) -> Result<Value, InferError> {
    let tensor = &input.tensor;
    if tensor.data.region().is_some() {
        let text = format!(
            "input '{}' is in shared memory, which a model of the backend {BACKEND} cannot read: \
             send the data",
            input.name
        );
        return Err(InferError::new(ErrorCode::Unsupported, Reason::Unsupported, text));
    }
    let elements = elements(&input.name, tensor)?;
    if element_count(&tensor.shape) != Some(elements.len() as u64) {
        let shape = crate::tensor::format_shape(&tensor.shape);
        let text = format!(
            "input '{}' has {} elements, but the shape {shape}",
            input.name,
            elements.len()
        );
        return Err(InferError::invalid(text));
    }
    Ok(json!({
        "name": input.name,
        "shape": tensor.shape,
        "datatype": tensor.datatype.name(),
        "data": elements,
    }))
}

/// Converts the elements to JSON, in row-major order.
fn elements(name: &str, tensor: &Tensor) -> Result<Vec<Value>, InferError> {
    let data = tensor.data.as_slice();
    let float =
        |value: f64| Number::from_f64(value).map_or_else(|| nonfinite(value), Value::Number);
    if tensor.datatype.size().is_some_and(|size| !data.len().is_multiple_of(size)) {
        let text = format!(
            "input '{name}' has {} bytes, not a multiple of the {} size",
            data.len(),
            tensor.datatype
        );
        return Err(InferError::invalid(text));
    }
    Ok(match tensor.datatype {
        DataType::Bool => each(&data, |[byte]| json!(byte != 0)),
        DataType::Uint8 => each(&data, |bytes| json!(u8::from_le_bytes(bytes))),
        DataType::Uint16 => each(&data, |bytes| json!(u16::from_le_bytes(bytes))),
        DataType::Uint32 => each(&data, |bytes| json!(u32::from_le_bytes(bytes))),
        DataType::Uint64 => each(&data, |bytes| json!(u64::from_le_bytes(bytes))),
        DataType::Int8 => each(&data, |bytes| json!(i8::from_le_bytes(bytes))),
        DataType::Int16 => each(&data, |bytes| json!(i16::from_le_bytes(bytes))),
        DataType::Int32 => each(&data, |bytes| json!(i32::from_le_bytes(bytes))),
        DataType::Int64 => each(&data, |bytes| json!(i64::from_le_bytes(bytes))),
        DataType::Fp16 => each(&data, |bytes| float(half::f16::from_le_bytes(bytes).to_f64())),
        DataType::Bf16 => each(&data, |bytes| float(half::bf16::from_le_bytes(bytes).to_f64())),
        DataType::Fp32 => each(&data, |bytes| single(f32::from_le_bytes(bytes))),
        DataType::Fp64 => each(&data, |bytes| float(f64::from_le_bytes(bytes))),
        DataType::Bytes => bytes_elements(&data)
            .map(|element| match element {
                Ok(bytes) => Ok(json!(
                    std::str::from_utf8(bytes).map_or_else(|_| base64(bytes), str::to_owned)
                )),
                Err(at) => Err(InferError::invalid(format!(
                    "input '{name}' has a broken element at byte {at}"
                ))),
            })
            .collect::<Result<_, _>>()?,
    })
}

fn each<const N: usize>(data: &[u8], value: impl Fn([u8; N]) -> Value) -> Vec<Value> {
    data.as_chunks().0.iter().map(|bytes| value(*bytes)).collect()
}

/// Converts a single-precision number to the shortest number that parses to the same value.
fn single(value: f32) -> Value {
    let exact = value.to_string().parse::<f64>().ok().and_then(Number::from_f64);
    exact.map_or_else(|| nonfinite(f64::from(value)), Value::Number)
}

/// Converts a number that JSON cannot represent to the text that Python's `float` accepts.
fn nonfinite(value: f64) -> Value {
    json!(if value.is_nan() {
        "NaN"
    } else if value > 0.0 {
        "Infinity"
    } else {
        "-Infinity"
    })
}

/// Encodes as base64 (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            let digit =
                DIGITS.get((bits >> (18 - 6 * place) & 63) as usize).copied().unwrap_or(b'=');
            out.push(char::from(if place > chunk.len() { b'=' } else { digit }));
        }
    }
    out
}

/// Converts an output of a document to a tensor.
fn output_tensor(output: &Value) -> Result<InferOutput, InferError> {
    let wrong = |what: String| {
        InferError::new(
            ErrorCode::Internal,
            Reason::Backend,
            format!("the model's answer cannot be used: {what}"),
        )
    };
    let name = output
        .get("name")
        .and_then(Value::as_str)
        .ok_or_else(|| wrong("an output has no name".into()))?;
    let datatype = output.get("datatype").and_then(Value::as_str).unwrap_or_default();
    let Some(known) = DataType::from_name(datatype) else {
        return Err(wrong(format!("output '{name}' has the datatype '{datatype}'")));
    };
    let mut data = Vec::new();
    let mut count = 0i64;
    let given = output.get("data").unwrap_or(&Value::Null);
    push_all(given, known, &mut data, &mut count)
        .map_err(|what| wrong(format!("output '{name}' has {what}")))?;
    let shape: Option<Vec<i64>> = match output.get("shape") {
        None => Some(vec![count]),
        Some(shape) => shape.as_array().and_then(|dims| dims.iter().map(Value::as_i64).collect()),
    };
    let shape = shape.ok_or_else(|| {
        wrong(format!("output '{name}' has a shape that is not a list of integers"))
    })?;
    if element_count(&shape) != u64::try_from(count).ok() {
        let shape = crate::tensor::format_shape(&shape);
        return Err(wrong(format!("output '{name}' has {count} elements, but the shape {shape}")));
    }
    let tensor = Tensor { datatype: known, shape, data: Data::from(data) };
    Ok(InferOutput { name: name.to_owned(), tensor })
}

/// Appends the elements of nested lists.
fn push_all(
    value: &Value,
    datatype: DataType,
    out: &mut Vec<u8>,
    count: &mut i64,
) -> Result<(), String> {
    if let Value::Array(values) = value {
        return values.iter().try_for_each(|value| push_all(value, datatype, out, count));
    }
    *count += 1;
    push(value, datatype, out).ok_or_else(|| format!("the element {value}, not a valid {datatype}"))
}

fn push(value: &Value, datatype: DataType, out: &mut Vec<u8>) -> Option<()> {
    fn whole<const N: usize, T: TryFrom<i128>>(
        value: &Value,
        bytes: impl Fn(T) -> [u8; N],
    ) -> Option<[u8; N]> {
        let number = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
        let number = number.or_else(|| {
            value.as_f64().filter(|number| number.fract() == 0.0).map(|number| number as i128)
        });
        Some(bytes(T::try_from(number?).ok()?))
    }
    let float = || match value {
        Value::String(text) => text.parse::<f64>().ok(),
        _ => value.as_f64(),
    };
    match datatype {
        DataType::Bool => out.push(u8::from(
            value.as_bool().or_else(|| value.as_f64().map(|number| number != 0.0))?,
        )),
        DataType::Uint8 => out.extend(whole(value, u8::to_le_bytes)?),
        DataType::Uint16 => out.extend(whole(value, u16::to_le_bytes)?),
        DataType::Uint32 => out.extend(whole(value, u32::to_le_bytes)?),
        DataType::Uint64 => out.extend(whole(value, u64::to_le_bytes)?),
        DataType::Int8 => out.extend(whole(value, i8::to_le_bytes)?),
        DataType::Int16 => out.extend(whole(value, i16::to_le_bytes)?),
        DataType::Int32 => out.extend(whole(value, i32::to_le_bytes)?),
        DataType::Int64 => out.extend(whole(value, i64::to_le_bytes)?),
        DataType::Fp16 => out.extend(half::f16::from_f64(float()?).to_le_bytes()),
        DataType::Bf16 => out.extend(half::bf16::from_f64(float()?).to_le_bytes()),
        DataType::Fp32 => out.extend((float()? as f32).to_le_bytes()),
        DataType::Fp64 => out.extend(float()?.to_le_bytes()),
        DataType::Bytes => {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            return push_bytes_element(out, text.as_bytes()).then_some(());
        }
    }
    Some(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn tensor(datatype: DataType, shape: &[i64], data: Vec<u8>) -> Tensor {
        Tensor { datatype, shape: shape.to_vec(), data: data.into() }
    }

    fn request(inputs: Vec<(&str, Tensor)>) -> InferRequest {
        let inputs = inputs
            .into_iter()
            .map(|(name, tensor)| InferInput { name: name.into(), tensor })
            .collect();
        InferRequest { id: "7".into(), inputs, ..InferRequest::default() }
    }

    fn body_of(request: &InferRequest) -> Value {
        let data = request.inputs[0].tensor.data.as_slice();
        serde_json::from_slice(bytes_elements(&data).next().unwrap().unwrap()).unwrap()
    }

    fn answer(text: &str) -> InferResponse {
        let outputs =
            vec![InferOutput { name: OUTPUT.into(), tensor: body(text.as_bytes()).unwrap() }];
        InferResponse { outputs, ..InferResponse::default() }
    }

    #[test]
    fn tensors_become_a_document() {
        let floats: Vec<u8> =
            [0.1f32, f32::NAN, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let mut strings = Vec::new();
        for element in [&b"text"[..], b"\xff\xfe", b"\xff\xfe\xfd", b"\xff"] {
            assert!(push_bytes_element(&mut strings, element));
        }
        let mut request = request(vec![
            ("a", tensor(DataType::Fp32, &[3], floats)),
            ("b", tensor(DataType::Bytes, &[2, 2], strings)),
            ("c", tensor(DataType::Fp16, &[1], half::f16::from_f32(1.5).to_le_bytes().to_vec())),
        ]);
        request.parameters.push(("p".into(), Parameter::Int(3)));
        request.outputs.push(RequestedOutput { name: "o".into(), ..RequestedOutput::default() });
        assert!(to_document(&mut request).unwrap().is_some());
        assert_eq!(
            body_of(&request),
            json!({"id": "7", "parameters": {"p": 3}, "outputs": [{"name": "o"}], "inputs": [
                {"name": "a", "shape": [3], "datatype": "FP32", "data": [0.1, "NaN", -2.0]},
                {"name": "b", "shape": [2, 2], "datatype": "BYTES", "data": ["text", "//4=", "//79", "/w=="]},
                {"name": "c", "shape": [1], "datatype": "FP16", "data": [1.5]},
            ]})
        );
        assert!(request.outputs.is_empty());
        let (name, Parameter::String(metadata)) = request.parameters.last().unwrap() else {
            unreachable!()
        };
        let metadata: Value = serde_json::from_str(metadata).unwrap();
        let length = request.inputs[0].tensor.data.len() - 4;
        assert_eq!((name.as_str(), &metadata["parts"][0]["length"]), (PARAMETER, &json!(length)));
    }

    #[test]
    fn keeps_a_body_and_refuses_bad_tensors() {
        let mut plain = request(vec![(INPUT, body(b"x").unwrap())]);
        assert!(to_document(&mut plain).unwrap().is_none());
        for (datatype, shape, data, text) in [
            (
                DataType::Int32,
                &[1][..],
                vec![0; 3],
                "input 'a' has 3 bytes, not a multiple of the INT32 size",
            ),
            (DataType::Int32, &[3], vec![0; 4], "input 'a' has 1 elements, but the shape [3]"),
            (DataType::Bytes, &[1], vec![9, 0, 0, 0], "input 'a' has a broken element at byte 0"),
        ] {
            let error =
                to_document(&mut request(vec![("a", tensor(datatype, shape, data))])).unwrap_err();
            assert_eq!(error.message, text);
        }
    }

    #[test]
    fn a_document_becomes_tensors() {
        let mut response = answer(
            r#" {"id": "1", "outputs": [{"name": "x", "shape": [2, 1], "datatype": "INT64", "data": [[1], [-2]]},
               {"name": "y", "shape": [1], "datatype": "BYTES", "data": ["s"]},
               {"name": "z", "shape": [2], "datatype": "FP32", "data": [0.5, "NaN"]}]}"#,
        );
        from_document(&mut response, &RequestedOutputs::default()).unwrap();
        let [x, y, z] = response.outputs.as_slice() else { unreachable!() };
        assert_eq!(
            x.tensor,
            tensor(
                DataType::Int64,
                &[2, 1],
                [1i64, -2].into_iter().flat_map(i64::to_le_bytes).collect()
            )
        );
        assert_eq!(y.tensor, tensor(DataType::Bytes, &[1], vec![1, 0, 0, 0, b's']));
        assert_eq!(z.tensor.data.len(), 8);
        for other in ["[1]", "{\"a\": 1}", "text", "{broken", ""] {
            let mut response = answer(other);
            from_document(&mut response, &RequestedOutputs::default()).unwrap();
            assert_eq!(response.outputs, answer(other).outputs, "{other}");
        }
    }

    #[test]
    fn reports_what_is_wrong_with_an_answer() {
        for (outputs, text) in [
            (r#"{"datatype": "INT8"}"#, "an output has no name"),
            (r#"{"name": "x", "datatype": "INT9"}"#, "output 'x' has the datatype 'INT9'"),
            (
                r#"{"name": "x", "datatype": "INT8", "data": [300]}"#,
                "output 'x' has the element 300, not a valid INT8",
            ),
            (
                r#"{"name": "x", "datatype": "INT8", "data": [3], "shape": [2]}"#,
                "has 1 elements, but the shape [2]",
            ),
        ] {
            let mut response = answer(&format!("{{\"outputs\": [{outputs}]}}"));
            let error = from_document(&mut response, &RequestedOutputs::default()).unwrap_err();
            assert!(error.message.contains(text), "{error}");
        }
        let requested = RequestedOutputs(vec![RequestedOutput {
            name: "q".into(),
            ..RequestedOutput::default()
        }]);
        let mut response =
            answer(r#"{"outputs": [{"name": "x", "datatype": "INT8", "data": [3]}]}"#);
        let error = from_document(&mut response, &requested).unwrap_err();
        assert_eq!(error.message, "the model's answer has no output 'q'; it has: x");
    }
}
