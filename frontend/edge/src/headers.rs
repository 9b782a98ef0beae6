//! Access to request headers.

use std::borrow::Cow;

use http::HeaderMap;
use http::header::{AsHeaderName, HeaderName};

/// W3C Trace Context.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Returns a header's text; repeated headers are joined into one list (RFC 9110, 5.3). Invalid
/// UTF-8 is replaced, not dropped: a header such as `Content-Encoding` must not count as absent
/// because it is malformed.
pub fn text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<Cow<'_, str>> {
    let mut values =
        headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    let first = values.next()?;
    Some(values.fold(first, |list, value| Cow::Owned(format!("{list}, {value}"))))
}
