//! Closes connections that wait too long for a request, for the rest of its head, or for the client
//! to read a response.
//!
//! Does not use a timer for each connection: hyper would reset it for each request, which takes 5 %
//! of the time of a small inference. Instead, each connection stores the tick at which it began to
//! wait, and a task scans all connections periodically. A request costs a few stores, and a
//! connection is closed at most one scan after its timeout.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::metrics::labels::Refused;
use tokio::task::AbortHandle;

use super::Phase;
use super::connection_metrics::ConnectionMetrics;
use super::unread_responses::Unread;

/// The minimum and maximum interval of scans. Between them it is a quarter of the shortest timeout.
const SCAN_INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(15));

/// The capacity for connections that a listener keeps.
const IDLE_CAPACITY: usize = 64;

/// The timeouts of a connection; zero disables one.
#[derive(Clone, Copy)]
pub(super) struct Timeouts {
    /// For the head of a request from its first byte; on a new connection, from the start.
    pub(super) head: Duration,
    /// For the next request.
    pub(super) idle: Duration,
    /// For the client to read more of a response.
    pub(super) write: Duration,
}

impl Timeouts {
    fn scan_interval(self) -> Duration {
        let shortest =
            [self.head, self.idle, self.write].into_iter().filter(|time| !time.is_zero()).min();
        shortest.map_or(SCAN_INTERVALS.1, |shortest| {
            (shortest / 4).clamp(SCAN_INTERVALS.0, SCAN_INTERVALS.1)
        })
    }
}

/// The timeouts in ticks.
#[derive(Clone, Copy)]
struct Ticks {
    head: u32,
    idle: u32,
    write: u32,
}

/// The connections of one listener. The scans end when it is dropped.
pub(super) struct Watch(Arc<Connections>);

struct Connections {
    /// The number of scans, from 1.
    tick: Arc<AtomicU32>,
    open: Mutex<Vec<(Arc<Activity>, AbortHandle)>>,
    metrics: ConnectionMetrics,
    /// The timeout for the client to read more of a response.
    write_ticks: u32,
    /// Whether responses on new connections ask the client to close.
    draining: AtomicBool,
}

impl Connections {
    fn open(&self) -> MutexGuard<'_, Vec<(Arc<Activity>, AbortHandle)>> {
        self.open.lock()
    }
}

/// The state of one connection.
pub(super) struct Activity {
    tick: Arc<AtomicU32>,
    peer: Option<SocketAddr>,
    /// Upper half: HTTP/1 requests in flight, during which no wait is timed. Lower half: the tick
    /// at which the wait for a request began.
    state: AtomicU64,
    /// The tick of the first byte of an incomplete head; 0 without one.
    head_since: AtomicU32,
    /// The tick at which a write began to wait for the client; 0 if none waits.
    blocked_since: AtomicU32,
    /// Whether the connection has received a request.
    served: AtomicBool,
    /// Whether the protocol is HTTP/2, which uses pings instead of the idle timeout after the
    /// first request.
    http2: AtomicBool,
    /// Whether the next response asks the client to close the connection.
    closing: AtomicBool,
    /// Whether the connection ends after the requests in flight.
    shutting_down: AtomicBool,
    // Wakes the task that waits for `shutting_down`; held to store or take the waker.
    waiting: Mutex<Option<Waker>>,
    /// HTTP/2 responses that the client has not read.
    unread: Unread,
}

/// One request in flight, in the upper half of `Activity::state`.
const ONE: u64 = 1 << 32;

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The idle timeout expired.
    Idle,
    /// The client was too slow.
    Refused(Refused),
}

