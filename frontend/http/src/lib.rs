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

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::metrics::labels::Listener;
use pharos::service::SharedService;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use dispatch::Dispatch;
pub use routes::{V2, router};

use pharos_edge::http_service;
pub use pharos_edge::http_settings::HttpSettings as Settings;
use pharos_listener as listener;
use pharos_listener::PhaseReceiver;
use pharos_listener::receiving::body::{self, Read};
pub use pharos_openai::Models;
use pharos_os::clock;

/// Returns the default connection settings of an HTTP listener.
pub fn connections() -> listener::Settings {
    listener::Settings::new(Listener::Http)
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
    /// The language models that clients have asked.
    models: Arc<Models>,
}

impl Edge {
    fn new(service: SharedService, settings: Settings, models: Arc<Models>) -> Self {
        let created = clock::wall_ms() / 1000;
        Self { service, settings: Arc::new(settings), created, models }
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
    models: Arc<Models>,
    connections: listener::Settings,
    phases: PhaseReceiver,
) -> JoinHandle<()> {
    let body_timeout = settings.body_timeout;
    let dispatch = Dispatch::new(service.clone(), settings, models);
    http_service::serve(listener, dispatch, service, body_timeout, connections, phases)
}

/// Spawns a task that serves OpenAI's API on `listener`, with the list of models, the health of the
/// server and its metrics, until `phases` signals shutdown and all requests in flight are answered.
#[must_use]
pub fn serve_openai(
    listener: TcpListener,
    service: SharedService,
    settings: Settings,
    models: Arc<Models>,
    connections: listener::Settings,
    phases: PhaseReceiver,
) -> JoinHandle<()> {
    let body_timeout = settings.body_timeout;
    let dispatch = Dispatch::of_openai(service.clone(), settings, models);
    http_service::serve(listener, dispatch, service, body_timeout, connections, phases)
}

/// Returns the answer for an unknown path, in the form of its API. The models of v1 are KServe's.
fn not_found_at(path: &str) -> Response {
    let is_openai = path.starts_with("/openai/")
        || (path.starts_with("/v1/") && !path.starts_with("/v1/models"));
    if is_openai { pharos_openai::not_found(path) } else { not_found() }
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
