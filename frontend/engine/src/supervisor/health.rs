//! The published state of an instance: written by its task, read by metrics, readiness checks and schedulers.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pharos::metrics::labels::InstanceState;
use pharos::timeline::Instant;

use super::outage::{Loss, Next};
use crate::scheduler::placement::Placement;
use crate::wire::SharedLink;

/// The state of an instance that the metrics show; none before its start and after its end.
#[derive(Default)]
pub(super) struct ReportedState(AtomicU8);

impl ReportedState {
    pub(super) fn get(&self) -> Option<InstanceState> {
        Self::decode(self.0.load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, state: Option<InstanceState>) {
        self.0.store(Self::encode(state), Ordering::Relaxed);
    }

    /// Ends the state. Returns the last one.
    pub(super) fn take(&self) -> Option<InstanceState> {
        Self::decode(self.0.swap(Self::encode(None), Ordering::Relaxed))
    }

    fn encode(state: Option<InstanceState>) -> u8 {
        state.map_or(0, |state| state as u8 + 1)
    }

    fn decode(number: u8) -> Option<InstanceState> {
        InstanceState::ALL.get(usize::from(number.checked_sub(1)?)).copied()
    }
}

/// The published state of an instance.
#[derive(Default)]
pub(super) struct Health {
    /// The placement that the instance serves now. Locked only to copy or replace it.
    placement: Mutex<Arc<Placement>>,
    pub(super) ready: AtomicBool,
    /// Whether it counts as permanently lost: it is still restarted, but requests do not wait for it.
    pub(super) broken: AtomicBool,
    /// The state in the metrics: 0 for none, else the state's number plus one.
    pub(super) reported: ReportedState,
    /// The time of the first of several consecutive losses; 0 while it is not lost.
    pub(super) lost: AtomicU64,
    /// The first loss since the last healthy period; 0 before any loss.
    pub(super) first_loss: AtomicU64,
    /// The id of its process; 0 while it has none.
    pub(super) pid: AtomicU32,
    /// Whether it is loaded but kept out of scheduling, so that requests cannot wait for it.
    pub(super) passive: bool,
    /// The connection to its process while it is ready. Locked only to copy or replace it.
    link: Mutex<Option<SharedLink>>,
    /// Why it is not ready, if the cause is not its process. Locked only to copy or replace it.
    failure: Mutex<Option<String>>,
    /// Its last loss, until it is ready again. Locked only to copy or change it.
    loss: Mutex<Option<Loss>>,
}

impl Health {
    pub(super) fn new(placement: &Placement) -> Self {
        Self { placement: Mutex::new(Arc::new(placement.clone())), passive: placement.passive, ..Self::default() }
    }

    pub(super) fn placement(&self) -> Arc<Placement> {
        self.placement.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the placement that the instance serves. Its process gets the new name at its next start.
    pub(super) fn assign(&self, placement: Placement) {
        *self.placement.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(placement);
    }

    /// Returns the state of the instance; `None` after it has ended.
    pub(super) fn state(&self) -> Option<InstanceState> {
        self.reported.get()
    }

    /// Returns the time of the first of several consecutive losses; `None` while it is not lost.
    pub(super) fn lost(&self) -> Option<Instant> {
        Some(Instant(self.lost.load(Ordering::Relaxed))).filter(|since| since.0 != 0)
    }

    /// Returns since when requests have waited for it, if it is not ready after a loss.
    pub(super) fn waited_for(&self) -> Option<Instant> {
        let since = Some(Instant(self.first_loss.load(Ordering::Relaxed))).filter(|since| since.0 != 0);
        since.filter(|_| !self.ready.load(Ordering::Relaxed))
    }

    pub(super) fn set_link(&self, link: Option<SharedLink>) {
        *self.link.lock().unwrap_or_else(PoisonError::into_inner) = link;
    }

    /// Returns the connection to its process while it is ready.
    pub(super) fn link(&self) -> Option<SharedLink> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_failure(&self, failure: Option<String>) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
    }

    /// Returns why it is not ready, if known.
    pub(super) fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_loss(&self, loss: Option<Loss>) {
        *self.loss.lock().unwrap_or_else(PoisonError::into_inner) = loss;
    }

    /// Sets its next start, if it has been lost.
    pub(super) fn set_next(&self, next: Next) {
        if let Some(loss) = &mut *self.loss.lock().unwrap_or_else(PoisonError::into_inner) {
            loss.next = next;
        }
    }

    /// Returns its last loss, if it has not been ready since.
    pub(super) fn loss(&self) -> Option<Loss> {
        self.loss.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records that it is ready, with the connection to its process.
    pub(super) fn set_ready(&self, link: SharedLink) {
        self.set_link(Some(link));
        // First, so that requests also wait for it after its next loss.
        self.broken.store(false, Ordering::Relaxed);
        self.ready.store(true, Ordering::Relaxed);
        self.lost.store(0, Ordering::Relaxed);
        self.set_failure(None);
        self.set_loss(None);
    }

    /// Returns whether it is ready or may become ready soon.
    pub(super) fn can_serve(&self) -> bool {
        !self.passive && (self.ready.load(Ordering::Relaxed) || !self.broken.load(Ordering::Relaxed))
    }
}
