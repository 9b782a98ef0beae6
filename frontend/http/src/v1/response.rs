//! The JSON of a `:predict` response as nested arrays: `predictions`, one value per row, or
//! `outputs`, one tensor per output.

use std::borrow::Cow;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use pharos::error::InferError;
use pharos::infer::{InferOutput, InferResponse};
use pharos::tensor::{DataType, byte_size, bytes_elements, element_count};

use super::request::Form;
use crate::render;

/// The maximum number of empty arrays that an output without elements may expand to.
const MAX_EMPTY: u64 = 1 << 16;

/// Returns the JSON of a response in the form of its request. A single output is written without
/// its name.
///
/// # Errors
/// Fails if JSON cannot represent an output or, in the row form, if its first dimension is not the
/// number of rows.
pub(super) fn write(response: &InferResponse, form: Form) -> Result<Vec<u8>, InferError> {
    let outputs = response.outputs.iter().map(Output::new).collect::<Result<Vec<_>, _>>()?;
    let mut out = Vec::with_capacity(256);
    match form {
        Form::Rows(rows) => {
            if let Some(other) = outputs.iter().find(|output| output.shape.first() != Some(&rows)) {
                let name = other.name;
                let shape = &other.shape;
                return Err(InferError::invalid(format!(
                    "output '{name}' of shape {shape:?} cannot be split into {rows} rows; use \
                     'inputs' in the request"
                )));
            }
            out.extend_from_slice(b"{\"predictions\":[");
            self::rows(&mut out, outputs, rows)?;
            out.push(b']');
        }
        Form::Columns => {
            out.extend_from_slice(b"{\"outputs\":");
            columns(&mut out, outputs)?;
        }
    }
    out.push(b'}');
    Ok(out)
}

fn rows(out: &mut Vec<u8>, mut outputs: Vec<Output<'_>>, rows: u64) -> Result<(), InferError> {
    for row in 0..rows {
        out.extend_from_slice(if row > 0 { b"," } else { b"" });
        match outputs.as_mut_slice() {
            [only] => only.row(out)?,
            all => members(out, all, Output::row)?,
        }
    }
    Ok(())
}

fn columns(out: &mut Vec<u8>, mut outputs: Vec<Output<'_>>) -> Result<(), InferError> {
    match outputs.as_mut_slice() {
        [only] => only.whole(out),
        all => members(out, all, Output::whole),
    }
}

fn members<'a>(
    out: &mut Vec<u8>,
    outputs: &mut [Output<'a>],
    value: impl Fn(&mut Output<'a>, &mut Vec<u8>) -> Result<(), InferError>,
) -> Result<(), InferError> {
    for (at, output) in outputs.iter_mut().enumerate() {
        out.push(if at > 0 { b',' } else { b'{' });
        render::value(out, output.name)?;
        out.push(b':');
        value(output, out)?;
    }
    out.extend_from_slice(if outputs.is_empty() { b"{}" } else { b"}" });
    Ok(())
}

/// An output whose elements are written in order.
struct Output<'a> {
    name: &'a str,
    datatype: DataType,
    shape: Vec<u64>,
    bytes: Cow<'a, [u8]>,
    /// The offset of the next element.
    at: usize,
}

impl<'a> Output<'a> {
    fn new(output: &'a InferOutput) -> Result<Self, InferError> {
        let InferOutput { name, tensor } = output;
        let bytes = tensor.data.as_slice();
        let unfit = || {
            InferError::internal(format!(
                "output tensor shape does not match size of output for '{name}'"
            ))
        };
        let count = element_count(&tensor.shape).ok_or_else(unfit)?;
        let fits = match tensor.datatype.size() {
            Some(_) => byte_size(tensor.datatype, &tensor.shape) == Some(bytes.len() as u64),
            None => {
                bytes_elements(&bytes).try_fold(0u64, |sum, element| element.map(|_| sum + 1))
                    == Ok(count)
            }
        };
        let shape: Vec<u64> = tensor.shape.iter().map(|dim| dim.unsigned_abs()).collect();
        let arrays =
            shape.iter().filter(|dim| **dim > 0).try_fold(1u64, |all, dim| all.checked_mul(*dim));
        if !fits || (count == 0 && arrays.is_none_or(|arrays| arrays > MAX_EMPTY)) {
            return Err(unfit());
        }
        Ok(Self { name, datatype: tensor.datatype, shape, bytes, at: 0 })
    }

    /// Writes the next row, that is the next index of the first dimension.
    fn row(&mut self, out: &mut Vec<u8>) -> Result<(), InferError> {
        let shape = self.shape.split_off(self.shape.len().min(1));
        let written = self.nested(out, &shape);
        self.shape.extend(shape);
        written
    }

    fn whole(&mut self, out: &mut Vec<u8>) -> Result<(), InferError> {
        let shape = std::mem::take(&mut self.shape);
        self.nested(out, &shape)
    }

