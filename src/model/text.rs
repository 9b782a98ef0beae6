//! Parses the protobuf text format of a message, driven by its descriptor.
//!
//! The parser of `prost-reflect` is not used: it refuses `input [ { ... } ]` (a list of messages
//! without a colon, the usual style of config.pbtxt), does not expose the positions of errors, and
//! recurses without bound through `Any` values. This parser supports neither `Any` nor extensions,
//! so the schema bounds its depth.

use prost_reflect::{
    DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value,
};

use super::lexer::{Lexer, TextError, Token};

/// Parses `source` as a message of type `root`. Also returns warnings about valid but probably
/// unintended text: duplicate keys of maps.
pub(super) fn parse(
    source: &str,
    root: &MessageDescriptor,
) -> Result<(DynamicMessage, Vec<TextError>), TextError> {
    let mut parser =
        Parser { lexer: Lexer::new(source), token: Token::End, offset: 0, warnings: Vec::new() };
    parser.bump()?;
    let message = parser.fields(root, None)?;
    Ok((message, parser.warnings))
}

struct Parser<'a> {
    lexer: Lexer<'a>,
    /// The current token.
    token: Token<'a>,
    /// The start of the current token.
    offset: usize,
    /// Warnings about valid but probably unintended text.
    warnings: Vec<TextError>,
}

