//! Reads JSON without building trees: the members of objects are borrowed slices of the text,
//! parsed on demand.
//!
//! Type errors have the texts and the code of Triton's JSON reader, because clients match them. The
//! code is 500 although the client is at fault.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;
use std::marker::PhantomData;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::Parameter;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// The number of characters of an invalid value that an error shows.
const MAX_SHOWN: usize = 64;

/// The maximum nesting depth of JSON; Triton's limit.
pub(super) const MAX_DEPTH: usize = 100;

/// The maximum number of elements or members that are kept of one array or object, tensor data
/// excepted. An empty element of the text becomes a value of hundreds of bytes, so that a bound on
/// the text does not bound the memory.
pub(super) const MAX_ELEMENTS: usize = 16_384;

/// The bare words for numbers that are not finite, the number that represents each in a rewritten
/// document, and its value. They are numbers in JSON, so they are refused wherever another type is
/// expected. A client's document cannot contain them: its numbers with [`MARK`] are respelled.
const NONFINITE: [(&str, &str, f64); 5] = [
    ("NaN", "0E-17341", f64::NAN),
    ("-Infinity", "0E-17342", f64::NEG_INFINITY),
    ("-Inf", "0E-17342", f64::NEG_INFINITY),
    ("Infinity", "0E-17343", f64::INFINITY),
    ("Inf", "0E-17343", f64::INFINITY),
];

/// The part of a number that identifies the numbers of [`NONFINITE`]. The mark begins with a rare
/// character, so that searches for the mark are fast.
const MARK: &str = "E-1734";

/// Another spelling of [`MARK`]; a number with it has the same value.
const RESPELLED: &str = "E-01734";

/// Returns the error for a malformed document: INTERNAL with Triton's prefix.
pub(super) fn parse_error(what: impl fmt::Display) -> InferError {
    let message = format!("failed to parse the request JSON buffer: {what}");
    InferError::new(ErrorCode::Internal, Reason::Malformed, message)
}

/// Returns the error for text that serde refuses: INVALID_ARG if it has too many elements,
/// otherwise [`parse_error`].
pub(super) fn unreadable(error: &serde_json::Error) -> InferError {
    let refused = parse_error(error);
    match error.is_data() && refused.message.contains(&format!(" has more than {MAX_ELEMENTS} ")) {
        true => InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, refused.message),
        false => refused,
    }
}

/// Returns the error for a missing member or one of the wrong type: INTERNAL, as Triton.
pub(super) fn type_error(prefix: &str, what: &str) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::Malformed, format!("{prefix}: {what}"))
}

/// Refuses text that is nested deeper than [`MAX_DEPTH`]. Brackets in strings do not count.
pub(super) fn check_depth(json: &str) -> Result<(), InferError> {
    let bytes = json.as_bytes();
    // Count brackets first: this is vectorised and sufficient for nearly every document. A chunk's
    // number fits in a byte.
    let opened = |chunk: &[u8]| {
        usize::from(chunk.iter().map(|&byte| u8::from(byte | 0x20 == b'{')).sum::<u8>())
    };
    if bytes.chunks(128).map(opened).sum::<usize>() <= MAX_DEPTH {
        return Ok(());
    }
    let mut depth = 0usize;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => at = string_end(bytes, at),
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            let message = format!("JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})");
            return Err(InferError::malformed(message));
        }
        at += 1;
    }
    Ok(())
}

/// Returns the position of the quote that ends the string starting at `start`, or the text's length
/// if the string is not closed.
pub(super) fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => return at,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Removes the UTF-8 byte order mark that may precede a document, as Triton's reader does.
pub(super) fn without_byte_order_mark(body: &[u8]) -> &[u8] {
    body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)
}

/// Parses a body of strict JSON.
pub(super) fn from_body<'a, T: Deserialize<'a>>(body: &'a [u8]) -> serde_json::Result<T> {
    serde_json::from_slice(without_byte_order_mark(body))
}

/// Parses a document that may have the bare words `NaN`, `Inf` and `Infinity` (with or without
/// `-`), which JSON lacks but Python and Triton write. They become the numbers of [`NONFINITE`] in
/// a copy of the text, which `relaxed` holds; [`nonfinite`] reads them.
///
/// # Errors
/// Returns the error and the text that has it.
pub(super) fn from_relaxed<'a, T: Deserialize<'a>>(
    json: &'a str,
    relaxed: &'a OnceCell<String>,
) -> Result<T, (serde_json::Error, &'a str)> {
    // A client's number that looks like one of the table must be respelled even if the document is
    // strict JSON.
    if !json.contains(MARK)
        && let Ok(parsed) = serde_json::from_str(json)
    {
        return Ok(parsed);
    }
    let text = match rewrite(json, relax) {
        Some(rewritten) => relaxed.get_or_init(|| rewritten),
        None => json,
    };
    serde_json::from_str(text).map_err(|error| (error, text))
}

