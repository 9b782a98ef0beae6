//! Memory of requests that are being received, over all listeners. What a client promises to send costs nothing: bytes are
//! counted when they are here, and what decompression makes of them counts too. Beyond the limit requests are refused, so
//! that clients cannot fill the machine's memory. Bodies that come in one piece are not counted: they do not wait.

pub mod body;
pub mod coding;
pub mod grpc;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The limit and what is used of it. Cheap to clone; all clones share it.
#[derive(Clone, Debug)]
pub struct Budget(Arc<State>);

#[derive(Debug)]
struct State {
    most: u64,
    used: AtomicU64,
    /// One for each thread that may compress or decompress at a time: this work must leave processors to requests.
    coders: Arc<Semaphore>,
}

/// The limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// The limit.
    pub(crate) most: u64,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the server is receiving as much as its memory allows ({} bytes over all requests); try again later, or raise \
             --receive-memory-byte-size",
            self.most
        )
    }
}

/// A part of the budget that one request uses; given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    bytes: u64,
}

impl Budget {
    /// At most `most` bytes at a time.
    pub fn new(most: u64) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let coders = Arc::new(Semaphore::new((processors / 2).max(1)));
        Self(Arc::new(State { most, used: AtomicU64::new(0), coders }))
    }

    /// A reservation of nothing.
    pub fn reserve(&self) -> Reservation {
        Reservation { budget: self.clone(), bytes: 0 }
    }

    /// Waits until one more thread may compress or decompress; it may until the permit is dropped.
    pub async fn coder(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        self.0.coders.clone().acquire_owned().await.ok()
    }
}

impl Default for Budget {
    /// Without a limit.
    fn default() -> Self {
        Self::new(u64::MAX)
    }
}

impl Reservation {
    /// Reserves more.
    ///
    /// # Errors
    /// The limit is reached; the reservation stays as it was.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), Full> {
        let State { most, used, .. } = &*self.budget.0;
        let bytes = bytes as u64;
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| sum <= most);
        used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map_err(|_| Full { most: *most })?;
        self.bytes += bytes;
        Ok(())
    }

    /// Takes over what another one has.
    pub(crate) fn absorb(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Gives everything back.
    pub(crate) fn release(&mut self) {
        if self.bytes > 0 {
            self.budget.0.used.fetch_sub(self.bytes, Ordering::Relaxed);
            self.bytes = 0;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_share_a_limit_and_give_back() {
        let budget = Budget::new(10);
        let (mut one, mut other) = (budget.reserve(), budget.reserve());
        assert_eq!((one.grow(6), other.grow(5)), (Ok(()), Err(Full { most: 10 })));
        assert_eq!((other.grow(4), one.grow(1)), (Ok(()), Err(Full { most: 10 })));
        one.release();
        let mut third = budget.reserve();
        assert_eq!(third.grow(1), Ok(()));
        other.absorb(third);
        one.release();
        assert_eq!((other.grow(5), other.grow(usize::MAX)), (Ok(()), Err(Full { most: 10 })));
        drop(other);
        assert_eq!(budget.0.used.load(Ordering::Relaxed), 0);
    }
}
