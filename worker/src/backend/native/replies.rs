//! What a library is handed to answer requests with.

use std::sync::Arc;

use pharos_backend::{Reply, Responder};

use super::slots::Slot;

/// `pharos_response`.
pub(super) type Responding = Slot<Answer>;
/// `pharos_responder`.
pub(super) type Detached = Slot<Arc<Responder>>;

/// What a response is of.
pub(super) enum Answer {
    /// The batch that is executed: it is [`Running::open`](super::running::Running::open).
    OfBatch,
    /// A request that the library answers by itself.
    Own(Arc<Responder>, Reply),
}
