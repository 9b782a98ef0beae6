//! Converts the JSON of a `:predict` request to the model's inputs (TensorFlow Serving's REST
//! interface, "Predict API"): `instances`, one value per row, or `inputs`, one tensor per input.
//! Pure functions over bytes.
//!
//! The shape of an input is that of its nested arrays; in the row form the number of rows precedes
//! it. A row of an input with one element may be the element itself. An element of a BYTES input is a string, taken as UTF-8, or `{"b64": "..."}` with bytes in
//! base64.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::InferInput;
use pharos::model::TensorMetadata;
use pharos::tensor::{DataType, Tensor, push_bytes_element};
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::data;
use crate::json::{
    Key, Members, check_depth, from_relaxed, object, parse_error, string_end,
    without_byte_order_mark,
};

object! {
    /// A request. Other members, such as `signature_name`, are ignored.
    Predict { instances: &'a RawValue, inputs: &'a RawValue }
}

/// The form of the tensors in a request and in its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// `instances` with this number of rows.
    Rows(u64),
    /// `inputs`.
    Columns,
}

/// The inputs of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelInputs<'a> {
    pub(crate) all: &'a [TensorMetadata],
    /// The input of values without a name: the only one, or the only one that is not optional.
    pub(crate) unnamed: Option<&'a TensorMetadata>,
}

impl<'a> ModelInputs<'a> {
    /// Returns the inputs of a model, of which some are optional.
    pub(crate) fn new(all: &'a [TensorMetadata], is_optional: impl Fn(&str) -> bool) -> Self {
        let mut required = all.iter().filter(|input| !is_optional(&input.name));
        let unnamed = match (all, required.next(), required.next()) {
            ([only], ..) => Some(only),
            (_, Some(only), None) => Some(only),
            _ => None,
        };
        Self { all, unnamed }
    }
}

/// Parses the JSON of a request to a model with `inputs`.
///
/// # Errors
/// Fails if the text is not a valid request or does not match the model's inputs.
pub(crate) fn parse(
    json: &[u8],
    inputs: ModelInputs<'_>,
) -> Result<(Vec<InferInput>, Form), InferError> {
    parse_any(json, inputs).map_err(|error| match error.reason {
        // Triton's reader answers 500; TensorFlow Serving and KServe answer 400.
        Reason::Malformed => InferError::new(ErrorCode::InvalidArg, error.reason, error.message),
        _ => error,
    })
}

fn parse_any(json: &[u8], inputs: ModelInputs<'_>) -> Result<(Vec<InferInput>, Form), InferError> {
    let json = std::str::from_utf8(without_byte_order_mark(json)).map_err(parse_error)?;
    check_depth(json)?;
    let relaxed = OnceCell::new();
    let predict: Predict<'_> =
        from_relaxed(json, &relaxed).map_err(|(error, _)| unreadable(error))?;
    match (predict.instances, predict.inputs) {
        (Some(instances), None) => rows(instances.get(), inputs),
        (None, Some(columns)) => Ok((self::columns(columns, inputs)?, Form::Columns)),
        _ => {
            Err(InferError::malformed("a predict request must have either 'instances' or 'inputs'"))
        }
    }
}

fn unreadable(error: serde_json::Error) -> InferError {
    InferError::malformed(format!("the request is not a JSON object: {error}"))
}

