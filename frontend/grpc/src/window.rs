//! Limits the number of open requests of a stream: read but not answered, or answered but not read
//! by the client.
//!
//! A client that reads its answers may have up to [`MAX_OPEN`] open requests: sequences that wait
//! for a slot may depend on requests that the client has yet to send. If a client does not read its
//! answers, the server stops reading its requests at [`ALWAYS`] open ones. Beyond that, the answers
//! of all open requests may take at most [`BYTES`], estimated from earlier answers; where
//! this would block the stream indefinitely, it admits one request per [`SLOW_DELAY`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

/// The number of open requests that are always allowed.
const ALWAYS: usize = 64;

/// The number of open requests that are allowed before the first answer, while the size of answers
/// is unknown.
const UNSEEN: usize = 256;

/// The maximum number of open requests.
const MAX_OPEN: usize = 16_384;

/// The maximum estimated bytes of answers to open requests beyond [`ALWAYS`].
const BYTES: u64 = 64 << 20;

/// The delay per request of a stream whose client has read all answers but that has too many open
/// requests.
const SLOW_DELAY: Duration = Duration::from_millis(10);

#[derive(Default)]
struct State {
    open: AtomicUsize,
    /// The most bytes of answers of one request; 0 before the first answer.
    largest: AtomicU64,
    /// Whether the client has read all available answers and waits for more.
    starved: AtomicBool,
    changed: Notify,
}

/// The open requests of a stream.
#[derive(Clone, Default)]
pub(super) struct Window(Arc<State>);

/// An open request; dropping it closes the request.
pub(super) struct OpenRequest(Window);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.0.open.fetch_sub(1, Ordering::SeqCst);
        self.0.0.changed.notify_one();
    }
}

/// Whether another request may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Now,
    Slowly,
    Not,
}

fn room(open: usize, largest: u64, starved: bool) -> Room {
    if open < ALWAYS {
        return Room::Now;
    }
    if !starved || open >= MAX_OPEN {
        return Room::Not;
    }
    let fits = match largest {
        0 => open < UNSEEN,
        largest => largest.saturating_mul(open as u64) <= BYTES,
    };
    if fits { Room::Now } else { Room::Slowly }
}

impl Window {
    /// Waits until another request may be read. Only one reader may call it.
    pub(super) async fn admit(&self) -> OpenRequest {
        let state = &*self.0;
        loop {
            // Created before the state is checked, so that no later change is missed: `notify_one`
            // stores a permit.
            let changed = state.changed.notified();
            let largest = state.largest.load(Ordering::Relaxed);
            match room(
                state.open.load(Ordering::SeqCst),
                largest,
                state.starved.load(Ordering::SeqCst),
            ) {
                Room::Now => break,
                Room::Not => changed.await,
                Room::Slowly => {
                    if timeout(SLOW_DELAY, changed).await.is_err() {
                        break;
                    }
                }
            }
        }
        state.open.fetch_add(1, Ordering::SeqCst);
        OpenRequest(self.clone())
    }

    /// Records the size of a request's answers in bytes.
    pub(super) fn record_size(&self, bytes: u64) {
        self.0.largest.fetch_max(bytes.max(1), Ordering::Relaxed);
    }

    /// Records whether the client has read all available answers.
    pub(super) fn set_starved(&self, starved: bool) {
        if self.0.starved.load(Ordering::Relaxed) != starved {
            self.0.starved.store(starved, Ordering::SeqCst);
            if starved {
                self.0.changed.notify_one();
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{ALWAYS, BYTES, MAX_OPEN, OpenRequest, Room, SLOW_DELAY, UNSEEN, Window, room};
    use pharos_os::clock;
    use tokio::time::timeout;

    #[test]
    fn a_client_that_reads_its_answers_may_have_many_open_requests() {
        assert_eq!(room(ALWAYS - 1, BYTES, false), Room::Now, "below the minimum");
        assert_eq!(room(ALWAYS, 1, false), Room::Not, "unread answers");
        assert_eq!(room(ALWAYS, 1, true), Room::Now);
        assert_eq!(room(UNSEEN - 1, 0, true), Room::Now);
        assert_eq!(room(UNSEEN, 0, true), Room::Slowly, "unknown size of answers");
        assert_eq!(room(UNSEEN, 100, true), Room::Now);
        assert_eq!(room(1024, BYTES / 1024, true), Room::Now);
        assert_eq!(room(1025, BYTES / 1024, true), Room::Slowly, "large answers");
        assert_eq!(room(MAX_OPEN, 1, true), Room::Not);
        assert_eq!(room(MAX_OPEN, u64::MAX, true), Room::Not);
    }

    async fn open(window: &Window, count: usize) -> Vec<OpenRequest> {
        let mut places = Vec::new();
        for _ in 0..count {
            places.push(window.admit().await);
        }
        places
    }

    #[tokio::test]
    async fn waits_for_a_client_that_reads_nothing() {
        let window = Window::default();
        let mut places = open(&window, ALWAYS).await;
        let waits = timeout(SLOW_DELAY * 10, window.admit()).await;
        assert!(waits.is_err());
        places.pop();
        places.push(timeout(SLOW_DELAY * 100, window.admit()).await.unwrap());
        window.set_starved(true);
        window.record_size(1);
        places.push(timeout(SLOW_DELAY * 100, window.admit()).await.unwrap());
        window.set_starved(false);
        assert!(timeout(SLOW_DELAY * 10, window.admit()).await.is_err());
    }

    #[tokio::test]
    async fn large_answers_slow_the_stream_down() {
        let window = Window::default();
        window.set_starved(true);
        window.record_size(BYTES);
        let start = clock::now();
        let places = open(&window, ALWAYS + 10).await;
        let waited = clock::now().0 - start.0;
        assert!(u128::from(waited) >= 10 * SLOW_DELAY.as_nanos(), "{waited} ns");
        drop(places);
        open(&window, ALWAYS).await;
    }
}