    fn nested(&mut self, out: &mut Vec<u8>, shape: &[u64]) -> Result<(), InferError> {
        let Some((&count, inner)) = shape.split_first() else { return self.elements(out, 1) };
        out.push(b'[');
        if inner.is_empty() {
            self.elements(out, count)?;
        } else {
            for at in 0..count {
                out.extend_from_slice(if at > 0 { b"," } else { b"" });
                self.nested(out, inner)?;
            }
        }
        out.push(b']');
        Ok(())
    }

    /// Writes the next `count` elements, separated by commas.
    fn elements(&mut self, out: &mut Vec<u8>, count: u64) -> Result<(), InferError> {
        // The constructor has checked the number of elements against the length of `bytes`.
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some(size) = self.datatype.size() else {
            for (at, element) in bytes_elements(rest).take(count as usize).flatten().enumerate() {
                out.extend_from_slice(if at > 0 { b"," } else { b"" });
                self.at += 4 + element.len();
                text(out, element)?;
            }
            return Ok(());
        };
        let end = rest.len().min(count as usize * size);
        self.at += end;
        render::elements(out, self.name, self.datatype, rest.get(..end).unwrap_or_default())
    }
}

/// Writes text as a string and other bytes in base64, like TensorFlow Serving.
fn text(out: &mut Vec<u8>, element: &[u8]) -> Result<(), InferError> {
    match std::str::from_utf8(element) {
        Ok(text) => render::value(out, text),
        Err(_) => {
            render::value(out, &serde_json::json!({ "b64": BASE64_STANDARD.encode(element) }))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::tensor::{Tensor, push_bytes_element};

    use super::*;

    fn output(name: &str, datatype: DataType, shape: &[i64], bytes: &[u8]) -> InferOutput {
        let data = bytes.to_vec().into();
        InferOutput {
            name: name.to_owned(),
            tensor: Tensor { datatype, shape: shape.to_vec(), data },
        }
    }

    fn check(outputs: Vec<InferOutput>, form: Form, expected: Result<&str, &str>) {
        let got = write(&InferResponse { outputs, ..InferResponse::default() }, form);
        match (got, expected) {
            (Ok(json), Ok(wanted)) => assert_eq!(String::from_utf8(json).unwrap(), wanted),
            (Err(error), Err(text)) => assert!(error.message.contains(text), "{}", error.message),
            (got, _) => assert_eq!(format!("{got:?}"), format!("{expected:?}")),
        }
    }

    #[test]
    fn both_forms_nest_by_shape() {
        let bytes = || output("A", DataType::Uint8, &[2, 1, 3], &[1, 2, 3, 4, 5, 6]);
        check(vec![bytes()], Form::Rows(2), Ok(r#"{"predictions":[[[1,2,3]],[[4,5,6]]]}"#));
        check(vec![bytes()], Form::Columns, Ok(r#"{"outputs":[[[1,2,3]],[[4,5,6]]]}"#));
        let flags = || output("B", DataType::Bool, &[2], &[1, 0]);
        let rows = r#"{"predictions":[{"A":[[1,2,3]],"B":true},{"A":[[4,5,6]],"B":false}]}"#;
        check(vec![bytes(), flags()], Form::Rows(2), Ok(rows));
        let columns = r#"{"outputs":{"A":[[[1,2,3]],[[4,5,6]]],"B":[true,false]}}"#;
        check(vec![bytes(), flags()], Form::Columns, Ok(columns));
        check(vec![output("S", DataType::Uint8, &[], &[7])], Form::Columns, Ok(r#"{"outputs":7}"#));
        check(
            vec![output("E", DataType::Fp32, &[2, 0], &[])],
            Form::Rows(2),
            Ok(r#"{"predictions":[[],[]]}"#),
        );
        let mut texts = Vec::new();
        assert!(
            [&b"a,]"[..], b"", b"\xff"].iter().all(|text| push_bytes_element(&mut texts, text))
        );
        let texts = output("T", DataType::Bytes, &[3], &texts);
        check(vec![texts], Form::Rows(3), Ok(r#"{"predictions":["a,]","",{"b64":"/w=="}]}"#));
    }

    #[test]
    fn refuses_outputs_without_a_json_form() {
        let rows = "cannot be split into 2 rows";
        check(vec![output("A", DataType::Uint8, &[3], &[1, 2, 3])], Form::Rows(2), Err(rows));
        check(vec![output("A", DataType::Uint8, &[], &[1])], Form::Rows(2), Err(rows));
        check(
            vec![output("A", DataType::Uint8, &[3], &[1])],
            Form::Columns,
            Err("does not match size"),
        );
        let empty = output("A", DataType::Uint8, &[1 << 40, 0], &[]);
        check(vec![empty], Form::Columns, Err("does not match size"));
        check(vec![output("A", DataType::Fp16, &[1], &[0, 0])], Form::Columns, Err("FP16"));
    }
}
