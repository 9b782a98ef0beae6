//! How much of each memory the models use together, for limits of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pharos::repository::memory_budget::{Memory, MemoryBytes};
use tokio::sync::watch;

/// The memory that all models use or have reserved.
#[derive(Debug, Default)]
pub(crate) struct MemoryUse {
    /// The most bytes that models may use, with an entry for each limited memory.
    limits: MemoryBytes,
    // Locked only to read or change the numbers.
    totals: Mutex<BTreeMap<Memory, Totals>>,
    /// Sent to after each change of the numbers.
    changes: watch::Sender<()>,
}

/// Numbers of bytes in one memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Of all model versions that are loaded, being loaded or ending.
    pub(crate) used: u64,
    /// Of those for which memory is reserved and whose load has not begun.
    pub(crate) reserved: u64,
    /// Memory of versions that are being loaded.
    pub(crate) loading: u64,
    /// Memory of versions that are ending.
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

#[derive(Clone, Debug)]
struct ShareState {
    bytes: MemoryBytes,
    stage: Stage,
}

impl MemoryUse {
    pub(crate) fn new(limits: MemoryBytes) -> Arc<Self> {
        Arc::new(Self { limits, totals: Mutex::default(), changes: watch::Sender::default() })
    }

    /// The most bytes that models may use, with an entry for each limited memory.
    pub(crate) fn limits(&self) -> &MemoryBytes {
        &self.limits
    }

    /// Returns whether any memory is limited.
    pub(crate) fn is_limited(&self) -> bool {
        self.limits.iter().next().is_some()
    }

    pub(crate) fn totals(&self, memory: Memory) -> Totals {
        self.lock().get(&memory).copied().unwrap_or_default()
    }

    /// Returns the bytes that are missing in each memory for `needed` more bytes; memories that
    /// have enough, or of which nothing is needed, have no entry.
    pub(crate) fn missing(&self, needed: &MemoryBytes) -> MemoryBytes {
        self.beyond(needed.iter().filter(|(_, bytes)| *bytes > 0), |totals| totals.used)
    }

    /// Returns the same as if the models that are ending had ended.
    pub(crate) fn missing_after_ends(&self, needed: &MemoryBytes) -> MemoryBytes {
        self.beyond(needed.iter().filter(|(_, bytes)| *bytes > 0), Totals::lasting)
    }

    /// Returns the bytes that models use beyond the limit in each memory, without versions that are
    /// ending; other memories have no entry.
    pub(crate) fn excess(&self) -> MemoryBytes {
        self.beyond(self.limits.iter().map(|(memory, _)| (memory, 0)), Totals::lasting)
    }

    fn beyond(
        &self,
        needed: impl Iterator<Item = (Memory, u64)>,
        used: impl Fn(&Totals) -> u64,
    ) -> MemoryBytes {
        let beyond = needed.filter_map(|(memory, bytes)| {
            let used = used(&self.totals(memory));
            let limit = self.limits.get(memory)?;
            Some((memory, used.saturating_add(bytes).saturating_sub(limit)))
                .filter(|(_, bytes)| *bytes > 0)
        });
        beyond.collect()
    }

    /// Returns a receiver that is notified after each change of the numbers.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Counts `bytes` as used until the returned share is dropped.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: MemoryBytes) -> MemoryShare {
        let state = ShareState { bytes: MemoryBytes::default(), stage: Stage::Reserved };
        let share = MemoryShare { of: self.clone(), state: Mutex::new(state) };
        share.change(|state| state.bytes = bytes);
        share
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Memory, Totals>> {
        self.totals.lock()
    }
}

impl Totals {
    /// Returns the bytes that are used when the models that are ending have ended.
    fn lasting(&self) -> u64 {
        self.used - self.ending
    }
}

impl MemoryShare {
    /// Returns the number of bytes in each memory.
    pub(crate) fn bytes(&self) -> MemoryBytes {
        self.lock().bytes.clone()
    }

    /// Moves `bytes`, or all if there are fewer, to a new share.
    pub(crate) fn split(&self, bytes: &MemoryBytes) -> Self {
        let mut state = self.lock();
        let moved: MemoryBytes = bytes
            .iter()
            .map(|(memory, bytes)| (memory, bytes.min(state.bytes.of(memory))))
            .collect();
        state.bytes.subtract(&moved);
        Self {
            of: self.of.clone(),
            state: Mutex::new(ShareState { bytes: moved, stage: state.stage }),
        }
    }

    /// Records that the load begins.
    pub(crate) fn begin_load(&self) {
        self.change(|state| state.stage = Stage::Loading);
    }

    /// Records the measured number of bytes of a loaded version.
    pub(crate) fn set(&self, bytes: MemoryBytes) {
        self.change(|state| {
            state.bytes = bytes;
            if state.stage != Stage::Ending {
                state.stage = Stage::Loaded;
            }
        });
    }

