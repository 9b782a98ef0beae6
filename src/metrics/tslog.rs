//! Metrics as log lines, byte for byte in the form that TorchServe 0.12 writes into
//! `ts_metrics.log` and `model_metrics.log`, so that existing parsers and log pipelines keep
//! working.
//!
//! ```text
//! file     TIME - NAME.UNIT:VALUE|#DIM:VALUE,DIM:VALUE|#hostname:HOST[,requestID:IDS],timestamp:SECONDS
//! console  TIME [INFO ] THREAD LOGGER - NAME.UNIT:VALUE|#...
//! ```
//!
//! TIME is local time without a zone (`yyyy-MM-ddTHH:mm:ss,SSS`) and SECONDS are since 1970, both
//! of the time of writing. VALUE is Java's `Double.toString`. The host's dimension (in any case)
//! comes after the others; a metric without it gets the server's host. Only metrics of models have
//! `requestID`: the ids of a batch joined by commas, or `null`. The unit is the one in
//! `metrics.yaml`.
//!
//! TorchServe writes dimension values unescaped, so a value can break a line or forge one. Here
//! `%`, `:`, `,`, `|`, control characters and Unicode's line separators become `%XX` for each of
//! their bytes, in values and in request ids. A reader can therefore split a line at `|`, `,` and
//! `:` and percent-decode the fields. A `:` in a metric's name, which Prometheus allows, becomes
//! `_`.
//!
//! The third layout is one JSON object for each line, with the keys that TorchServe's
//! `JSONPatternLayout` was designed to write: MetricName, Value, Unit, Type, Dimensions,
//! DimensionNames, DimensionValues, Timestamp, RequestId, HostName. In addition, Logger has the
//! logger's name, because one stream may have the lines of both files. Value and Timestamp are
//! numbers, but NaN and infinities, which JSON does not support, are strings. Only the request ids
//! are percent-encoded.
//!
//! This module does not read clocks or write files.

mod java;

use std::fmt::Write;

use super::catalog::{Kind, MetricSpec, Section};

pub use java::push_double;

/// The text for a host without a name.
const UNKNOWN_HOST: &str = "Unknown";
/// The name of the thread in console lines.
const THREAD: &str = "tslog";

/// The value of the label `file` for lines written to standard output.
pub const STDOUT: &str = "stdout";

named_enum! {
    /// The destination of lines.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum File {
        /// `ts_metrics.log`: metrics that the frontend records.
        Ts => "ts_metrics",
        /// `model_metrics.log`: metrics that models record.
        Model => "model_metrics",
    }
    /// Returns the file's name without its extension, which is the value of the label `file`.
    pub fn as_str;
}

impl File {
    /// Returns TorchServe's logger of these lines.
    fn logger(self) -> &'static str {
        match self {
            Self::Ts => "TS_METRICS",
            Self::Model => "MODEL_METRICS",
        }
    }
}

/// The layout of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The layout of TorchServe's files.
    File,
    /// The layout of TorchServe's standard output: with level, thread and logger.
    Console,
    /// A JSON object.
    Json,
}

/// The time of writing.
#[derive(Clone, Debug)]
pub struct Stamp {
    local: String,
    seconds: String,
}

impl Stamp {
    /// Creates the stamp of a time in milliseconds since 1970, where local time is `utc_offset`
    /// seconds ahead of UTC.
    pub fn new(epoch_ms: u64, utc_offset: i32) -> Self {
        let seconds = epoch_ms / 1000;
        let local = i64::try_from(seconds).unwrap_or(i64::MAX).saturating_add(utc_offset.into());
        let (year, month, day) = civil(local.div_euclid(86_400));
        let time = local.rem_euclid(86_400);
        let hour = time / 3600;
        let minute = time / 60 % 60;
        let second = time % 60;
        let ms = epoch_ms % 1000;
        let local =
            format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02},{ms:03}");
        Self { local, seconds: seconds.to_string() }
    }

    /// Returns the local time, `yyyy-MM-ddTHH:mm:ss,SSS`.
    pub fn local(&self) -> &str {
        &self.local
    }

    /// Returns the local date, `yyyy-MM-dd`.
    pub fn date(&self) -> &str {
        self.local.split_once('T').map_or("", |(date, _)| date)
    }
}