/// Parses `instances`: an array of values of the only input, or of objects with a value for each
/// input.
fn rows(json: &str, inputs: ModelInputs<'_>) -> Result<(Vec<InferInput>, Form), InferError> {
    let first = json.strip_prefix('[').map(str::trim_start);
    let Some(first) = first.filter(|first| !first.starts_with(']')) else {
        return Err(InferError::malformed("'instances' must be a non-empty array"));
    };
    if !first.starts_with('{') || is_base64(first) {
        let input = only(inputs, "instances")?;
        let tensor = with_element(input, tensor(input, json)?);
        let count = tensor.shape.first().map_or(0, |rows| rows.unsigned_abs());
        return Ok((vec![InferInput { name: input.name.clone(), tensor }], Form::Rows(count)));
    }
    let mut rows = Rows { inputs: inputs.all, columns: Vec::new(), count: 0, refused: None };
    if let Err(error) = rows.deserialize(&mut serde_json::Deserializer::from_str(json)) {
        let wrong = || {
            InferError::malformed(format!(
                "'instances' must be objects if the first one is: {error}"
            ))
        };
        return Err(rows.refused.take().unwrap_or_else(wrong));
    }
    let column = |Column { input, mut json }: Column<'_>| {
        json.push(']');
        let tensor = with_element(input, tensor(input, &json)?);
        Ok(InferInput { name: input.name.clone(), tensor })
    };
    let columns = rows.columns.into_iter().map(column).collect::<Result<Vec<_>, InferError>>()?;
    Ok((columns, Form::Rows(rows.count)))
}

/// Collects the values of each input from the rows, one row after the other, so that no row is
/// kept.
struct Rows<'i> {
    inputs: &'i [TensorMetadata],
    /// The members of the first row.
    columns: Vec<Column<'i>>,
    /// The number of rows.
    count: u64,
    /// Why a row is refused.
    refused: Option<InferError>,
}

/// The values of one input.
struct Column<'i> {
    input: &'i TensorMetadata,
    /// An array without its end.
    json: String,
}

impl Rows<'_> {
    fn add(&mut self, members: &[(Cow<'_, str>, &RawValue)]) -> Result<(), InferError> {
        let at = self.count;
        if at == 0 {
            for (name, _) in members {
                let input = find(self.inputs, name)?;
                if self.columns.iter().any(|column| column.input.name == *name) {
                    return Err(InferError::malformed(format!(
                        "instance 0 has the member '{name}' more than once"
                    )));
                }
                self.columns.push(Column { input, json: "[".to_owned() });
            }
        }
        for Column { input, json } in &mut self.columns {
            let value =
                members.iter().find(|(name, _)| *name == input.name).map(|(_, value)| value.get());
            let name = &input.name;
            let value = value.ok_or_else(|| {
                InferError::malformed(format!("instance {at} has no member '{name}'"))
            })?;
            json.push_str(if at > 0 { "," } else { "" });
            json.push_str(value);
        }
        if members.len() != self.columns.len() {
            return Err(InferError::malformed(format!(
                "instance {at} does not have the same members as instance 0"
            )));
        }
        self.count += 1;
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Rows<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for &mut Rows<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut rows: A) -> Result<(), A::Error> {
        while let Some(Members(members)) = rows.next_element()? {
            if let Err(refused) = self.add(&members) {
                let error = A::Error::custom(&refused.message);
                self.refused = Some(refused);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Parses `inputs`: an object with a tensor for each input, or the tensor of the only input.
fn columns(columns: &RawValue, inputs: ModelInputs<'_>) -> Result<Vec<InferInput>, InferError> {
    let json = columns.get();
    if !json.starts_with('{') || is_base64(json) {
        let input = only(inputs, "inputs")?;
        return Ok(vec![InferInput { name: input.name.clone(), tensor: tensor(input, json)? }]);
    }
    let Members(members) = serde_json::from_str(json).map_err(unreadable)?;
    let column = |(name, value): (Cow<'_, str>, &RawValue)| {
        let tensor = tensor(find(inputs.all, &name)?, value.get())?;
        Ok(InferInput { name: name.into_owned(), tensor })
    };
    members.into_iter().map(column).collect()
}

fn find<'a>(inputs: &'a [TensorMetadata], name: &str) -> Result<&'a TensorMetadata, InferError> {
    inputs.iter().find(|input| input.name == name).ok_or_else(|| {
        InferError::invalid(format!(
            "the model has no input '{}'; its inputs are {}",
            name.escape_debug(),
            names(inputs)
        ))
    })
}

fn only<'a>(inputs: ModelInputs<'a>, member: &str) -> Result<&'a TensorMetadata, InferError> {
    inputs.unnamed.ok_or_else(|| {
        let names = names(inputs.all);
        InferError::invalid(format!("'{member}' must name the model's inputs: {names}"))
    })
}

/// Adds the last dimension to a tensor whose rows are elements, if each row of the input has one
/// element.
fn with_element(input: &TensorMetadata, mut tensor: Tensor) -> Tensor {
    if tensor.shape.len() == 1 && matches!(input.shape.as_slice(), [_, 1]) {
        tensor.shape.push(1);
    }
    tensor
}

fn names(inputs: &[TensorMetadata]) -> String {
    inputs.iter().map(|input| format!("'{}'", input.name)).collect::<Vec<_>>().join(", ")
}

/// Returns whether a text that begins with an object begins with `{"b64": ...}`: bytes, not a row.
fn is_base64(json: &str) -> bool {
    json.strip_prefix('{').is_some_and(|rest| rest.trim_start().starts_with("\"b64\""))
}

/// Returns the tensor that nested arrays represent.
fn tensor(input: &TensorMetadata, json: &str) -> Result<Tensor, InferError> {
    let TensorMetadata { name, datatype, .. } = input;
    let datatype = DataType::from_name(datatype).ok_or_else(|| {
        InferError::internal(format!("input '{name}' has the unknown datatype {datatype}"))
    })?;
    let mut walk = Walk { json, at: 0, bytes: (datatype == DataType::Bytes).then(Vec::new) };
    let shape = walk.value(name)?;
    let data = match walk.bytes {
        Some(bytes) => bytes,
        None => {
            let array = if json.starts_with('[') {
                Cow::Borrowed(json)
            } else {
                Cow::Owned(format!("[{json}]"))
            };
            data::flatten(name, &array, datatype, shape.iter().product())?
        }
    };
    let shape = shape.into_iter().map(i64::try_from).collect::<Result<Vec<i64>, _>>();
    let shape = shape.map_err(|_| InferError::internal("the JSON has more values than bytes"))?;
    Ok(Tensor { datatype, shape, data: data.into() })
}

/// A cursor over the text of nested arrays, which is known to be JSON of a limited depth.
struct Walk<'a> {
    json: &'a str,
    at: usize,
    /// The elements of a BYTES tensor.
    bytes: Option<Vec<u8>>,
}

