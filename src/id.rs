//! Names and numbers that identify things. No behaviour.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use crate::error::InferError;

/// One accepted inference request, unique for the life of the frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// One model instance: a worker process running one copy of one model version. Unique for the life of the frontend; a
/// restarted instance keeps its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(pub u32);

/// A correlation id (`sequence_id`): zero and the empty string mean "no sequence".
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CorrelationId {
    /// A number.
    Uint(u64),
    /// A text.
    String(String),
}

impl Default for CorrelationId {
    fn default() -> Self {
        Self::Uint(0)
    }
}

/// The most bytes that a text may have as a correlation id; Triton's limit, which it calls characters.
pub const LONGEST_CORRELATION_ID: usize = 128;

impl CorrelationId {
    /// A text as a correlation id.
    ///
    /// # Errors
    /// INVALID_ARG if it is longer than [`LONGEST_CORRELATION_ID`]; Triton's text, and how long it is.
    pub fn from_text(text: impl Into<String>) -> Result<Self, InferError> {
        let text = text.into();
        if text.len() > LONGEST_CORRELATION_ID {
            let len = text.len();
            return Err(InferError::invalid(format!(
                "string correlation ID cannot be longer than {LONGEST_CORRELATION_ID} characters, this one has {len} bytes"
            )));
        }
        Ok(Self::String(text))
    }

    /// Whether it means "no sequence".
    pub fn is_none(&self) -> bool {
        match self {
            Self::Uint(number) => *number == 0,
            Self::String(text) => text.is_empty(),
        }
    }
}

impl fmt::Display for CorrelationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uint(number) => number.fmt(f),
            Self::String(text) => text.fmt(f),
        }
    }
}

/// The id of a trace (W3C Trace Context, `trace-id`): 16 bytes, not all zero. Displayed as 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(u128);

impl TraceId {
    /// A trace's id of random bits; `None` for zero, which is no id.
    pub fn new(bits: u128) -> Option<Self> {
        (bits != 0).then_some(Self(bits))
    }

    /// The trace of a `traceparent` header (W3C Trace Context, 3.2); `None` if it is not valid.
    pub fn from_traceparent(header: &str) -> Option<Self> {
        Traceparent::parse(header).map(|parent| parent.trace)
    }

    /// Its 16 bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }
}

/// The id of a span (W3C Trace Context, `parent-id`): 8 bytes, not all zero. Displayed as 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(u64);

impl SpanId {
    /// A span's id of random bits; `None` for zero, which is no id.
    pub fn new(bits: u64) -> Option<Self> {
        (bits != 0).then_some(Self(bits))
    }

    /// Its 8 bytes.
    pub fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What a `traceparent` header says (W3C Trace Context, 3.2). Displayed as such a header, with the flag "sampled".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traceparent {
    /// The trace.
    pub trace: TraceId,
    /// The span of the caller.
    pub span: SpanId,
}

impl Traceparent {
    /// Reads a header; `None` if it is not valid.
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let hex =
            |text: &&str, len: usize| text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let version = parts.next().filter(|version| hex(version, 2) && *version != "ff")?;
        let trace = parts.next().filter(|trace| hex(trace, 32))?;
        let parent = parts.next().filter(|parent| hex(parent, 16))?;
        parts.next().filter(|flags| hex(flags, 2))?;
        // Version 00 has exactly four parts; later ones may have more.
        if version == "00" && parts.next().is_some() {
            return None;
        }
        let trace = u128::from_str_radix(trace, 16).ok().and_then(TraceId::new)?;
        let span = u64::from_str_radix(parent, 16).ok().and_then(SpanId::new)?;
        Some(Self { trace, span })
    }
}

impl fmt::Display for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-01", self.trace, self.span)
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A model's name, cheap to clone: the name that it has in its repository and, with `--model-namespacing`, the repository
/// before it as a namespace. Displayed in full, `NAMESPACE/NAME`.
///
/// Two names are equal if they are displayed equally. Views show [`ModelName::full`], but for these, which show
/// [`ModelName::bare`]: the statistics extension, traces, and the metrics whose labels `metrics::source::LabelSet` says.
#[derive(Clone, Debug)]
pub struct ModelName {
    full: Arc<str>,
    /// Where the bare name begins in the full one.
    bare: usize,
}

