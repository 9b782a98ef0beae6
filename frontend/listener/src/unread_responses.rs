//! Tracks HTTP/2 responses that clients do not read. A client that grants a stream no window blocks that stream, but not the
//! connection's writes, so progress is tracked for each stream: a large piece of a response records when its bytes are
//! dropped, which is after they were written.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Pieces up to this size are not tracked: a thousand streams of them use no more memory than one large response.
const SMALL: usize = 16 << 10;
/// Larger pieces are split, so that the progress of a slow client is visible.
const PIECE: usize = 256 << 10;

/// The responses of a connection that are being sent.
#[derive(Default)]
pub(super) struct Unread {
    // Held by scans, and when the first large piece of a response is sent.
    answers: Mutex<Vec<Arc<Taken>>>,
}

impl Unread {
    /// Returns the tick of the last progress of the response that waits longest; 0 if none waits.
    pub(super) fn since(&self, now: u32) -> u32 {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.retain(|answer| Arc::strong_count(answer) > 1);
        let waiting = answers.iter().filter(|answer| answer.outstanding.load(Ordering::Relaxed) > 0);
        let since = waiting.map(|answer| answer.moved.load(Ordering::Relaxed));
        since.max_by_key(|since| now.wrapping_sub(*since)).unwrap_or(0)
    }

    /// Starts to track a response.
    fn follow(&self, tick: &Arc<AtomicU32>) -> Arc<Taken> {
        let moved = AtomicU32::new(tick.load(Ordering::Relaxed));
        let taken = Arc::new(Taken { tick: tick.clone(), outstanding: AtomicU64::new(0), moved });
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).push(taken.clone());
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
    pub(super) fn cut(&mut self, piece: Bytes, (unread, tick): (&Unread, &Arc<AtomicU32>)) -> Bytes {
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
        let (unread, tick) = (Unread::default(), Arc::new(AtomicU32::new(5)));
        let (mut one, mut other) = (Pieces::default(), Pieces::default());
        assert_eq!(one.cut(Bytes::from(vec![1; SMALL]), (&unread, &tick)).len(), SMALL);
        assert_eq!(unread.since(9), 0, "small pieces are not tracked");
        let first = one.cut(Bytes::from(vec![2; 2 * PIECE + 1]), (&unread, &tick));
        assert_eq!((first.len(), one.is_empty()), (PIECE, false));
        tick.store(7, Ordering::Relaxed);
        let second = other.cut(Bytes::from(vec![3; PIECE]), (&unread, &tick));
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
        assert!(unread.answers.lock().unwrap_or_else(PoisonError::into_inner).is_empty());
    }
}
