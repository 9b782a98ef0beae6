//! A ring of bytes in shared memory: the frames of one direction between the frontend and a worker.
//!
//! The ring has one producer and one consumer, in two processes. Neither trusts the other: every
//! position that the peer writes is read once and checked, and bytes are copied into private memory
//! before they are decoded. A side that is about to sleep says so in the ring and looks once more;
//! the other side then wakes it with a byte on the socket of the connection. While neither side
//! sleeps, frames cost no system call.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::shm::atomic::{Ordering, fence};
use crate::shm::{self, SharedMemory};

/// The bytes that a ring holds; a power of two. A longer frame passes through the ring in pieces.
pub const CAPACITY: usize = 64 << 10;

/// The positions of a ring's words in bytes, each on its own cache line.
const HEAD: usize = 0;
const TAIL: usize = 64;
const CONSUMER_SLEEPS: usize = 128;
const PRODUCER_SLEEPS: usize = 192;
const DATA: usize = 256;

const RING: usize = DATA + CAPACITY;

/// A ring whose positions are impossible: the peer does not follow the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt(u64);

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the ring of frames is corrupt: {} bytes wait in a ring of {CAPACITY}", self.0)
    }
}

impl std::error::Error for Corrupt {}

/// Creates the memory of both rings of a connection.
///
/// # Errors
/// No memory or descriptors are left.
pub fn create() -> io::Result<OwnedFd> {
    shm::create("pharos-frames", 2 * RING as u64)
}

/// Opens the frontend's ends: frames to the worker, and frames from it.
///
/// # Errors
/// The memory cannot be mapped.
pub fn of_frontend(memory: impl AsFd) -> io::Result<(Producer, Consumer)> {
    let memory = Arc::new(SharedMemory::map(memory, 2 * RING)?);
    Ok((Producer::new(memory.clone(), 0), Consumer::new(memory, RING)))
}

/// Opens the worker's ends: frames to the frontend, and frames from it.
///
/// # Errors
/// The memory cannot be mapped.
pub fn of_worker(memory: impl AsFd) -> io::Result<(Producer, Consumer)> {
    let memory = Arc::new(SharedMemory::map(memory, 2 * RING)?);
    Ok((Producer::new(memory.clone(), RING), Consumer::new(memory, 0)))
}

/// The memory of one ring.
#[derive(Debug)]
struct Ring {
    memory: Arc<SharedMemory>,
    start: usize,
}

impl Ring {
    /// Returns a word. All words of the layout exist.
    fn load(&self, at: usize, ordering: Ordering) -> u64 {
        self.memory.atomic_u64(self.start + at).map_or(0, |word| word.load(ordering))
    }

    fn store(&self, at: usize, value: u64, ordering: Ordering) {
        if let Some(word) = self.memory.atomic_u64(self.start + at) {
            word.store(value, ordering);
        }
    }

    /// Returns the parts of the ring for `len` bytes from `position`: offset and length, the second
    /// one from the start.
    fn parts(&self, position: u64, len: usize) -> [(usize, usize); 2] {
        let at = (position % CAPACITY as u64) as usize;
        let first = len.min(CAPACITY - at);
        [(self.start + DATA + at, first), (self.start + DATA, len - first)]
    }

    /// Takes the note of a sleeping peer, which must then be woken.
    fn takes_wake_up(&self, note: usize) -> bool {
        // With the fence of `sleeps`: either the peer sees what was written before, or this sees
        // its note.
        fence(Ordering::SeqCst);
        self.load(note, Ordering::Relaxed) != 0 && self.swap(note, 0) != 0
    }

    fn sleeps(&self, note: usize) {
        self.swap(note, 1);
        fence(Ordering::SeqCst);
    }

    /// Replaces a note. Both sides change it, always in this way: each change sees the one before
    /// it.
    fn swap(&self, note: usize, value: u64) -> u64 {
        self.memory
            .atomic_u64(self.start + note)
            .map_or(0, |word| word.swap(value, Ordering::Relaxed))
    }
}

/// The writing end.
#[derive(Debug)]
pub struct Producer {
    ring: Ring,
    /// Bytes written so far. The ring's copy is only ever written from this one.
    head: u64,
}

impl Producer {
    fn new(memory: Arc<SharedMemory>, start: usize) -> Self {
        Self { ring: Ring { memory, start }, head: 0 }
    }

    /// Returns the number of bytes that fit now.
    fn room(&self) -> Result<usize, Corrupt> {
        let waiting = self.head.wrapping_sub(self.ring.load(TAIL, Ordering::Acquire));
        let waiting_bytes = usize::try_from(waiting).ok().filter(|waiting| *waiting <= CAPACITY);
        waiting_bytes.map(|waiting| CAPACITY - waiting).ok_or(Corrupt(waiting))
    }

