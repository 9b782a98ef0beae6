//! Errors as clients of the OpenAI API receive them.
//!
//! The body is `{"error":{"message","type","param","code"}}`. `type` and `code` have OpenAI's
//! texts. Clients of OpenAI's libraries choose the exception by the HTTP status alone.

use serde::Serialize;

/// The longest part of a client's value that an error message quotes, in characters.
pub const MAX_QUOTED_CHARACTERS: usize = 64;

/// An error of the API, with its HTTP status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status.
    pub status: u16,
    /// The member `type` of the JSON form.
    pub kind: &'static str,
    /// What happened, with which value, and what is allowed.
    pub message: String,
    /// The field of the request at fault, in dotted form: `messages[0].content`.
    pub param: Option<String>,
    /// A code that programs compare, such as `model_not_found`.
    pub code: Option<&'static str>,
    /// The seconds after which a retry makes sense, for the header `Retry-After`.
    pub retry_after_s: Option<u32>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after_s: None }
    }

    /// Returns the error of a request that is invalid as a whole (400).
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", message)
    }

    /// Returns the error of a request with an invalid field (400). `param` names the field in
    /// dotted form.
    pub fn invalid_field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::invalid_request(message) }
    }

    /// Returns the error of a prompt that does not fit into the context of the model (400,
    /// `context_length_exceeded`).
    pub fn context_length_exceeded(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid_field(param, message) }
    }

    /// Returns the error of a model name that is not served (404, `model_not_found`).
    pub fn unknown_model(name: &str) -> Self {
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(
                404,
                "invalid_request_error",
                format!("the model `{}` does not exist", quoted(name)),
            )
        }
    }

    /// Returns the error of a missing or wrong key (401, `invalid_api_key`).
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self { code: Some("invalid_api_key"), ..Self::new(401, "invalid_request_error", message) }
    }

    /// Returns the error of a body with more than `limit` bytes (413, `content_too_large`).
    pub fn too_large(limit: usize) -> Self {
        Self {
            code: Some("content_too_large"),
            ..Self::new(
                413,
                "invalid_request_error",
                format!("the body of the request has more than {limit} bytes"),
            )
        }
    }

    /// Returns the error of a client with too many requests (429, `rate_limit_exceeded`).
    /// `retry_after_s` is in seconds.
    pub fn rate_limited(message: impl Into<String>, retry_after_s: Option<u32>) -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            retry_after_s,
            ..Self::new(429, "rate_limit_error", message)
        }
    }

    /// Returns the error of a server or model that cannot serve now (503). `retry_after_s` is in
    /// seconds.
    pub fn unavailable(message: impl Into<String>, retry_after_s: Option<u32>) -> Self {
        Self { retry_after_s, ..Self::new(503, "unavailable_error", message) }
    }

    /// Returns the error of a failure that the request did not cause (500).
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "server_error", message)
    }

    /// Returns the error of a feature that the model or the server does not have (501).
    pub fn not_implemented(message: impl Into<String>) -> Self {
        Self::new(501, "not_supported_error", message)
    }

    /// Returns the body of the HTTP response, as JSON.
    pub fn to_json(&self) -> Vec<u8> {
        let body = Body {
            message: &self.message,
            r#type: self.kind,
            param: self.param.as_deref(),
            code: self.code,
        };
        // Serialisation of texts cannot fail; an empty body is the harmless answer if it did.
        serde_json::to_vec(&Envelope { error: body }).unwrap_or_default()
    }

    /// Returns the error as an event of a stream that has already begun (server-sent events).
    /// `[DONE]` follows it as a separate event.
    pub fn to_event(&self) -> Vec<u8> {
        let mut event = b"data: ".to_vec();
        event.extend_from_slice(&self.to_json());
        event.extend_from_slice(b"\n\n");
        event
    }
}

/// Returns a text of a client, shortened to [`MAX_QUOTED_CHARACTERS`].
pub(crate) fn quoted(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTED_CHARACTERS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_four_members_in_order() {
        let error = ApiError::invalid_field("messages[0].content", "wrong \"thing\"");
        assert_eq!(
            String::from_utf8(error.to_json()).unwrap(),
            r#"{"error":{"message":"wrong \"thing\"","type":"invalid_request_error","param":"messages[0].content","code":null}}"#
        );
        assert_eq!(error.to_string(), "wrong \"thing\"");
    }

    #[test]
    fn an_event_is_one_line_of_data() {
        let event = String::from_utf8(ApiError::internal("a\nb").to_event()).unwrap();
        assert!(event.starts_with("data: {\"error\":"));
        assert!(event.ends_with("}\n\n"));
        assert_eq!(event.matches('\n').count(), 2);
    }

    #[test]
    fn statuses_and_codes() {
        let check = |error: ApiError, status: u16, code: Option<&str>| {
            assert_eq!(error.status, status);
            assert_eq!(error.code, code);
        };
        check(ApiError::unknown_model("x"), 404, Some("model_not_found"));
        check(ApiError::unauthorized("x"), 401, Some("invalid_api_key"));
        check(ApiError::too_large(5), 413, Some("content_too_large"));
        check(ApiError::rate_limited("x", Some(2)), 429, Some("rate_limit_exceeded"));
        check(ApiError::unavailable("x", None), 503, None);
        check(ApiError::internal("x"), 500, None);
        check(ApiError::not_implemented("x"), 501, None);
        check(
            ApiError::context_length_exceeded("messages", "x"),
            400,
            Some("context_length_exceeded"),
        );
        assert_eq!(ApiError::rate_limited("x", Some(2)).retry_after_s, Some(2));
        assert_eq!(ApiError::unknown_model("x").param.as_deref(), Some("model"));
    }

    #[test]
    fn long_values_are_shortened_at_a_character() {
        assert_eq!(quoted(&"é".repeat(64)), "é".repeat(64));
        assert_eq!(quoted(&"é".repeat(65)), format!("{}...", "é".repeat(64)));
        assert!(ApiError::unknown_model(&"m".repeat(9000)).message.len() < 200);
    }
}
