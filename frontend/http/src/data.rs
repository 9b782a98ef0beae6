//! Converts a tensor's JSON `data`, nested or flat arrays, to the tensor's little-endian bytes in
//! one pass over the text.
//!
//! The text is known to be valid JSON (it is a `RawValue`), so scalars are found by their
//! delimiters. The standard library parses the numbers exactly.

use std::num::IntErrorKind;
use std::str::FromStr;

use pharos::error::InferError;
use pharos::tensor::{DataType, push_bytes_element};

use super::json::{Key, as_f64, parse_error, string_end, type_error};

const PREFIX: &str = "Unable to parse 'data'";
const WRONG_COUNT: &str = "Shape does not match true shape of 'data' field";

/// Whether a byte separates scalars.
const SEPARATES: [bool; 256] = {
    let mut separates = [false; 256];
    let bytes = b"[], \t\n\r";
    let mut at = 0;
    while at < bytes.len() {
        separates[bytes[at] as usize] = true;
        at += 1;
    }
    separates
};

/// Iterates over the scalars of a JSON array in row-major order, each as its text (strings with
/// their quotes).
struct Scalars<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Iterator for Scalars<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let bytes = self.text.as_bytes();
        let mut start = self.at;
        while separates(*bytes.get(start)?) {
            start += 1;
        }
        let mut end = start;
        if bytes.get(start) == Some(&b'"') {
            end = (string_end(bytes, start) + 1).min(bytes.len());
        } else {
            while bytes.get(end).is_some_and(|byte| !separates(*byte)) {
                end += 1;
            }
        }
        self.at = end;
        self.text.get(start..end)
    }
}

fn separates(byte: u8) -> bool {
    SEPARATES.get(usize::from(byte)).is_some_and(|separates| *separates)
}

/// Returns the tensor bytes of `json`, the `data` of input `name`, which must have `elements`
/// scalars of `datatype`.
///
/// The number of BYTES elements is checked later, against the model, whose name the error message
/// contains.
pub(super) fn flatten(
    name: &str,
    json: &str,
    datatype: DataType,
    elements: u64,
) -> Result<Vec<u8>, InferError> {
    if !json.starts_with('[') {
        return Err(type_error(PREFIX, "attempt to access JSON non-array as array"));
    }
    let input = Input { name, json, datatype, elements };
    match datatype {
        DataType::Bool => input.fill(|token| boolean(token).map(|value| [u8::from(value)])),
        DataType::Uint8 => input.fill(|token| input.unsigned::<u8>(token).map(u8::to_le_bytes)),
        DataType::Uint16 => input.fill(|token| input.unsigned::<u16>(token).map(u16::to_le_bytes)),
        DataType::Uint32 => input.fill(|token| input.unsigned::<u32>(token).map(u32::to_le_bytes)),
        DataType::Uint64 => input.fill(|token| input.unsigned::<u64>(token).map(u64::to_le_bytes)),
        DataType::Int8 => input.fill(|token| input.signed::<i8>(token).map(i8::to_le_bytes)),
        DataType::Int16 => input.fill(|token| input.signed::<i16>(token).map(i16::to_le_bytes)),
        DataType::Int32 => input.fill(|token| input.signed::<i32>(token).map(i32::to_le_bytes)),
        DataType::Int64 => input.fill(|token| input.signed::<i64>(token).map(i64::to_le_bytes)),
        DataType::Fp32 => {
            input.fill(|token| as_f64(token, PREFIX).map(|value| (value as f32).to_le_bytes()))
        }
        DataType::Fp64 => input.fill(|token| as_f64(token, PREFIX).map(f64::to_le_bytes)),
        DataType::Bytes => input.strings(),
        DataType::Fp16 | DataType::Bf16 => Err(InferError::invalid(format!(
            "receiving {datatype} data via JSON is not supported. Please use the binary data \
             format for input {name}"
        ))),
    }
}

struct Input<'a> {
    name: &'a str,
    json: &'a str,
    datatype: DataType,
    elements: u64,
}

