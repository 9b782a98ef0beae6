//! The JSON part of an inference request (spec 2.3), parsed into an [`InferRequest`].
//!
//! The order of the checks is Triton's: id, parameters, each input, unused binary data, outputs.

use std::borrow::Cow;
use std::cell::OnceCell;

use pharos::data::Data;
use pharos::error::InferError;
use pharos::infer::{CorrelationId, InferInput, InferRequest, RequestedOutput};
use pharos::region::Slice;
use pharos::tensor::{DataType, Tensor, byte_size, element_count};
use serde_json::value::RawValue;

use super::json::{
    Elements, as_bool, as_members, as_parameter, as_string, as_u64, check_depth, from_relaxed,
    object, parse_error, type_error, unreadable, with_allowed_values, without_byte_order_mark,
};

mod known;

object! {
    /// The top level.
    Request { id: &'a RawValue, parameters: &'a RawValue, inputs: Elements<Input<'a>>, outputs: Elements<Output<'a>> }
}
object! {
    /// The top level again, to diagnose a parse error.
    Shallow { inputs: &'a RawValue, outputs: &'a RawValue }
}
object! {
    /// An element of `inputs`. Its `parameters` may be null, as in Triton.
    Input {
        name: &'a RawValue, shape: &'a RawValue, datatype: &'a RawValue, parameters: Option<InputParameters<'a>>,
        data: &'a RawValue
    }
}
object! {
    /// An input's `parameters`.
    InputParameters {
        binary_data_size: &'a RawValue, shared_memory_region: &'a RawValue, shared_memory_offset: &'a RawValue,
        shared_memory_byte_size: &'a RawValue
    }
}
object! {
    /// An element of `outputs`. Its `parameters` may be null, as in Triton.
    Output { name: &'a RawValue, parameters: Option<OutputParameters<'a>> }
}
object! {
    /// An output's `parameters`.
    OutputParameters {
        binary_data: &'a RawValue, classification: &'a RawValue, shared_memory_region: &'a RawValue,
        shared_memory_offset: &'a RawValue, shared_memory_byte_size: &'a RawValue
    }
}

const NO_MEMBER: &str = "attempt to access non-existing object member";

/// Fills `request` from `json` and the binary data that follows it. Returns the request's
/// `binary_data_output`.
pub(super) fn parse(
    json: &[u8],
    mut binary: Data,
    request: &mut InferRequest,
) -> Result<bool, InferError> {
    let text = known::Text::of(json);
    if let Some(filled) = text.fill(&mut binary, request) {
        return filled;
    }
    let json = without_byte_order_mark(json);
    // A NUL ends the text, as in Triton; valid JSON contains none.
    let end = if json.contains(&0) { json.iter().position(|&byte| byte == 0) } else { None };
    let json = end.and_then(|end| json.get(..end)).unwrap_or(json);
    let json = std::str::from_utf8(json)
        .map_err(|error| parse_error(format!("Invalid encoding in string. {error}")))?;
    check_depth(json)?;
    let relaxed = OnceCell::new();
    let parsed: Request<'_> =
        from_relaxed(json, &relaxed).map_err(|(error, text)| diagnose(text, &error))?;
    let has_data =
        parsed.inputs.iter().flat_map(|inputs| &inputs.0).any(|input| input.data.is_some());
    let binary_data_output = fill(parsed, binary, request)?;
    if !has_data {
        text.keep(request, binary_data_output);
    }
    Ok(binary_data_output)
}

fn fill(parsed: Request<'_>, binary: Data, request: &mut InferRequest) -> Result<bool, InferError> {
    if let Some(id) = parsed.id {
        request.id = as_string(id, "Unable to parse 'id'")?.into_owned();
    }
    let mut binary_data_output = false;
    if let Some(parameters) = parsed.parameters {
        binary_data_output = request_parameters(parameters, request)?;
    }
    let Some(inputs) = parsed.inputs else {
        return Err(type_error("Unable to parse 'inputs'", &format!("{NO_MEMBER} 'inputs'")));
    };
    let mut binary = Blobs { rest: binary, model: &request.model_name };
    let inputs =
        inputs.0.into_iter().map(|one| input(one, &mut binary)).collect::<Result<_, _>>()?;
    binary.end()?;
    request.inputs = inputs;
    request.outputs =
        parsed.outputs.unwrap_or_default().0.into_iter().map(output).collect::<Result<_, _>>()?;
    Ok(binary_data_output)
}

