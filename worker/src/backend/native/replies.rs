//! Handles with which a library answers requests.

use std::sync::Arc;

use pharos_backend::{Reply, Responder};

use super::slots::Slot;

/// `pharos_response`.
pub(super) type Responding = Slot<Answer>;
/// `pharos_responder`.
pub(super) type Detached = Slot<Arc<Responder>>;

/// The origin of a response.
pub(super) enum Answer {
    /// The batch being executed; the response is in [`Running::open`](super::running::Running::open).
    OfBatch,
    /// A request that the library answers individually.
    Own(Arc<Responder>, Reply),
}
