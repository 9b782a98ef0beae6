//! Parses the JSON form of a message, driven by its descriptor, as leniently as protobuf's
//! `JsonStringToMessage`, with which Triton reads the configuration of a load request.
//!
//! Accepts more than JSON allows: keys without quotes, strings in single quotes and with raw
//! control characters, one trailing comma, a single value in place of a list, and null for any
//! field. Numbers and booleans may be strings; an enum value may be its number or its name in any
//! case; field names may be in snake or camel case. Duplicate scalar fields keep the last value,
//! duplicate lists and messages are merged. Recursion is bounded by the depth of the schema.

use prost_reflect::{
    DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value,
};

use super::lexer::TextError;
use super::text::{message_type, range, short, unknown_name};

/// Integers up to this size (2^53) are exact in a number with a fraction or an exponent.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Parses `source` as a message of type `root`.
pub(super) fn parse(source: &str, root: &MessageDescriptor) -> Result<DynamicMessage, TextError> {
    let mut parser = Parser { source, at: 0 };
    let mut message = DynamicMessage::new(root.clone());
    parser.object(&mut message)?;
    match parser.peek() {
        None => Ok(message),
        Some(_) => parser.expected("the end of the configuration"),
    }
}

/// A value that is neither a list nor an object.
#[derive(Debug)]
enum Scalar<'a> {
    Null,
    Bool(bool),
    Number(&'a str),
    Text(String),
}