/// Returns the length of a bare word, or of a number with [`MARK`], that `rest` begins with, and
/// its replacement.
fn relax(rest: &str) -> Option<(usize, String)> {
    if rest.starts_with(MARK) {
        return Some((MARK.len(), RESPELLED.to_owned()));
    }
    let (word, number, _) = NONFINITE.into_iter().find(|(word, ..)| rest.starts_with(word))?;
    // The spaces keep the number apart from adjacent text, so that `1NaN` remains invalid.
    Some((word.len(), format!(" {number} ")))
}

/// Returns the length of a number of [`NONFINITE`] that `rest` begins with, and the word it
/// represents.
fn restore(rest: &str) -> Option<(usize, String)> {
    let (word, number, _) =
        NONFINITE.into_iter().find(|(_, number, _)| rest.starts_with(number))?;
    Some((number.len(), word.to_owned()))
}

/// Replaces parts of `json` outside strings; `replace` gets the rest of the text at each position
/// that may begin a part. Returns `None` if nothing is replaced.
fn rewrite(json: &str, replace: impl Fn(&str) -> Option<(usize, String)>) -> Option<String> {
    let bytes = json.as_bytes();
    let mut out = String::new();
    let mut copied = 0;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if byte == b'"' {
            at = string_end(bytes, at) + 1;
            continue;
        }
        let rest = json.get(at..).filter(|_| matches!(byte, b'N' | b'I' | b'-' | b'E' | b'0'));
        match rest.and_then(&replace) {
            Some((length, replacement)) => {
                out.push_str(json.get(copied..at)?);
                out.push_str(&replacement);
                at += length;
                copied = at;
            }
            None => at += 1,
        }
    }
    if copied == 0 {
        return None;
    }
    out.push_str(json.get(copied..)?);
    Some(out)
}

/// Returns the value of a number that [`from_relaxed`] wrote for a bare word.
pub(super) fn nonfinite(number: &str) -> Option<f64> {
    NONFINITE.into_iter().find(|(_, written, _)| *written == number).map(|(.., value)| value)
}

/// Declares an object with the members of interest. Unknown members are skipped, the first of
/// duplicate members wins (as in Triton's reader), and anything but an object is refused.
macro_rules! object {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Default)]
        pub(super) struct $name<'a> {
            $(pub(super) $field: Option<$type>,)*
        }

        impl<'de: 'a, 'a> serde::Deserialize<'de> for $name<'a> {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Members<'a>(std::marker::PhantomData<&'a ()>);
                impl<'de: 'a, 'a> serde::de::Visitor<'de> for Members<'a> {
                    type Value = $name<'a>;
                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("an object")
                    }
                    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                        let mut object = $name::default();
                        while let Some(key) = map.next_key::<crate::json::Key<'de>>()? {
                            match &*key.0 {
                                $(stringify!($field) if object.$field.is_none() => {
                                    object.$field = Some(map.next_value()?);
                                })*
                                _ => {
                                    map.next_value::<serde::de::IgnoredAny>()?;
                                }
                            }
                        }
                        Ok(object)
                    }
                }
                deserializer.deserialize_map(Members(std::marker::PhantomData))
            }
        }
    };
}
pub(super) use object;

/// An object's key, borrowed unless it contains escapes.
pub(super) struct Key<'a>(pub(super) Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Key<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

/// The elements of an array, at most [`MAX_ELEMENTS`].
pub(super) struct Elements<T>(pub(super) Vec<T>);

impl<T> Default for Elements<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Elements<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementsVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ElementsVisitor<T> {
            type Value = Elements<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Self::Value, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = array.next_element()? {
                    check_count("array", "elements", elements.len())?;
                    elements.push(element);
                }
                Ok(Elements(elements))
            }
        }
        deserializer.deserialize_seq(ElementsVisitor(PhantomData))
    }
}

