//! The sum of the increments of a counter that no line of a metric log contains yet. Any thread
//! adds to it; the writer of the log takes it if it is listed.

use super::atomic::add;
use crate::shm::atomic::{AtomicBool, AtomicU64, Ordering};

/// A sum that is listed if an increment was added since it was taken.
#[derive(Debug)]
pub(crate) struct HeldSum {
    /// The bits of an f64.
    sum: AtomicU64,
    listed: AtomicBool,
}

impl HeldSum {
    /// Returns a sum of 0, which is not listed.
    pub(crate) fn new() -> Self {
        Self { sum: AtomicU64::new(0), listed: AtomicBool::new(false) }
    }

    /// Adds an increment. Returns whether the caller has to list the sum, so that it is taken.
    pub(crate) fn add(&self, increment: f64) -> bool {
        add(&self.sum, increment);
        !self.listed.swap(true, Ordering::AcqRel)
    }

    /// Takes the sum, which is no longer listed.
    ///
    /// The flag comes first: an increment that is added in between is part of this sum, or listed
    /// again. It is swapped, not stored, so that increments whose caller has found the flag set are
    /// seen here.
    pub(crate) fn take(&self) -> f64 {
        self.listed.swap(false, Ordering::AcqRel);
        f64::from_bits(self.sum.swap(0, Ordering::Relaxed))
    }
}