    /// Writes as many of the bytes as fit, and returns their number.
    ///
    /// # Errors
    /// The consumer has corrupted the ring.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Corrupt> {
        let len = bytes.len().min(self.room()?);
        let mut rest = bytes.get(..len).unwrap_or_default();
        for (at, part) in self.ring.parts(self.head, len) {
            let (now, later) = rest.split_at(part.min(rest.len()));
            // The parts are inside the ring.
            let _ = self.ring.memory.copy_in(at, now);
            rest = later;
        }
        self.head = self.head.wrapping_add(len as u64);
        self.ring.store(HEAD, self.head, Ordering::Release);
        Ok(len)
    }

    /// Returns whether the consumer sleeps and must be woken. Returns `true` once for each sleep.
    pub fn must_wake_consumer(&self) -> bool {
        self.ring.takes_wake_up(CONSUMER_SLEEPS)
    }

    /// Asks the consumer to wake this side when it has read. Returns `false` if there is room
    /// already.
    ///
    /// # Errors
    /// The consumer has corrupted the ring.
    pub fn sleep(&self) -> Result<bool, Corrupt> {
        self.ring.sleeps(PRODUCER_SLEEPS);
        Ok(self.room()? == 0)
    }
}

/// The reading end.
#[derive(Debug)]
pub struct Consumer {
    ring: Ring,
    /// Bytes read so far. The ring's copy is only ever written from this one.
    tail: u64,
}

impl Consumer {
    fn new(memory: Arc<SharedMemory>, start: usize) -> Self {
        Self { ring: Ring { memory, start }, tail: 0 }
    }

    /// Returns whether no bytes wait. Costs one load.
    pub fn is_empty(&self) -> bool {
        self.ring.load(HEAD, Ordering::Relaxed) == self.tail
    }