impl Watch {
    /// Starts to close connections that exceed their timeouts.
    pub(super) fn start(timeouts: Timeouts, metrics: ConnectionMetrics) -> Self {
        let tick = Arc::new(AtomicU32::new(1));
        let interval = timeouts.scan_interval();
        let ticks = |time: Duration| match time.as_nanos().div_ceil(interval.as_nanos().max(1)) {
            0 => u32::MAX,
            ticks => u32::try_from(ticks).unwrap_or(u32::MAX),
        };
        let ticks = Ticks {
            head: ticks(timeouts.head),
            idle: ticks(timeouts.idle),
            write: ticks(timeouts.write),
        };
        let open = Mutex::default();
        let draining = AtomicBool::new(false);
        let connections =
            Arc::new(Connections { tick, open, metrics, write_ticks: ticks.write, draining });
        let weak = Arc::downgrade(&connections);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(interval).await;
                let Some(connections) = weak.upgrade() else { return };
                connections.scan(ticks);
            }
        });
        Self(connections)
    }

    /// Returns the state of a new connection, which waits for its first request.
    pub(super) fn activity(&self, peer: Option<SocketAddr>) -> Arc<Activity> {
        let state = u64::from(self.0.tick.load(Ordering::Relaxed));
        Arc::new(Activity {
            tick: self.0.tick.clone(),
            peer,
            state: AtomicU64::new(state),
            head_since: AtomicU32::new(0),
            blocked_since: AtomicU32::new(0),
            served: AtomicBool::new(false),
            http2: AtomicBool::new(false),
            closing: AtomicBool::new(self.0.draining.load(Ordering::Relaxed)),
            shutting_down: AtomicBool::new(false),
            waiting: Mutex::default(),
            unread: Unread::new(self.0.write_ticks),
        })
    }

    /// Adds a connection to the scans; `task` serves it.
    pub(super) fn add(&self, activity: Arc<Activity>, task: AbortHandle) {
        let mut open = self.0.open();
        if open.len() == open.capacity() {
            // Clients may open many connections between two scans. Growing by half keeps the mean
            // cost of this constant.
            open.retain(|(_, task)| !task.is_finished());
            let spare = open.len() / 2 + IDLE_CAPACITY;
            open.reserve_exact(spare);
        }
        open.push((activity, task));
    }

    /// Applies a phase of the shutdown to all connections, including later ones. An HTTP/2
    /// connection closes without loss while the server drains: GOAWAY names the last accepted call,
    /// and the client sends others on a new connection. Closing an idle HTTP/1 connection may lose
    /// a request in transit, so responses ask the client to close it, and the server closes
    /// it in [`Phase::Stopping`].
    pub(super) fn set_phase(&self, phase: Phase) {
        let draining = matches!(phase, Phase::Draining | Phase::Stopping);
        for (activity, _) in self.0.open().iter().filter(|_| draining) {
            activity.closing.store(true, Ordering::Relaxed);
            if phase == Phase::Stopping || activity.is_http2() {
                activity.shut_down();
            }
        }
        self.0.draining.store(draining, Ordering::Relaxed);
    }
}

impl Connections {
    fn scan(&self, ticks: Ticks) {
        let now = self.tick.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let mut open = self.open();
        open.retain(|(activity, task)| {
            if task.is_finished() {
                return false;
            }
            let Some(verdict) = activity.verdict(now, ticks) else { return true };
            task.abort();
            if let Verdict::Refused(reason) = verdict {
                self.metrics
                    .refused(reason, &activity.peer, || activity.describe(reason).to_owned());
            }
            false
        });
        open.shrink_to(IDLE_CAPACITY);
    }
}

impl Activity {
    /// Returns why the connection must be closed at tick `now`, if a timeout has expired.
    fn verdict(&self, now: u32, ticks: Ticks) -> Option<Verdict> {
        let over = |since: u32, most: u32| since != 0 && now.wrapping_sub(since) > most;
        let unread = || self.is_http2() && over(self.unread.since(now), ticks.write);
        if over(self.blocked_since.load(Ordering::Relaxed), ticks.write) || unread() {
            return Some(Verdict::Refused(Refused::SlowReader));
        }
        let state = self.state.load(Ordering::Relaxed);
        let served = self.served.load(Ordering::Relaxed);
        let since = state as u32;
        let http2 = self.is_http2();
        if state >= ONE || (http2 && served) {
            return None;
        }
        let new = !served && !http2 && over(since, ticks.head);
        if new || over(self.head_since.load(Ordering::Relaxed), ticks.head) {
            return Some(Verdict::Refused(Refused::HeadTimeout));
        }
        over(since, ticks.idle).then_some(Verdict::Idle)
    }