/// Converts days since 1970 to year, month and day (Howard Hinnant's `civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days.saturating_add(719_468);
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

/// The common text of all lines of one series, created once.
#[derive(Debug)]
pub struct Text {
    file: File,
    /// `NAME.UNIT:`
    head: String,
    /// `|#DIM:VALUE,...|#hostname:HOST`
    tail: String,
    /// The JSON object before its value, and after it up to the timestamp.
    json: (String, String),
}

impl Text {
    /// Creates the text of a series of `spec` with these dimensions (names and values, in the
    /// definition's order). `hostname` is used if no dimension gives the host.
    pub fn new<'a>(
        spec: &MetricSpec,
        dimensions: impl IntoIterator<Item = (&'a str, &'a str)>,
        hostname: &str,
    ) -> Self {
        let mut host = hostname;
        let mut others = Vec::new();
        for (name, value) in dimensions {
            if name.eq_ignore_ascii_case("hostname") {
                host = value
            } else {
                others.push((name, value))
            }
        }
        if host.is_empty() {
            host = UNKNOWN_HOST;
        }
        let mut head: String = spec
            .name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '_' || c == ' ' { c } else { '_' })
            .collect();
        head.push('.');
        encode(&mut head, &spec.unit, |c| is_break(c) || c == ':' || c == '|');
        head.push(':');
        let mut tail = "|#".to_owned();
        for (at, (name, value)) in others.iter().enumerate() {
            tail.push_str(if at > 0 { "," } else { "" });
            encode(&mut tail, name, is_dangerous);
            tail.push(':');
            encode(&mut tail, value, is_dangerous);
        }
        tail.push_str("|#hostname:");
        encode(&mut tail, host, is_dangerous);
        let file = if spec.section == Section::Model { File::Model } else { File::Ts };
        Self { file, head, tail, json: json(spec, file, &others, host) }
    }

    /// Creates the text of a series of the server itself. The definition's dimensions come first,
    /// then the other `labels`: a model's namespace and `metric_tags`.
    pub fn of_server(spec: &MetricSpec, labels: &[(&str, &str)], hostname: &str) -> Self {
        let defined = spec.dimensions.iter().map(|name| {
            (
                name.as_str(),
                labels.iter().find(|(label, _)| label == name).map_or("", |(_, value)| *value),
            )
        });
        let others =
            labels.iter().filter(|(label, _)| !spec.dimensions.iter().any(|name| name == label));
        Self::new(spec, defined.chain(others.copied()), hostname)
    }

    /// Returns the file of these lines.
    pub fn file(&self) -> File {
        self.file
    }

    /// Appends a line with its line feed. `request_ids` are the ids of a batch as joined by
    /// [`push_request_id`]; empty if the metric has no request.
    pub fn write(
        &self,
        out: &mut String,
        layout: Layout,
        stamp: &Stamp,
        value: f64,
        request_ids: &str,
    ) {
        if layout == Layout::Json {
            return self.write_json(out, stamp, value, request_ids);
        }
        out.push_str(&stamp.local);
        if layout == Layout::Console {
            // Writing into a String cannot fail.
            let _ = write!(out, " [INFO ] {THREAD} {}", self.file.logger());
        }
        out.push_str(" - ");
        out.push_str(&self.head);
        push_double(out, value);
        out.push_str(&self.tail);
        if self.file == File::Model {
            out.push_str(",requestID:");
            push_request_ids(out, request_ids);
        }
        out.push_str(",timestamp:");
        out.push_str(&stamp.seconds);
        out.push('\n');
    }

    fn write_json(&self, out: &mut String, stamp: &Stamp, value: f64, request_ids: &str) {
        let quote = if value.is_finite() { "" } else { "\"" };
        out.push_str(&self.json.0);
        out.push_str(quote);
        push_double(out, value);
        out.push_str(quote);
        out.push_str(&self.json.1);
        out.push_str(&stamp.seconds);
        out.push_str(",\"RequestId\":");
        if request_ids.split(',').all(str::is_empty) {
            out.push_str("null");
        } else {
            // Encoded ids contain no control characters; only quotes and backslashes are left to
            // escape.
            let mut ids = String::new();
            push_request_ids(&mut ids, request_ids);
            out.push_str(&quoted(&ids));
        }
        out.push_str("}\n");
    }
}