    /// Moves waiting bytes into `buffer`, as many as fit, and returns their number.
    ///
    /// # Errors
    /// The producer has corrupted the ring.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Corrupt> {
        let len = buffer.len().min(self.waiting()?);
        let mut rest = buffer.get_mut(..len).unwrap_or_default();
        for (at, part) in self.ring.parts(self.tail, len) {
            let (now, later) = rest.split_at_mut(part.min(rest.len()));
            // The parts are inside the ring.
            let _ = self.ring.memory.copy_out(at, now);
            rest = later;
        }
        self.tail = self.tail.wrapping_add(len as u64);
        self.ring.store(TAIL, self.tail, Ordering::Release);
        Ok(len)
    }

    /// Appends all waiting bytes to `buffer`, and returns their number: at most [`CAPACITY`].
    ///
    /// # Errors
    /// The producer has corrupted the ring.
    pub fn read_all(&mut self, buffer: &mut Vec<u8>) -> Result<usize, Corrupt> {
        let start = buffer.len();
        let waiting = self.waiting()?;
        buffer.resize(start + waiting, 0);
        let read = self.read(buffer.get_mut(start..).unwrap_or_default())?;
        buffer.truncate(start + read);
        Ok(read)
    }

    /// Returns the number of bytes that wait; at most [`CAPACITY`].
    fn waiting(&self) -> Result<usize, Corrupt> {
        let waiting = self.ring.load(HEAD, Ordering::Acquire).wrapping_sub(self.tail);
        usize::try_from(waiting).ok().filter(|waiting| *waiting <= CAPACITY).ok_or(Corrupt(waiting))
    }

    /// Returns whether the producer waits for room and must be woken. Returns `true` once for each
    /// wait.
    pub fn must_wake_producer(&self) -> bool {
        self.ring.takes_wake_up(PRODUCER_SLEEPS)
    }

    /// Asks the producer to wake this side when it has written. Returns `false` if bytes wait
    /// already; then the request is withdrawn.
    pub fn sleep(&self) -> bool {
        self.ring.sleeps(CONSUMER_SLEEPS);
        let sleeps = self.is_empty();
        if !sleeps {
            self.wake();
        }
        sleeps
    }

    /// Withdraws the request of [`Consumer::sleep`].
    pub fn wake(&self) {
        self.ring.swap(CONSUMER_SLEEPS, 0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    fn connection() -> ((Producer, Consumer), (Producer, Consumer), OwnedFd) {
        let memory = create().unwrap();
        (of_frontend(&memory).unwrap(), of_worker(&memory).unwrap(), memory)
    }

    fn read(consumer: &mut Consumer) -> Vec<u8> {
        let mut bytes = Vec::new();
        consumer.read_all(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn bytes_arrive_in_order_in_both_directions() {
        let ((mut to_worker, mut from_worker), (mut to_frontend, mut from_frontend), _memory) =
            connection();
        assert!(from_worker.is_empty() && from_frontend.is_empty());
        assert_eq!(to_worker.write(b"abc").unwrap(), 3);
        assert_eq!(to_worker.write(b"de").unwrap(), 2);
        assert_eq!(to_frontend.write(b"reply").unwrap(), 5);
        assert_eq!(read(&mut from_frontend), b"abcde");
        assert_eq!(read(&mut from_worker), b"reply");
        assert_eq!(read(&mut from_worker), b"");
    }

    #[test]
    fn a_full_ring_takes_the_rest_later() {
        let ((mut producer, _), (_, mut consumer), _memory) = connection();
        let bytes: Vec<u8> = (0..CAPACITY + 10).map(|at| at as u8).collect();
        assert_eq!(producer.write(&bytes).unwrap(), CAPACITY);
        assert_eq!(producer.write(&bytes[CAPACITY..]).unwrap(), 0);
        assert!(
            producer.sleep().unwrap()
                && consumer.must_wake_producer()
                && !consumer.must_wake_producer()
        );
        let mut all = read(&mut consumer);
        assert!(!producer.sleep().unwrap(), "there is room");
        assert_eq!(producer.write(&bytes[CAPACITY..]).unwrap(), 10);
        all.extend(read(&mut consumer));
        assert!(all == bytes);
    }

    #[test]
    fn a_consumer_is_woken_once_for_each_sleep() {
        let ((mut producer, _), (_, mut consumer), _memory) = connection();
        producer.write(b"a").unwrap();
        assert!(!producer.must_wake_consumer(), "it does not sleep");
        assert!(!consumer.sleep(), "a byte waits");
        producer.write(b"b").unwrap();
        assert!(!producer.must_wake_consumer());
        assert_eq!(read(&mut consumer), b"ab");
        assert!(consumer.sleep());
        producer.write(b"c").unwrap();
        assert!(producer.must_wake_consumer() && !producer.must_wake_consumer());
        consumer.wake();
        assert_eq!(read(&mut consumer), b"c");
    }

    #[test]
    fn impossible_positions_are_errors() {
        let ((mut producer, mut of_frontend), _, memory) = connection();
        let shared = SharedMemory::map(&memory, 2 * RING).unwrap();
        let set =
            |at: usize, value: u64| shared.atomic_u64(at).unwrap().store(value, Ordering::Release);
        for value in [1, u64::MAX - CAPACITY as u64 - 1] {
            set(TAIL, value);
            assert_eq!(producer.write(b"x"), Err(Corrupt(0u64.wrapping_sub(value))));
        }
        for value in [CAPACITY as u64 + 1, u64::MAX] {
            set(RING + HEAD, value);
            assert_eq!(of_frontend.read_all(&mut Vec::new()), Err(Corrupt(value)));
        }
        let text = Corrupt(70_000).to_string();
        assert_eq!(text, "the ring of frames is corrupt: 70000 bytes wait in a ring of 65536");
    }

    proptest! {
        /// Whatever the other process writes into the memory, each call ends and moves at most one
        /// ring of bytes.
        #[test]
        fn a_hostile_peer_cannot_cause_more_than_an_error(words in prop::collection::vec((0..RING / 8, any::<u64>()), 1..40)) {
            let ((mut producer, mut consumer), _, memory) = connection();
            let shared = SharedMemory::map(&memory, 2 * RING).unwrap();
            for (at, value) in words {
                shared.words()[at].store(value, Ordering::Release);
                shared.words()[RING / 8 + at].store(value, Ordering::Release);
                let mut bytes = Vec::new();
                let _ = consumer.read_all(&mut bytes);
                prop_assert!(bytes.len() <= CAPACITY);
                let _ = (producer.write(&[1; 100]), producer.sleep(), consumer.sleep());
                let _ = (producer.must_wake_consumer(), consumer.must_wake_producer());
            }
        }
    }

    /// Two threads that sleep whenever they can: no byte is lost and no sleeper is forgotten.
    #[test]
    fn no_wake_up_is_lost() {
        const BYTES: usize = 4 << 20;
        let ((mut producer, _), (_, mut consumer), _memory) = connection();
        let parker = |thread: thread::Thread| move || thread.unpark();
        let (send_writer, writer) = std::sync::mpsc::channel();
        let reading = thread::spawn(move || {
            let wake_writer = parker(writer.recv().unwrap());
            let mut count = 0usize;
            let mut buffer = Vec::new();
            while count < BYTES {
                buffer.clear();
                if consumer.read_all(&mut buffer).unwrap() == 0 {
                    if consumer.sleep() {
                        thread::park();
                        consumer.wake();
                    }
                    continue;
                }
                assert!(buffer.iter().zip(count..).all(|(byte, at)| *byte == (at % 251) as u8));
                count += buffer.len();
                if consumer.must_wake_producer() {
                    wake_writer();
                }
            }
        });
        send_writer.send(thread::current()).unwrap();
        let wake_reader = parker(reading.thread().clone());
        let mut at = 0;
        let mut length = 1;
        while at < BYTES {
            length = (length * 7 + 3) % 9001 + 1;
            let bytes: Vec<u8> =
                (at..(at + length).min(BYTES)).map(|at| (at % 251) as u8).collect();
            let written = producer.write(&bytes).unwrap();
            at += written;
            if producer.must_wake_consumer() {
                wake_reader();
            }
            if written < bytes.len() && producer.sleep().unwrap() {
                thread::park();
            }
        }
        reading.join().unwrap();
    }
}
