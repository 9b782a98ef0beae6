//! Access to request headers.

use std::borrow::Cow;

use http::HeaderMap;
use http::header::{AsHeaderName, CONTENT_ENCODING, HeaderName};
use pharos::error::{ErrorCode, InferError, Reason};

/// W3C Trace Context.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Checks that the body of a request is not compressed, for handlers that do not decompress.
///
/// # Errors
/// It has another content coding than `identity`.
pub fn check_encoding(headers: &HeaderMap) -> Result<(), InferError> {
    let coding = text(headers, CONTENT_ENCODING);
    if coding.is_none_or(|coding| coding.is_empty() || coding.eq_ignore_ascii_case("identity")) {
        return Ok(());
    }
    let message = "Unsupported content-encoding, only 'identity' is supported.";
    Err(InferError::new(ErrorCode::InvalidArg, Reason::Unsupported, message))
}

/// Returns a header's text; repeated headers are joined into one list (RFC 9110, 5.3). Invalid
/// UTF-8 is replaced, not dropped: a header such as `Content-Encoding` must not count as absent
/// because it is malformed.
pub fn text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<Cow<'_, str>> {
    let mut values =
        headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    let first = values.next()?;
    Some(values.fold(first, |list, value| Cow::Owned(format!("{list}, {value}"))))
}
