//! Reads the fields of JSON objects that clients wrote: typed, with limits, and with errors that
//! name the field, its value and what is allowed.
//!
//! A body is split into its members first. Each member stays raw text until its reader asks for it,
//! so that long lists of token ids never become generic values.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::{ApiError, quoted};

/// The deepest nesting of arrays and objects in the body of a request.
pub const MAX_DEPTH: usize = 100;
/// The most values that the generic parts of one request may have: messages, tools, schemas.
pub const MAX_VALUES: usize = 1 << 18;
/// The most members of an object that is read field by field.
pub(crate) const MAX_MEMBERS: usize = 1_024;
/// The most unknown fields that are reported.
const MAX_UNKNOWN: usize = 16;

/// The members of one JSON object.
pub(crate) struct Fields<'a> {
    members: Vec<Member<'a>>,
    /// The path of the object with its final dot; empty for the body.
    prefix: String,
}

struct Member<'a> {
    name: String,
    value: &'a RawValue,
    known: bool,
}

/// A member of an object whose names are data.
pub(crate) struct Entry<'a> {
    pub(crate) name: String,
    pub(crate) value: &'a str,
}

impl<'a> Fields<'a> {
    /// Splits the body of a request.
    pub(crate) fn of_body(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|error| {
            ApiError::invalid_request(format!(
                "the body of the request is not UTF-8: invalid byte at offset {}",
                error.valid_up_to()
            ))
        })?;
        if measure(text).depth > MAX_DEPTH {
            return Err(ApiError::invalid_request(format!(
                "the body of the request is nested too deeply: at most {MAX_DEPTH} levels"
            )));
        }
        let members: Members<'a> = serde_json::from_str(text).map_err(|error| {
            ApiError::invalid_request(format!("the body of the request is not valid JSON: {error}"))
        })?;
        Ok(Self { members: members.0, prefix: String::new() })
    }

    /// Splits a member that must be an object. `path` is its dotted name.
    pub(crate) fn of_member(value: &'a RawValue, path: &str) -> Result<Self, ApiError> {
        let Ok(members) = serde_json::from_str::<Members<'a>>(value.get()) else {
            return Err(invalid(
                path,
                value.get(),
                format_args!("an object with at most {MAX_MEMBERS} members"),
            ));
        };
        Ok(Self { members: members.0, prefix: format!("{path}.") })
    }

    /// Returns the dotted name of a member.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Returns a member and marks it as known. `null` is the same as absent; the last of several
    /// members with one name counts.
    pub(crate) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        let mut last = None;
        for member in &mut self.members {
            if member.name == name {
                member.known = true;
                last = Some(member.value);
            }
        }
        last.filter(|value| value.get() != "null")
    }

    /// Marks members that are accepted and have no effect.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for member in &mut self.members {
            member.known |= names.contains(&member.name.as_str());
        }
    }

    /// Returns the error of a required member that is absent.
    pub(crate) fn missing(&self, name: &str) -> ApiError {
        let path = self.path(name);
        ApiError::invalid_field(path.as_str(), format!("the required field `{path}` is missing"))
    }

    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.get() {
            "true" => Ok(Some(true)),
            "false" => Ok(Some(false)),
            other => Err(invalid(&self.path(name), other, "true or false")),
        }
    }

    /// Reads an integer. A number with a fraction of zero, such as `16.0`, is an integer too: some
    /// clients have only floating-point numbers.
    pub(crate) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match whole_number(value.get()).filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let allowed = format_args!("an integer from {} to {}", range.start(), range.end());
                Err(invalid(&self.path(name), value.get(), allowed))
            }
        }
    }

    /// Reads a number that a condition accepts; `allowed` describes the condition.
    pub(crate) fn number(
        &mut self,
        name: &str,
        allowed: &str,
        accepts: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match serde_json::from_str::<f64>(value.get()) {
            Ok(number) if accepts(number) => Ok(Some(number)),
            _ => Err(invalid(&self.path(name), value.get(), allowed)),
        }
    }

    /// Reads a text of at most `max_bytes` bytes; `usize::MAX` is no limit.
    pub(crate) fn text(
        &mut self,
        name: &str,
        max_bytes: usize,
    ) -> Result<Option<String>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match serde_json::from_str::<String>(value.get()) {
            Ok(text) if text.len() <= max_bytes => Ok(Some(text)),
            _ if max_bytes == usize::MAX => Err(invalid(&self.path(name), value.get(), "a string")),
            _ => {
                let allowed = format_args!("a string of at most {max_bytes} bytes");
                Err(invalid(&self.path(name), value.get(), allowed))
            }
        }
    }

    /// Reads a list of at most `max_items` elements; `allowed` describes the list.
    pub(crate) fn list<T: Deserialize<'a>>(
        &mut self,
        name: &str,
        max_items: usize,
        allowed: &str,
    ) -> Result<Option<Vec<T>>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match bounded_list(value.get(), max_items) {
            Some(items) => Ok(Some(items)),
            None => Err(invalid(&self.path(name), value.get(), allowed)),
        }
    }

    /// Reads an object as a generic value.
    pub(crate) fn object(
        &mut self,
        name: &str,
        budget: &mut Budget,
    ) -> Result<Option<serde_json::Map<String, Value>>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let path = self.path(name);
        match budget.parse(value.get(), &path)? {
            Value::Object(object) => Ok(Some(object)),
            _ => Err(invalid(&path, value.get(), "an object")),
        }
    }

    /// Returns all members, for objects whose names are data.
    pub(crate) fn into_entries(self) -> impl Iterator<Item = Entry<'a>> {
        self.members
            .into_iter()
            .map(|member| Entry { name: member.name, value: member.value.get() })
    }

    /// Returns the names of at most 16 members that no reader knew, shortened.
    pub(crate) fn unknown(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for member in self.members.iter().filter(|member| !member.known) {
            let name = quoted(&member.name);
            if names.len() < MAX_UNKNOWN && !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

/// Returns the error of a field with a wrong value.
pub(crate) fn invalid(path: &str, value: &str, allowed: impl fmt::Display) -> ApiError {
    ApiError::invalid_field(path, format!("invalid {path} {}: expected {allowed}", quoted(value)))
}

/// Returns the error of a field with a wrong generic value.
pub(crate) fn invalid_value(path: &str, value: &Value, allowed: impl fmt::Display) -> ApiError {
    invalid(path, &excerpt(value), allowed)
}

/// Returns the beginning of a value as JSON, without writing the rest of a long one.
fn excerpt(value: &Value) -> String {
    let mut head = Head { bytes: Vec::new() };
    // The writer fails once the head is complete.
    let _ = value.serialize(&mut serde_json::Serializer::new(&mut head));
    String::from_utf8_lossy(&head.bytes).into_owned()
}

struct Head {
    bytes: Vec<u8>,
}

impl std::io::Write for Head {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // Four bytes for each quoted character, and one character more so that `quoted` shortens.
        const ENOUGH: usize = 4 * (crate::error::MAX_QUOTED_CHARACTERS + 1);
        if self.bytes.len() >= ENOUGH {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        let taken = bytes.len().min(ENOUGH);
        self.bytes.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// How many generic values a request may still have.
pub(crate) struct Budget {
    values: usize,
}

impl Budget {
    pub(crate) fn new() -> Self {
        Self { values: MAX_VALUES }
    }

    /// Parses JSON text into a generic value, within the limits of depth and number.
    pub(crate) fn parse(&mut self, text: &str, path: &str) -> Result<Value, ApiError> {
        let size = measure(text);
        if size.depth > MAX_DEPTH {
            let allowed = format_args!("at most {MAX_DEPTH} levels of nesting");
            return Err(invalid(path, text, allowed));
        }
        let Some(left) = self.values.checked_sub(size.values) else {
            let allowed = format_args!("at most {MAX_VALUES} values in one request");
            return Err(invalid(path, text, allowed));
        };
        self.values = left;
        serde_json::from_str(text)
            .map_err(|error| invalid(path, text, format_args!("valid JSON ({error})")))
    }
}

struct Size {
    depth: usize,
    values: usize,
}

/// Measures JSON text: the depth, and at least the number of its values.
fn measure(text: &str) -> Size {
    let mut size = Size { depth: 0, values: 1 };
    let mut depth = 0_usize;
    let mut in_string = false;
    let mut escaped = false;
    for byte in text.bytes() {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                size.depth = size.depth.max(depth);
                size.values += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => size.values += 1,
            _ => {}
        }
    }
    size
}

/// Reads a number without a fraction.
fn whole_number(text: &str) -> Option<i64> {
    // Above 2^53, a floating-point number is no longer one certain integer.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if let Ok(number) = text.parse::<i64>() {
        return Some(number);
    }
    let number = serde_json::from_str::<f64>(text).ok()?;
    (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
}

/// Reads a list; `None` if it has more elements or elements of another type.
pub(crate) fn bounded_list<'a, T: Deserialize<'a>>(
    text: &'a str,
    max_items: usize,
) -> Option<Vec<T>> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let list = Bounded { max_items, element: PhantomData }.deserialize(&mut deserializer).ok()?;
    deserializer.end().ok()?;
    Some(list)
}

struct Bounded<T> {
    max_items: usize,
    element: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Bounded<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
    type Value = Vec<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            if list.len() == self.max_items {
                return Err(A::Error::custom("too many elements"));
            }
            list.push(element);
        }
        Ok(list)
    }
}

