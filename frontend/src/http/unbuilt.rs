//! Routes of extensions that this version does not have: each answers 501, names what is missing and is counted.

use axum::extract::State;
use axum::response::Response;
use pharos::error::InferError;

use super::Edge;
use crate::engine::Route;

/// The refusal of something that is not built.
pub(super) fn refusal(feature: &str) -> InferError {
    InferError::unsupported(format!("{feature} is not supported by this version of the server"))
}

fn refuse(edge: &Edge, route: Route, feature: &str) -> Response {
    edge.pending(route).finish(Err(refusal(feature)))
}

pub(super) async fn load(State(edge): State<Edge>) -> Response {
    refuse(&edge, Route::RepositoryLoad, "loading models on request")
}

pub(super) async fn unload(State(edge): State<Edge>) -> Response {
    refuse(&edge, Route::RepositoryUnload, "unloading models on request")
}
