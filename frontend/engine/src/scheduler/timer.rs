//! Wakes drivers at deadlines, with the precision of the system's high-resolution timers.
//!
//! Queue delays are often a few hundred microseconds, finer than the runtime's timer (1 ms). One thread therefore waits for the
//! earliest deadline of all models and runs the driver's turn itself, except for copying large batches.

use std::collections::BTreeMap;
use std::collections::btree_map::OccupiedEntry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pharos::timeline::Instant;
use tokio::runtime::Handle;

use super::Driver;
use pharos_os::clock;

/// The timer that all drivers share.
pub(crate) struct Timer {
    alarms: Mutex<Alarms>,
    changed: Condvar,
    /// Runs work that would block the timer's thread for long.
    runtime: Option<Handle>,
}

/// Ordered by time, then by driver; each driver has at most one alarm.
type Alarms = BTreeMap<(Instant, usize), Weak<Driver>>;

impl Timer {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start() -> std::io::Result<Arc<Self>> {
        let timer = Self::without_thread();
        let weak = Arc::downgrade(&timer);
        std::thread::Builder::new().name("timer".into()).spawn(move || {
            while let Some(timer) = weak.upgrade() {
                timer.wait_and_fire();
            }
        })?;
        Ok(timer)
    }

    /// Creates a timer whose alarms only [`Timer::fire`] rings.
    pub(crate) fn without_thread() -> Arc<Self> {
        let runtime = Handle::try_current().ok();
        Arc::new(Self { alarms: Mutex::default(), changed: Condvar::new(), runtime })
    }

    /// Schedules one call of the driver at `at`, and removes its alarm at the time `overtaken`.
    pub(crate) fn arm(&self, at: Instant, overtaken: Option<Instant>, driver: Weak<Driver>) {
        let number = driver.as_ptr().addr();
        let mut alarms = self.lock();
        if let Some(overtaken) = overtaken {
            alarms.remove(&(overtaken, number));
        }
        let earliest = alarms.first_key_value().is_none_or(|((first, _), _)| at < *first);
        alarms.insert((at, number), driver);
        if earliest {
            self.changed.notify_one();
        }
    }

    /// Returns the runtime for work that would block the timer's thread for long.
    pub(super) fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }

    /// Waits for the earliest alarm (at most a second, so that the thread of a dropped timer ends) and calls its driver.
    fn wait_and_fire(&self) {
        if self.fire() {
            return;
        }
        let alarms = self.lock();
        let wait = alarms.first_key_value().map_or(Duration::from_secs(1), |((at, _), _)| *at - clock::now());
        if !wait.is_zero() {
            let waited = self.changed.wait_timeout(alarms, wait.min(Duration::from_secs(1)));
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Calls the driver of the earliest alarm, if it is due. Returns whether one was.
    pub(crate) fn fire(&self) -> bool {
        let mut alarms = self.lock();
        let due = alarms.first_entry().filter(|first| first.key().0 <= clock::now());
        let Some(((at, _), driver)) = due.map(OccupiedEntry::remove_entry) else { return false };
        drop(alarms);
        if let Some(driver) = driver.upgrade() {
            driver.handle_timeout(at);
        }
        true
    }

    /// Returns the time of the earliest alarm.
    #[cfg(test)]
    pub(crate) fn next(&self) -> Option<Instant> {
        self.lock().first_key_value().map(|((at, _), _)| *at)
    }

    fn lock(&self) -> MutexGuard<'_, Alarms> {
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
