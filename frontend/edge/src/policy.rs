//! What differs between the ports of the server for every request: access, counts and times.

use std::sync::Arc;

use http::HeaderMap;
use pharos::access::Restrictions;
use pharos::error::Reason;
use pharos::service::{Protocol, Route, Service, SharedService};
use tonic::Code;

use crate::access::routes::{Class, class};
use crate::access::{Access, Denied, GRPC_PREFIX, Guard, Refusal};
use crate::response_timing::ResponseTiming;

/// The rules of a port.
pub trait Policy: Send + Sync + 'static {
    /// Returns the server, which counts requests, names their tenants, samples their traces and
    /// reports its load.
    fn service(&self) -> &dyn Service;

    /// Returns which answers carry times.
    fn timing(&self) -> &ResponseTiming;

    /// Checks that a request with these headers may use a route. An unknown route may pass: it has
    /// no handler.
    ///
    /// # Errors
    /// The answer to a request without access.
    fn check(&self, protocol: Protocol, route: Route, headers: &HeaderMap) -> Result<(), Refusal>;

    /// Returns whether requests are counted.
    fn counts(&self) -> bool {
        true
    }

    /// Returns whether a call over gRPC is counted when its last message is sent, and not when its
    /// response begins.
    fn counts_calls_at_end(&self) -> bool {
        false
    }

    /// Returns the reason of a gRPC code that no handler gave: of the transport, or of a status
    /// without a reason.
    fn reason_of(&self, code: Code) -> Reason {
        match code {
            Code::Ok | Code::Unimplemented => Reason::Unsupported,
            Code::Cancelled => Reason::Cancelled,
            Code::ResourceExhausted | Code::OutOfRange => Reason::TooLarge,
            _ => Reason::Malformed,
        }
    }
}

/// The policy of the server's own ports for requests: tokens and restricted APIs.
pub struct ServerPolicy {
    /// The server.
    pub service: SharedService,
    /// The tokens.
    pub access: Access,
    /// The restricted APIs.
    pub restricted: Arc<Restrictions>,
    /// `--response-timing`.
    pub timing: ResponseTiming,
}

impl Policy for ServerPolicy {
    fn service(&self) -> &dyn Service {
        &*self.service
    }

    fn timing(&self) -> &ResponseTiming {
        &self.timing
    }

    fn check(&self, protocol: Protocol, route: Route, headers: &HeaderMap) -> Result<(), Refusal> {
        let prefix = match protocol {
            Protocol::Http => "",
            Protocol::Grpc => GRPC_PREFIX,
        };
        let guard = Guard { access: &self.access, restricted: &self.restricted, prefix };
        if guard.is_open() {
            return Ok(());
        }
        guard.check(route, headers).map_err(|denied| denied.refusal(protocol))
    }
}

/// The policy of a port with metrics: everything on it is open, and nothing is counted, because
/// each scrape would change the metrics that it reads.
pub struct OpenPolicy {
    /// The server.
    pub service: SharedService,
    timing: ResponseTiming,
}

impl OpenPolicy {
    /// Returns the policy of a port with the metrics of this server.
    pub fn new(service: SharedService) -> Self {
        Self { service, timing: ResponseTiming::default() }
    }
}

impl Policy for OpenPolicy {
    fn service(&self) -> &dyn Service {
        &*self.service
    }

    fn timing(&self) -> &ResponseTiming {
        &self.timing
    }

    /// Refuses routes that need access somewhere else.
    fn check(&self, protocol: Protocol, route: Route, _: &HeaderMap) -> Result<(), Refusal> {
        match class(route) {
            Class::Part(_) => Err(Denied::Unknown.refusal(protocol)),
            Class::Open | Class::Unknown => Ok(()),
        }
    }

    fn counts(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use pharos_service_double::EchoService;

    use super::*;

    #[test]
    fn the_open_policy_refuses_other_routes() {
        let policy = OpenPolicy::new(EchoService::default().shared());
        let refused = |route| policy.check(Protocol::Http, route, &HeaderMap::new()).is_err();
        assert!(!refused(Route::Metrics) && refused(Route::Live) && refused(Route::LogSettings));
    }
}
