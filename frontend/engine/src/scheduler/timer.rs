//! Wakes drivers at deadlines, with the precision of the system's high-resolution timers.
//!
//! Queue delays are often a few hundred microseconds, finer than the runtime's timer (1 ms). One
//! thread therefore waits for the earliest deadline of all models and runs the driver's turn
//! itself, except for copying large batches.

use std::collections::BTreeMap;
use std::collections::btree_map::OccupiedEntry;
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex, MutexGuard};
use pharos::timeline::Instant;
use tokio::runtime::Handle;

use super::Driver;
use pharos_os::clock;

/// The timer that all drivers share. Its thread ends when it is dropped.
pub(crate) struct Timer {
    queue: Arc<AlarmQueue>,
    /// Runs work that would block the timer's thread for long.
    runtime: Option<Handle>,
}

/// What the timer shares with its thread.
#[derive(Default)]
struct AlarmQueue {
    alarms: Mutex<Alarms>,
    changed: Condvar,
}

#[derive(Default)]
struct Alarms {
    /// Ordered by time, then by driver; each driver has at most one alarm.
    waiting: BTreeMap<(Instant, usize), Weak<Driver>>,
    /// Whether the timer was dropped.
    ended: bool,
}

impl Timer {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start() -> std::io::Result<Arc<Self>> {
        let timer = Self::without_thread();
        let queue = timer.queue.clone();
        std::thread::Builder::new().name("timer".into()).spawn(move || queue.run())?;
        Ok(timer)
    }

    /// Creates a timer whose alarms only [`Timer::fire`] rings.
    pub(crate) fn without_thread() -> Arc<Self> {
        Arc::new(Self { queue: Arc::default(), runtime: Handle::try_current().ok() })
    }

    /// Schedules one call of the driver at `at`, and removes its alarm at the time `overtaken`.
    pub(crate) fn arm(&self, at: Instant, overtaken: Option<Instant>, driver: Weak<Driver>) {
        let number = driver.as_ptr().addr();
        let mut alarms = self.queue.lock();
        if let Some(overtaken) = overtaken {
            alarms.waiting.remove(&(overtaken, number));
        }
        let earliest = alarms.waiting.first_key_value().is_none_or(|((first, _), _)| at < *first);
        alarms.waiting.insert((at, number), driver);
        if earliest {
            self.queue.changed.notify_one();
        }
    }

    /// Returns the runtime for work that would block the timer's thread for long.
    pub(super) fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }

    /// Calls the driver of the earliest alarm, if it is due. Returns whether one was.
    #[cfg(test)]
    pub(crate) fn fire(&self) -> bool {
        self.queue.fire()
    }

    /// Returns the time of the earliest alarm.
    #[cfg(test)]
    pub(crate) fn next(&self) -> Option<Instant> {
        self.queue.lock().waiting.first_key_value().map(|((at, _), _)| *at)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.queue.lock().ended = true;
        self.queue.changed.notify_one();
    }
}

impl AlarmQueue {
    /// Calls drivers at the times of their alarms until the timer is dropped.
    fn run(&self) {
        loop {
            if self.fire() {
                continue;
            }
            let mut alarms = self.lock();
            if alarms.ended {
                return;
            }
            match alarms.waiting.first_key_value().map(|((at, _), _)| *at - clock::now()) {
                None => self.changed.wait(&mut alarms),
                Some(wait) if wait.is_zero() => (),
                Some(wait) => {
                    self.changed.wait_for(&mut alarms, wait);
                }
            }
        }
    }

    /// Calls the driver of the earliest alarm, if it is due. Returns whether one was.
    fn fire(&self) -> bool {
        let mut alarms = self.lock();
        let due = alarms.waiting.first_entry().filter(|first| first.key().0 <= clock::now());
        let Some(((at, _), driver)) = due.map(OccupiedEntry::remove_entry) else { return false };
        drop(alarms);
        if let Some(driver) = driver.upgrade() {
            driver.handle_timeout(at);
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, Alarms> {
        self.alarms.lock()
    }
}
