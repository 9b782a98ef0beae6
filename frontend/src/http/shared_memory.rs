//! Client shared memory is not built yet. Unregistering everything succeeds and the status is empty, because there is
//! never anything registered and clients ask for both as a matter of course; registering is refused.

use axum::Router;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::StatusCode;
use pharos::error::{ErrorCode, InferError, Reason};

use super::unbuilt::refusal;
use super::{Edge, answer};
use crate::engine::Route;

/// One kind of shared memory: its word in paths and texts, and how its requests are counted.
#[derive(Clone, Copy)]
struct Kind {
    word: &'static str,
    status: Route,
    register: Route,
    unregister: Route,
}

const KINDS: [Kind; 2] = [
    Kind {
        word: "system",
        status: Route::SystemSharedMemoryStatus,
        register: Route::SystemSharedMemoryRegister,
        unregister: Route::SystemSharedMemoryUnregister,
    },
    Kind {
        word: "cuda",
        status: Route::CudaSharedMemoryStatus,
        register: Route::CudaSharedMemoryRegister,
        unregister: Route::CudaSharedMemoryUnregister,
    },
];

/// Adds the routes of both kinds.
pub(super) fn routes(mut router: Router<Edge>) -> Router<Edge> {
    for kind in KINDS {
        let base = format!("/v2/{}sharedmemory", kind.word);
        let status = async move |State(edge): State<Edge>| edge.pending(kind.status).finish(Ok(answer::json("[]")));
        let unregister = async move |State(edge): State<Edge>| {
            edge.pending(kind.unregister).finish(Ok(answer::empty(StatusCode::OK)))
        };
        let register = async move |State(edge): State<Edge>| register(&edge, kind);
        let region_status =
            async move |State(edge): State<Edge>, region: Option<Path<String>>| region_status(&edge, kind, region);
        router = router
            .route(&format!("{base}/status"), get(status))
            .route(&format!("{base}/unregister"), post(unregister))
            .route(&format!("{base}/region/{{region}}/status"), get(region_status))
            .route(&format!("{base}/region/{{region}}/unregister"), post(unregister))
            .route(&format!("{base}/region/{{region}}/register"), post(register));
    }
    router
}

fn region_status(edge: &Edge, kind: Kind, region: Option<Path<String>>) -> Response {
    let region = region.map(|Path(region)| region).unwrap_or_default();
    let message = format!("Unable to find {} shared memory region: '{region}'", kind.word);
    edge.pending(kind.status).finish(Err(InferError::new(ErrorCode::NotFound, Reason::SharedMemory, message)))
}

fn register(edge: &Edge, kind: Kind) -> Response {
    edge.pending(kind.register).finish(Err(refusal(&format!("registering {} shared memory", kind.word))))
}
