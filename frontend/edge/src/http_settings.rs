//! The settings that all edges over HTTP have.

use std::sync::Arc;
use std::time::Duration;

use pharos::access::Restrictions;
use pharos::service::SharedService;
use pharos_listener::receiving::Budget;

use crate::access::{Access, Forward};
use crate::cors::Origins;
use crate::policy::{Policy, ServerPolicy};
use crate::response_timing::ResponseTiming;

/// The settings of an edge over HTTP.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// `--http-max-input-size`: the maximum bytes of a request's JSON and, separately, of its
    /// binary data.
    pub max_input_size: u64,
    /// `--http-restricted-api`.
    pub restricted: Arc<Restrictions>,
    /// The tokens that requests must present.
    pub access: Access,
    /// `--http-header-forward-pattern`.
    pub forward: Forward,
    /// `--http-body-timeout-secs`; zero disables the timeout.
    pub body_timeout: Duration,
    /// The memory budget for request bodies that are being received.
    pub budget: Budget,
    /// `--response-timing`.
    pub timing: ResponseTiming,
    /// `--allowed-origins`.
    pub origins: Arc<Origins>,
    /// Whether the port serves `/metrics`.
    pub serves_metrics: bool,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            max_input_size: 64 << 20,
            restricted: Arc::default(),
            access: Access::default(),
            forward: Forward::default(),
            body_timeout: Duration::from_secs(60),
            budget: Budget::default(),
            timing: ResponseTiming::default(),
            origins: Arc::default(),
            serves_metrics: false,
        }
    }
}

impl HttpSettings {
    /// Returns the policy of a port with these tokens and restrictions.
    pub fn policy(&self, service: SharedService) -> Arc<dyn Policy> {
        let Self { access, restricted, timing, .. } = self.clone();
        Arc::new(ServerPolicy { service, access, restricted, timing })
    }
}