/// Returns the error that Triton's reader reports for JSON that serde rejected.
fn diagnose(json: &str, error: &serde_json::Error) -> InferError {
    if !error.is_data() {
        return unreadable(error);
    }
    let shallow: Shallow<'_> = serde_json::from_str(json).unwrap_or_default();
    let not_array =
        |value: Option<&RawValue>| value.is_some_and(|value| !value.get().starts_with('['));
    let prefix = if shallow.inputs.is_none() {
        return type_error("Unable to parse 'inputs'", &format!("{NO_MEMBER} 'inputs'"));
    } else if not_array(shallow.inputs) {
        "Unable to parse 'inputs'"
    } else if not_array(shallow.outputs) {
        "Unable to parse 'outputs'"
    } else if has_no_object(shallow.inputs) {
        return one_source(None, &InputParameters::default())
            .err()
            .unwrap_or_else(|| unreadable(error));
    } else if has_no_object(shallow.outputs) {
        return type_error("Unable to parse 'name'", &format!("{NO_MEMBER} 'name'"));
    } else {
        return unreadable(error);
    };
    type_error(prefix, "attempt to access JSON non-array as array")
}

/// Returns whether an array has an element that is not an object.
fn has_no_object(array: Option<&RawValue>) -> bool {
    let elements: Elements<&RawValue> =
        array.and_then(|array| serde_json::from_str(array.get()).ok()).unwrap_or_default();
    elements.0.iter().any(|element| !element.get().starts_with('{'))
}

fn request_parameters(
    parameters: &RawValue,
    request: &mut InferRequest,
) -> Result<bool, InferError> {
    let wrong =
        || type_error("failed to get request params.", "attempt to get members for non-object");
    let members = as_members(parameters, wrong)?;
    let mut binary_data_output = false;
    for (key, value) in members.0 {
        match &*key {
            "sequence_id" => {
                request.correlation_id = match value.get().parse() {
                    Ok(number) => CorrelationId::Uint(number),
                    Err(_) => {
                        let text = as_string(value, "Unable to parse 'sequence_id'");
                        CorrelationId::from_text(with_allowed_values(
                            text,
                            value,
                            "0 to 18446744073709551615, or a string",
                        )?)?
                    }
                }
            }
            "sequence_start" => {
                request.sequence_start = flag(value, "Unable to parse 'sequence_start'")?
            }
            "sequence_end" => request.sequence_end = flag(value, "Unable to parse 'sequence_end'")?,
            "priority" => request.priority = whole(value, "Unable to parse 'priority'")?,
            "timeout" => request.timeout_us = whole(value, "Unable to parse 'timeout'")?,
            "binary_data_output" => {
                binary_data_output = flag(value, "Unable to parse 'binary_data_output'")?
            }
            reserved if reserved.starts_with("triton_") => {
                return Err(reserved_parameter());
            }
            _ => {
                let parameter = as_parameter(&key, value)?;
                request.parameters.push((key.into_owned(), parameter));
            }
        }
    }
    Ok(binary_data_output)
}

/// Returns the error of a parameter whose name is reserved.
pub(super) fn reserved_parameter() -> InferError {
    InferError::invalid(
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be \
         specified.",
    )
}

fn flag(value: &RawValue, prefix: &str) -> Result<bool, InferError> {
    with_allowed_values(as_bool(value, prefix), value, "true or false")
}

fn whole(value: &RawValue, prefix: &str) -> Result<u64, InferError> {
    with_allowed_values(as_u64(value, prefix), value, "0 to 18446744073709551615")
}

/// The binary data that no input has consumed yet.
struct Blobs<'a> {
    rest: Data,
    model: &'a str,
}