    /// Describes the cause of a refusal, for the log.
    fn describe(&self, reason: Refused) -> &'static str {
        match reason {
            Refused::SlowReader => "the client does not read its response",
            _ if self.head_since.load(Ordering::Relaxed) == 0 => "the client sent no request",
            _ => "the head of the request is incomplete",
        }
    }

    /// Records that bytes were read.
    pub(super) fn record_read(&self) {
        let awaited = self.state.load(Ordering::Relaxed) < ONE
            && self.head_since.load(Ordering::Relaxed) == 0;
        if awaited && !self.is_http2() {
            self.head_since.store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Records that bytes were written.
    pub(super) fn record_write(&self) {
        if self.blocked_since.load(Ordering::Relaxed) != 0 {
            self.blocked_since.store(0, Ordering::Relaxed);
        }
    }

    /// Records that a write has to wait for the client.
    pub(super) fn record_blocked_write(&self) {
        if self.blocked_since.load(Ordering::Relaxed) == 0 {
            self.blocked_since.store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Records that the protocol is HTTP/2.
    pub(super) fn set_http2(&self) {
        self.http2.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_http2(&self) -> bool {
        self.http2.load(Ordering::Relaxed)
    }

    /// Ends the connection after the requests in flight.
    fn shut_down(&self) {
        self.shutting_down.store(true, Ordering::Release);
        if let Some(waker) = self.waiting.lock().take() {
            waker.wake();
        }
    }

    /// Waits until the connection must end. Each later poll costs one atomic load, because a
    /// connection's task has one waker, which is stored at the first poll.
    pub(super) fn wait_for_shutdown(&self) -> impl Future<Output = ()> {
        let mut stored = false;
        std::future::poll_fn(move |cx| {
            if !stored {
                *self.waiting.lock() = Some(cx.waker().clone());
                stored = true;
            }
            if self.shutting_down.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
        })
    }

    /// Varies a time by up to a tenth, depending on the client's port, so that connections opened
    /// together are not all reopened together.
    pub(super) fn spread(&self, time: Duration) -> Duration {
        let port = self.peer.map_or(0, |peer| u32::from(peer.port()) % 200);
        time * (900 + port) / 1000
    }

    /// Records that the head of a request is complete.
    pub(super) fn begin(&self) {
        self.head_since.store(0, Ordering::Relaxed);
        if !self.served.load(Ordering::Relaxed) {
            self.served.store(true, Ordering::Relaxed);
        }
    }

    /// Records that a request is in flight until the result is dropped.
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        self.state.fetch_add(ONE, Ordering::Relaxed);
        Busy(self.clone())
    }

    /// Returns the responses that the client has not read, and the number of scans.
    pub(super) fn unread(&self) -> (&Unread, &Arc<AtomicU32>) {
        (&self.unread, &self.tick)
    }

    fn end(&self) {
        let tick = u64::from(self.tick.load(Ordering::Relaxed));
        let finished = |state: u64| Some((state - ONE) & !(ONE - 1) | tick);
        // The closure never gives `None`, so this cannot fail.
        let _ = self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, finished);
    }
}

/// A request from its head to the end of its response, or of its body. No timeout for the next
/// request applies meanwhile.
pub(super) struct Busy(Arc<Activity>);

impl Busy {
    /// Returns whether the client is to close the connection after the request.
    pub(super) fn is_closing(&self) -> bool {
        self.0.closing.load(Ordering::Relaxed)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::metrics::labels::Listener;

    use super::*;

    const TICKS: Ticks = Ticks { head: 10, idle: 50, write: 20 };

    fn watch(timeouts: Timeouts) -> Watch {
        Watch::start(timeouts, ConnectionMetrics::new(Listener::Http, None))
    }

    fn without_timeouts() -> Watch {
        watch(Timeouts { head: Duration::ZERO, idle: Duration::ZERO, write: Duration::ZERO })
    }

    /// Returns the tick at which a connection is closed, scanned from tick 1, and why.
    fn closed(activity: &Activity) -> Option<(u32, Verdict)> {
        (1..200).find_map(|now| Some((now, activity.verdict(now, TICKS)?)))
    }

    #[tokio::test]
    async fn each_wait_has_its_timeout() {
        let watch = without_timeouts();
        let refused = |at, reason| Some((at, Verdict::Refused(reason)));
        let with = |change: &dyn Fn(&Activity)| {
            let activity = watch.activity(None);
            change(&activity);
            closed(&activity)
        };
        let busy = |a: &Activity| {
            a.begin();
            a.state.fetch_add(ONE, Ordering::Relaxed);
        };
        assert_eq!(with(&|_| ()), refused(12, Refused::HeadTimeout), "no bytes received");
        assert_eq!(
            with(&|a| a.record_read()),
            refused(12, Refused::HeadTimeout),
            "the head is incomplete"
        );
        assert_eq!(with(&|a| a.set_http2()), Some((52, Verdict::Idle)), "no request received");
        assert_eq!(with(&busy), None, "a request is in flight");
        let waits = |a: &Activity| {
            busy(a);
            a.end();
        };
        assert_eq!(with(&waits), Some((52, Verdict::Idle)), "waits for a second request");
        let second = |a: &Activity| {
            waits(a);
            a.record_read();
        };
        assert_eq!(
            with(&second),
            refused(12, Refused::HeadTimeout),
            "the second head is incomplete"
        );
        let unread = |a: &Activity| {
            busy(a);
            a.record_blocked_write();
        };
        assert_eq!(with(&unread), refused(22, Refused::SlowReader));
        let read = |a: &Activity| {
            unread(a);
            a.record_write();
        };
        assert_eq!(with(&read), None, "the client reads its response again");
        let http2 = |a: &Activity| {
            a.set_http2();
            a.begin();
            a.record_read();
        };
        assert_eq!(with(&http2), None, "pings replace the idle timeout");
    }

    #[tokio::test]
    async fn only_connections_that_wait_too_long_are_closed() {
        let idle = Duration::from_millis(50);
        let watch = watch(Timeouts { head: Duration::ZERO, idle, write: Duration::ZERO });
        let [waiting, working] = [(); 2].map(|()| {
            let activity = watch.activity(None);
            let task = tokio::spawn(std::future::pending::<()>());
            watch.add(activity.clone(), task.abort_handle());
            (activity, task)
        });
        working.0.state.fetch_add(ONE, Ordering::Relaxed);
        let ended = tokio::time::timeout(Duration::from_secs(20), waiting.1).await;
        assert!(ended.unwrap().unwrap_err().is_cancelled());
        assert!(!working.1.is_finished());
        drop(Busy(working.0));
        let ended = tokio::time::timeout(Duration::from_secs(20), working.1).await;
        assert!(ended.unwrap().unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn ended_connections_are_forgotten_before_the_next_scan() {
        let watch = without_timeouts();
        let open = watch.activity(None);
        watch.add(open.clone(), tokio::spawn(std::future::pending::<()>()).abort_handle());
        for _ in 0..1000 {
            let task = tokio::spawn(std::future::ready(()));
            watch.add(watch.activity(None), task.abort_handle());
            task.await.unwrap();
        }
        let known = watch.0.open();
        assert!(known.len() <= 2 * IDLE_CAPACITY, "{}", known.len());
        assert!(
            known.iter().any(|(activity, _)| Arc::ptr_eq(activity, &open)),
            "an open connection is kept"
        );
    }

    #[tokio::test]
    async fn ages_are_spread_by_a_tenth() {
        let spread = |port: u16| {
            let activity =
                without_timeouts().activity(Some(SocketAddr::from(([127, 0, 0, 1], port))));
            activity.spread(Duration::from_secs(1000)).as_secs()
        };
        assert_eq!((spread(0), spread(100), spread(199)), (900, 1000, 1099));
    }
}
