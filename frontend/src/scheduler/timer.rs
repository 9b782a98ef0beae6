//! Wakes drivers at points in time, with the precision of the system's high-resolution timers.
//!
//! Queue delays are often a few hundred microseconds, finer than the runtime's timer (1 ms), so one thread waits for the
//! earliest deadline of all models and runs the driver's turn itself.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pharos::timeline::Instant;

use super::Driver;
use crate::clock;

/// The alarm clock that all drivers share.
pub(crate) struct Timer {
    alarms: Mutex<Alarms>,
    changed: Condvar,
}

#[derive(Default)]
struct Alarms {
    /// Earliest first; ties by number.
    heap: BinaryHeap<Reverse<(Instant, u64)>>,
    drivers: std::collections::HashMap<u64, Weak<Driver>>,
    next: u64,
}

impl Timer {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread could be started.
    pub(crate) fn start() -> std::io::Result<Arc<Self>> {
        let timer = Arc::new(Self { alarms: Mutex::default(), changed: Condvar::new() });
        let weak = Arc::downgrade(&timer);
        std::thread::Builder::new().name("timer".into()).spawn(move || {
            while let Some(timer) = weak.upgrade() {
                timer.wait_and_fire();
            }
        })?;
        Ok(timer)
    }

    /// Calls the driver once, at `at` or as soon after it as the system allows.
    pub(crate) fn arm(&self, at: Instant, driver: Weak<Driver>) {
        let mut alarms = self.lock();
        let number = alarms.next;
        alarms.next += 1;
        alarms.drivers.insert(number, driver);
        let earliest = alarms.heap.peek().is_none_or(|Reverse((first, _))| at < *first);
        alarms.heap.push(Reverse((at, number)));
        if earliest {
            self.changed.notify_one();
        }
    }

    /// Waits for the earliest alarm (a second at most, so that a dropped timer's thread ends) and calls its driver.
    fn wait_and_fire(&self) {
        let mut alarms = self.lock();
        let now = clock::now();
        let wait = alarms.heap.peek().map_or(Duration::from_secs(1), |Reverse((at, _))| *at - now);
        if !wait.is_zero() {
            let waited = self.changed.wait_timeout(alarms, wait.min(Duration::from_secs(1)));
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            return;
        }
        let alarm = alarms.heap.pop().and_then(|Reverse((at, number))| Some((at, alarms.drivers.remove(&number)?)));
        drop(alarms);
        if let Some((at, driver)) = alarm
            && let Some(driver) = driver.upgrade()
        {
            driver.handle_timeout(at);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Alarms> {
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