impl Blobs<'_> {
    fn take(&mut self, input: &str, size: u64) -> Result<Data, InferError> {
        match usize::try_from(size).ok().filter(|&size| size <= self.rest.len()) {
            Some(size) => Ok(self.rest.split_to(size)),
            None => Err(InferError::malformed(format!(
                "unexpected size for input '{input}', expecting {} additional bytes for model '{}'",
                size - self.rest.len() as u64,
                self.model
            ))),
        }
    }

    /// Refuses binary data that no input has consumed.
    fn end(self) -> Result<(), InferError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(InferError::malformed(format!(
            "unexpected additional input data for model '{}'",
            self.model
        )))
    }
}

fn input(input: Input<'_>, binary: &mut Blobs<'_>) -> Result<InferInput, InferError> {
    let parameters = input.parameters.flatten().unwrap_or_default();
    one_source(input.data, &parameters)?;
    let name = required_string(input.name, "name")?.into_owned();
    let datatype = required_string(input.datatype, "datatype")?;
    let shape = shape(input.shape)?;
    let datatype =
        DataType::from_name(&datatype).ok_or_else(|| unknown_datatype(&name, &datatype))?;
    let region = parameters.shared_memory_region;
    let region = region.map(|region| {
        slice(region, parameters.shared_memory_offset, parameters.shared_memory_byte_size)
    });
    let region = region.transpose()?;
    let elements = element_count(&shape).ok_or_else(|| {
        let most = i64::MAX;
        InferError::invalid(format!(
            "shape for input '{name}' causes total element count to exceed maximum size of {most}"
        ))
    })?;
    if datatype.size().is_some() && byte_size(datatype, &shape).is_none() {
        return Err(InferError::invalid(format!(
            "byte size overflow for input '{name}' with shape {shape:?}"
        )));
    }
    let data = match (parameters.binary_data_size, input.data) {
        (Some(size), _) => {
            binary.take(&name, as_u64(size, "Unable to parse 'binary_data_size'")?)?
        }
        // Triton ignores the data of an empty tensor.
        (None, Some(data)) if elements > 0 => {
            super::data::flatten(&name, data.get(), datatype, elements)?.into()
        }
        (None, _) => region.map_or_else(Data::new, Data::from),
    };
    Ok(InferInput { name, tensor: Tensor { datatype, shape, data } })
}

/// Checks that exactly one of `data`, `binary_data_size` and `shared_memory_region` gives the
/// input's bytes.
fn one_source(data: Option<&RawValue>, parameters: &InputParameters<'_>) -> Result<(), InferError> {
    let given = [
        ("'data'", data.is_some()),
        ("'binary_data_size'", parameters.binary_data_size.is_some()),
        ("'shared_memory_region'", parameters.shared_memory_region.is_some()),
    ];
    if given.iter().filter(|(_, set)| *set).count() == 1 {
        return Ok(());
    }
    let given: Vec<&str> =
        given.into_iter().filter(|(_, set)| *set).map(|(name, _)| name).collect();
    let found = if given.is_empty() {
        "no field is set".to_owned()
    } else {
        format!("set {}", given.join(" "))
    };
    Err(InferError::invalid(format!(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in \
         'parameters', 'shared_memory_region' in 'parameters'. But {found}"
    )))
}

fn required_string<'a>(
    value: Option<&'a RawValue>,
    member: &str,
) -> Result<Cow<'a, str>, InferError> {
    let prefix = match member {
        "name" => "Unable to parse 'name'",
        _ => "Unable to parse 'datatype'",
    };
    let value = value.ok_or_else(|| type_error(prefix, &format!("{NO_MEMBER} '{member}'")))?;
    as_string(value, prefix)
}

fn shape(value: Option<&RawValue>) -> Result<Vec<i64>, InferError> {
    let prefix = "Unable to parse 'shape'";
    let value = value.ok_or_else(|| type_error(prefix, &format!("{NO_MEMBER} 'shape'")))?;
    let Some(inner) = value.get().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else {
        return Err(type_error(prefix, "attempt to access JSON non-array as array"));
    };
    // The text is valid JSON: other values than numbers have characters that a number cannot have.
    let dim = |text: &str| i64::try_from(text.trim_ascii().parse::<u64>().ok()?).ok();
    let dims: Option<Vec<i64>> = match inner.trim_ascii() {
        "" => Some(Vec::new()),
        inner => inner.split(',').map(dim).collect(),
    };
    dims.ok_or_else(|| {
        type_error(prefix, "attempt to access JSON non-unsigned-integer as unsigned-integer")
    })
}