impl Walk<'_> {
    /// Parses the value at the cursor and returns its shape; the cursor then stands behind the
    /// value.
    fn value(&mut self, input: &str) -> Result<Vec<u64>, InferError> {
        if self.peek() != Some(b'[') {
            self.scalar(input)?;
            return Ok(Vec::new());
        }
        self.at += 1;
        let mut count = 0u64;
        let mut inner = None::<Vec<u64>>;
        while self.peek().is_some_and(|byte| byte != b']') {
            let shape = self.value(input)?;
            if *inner.get_or_insert_with(|| shape.clone()) != shape {
                let text = format!(
                    "the arrays of input '{input}' have different lengths; a tensor needs equal \
                     ones"
                );
                return Err(InferError::invalid(text));
            }
            count += 1;
            if self.peek() == Some(b',') {
                self.at += 1;
            }
        }
        self.at += 1;
        let mut shape = inner.unwrap_or_default();
        shape.insert(0, count);
        Ok(shape)
    }

    /// Skips white space and returns the next byte.
    fn peek(&mut self) -> Option<u8> {
        let rest = self.json.as_bytes().get(self.at..)?;
        self.at += rest.iter().position(|byte| !byte.is_ascii_whitespace())?;
        self.json.as_bytes().get(self.at).copied()
    }

    fn scalar(&mut self, input: &str) -> Result<(), InferError> {
        let bytes = self.json.as_bytes();
        let start = self.at;
        let mut depth = 0usize;
        while let Some(&byte) = bytes.get(self.at) {
            match byte {
                b'"' => self.at = string_end(bytes, self.at),
                b'{' => depth += 1,
                b'}' => depth = depth.saturating_sub(1),
                b',' | b']' if depth == 0 => break,
                _ => {}
            }
            self.at += 1;
        }
        self.at = self.at.min(bytes.len());
        let token = self.json.get(start..self.at).unwrap_or_default().trim_end();
        let Some(out) = &mut self.bytes else { return Ok(()) };
        let element = element(token).ok_or_else(|| {
            InferError::invalid(format!(
                "input '{input}' takes strings, or bytes in base64 as {{\"b64\": \"...\"}}"
            ))
        })?;
        if push_bytes_element(out, &element) {
            return Ok(());
        }
        Err(InferError::invalid(format!(
            "an element of input '{input}' has more than {} bytes",
            u32::MAX
        )))
    }
}

