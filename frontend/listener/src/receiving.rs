//! Limits the memory of requests that are being received, over all listeners, so that clients
//! cannot exhaust the machine's memory. Bytes count when they are received, not when they are
//! declared; decompressed data counts too. Bodies that arrive in one piece are not counted.
//! Requests beyond the limit are refused.

pub mod body;
pub mod coding;
pub mod grpc;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pharos_os::threads;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The memory limit and its use. Cheap to clone; all clones share it.
#[derive(Clone, Debug)]
pub struct Budget(Arc<State>);

#[derive(Debug)]
struct State {
    most: u64,
    used: AtomicU64,
    /// Limits the threads that compress or decompress, so that cores remain for requests.
    coders: Arc<Semaphore>,
}

/// The error of a reservation beyond the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// The limit.
    pub(crate) most: u64,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the requests being received exceed the memory limit of {} bytes; try again later, or \
             raise --receive-memory-byte-size",
            self.most
        )
    }
}

/// The part of the budget that one request uses; released when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    bytes: u64,
}

impl Budget {
    /// Returns a budget of `most` bytes.
    pub fn new(most: u64) -> Self {
        let coders = Arc::new(Semaphore::new((threads::processors() / 2).max(1)));
        Self(Arc::new(State { most, used: AtomicU64::new(0), coders }))
    }

    /// Returns a budget without a limit that shares the limit on compressing threads.
    #[must_use]
    pub fn without_limit(&self) -> Self {
        Self(Arc::new(State {
            most: u64::MAX,
            used: AtomicU64::new(0),
            coders: self.0.coders.clone(),
        }))
    }

    /// Returns an empty reservation.
    pub fn reserve(&self) -> Reservation {
        Reservation { budget: self.clone(), bytes: 0 }
    }

    /// Waits for permission to compress or decompress on one thread, which lasts until the permit
    /// is dropped.
    pub async fn coder(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        self.0.coders.clone().acquire_owned().await.ok()
    }
}

impl Default for Budget {
    /// Returns a budget without a limit.
    fn default() -> Self {
        Self::new(u64::MAX)
    }
}

impl Reservation {
    /// Reserves more bytes.
    ///
    /// # Errors
    /// The limit would be exceeded; the reservation is unchanged.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), Full> {
        let State { most, used, .. } = &*self.budget.0;
        let bytes = bytes as u64;
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| sum <= most);
        used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| Full { most: *most })?;
        self.bytes += bytes;
        Ok(())
    }

    /// Takes over the bytes of another reservation.
    pub(crate) fn absorb(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Releases all bytes.
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
    fn reservations_share_a_limit_and_release_it() {
        let budget = Budget::new(10);
        let mut one = budget.reserve();
        let mut other = budget.reserve();
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
