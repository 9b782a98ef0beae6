//! Explores the interleavings of the two sides of a ring of frames, and of the threads that add to
//! and take a held sum, with `loom` (https://docs.rs/loom), which also lets loads return old values
//! as far as the memory orderings permit. It compiles the code of the server, `src/wire/ring.rs`
//! and `src/metrics/held_sum.rs`, with doubles of the shared memory and of the atomics.
//!
//! A model ends with an error if a side sleeps for ever, if bytes differ, if a byte is read while
//! it is written, or if an increment is lost or taken twice.

#![allow(clippy::unwrap_used, clippy::print_stdout, unsafe_code)]

#[allow(dead_code, unreachable_pub)]
#[path = "../../src/wire/ring.rs"]
mod ring;

#[allow(dead_code)]
#[path = "../../src/metrics/atomic.rs"]
mod atomic;

#[path = "../../src/metrics/held_sum.rs"]
mod held_sum;

/// The shared memory of one execution of a model.
mod shm {
    use std::cell::RefCell;
    use std::io;
    use std::os::fd::{AsFd, OwnedFd};
    use std::rc::Rc;
    use std::sync::Arc;

    use loom::cell::UnsafeCell;
    use loom::sync::atomic::AtomicU64;

    pub(crate) mod atomic {
        pub(crate) use loom::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering, fence};
    }

    use crate::ring::CAPACITY;

    /// The positions of the words and of the data in a ring: see `src/wire/ring.rs`.
    const WORDS: [usize; 4] = [0, 64, 128, 192];
    const DATA: usize = 256;
    const RING: usize = DATA + CAPACITY;

    /// The bytes at the start of the data whose accesses are observed.
    const OBSERVED: usize = 4;

    #[derive(Debug)]
    struct OneRing {
        words: [AtomicU64; 4],
        bytes: [UnsafeCell<u8>; OBSERVED],
    }

    // SAFETY: as the memory that it replaces. loom reports accesses to a cell that are not ordered.
    unsafe impl Send for OneRing {}
    // SAFETY: as above.
    unsafe impl Sync for OneRing {}

    impl OneRing {
        fn new() -> Self {
            Self {
                words: WORDS.map(|_| AtomicU64::new(0)),
                bytes: [0; OBSERVED].map(UnsafeCell::new),
            }
        }
    }

    /// The memory of both rings. All mappings show the same memory.
    #[derive(Clone, Debug)]
    pub(crate) struct SharedMemory(Arc<[OneRing; 2]>);

    // loom runs all threads of a model on one thread of the system.
    thread_local! {
        static MEMORY: RefCell<Option<Rc<SharedMemory>>> = const { RefCell::new(None) };
    }

    /// Begins an execution with empty rings.
    pub(crate) fn begin() {
        let memory = SharedMemory(Arc::new([OneRing::new(), OneRing::new()]));
        MEMORY.set(Some(Rc::new(memory)));
    }

    /// Ends an execution.
    pub(crate) fn end() {
        MEMORY.set(None);
    }

    pub(crate) fn create(_name: &str, _bytes: u64) -> io::Result<OwnedFd> {
        Ok(std::fs::File::open("/dev/null")?.into())
    }

    impl SharedMemory {
        pub(crate) fn map(_descriptor: impl AsFd, _len: usize) -> io::Result<Self> {
            MEMORY
                .with_borrow(|memory| memory.as_deref().cloned())
                .ok_or_else(|| io::Error::other("no execution"))
        }

        pub(crate) fn atomic_u64(&self, offset: usize) -> Option<&AtomicU64> {
            let word = WORDS.iter().position(|word| *word == offset % RING)?;
            self.0.get(offset / RING)?.words.get(word)
        }

        pub(crate) fn copy_in(&self, offset: usize, bytes: &[u8]) -> bool {
            let from = offset % RING - DATA;
            for (cell, byte) in self.0[offset / RING].bytes.iter().skip(from).zip(bytes) {
                // SAFETY: loom checks that no other thread accesses the cell.
                cell.with_mut(|at| unsafe { *at = *byte });
            }
            true
        }

        pub(crate) fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> bool {
            let from = offset % RING - DATA;
            for (cell, byte) in self.0[offset / RING].bytes.iter().skip(from).zip(bytes) {
                // SAFETY: loom checks that no other thread writes the cell.
                *byte = cell.with(|at| unsafe { *at });
            }
            true
        }
    }
}

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use held_sum::HeldSum;
use ring::{CAPACITY, Consumer, Producer};

