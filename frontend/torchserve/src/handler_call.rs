//! Translates between TorchServe's requests and calls of a handler. A JSON parameter carries the
//! headers and the parts of a request to the worker, and another one the status, content type and
//! headers of the response back.

use http::header::{
    CONNECTION, CONTENT_LENGTH, InvalidHeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};
use pharos::error::InferError;
use pharos::infer::{InferInput, InferRequest, InferResponse, Parameter};
use pharos::model::envelope::{INPUT, OUTPUT, PARAMETER};
use pharos::tensor::{DataType, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use bytes::Bytes;

use super::form::{self, FormPart};
use super::registry::ModelReference;

/// The headers that frame a response or belong to the connection. A handler's values are dropped,
/// as TorchServe replaces them: with another length than the body's, a client would take the rest
/// of a response for the next response.
const OF_CONNECTION: [HeaderName; 6] =
    [CONNECTION, CONTENT_LENGTH, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

/// A call of a handler, without the parts of the body.
#[derive(Clone, Debug, Default)]
pub struct HandlerCall {
    /// The headers of the request, as passed to the handler.
    pub headers: Map<String, Value>,
    /// Ask the handler to describe the model.
    pub describe: bool,
    /// Ask the handler for an explanation.
    pub explain: bool,
}

/// Converts the headers of a request for a handler. HTTP header names arrive in lower case;
/// handlers get them in title case. As in TorchServe, each byte of a value is a character
/// (ISO-8859-1): a handler that returns the value returns the same bytes.
pub fn headers(all: &HeaderMap) -> Map<String, Value> {
    let mut headers = Map::new();
    for name in all.keys() {
        // As in TorchServe, the last value wins.
        if let Some(value) = all.get_all(name).iter().next_back() {
            let value = value.as_bytes().iter().copied().map(char::from).collect();
            headers.insert(title_case(name.as_str()), Value::String(value));
        }
    }
    headers
}

/// Capitalizes each word of a header name. Names with an underscore are TorchServe's own and are
/// not changed.
fn title_case(name: &str) -> String {
    if name.contains('_') {
        return name.to_owned();
    }
    let mut begins = true;
    let mut title = String::with_capacity(name.len());
    for c in name.chars() {
        title.push(if begins { c.to_ascii_uppercase() } else { c });
        begins = c == '-';
    }
    title
}

/// Creates the request to the engine. `None` if the parts are too long.
pub fn request(
    reference: ModelReference<'_>,
    id: &str,
    parts: &[FormPart],
    call: HandlerCall,
) -> Option<InferRequest> {
    let (data, reply) = form::join(parts)?;
    let HandlerCall { headers, describe, explain } = call;
    let message =
        json!({ "headers": headers, "parts": reply, "describe": describe, "explain": explain });
    let tensor = Tensor { datatype: DataType::Bytes, shape: vec![1, 1], data: data.into() };
    Some(InferRequest {
        model_name: reference.name.to_owned(),
        model_version: reference.version.to_owned(),
        id: id.to_owned(),
        inputs: vec![InferInput { name: INPUT.to_owned(), tensor }],
        parameters: vec![(PARAMETER.to_owned(), Parameter::String(message.to_string()))],
        ..InferRequest::default()
    })
}

/// The handler's description of its response.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct HandlerReply {
    status: Option<u16>,
    reason: Option<String>,
    content_type: Option<String>,
    headers: Map<String, Value>,
}

/// A response to a client.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The HTTP status; 200 if the handler sets none.
    pub status: u16,
    /// The reason phrase.
    pub reason: String,
    /// The headers, including the content type if there is one.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

/// Returns the value of a header in ISO-8859-1, the encoding of HTTP/1.1 and of clients. As in
/// TorchServe, characters outside of it become `?`.
fn latin_1(value: &str) -> Result<HeaderValue, InvalidHeaderValue> {
    let bytes: Vec<u8> = value.chars().map(|c| u8::try_from(c).unwrap_or(b'?')).collect();
    HeaderValue::from_bytes(&bytes)
}

/// Checks the size of a body against `max_response_size`, in bytes.
///
/// # Errors
/// The body is larger.
pub fn check_size(body: &Bytes, most: u64) -> Result<(), InferError> {
    if body.len() as u64 <= most {
        return Ok(());
    }
    let size = body.len();
    Err(InferError::internal(format!(
        "the answer has {size} bytes; max_response_size allows {most}"
    )))
}

/// Converts the engine's response.
///
/// # Errors
/// The worker's response is malformed.
pub fn answer(response: InferResponse) -> Result<Answer, InferError> {
    let wrong =
        |what: String| InferError::internal(format!("invalid response of the worker: {what}"));
    let parameter = response.parameters.iter().find(|(name, _)| name == PARAMETER);
    let reply: HandlerReply = match parameter {
        Some((_, Parameter::String(text))) => {
            serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?
        }
        _ => HandlerReply::default(),
    };
    let output = response.outputs.into_iter().find(|output| output.name == OUTPUT);
    let body = output.map_or_else(Bytes::new, |output| {
        let mut data = output.tensor.data.join();
        // Skip the length prefix of the element.
        if data.len() < 4 { Bytes::new() } else { data.split_off(4) }
    });
    let mut headers = HeaderMap::new();
    let content_type = reply
        .content_type
        .filter(|text| !text.is_empty())
        .map(|text| ("content-type".to_owned(), text));
    let of_handler = reply.headers.into_iter().map(|(name, value)| match value {
        Value::String(text) => (name, text),
        other => (name, other.to_string()),
    });
    for (name, value) in of_handler.chain(content_type) {
        let header = (HeaderName::try_from(&name), latin_1(&value));
        let (Ok(name), Ok(value)) = header else {
            return Err(wrong(format!(
                "'{}: {}' is not a valid header",
                name.escape_debug(),
                value.escape_debug()
            )));
        };
        if !OF_CONNECTION.contains(&name) {
            headers.insert(name, value);
        }
    }
    Ok(Answer {
        status: reply.status.unwrap_or(200),
        reason: reply.reason.unwrap_or_default(),
        headers,
        body,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::infer::InferOutput;
    use pharos::model::envelope;

    use super::*;

    #[test]
    fn a_request_carries_headers_and_parts() {
        let mut all = HeaderMap::new();
        all.insert("content-type", HeaderValue::from_static("text/plain"));
        all.insert("ts_request_sequence_id", HeaderValue::from_static("7"));
        all.append("x-a", HeaderValue::from_static("1"));
        all.append("x-a", HeaderValue::from_static("2"));
        let call = HandlerCall { headers: headers(&all), describe: false, explain: true };
        let request = request(
            ModelReference { name: "m", version: "1.0" },
            "id",
            &[FormPart::bare("a", "12"), FormPart::bare("b", "3")],
            call,
        )
        .unwrap();
        let (name, Parameter::String(text)) = &request.parameters[0] else { unreachable!() };
        let expected = json!({
            "headers": {"Content-Type": "text/plain", "ts_request_sequence_id": "7", "X-A": "2"},
            "parts": [{"name": "a", "content_type": "", "length": 2}, {"name": "b", "content_type": "", "length": 1}],
            "describe": false,
            "explain": true,
        });
        assert_eq!(
            (name.as_str(), serde_json::from_str::<Value>(text).unwrap()),
            (PARAMETER, expected)
        );
        assert_eq!(request.inputs[0].tensor.data.as_slice(), &b"\x03\x00\x00\x00123"[..]);
    }

    fn response(reply: &str, body: &[u8]) -> InferResponse {
        let outputs =
            vec![InferOutput { name: OUTPUT.into(), tensor: envelope::body(body).unwrap() }];
        let parameters = vec![(PARAMETER.to_owned(), Parameter::String(reply.to_owned()))];
        let parameters = if reply.is_empty() { Vec::new() } else { parameters };
        InferResponse { outputs, parameters, ..InferResponse::default() }
    }

    #[test]
    fn converts_the_handlers_response() {
        let plain = answer(response("", b"xy")).unwrap();
        assert_eq!(
            (plain.status, &*plain.reason, &plain.body[..], plain.headers.len()),
            (200, "", &b"xy"[..], 0)
        );
        let reply = r#"{"status": 418, "reason": "Tea", "content_type": "a/b", "headers": {"X-A": "1", "x-b": 2}}"#;
        let other = answer(response(reply, b"")).unwrap();
        assert_eq!((other.status, &*other.reason, other.body.len()), (418, "Tea", 0));
        let header = |name: &str| other.headers.get(name).unwrap().to_str().unwrap();
        assert_eq!((header("x-a"), header("x-b"), header("content-type")), ("1", "2", "a/b"));
        let name = answer(response(r#"{"headers": {"x-a": "caf\u00e9 \u4e2d"}}"#, b"")).unwrap();
        assert_eq!(name.headers.get("x-a").unwrap().as_bytes(), b"caf\xe9 ?");
        assert_eq!(headers(&name.headers).get("X-A").unwrap(), "caf\u{e9} ?");
        let framed = r#"{"headers": {"Content-Length": "30", "transfer-encoding": "chunked", "Connection": "close", "x-a": "1"}}"#;
        let framed = answer(response(framed, b"xy")).unwrap();
        assert_eq!(framed.headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-a"]);
        for wrong in ["{", r#"{"headers": {"a b": "1"}}"#, r#"{"headers": {"a": "\n"}}"#] {
            let error = answer(response(wrong, b"")).unwrap_err();
            assert!(error.message.starts_with("invalid response of the worker: "), "{error}");
        }
    }
}