fn unknown_datatype(input: &str, datatype: &str) -> InferError {
    let names: Vec<&str> = DataType::ALL.into_iter().map(DataType::name).collect();
    InferError::invalid(format!(
        "invalid datatype for input {input}: '{datatype}' is not one of {}",
        names.join(", ")
    ))
}

/// Returns the range of a shared memory region. As in Triton, a missing offset or size is 0.
fn slice(
    region: &RawValue,
    offset: Option<&RawValue>,
    byte_size: Option<&RawValue>,
) -> Result<Slice, InferError> {
    let name = as_string(region, "Unable to parse 'shared_memory_region'")?.into_owned();
    let offset = offset
        .map(|offset| as_u64(offset, "Unable to parse 'shared_memory_offset'"))
        .transpose()?;
    let len = byte_size
        .map(|size| as_u64(size, "Unable to parse 'shared_memory_byte_size'"))
        .transpose()?;
    Ok(Slice::new(name, offset.unwrap_or(0), len.unwrap_or(0)))
}

fn output(output: Output<'_>) -> Result<RequestedOutput, InferError> {
    let parameters = output.parameters.flatten().unwrap_or_default();
    let binary_data = match parameters.binary_data {
        Some(value) => Some(flag(value, "Unable to parse 'binary_data'")?),
        None => None,
    };
    if parameters.shared_memory_region.is_some() {
        for (set, other) in [
            (parameters.classification.is_some(), "classification"),
            (binary_data == Some(true), "binary_data"),
        ] {
            if set {
                return Err(InferError::invalid(format!(
                    "Output can't set both 'shared_memory_region' and '{other}'"
                )));
            }
        }
    }
    let name = required_string(output.name, "name")?.into_owned();
    let classification = match parameters.classification {
        Some(value) => whole(value, "Unable to set 'classification'")?,
        None => 0,
    };
    let region = parameters.shared_memory_region;
    let region = region.map(|region| {
        slice(region, parameters.shared_memory_offset, parameters.shared_memory_byte_size)
    });
    Ok(RequestedOutput { name, binary_data, classification, region: region.transpose()? })
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::unwrap_used)]
mod tests {
    use pharos::infer::Parameter;

    use super::*;

    /// Returns the only input of a request with this name and shape.
    fn input_with(name: &str, shape: &str) -> Result<InferInput, String> {
        let json = format!(
            r#"{{"inputs":[{{"name":{name},"shape":{shape},"datatype":"FP32","data":[1]}}]}}"#
        );
        let mut request = InferRequest::default();
        parse(json.as_bytes(), Data::new(), &mut request).map_err(|error| error.message)?;
        Ok(request.inputs.remove(0))
    }

    #[test]
    fn only_an_array_of_whole_numbers_is_a_shape() {
        let shape = |text: &str| input_with("\"X\"", text).map(|input| input.tensor.shape);
        assert_eq!(shape(" [ 1 ,\n1\t] "), Ok(vec![1, 1]));
        let wrong = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as \
                     unsigned-integer";
        let too_large = "[9223372036854775808]";
        for text in [
            "[-0]",
            "[1e0]",
            "[1,1.0]",
            "[[1]]",
            "[[1],[1]]",
            "[\"1\"]",
            "[null]",
            "[{}]",
            too_large,
        ] {
            assert_eq!(shape(text), Err(wrong.to_owned()), "{text}");
        }
        // The shape of a scalar.
        assert_eq!(shape("[ ]"), Ok(vec![]));
    }

