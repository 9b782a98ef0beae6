//! The response cache: what makes two requests the same, what is kept of a response, and what goes when room is needed.
//!
//! Nothing here stores or waits: `frontend/engine/src/cache` does, locally or in a Redis that several servers share. An answer
//! from the cache must be the one that the model would have given to that very request; a doubt is a miss.

mod entry;
mod key;
mod lru;

pub use entry::{Entry, Invalid};
pub use key::{Identifier, Identity, Key};
pub use lru::Lru;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