fn json(
    spec: &MetricSpec,
    file: File,
    dimensions: &[(&str, &str)],
    host: &str,
) -> (String, String) {
    let kind = match spec.kind {
        Kind::Counter => "COUNTER",
        Kind::Gauge => "GAUGE",
        Kind::Histogram => "HISTOGRAM",
        Kind::Summary => "SUMMARY",
    };
    let list = |item: &dyn Fn(&(&str, &str)) -> String| {
        dimensions.iter().map(item).collect::<Vec<_>>().join(",")
    };
    let pairs =
        list(&|(name, value)| format!("{{\"Name\":{},\"Value\":{}}}", quoted(name), quoted(value)));
    let names = list(&|(name, _)| quoted(name));
    let values = list(&|(_, value)| quoted(value));
    let before = format!("{{\"MetricName\":{},\"Value\":", quoted(&spec.name));
    let after = format!(
        ",\"Unit\":{},\"Type\":\"{kind}\",\"Dimensions\":[{pairs}],\"DimensionNames\":[{names}],\"\
         DimensionValues\":[{values}],\"HostName\":{},\"Logger\":\"{}\",\"Timestamp\":",
        quoted(&spec.unit),
        quoted(host),
        file.logger()
    );
    (before, after)
}

/// Formats a JSON string. Also escapes Unicode's line separators, because some readers split lines
/// there.
fn quoted(text: &str) -> String {
    let text = serde_json::Value::from(text).to_string();
    text.replace('\u{85}', "\\u0085").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

/// Returns whether some reader may take the character for the end of a line.
fn is_break(c: char) -> bool {
    c.is_control() || c == '\u{2028}' || c == '\u{2029}'
}

/// Returns whether the character has a meaning in a line.
fn is_dangerous(c: char) -> bool {
    matches!(c, '%' | ':' | ',' | '|') || is_break(c)
}

fn encode(out: &mut String, text: &str, encoded: impl Fn(char) -> bool) {
    let mut rest = text;
    while let Some(at) = rest.find(&encoded) {
        let (plain, from) = rest.split_at(at);
        out.push_str(plain);
        let mut chars = from.chars();
        let c = chars.next().unwrap_or_default();
        for byte in c.encode_utf8(&mut [0; 4]).bytes() {
            let _ = write!(out, "%{byte:02X}");
        }
        rest = chars.as_str();
    }
    out.push_str(rest);
}

/// Appends the id of a batch's `position`-th request to the list of ids, encoded so that the list
/// can be split again.
pub fn push_request_id(list: &mut String, position: usize, id: &str) {
    if position > 0 {
        list.push(',');
    }
    encode(list, id, is_dangerous);
}

/// Appends a list from [`push_request_id`] or from a worker; `null` if it is empty. Does not encode
/// encoded ids again.
fn push_request_ids(out: &mut String, list: &str) {
    if list.split(',').all(str::is_empty) {
        return out.push_str("null");
    }
    for (at, id) in list.split(',').enumerate() {
        out.push_str(if at > 0 { "," } else { "" });
        if id.is_empty() {
            out.push_str("null");
        } else {
            encode(out, id, |c| c == ':' || c == '|' || is_break(c));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
