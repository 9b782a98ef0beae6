//! Formats an event as one line in the current format.

use std::borrow::Cow;
use std::fmt::{self, Write};

use pharos::printable::printable;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::{Format, STREAM};

pub(super) struct Lines;

/// The parts of an event.
#[derive(Default)]
pub(super) struct Parts {
    message: String,
    fields: Vec<(&'static str, Value)>,
}

enum Value {
    Text(String),
    /// A number or Boolean in JSON syntax.
    Bare(String),
}

impl Visit for Parts {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.message = text,
            name => self.fields.push((name, Value::Text(text))),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.fields.push((name, Value::Text(value.to_owned()))),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.fields.push((field.name(), Value::Bare(value.to_string())));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.fields.push((field.name(), Value::Bare(value.to_string())));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.fields.push((field.name(), Value::Bare(value.to_string())));
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut parts = Parts::default();
        event.record(&mut parts);
        let metadata = event.metadata();
        let format = super::format();
        if format != Format::Json {
            // The level of a worker's line already shows the stream.
            parts.take(STREAM);
        }
        writeln!(writer, "{}", formatted(format, *metadata.level(), metadata.target(), &parts)?)
    }
}

/// Formats the line of an event.
pub(super) fn formatted(
    format: Format,
    level: Level,
    module: &str,
    parts: &Parts,
) -> Result<String, fmt::Error> {
    let mut time = String::new();
    SystemTime.format_time(&mut Writer::new(&mut time))?;
    Ok(match format {
        Format::Default => format!("{time} {level:>5} {}", parts.text()),
        Format::Iso8601 => {
            let seconds = time.split('.').next().unwrap_or(&time);
            format!(
                "{seconds}Z {} {} {module}] {}",
                letter(level),
                std::process::id(),
                parts.text()
            )
        }
        Format::Json => parts.json(&time, level, module)?,
    })
}

/// Returns glog's letter for a level.
fn letter(level: Level) -> char {
    match level {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        _ => 'I',
    }
}

impl Parts {
    /// Creates a message without fields.
    pub(super) fn message(message: String) -> Self {
        Self { message, fields: Vec::new() }
    }

    /// Adds a field with a text before the others.
    pub(super) fn prepend(&mut self, name: &'static str, text: &str) {
        self.fields.insert(0, (name, Value::Text(text.to_owned())));
    }

    /// Removes and returns a field.
    pub(super) fn take(&mut self, field: &str) -> Option<String> {
        let at = self.fields.iter().position(|(name, _)| *name == field)?;
        match self.fields.remove(at).1 {
            Value::Text(text) | Value::Bare(text) => Some(printable(&text).into_owned()),
        }
    }

    /// Returns the message and the fields as one line. Characters that a terminal obeys are
    /// escaped: a client cannot forge a line.
    pub(super) fn text(&self) -> String {
        let mut line = printable(&self.message).into_owned();
        for (name, value) in &self.fields {
            let value = match value {
                Value::Text(text) => printable(text),
                Value::Bare(text) => Cow::Borrowed(text.as_str()),
            };
            let _ = write!(line, " {name}={value}");
        }
        line
    }

    fn json(&self, time: &str, level: Level, module: &str) -> Result<String, fmt::Error> {
        let mut line = format!(
            "{{\"time\":{},\"level\":\"{level}\",\"module\":{}",
            json_string(time)?,
            json_string(module)?
        );
        write!(line, ",\"message\":{}", json_string(&self.message)?)?;
        for (name, value) in &self.fields {
            let value = match value {
                Value::Text(text) => json_string(text)?,
                Value::Bare(text) => text.clone(),
            };
            write!(line, ",{}:{value}", json_string(name)?)?;
        }
        line.push('}');
        Ok(line)
    }
}

fn json_string(text: &str) -> Result<String, fmt::Error> {
    serde_json::to_string(text).map_err(|_| fmt::Error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_control_characters() {
        let parts = Parts {
            message: "bad\nINFO forged \u{202e}".to_owned(),
            fields: vec![
                ("model", Value::Text("a \"b\"\t".to_owned())),
                ("count", Value::Bare("3".to_owned())),
            ],
        };
        assert_eq!(parts.text(), "bad\\nINFO forged \\u{202e} model=a \"b\"\\t count=3");
        let json = parts.json("now", Level::WARN, "pharos").unwrap_or_default();
        // A reader of JSON gets the text itself.
        let message = "bad\\nINFO forged \u{202e}";
        let rest = r#""model":"a \"b\"\t","count":3}"#;
        let expected = format!(
            r#"{{"time":"now","level":"WARN","module":"pharos","message":"{message}",{rest}"#
        );
        assert_eq!(json, expected);
    }
}
