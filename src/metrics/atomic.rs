//! Numbers that many threads change without a lock. Relaxed: no update is lost, but none orders
//! other memory. A clone has the value of its moment and does not change with the original.

use crate::shm::atomic::{AtomicI64, AtomicU64, Ordering};

/// A count or a sum of nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub(super) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Sets the value, unless it is below the present one by at most `late`: then it is one that
    /// was set before and arrives late.
    pub(super) fn set_unless_late(&self, value: u64, late: u64) {
        // A late value changes nothing.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |present: u64| {
            (value >= present || present - value > late).then_some(value)
        });
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Clone for Count {
    fn clone(&self) -> Self {
        Self(AtomicU64::new(self.get()))
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub(super) struct Level(AtomicI64);

impl Level {
    pub(super) fn add(&self, delta: i64) {
        self.0.fetch_add(delta, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Clone for Level {
    fn clone(&self) -> Self {
        Self(AtomicI64::new(self.get()))
    }
}

/// Adds to the f64 with these bits.
pub(super) fn add(bits: &AtomicU64, amount: f64) {
    // The closure never returns `None`, so this cannot fail.
    let _ = bits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old: u64| {
        Some((f64::from_bits(old) + amount).to_bits())
    });
}