impl Input<'_> {
    fn fill<const N: usize>(
        &self,
        element: impl Fn(&str) -> Result<[u8; N], InferError>,
    ) -> Result<Vec<u8>, InferError> {
        // A scalar takes at least two characters: do not reserve memory for more elements than the
        // text can contain.
        let possible =
            (self.json.len() / 2 + 1).min(usize::try_from(self.elements).unwrap_or(usize::MAX));
        let mut out = Vec::with_capacity(possible.saturating_mul(N));
        let mut count = 0u64;
        for token in (Scalars { text: self.json, at: 0 }) {
            if count == self.elements {
                return Err(type_error(PREFIX, WRONG_COUNT));
            }
            out.extend_from_slice(&element(token)?);
            count += 1;
        }
        if count < self.elements {
            return Err(type_error(PREFIX, WRONG_COUNT));
        }
        Ok(out)
    }

    fn strings(&self) -> Result<Vec<u8>, InferError> {
        let mut out = Vec::with_capacity(self.json.len());
        for token in (Scalars { text: self.json, at: 0 }) {
            let inner = token.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
            let Some(inner) = inner else {
                let prefix = "Unable to parse JSON bytes array";
                let name = self.name;
                let what =
                    format!("attempt to access JSON non-string as string, for input '{name}'");
                return Err(type_error(prefix, &what));
            };
            let pushed = if inner.contains('\\') {
                let Key(unescaped) = serde_json::from_str(token).map_err(parse_error)?;
                push_bytes_element(&mut out, unescaped.as_bytes())
            } else {
                push_bytes_element(&mut out, inner.as_bytes())
            };
            if !pushed {
                return Err(InferError::invalid(format!(
                    "an element of input {} has {} bytes; a BYTES element holds at most {}",
                    self.name,
                    inner.len(),
                    u32::MAX
                )));
            }
        }
        Ok(out)
    }

    fn unsigned<T: FromStr<Err = std::num::ParseIntError>>(
        &self,
        token: &str,
    ) -> Result<T, InferError> {
        self.integer(
            token,
            |token| token.parse::<u64>().is_ok(),
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        )
    }

    fn signed<T: FromStr<Err = std::num::ParseIntError>>(
        &self,
        token: &str,
    ) -> Result<T, InferError> {
        self.integer(
            token,
            |token| token.parse::<i64>().is_ok(),
            "attempt to access JSON non-signed-integer as signed-integer",
        )
    }

    /// Parses an integer. Refuses a value that fits in 64 bits but not in the datatype; Triton
    /// wraps it silently.
    fn integer<T: FromStr<Err = std::num::ParseIntError>>(
        &self,
        token: &str,
        fits_64_bits: impl Fn(&str) -> bool,
        type_text: &str,
    ) -> Result<T, InferError> {
        token.parse().map_err(|error: std::num::ParseIntError| {
            let overflow =
                matches!(error.kind(), IntErrorKind::PosOverflow | IntErrorKind::NegOverflow);
            if overflow && fits_64_bits(token) {
                let Self { name, datatype, .. } = self;
                return InferError::invalid(format!(
                    "{PREFIX}: value {token} of input {name} is out of range for datatype \
                     {datatype}"
                ));
            }
            type_error(PREFIX, type_text)
        })
    }
}