struct Parser<'a> {
    source: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        self.source.get(self.at..).unwrap_or_default()
    }

    /// Returns the next character that is not blank, and moves the parser to it.
    fn peek(&mut self) -> Option<char> {
        let rest = self.rest();
        let text = rest.trim_start_matches([' ', '\t', '\r', '\n', '\x0b', '\x0c']);
        self.at += rest.len() - text.len();
        text.chars().next()
    }

    fn take(&mut self, symbol: char) -> bool {
        let found = self.peek() == Some(symbol);
        if found {
            self.at += symbol.len_utf8();
        }
        found
    }

    fn expected<T>(&mut self, what: &str) -> Result<T, TextError> {
        let found = match self.peek() {
            None => "the end of the configuration".to_owned(),
            Some(_) => {
                format!("'{}'", self.rest().chars().take(20).collect::<String>().escape_debug())
            }
        };
        Err(TextError::new(self.at, format!("expected {what}, found {found}")))
    }

    fn object(&mut self, message: &mut DynamicMessage) -> Result<(), TextError> {
        self.members(|parser, key, at| parser.field(message, key, at))
    }

    /// Parses the members of an object. `each` parses the value of a key; it receives the key and
    /// its byte position.
    fn members(
        &mut self,
        mut each: impl FnMut(&mut Self, &str, usize) -> Result<(), TextError>,
    ) -> Result<(), TextError> {
        if !self.take('{') {
            return self.expected("'{'");
        }
        while !self.take('}') {
            self.peek();
            let at = self.at;
            let key = self.key()?;
            if !self.take(':') {
                return self.expected(&format!("':' after '{}'", key.escape_debug()));
            }
            each(self, &key, at)?;
            if !self.take(',') && self.peek() != Some('}') {
                return self.expected("',' or '}'");
            }
        }
        Ok(())
    }

    fn key(&mut self) -> Result<String, TextError> {
        match self.peek() {
            Some(quote @ ('"' | '\'')) => self.string(quote),
            Some('a'..='z' | 'A'..='Z' | '_' | '$') => {
                let at = self.at;
                let name = self.identifier();
                if matches!(name, "true" | "false" | "null") {
                    self.at = at;
                    return self.expected("a key or '}'");
                }
                Ok(name.to_owned())
            }
            _ => self.expected("a key or '}'"),
        }
    }

    fn identifier(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '$')
            .unwrap_or(rest.len());
        self.at += end;
        rest.get(..end).unwrap_or_default()
    }

    fn field(
        &mut self,
        message: &mut DynamicMessage,
        key: &str,
        at: usize,
    ) -> Result<(), TextError> {
        let descriptor = message_type(message);
        let found =
            descriptor.get_field_by_name(key).or_else(|| descriptor.get_field_by_json_name(key));
        let Some(field) = found else {
            let allowed = descriptor.fields().map(|field| field.name().to_owned()).collect();
            let role = format!("a field of {}", short(descriptor.full_name()));
            return Err(TextError::new(at, unknown_name(key, &role, allowed)));
        };
        if field.is_map() {
            return self.map(message, &field);
        }
        if !field.is_list() {
            if self.peek() == Some('[') {
                return Err(TextError::new(
                    self.at,
                    format!("'{}' takes one value, not a list", field.name()),
                ));
            }
            return self.single(message, &field, at);
        }
        let mut list =
            message.get_field(&field).as_list().map(<[Value]>::to_vec).unwrap_or_default();
        if !self.take('[') {
            list.extend(self.value(&field)?);
        } else {
            while !self.take(']') {
                list.extend(self.value(&field)?);
                if !self.take(',') && self.peek() != Some(']') {
                    return self.expected("',' or ']'");
                }
            }
        }
        message.set_field(&field, Value::List(list));
        Ok(())
    }

    /// Parses a field with a single value. Duplicate messages are merged.
    fn single(
        &mut self,
        message: &mut DynamicMessage,
        field: &FieldDescriptor,
        at: usize,
    ) -> Result<(), TextError> {
        let value = match message.get_field(field).as_message().filter(|_| self.peek() == Some('{'))
        {
            Some(before) => {
                let mut inner = before.clone();
                self.object(&mut inner)?;
                Some(Value::Message(inner))
            }
            None => self.value(field)?,
        };
        let Some(value) = value else { return Ok(()) };
        let group = field.containing_oneof();
        let mut others =
            group.iter().flat_map(|group| group.fields()).filter(|other| other != field);
        if let Some(other) = others.find(|other| message.has_field(other)) {
            let other = other.name();
            let name = field.name();
            return Err(TextError::new(
                at,
                format!("'{other}' and '{name}' exclude each other: only one may be given"),
            ));
        }
        message.set_field(field, value);
        Ok(())
    }

    fn map(
        &mut self,
        message: &mut DynamicMessage,
        field: &FieldDescriptor,
    ) -> Result<(), TextError> {
        let Kind::Message(entry) = field.kind() else { return self.expected("a map") };
        let of_value = entry.map_entry_value_field();
        let mut map = message.get_field(field).as_map().cloned().unwrap_or_default();
        if self.peek() != Some('{') {
            return match self.scalar()? {
                Scalar::Null => Ok(()),
                _ => self.expected(&format!("'{{' to open '{}'", field.name())),
            };
        }
        self.members(|parser, key, at| {
            let Some(value) = parser.value(&of_value)? else { return Ok(()) };
            match map.insert(MapKey::String(key.to_owned()), value) {
                None => Ok(()),
                Some(_) => {
                    let text =
                        format!("'{}' has the key '{}' twice", field.name(), key.escape_debug());
                    Err(TextError::new(at, text))
                }
            }
        })?;
        message.set_field(field, Value::Map(map));
        Ok(())
    }

    /// Parses one value of a field; returns `None` for null.
    fn value(&mut self, field: &FieldDescriptor) -> Result<Option<Value>, TextError> {
        if let (Kind::Message(descriptor), Some('{')) = (field.kind(), self.peek()) {
            let mut message = DynamicMessage::new(descriptor);
            self.object(&mut message)?;
            return Ok(Some(Value::Message(message)));
        }
        let at = self.at;
        let scalar = self.scalar()?;
        if matches!(scalar, Scalar::Null) {
            return Ok(None);
        }
        convert(field, &scalar).map(Some).map_err(|text| TextError::new(at, text))
    }

    fn scalar(&mut self) -> Result<Scalar<'a>, TextError> {
        match self.peek() {
            Some(quote @ ('"' | '\'')) => Ok(Scalar::Text(self.string(quote)?)),
            Some('-' | '0'..='9') => self.number().map(Scalar::Number),
            Some('a'..='z') => {
                let at = self.at;
                match self.identifier() {
                    "null" => Ok(Scalar::Null),
                    "true" => Ok(Scalar::Bool(true)),
                    "false" => Ok(Scalar::Bool(false)),
                    _ => {
                        self.at = at;
                        self.expected("a value")
                    }
                }
            }
            _ => self.expected("a value"),
        }
    }

    fn number(&mut self) -> Result<&'a str, TextError> {
        let start = self.at;
        let rest = self.rest();
        let end = rest
            .find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '.' | '+' | '-'))
            .unwrap_or(rest.len());
        let text = rest.get(..end).unwrap_or_default();
        let digits = text.strip_prefix('-').unwrap_or(text);
        let has_zero = digits.starts_with('0')
            && digits.as_bytes().get(1).is_some_and(u8::is_ascii_alphanumeric);
        let is_number =
            digits.starts_with(|c: char| c.is_ascii_digit()) && text.parse::<f64>().is_ok();
        if !is_number || (has_zero && !digits.starts_with("0e") && !digits.starts_with("0E")) {
            return Err(TextError::new(
                start,
                format!("'{}' is not a decimal number", text.escape_debug()),
            ));
        }
        self.at += end;
        Ok(text)
    }

    fn string(&mut self, quote: char) -> Result<String, TextError> {
        let opened_at = self.at;
        self.at += quote.len_utf8();
        let mut text = String::new();
        loop {
            let at = self.at;
            let Some(character) = self.rest().chars().next() else {
                return Err(TextError::new(
                    opened_at,
                    format!("this string is not closed with {quote}"),
                ));
            };
            self.at += character.len_utf8();
            match character {
                '\\' => text.push(self.escape(at)?),
                _ if character == quote => return Ok(text),
                _ => text.push(character),
            }
        }
    }

    /// Parses an escape after its backslash. An unknown escape yields its character.
    fn escape(&mut self, at: usize) -> Result<char, TextError> {
        let Some(kind) = self.rest().chars().next() else {
            return Err(TextError::new(at, "the configuration ends within an escape"));
        };
        self.at += kind.len_utf8();
        Ok(match kind {
            'b' => '\x08',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\x0b',
            'u' => return self.unicode(at),
            other => other,
        })
    }

    /// Parses one `\uXXXX`, or the two of a surrogate pair.
    fn unicode(&mut self, at: usize) -> Result<char, TextError> {
        let wrong = |text: &str| Err(TextError::new(at, text));
        let Some(first) = self.hex() else { return wrong("'\\u' takes four hexadecimal digits") };
        let second = match first {
            0xd800..=0xdbff if self.rest().starts_with("\\u") => {
                self.at += 2;
                self.hex()
            }
            _ => None,
        };
        let units = [Some(first), second].into_iter().flatten();
        match char::decode_utf16(units).next() {
            Some(Ok(character)) => Ok(character),
            _ => wrong("this escape is half of a surrogate pair"),
        }
    }

    fn hex(&mut self) -> Option<u16> {
        let digits = self
            .rest()
            .get(..4)
            .filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        self.at += 4;
        u16::from_str_radix(digits, 16).ok()
    }
}