impl<'a> Parser<'a> {
    /// Returns the current token and advances to the next one.
    fn bump(&mut self) -> Result<Token<'a>, TextError> {
        let (token, offset) = self.lexer.next_token()?;
        self.offset = offset;
        Ok(std::mem::replace(&mut self.token, token))
    }

    fn take_symbol(&mut self, symbol: char) -> Result<bool, TextError> {
        let found = self.token == Token::Symbol(symbol);
        if found {
            self.bump()?;
        }
        Ok(found)
    }

    fn expected<T>(&self, what: impl AsRef<str>) -> Result<T, TextError> {
        let message = format!("expected {}, found {}", what.as_ref(), self.token.describe());
        Err(TextError::new(self.offset, message))
    }

    /// Parses fields up to `close`, or to the end of the source.
    fn fields(
        &mut self,
        descriptor: &MessageDescriptor,
        close: Option<char>,
    ) -> Result<DynamicMessage, TextError> {
        let mut message = DynamicMessage::new(descriptor.clone());
        let mut seen: Vec<FieldDescriptor> = Vec::new();
        loop {
            match (&self.token, close) {
                (Token::End, None) => return Ok(message),
                (Token::Symbol(symbol), Some(close)) if *symbol == close => {
                    self.bump()?;
                    return Ok(message);
                }
                (Token::Name(_), _) => self.field(&mut message, &mut seen)?,
                (_, Some(close)) => return self.expected(format!("a field name or '{close}'")),
                (_, None) => return self.expected("a field name"),
            }
        }
    }

    fn field(
        &mut self,
        message: &mut DynamicMessage,
        seen: &mut Vec<FieldDescriptor>,
    ) -> Result<(), TextError> {
        let at = self.offset;
        let Token::Name(name) = self.bump()? else { return self.expected("a field name") };
        let descriptor = message_type(message);
        let Some(field) = descriptor.get_field_by_name(name) else {
            let allowed = descriptor.fields().map(|field| field.name().to_owned()).collect();
            let text = unknown_name(
                name,
                &format!("a field of {}", short(descriptor.full_name())),
                allowed,
            );
            return Err(TextError::new(at, text));
        };
        check_first(&field, seen).map_err(|text| TextError::new(at, text))?;
        let is_message = matches!(field.kind(), Kind::Message(_));
        if !self.take_symbol(':')? && !is_message {
            return self.expected(format!("':' after '{name}'"));
        }
        if self.token == Token::Symbol('[') {
            if !field.is_list() && !field.is_map() {
                return Err(TextError::new(
                    self.offset,
                    format!("'{name}' takes one value, not a list"),
                ));
            }
            self.list(message, &field)?;
        } else {
            self.stored(message, &field)?;
        }
        seen.push(field);
        if !self.take_symbol(',')? {
            self.take_symbol(';')?;
        }
        Ok(())
    }

    fn list(
        &mut self,
        message: &mut DynamicMessage,
        field: &FieldDescriptor,
    ) -> Result<(), TextError> {
        self.bump()?;
        if self.take_symbol(']')? {
            return Ok(());
        }
        loop {
            self.stored(message, field)?;
            if self.take_symbol(']')? {
                return Ok(());
            }
            if !self.take_symbol(',')? {
                return self.expected("',' or ']'");
            }
        }
    }

    /// Parses a value and stores it in the message.
    fn stored(
        &mut self,
        message: &mut DynamicMessage,
        field: &FieldDescriptor,
    ) -> Result<(), TextError> {
        let at = self.offset;
        let value = self.value(field)?;
        if let Some(key) = store(message, field, value) {
            let text = format!("'{}' has the key {key} twice; the last one counts", field.name());
            self.warnings.push(TextError::new(at, text));
        }
        Ok(())
    }

    fn value(&mut self, field: &FieldDescriptor) -> Result<Value, TextError> {
        Ok(match field.kind() {
            Kind::Message(descriptor) => Value::Message(self.message(field, &descriptor)?),
            Kind::Enum(descriptor) => Value::EnumNumber(self.enumeration(&descriptor)?),
            Kind::Bool => Value::Bool(self.boolean(field)?),
            Kind::String => {
                let at = self.offset;
                let text = String::from_utf8(self.string(field)?);
                Value::String(
                    text.map_err(|_| TextError::new(at, "this string is not valid UTF-8"))?,
                )
            }
            Kind::Bytes => Value::Bytes(self.string(field)?.into()),
            Kind::Float => Value::F32(self.float(field)? as f32),
            Kind::Double => Value::F64(self.float(field)?),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(self.integer(field)?),
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(self.integer(field)?),
            Kind::Uint32 | Kind::Fixed32 => Value::U32(self.integer(field)?),
            Kind::Uint64 | Kind::Fixed64 => Value::U64(self.integer(field)?),
        })
    }

    fn message(
        &mut self,
        field: &FieldDescriptor,
        descriptor: &MessageDescriptor,
    ) -> Result<DynamicMessage, TextError> {
        let close = match self.token {
            Token::Symbol('{') => '}',
            Token::Symbol('<') => '>',
            _ => return self.expected(format!("'{{' to open '{}'", field.name())),
        };
        self.bump()?;
        self.fields(descriptor, Some(close))
    }

    fn string(&mut self, field: &FieldDescriptor) -> Result<Vec<u8>, TextError> {
        if !matches!(self.token, Token::Text(_)) {
            return self.expected(format!("a quoted string for '{}'", field.name()));
        }
        let mut bytes = Vec::new();
        // Adjacent strings are concatenated.
        while matches!(self.token, Token::Text(_)) {
            if let Token::Text(more) = self.bump()? {
                bytes.extend(more);
            }
        }
        Ok(bytes)
    }

    fn boolean(&mut self, field: &FieldDescriptor) -> Result<bool, TextError> {
        let value = match self.token {
            Token::Name("true" | "True" | "t") | Token::Number("1") => true,
            Token::Name("false" | "False" | "f") | Token::Number("0") => false,
            _ => return self.expected(format!("true or false for '{}'", field.name())),
        };
        self.bump()?;
        Ok(value)
    }

    fn enumeration(&mut self, descriptor: &EnumDescriptor) -> Result<i32, TextError> {
        let at = self.offset;
        let negative = self.take_symbol('-')?;
        let (text, number) = match self.token {
            Token::Name(name) if !negative => {
                (name, descriptor.get_value_by_name(name).map(|value| value.number()))
            }
            Token::Number(text) if !negative => {
                (text, i32::try_from(integer(text).unwrap_or(-1)).ok())
            }
            _ => {
                let mut allowed: Vec<_> =
                    descriptor.values().map(|value| value.name().to_owned()).collect();
                allowed.sort_unstable();
                let kind = short(descriptor.full_name());
                let allowed = allowed.join(", ");
                let found = self.token.describe();
                let text = format!(
                    "expected a value of {kind} without quotes, found {found}; allowed: {allowed}"
                );
                return Err(TextError::new(self.offset, text));
            }
        };
        let known = number.filter(|&number| descriptor.get_value(number).is_some());
        let Some(number) = known else {
            let allowed = descriptor.values().map(|value| value.name().to_owned()).collect();
            let text = unknown_name(
                text,
                &format!("a value of {}", short(descriptor.full_name())),
                allowed,
            );
            return Err(TextError::new(at, text));
        };
        self.bump()?;
        Ok(number)
    }

    fn integer<T: TryFrom<i128>>(&mut self, field: &FieldDescriptor) -> Result<T, TextError> {
        let at = self.offset;
        let sign = if self.take_symbol('-')? { -1 } else { 1 };
        let Token::Number(text) = self.token else {
            return self.expected(format!("an integer for '{}'", field.name()));
        };
        let digits = !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit());
        let value = match integer(text) {
            Some(value) => T::try_from(sign * value).ok(),
            None if digits => None,
            None => return self.expected(format!("an integer for '{}'", field.name())),
        };
        let Some(value) = value else {
            let minus = if sign < 0 { "-" } else { "" };
            let text = format!(
                "{minus}{text} is out of range for '{}' ({})",
                field.name(),
                range(&field.kind())
            );
            return Err(TextError::new(at, text));
        };
        self.bump()?;
        Ok(value)
    }

    fn float(&mut self, field: &FieldDescriptor) -> Result<f64, TextError> {
        let sign = if self.take_symbol('-')? { -1.0 } else { 1.0 };
        let value = match self.token {
            Token::Number(text) => text.trim_end_matches(['f', 'F']).parse().ok(),
            Token::Name(name)
                if ["inf", "infinity", "nan"]
                    .iter()
                    .any(|known| name.eq_ignore_ascii_case(known)) =>
            {
                name.parse().ok()
            }
            _ => None,
        };
        let Some(value) = value else {
            return self.expected(format!("a number for '{}'", field.name()));
        };
        self.bump()?;
        let value: f64 = value;
        Ok(sign * value)
    }
}

