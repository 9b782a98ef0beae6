//! Counts and logs a call when it ends: a failed stream of responses has its status in the trailers.

use http::{HeaderMap, Response};
use pharos::error::Reason;
use pharos::service::Management;
use tonic::body::Body;
use tonic::{Code, Status};

use super::failure::{self, StreamFailure};
use crate::rest::{AccessLog, BodyEnd, ObservedBody};
use pharos_listener::answering::{Account, Calls};

/// The count and the log line of a call. If dropped before the call ends, it counts and logs the call as cancelled.
pub(super) struct CallEnd<S: Management> {
    /// `None` for a call of the v2 protocol, whose edge counts it.
    pub(super) count: Option<Account<Calls<S>>>,
    /// The reason for which the call was refused.
    pub(super) refused: Option<Reason>,
    /// `None` if requests are not logged.
    pub(super) logged: Option<AccessLog>,
}

impl<S: Management> CallEnd<S> {
    /// Ends the call with this response: now if its status is in the headers, else when the trailers come.
    pub(super) fn with(self, mut response: Response<Body>) -> Response<Body> {
        if let Some(code) = code_in_headers(&response) {
            self.end(code, failure::reason_of(&response));
            return response;
        }
        if self.count.is_none() && self.logged.is_none() {
            return response;
        }
        let failure = response.extensions_mut().remove::<StreamFailure>();
        let ended = move |end: BodyEnd<'_, Status>| {
            let code = match end {
                BodyEnd::Trailers(trailers) => code_in(trailers).unwrap_or(Code::Unknown),
                BodyEnd::Failed(status) => status.code(),
                // As clients read a call without a status.
                BodyEnd::Complete => Code::Unknown,
            };
            self.end(code, failure.and_then(|failure| failure.reason()));
        };
        response.map(|body| Body::new(ObservedBody::new(body, ended)))
    }

    fn end(self, code: Code, failed: Option<Reason>) {
        let Self { count, refused, logged } = self;
        if let Some(count) = count {
            let failed = || failed.unwrap_or_else(|| reason(code));
            count.end(code as u16, refused.or_else(|| (code != Code::Ok).then(failed)));
        }
        if let Some(logged) = logged {
            logged.answered(code as u16);
        }
    }
}

/// Returns the status of a response whose headers are its trailers, or of one that is not gRPC.
fn code_in_headers(response: &Response<Body>) -> Option<Code> {
    code_in(response.headers()).or_else(|| (!response.status().is_success()).then_some(Code::Internal))
}

fn code_in(headers: &HeaderMap) -> Option<Code> {
    headers.get("grpc-status").map(|code| Code::from_bytes(code.as_bytes()))
}

/// Returns the reason of a status that has none.
fn reason(code: Code) -> Reason {
    match code {
        Code::PermissionDenied => Reason::Unauthenticated,
        Code::NotFound => Reason::UnknownModel,
        Code::InvalidArgument => Reason::Invalid,
        Code::Unavailable => Reason::NotReady,
        Code::Unimplemented => Reason::Unsupported,
        Code::Cancelled => Reason::Cancelled,
        _ => Reason::Backend,
    }
}
