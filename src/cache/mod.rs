//! The response cache: the key of a request, the cached part of a response, and eviction.
//!
//! This module does no I/O: `frontend/engine/src/cache` stores entries, locally or in a Redis that
//! several servers share. A cached response must equal the one that the model would have given to
//! the same request; in doubt, a look-up is a miss.

mod entry;
mod key;
mod lru;

pub use entry::{Entry, Invalid};
pub use key::{Identifier, Identity, Key};
pub use lru::Lru;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