/// Refuses another element of an array or member of an object that has [`MAX_ELEMENTS`] already.
fn check_count<E: de::Error>(of: &str, what: &str, count: usize) -> Result<(), E> {
    if count < MAX_ELEMENTS {
        Ok(())
    } else {
        Err(E::custom(format_args!("an {of} has more than {MAX_ELEMENTS} {what}")))
    }
}

/// All members of an object in order, at most [`MAX_ELEMENTS`].
pub(super) struct Members<'a>(pub(super) Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;
        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = Members<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(Key(key)) = map.next_key()? {
                    check_count("object", "members", members.len())?;
                    members.push((key, map.next_value()?));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(MembersVisitor)
    }
}

/// Reads the members of an object; `wrong` is the error if `value` is no object.
pub(super) fn as_members(
    value: &RawValue,
    wrong: impl FnOnce() -> InferError,
) -> Result<Members<'_>, InferError> {
    serde_json::from_str(value.get()).map_err(|error| match value.get().starts_with('{') {
        true => unreadable(&error),
        false => wrong(),
    })
}

/// Returns `value` as a string; `prefix` begins the error, for example `Unable to parse 'id'`.
pub(super) fn as_string<'a>(value: &'a RawValue, prefix: &str) -> Result<Cow<'a, str>, InferError> {
    let text = value.get();
    if let Some(inner) = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        // The text is valid JSON, so a string without escapes stands for itself.
        if !inner.contains('\\') {
            return Ok(Cow::Borrowed(inner));
        }
        if let Ok(Key(string)) = serde_json::from_str(text) {
            return Ok(string);
        }
    }
    Err(type_error(prefix, "attempt to access JSON non-string as string"))
}

/// Returns `value` as an unsigned integer.
pub(super) fn as_u64(value: &RawValue, prefix: &str) -> Result<u64, InferError> {
    let parsed = value.get().parse();
    parsed.map_err(|_| {
        type_error(prefix, "attempt to access JSON non-unsigned-integer as unsigned-integer")
    })
}

/// Returns `value` as a boolean.
pub(super) fn as_bool(value: &RawValue, prefix: &str) -> Result<bool, InferError> {
    match value.get() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(type_error(prefix, "attempt to access JSON non-boolean as boolean")),
    }
}

/// Converts the error of an invalid request parameter to INVALID_ARG (Triton answers INTERNAL) and
/// appends the value and the allowed ones.
pub(super) fn with_allowed_values<T>(
    read: Result<T, InferError>,
    value: &RawValue,
    allowed: &str,
) -> Result<T, InferError> {
    read.map_err(|error| {
        let restored = rewrite(value.get(), restore);
        let text = restored.as_deref().unwrap_or(value.get());
        let short = text.char_indices().nth(MAX_SHOWN).and_then(|(end, _)| text.get(..end));
        let shown = short.map_or_else(|| text.to_owned(), |short| format!("{short}..."));
        let message = format!("{}: it is {shown}, allowed: {allowed}", error.message);
        InferError::new(ErrorCode::InvalidArg, error.reason, message)
    })
}

/// Returns the value of the parameter `key`.
///
/// # Errors
/// Fails for objects, arrays, null, and numbers that are too large.
pub(super) fn as_parameter(key: &str, value: &RawValue) -> Result<Parameter, InferError> {
    let text = value.get();
    let parameter = match text.as_bytes().first() {
        Some(b'"') => serde_json::from_str(text)
            .ok()
            .map(|Key(string)| Parameter::String(string.into_owned())),
        Some(b't') => Some(Parameter::Bool(true)),
        Some(b'f') => Some(Parameter::Bool(false)),
        Some(b'-' | b'0'..=b'9') => Some(number(text)?),
        _ => None,
    };
    parameter.ok_or_else(|| {
        InferError::invalid(format!(
            "parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
        ))
    })
}

fn number(text: &str) -> Result<Parameter, InferError> {
    if let Ok(int) = text.parse() {
        return Ok(Parameter::Int(int));
    }
    if let Ok(uint) = text.parse() {
        return Ok(Parameter::Uint(uint));
    }
    as_f64(text, "Unable to parse 'parameters'").map(Parameter::Double)
}

/// Returns the value of a number. `prefix` introduces the error of another value.
///
/// # Errors
/// Fails for other values and for numbers that are too large.
pub(super) fn as_f64(text: &str, prefix: &str) -> Result<f64, InferError> {
    let not_a_number = || type_error(prefix, "attempt to access JSON non-number as double");
    match text.as_bytes().first() {
        Some(b'-' | b'0'..=b'9') => {
            let value: f64 = text.parse().map_err(|_| not_a_number())?;
            if value == 0.0 {
                // The numbers that represent `NaN` and infinities are zeros.
                return Ok(nonfinite(text).unwrap_or(value));
            }
            if value.is_finite() { Ok(value) } else { Err(too_big(text)) }
        }
        _ => Err(not_a_number()),
    }
}

