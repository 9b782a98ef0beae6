//! The repository's index.

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::Request;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::repository::{self, IndexEntry};
use serde::Serialize;
use serde_json::value::RawValue;

use super::body::{self, Read};
use super::json::{object, parse_error};
use super::{Edge, answer};
use crate::engine::Route;

/// The most bytes of a question to the index: it has one member.
const MAX_BODY: u64 = 64 << 10;

object! {
    /// The question: absent, empty, or which entries.
    Question { ready: &'a RawValue }
}

/// One entry of the answer.
#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

impl<'a> From<&'a IndexEntry> for Entry<'a> {
    fn from(entry: &'a IndexEntry) -> Self {
        Self {
            name: &entry.name,
            // A number, but text in the protocol.
            version: entry.version.map(|version| version.to_string()),
            state: entry.state.map(repository::State::as_str),
            reason: Some(entry.reason.as_str()).filter(|reason| !reason.is_empty()),
        }
    }
}

pub(super) async fn index(State(edge): State<Edge>, request: Request<Body>) -> Response {
    let pending = edge.pending(Route::RepositoryIndex);
    let result = answer_index(&edge, request.into_body()).await;
    pending.finish(result)
}

async fn answer_index(edge: &Edge, body: Body) -> Result<Response, InferError> {
    let body = match body::read(body, MAX_BODY, false).await? {
        Read::Whole(body) => body,
        Read::TooLarge(size) => {
            let message = format!("the body has {size} bytes; a question to the index has at most {MAX_BODY}");
            return Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, message));
        }
    };
    let entries = edge.engine.repository_index(ready_only(&body.join())?);
    answer::json_of(&entries.iter().map(Entry::from).collect::<Vec<_>>())
}

fn ready_only(body: &[u8]) -> Result<bool, InferError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(false);
    }
    let question: Question<'_> = serde_json::from_slice(body).map_err(parse_error)?;
    match question.ready.map(RawValue::get) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(InferError::malformed("Invalid value for 'ready': expected a boolean")),
    }
}
