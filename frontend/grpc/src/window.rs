//! How many requests of one stream may be open: read, but not answered, or answered and not taken by the client.
//!
//! A client that takes its answers may have any number of them open up to [`MOST`]: those of sequences that wait for a
//! slot need what the client sends after them. One that does not take them is not read from any further, so that what is
//! made for it stays within [`BYTES`], as far as that can be told from the answers that were made before, or within
//! [`ALWAYS`] answers. Where both would hold a stream up for ever, it goes on slowly.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

/// So many may be open whatever the client does.
const ALWAYS: usize = 64;

/// So many may be open before any answer is there to judge by.
const UNSEEN: usize = 256;

/// The most that may be open.
const MOST: usize = 16_384;

/// Bytes of answers that may come of what is open, beyond [`ALWAYS`].
const BYTES: u64 = 64 << 20;

/// How long a stream stands still with everything taken and too much open before it goes on by one request.
const PATIENCE: Duration = Duration::from_millis(10);

#[derive(Default)]
struct State {
    open: AtomicUsize,
    /// The most bytes that a request has had to itself; 0 before the first answer.
    largest: AtomicU64,
    /// The client has taken all that there is, and waits for more.
    starved: AtomicBool,
    changed: Notify,
}

/// The requests of a stream that are open.
#[derive(Clone, Default)]
pub(super) struct Window(Arc<State>);

/// An open request. Dropped, it is not open any more.
pub(super) struct Place(Window);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.open.fetch_sub(1, Ordering::SeqCst);
        self.0.0.changed.notify_one();
    }
}

/// What may be read.
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
    if !starved || open >= MOST {
        return Room::Not;
    }
    let fits = match largest {
        0 => open < UNSEEN,
        largest => largest.saturating_mul(open as u64) <= BYTES,
    };
    if fits { Room::Now } else { Room::Slowly }
}

impl Window {
    /// Waits until another request may be read. To be called by one reader only.
    pub(super) async fn place(&self) -> Place {
        let state = &*self.0;
        loop {
            // Made before the look, so that a change after it is not missed: a permit is kept for who asks later.
            let changed = state.changed.notified();
            let largest = state.largest.load(Ordering::Relaxed);
            match room(state.open.load(Ordering::SeqCst), largest, state.starved.load(Ordering::SeqCst)) {
                Room::Now => break,
                Room::Not => changed.await,
                Room::Slowly => {
                    if timeout(PATIENCE, changed).await.is_err() {
                        break;
                    }
                }
            }
        }
        state.open.fetch_add(1, Ordering::SeqCst);
        Place(self.clone())
    }

    /// A request has answers of so many bytes to itself.
    pub(super) fn saw(&self, bytes: u64) {
        self.0.largest.fetch_max(bytes.max(1), Ordering::Relaxed);
    }

    /// Whether the client has taken all that there is.
    pub(super) fn starved(&self, starved: bool) {
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
    use super::{ALWAYS, BYTES, MOST, PATIENCE, Place, Room, UNSEEN, Window, room};
    use pharos_os::clock;
    use tokio::time::timeout;

    #[test]
    fn who_takes_the_answers_may_have_many_open() {
        assert_eq!(room(ALWAYS - 1, BYTES, false), Room::Now, "a few always");
        assert_eq!(room(ALWAYS, 1, false), Room::Not, "answers lie there");
        assert_eq!(room(ALWAYS, 1, true), Room::Now);
        assert_eq!(room(UNSEEN - 1, 0, true), Room::Now);
        assert_eq!(room(UNSEEN, 0, true), Room::Slowly, "nobody knows how large they will be");
        assert_eq!(room(UNSEEN, 100, true), Room::Now);
        assert_eq!(room(1024, BYTES / 1024, true), Room::Now);
        assert_eq!(room(1025, BYTES / 1024, true), Room::Slowly, "large ones");
        assert_eq!(room(MOST, 1, true), Room::Not);
        assert_eq!(room(MOST, u64::MAX, true), Room::Not);
    }

    async fn open(window: &Window, count: usize) -> Vec<Place> {
        let mut places = Vec::new();
        for _ in 0..count {
            places.push(window.place().await);
        }
        places
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_waited_for() {
        let window = Window::default();
        let mut places = open(&window, ALWAYS).await;
        let waits = timeout(PATIENCE * 10, window.place()).await;
        assert!(waits.is_err());
        places.pop();
        places.push(timeout(PATIENCE * 100, window.place()).await.unwrap());
        window.starved(true);
        window.saw(1);
        places.push(timeout(PATIENCE * 100, window.place()).await.unwrap());
        window.starved(false);
        assert!(timeout(PATIENCE * 10, window.place()).await.is_err());
    }

    #[tokio::test]
    async fn large_answers_go_slowly() {
        let window = Window::default();
        window.starved(true);
        window.saw(BYTES);
        let start = clock::now();
        let places = open(&window, ALWAYS + 10).await;
        let waited = clock::now().0 - start.0;
        assert!(u128::from(waited) >= 10 * PATIENCE.as_nanos(), "{waited} ns");
        drop(places);
        open(&window, ALWAYS).await;
    }
}