struct Members<'a>(Vec<Member<'a>>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor(PhantomData))
    }
}

struct MembersVisitor<'a>(PhantomData<&'a ()>);

impl<'de: 'a, 'a> Visitor<'de> for MembersVisitor<'a> {
    type Value = Members<'a>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'a>, A::Error> {
        let mut members = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if members.len() == MAX_MEMBERS {
                return Err(A::Error::custom(format_args!(
                    "an object has more than {MAX_MEMBERS} members"
                )));
            }
            members.push(Member { name, value: map.next_value()?, known: false });
        }
        Ok(Members(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message<T: fmt::Debug>(result: Result<T, ApiError>) -> String {
        result.unwrap_err().message
    }

    #[test]
    fn bodies_that_are_no_objects() {
        for body in ["", "[]", "3", "{", "{\"a\":1}x", "{\"a\":1,}", "{\"a\":01}"] {
            let error = Fields::of_body(body.as_bytes()).err().unwrap();
            assert!(error.message.contains("not valid JSON"), "{body}: {}", error.message);
        }
        let error = Fields::of_body(b"{\"a\":\"\xff\"}").err().unwrap();
        assert!(error.message.contains("offset 6"), "{}", error.message);
    }

    #[test]
    fn depth_is_limited_before_anything_is_parsed() {
        let body = format!("{{\"a\":{}{}}}", "[".repeat(99), "]".repeat(99));
        assert!(Fields::of_body(body.as_bytes()).is_ok());
        let body = format!("{{\"a\":{}", "[".repeat(100_000));
        assert!(Fields::of_body(body.as_bytes()).err().unwrap().message.contains("100 levels"));
        let body = format!("{{\"a\":\"{}\"}}", "[".repeat(1000));
        assert!(Fields::of_body(body.as_bytes()).is_ok());
    }

    #[test]
    fn numbers_of_members_are_limited() {
        let members: Vec<String> = (0..=MAX_MEMBERS).map(|i| format!("\"{i}\":1")).collect();
        let body = format!("{{{}}}", members.join(","));
        assert!(Fields::of_body(body.as_bytes()).is_err());
    }

    #[test]
    fn integers_and_numbers() {
        let body = br#"{"a":5,"b":5.0,"c":5.5,"d":"5","e":99999999999999999999,"f":0.5,"g":1e999}"#;
        let mut fields = Fields::of_body(body).unwrap();
        assert_eq!(fields.integer("a", 0..=9).unwrap(), Some(5));
        assert_eq!(fields.integer("b", 0..=9).unwrap(), Some(5));
        assert_eq!(fields.integer("z", 0..=9).unwrap(), None);
        assert_eq!(
            message(fields.integer("a", 0..=4)),
            "invalid a 5: expected an integer from 0 to 4"
        );
        for name in ["c", "d", "e"] {
            assert!(fields.integer(name, 0..=9).is_err(), "{name}");
        }
        assert_eq!(fields.number("f", "a number", |_| true).unwrap(), Some(0.5));
        assert!(fields.number("g", "a number", |_| true).is_err());
    }

    #[test]
    fn the_last_of_equal_names_counts_and_null_is_absent() {
        let mut fields = Fields::of_body(br#"{"a":1,"a":2,"b":null,"b2":true,"c":"x"}"#).unwrap();
        assert_eq!(fields.integer("a", 0..=9).unwrap(), Some(2));
        assert!(fields.take("b").is_none());
        assert_eq!(fields.boolean("b2").unwrap(), Some(true));
        assert_eq!(message(fields.boolean("c")), "invalid c \"x\": expected true or false");
        assert!(fields.unknown().is_empty());
    }

    #[test]
    fn unknown_names_are_few_and_short() {
        let names: Vec<String> = (0..50).map(|i| format!("\"{i}{}\":1", "n".repeat(100))).collect();
        let body = format!("{{{}}}", names.join(","));
        let unknown = Fields::of_body(body.as_bytes()).unwrap().unknown();
        assert_eq!(unknown.len(), 16);
        assert!(unknown[0].len() <= 67);
    }

    #[test]
    fn lists_end_at_their_limit() {
        assert_eq!(bounded_list::<u32>("[1,2]", 2), Some(vec![1, 2]));
        assert_eq!(bounded_list::<u32>("[1,2,3]", 2), None);
        assert_eq!(bounded_list::<u32>("[1,\"2\"]", 2), None);
        assert_eq!(bounded_list::<u32>("7", 2), None);
    }

    #[test]
    fn the_number_of_values_is_limited_over_all_fields() {
        let mut budget = Budget::new();
        let half = format!("[{}1]", "1,".repeat(MAX_VALUES / 2));
        assert!(budget.parse(&half, "a").is_ok());
        assert!(message(budget.parse(&half, "b")).contains("262144 values"));
    }

    #[test]
    fn an_excerpt_of_a_long_value_is_short() {
        let value = Value::from(vec!["é".repeat(1000); 1000]);
        let error = invalid_value("a", &value, "b");
        assert_eq!(error.message, format!("invalid a [\"{}...: expected b", "é".repeat(62)));
    }
}
