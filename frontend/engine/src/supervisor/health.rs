//! What others see of an instance: its task writes it, and whoever shows or chooses instances reads it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pharos::metrics::labels::InstanceState;
use pharos::timeline::Instant;

use crate::wire::SharedLink;

/// What others see of an instance.
#[derive(Default)]
pub(super) struct Health {
    /// What the instance is called. Held for a moment.
    name: Mutex<Arc<str>>,
    pub(super) ready: AtomicBool,
    /// It does not come back: it is still restarted, but requests do not wait for it.
    pub(super) broken: AtomicBool,
    /// What the metrics show: 0 for nothing, else one more than the state's number.
    pub(super) shown: AtomicU8,
    /// Since when it has been lost, first of a row of losses; 0 while it is not.
    pub(super) lost: AtomicU64,
    /// The first loss of a row without a healthy time in between; 0 before any loss.
    pub(super) first_loss: AtomicU64,
    /// Its process; 0 while it has none.
    pub(super) pid: AtomicU32,
    /// It is kept out of scheduling: requests can rely on it neither now nor later.
    pub(super) passive: bool,
    /// The connection to its process, while it is ready. Held for a moment.
    link: Mutex<Option<SharedLink>>,
    /// Why it is not ready, if that is not because of its process. Held for a moment.
    trouble: Mutex<Option<String>>,
}

impl Health {
    pub(super) fn new(name: &str, passive: bool) -> Self {
        Self { name: Mutex::new(name.into()), passive, ..Self::default() }
    }

    pub(super) fn name(&self) -> Arc<str> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The instance is called by another name; its process learns the name when it is started again.
    pub(super) fn rename(&self, name: &str) {
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = name.into();
    }

    /// What the instance is doing; `None` when it has ended.
    pub(super) fn state(&self) -> Option<InstanceState> {
        let number = usize::from(self.shown.load(Ordering::Relaxed));
        InstanceState::ALL.get(number.checked_sub(1)?).copied()
    }

    /// Since when it has been lost, first of a row of losses; `None` while it is not.
    pub(super) fn lost(&self) -> Option<Instant> {
        Some(Instant(self.lost.load(Ordering::Relaxed))).filter(|since| since.0 != 0)
    }

    /// Since when requests have waited for it, if it is not ready after a loss.
    pub(super) fn waited_for(&self) -> Option<Instant> {
        let since = Some(Instant(self.first_loss.load(Ordering::Relaxed))).filter(|since| since.0 != 0);
        since.filter(|_| !self.ready.load(Ordering::Relaxed))
    }

    pub(super) fn set_link(&self, link: Option<SharedLink>) {
        *self.link.lock().unwrap_or_else(PoisonError::into_inner) = link;
    }

    /// The connection to its process, while it is ready.
    pub(super) fn link(&self) -> Option<SharedLink> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_trouble(&self, trouble: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// Why it is not ready, as far as that is known.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It is ready, or is worth waiting for.
    pub(super) fn can_serve(&self) -> bool {
        !self.passive && (self.ready.load(Ordering::Relaxed) || !self.broken.load(Ordering::Relaxed))
    }
}
