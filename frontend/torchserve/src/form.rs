//! Splits a request's body into the parts that a handler gets as `data`. A body other than a form
//! is one part, `body`.

use bytes::Bytes;
use futures_util::stream;
use multer::{Constraints, Multipart, SizeLimit};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::ErrorResponse;

/// The content type of a file in a form that states none.
const FILE: &str = "application/octet-stream";

/// The most parts of a request.
const MAX_PARTS: usize = 10_000;

/// One part of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormPart {
    /// The part's key in the handler's dict.
    pub name: String,
    /// The media type without parameters; empty if the part has none.
    pub content_type: String,
    /// The part's bytes.
    pub data: Bytes,
}

impl FormPart {
    /// Creates a part without a content type.
    pub fn bare(name: impl Into<String>, data: impl Into<Bytes>) -> Self {
        Self { name: name.into(), content_type: String::new(), data: data.into() }
    }
}

/// Splits a body with this `Content-Type` into parts. As in TorchServe, a multipart form without a
/// boundary is one part.
///
/// # Errors
/// The content type is a multipart form, but the body is malformed.
pub async fn parts(content_type: &str, body: Bytes) -> Result<Vec<FormPart>, ErrorResponse> {
    let media = media_type(content_type);
    if media.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
        let text = String::from_utf8_lossy(&body);
        check_parts(text.split('&').filter(|pair| !pair.is_empty()).count())?;
        return Ok(pairs(&text));
    }
    if media.eq_ignore_ascii_case("multipart/form-data")
        && let Ok(boundary) = multer::parse_boundary(content_type)
    {
        return multipart(boundary, body).await;
    }
    Ok(vec![FormPart { name: "body".to_owned(), content_type: media.to_owned(), data: body }])
}

/// Returns a content type without its parameters.
fn media_type(content_type: &str) -> &str {
    content_type.split(';').next().unwrap_or_default().trim()
}

/// Decodes the pairs of a query or of a URL-encoded form.
pub fn pairs(text: &str) -> Vec<FormPart> {
    let decode = |text: &str| percent_decode_str(&text.replace('+', " ")).collect::<Vec<u8>>();
    let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        FormPart::bare(String::from_utf8_lossy(&decode(name)).into_owned(), decode(value))
    });
    pairs.collect()
}

async fn multipart(boundary: String, body: Bytes) -> Result<Vec<FormPart>, ErrorResponse> {
    let wrong = |error: multer::Error| {
        ErrorResponse::bad_request(format!("The body is no multipart form: {error}"))
    };
    let limit = SizeLimit::new().whole_stream(u64::MAX);
    let whole = stream::iter([Ok::<_, std::convert::Infallible>(body)]);
    let mut form =
        Multipart::with_constraints(whole, boundary, Constraints::new().size_limit(limit));
    let mut parts = Vec::new();
    while let Some(field) = form.next_field().await.map_err(wrong)? {
        check_parts(parts.len() + 1)?;
        let name = field.name().unwrap_or_default().to_owned();
        let own = field
            .headers()
            .get("content-type")
            .and_then(|value| value.to_str().ok())
            .map(media_type);
        // As in TorchServe, handlers get no content type for a field that is not a file.
        let content_type =
            field.file_name().map(|_| own.unwrap_or(FILE).to_owned()).unwrap_or_default();
        let data = field.bytes().await.map_err(wrong)?;
        parts.push(FormPart { name, content_type, data });
    }
    Ok(parts)
}

/// Refuses a request with more than `MAX_PARTS` parts, since each needs much more memory than its
/// bytes.
///
/// # Errors
/// The request has more parts.
pub fn check_parts(count: usize) -> Result<(), ErrorResponse> {
    match count {
        0..=MAX_PARTS => Ok(()),
        _ => {
            Err(ErrorResponse::bad_request(format!("The request has more than {MAX_PARTS} parts")))
        }
    }
}

/// Joins parts into the element of the worker's only input, a length followed by all bytes, and a
/// JSON description of the parts.
pub fn join(parts: &[FormPart]) -> Option<(Vec<u8>, Value)> {
    let length: usize = parts.iter().map(|part| part.data.len()).sum();
    let mut data = Vec::with_capacity(length + 4);
    data.extend_from_slice(&u32::try_from(length).ok()?.to_le_bytes());
    parts.iter().for_each(|part| data.extend_from_slice(&part.data));
    let descriptions = parts
        .iter()
        .map(|part| json!({ "name": part.name, "content_type": part.content_type, "length": part.data.len() }));
    Some((data, descriptions.collect()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Exception;

    fn part(name: &str, content_type: &str, data: &'static [u8]) -> FormPart {
        FormPart { name: name.into(), content_type: content_type.into(), data: data.into() }
    }

    #[tokio::test]
    async fn bodies_and_forms_become_parts() {
        let multipart = "--B\r\nContent-Disposition: form-data; name=\"data\"; \
                         filename=\"f.txt\"\r\nContent-Type: text/plain; \
                         charset=x\r\n\r\nhello\r\n--B\r\nContent-Disposition: form-data; \
                         name=\"x\"\r\nContent-Type: \
                         text/plain\r\n\r\n1\r\n--B\r\nContent-Disposition: form-data; \
                         name=\"y\"; filename=\"b\"\r\n\r\n\0\r\n--B--\r\n";
        for (content_type, body, expected) in [
            ("", &b"\xff"[..], vec![part("body", "", b"\xff")]),
            (
                "application/json; charset=utf-8",
                b"{}",
                vec![part("body", "application/json", b"{}")],
            ),
            (
                "application/x-www-form-urlencoded",
                b"a=1&b=x%20y+z&c",
                vec![part("a", "", b"1"), part("b", "", b"x y z"), part("c", "", b"")],
            ),
            (
                "Multipart/Form-Data; boundary=B",
                multipart.as_bytes(),
                vec![
                    part("data", "text/plain", b"hello"),
                    part("x", "", b"1"),
                    part("y", "application/octet-stream", b"\0"),
                ],
            ),
        ] {
            assert_eq!(
                parts(content_type, Bytes::copy_from_slice(body)).await.unwrap(),
                expected,
                "{content_type}"
            );
        }
    }

    #[tokio::test]
    async fn refuses_malformed_forms() {
        for (content_type, body) in [
            ("multipart/form-data; boundary=B", "garbage"),
            (
                "multipart/form-data; boundary=B",
                "--B\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n1",
            ),
        ] {
            let refused =
                parts(content_type, Bytes::from_static(body.as_bytes())).await.unwrap_err();
            assert_eq!((refused.status, refused.exception), (400, Exception::BadRequest));
            assert!(refused.message.starts_with("The body is no multipart form: "), "{refused}");
        }
    }

    #[tokio::test]
    async fn without_a_boundary_a_body_is_one_part() {
        let found = parts("multipart/form-data", Bytes::from_static(b"x")).await.unwrap();
        assert_eq!(found, [part("body", "multipart/form-data", b"x")]);
    }

    #[test]
    fn parts_are_joined_with_their_lengths() {
        let (data, said) = join(&[part("a", "text/plain", b"12"), part("b", "", b"3")]).unwrap();
        assert_eq!(data, b"\x03\x00\x00\x00123");
        assert_eq!(
            said,
            json!([{"name": "a", "content_type": "text/plain", "length": 2}, {"name": "b", "content_type": "", "length": 1}])
        );
        assert_eq!(join(&[]).unwrap(), (vec![0; 4], json!([])));
    }
}
