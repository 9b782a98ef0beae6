//! The filter `tojson` as `transformers` defines it: Python's `json.dumps` without HTML escapes.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::MAX_OUTPUT_BYTES;

/// The deepest nesting of a value. Requests have at most 100 levels.
const MAX_DEPTH: usize = 128;
/// The widest indentation, in spaces.
const MAX_INDENT: usize = 64;

/// Writes a value as JSON. Arguments are those of `transformers`: `ensure_ascii` (false), `indent`
/// (none), `separators` and `sort_keys` (false).
pub(super) fn tojson(
    state: &State,
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = match ensure_ascii {
        Some(value) => Some(value),
        None => kwargs.get::<Option<Value>>("ensure_ascii")?,
    };
    let indent = match indent {
        Some(value) => Some(value),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let separators = kwargs.get::<Option<Value>>("separators")?;
    let sort_keys = kwargs.get::<Option<Value>>("sort_keys")?;
    kwargs.assert_all_used()?;

    let indent = indentation(indent)?;
    let mut writer = Writer {
        output: String::new(),
        item_separator: if indent.is_some() { "," } else { ", " }.to_owned(),
        key_separator: ": ".to_owned(),
        indent,
        ascii: ensure_ascii.is_some_and(|value| value.is_true()),
        sorted: sort_keys.is_some_and(|value| value.is_true()),
        depth: 0,
        max_bytes: MAX_OUTPUT_BYTES,
    };
    if let Some(separators) = separators.filter(|value| !value.is_none()) {
        writer.set_separators(&separators)?;
    }
    writer.value(value)?;
    // The engine counts the bytes of the result; the walk costs more, as in minijinja's own filter.
    state.consume_fuel(writer.output.len() as u64 / 4)?;
    Ok(Value::from(writer.output))
}

fn indentation(indent: Option<Value>) -> Result<Option<String>, Error> {
    let Some(indent) = indent.filter(|value| !value.is_none()) else { return Ok(None) };
    if let Some(text) = indent.as_str() {
        return Ok(Some(text.chars().take(MAX_INDENT).collect()));
    }
    let spaces = indent.as_i64().ok_or_else(|| invalid("indent must be an integer or a string"))?;
    Ok(Some(" ".repeat(usize::try_from(spaces).unwrap_or(0).min(MAX_INDENT))))
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {message}"))
}

struct Writer {
    output: String,
    item_separator: String,
    key_separator: String,
    indent: Option<String>,
    ascii: bool,
    sorted: bool,
    depth: usize,
    /// The value fails if the text is longer before its last part. Lists that share their elements
    /// are small in memory and may be very long as text.
    max_bytes: usize,
}

impl Writer {
    fn set_separators(&mut self, separators: &Value) -> Result<(), Error> {
        let texts: Vec<Value> = separators.try_iter()?.take(3).collect();
        let texts: Vec<&str> = texts.iter().filter_map(Value::as_str).collect();
        let [items, keys] = texts.as_slice() else {
            return Err(invalid("separators must be two strings"));
        };
        self.item_separator = (*items).to_owned();
        self.key_separator = (*keys).to_owned();
        Ok(())
    }

    fn value(&mut self, value: &Value) -> Result<(), Error> {
        if self.output.len() > self.max_bytes {
            return Err(invalid("the value is too large"));
        }
        match value.kind() {
            ValueKind::None => self.output.push_str("null"),
            ValueKind::Bool => self.output.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value)?,
            ValueKind::Map => self.map(value)?,
            ValueKind::Undefined => return Err(invalid("an undefined value cannot be JSON")),
            _ => return Err(invalid("the value cannot be JSON")),
        }
        Ok(())
    }

    /// Writes a number as Python does.
    fn number(&mut self, value: &Value) {
        // Infinities and NaN have Python's names, which JSON does not have.
        match f64::try_from(value.clone()) {
            Ok(number) if number.is_nan() => self.output.push_str("NaN"),
            Ok(number) if number.is_infinite() => {
                self.output.push_str(if number > 0.0 { "Infinity" } else { "-Infinity" });
            }
            Ok(number) if !value.is_integer() => self.float(number),
            _ => self.output.push_str(&value.to_string()),
        }
    }

    /// Writes a float like Python's `repr`: the shortest digits, with an exponent below 1e-4 and
    /// from 1e16.
    fn float(&mut self, number: f64) {
        let magnitude = number.abs();
        if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
            let text = format!("{number:e}");
            let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let exponent: i32 = exponent.parse().unwrap_or(0);
            let sign = if exponent < 0 { '-' } else { '+' };
            let _ = write!(self.output, "{digits}e{sign}{:02}", exponent.abs());
        } else {
            let _ = write!(self.output, "{number:?}");
        }
    }

    fn string(&mut self, text: &str) {
        self.output.push('"');
        let mut rest = text;
        while let Some(position) = rest.bytes().position(|byte| self.is_escaped(byte)) {
            self.output.push_str(&rest[..position]);
            rest = &rest[position..];
            let mut characters = rest.chars();
            let Some(character) = characters.next() else { break };
            self.escape(character);
            rest = characters.as_str();
        }
        self.output.push_str(rest);
        self.output.push('"');
    }

    /// Whether the character that begins with this byte is escaped.
    fn is_escaped(&self, byte: u8) -> bool {
        byte < b' ' || matches!(byte, b'"' | b'\\') || (self.ascii && !byte.is_ascii())
    }

    fn escape(&mut self, character: char) {
        match character {
            '"' => self.output.push_str("\\\""),
            '\\' => self.output.push_str("\\\\"),
            '\n' => self.output.push_str("\\n"),
            '\r' => self.output.push_str("\\r"),
            '\t' => self.output.push_str("\\t"),
            '\u{8}' => self.output.push_str("\\b"),
            '\u{c}' => self.output.push_str("\\f"),
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    // Writing to memory cannot fail.
                    let _ = write!(self.output, "\\u{unit:04x}");
                }
            }
        }
    }

    fn list(&mut self, value: &Value) -> Result<(), Error> {
        self.descend()?;
        self.output.push('[');
        let mut is_empty = true;
        for item in value.try_iter()?.checked() {
            self.begin_item(is_empty);
            is_empty = false;
            self.value(&item?)?;
        }
        self.end_container(is_empty, ']');
        Ok(())
    }

    fn map(&mut self, value: &Value) -> Result<(), Error> {
        self.descend()?;
        self.output.push('{');
        let mut keys = Vec::new();
        for key in value.try_iter()?.checked() {
            keys.push(key?);
        }
        if self.sorted {
            keys.sort();
        }
        for (index, key) in keys.iter().enumerate() {
            self.begin_item(index == 0);
            match key.kind() {
                ValueKind::String => self.string(key.as_str().unwrap_or_default()),
                ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                    self.output.push('"');
                    self.value(key)?;
                    self.output.push('"');
                }
                _ => return Err(invalid("a key of a dictionary must be a string")),
            }
            self.output.push_str(&self.key_separator);
            self.value(&value.get_item(key)?)?;
        }
        self.end_container(keys.is_empty(), '}');
        Ok(())
    }

    fn descend(&mut self) -> Result<(), Error> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(invalid("the value is nested too deeply"));
        }
        Ok(())
    }

    fn begin_item(&mut self, is_first: bool) {
        if !is_first {
            self.output.push_str(&self.item_separator);
        }
        self.new_line();
    }

    fn end_container(&mut self, is_empty: bool, bracket: char) {
        self.depth -= 1;
        if !is_empty {
            self.new_line();
        }
        self.output.push(bracket);
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.indent {
            self.output.push('\n');
            for _ in 0..self.depth {
                self.output.push_str(indent);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(value: &Value) -> Result<usize, String> {
        let mut writer = Writer {
            output: String::new(),
            item_separator: ",".to_owned(),
            key_separator: ":".to_owned(),
            indent: None,
            ascii: false,
            sorted: false,
            depth: 0,
            max_bytes: 1_000,
        };
        writer.value(value).map_err(|error| error.to_string())?;
        Ok(writer.output.len())
    }

    #[test]
    fn values_that_share_their_elements_have_a_limit() {
        let mut value = Value::from("x");
        for _ in 0..60 {
            value = Value::from(vec![value.clone(), value]);
        }
        assert!(write(&value).unwrap_err().contains("too large"));
    }

    #[test]
    fn depth_has_a_limit() {
        let nested = |depth| (0..depth).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
        assert_eq!(write(&nested(MAX_DEPTH)), Ok(2 * MAX_DEPTH + 1));
        assert!(write(&nested(MAX_DEPTH + 1)).unwrap_err().contains("too deeply"));
    }
}
