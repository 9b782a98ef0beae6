//! The only place in the frontend that reads a clock, and the waits for a time that simulations can
//! pass.

use std::time::Duration;

use pharos::timeline::Instant;
use rustix::time::{ClockId, clock_gettime};

/// Returns the time of CLOCK_MONOTONIC.
#[allow(clippy::disallowed_methods)]
pub fn now() -> Instant {
    if let Some(now) = virtual_time::now() {
        return now;
    }
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Instant(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Waits until a time of CLOCK_MONOTONIC, to the millisecond.
pub async fn sleep_until(at: Instant) {
    match virtual_time::now() {
        Some(_) => virtual_time::Sleep::until(at).await,
        None => tokio::time::sleep(at - now()).await,
    }
}

/// Waits for a time, to the millisecond.
pub async fn sleep(time: Duration) {
    sleep_until(now() + time).await;
}

/// Waits for a future for at most `limit`, to the millisecond. Returns `None` if it takes longer.
pub async fn timeout<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        result = future => Some(result),
        () = sleep(limit) => None,
    }
}

/// Returns the wall-clock time in nanoseconds since 1970, for comparison with the clocks of other
/// machines.
#[allow(clippy::disallowed_methods)]
pub fn wall_ns() -> u64 {
    if let Some(now) = virtual_time::now() {
        return now.0;
    }
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the wall-clock time in milliseconds since 1970, for display, never for durations.
pub fn wall_ms() -> u64 {
    wall_ns() / 1_000_000
}

/// A time that simulations set, which replaces both clocks for the calling thread.
pub mod virtual_time {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Waker};

    use pharos::timeline::Instant;

    /// Whether any thread has a virtual time: servers pay one load for this module.
    static USED: AtomicBool = AtomicBool::new(false);

    /// Sleeps in the order of their ends, and of their beginnings.
    type Sleepers = BTreeMap<(Instant, u64), Waker>;

    thread_local! {
        static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
        static NEXT: Cell<u64> = const { Cell::new(0) };
        static SLEEPERS: RefCell<Sleepers> = const { RefCell::new(BTreeMap::new()) };
    }

    /// Sets the time of the calling thread, and ends the sleeps until then.
    pub fn set(now: Instant) {
        USED.store(true, Ordering::Relaxed);
        NOW.set(Some(now));
        while let Some(waker) = SLEEPERS.with_borrow_mut(|all| {
            let first = all.first_entry().filter(|first| first.key().0 <= now);
            first.map(|first| first.remove())
        }) {
            waker.wake();
        }
    }

    /// Returns when the first sleep of the calling thread ends.
    pub fn next() -> Option<Instant> {
        SLEEPERS.with_borrow(|all| all.keys().next().map(|(at, _)| *at))
    }

    /// Returns the time of the calling thread, if it has been set.
    pub(crate) fn now() -> Option<Instant> {
        if USED.load(Ordering::Relaxed) { NOW.get() } else { None }
    }

    /// A wait for a time of the calling thread.
    pub(super) struct Sleep {
        key: (Instant, u64),
    }

    impl Sleep {
        pub(super) fn until(at: Instant) -> Self {
            Self { key: (at, NEXT.replace(NEXT.get() + 1)) }
        }
    }

    impl Future for Sleep {
        type Output = ();

        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            if now().is_none_or(|now| now >= self.key.0) {
                return Poll::Ready(());
            }
            SLEEPERS.with_borrow_mut(|all| all.insert(self.key, cx.waker().clone()));
            Poll::Pending
        }
    }

    impl Drop for Sleep {
        fn drop(&mut self) {
            // The thread may end.
            let _ = SLEEPERS.try_with(|all| all.borrow_mut().remove(&self.key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sleeps_end_at_their_times() {
        let begun = now();
        sleep(Duration::from_millis(2)).await;
        assert!(now() - begun >= Duration::from_millis(2));
        assert_eq!(timeout(Duration::from_millis(1), std::future::pending::<()>()).await, None);
        assert_eq!(timeout(Duration::ZERO, async { 5 }).await, Some(5));
    }

    #[tokio::test]
    async fn virtual_time_passes_only_when_it_is_set() {
        let second = |number: u64| Instant(number * 1_000_000_000);
        virtual_time::set(second(1));
        let sleepers = async {
            assert_eq!(timeout(Duration::from_secs(1), std::future::pending::<()>()).await, None);
            assert_eq!(now(), second(2));
            sleep(Duration::from_secs(5)).await;
        };
        let driver = async {
            let mut ends = Vec::new();
            loop {
                // The sleepers go on meanwhile.
                for _ in 0..3 {
                    tokio::task::yield_now().await;
                }
                let Some(next) = virtual_time::next() else { return ends };
                ends.push(next);
                virtual_time::set(next);
            }
        };
        let (ends, ()) = tokio::join!(driver, sleepers);
        assert_eq!(ends, [second(2), second(7)]);
        assert_eq!((now(), virtual_time::next()), (second(7), None));
    }
}
