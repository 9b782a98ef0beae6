//! Reads JSON without building trees: the members of objects are borrowed slices of the text, parsed on demand.
//!
//! The texts and the code of type errors are those of Triton's JSON reader, because clients match them. The code is 500 although
//! the client is at fault.

use std::borrow::Cow;
use std::fmt;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::Parameter;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The number of characters of an invalid value that an error shows.
const MAX_SHOWN: usize = 64;

/// The maximum nesting depth of JSON; Triton's limit.
pub(super) const MAX_DEPTH: usize = 100;

/// Precedes `NaN`, `Infinity` and `-Infinity` where [`quote_nonfinite`] has quoted them. A private use character, because no
/// ordinary string begins with it.
pub(super) const NONFINITE_MARK: char = '\u{f8ff}';

/// Returns the error for a malformed document: INTERNAL with Triton's prefix.
pub(super) fn parse_error(what: impl fmt::Display) -> InferError {
    let message = format!("failed to parse the request JSON buffer: {what}");
    InferError::new(ErrorCode::Internal, Reason::Malformed, message)
}

/// Returns the error for a missing member or one of the wrong type: INTERNAL, as Triton.
pub(super) fn type_error(prefix: &str, what: &str) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::Malformed, format!("{prefix}: {what}"))
}

/// Refuses text that is nested deeper than [`MAX_DEPTH`]. Brackets in strings do not count.
pub(super) fn check_depth(json: &str) -> Result<(), InferError> {
    let bytes = json.as_bytes();
    // Count brackets first: this is vectorised and sufficient for nearly every document. A chunk's number fits in a byte.
    let opened = |chunk: &[u8]| usize::from(chunk.iter().map(|&byte| u8::from(byte | 0x20 == b'{')).sum::<u8>());
    if bytes.chunks(128).map(opened).sum::<usize>() <= MAX_DEPTH {
        return Ok(());
    }
    let (mut depth, mut at) = (0usize, 0);
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

/// Returns the position of the quote that ends the string starting at `start`, or the text's length if the string is not closed.
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

/// Quotes and marks the bare words `NaN`, `Inf` and `Infinity` (with or without `-`), which JSON lacks but Python and Triton
/// write. Returns `None` if the text has no such word.
pub(super) fn quote_nonfinite(json: &str) -> Option<String> {
    const WORDS: [(&str, &str); 5] = [
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("-Inf", "-Infinity"),
        ("Infinity", "Infinity"),
        ("Inf", "Infinity"),
    ];
    let bytes = json.as_bytes();
    let mut out = String::new();
    let (mut copied, mut at) = (0, 0);
    while let Some(&byte) = bytes.get(at) {
        if byte == b'"' {
            at = string_end(bytes, at) + 1;
            continue;
        }
        let rest = json.get(at..).filter(|_| matches!(byte, b'N' | b'I' | b'-'));
        let word = rest.and_then(|rest| WORDS.into_iter().find(|(word, _)| rest.starts_with(word)));
        match word {
            Some((word, value)) => {
                out.push_str(json.get(copied..at)?);
                out.extend(['"', NONFINITE_MARK]);
                out.push_str(value);
                out.push('"');
                at += word.len();
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

/// Returns the number that a marked string (without its quotes) represents.
pub(super) fn nonfinite(text: &str) -> Option<f64> {
    match text.strip_prefix(NONFINITE_MARK)? {
        "NaN" => Some(f64::NAN),
        "Infinity" => Some(f64::INFINITY),
        "-Infinity" => Some(f64::NEG_INFINITY),
        _ => None,
    }
}

/// Declares an object with the members of interest. Unknown members are skipped, the first of duplicate members wins (as in
/// Triton's reader), and anything but an object is refused.
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

impl<'de: 'a, 'a> serde::Deserialize<'de> for Key<'a> {
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

/// All members of an object in order.
pub(super) struct Members<'a>(pub(super) Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> serde::Deserialize<'de> for Members<'a> {
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
                    members.push((key, map.next_value()?));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(MembersVisitor)
    }
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
    parsed.map_err(|_| type_error(prefix, "attempt to access JSON non-unsigned-integer as unsigned-integer"))
}

/// Returns `value` as a boolean.
pub(super) fn as_bool(value: &RawValue, prefix: &str) -> Result<bool, InferError> {
    match value.get() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(type_error(prefix, "attempt to access JSON non-boolean as boolean")),
    }
}

/// Converts the error of an invalid request parameter to INVALID_ARG (Triton answers INTERNAL) and appends the value and the
/// allowed ones.
pub(super) fn with_allowed_values<T>(
    read: Result<T, InferError>,
    value: &RawValue,
    allowed: &str,
) -> Result<T, InferError> {
    read.map_err(|error| {
        let text = value.get();
        let short = text.char_indices().nth(MAX_SHOWN).and_then(|(end, _)| text.get(..end));
        let shown = short.map_or_else(|| text.to_owned(), |short| format!("{short}..."));
        let message = format!("{}: it is {shown}, allowed: {allowed}", error.message);
        InferError::new(ErrorCode::InvalidArg, error.reason, message)
    })
}

/// Returns `value` as a parameter; `None` for objects, arrays and null.
pub(super) fn as_parameter(value: &RawValue) -> Option<Parameter> {
    let text = value.get();
    match text.as_bytes().first()? {
        b'"' => {
            let Key(string) = serde_json::from_str(text).ok()?;
            Some(nonfinite(&string).map_or_else(|| Parameter::String(string.into_owned()), Parameter::Double))
        }
        b't' => Some(Parameter::Bool(true)),
        b'f' => Some(Parameter::Bool(false)),
        b'-' | b'0'..=b'9' => Some(
            (text.parse().map(Parameter::Int))
                .or_else(|_| text.parse().map(Parameter::Uint))
                .or_else(|_| text.parse().map(Parameter::Double))
                .ok()?,
        ),
        _ => None,
    }
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
        assert_eq!(check_depth(&format!("[\"{}\\\"[\", {}]", "[".repeat(300), "[],".repeat(200))), Ok(()));
    }

    #[test]
    fn nonfinite_words_become_marked_strings_outside_strings_only() {
        let quoted = quote_nonfinite(r#"{"a NaN":[NaN, -Infinity,Inf,"\"Inf",-1]}"#).unwrap();
        assert_eq!(quoted, "{\"a NaN\":[\"\u{f8ff}NaN\", \"\u{f8ff}-Infinity\",\"\u{f8ff}Infinity\",\"\\\"Inf\",-1]}");
        assert_eq!(quote_nonfinite(r#"{"a":[1,-2,"NaN"]}"#), None);
        assert_eq!(nonfinite("\u{f8ff}-Infinity"), Some(f64::NEG_INFINITY));
        assert_eq!(nonfinite("NaN"), None);
    }
}