/// Converts a scalar to the value of a field.
fn convert(field: &FieldDescriptor, scalar: &Scalar<'_>) -> Result<Value, String> {
    let kind = field.kind();
    let wrong = |what: &str| {
        let given = match scalar {
            Scalar::Null => "null".to_owned(),
            Scalar::Bool(value) => value.to_string(),
            Scalar::Number(text) => (*text).to_owned(),
            Scalar::Text(text) => {
                format!("\"{}\"", text.chars().take(100).collect::<String>().escape_debug())
            }
        };
        format!("expected {what} for '{}', found {given}", field.name())
    };
    let out_of_range = || wrong(&format!("an integer ({})", range(&kind)));
    let whole = || integer(scalar).ok_or_else(out_of_range);
    let narrow = |_: std::num::TryFromIntError| out_of_range();
    Ok(match &kind {
        // The schema has no fields of bytes.
        Kind::Message(_) | Kind::Bytes => return Err(wrong("an object")),
        Kind::Enum(descriptor) => Value::EnumNumber(enumeration(descriptor, scalar, &wrong)?),
        Kind::Bool => match scalar {
            Scalar::Bool(value) => Value::Bool(*value),
            Scalar::Text(text) => {
                Value::Bool(text.parse::<bool>().map_err(|_| wrong("true or false"))?)
            }
            Scalar::Null | Scalar::Number(_) => return Err(wrong("true or false")),
        },
        Kind::String => match scalar {
            Scalar::Text(text) => Value::String(text.clone()),
            Scalar::Null | Scalar::Bool(_) | Scalar::Number(_) => return Err(wrong("a string")),
        },
        Kind::Float => Value::F32(float(scalar).ok_or_else(|| wrong("a number"))? as f32),
        Kind::Double => Value::F64(float(scalar).ok_or_else(|| wrong("a number"))?),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
            Value::I32(i32::try_from(whole()?).map_err(narrow)?)
        }
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
            Value::I64(i64::try_from(whole()?).map_err(narrow)?)
        }
        Kind::Uint32 | Kind::Fixed32 => Value::U32(u32::try_from(whole()?).map_err(narrow)?),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(u64::try_from(whole()?).map_err(narrow)?),
    })
}

