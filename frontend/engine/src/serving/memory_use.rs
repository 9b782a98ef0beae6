//! How much memory the models use together, for a limit of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The memory that all models use or have reserved.
#[derive(Debug, Default)]
pub(crate) struct MemoryUse {
    /// The most bytes that models may use; `None` without a limit.
    limit: Option<u64>,
    // Locked only to read or change the numbers.
    totals: Mutex<Totals>,
}

/// Numbers of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Of all model versions that are loaded, being loaded or ending.
    pub(crate) used: u64,
    /// Of those for which memory is reserved and whose load has not begun.
    pub(crate) reserved: u64,
    /// Of those that are being loaded.
    pub(crate) loading: u64,
    /// Of those that are ending.
    pub(crate) ending: u64,
}

/// What a model version does with its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Reserved,
    Loading,
    Loaded,
    Ending,
}

/// The memory of one model version; counted until it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryShare {
    of: Arc<MemoryUse>,
    state: Mutex<ShareState>,
}

#[derive(Clone, Copy, Debug)]
struct ShareState {
    bytes: u64,
    stage: Stage,
}

impl MemoryUse {
    pub(crate) fn new(limit: Option<u64>) -> Arc<Self> {
        Arc::new(Self { limit, totals: Mutex::default() })
    }

    /// The most bytes that models may use; `None` without a limit.
    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    pub(crate) fn totals(&self) -> Totals {
        *self.lock()
    }

    /// Counts `bytes` as used until the returned share is dropped.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> MemoryShare {
        let share =
            MemoryShare { of: self.clone(), state: Mutex::new(ShareState { bytes: 0, stage: Stage::Reserved }) };
        share.change(|state| state.bytes = bytes);
        share
    }

    fn lock(&self) -> MutexGuard<'_, Totals> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryShare {
    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Moves `bytes`, or all if there are fewer, to a new share.
    pub(crate) fn split(&self, bytes: u64) -> Self {
        let mut state = self.lock();
        let bytes = bytes.min(state.bytes);
        state.bytes -= bytes;
        Self { of: self.of.clone(), state: Mutex::new(ShareState { bytes, ..*state }) }
    }

    /// Records that the load begins.
    pub(crate) fn begin_load(&self) {
        self.change(|state| state.stage = Stage::Loading);
    }

    /// Records the measured number of bytes of a loaded version.
    pub(crate) fn set(&self, bytes: u64) {
        self.change(|state| {
            state.bytes = bytes;
            if state.stage != Stage::Ending {
                state.stage = Stage::Loaded;
            }
        });
    }

    /// Records that the version ends, so that its memory is free soon.
    pub(crate) fn end(&self) {
        self.change(|state| state.stage = Stage::Ending);
    }

    fn change(&self, change: impl FnOnce(&mut ShareState)) {
        let mut state = self.lock();
        let before = *state;
        change(&mut state);
        let mut totals = self.of.lock();
        totals.used = totals.used - before.bytes + state.bytes;
        before.stage.total(&mut totals).iter_mut().for_each(|total| **total -= before.bytes);
        state.stage.total(&mut totals).iter_mut().for_each(|total| **total += state.bytes);
    }

    fn lock(&self) -> MutexGuard<'_, ShareState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stage {
    /// Returns the sum of the versions in this stage, apart from that of all.
    fn total(self, totals: &mut Totals) -> Option<&mut u64> {
        match self {
            Self::Reserved => Some(&mut totals.reserved),
            Self::Loading => Some(&mut totals.loading),
            Self::Loaded => None,
            Self::Ending => Some(&mut totals.ending),
        }
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.change(|state| state.bytes = 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_counted_until_they_are_dropped() {
        let memory = MemoryUse::new(Some(1000));
        let totals = |used, reserved, loading, ending| Totals { used, reserved, loading, ending };
        let (first, second) = (memory.reserve(100), memory.reserve(50));
        assert_eq!((memory.limit(), memory.totals()), (Some(1000), totals(150, 150, 0, 0)));
        first.begin_load();
        assert_eq!(memory.totals(), totals(150, 50, 100, 0));
        first.set(120);
        assert_eq!((first.bytes(), memory.totals()), (120, totals(170, 50, 0, 0)));
        first.end();
        first.set(30);
        first.end();
        assert_eq!(memory.totals(), totals(80, 50, 0, 30));
        drop(first);
        let third = second.split(20);
        third.begin_load();
        assert_eq!((second.bytes(), third.bytes(), memory.totals()), (30, 20, totals(50, 30, 20, 0)));
        drop(second);
        drop(third);
        assert_eq!(memory.totals(), Totals::default());
    }
}
