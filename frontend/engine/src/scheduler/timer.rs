//! Wakes drivers at points in time, with the precision of the system's high-resolution timers.
//!
//! Queue delays are often a few hundred microseconds, finer than the runtime's timer (1 ms), so one thread waits for the
//! earliest deadline of all models and runs the driver's turn itself; large batches are copied elsewhere.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pharos::timeline::Instant;
use tokio::runtime::Handle;

use super::Driver;
use pharos_os::clock;

/// The alarm clock that all drivers share.
pub(crate) struct Timer {
    alarms: Mutex<Alarms>,
    changed: Condvar,
    /// For what would take long on the timer's thread.
    runtime: Option<Handle>,
}

/// By time, and for equal times by driver; each driver has one at most.
type Alarms = BTreeMap<(Instant, usize), Weak<Driver>>;

impl Timer {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread could be started.
    pub(crate) fn start() -> std::io::Result<Arc<Self>> {
        let runtime = Handle::try_current().ok();
        let timer = Arc::new(Self { alarms: Mutex::default(), changed: Condvar::new(), runtime });
        let weak = Arc::downgrade(&timer);
        std::thread::Builder::new().name("timer".into()).spawn(move || {
            while let Some(timer) = weak.upgrade() {
                timer.wait_and_fire();
            }
        })?;
        Ok(timer)
    }

    /// Calls the driver once, at `at` or as soon after it as the system allows, instead of at the time `overtaken`.
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

    /// Where work can go that would take long on the timer's thread.
    pub(super) fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }

    /// Waits for the earliest alarm (a second at most, so that a dropped timer's thread ends) and calls its driver.
    fn wait_and_fire(&self) {
        let mut alarms = self.lock();
        let wait = alarms.first_key_value().map_or(Duration::from_secs(1), |((at, _), _)| *at - clock::now());
        if !wait.is_zero() {
            let waited = self.changed.wait_timeout(alarms, wait.min(Duration::from_secs(1)));
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            return;
        }
        let alarm = alarms.pop_first();
        drop(alarms);
        if let Some(((at, _), driver)) = alarm
            && let Some(driver) = driver.upgrade()
        {
            driver.handle_timeout(at);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Alarms> {
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