fn boolean(token: &str) -> Result<bool, InferError> {
    match token {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(type_error(PREFIX, "attempt to access JSON non-boolean as boolean")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    fn check(json: &str, datatype: DataType, elements: u64, expected: Result<&[u8], (u16, &str)>) {
        let got = flatten("X", json, datatype, elements)
            .map_err(|error| (error.code.http_status(), error.message));
        match (got, expected) {
            (Ok(bytes), Ok(wanted)) => assert_eq!(bytes, wanted, "{json} as {datatype}"),
            (Err((status, message)), Err((wanted, text))) => {
                assert_eq!(status, wanted, "{json} as {datatype}: {message}");
                assert!(message.contains(text), "{json} as {datatype}: {message}");
            }
            (got, _) => panic!("{json} as {datatype}: got {got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn every_datatype_flattens_to_little_endian() {
        check("[true,false]", DataType::Bool, 2, Ok(&[1, 0]));
        check("[0,255]", DataType::Uint8, 2, Ok(&[0, 255]));
        check("[258]", DataType::Uint16, 1, Ok(&[2, 1]));
        check("[4294967295]", DataType::Uint32, 1, Ok(&[255; 4]));
        check("[18446744073709551615]", DataType::Uint64, 1, Ok(&[255; 8]));
        check("[-128,127]", DataType::Int8, 2, Ok(&[128, 127]));
        check("[-2]", DataType::Int16, 1, Ok(&[254, 255]));
        check("[ [ 1 ] ,\n[ -1 ] ]", DataType::Int32, 2, Ok(&[1, 0, 0, 0, 255, 255, 255, 255]));
        check("[-9223372036854775808]", DataType::Int64, 1, Ok(&[0, 0, 0, 0, 0, 0, 0, 128]));
        check(
            "[1,0.1,-0.0]",
            DataType::Fp32,
            3,
            Ok(&[0, 0, 128, 63, 205, 204, 204, 61, 0, 0, 0, 128]),
        );
        check("[0.1]", DataType::Fp64, 1, Ok(&0.1f64.to_le_bytes()));
        check("[1e39]", DataType::Fp32, 1, Ok(&f32::INFINITY.to_le_bytes()));
        check("[ 0E-17343 ]", DataType::Fp32, 1, Ok(&f32::INFINITY.to_le_bytes()));
        check("[0E-7]", DataType::Fp32, 1, Ok(&[0; 4]));
        check(
            r#"["a","","\u00e9]\"","b,"]"#,
            DataType::Bytes,
            4,
            Ok(b"\x01\0\0\0a\0\0\0\0\x04\0\0\0\xc3\xa9]\"\x02\0\0\0b,"),
        );
        check("[]", DataType::Int32, 0, Ok(&[]));
    }

    #[test]
    fn errors_have_tritons_codes_and_texts() {
        let unsigned = "Unable to parse 'data': attempt to access JSON non-unsigned-integer as \
                        unsigned-integer";
        let signed =
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer";
        check(
            "[1,2,3]",
            DataType::Int32,
            2,
            Err((500, "Unable to parse 'data': Shape does not match true shape of 'data' field")),
        );
        check(
            "[1]",
            DataType::Int32,
            2,
            Err((500, "Unable to parse 'data': Shape does not match true shape of 'data' field")),
        );
        check("5", DataType::Int32, 1, Err((500, "attempt to access JSON non-array as array")));
        check("[-1]", DataType::Uint8, 1, Err((500, unsigned)));
        check("[18446744073709551616]", DataType::Uint64, 1, Err((500, unsigned)));
        check("[1.0]", DataType::Int32, 1, Err((500, signed)));
        check("[\"a\"]", DataType::Int32, 1, Err((500, signed)));
        check("[{}]", DataType::Int32, 1, Err((500, signed)));
        check("[9223372036854775808]", DataType::Int64, 1, Err((500, signed)));
        check(
            "[1]",
            DataType::Bool,
            1,
            Err((500, "attempt to access JSON non-boolean as boolean")),
        );
        check(
            "[null]",
            DataType::Fp32,
            1,
            Err((500, "attempt to access JSON non-number as double")),
        );
        check(
            "[\"NaN\"]",
            DataType::Fp32,
            1,
            Err((500, "attempt to access JSON non-number as double")),
        );
        check("[1e400]", DataType::Fp64, 1, Err((500, "Number too big to be stored in double")));
        check(
            "[1]",
            DataType::Bytes,
            1,
            Err((
                500,
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string, \
                 for input 'X'",
            )),
        );
        check(
            "[ 0E-17341 ]",
            DataType::Bytes,
            1,
            Err((500, "attempt to access JSON non-string as string, for input 'X'")),
        );
        check("[ 0E-17341 ]", DataType::Int32, 1, Err((500, signed)));
        check(
            "[\"\u{f8ff}NaN\"]",
            DataType::Fp32,
            1,
            Err((500, "attempt to access JSON non-number as double")),
        );
        check(
            "[300]",
            DataType::Int8,
            1,
            Err((400, "value 300 of input X is out of range for datatype INT8")),
        );
        check(
            "[1]",
            DataType::Fp16,
            1,
            Err((
                400,
                "receiving FP16 data via JSON is not supported. Please use the binary data format \
                 for input X",
            )),
        );
        check(
            "[1]",
            DataType::Bf16,
            1,
            Err((400, "receiving BF16 data via JSON is not supported.")),
        );
    }

    #[test]
    fn a_huge_element_count_reserves_little_memory() {
        check("[1]", DataType::Fp32, 1 << 61, Err((500, "Shape does not match true shape")));
    }
}
