//! Client shared memory is not built yet. Unregistering everything succeeds and the status is empty, because there is
//! never anything registered and clients ask for both as a matter of course; registering is refused.

use axum::Router;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use http::{StatusCode, Uri};
use pharos::error::{ErrorCode, InferError, Reason};

use super::unbuilt::refusal;
use super::{Edge, answer};
use crate::engine::Route;

const KINDS: [(&str, &str, Route); 2] =
    [("systemsharedmemory", "system", Route::SystemSharedMemory), ("cudasharedmemory", "cuda", Route::CudaSharedMemory)];

/// Adds the routes of both kinds.
pub(super) fn routes(router: Router<Edge>) -> Router<Edge> {
    let mut router = router;
    for (segment, ..) in KINDS {
        let mut add = |path: String, method: MethodRouter<Edge>| router = std::mem::take(&mut router).route(&path, method);
        add(format!("/v2/{segment}/status"), get(status));
        add(format!("/v2/{segment}/region/{{region}}/status"), get(region_status));
        add(format!("/v2/{segment}/unregister"), post(unregister));
        add(format!("/v2/{segment}/region/{{region}}/unregister"), post(unregister));
        add(format!("/v2/{segment}/region/{{region}}/register"), post(register));
    }
    router
}

/// Which kind a path is about.
fn kind(uri: &Uri) -> (&'static str, Route) {
    let segment = uri.path().split('/').nth(2).unwrap_or_default();
    let found = KINDS.into_iter().find(|(name, ..)| *name == segment);
    found.map_or(("system", Route::SystemSharedMemory), |(_, kind, route)| (kind, route))
}

async fn status(State(edge): State<Edge>, uri: Uri) -> Response {
    edge.pending(kind(&uri).1).finish(Ok(answer::json("[]")))
}

async fn region_status(State(edge): State<Edge>, uri: Uri, region: Option<Path<String>>) -> Response {
    let (kind, route) = kind(&uri);
    let region = region.map(|Path(region)| region).unwrap_or_default();
    let message = format!("Unable to find {kind} shared memory region: '{region}'");
    edge.pending(route).finish(Err(InferError::new(ErrorCode::NotFound, Reason::SharedMemory, message)))
}

async fn unregister(State(edge): State<Edge>, uri: Uri) -> Response {
    edge.pending(kind(&uri).1).finish(Ok(answer::empty(StatusCode::OK)))
}

async fn register(State(edge): State<Edge>, uri: Uri) -> Response {
    let (kind, route) = kind(&uri);
    edge.pending(route).finish(Err(refusal(&format!("registering {kind} shared memory"))))
}
