//! Tracks HTTP/2 responses that clients do not read. A client that grants a stream no window blocks
//! that stream, but not the connection's writes, so progress is tracked for each stream: a large
//! piece of a response records when its bytes are dropped, which is after they were written.
//!
//! While a stream has no window, the library takes no piece of its response. Such responses are
//! counted by the period in which they began to wait: the messages of a stream may be small, and a
//! model may wait for their client.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

/// Pieces up to this size are not tracked: a thousand streams of them use no more memory than one
/// large response.
const SMALL: usize = 16 << 10;
/// Larger pieces are split, so that the progress of a slow client is visible.
const PIECE: usize = 256 << 10;

/// The number of periods in a timeout.
const PERIODS_IN_TIMEOUT: u32 = 4;
/// The number of periods that are counted. A connection is closed before a response has waited for
/// so many.
const PERIODS: usize = 8;

/// The numbers of responses that wait for a window, by the period in which they began to wait.
struct Waits {
    /// The number of ticks of one period.
    ticks: u32,
    counts: [AtomicU32; PERIODS],
}

impl Waits {
    /// Returns the index of the period of a tick.
    fn at(&self, tick: u32) -> usize {
        (tick / self.ticks) as usize % PERIODS
    }

    fn count(&self, index: usize) -> Option<&AtomicU32> {
        self.counts.get(index)
    }

    /// Returns the latest tick at which the response that waits longest can have begun to wait.
    fn since(&self, now: u32) -> Option<u32> {
        let current = now / self.ticks;
        let mut periods = (0..PERIODS as u32).rev().filter_map(|ago| current.checked_sub(ago));
        let oldest = periods.find(|period| {
            let count = self.count(*period as usize % PERIODS);
            count.is_some_and(|count| count.load(Ordering::Relaxed) > 0)
        })?;
        Some((oldest * self.ticks).saturating_add(self.ticks - 1).min(now))
    }
}

/// The responses of a connection that are being sent.
pub(super) struct Unread {
    // Held by scans, and when the first large piece of a response is sent.
    answers: Mutex<Vec<Arc<Taken>>>,
    waits: Waits,
}

impl Unread {
    /// Creates an empty list for a timeout of this many ticks.
    pub(super) fn new(timeout: u32) -> Self {
        let waits = Waits {
            ticks: timeout.div_ceil(PERIODS_IN_TIMEOUT).max(1),
            counts: Default::default(),
        };
        Self { answers: Mutex::default(), waits }
    }

    /// Counts a response that waits from this tick on. [`Unread::ends_wait`] gets the result.
    pub(super) fn begins_wait(&self, tick: u32) -> usize {
        let index = self.waits.at(tick);
        if let Some(count) = self.waits.count(index) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        index
    }