fn too_big(number: &str) -> InferError {
    let shown: String = number.chars().take(32).collect();
    let message = format!(
        "failed to parse the request JSON buffer: Number too big to be stored in double. got \
         {shown}"
    );
    InferError::new(ErrorCode::Internal, Reason::Malformed, message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn depth_counts_brackets_outside_strings_only() {
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(check_depth(&nested(100)), Ok(()));
        let error = check_depth(&nested(101)).unwrap_err();
        assert_eq!(error.message, "JSON nesting depth exceeds maximum allowed limit (100)");
        assert_eq!(error.code, ErrorCode::InvalidArg);
        assert_eq!(
            check_depth(&format!("[\"{}\\\"[\", {}]", "[".repeat(300), "[],".repeat(200))),
            Ok(())
        );
    }

    #[test]
    fn a_parameter_may_be_any_number_that_fits() {
        let parameter = |text: &str| as_parameter("x", serde_json::from_str(text).unwrap());
        for number in ["1e400", "-1e400", "1e99999999999999999999"] {
            let error = parameter(number).unwrap_err();
            assert!(
                error.message.contains("Number too big to be stored in double"),
                "{number}: {error}"
            );
        }
        assert_eq!(parameter("1e300").unwrap(), Parameter::Double(1e300));
        assert_eq!(
            parameter("18446744073709551616").unwrap(),
            Parameter::Double(18_446_744_073_709_551_616.0)
        );
        assert_eq!(parameter("18446744073709551615").unwrap(), Parameter::Uint(u64::MAX));
        assert_eq!(parameter("null").unwrap_err().code, ErrorCode::InvalidArg);
    }

    #[test]
    fn nonfinite_words_become_numbers_outside_strings_only() {
        let rewritten = rewrite(r#"{"a NaN":[NaN,-Infinity,Inf,"\"Inf",-1]}"#, relax).unwrap();
        assert_eq!(rewritten, r#"{"a NaN":[ 0E-17341 , 0E-17342 , 0E-17343 ,"\"Inf",-1]}"#);
        assert_eq!(
            rewrite(&rewritten, restore).unwrap(),
            r#"{"a NaN":[ NaN , -Infinity , Infinity ,"\"Inf",-1]}"#
        );
        assert_eq!(rewrite(r#"{"a":[1,-2,"NaN","0E-17341"]}"#, relax), None);
        assert_eq!(nonfinite("0E-17342"), Some(f64::NEG_INFINITY));
        assert_eq!(nonfinite("NaN"), None);
    }

    #[test]
    fn a_clients_number_is_never_a_nonfinite_one() {
        for (client, written) in [
            ("[0E-17341]", "0E-017341"),
            ("[0E-17341,NaN]", "0E-017341"),
            (r#"["0E-17341"]"#, r#""0E-17341""#),
            ("[10E-17342]", "10E-017342"),
        ] {
            let relaxed = OnceCell::new();
            let parsed: Vec<&RawValue> = from_relaxed(client, &relaxed).unwrap();
            let first = parsed.first().unwrap().get();
            assert_eq!((first, nonfinite(first)), (written, None), "{client}");
        }
    }

    #[test]
    fn a_nonfinite_word_is_a_value_alone() {
        for json in [
            "[1NaN]",
            "[-NaN]",
            "[1.NaN]",
            "[NaN1]",
            "[NaNNaN]",
            "[Infinity.5]",
            "[1e-Inf]",
            "{NaN:1}",
        ] {
            let relaxed = OnceCell::new();
            assert!(from_relaxed::<de::IgnoredAny>(json, &relaxed).is_err(), "{json}");
        }
    }

    #[test]
    fn one_byte_order_mark_may_precede_a_body() {
        assert_eq!(from_body::<Vec<u8>>(b"\xef\xbb\xbf[1]").unwrap(), [1]);
        assert!(from_body::<Vec<u8>>(b"\xef\xbb\xbf\xef\xbb\xbf[1]").is_err());
        assert!(from_body::<Vec<u8>>(b" \xef\xbb\xbf[1]").is_err());
    }
}