    /// Adds the bytes of another share, which has none afterwards.
    pub(crate) fn merge(&self, other: &Self) {
        let more = other.bytes();
        // In this order, so that no other load takes them meanwhile.
        self.change(|state| state.bytes.add(&more));
        other.change(|state| state.bytes = MemoryBytes::default());
    }

    /// Records that the version ends, so that its memory is free soon.
    pub(crate) fn end(&self) {
        self.change(|state| state.stage = Stage::Ending);
    }

    fn change(&self, change: impl FnOnce(&mut ShareState)) {
        let mut state = self.lock();
        let before = state.clone();
        change(&mut state);
        let mut totals = self.of.lock();
        for (memory, bytes) in before.bytes.iter() {
            let totals = totals.entry(memory).or_default();
            totals.used -= bytes;
            before.stage.total(totals).iter_mut().for_each(|total| **total -= bytes);
        }
        for (memory, bytes) in state.bytes.iter() {
            let totals = totals.entry(memory).or_default();
            totals.used += bytes;
            state.stage.total(totals).iter_mut().for_each(|total| **total += bytes);
        }
        drop(totals);
        self.of.changes.send_replace(());
    }

    fn lock(&self) -> MutexGuard<'_, ShareState> {
        self.state.lock()
    }
}

impl Stage {
    /// Returns the sum of the versions in this stage.
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
        self.change(|state| state.bytes = MemoryBytes::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(main: u64, gpu: u64) -> MemoryBytes {
        MemoryBytes::from_iter([(Memory::Main, main), (Memory::Gpu(0), gpu)])
    }

    #[test]
    fn shares_are_counted_until_they_are_dropped() {
        let memory = MemoryUse::new(bytes(1000, 10));
        let of = |memory: &MemoryUse| [memory.totals(Memory::Main), memory.totals(Memory::Gpu(0))];
        let totals = |used, reserved, loading, ending| Totals { used, reserved, loading, ending };
        let first = memory.reserve(bytes(100, 1));
        let second = memory.reserve(bytes(50, 0));
        assert_eq!(of(&memory), [totals(150, 150, 0, 0), totals(1, 1, 0, 0)]);
        first.begin_load();
        assert_eq!(of(&memory), [totals(150, 50, 100, 0), totals(1, 0, 1, 0)]);
        first.set(bytes(120, 2));
        assert_eq!(
            (first.bytes(), of(&memory)),
            (bytes(120, 2), [totals(170, 50, 0, 0), totals(2, 0, 0, 0)])
        );
        first.end();
        first.set(bytes(30, 2));
        first.end();
        assert_eq!(of(&memory), [totals(80, 50, 0, 30), totals(2, 0, 0, 2)]);
        drop(first);
        let third = second.split(&bytes(20, 5));
        third.begin_load();
        assert_eq!((second.bytes(), third.bytes()), (bytes(30, 0), bytes(20, 0)));
        assert_eq!(of(&memory), [totals(50, 30, 20, 0), Totals::default()]);
        drop(second);
        drop(third);
        assert_eq!(of(&memory), [Totals::default(); 2]);
    }

    #[test]
    fn all_that_wait_for_memory_learn_of_each_change() {
        let memory = MemoryUse::new(bytes(1000, 10));
        let mut waiting = [memory.changes(), memory.changes()];
        let mut have_changed = || {
            let have_changed =
                waiting.each_ref().map(|one| one.has_changed().is_ok_and(|changed| changed));
            waiting.iter_mut().for_each(|one| one.mark_unchanged());
            have_changed
        };
        assert_eq!(have_changed(), [false; 2]);
        let share = memory.reserve(bytes(100, 1));
        assert_eq!([have_changed(), have_changed()], [[true; 2], [false; 2]]);
        share.end();
        assert_eq!([have_changed(), have_changed()], [[true; 2], [false; 2]]);
        drop(share);
        assert_eq!(have_changed(), [true; 2]);
    }

    #[test]
    fn only_memories_that_a_model_needs_can_be_missing() {
        let memory = MemoryUse::new(bytes(1000, 10));
        assert!(memory.is_limited() && !MemoryUse::new(MemoryBytes::default()).is_limited());
        let share = memory.reserve(bytes(900, 12));
        assert_eq!(memory.missing(&bytes(100, 0)), MemoryBytes::default());
        assert_eq!(memory.missing(&bytes(101, 1)), bytes(1, 3));
        assert_eq!(memory.excess(), MemoryBytes::from_iter([(Memory::Gpu(0), 2)]));
        assert_eq!(
            memory.missing(&MemoryBytes::from_iter([(Memory::Gpu(7), 5)])),
            MemoryBytes::default()
        );
        share.end();
        assert_eq!(memory.missing(&bytes(101, 1)), bytes(1, 3));
        assert_eq!(
            (memory.missing_after_ends(&bytes(101, 1)), memory.excess()),
            Default::default()
        );
    }
}
