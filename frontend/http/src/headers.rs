//! Reads headers of requests.

use std::borrow::Cow;

use http::HeaderMap;

/// W3C Trace Context.
pub(super) const TRACEPARENT: &str = "traceparent";

/// A header's text, repetitions joined as one list (RFC 9110, 5.3). Bytes that are no text are shown as such: a header
/// that cannot be understood must not count as absent, for the body means something else without it.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<Cow<'a, str>> {
    let mut values = headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    let first = values.next()?;
    Some(values.fold(first, |list, value| Cow::Owned(format!("{list}, {value}"))))
}