pub(super) fn message_type(message: &DynamicMessage) -> MessageDescriptor {
    prost_reflect::ReflectMessage::descriptor(message)
}

/// Checks that a field with a single value, or another field of its `oneof`, has not been set
/// before.
fn check_first(field: &FieldDescriptor, seen: &[FieldDescriptor]) -> Result<(), String> {
    if field.is_list() || field.is_map() {
        return Ok(());
    }
    if seen.contains(field) {
        return Err(format!("'{}' is given twice; it may be given once", field.name()));
    }
    let Some(group) = field.containing_oneof() else { return Ok(()) };
    match seen.iter().find(|other| other.containing_oneof().as_ref() == Some(&group)) {
        Some(other) => Err(format!(
            "'{}' and '{}' exclude each other: only one '{}' may be given",
            other.name(),
            field.name(),
            group.name()
        )),
        None => Ok(()),
    }
}

/// Stores a value in the message. Returns the key of a map entry that replaced another one.
fn store(message: &mut DynamicMessage, field: &FieldDescriptor, value: Value) -> Option<String> {
    if field.is_list() {
        if let Some(list) = message.get_field_mut(field).as_list_mut() {
            list.push(value);
        }
    } else if field.is_map() {
        if let (Some(map), Some((key, value))) =
            (message.get_field_mut(field).as_map_mut(), map_entry(value))
        {
            let shown = match &key {
                MapKey::String(text) => format!("'{}'", text.escape_debug()),
                MapKey::Bool(key) => key.to_string(),
                MapKey::I32(key) => key.to_string(),
                MapKey::I64(key) => key.to_string(),
                MapKey::U32(key) => key.to_string(),
                MapKey::U64(key) => key.to_string(),
            };
            return map.insert(key, value).map(|_| shown);
        }
    } else {
        message.set_field(field, value);
    }
    None
}

/// Converts a map entry, a message with the fields `key` (1) and `value` (2).
fn map_entry(entry: Value) -> Option<(MapKey, Value)> {
    let Value::Message(entry) = entry else { return None };
    let key = entry.get_field_by_number(1)?.into_owned().into_map_key()?;
    Some((key, entry.get_field_by_number(2)?.into_owned()))
}

/// Parses an unsigned integer: decimal, octal (`017`) or hexadecimal (`0x1f`).
fn integer(text: &str) -> Option<i128> {
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if text.len() > 1 && text.starts_with('0') => (text, 8),
        None => (text, 10),
    };
    i128::from_str_radix(digits, radix).ok()
}

pub(super) fn range(kind: &Kind) -> String {
    match kind {
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
            format!("int32: {} to {}", i32::MIN, i32::MAX)
        }
        Kind::Uint32 | Kind::Fixed32 => format!("uint32: 0 to {}", u32::MAX),
        Kind::Uint64 | Kind::Fixed64 => format!("uint64: 0 to {}", u64::MAX),
        _ => format!("int64: {} to {}", i64::MIN, i64::MAX),
    }
}

pub(super) fn short(full_name: &str) -> &str {
    full_name.strip_prefix("inference.").unwrap_or(full_name)
}

pub(super) fn unknown_name(name: &str, role: &str, mut allowed: Vec<String>) -> String {
    allowed.sort_unstable();
    let nearest = allowed.iter().map(|other| (distance(name, other), other)).min();
    let hint = match nearest {
        Some((distance, other)) if distance <= 1 + name.len() / 4 => {
            format!("; did you mean '{other}'?")
        }
        _ => ";".to_owned(),
    };
    format!("'{name}' is not {role}{hint} allowed: {}", allowed.join(", "))
}

/// Returns the number of letters to insert, delete or replace to turn `a` into `b` (Levenshtein),
/// ignoring case.
fn distance(a: &str, b: &str) -> usize {
    if a.len() > 64 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.bytes().enumerate() {
        let mut diagonal = i;
        let mut previous = i + 1;
        for (cell, right) in row.iter_mut().skip(1).zip(b.bytes()) {
            let replaced = diagonal + usize::from(!left.eq_ignore_ascii_case(&right));
            diagonal = *cell;
            previous = replaced.min(diagonal + 1).min(previous + 1);
            *cell = previous;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}
