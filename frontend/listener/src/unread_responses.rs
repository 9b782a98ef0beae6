//! What HTTP/2 clients have not taken of their answers. A client that opens no window for a stream stops it without the
//! connection ever waiting to write, so that has to be noticed for each stream: large pieces of an answer tell when they
//! have been written, which is when the last who holds their bytes drops them.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Smaller pieces are not followed: a thousand streams of them hold as much as one of the others.
const SMALL: usize = 16 << 10;
/// Larger pieces are cut, so that a slow client is seen to move.
const PIECE: usize = 256 << 10;

/// The answers of a connection that are being read.
#[derive(Default)]
pub(super) struct Unread {
    // Held by the looks and when an answer's first large piece leaves.
    answers: Mutex<Vec<Arc<Taken>>>,
}

impl Unread {
    /// The tick since which the answer that waits longest has not moved; 0 if none waits.
    pub(super) fn since(&self, now: u32) -> u32 {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.retain(|answer| Arc::strong_count(answer) > 1);
        let waiting = answers.iter().filter(|answer| answer.outstanding.load(Ordering::Relaxed) > 0);
        let since = waiting.map(|answer| answer.moved.load(Ordering::Relaxed));
        since.max_by_key(|since| now.wrapping_sub(*since)).unwrap_or(0)
    }

    /// Follows one more answer.
    fn follow(&self, tick: &Arc<AtomicU32>) -> Arc<Taken> {
        let moved = AtomicU32::new(tick.load(Ordering::Relaxed));
        let taken = Arc::new(Taken { tick: tick.clone(), outstanding: AtomicU64::new(0), moved });
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).push(taken.clone());
        taken
    }
}

/// How far the client has taken one answer.
struct Taken {
    tick: Arc<AtomicU32>,
    /// Bytes that have left for the client and not reached it.
    outstanding: AtomicU64,
    /// The tick at which that last became less.
    moved: AtomicU32,
}

/// A piece on its way.
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

/// Follows the pieces of one answer.
#[derive(Default)]
pub(super) struct Pieces {
    taken: Option<Arc<Taken>>,
    /// What is left of a piece that is too large.
    rest: Bytes,
}

impl Pieces {
    /// The next part of a piece that was cut, if there is one.
    pub(super) fn next(&mut self) -> Option<Bytes> {
        let taken = self.taken.as_ref().filter(|_| !self.rest.is_empty())?;
        let bytes = self.rest.split_to(self.rest.len().min(PIECE));
        if taken.outstanding.fetch_add(bytes.len() as u64, Ordering::Relaxed) == 0 {
            taken.moved.store(taken.tick.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Some(Bytes::from_owner(Piece { bytes, taken: taken.clone() }))
    }

    /// A piece is to leave; gives what leaves first.
    pub(super) fn cut(&mut self, piece: Bytes, (unread, tick): (&Unread, &Arc<AtomicU32>)) -> Bytes {
        if piece.len() <= SMALL {
            return piece;
        }
        self.taken.get_or_insert_with(|| unread.follow(tick));
        self.rest = piece;
        self.next().unwrap_or_default()
    }

    /// Whether all of the last piece has left.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Bytes of the last piece that have not left.
    pub(super) fn left(&self) -> u64 {
        self.rest.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_waits_from_its_last_move_on() {
        let (unread, tick) = (Unread::default(), Arc::new(AtomicU32::new(5)));
        let (mut one, mut other) = (Pieces::default(), Pieces::default());
        assert_eq!(one.cut(Bytes::from(vec![1; SMALL]), (&unread, &tick)).len(), SMALL);
        assert_eq!(unread.since(9), 0, "small pieces are not followed");
        let first = one.cut(Bytes::from(vec![2; 2 * PIECE + 1]), (&unread, &tick));
        assert_eq!((first.len(), one.is_empty()), (PIECE, false));
        tick.store(7, Ordering::Relaxed);
        let second = other.cut(Bytes::from(vec![3; PIECE]), (&unread, &tick));
        assert_eq!((second.len(), other.is_empty(), unread.since(9)), (PIECE, true, 5));
        tick.store(8, Ordering::Relaxed);
        let next = one.next().unwrap_or_default();
        drop(first);
        assert_eq!(unread.since(9), 7, "the first has moved, the second waits longer");
        drop((second, next));
        assert_eq!(unread.since(9), 0);
        assert_eq!((one.next().map(|last| last.len()), one.next()), (Some(1), None));
        drop((one, other));
        unread.since(10);
        assert!(unread.answers.lock().unwrap_or_else(PoisonError::into_inner).is_empty());
    }
}