    /// Decodes a request with one BYTES input that has this `data`, and these members besides its
    /// inputs.
    fn bytes_request(data: &str, besides: &str) -> Result<InferRequest, (u16, String)> {
        let input = format!(r#"{{"name":"X","shape":[1],"datatype":"BYTES","data":{data}}}"#);
        let json = format!("{{{besides}\"inputs\":[{input}]}}");
        let mut request = InferRequest::default();
        let parsed = parse(json.as_bytes(), Data::new(), &mut request);
        parsed.map(|_| request).map_err(|error| (error.code.http_status(), error.message))
    }

    #[test]
    fn a_nonfinite_number_is_no_string() {
        let string = "attempt to access JSON non-string as string";
        let bytes = format!("Unable to parse JSON bytes array: {string}, for input 'X'");
        let allowed = "0 to 18446744073709551615, or a string";
        let sequence = |shown| {
            format!("Unable to parse 'sequence_id': {string}: it is {shown}, allowed: {allowed}")
        };
        for (data, besides, status, text) in [
            ("[NaN]", "", 500, bytes.clone()),
            ("[-Inf]", "", 500, bytes),
            (r#"["a"]"#, r#""id":NaN,"#, 500, format!("Unable to parse 'id': {string}")),
            (r#"["a"]"#, r#""parameters":{"sequence_id":NaN},"#, 400, sequence("NaN")),
            (r#"["a"]"#, r#""parameters":{"sequence_id":[-Inf]},"#, 400, sequence("[ -Infinity ]")),
            (
                r#"["a"]"#,
                r#""outputs":[{"name":Infinity}],"#,
                500,
                format!("Unable to parse 'name': {string}"),
            ),
        ] {
            assert_eq!(
                bytes_request(data, besides).map(|_| ()),
                Err((status, text)),
                "{data} {besides}"
            );
        }
        let name = format!("Unable to parse 'name': {string}");
        assert_eq!(input_with("NaN", "[1]").map(|input| input.name), Err(name));
    }

    #[test]
    fn a_clients_text_is_no_number() {
        for text in ["\u{f8ff}NaN", "NaN", "0E-17341"] {
            // With a bare word elsewhere in the document, and without one.
            for other in ["NaN", "1.5"] {
                let parameters = format!(r#""parameters":{{"text":"{text}","other":{other}}},"#);
                let request = bytes_request(&format!("[\"{text}\"]"), &parameters).unwrap();
                let expected = [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
                assert_eq!(request.inputs[0].tensor.data, expected[..]);
                assert_eq!(request.parameters[0].1, Parameter::String(text.to_owned()));
            }
        }
    }

    #[test]
    fn parameters_of_a_tensor_may_be_null() {
        let json = r#"{"inputs":[{"name":"X","shape":[1],"datatype":"INT8","parameters":null,"data":[1]}],
            "outputs":[{"name":"Y","parameters":null}]}"#;
        let mut request = InferRequest::default();
        parse(json.as_bytes(), Data::new(), &mut request).unwrap();
        assert_eq!(request.inputs[0].tensor.data, [1][..]);
        assert_eq!(request.outputs[0].name, "Y");
        assert_eq!(
            bytes_request(r#"["a"]"#, r#""parameters":null,"#).map(|_| ()),
            Err((
                500,
                "failed to get request params.: attempt to get members for non-object".to_owned()
            ))
        );
    }

    #[test]
    fn a_byte_order_mark_may_precede_the_json() {
        let json = "\u{feff}{\"inputs\":[{\"name\":\"X\",\"shape\":[3],\"datatype\":\"UINT8\",\"\
                    parameters\":{\"binary_data_size\":3}}]}";
        // Binary data that looks like a mark is kept.
        let binary = b"\xef\xbb\xbf";
        let mut request = InferRequest::default();
        parse(json.as_bytes(), Data::from(binary.to_vec()), &mut request).unwrap();
        assert_eq!(request.inputs[0].tensor.data, binary[..]);
    }

    #[test]
    fn strings_may_have_escapes() {
        let name = |text: &str| input_with(text, "[1]").map(|input| input.name);
        assert_eq!(name(r#""a\u00e9\"\\b""#), Ok("aé\"\\b".to_owned()));
        assert_eq!(name("\"é]\""), Ok("é]".to_owned()));
        assert_eq!(name("\"\""), Ok(String::new()));
        assert!(
            name(r#""\ud800""#).is_err() && name("\"\u{1}\"").is_err() && name("[\"a\"]").is_err()
        );
    }
}
