//! An inference response as JSON (spec 2.4), written straight into one buffer.
//!
//! Numbers are written as the shortest text that parses to the same value of the tensor's datatype.
//! (Triton casts an FP32 to double and prints `0.10000000149011612`; both texts parse to the same
//! FP32.) NaN and infinities are written as `NaN`, `Infinity` and `-Infinity`, which are not JSON
//! but which Triton and Python write too.

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{InferOutput, InferResponse, Parameter, Parameters};
use pharos::tensor::{DataType, byte_size, bytes_elements, element_count};
use serde::Serialize;

/// Appends the response's JSON to `out`; `binary` selects the outputs that follow as binary data.
///
/// # Errors
/// Fails if JSON cannot represent an output (FP16, BF16, bytes that are not UTF-8) or if its bytes
/// do not match its shape.
pub(super) fn render(
    response: &InferResponse,
    binary: impl Fn(&str) -> bool,
    out: &mut Vec<u8>,
) -> Result<(), InferError> {
    out.push(b'{');
    if !response.id.is_empty() {
        out.extend_from_slice(b"\"id\":");
        value(out, &response.id)?;
        out.push(b',');
    }
    out.extend_from_slice(b"\"model_name\":");
    value(out, &response.model_name)?;
    out.extend_from_slice(b",\"model_version\":");
    value(out, &response.model_version)?;
    if !response.parameters.is_empty() {
        parameters(out, &response.parameters)?;
    }
    out.extend_from_slice(b",\"outputs\":[");
    for (index, output) in response.outputs.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        self::output(out, output, binary(&output.name))?;
    }
    out.extend_from_slice(b"]}");
    Ok(())
}

/// Appends a JSON value.
pub(super) fn value(
    out: &mut Vec<u8>,
    value: &(impl Serialize + ?Sized),
) -> Result<(), InferError> {
    serde_json::to_writer(out, value)
        .map_err(|error| InferError::internal(format!("cannot write JSON: {error}")))
}

fn parameters(out: &mut Vec<u8>, parameters: &Parameters) -> Result<(), InferError> {
    out.extend_from_slice(b",\"parameters\":{");
    for (index, (key, parameter)) in parameters.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        value(out, key)?;
        out.push(b':');
        self::parameter(out, parameter)?;
    }
    out.push(b'}');
    Ok(())
}

/// Appends a parameter's value.
pub(super) fn parameter(out: &mut Vec<u8>, parameter: &Parameter) -> Result<(), InferError> {
    match parameter {
        Parameter::Bool(flag) => value(out, flag),
        Parameter::Int(number) => value(out, number),
        Parameter::Uint(number) => value(out, number),
        Parameter::Double(number) => double(out, *number),
        Parameter::String(text) => value(out, text),
    }
}

fn output(out: &mut Vec<u8>, output: &InferOutput, binary: bool) -> Result<(), InferError> {
    let tensor = &output.tensor;
    out.extend_from_slice(b"{\"name\":");
    value(out, &output.name)?;
    out.extend_from_slice(b",\"datatype\":\"");
    out.extend_from_slice(tensor.datatype.name().as_bytes());
    out.extend_from_slice(b"\",\"shape\":");
    value(out, &tensor.shape)?;
    if tensor.data.region().is_some() {
        // The output is in the client's shared memory.
        out.push(b'}');
        return Ok(());
    }
    if binary {
        out.extend_from_slice(b",\"parameters\":{\"binary_data_size\":");
        value(out, &tensor.data.len())?;
        out.extend_from_slice(b"}}");
    } else {
        out.extend_from_slice(b",\"data\":[");
        data(out, output)?;
        out.extend_from_slice(b"]}");
    }
    Ok(())
}

/// Appends the elements of an output, separated by commas.
pub(super) fn data(out: &mut Vec<u8>, output: &InferOutput) -> Result<(), InferError> {
    let tensor = &output.tensor;
    let bytes: &[u8] = &tensor.data.as_slice();
    if tensor.datatype.size().is_some()
        && byte_size(tensor.datatype, &tensor.shape) != Some(bytes.len() as u64)
    {
        return Err(size_mismatch(output));
    }
    match tensor.datatype {
        DataType::Bytes => strings(out, output),
        datatype => elements(out, &output.name, datatype, bytes),
    }
}

