//! Names and numbers that identify things.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::num::NonZeroU128;
use std::ops::Deref;
use std::sync::Arc;

use crate::error::InferError;

/// One accepted inference request, unique for the life of the frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// One model instance: a worker process running one copy of one model version. Unique for the life
/// of the frontend; a restarted instance keeps its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(pub u32);

/// The tenant that a request belongs to, unique for the life of the frontend. The default is the
/// tenant of requests without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u16);

impl TenantId {
    /// The longest name of a tenant, in bytes.
    pub const LONGEST_NAME: usize = 64;

    /// The names that a tenant may have, as text.
    pub const ALLOWED: &str = "up to 64 letters, digits and `-_.:@/+=`";

    /// Returns whether a tenant may have this name.
    pub fn is_name(name: &[u8]) -> bool {
        (1..=Self::LONGEST_NAME).contains(&name.len())
            && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:@/+=".contains(byte))
    }
}

/// A correlation id (`sequence_id`); zero and the empty string mean "no sequence".
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

/// The maximum length in bytes of a correlation id that is a text; Triton's limit, which its error
/// text counts in characters.
pub const LONGEST_CORRELATION_ID: usize = 128;

impl CorrelationId {
    /// Creates a correlation id from a text.
    ///
    /// # Errors
    /// INVALID_ARG if the text is longer than [`LONGEST_CORRELATION_ID`], with Triton's text and
    /// the length.
    pub fn from_text(text: impl Into<String>) -> Result<Self, InferError> {
        let text = text.into();
        if text.len() > LONGEST_CORRELATION_ID {
            let len = text.len();
            return Err(InferError::invalid(format!(
                "string correlation ID cannot be longer than {LONGEST_CORRELATION_ID} characters, \
                 this one has {len} bytes"
            )));
        }
        Ok(Self::String(text))
    }

    /// Returns whether the id means "no sequence".
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

/// The id of a trace (W3C Trace Context, `trace-id`): 16 bytes, not all zero. Displayed as 32
/// hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(NonZeroU128);

impl TraceId {
    /// Creates a trace id from random bits; `None` for zero, which is not valid.
    pub fn new(bits: u128) -> Option<Self> {
        NonZeroU128::new(bits).map(Self)
    }

    /// Parses the trace id of a `traceparent` header (W3C Trace Context, 3.2); `None` if the header
    /// is not valid.
    pub fn from_traceparent(header: &str) -> Option<Self> {
        Traceparent::parse(header).map(|parent| parent.trace)
    }

    /// Returns the 16 bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.get().to_be_bytes()
    }
}

/// The id of a span (W3C Trace Context, `parent-id`): 8 bytes, not all zero. Displayed as 16
/// hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(u64);

impl SpanId {
    /// Creates a span id from random bits; `None` for zero, which is not valid.
    pub fn new(bits: u64) -> Option<Self> {
        (bits != 0).then_some(Self(bits))
    }

    /// Returns the 8 bytes.
    pub fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The content of a `traceparent` header (W3C Trace Context, 3.2). Displayed as a header with the
/// flag "sampled".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traceparent {
    /// The trace.
    pub trace: TraceId,
    /// The span of the caller.
    pub span: SpanId,
}

impl Traceparent {
    /// Parses a header; `None` if it is not valid.
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let hex = |text: &&str, len: usize| {
            text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
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

/// The name of a model, cheap to clone: its name in the repository and, with `--model-namespacing`,
/// the repository as a namespace before it. Displayed in full, `NAMESPACE/NAME`.
///
/// Names compare by their displayed form. Views show [`ModelName::full`], except the statistics
/// extension, traces, and metrics with the labels of Triton or of an alias
/// (`metrics::source::LabelSet`), which show [`ModelName::bare`].
#[derive(Clone, Debug)]
pub struct ModelName {
    full: Arc<str>,
    /// The offset of the bare name in `full`.
    bare: usize,
}

impl ModelName {
    /// Creates a name without a namespace.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self { full: name.into(), bare: 0 }
    }

    /// Creates a name in a namespace.
    pub fn in_namespace(namespace: &str, name: &str) -> Self {
        Self { full: format!("{namespace}/{name}").into(), bare: namespace.len() + 1 }
    }

    /// Returns the namespace; `None` unless models are distinguished by their repositories.
    pub fn namespace(&self) -> Option<&str> {
        self.full.get(..self.bare.checked_sub(1)?)
    }

    /// Returns the name without its namespace.
    pub fn bare(&self) -> &str {
        self.full.get(self.bare..).unwrap_or_default()
    }

    /// Returns the name with its namespace.
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

/// A model name with a version number, cheap to clone. Displayed as `name/version` with the full
/// name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelVersion {
    /// The model's name.
    pub name: ModelName,
    /// The version: the number of its directory, 1 or greater.
    pub version: u64,
}

impl ModelVersion {
    /// Combines a name and a version. A text is a name without a namespace.
    pub fn new(name: impl Into<ModelName>, version: u64) -> Self {
        Self { name: name.into(), version }
    }
}

/// Returns the bare name in the text of a full name, for tables with text keys: the part after the
/// last `/`, which a bare name never contains. A [`ModelName`] stores it.
pub fn bare_name(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, bare)| bare)
}

impl fmt::Display for ModelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.name, self.version)
    }
}

/// Hashes sequential numbers to neighbouring buckets, so that even in a long queue the newest and
/// the oldest requests are in recently touched memory.
#[derive(Debug, Default)]
pub struct Sequential(u64);

impl Hasher for Sequential {
    fn write_u64(&mut self, number: u64) {
        // The map selects the bucket by the low bits and tells entries apart by the highest seven.
        self.0 = number | number << 57;
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 << 8 | u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A map with request ids as keys.
pub type RequestMap<T> = HashMap<RequestId, T, BuildHasherDefault<Sequential>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_have_a_namespace() {
        let model = ModelVersion::new(ModelName::in_namespace("/srv/models", "m"), 2);
        assert_eq!((model.name.bare(), model.name.namespace()), ("m", Some("/srv/models")));
        assert_eq!(model.to_string(), "/srv/models/m/2");
        assert_eq!(model, ModelVersion::new("/srv/models/m", 2), "equal if displayed equally");
        let model = ModelVersion::new("m", 2);
        assert_eq!((model.name.bare(), model.name.namespace()), ("m", None));
    }

    #[test]
    fn refuses_a_text_id_over_the_limit() {
        let longest = "é".repeat(64);
        assert_eq!(
            CorrelationId::from_text(longest.as_str()),
            Ok(CorrelationId::String(longest.clone()))
        );
        let error = CorrelationId::from_text(longest + "x").unwrap_err();
        let text =
            "string correlation ID cannot be longer than 128 characters, this one has 129 bytes";
        assert_eq!(
            (error.code, error.message.as_str()),
            (crate::error::ErrorCode::InvalidArg, text)
        );
    }

    #[test]
    fn refuses_invalid_traceparents() {
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
