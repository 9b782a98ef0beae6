//! The policy of the ports: TorchServe's keys, and the tokens and restrictions of the server, for
//! the v2 protocol over HTTP; the count of TorchServe's own calls over gRPC. TorchServe's own
//! endpoints, and the port of gRPC, check access before the call begins.

use http::HeaderMap;
use pharos::error::Reason;
use pharos::service::{Protocol, Route, Service};
use pharos_edge::access::routes::class;
use pharos_edge::response_timing::ResponseTiming;
use pharos_edge::{Policy, Refusal};
use tonic::Code;

use super::Shared;
use crate::guard::{RequiredAccess, purpose};
use crate::token::Purpose;

impl Policy for Shared {
    fn service(&self) -> &dyn Service {
        &*self.service
    }

    fn timing(&self) -> &ResponseTiming {
        &self.timing
    }

    fn check(&self, protocol: Protocol, route: Route, headers: &HeaderMap) -> Result<(), Refusal> {
        let class = class(route);
        // Unknown paths need the key of the port that serves the protocol.
        let wanted =
            RequiredAccess { route, class, purpose: purpose(class, Some(Purpose::Inference)) };
        self.guard.check(protocol, wanted, headers).map_err(|denied| denied.refusal(protocol))
    }

    fn counts_calls_at_end(&self) -> bool {
        true
    }

    fn reason_of(&self, code: Code) -> Reason {
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
}