/// Appends the elements of a fixed-size datatype, separated by commas; `name` is for error
/// messages.
pub(super) fn elements(
    out: &mut Vec<u8>,
    name: &str,
    datatype: DataType,
    bytes: &[u8],
) -> Result<(), InferError> {
    match datatype {
        DataType::Bool => list(out, bytes, |out, [byte]| value(out, &(byte != 0))),
        DataType::Uint8 => {
            list(out, bytes, |out, element| integer(out, u8::from_le_bytes(element)))
        }
        DataType::Uint16 => {
            list(out, bytes, |out, element| integer(out, u16::from_le_bytes(element)))
        }
        DataType::Uint32 => {
            list(out, bytes, |out, element| integer(out, u32::from_le_bytes(element)))
        }
        DataType::Uint64 => {
            list(out, bytes, |out, element| integer(out, u64::from_le_bytes(element)))
        }
        DataType::Int8 => list(out, bytes, |out, element| integer(out, i8::from_le_bytes(element))),
        DataType::Int16 => {
            list(out, bytes, |out, element| integer(out, i16::from_le_bytes(element)))
        }
        DataType::Int32 => {
            list(out, bytes, |out, element| integer(out, i32::from_le_bytes(element)))
        }
        DataType::Int64 => {
            list(out, bytes, |out, element| integer(out, i64::from_le_bytes(element)))
        }
        DataType::Fp32 => list(out, bytes, |out, element| single(out, f32::from_le_bytes(element))),
        DataType::Fp64 => list(out, bytes, |out, element| double(out, f64::from_le_bytes(element))),
        DataType::Bytes => {
            Err(InferError::internal(format!("the elements of output '{name}' have no fixed size")))
        }
        DataType::Fp16 | DataType::Bf16 => Err(InferError::invalid(format!(
            "sending {datatype} data via JSON is not supported. Please use the binary data format \
             for output {name}"
        ))),
    }
}

fn list<const N: usize>(
    out: &mut Vec<u8>,
    bytes: &[u8],
    element: impl Fn(&mut Vec<u8>, [u8; N]) -> Result<(), InferError>,
) -> Result<(), InferError> {
    out.reserve(bytes.len() / N * 4);
    let (elements, _) = bytes.as_chunks::<N>();
    for (index, chunk) in elements.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        element(out, *chunk)?;
    }
    Ok(())
}

/// Appends an integer. Those of one or two digits, such as labels and counts, are most of what
/// clients get as JSON, and cost neither a conversion nor a copy.
fn integer<T: itoa::Integer + Copy>(out: &mut Vec<u8>, number: T) -> Result<(), InferError>
where
    u8: TryFrom<T>,
{
    match u8::try_from(number) {
        Ok(digit @ 0..=9) => out.push(b'0' + digit),
        Ok(number @ 10..=99) => out.extend([b'0' + number / 10, b'0' + number % 10]),
        _ => out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes()),
    }
    Ok(())
}

fn single(out: &mut Vec<u8>, number: f32) -> Result<(), InferError> {
    if number.is_finite() { value(out, &number) } else { double(out, f64::from(number)) }
}

fn double(out: &mut Vec<u8>, number: f64) -> Result<(), InferError> {
    if number.is_finite() {
        return value(out, &number);
    }
    let word: &[u8] = match number {
        f64::INFINITY => b"Infinity",
        f64::NEG_INFINITY => b"-Infinity",
        _ => b"NaN",
    };
    out.extend_from_slice(word);
    Ok(())
}

fn strings(out: &mut Vec<u8>, output: &InferOutput) -> Result<(), InferError> {
    let mut count = 0u64;
    for element in bytes_elements(&output.tensor.data.as_slice()) {
        let element = element.map_err(|_| size_mismatch(output))?;
        let text = std::str::from_utf8(element).map_err(|_| {
            InferError::invalid(format!(
                "element {count} of output {} is not UTF-8, which JSON cannot carry. Please use \
                 the binary data format for output {}",
                output.name, output.name
            ))
        })?;
        if count > 0 {
            out.push(b',');
        }
        value(out, text)?;
        count += 1;
    }
    if element_count(&output.tensor.shape) == Some(count) {
        Ok(())
    } else {
        Err(size_mismatch(output))
    }
}

fn size_mismatch(output: &InferOutput) -> InferError {
    let message =
        format!("output tensor shape does not match size of output for '{}'", output.name);
    InferError::new(ErrorCode::Internal, Reason::Internal, message)
}
