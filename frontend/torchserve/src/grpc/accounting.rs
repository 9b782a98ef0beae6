//! Counts and logs a call when it ends: a failed stream of responses has its status in the trailers.

use http::Response;
use pharos::error::Reason;
use tonic::body::Body;
use tonic::{Code, Status};

use super::failure::{self, StreamFailure};
use crate::rest::AccessLog;
use pharos_edge::answering::{Account, Calls};
use pharos_edge::observed_body::{BodyEnd, ObservedBody, grpc_status_in_head};

/// The count and the log line of a call. If dropped before the call ends, it counts and logs the call as cancelled.
pub(super) struct CallEnd {
    /// `None` for a call of the v2 protocol, whose edge counts it.
    pub(super) count: Option<Account<Calls>>,
    /// The reason for which the call was refused.
    pub(super) refused: Option<Reason>,
    /// `None` if requests are not logged.
    pub(super) logged: Option<AccessLog>,
}

impl CallEnd {
    /// Ends the call with this response: now if its status is in the headers, else when the trailers come.
    pub(super) fn with(self, mut response: Response<Body>) -> Response<Body> {
        if let Some(code) = grpc_status_in_head(&response) {
            self.end(Code::from_i32(code.into()), failure::reason_of(&response));
            return response;
        }
        if self.count.is_none() && self.logged.is_none() {
            return response;
        }
        let failure = response.extensions_mut().remove::<StreamFailure>();
        let ended = move |end: BodyEnd<'_, Status>| {
            let code = end.grpc_status(|status| status.code() as u16);
            self.end(Code::from_i32(code.into()), failure.and_then(|failure| failure.reason()));
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