impl ModelName {
    /// A name without a namespace.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self { full: name.into(), bare: 0 }
    }

    /// A name in a namespace.
    pub fn in_namespace(namespace: &str, name: &str) -> Self {
        Self { full: format!("{namespace}/{name}").into(), bare: namespace.len() + 1 }
    }

    /// The namespace; `None` unless models are distinguished by their repositories.
    pub fn namespace(&self) -> Option<&str> {
        self.full.get(..self.bare.checked_sub(1)?)
    }

    /// The name without its namespace.
    pub fn bare(&self) -> &str {
        self.full.get(self.bare..).unwrap_or_default()
    }

    /// The name with its namespace.
    pub fn full(&self) -> &str {
        &self.full
    }
}

impl Deref for ModelName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.full
    }
}

impl<T: Into<Arc<str>>> From<T> for ModelName {
    fn from(name: T) -> Self {
        Self::new(name)
    }
}

impl PartialEq for ModelName {
    fn eq(&self, other: &Self) -> bool {
        self.full == other.full
    }
}

impl Eq for ModelName {}

impl PartialOrd for ModelName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ModelName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.full.cmp(&other.full)
    }
}

impl Hash for ModelName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.full.hash(state);
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

/// A model name with a version number, cheap to clone. Displayed as `name/version`, the name in full.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelVersion {
    /// The model's name.
    pub name: ModelName,
    /// The version: the number of its directory, 1 or greater.
    pub version: u64,
}

impl ModelVersion {
    /// Puts a name and a version together. A text is a name without a namespace.
    pub fn new(name: impl Into<ModelName>, version: u64) -> Self {
        Self { name: name.into(), version }
    }
}

/// The bare name in the text of a full name, for tables whose keys are texts: what follows the last `/`, which a bare name
/// does not contain. A [`ModelName`] knows it without a search.
pub fn bare_name(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, bare)| bare)
}

impl fmt::Display for ModelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.name, self.version)
    }
}

/// Hashes numbers that the server counts up itself to neighbouring places, so that in a long queue too the newest and the
/// oldest requests are found in memory that was touched just before.
#[derive(Debug, Default)]
pub struct Sequential(u64);

impl Hasher for Sequential {
    fn write_u64(&mut self, number: u64) {
        // The low bits choose the place; the map tells what is there apart by the highest seven.
        self.0 = number | number << 57;
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 << 8 | u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A map from requests.
pub type RequestMap<T> = HashMap<RequestId, T, BuildHasherDefault<Sequential>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_may_stand_before_a_name() {
        let model = ModelVersion::new(ModelName::in_namespace("/srv/models", "m"), 2);
        assert_eq!((model.name.bare(), model.name.namespace()), ("m", Some("/srv/models")));
        assert_eq!(model.to_string(), "/srv/models/m/2");
        assert_eq!(model, ModelVersion::new("/srv/models/m", 2), "equal if displayed equally");
        let model = ModelVersion::new("m", 2);
        assert_eq!((model.name.bare(), model.name.namespace()), ("m", None));
    }

    #[test]
    fn a_text_is_an_id_up_to_the_limit() {
        let longest = "é".repeat(64);
        assert_eq!(CorrelationId::from_text(longest.as_str()), Ok(CorrelationId::String(longest.clone())));
        let error = CorrelationId::from_text(longest + "x").unwrap_err();
        let text = "string correlation ID cannot be longer than 128 characters, this one has 129 bytes";
        assert_eq!((error.code, error.message.as_str()), (crate::error::ErrorCode::InvalidArg, text));
    }

    #[test]
    fn only_valid_traceparents_name_a_trace() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let read = |text: &str| TraceId::from_traceparent(text).map(|id| id.to_string());
        assert_eq!(read(&format!("00-{trace}-00f067aa0ba902b7-01")).as_deref(), Some(trace));
        assert_eq!(read(&format!("01-{trace}-00f067aa0ba902b7-01-more")).as_deref(), Some(trace));
        for bad in [
            format!("ff-{trace}-00f067aa0ba902b7-01"),
            format!("00-{trace}-00f067aa0ba902b7-01-more"),
            format!("00-{trace}-0000000000000000-01"),
            format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()),
            format!("00-{trace}-00f067aa0ba902b7"),
            String::new(),
            "é".repeat(40),
        ] {
            assert_eq!(read(&bad), None, "{bad}");
        }
    }
}
