//! The HTTP edge: KServe v2 over HTTP/1.1 and HTTP/2 in clear text, with Triton's extensions (spec
//! 1.1, 1.3).
//!
//! Handlers translate between HTTP and the verbs of a `pharos::service::Service` and make no other
//! decisions. Query strings are accepted and ignored. A [`pharos_edge::Call`] counts every request
//! once.

mod answer;
pub mod cloud;
pub mod codec;
mod compression;
pub mod dashboard;
mod data;
mod dispatch;
pub mod fuzzing;
mod generate;
mod health;
mod infer;
mod json;
mod logging;
pub mod metrics;
mod model;
mod openai;
mod parse;
mod pieces;
mod render;
mod repository;
mod routes;
mod server;
mod shared_memory;
mod trace;
mod v1;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use pharos::access::Restrictions;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::metrics::labels::Listener;
use pharos::service::SharedService;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use dispatch::Dispatch;
pub use routes::{V2, router};

use pharos_edge::access::{Access, Forward};
use pharos_edge::http_service::{HttpService, count_unparsed};
use pharos_edge::response_timing::ResponseTiming;
use pharos_edge::{Policy, ServerPolicy};
use pharos_listener as listener;
use pharos_listener::PhaseReceiver;
use pharos_listener::receiving::Budget;
use pharos_listener::receiving::body::{self, Read};
use pharos_os::clock;

/// The settings of the HTTP edge.
#[derive(Clone, Debug)]
pub struct Settings {
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
}

/// Returns the default connection settings of an HTTP listener.
pub fn connections() -> listener::Settings {
    listener::Settings::new(Listener::Http)
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_input_size: 64 << 20,
            restricted: Arc::default(),
            access: Access::default(),
            forward: Forward::default(),
            body_timeout: Duration::from_secs(60),
            budget: Budget::default(),
            timing: ResponseTiming::default(),
        }
    }
}

/// The maximum bytes of a body that has only a few members.
const MAX_SHORT_BODY: u64 = 64 << 10;

/// The state that all handlers share.
#[derive(Clone)]
pub(crate) struct Edge {
    service: SharedService,
    settings: Arc<Settings>,
    /// The time of its creation at the start of the server, in seconds since 1970.
    created: u64,
}

impl Settings {
    /// Returns the policy of a port with these tokens and restrictions.
    fn policy(&self, service: SharedService) -> Arc<dyn Policy> {
        let Self { access, restricted, timing, .. } = self.clone();
        Arc::new(ServerPolicy { service, access, restricted, timing })
    }
}

impl Edge {
    fn new(service: SharedService, settings: Settings) -> Self {
        Self { service, settings: Arc::new(settings), created: clock::wall_ms() / 1000 }
    }

    /// Reads the whole body of a request that has only a few members.
    ///
    /// # Errors
    /// Fails if the body exceeds 64 KiB or arrives too slowly.
    async fn read_short(&self, body: Body, what: &str) -> Result<Bytes, InferError> {
        match body::read(&self.settings.budget, body, MAX_SHORT_BODY).await? {
            Read::Whole(body) => Ok(body.join()),
            Read::TooLarge(size) => {
                let text = format!(
                    "body of {size} bytes is too large: {what} has at most {MAX_SHORT_BODY} bytes"
                );
                Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text))
            }
        }
    }
}

/// Spawns a task that serves the v2 protocol on `listener` until `phases` signals shutdown and all
/// requests in flight are answered.
#[must_use]
pub fn serve(
    listener: TcpListener,
    service: SharedService,
    settings: Settings,
    connections: listener::Settings,
    phases: PhaseReceiver,
) -> JoinHandle<()> {
    let body_timeout = settings.body_timeout;
    let dispatch = HttpService::new(Dispatch::new(service.clone(), settings), body_timeout);
    tokio::spawn(listener::serve(listener, connections, dispatch, count_unparsed(service), phases))
}

/// Returns the answer for an unknown path.
fn not_found() -> Response {
    answer::error_text(StatusCode::NOT_FOUND, "Not Found")
}

/// Returns the answer for a method that the path does not support.
fn wrong_method() -> Response {
    answer::error_text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
}

#[cfg(test)]
mod tests;