/// Converts digits, quoted or not, or an unquoted number with an integral value: `4.0`, `4e0`.
fn integer(scalar: &Scalar<'_>) -> Option<i128> {
    let (text, is_quoted) = match scalar {
        Scalar::Number(text) => (*text, false),
        Scalar::Text(text) => (text.as_str(), true),
        Scalar::Null | Scalar::Bool(_) => return None,
    };
    if text.starts_with('+') {
        return None;
    }
    text.parse::<i128>().ok().or_else(|| {
        text.parse::<f64>()
            .ok()
            .filter(|value| !is_quoted && value.fract() == 0.0 && value.abs() <= EXACT)
            .map(|value| value as i128)
    })
}

fn float(scalar: &Scalar<'_>) -> Option<f64> {
    match scalar {
        Scalar::Number(text) => text.parse().ok(),
        Scalar::Text(text) => match text.as_str() {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            text => text.parse().ok().filter(|value: &f64| value.is_finite()),
        },
        Scalar::Null | Scalar::Bool(_) => None,
    }
}

fn enumeration(
    descriptor: &EnumDescriptor,
    scalar: &Scalar<'_>,
    wrong: &impl Fn(&str) -> String,
) -> Result<i32, String> {
    let of_number = || integer(scalar).and_then(|number| i32::try_from(number).ok());
    let number = match scalar {
        Scalar::Text(text) => {
            let name = text.replace('-', "_");
            let found = descriptor.values().find(|value| value.name().eq_ignore_ascii_case(&name));
            found.map(|value| value.number()).or_else(of_number)
        }
        _ => of_number(),
    };
    number.filter(|&number| descriptor.get_value(number).is_some()).ok_or_else(|| {
        let role = format!("a value of {}", short(descriptor.full_name()));
        match scalar {
            Scalar::Text(text) => unknown_name(
                text,
                &role,
                descriptor.values().map(|value| value.name().to_owned()).collect(),
            ),
            _ => wrong(&role),
        }
    })
}