/// The socket over which a side wakes the other: each byte wakes once.
#[derive(Default)]
struct Socket {
    bytes: Mutex<u32>,
    arrived: Condvar,
}

impl Socket {
    fn wake(&self) {
        *self.bytes.lock().unwrap() += 1;
        self.arrived.notify_one();
    }

    fn sleep(&self) {
        let mut bytes = self.bytes.lock().unwrap();
        while *bytes == 0 {
            bytes = self.arrived.wait(bytes).unwrap();
        }
        *bytes -= 1;
    }
}

/// Both ends of the ring to the worker, and the sockets that wake the consumer and the producer.
fn ends() -> (Producer, Consumer, Arc<Socket>, Arc<Socket>) {
    shm::begin();
    let memory = ring::create().unwrap();
    let ((producer, _), (_, consumer)) =
        (ring::of_frontend(&memory).unwrap(), ring::of_worker(&memory).unwrap());
    shm::end();
    (producer, consumer, Arc::new(Socket::default()), Arc::new(Socket::default()))
}

/// Reads until `count` bytes have arrived, and sleeps while no byte waits.
fn read(consumer: &mut Consumer, count: usize, (own, other): (&Socket, &Socket)) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        consumer.read_all(&mut bytes).unwrap();
        if consumer.must_wake_producer() {
            other.wake();
        }
        if bytes.len() == count {
            return bytes;
        }
        if consumer.sleep() {
            own.sleep();
        }
    }
}

/// The consumer sleeps whenever it finds nothing: it gets both bytes.
fn a_sleeping_consumer_is_woken() {
    let (mut producer, mut consumer, of_consumer, of_producer) = ends();
    let wakes = of_consumer.clone();
    let writer = thread::spawn(move || {
        for byte in [1, 2] {
            assert_eq!(producer.write(&[byte]).unwrap(), 1);
            if producer.must_wake_consumer() {
                wakes.wake();
            }
        }
    });
    assert_eq!(read(&mut consumer, 2, (&of_consumer, &of_producer)), [1, 2]);
    writer.join().unwrap();
}

/// The ring is full, so the producer sleeps until there is room: its byte is written over the first
/// one.
fn a_sleeping_producer_is_woken() {
    let (mut producer, mut consumer, of_consumer, of_producer) = ends();
    assert_eq!(producer.write(&vec![1; CAPACITY]).unwrap(), CAPACITY);
    let (wakes, sleeps) = (of_consumer.clone(), of_producer.clone());
    let writer = thread::spawn(move || {
        while producer.write(&[2]).unwrap() == 0 {
            if producer.sleep().unwrap() {
                sleeps.sleep();
            }
        }
        if producer.must_wake_consumer() {
            wakes.wake();
        }
    });
    let bytes = read(&mut consumer, CAPACITY + 1, (&of_consumer, &of_producer));
    assert_eq!((bytes[0], bytes[CAPACITY]), (1, 2));
    writer.join().unwrap();
}

/// The writer takes a sum as often as it is listed: it gets each increment once, and the last one
/// too.
fn increments_are_taken_once() {
    let (sum, listed) = (Arc::new(HeldSum::new()), Arc::new(Mutex::new(0)));
    let recorders: Vec<_> = (0..2)
        .map(|_| {
            let (sum, listed) = (sum.clone(), listed.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    if sum.add(1.0) {
                        *listed.lock().unwrap() += 1;
                    }
                }
            })
        })
        .collect();
    let take = || {
        let times = std::mem::take(&mut *listed.lock().unwrap());
        (0..times).map(|_| sum.take()).sum::<f64>()
    };
    let mut taken = take();
    for recorder in recorders {
        recorder.join().unwrap();
        taken += take();
    }
    assert_eq!(taken, 4.0);
}

/// Runs a model in all interleavings with at most `preemptions` switches that no thread waits for.
fn explore(name: &str, preemptions: usize, model: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    let count = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = count.clone();
    builder.check(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model();
    });
    println!("{name}: {} executions", count.load(std::sync::atomic::Ordering::Relaxed));
}

fn main() {
    explore("a sleeping consumer is woken", 5, a_sleeping_consumer_is_woken);
    explore("a sleeping producer is woken", 5, a_sleeping_producer_is_woken);
    explore("increments are taken once", 4, increments_are_taken_once);
}