/// Returns the bytes of a string or of `{"b64": ...}`.
fn element(token: &str) -> Option<Vec<u8>> {
    if token.starts_with('"') {
        let Key(text) = serde_json::from_str(token).ok()?;
        return Some(text.into_owned().into_bytes());
    }
    let Members(members) = serde_json::from_str(token).ok()?;
    let [(key, value)] = members.as_slice() else { return None };
    let Key(text) = serde_json::from_str(value.get()).ok()?;
    (key == "b64").then(|| BASE64_STANDARD.decode(text.as_bytes()).ok()).flatten()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn input(name: &str, datatype: &'static str) -> TensorMetadata {
        TensorMetadata { name: name.to_owned(), datatype, shape: vec![-1, -1] }
    }

    /// Names, shapes and byte counts of inputs.
    type Given<'a> = &'a [(&'a str, &'a [i64], usize)];

    fn check(json: &str, inputs: &[TensorMetadata], expected: Result<(Given<'_>, Form), &str>) {
        let got = parse(json.as_bytes(), ModelInputs::new(inputs, |name| name.ends_with('?')));
        match (got, expected) {
            (Ok((given, form)), Ok((wanted, wanted_form))) => {
                let given: Vec<_> = given
                    .iter()
                    .map(|i| (i.name.as_str(), &*i.tensor.shape, i.tensor.data.len()))
                    .collect();
                assert_eq!((given.as_slice(), form), (wanted, wanted_form), "{json}");
            }
            (Err(error), Err(text)) => {
                assert!(error.message.contains(text), "{json}: {}", error.message)
            }
            (got, _) => assert_eq!(format!("{got:?}"), format!("{expected:?}"), "{json}"),
        }
    }

    #[test]
    fn both_forms_become_tensors() {
        let one = [input("A", "INT32")];
        let two = [input("A", "INT32"), input("B", "FP32")];
        let text = [input("T", "BYTES")];
        let rows = Form::Rows;
        // Elements in place of rows, and the only input that is not optional.
        let mut column = input("A", "BYTES");
        column.shape = vec![-1, 1];
        let optional = [column, input("B?", "FP32")];
        let one_each: Given<'_> = &[("A", &[2, 1], 10)];
        check(r#"{"instances": ["a", "b"]}"#, &optional, Ok((one_each, rows(2))));
        check(r#"{"instances": [{"A": "a"}, {"A": "b"}]}"#, &optional, Ok((one_each, rows(2))));
        check(r#"{"instances": [["a"], ["b"]]}"#, &optional, Ok((one_each, rows(2))));
        check(r#"{"instances": [[1, 2], [3, 4]]}"#, &one, Ok((&[("A", &[2, 2], 16)], rows(2))));
        check(
            r#"{"instances": [{"A": [1]}, {"A": [2]}]}"#,
            &one,
            Ok((&[("A", &[2, 1], 8)], rows(2))),
        );
        let both: Given<'_> = &[("B", &[2, 1], 8), ("A", &[2], 8)];
        check(
            r#"{"instances": [{"B": [1], "A": 1}, {"A": 1, "B": [1]}]}"#,
            &two,
            Ok((both, rows(2))),
        );
        check(
            r#"{"inputs": [[[1]], [[2]]], "signature_name": "x"}"#,
            &one,
            Ok((&[("A", &[2, 1, 1], 8)], Form::Columns)),
        );
        check(r#"{"inputs": 7}"#, &one, Ok((&[("A", &[], 4)], Form::Columns)));
        check(r#"{"inputs": {"B": [NaN, 1]}}"#, &two, Ok((&[("B", &[2], 8)], Form::Columns)));
        check(
            r#"{"instances": ["a,]", {"b64": "AAEC"}]}"#,
            &text,
            Ok((&[("T", &[2], 4 + 3 + 4 + 3)], rows(2))),
        );
        check(r#"{"instances": [{"b64": "AAEC"}]}"#, &text, Ok((&[("T", &[1], 7)], rows(1))));
        check(
            r#"{"instances": [{"T": {"b64": "AAEC"}}]}"#,
            &text,
            Ok((&[("T", &[1], 7)], rows(1))),
        );
        check(
            "\u{feff}{\"inputs\": [NaN, 1]}",
            &[input("B", "FP32")],
            Ok((&[("B", &[2], 8)], Form::Columns)),
        );
        check(r#"{"inputs": [[], []]}"#, &one, Ok((&[("A", &[2, 0], 0)], Form::Columns)));
    }

    #[test]
    fn errors_name_the_problem() {
        let one = [input("A", "INT32")];
        let two = [input("A", "INT32"), input("B", "FP32")];
        check("[1]", &one, Err("not a JSON object"));
        check("{}", &one, Err("either 'instances' or 'inputs'"));
        check(r#"{"instances": [1], "inputs": [1]}"#, &one, Err("either 'instances' or 'inputs'"));
        check(r#"{"instances": []}"#, &one, Err("a non-empty array"));
        check(r#"{"instances": 1}"#, &one, Err("a non-empty array"));
        check(r#"{"instances": [1]}"#, &two, Err("must name the model's inputs: 'A', 'B'"));
        check(r#"{"inputs": [1]}"#, &two, Err("must name the model's inputs: 'A', 'B'"));
        check(r#"{"inputs": {"C": [1]}}"#, &two, Err("no input 'C'; its inputs are 'A', 'B'"));
        check(r#"{"instances": [{"A": 1}, {"B": 1}]}"#, &two, Err("instance 1 has no member 'A'"));
        check(
            r#"{"instances": [{"A": 1}, {"A": 1, "B": 1}]}"#,
            &two,
            Err("instance 1 does not have the same members"),
        );
        check(r#"{"instances": [{"A": 1, "A": 1}]}"#, &one, Err("the member 'A' more than once"));
        check(r#"{"instances": [{"A": 1}, 2]}"#, &two, Err("must be objects if the first one is"));
        for ragged in ["[[1,2],[3],[4,5,6]]", "[[1],2]", "[1,[2]]", "[[],[1]]"] {
            check(&format!(r#"{{"instances": {ragged}}}"#), &one, Err("have different lengths"));
        }
        check(r#"{"instances": ["a"]}"#, &one, Err("non-signed-integer"));
        check(r#"{"instances": [1]}"#, &[input("T", "BYTES")], Err("takes strings"));
        check(r#"{"instances": [NaN]}"#, &[input("T", "BYTES")], Err("takes strings"));
        check(r#"{"instances": [{"b64": NaN}]}"#, &[input("T", "BYTES")], Err("takes strings"));
        check(r#"{"instances": [{"b64": "?"}]}"#, &[input("T", "BYTES")], Err("takes strings"));
        check(
            &format!(r#"{{"inputs": {}1{}}}"#, "[".repeat(200), "]".repeat(200)),
            &one,
            Err("nesting depth"),
        );
    }
}