    /// Counts the end of a wait.
    pub(super) fn ends_wait(&self, index: usize) {
        if let Some(count) = self.waits.count(index) {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the tick of the last progress of the response that waits longest; 0 if none waits.
    pub(super) fn since(&self, now: u32) -> u32 {
        let longest = [self.since_taken(now), self.waits.since(now).unwrap_or(0)]
            .into_iter()
            .filter(|since| *since != 0);
        longest.max_by_key(|since| now.wrapping_sub(*since)).unwrap_or(0)
    }

    /// Returns the tick of the last progress among the tracked pieces.
    fn since_taken(&self, now: u32) -> u32 {
        let mut answers = self.answers.lock();
        answers.retain(|answer| Arc::strong_count(answer) > 1);
        let waiting =
            answers.iter().filter(|answer| answer.outstanding.load(Ordering::Relaxed) > 0);
        let since = waiting.map(|answer| answer.moved.load(Ordering::Relaxed));
        since.max_by_key(|since| now.wrapping_sub(*since)).unwrap_or(0)
    }

    /// Starts to track a response.
    fn follow(&self, tick: &Arc<AtomicU32>) -> Arc<Taken> {
        let moved = AtomicU32::new(tick.load(Ordering::Relaxed));
        let taken = Arc::new(Taken { tick: tick.clone(), outstanding: AtomicU64::new(0), moved });
        self.answers.lock().push(taken.clone());
        taken
    }
}

/// The progress of one response.
struct Taken {
    tick: Arc<AtomicU32>,
    /// Bytes that were handed to the connection and not yet written.
    outstanding: AtomicU64,
    /// The tick at which `outstanding` last decreased.
    moved: AtomicU32,
}

/// A piece that is being sent.
struct Piece {
    bytes: Bytes,
    taken: Arc<Taken>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.taken.outstanding.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
        self.taken.moved.store(self.taken.tick.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Splits and tracks the pieces of one response.
#[derive(Default)]
pub(super) struct Pieces {
    taken: Option<Arc<Taken>>,
    /// The unsent rest of a large piece.
    rest: Bytes,
}

impl Pieces {
    /// Returns the next part of a piece that was split, if there is one.
    pub(super) fn next(&mut self) -> Option<Bytes> {
        let taken = self.taken.as_ref().filter(|_| !self.rest.is_empty())?;
        let bytes = self.rest.split_to(self.rest.len().min(PIECE));
        if taken.outstanding.fetch_add(bytes.len() as u64, Ordering::Relaxed) == 0 {
            taken.moved.store(taken.tick.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Some(Bytes::from_owner(Piece { bytes, taken: taken.clone() }))
    }

    /// Splits a piece if it is large, and returns its first part.
    pub(super) fn cut(&mut self, piece: Bytes, unread: &Unread, tick: &Arc<AtomicU32>) -> Bytes {
        if piece.len() <= SMALL {
            return piece;
        }
        self.taken.get_or_insert_with(|| unread.follow(tick));
        self.rest = piece;
        self.next().unwrap_or_default()
    }

    /// Returns whether the last piece was sent completely.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Returns the number of unsent bytes of the last piece.
    pub(super) fn left(&self) -> u64 {
        self.rest.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_waits_since_its_last_progress() {
        let unread = Unread::new(20);
        let tick = Arc::new(AtomicU32::new(5));
        let mut one = Pieces::default();
        let mut other = Pieces::default();
        assert_eq!(one.cut(Bytes::from(vec![1; SMALL]), &unread, &tick).len(), SMALL);
        assert_eq!(unread.since(9), 0, "small pieces are not tracked");
        let first = one.cut(Bytes::from(vec![2; 2 * PIECE + 1]), &unread, &tick);
        assert_eq!((first.len(), one.is_empty()), (PIECE, false));
        tick.store(7, Ordering::Relaxed);
        let second = other.cut(Bytes::from(vec![3; PIECE]), &unread, &tick);
        assert_eq!((second.len(), other.is_empty(), unread.since(9)), (PIECE, true, 5));
        tick.store(8, Ordering::Relaxed);
        let next = one.next().unwrap_or_default();
        drop(first);
        assert_eq!(unread.since(9), 7, "the first made progress, the second waits longer");
        drop((second, next));
        assert_eq!(unread.since(9), 0);
        assert_eq!((one.next().map(|last| last.len()), one.next()), (Some(1), None));
        drop((one, other));
        unread.since(10);
        assert!(unread.answers.lock().is_empty());
    }

    #[test]
    fn a_response_without_a_window_waits_since_its_last_piece() {
        for timeout in [1, 3, 7, 20, 300] {
            let unread = Unread::new(timeout);
            assert_eq!(unread.since(1), 0);
            let first = unread.begins_wait(1);
            let late = unread.begins_wait(1 + timeout);
            let closed = (1..).find(|now| {
                let since = unread.since(*now);
                since != 0 && now - since > timeout
            });
            // The time is exact to a quarter, and never too short.
            let closed = closed.unwrap_or_default();
            assert!(
                closed > 1 + timeout && closed <= 2 + timeout + timeout.div_ceil(4),
                "{timeout} {closed}"
            );
            unread.ends_wait(first);
            assert!(unread.since(closed) > timeout, "{timeout}: the other began later");
            unread.ends_wait(late);
            assert_eq!(unread.since(closed), 0);
        }
        assert_eq!(Unread::new(u32::MAX).since(1000), 0);
    }
}
