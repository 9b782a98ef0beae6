//! Transactions of the metrics cache: an event changes several cells, and a reading sees all of its
//! changes or none.
//!
//! An event begins a [`Transaction`], changes its cells and ends. A reading takes a snapshot:
//!
//! 1. It freezes the cells. Events that begin from then on are postponed: their changes wait in a
//!    queue.
//! 2. It waits until the events that began earlier have ended. They take some microseconds.
//! 3. It copies cells, which nothing changes meanwhile.
//! 4. It thaws the cells and applies the postponed changes.
//!
//! A snapshot is a consistent cut: a transaction that another one caused is never seen without its
//! cause. It contains every event that ended before it began. An event never waits: it costs two
//! additions to a counter that threads rarely share. Readings wait for events, and for each other:
//! a snapshot must only copy.
//!
//! An event that changes one cell needs no transaction: it is always seen as a whole. Postponed
//! changes may be applied after later changes of the same thread. Therefore a postponed change adds
//! to a cell, and cells that are set (gauges) are changed at once. A gauge is the only cell that
//! its event sets, so a reading is consistent nevertheless.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;

/// A postponed change.
type Change = Box<dyn FnOnce() + Send>;

/// The bit of the state that is set while the cells are frozen. The other bits are the number of
/// postponed transactions whose changes are not applied yet.
const FROZEN: u64 = 1;
const POSTPONED: u64 = 2;

/// The counters of running transactions, a power of two. Threads are distributed among them.
const SHARDS: usize = 64;

/// The number of transactions that some of the threads run; alone in its cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    running: AtomicU64,
}

/// The transaction that a thread runs.
#[derive(Clone, Copy, Default)]
struct Running {
    /// The address of its [`Transactions`]; 0 if the thread runs none.
    of: usize,
    is_postponed: bool,
}

thread_local! {
    static RUNNING: Cell<Running> = const { Cell::new(Running { of: 0, is_postponed: false }) };
    /// The changes of the postponed transactions that the thread runs, one within the other.
    static CHANGES: RefCell<Vec<Change>> = const { RefCell::new(Vec::new()) };
}

/// The transactions of one cache.
#[derive(Debug)]
pub struct Transactions {
    state: AtomicU64,
    shards: Box<[Shard]>,
    postponed: Sender<Vec<Change>>,
    /// Locked by a reading until its postponed changes are applied. Events do not lock it.
    reader: Mutex<Receiver<Vec<Change>>>,
}

impl Default for Transactions {
    fn default() -> Self {
        let (postponed, receiver) = channel();
        Self {
            state: AtomicU64::new(0),
            shards: std::iter::repeat_with(Shard::default).take(SHARDS).collect(),
            postponed,
            reader: Mutex::new(receiver),
        }
    }
}

impl Transactions {
    /// Begins a transaction of this thread, which ends when the result is dropped. Within another
    /// transaction of the thread, it is part of that one.
    ///
    /// A thread may not wait for other threads, or take a snapshot, before it ends the transaction.
    #[inline]
    pub fn begin(&self) -> Transaction<'_> {
        let outer = RUNNING.with(Cell::get);
        if outer.of == self.address() {
            return Transaction::new(self, Extent::Part, outer);
        }
        self.begin_within(outer)
    }

    /// Begins a transaction of a thread that runs none of this cache.
    #[inline(never)]
    fn begin_within(&self, outer: Running) -> Transaction<'_> {
        let shard = self.shard();
        loop {
            shard.running.fetch_add(1, Ordering::SeqCst);
            let mut state = self.state.load(Ordering::SeqCst);
            if state & FROZEN == 0 {
                RUNNING.with(|running| {
                    running.set(Running { of: self.address(), is_postponed: false })
                });
                return Transaction::new(self, Extent::Applied(shard), outer);
            }
            shard.running.fetch_sub(1, Ordering::SeqCst);
            while state & FROZEN != 0 {
                let more = state + POSTPONED;
                match self.state.compare_exchange_weak(
                    state,
                    more,
                    Ordering::SeqCst,
                    Ordering::SeqCst,
                ) {
                    Ok(_) => {
                        RUNNING.with(|running| {
                            running.set(Running { of: self.address(), is_postponed: true })
                        });
                        let first_change = CHANGES.with(|changes| changes.borrow().len());
                        return Transaction::new(self, Extent::Postponed(first_change), outer);
                    }
                    Err(changed) => state = changed,
                }
            }
        }
    }

    /// Applies an event to `target` in a separate transaction, or as part of the one that this
    /// thread runs.
    pub(super) fn apply<T: Send + Sync + 'static>(
        &self,
        target: &Arc<T>,
        event: impl FnOnce(&T) + Send + 'static,
    ) {
        let transaction = self.begin();
        if transaction.is_postponed() {
            let target = Arc::clone(target);
            transaction.postpone(move || event(&target));
        } else {
            event(target);
        }
    }

    /// Returns whether this thread runs a transaction whose changes are postponed.
    pub(super) fn are_postponed_here(&self) -> bool {
        let running = RUNNING.with(Cell::get);
        running.of == self.address() && running.is_postponed
    }

    /// Calls `copy` while no transaction changes a cell, and returns its result.
    pub fn snapshot<T>(&self, copy: impl FnOnce() -> T) -> T {
        if RUNNING.with(Cell::get).of == self.address() {
            debug_assert!(
                false,
                "a transaction of this thread has not ended: the snapshot would wait for it \
                 forever"
            );
            return copy();
        }
        let receiver = self.reader.lock();
        self.state.fetch_or(FROZEN, Ordering::SeqCst);
        let _thaw = Thaw { transactions: self, receiver: &receiver };
        for shard in &self.shards {
            wait_until(|| shard.running.load(Ordering::SeqCst) == 0);
        }
        copy()
    }

    #[inline]
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Returns the counter of this thread. The address of its thread-local memory distinguishes it
    /// from other threads.
    fn shard(&self) -> &Shard {
        let thread = RUNNING.with(|running| std::ptr::from_ref(running).addr() as u64);
        // Fibonacci hashing: the upper bits of the product depend on all bits of the address.
        let hash = thread.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        &self.shards[hash as usize % SHARDS]
    }
}

/// Ends the frozen state, also if the reading panics, and applies the postponed changes.
struct Thaw<'t> {
    transactions: &'t Transactions,
    receiver: &'t Receiver<Vec<Change>>,
}

impl Drop for Thaw<'_> {
    fn drop(&mut self) {
        let state = &self.transactions.state;
        state.fetch_and(!FROZEN, Ordering::SeqCst);
        // Events within the changes are part of them.
        let outer = RUNNING.with(Cell::get);
        RUNNING.with(|running| {
            running.set(Running { of: self.transactions.address(), is_postponed: false })
        });
        wait_until(|| {
            while let Ok(changes) = self.receiver.try_recv() {
                changes.into_iter().for_each(|change| change());
                state.fetch_sub(POSTPONED, Ordering::SeqCst);
            }
            state.load(Ordering::SeqCst) == 0
        });
        RUNNING.with(|running| running.set(outer));
    }
}

/// How much of the work of a transaction is done when.
enum Extent<'t> {
    /// Part of another transaction of the thread.
    Part,
    /// Its changes are applied at once. It is counted here.
    Applied(&'t Shard),
    /// Its changes are applied after the snapshot that is being taken: the thread's changes from
    /// this position on.
    Postponed(usize),
}

/// The time in which one event changes its cells. It stays on its thread.
#[must_use]
pub struct Transaction<'t> {
    transactions: &'t Transactions,
    extent: Extent<'t>,
    /// What the thread ran before.
    outer: Running,
    thread: PhantomData<*const ()>,
}

impl<'t> Transaction<'t> {
    fn new(transactions: &'t Transactions, extent: Extent<'t>, outer: Running) -> Self {
        Self { transactions, extent, outer, thread: PhantomData }
    }

    /// Returns whether its changes must be [postponed](Self::postpone).
    pub(super) fn is_postponed(&self) -> bool {
        match self.extent {
            Extent::Part => self.outer.is_postponed,
            Extent::Applied(_) => false,
            Extent::Postponed(_) => true,
        }
    }

    /// Applies a change after the snapshot that is being taken.
    pub(super) fn postpone(&self, change: impl FnOnce() + Send + 'static) {
        CHANGES.with(|changes| changes.borrow_mut().push(Box::new(change)));
    }

    /// Hands the changes of the thread from a position on to the reading that applies them.
    #[cold]
    fn send_changes(&self, first_change: usize) {
        let changes = CHANGES.with(|changes| changes.borrow_mut().split_off(first_change));
        RUNNING.with(|running| running.set(self.outer));
        // The receiver exists as long as `transactions`.
        let _ = self.transactions.postponed.send(changes);
    }
}

impl Drop for Transaction<'_> {
    #[inline]
    fn drop(&mut self) {
        match self.extent {
            Extent::Part => {}
            Extent::Applied(shard) => {
                RUNNING.with(|running| running.set(self.outer));
                shard.running.fetch_sub(1, Ordering::SeqCst);
            }
            Extent::Postponed(first_change) => self.send_changes(first_change),
        }
    }
}

/// Waits for other threads, which need microseconds unless the system runs something else on their
/// processor.
fn wait_until(mut is_reached: impl FnMut() -> bool) {
    /// Longer than the change of some cells takes.
    const SPINS: u32 = 200;
    let mut attempts = 0;
    while !is_reached() {
        if attempts < SPINS {
            std::hint::spin_loop();
        } else {
            rustix::thread::sched_yield();
        }
        attempts += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Two cells that every event changes together.
    #[derive(Debug, Default)]
    struct Pair {
        transactions: Transactions,
        first: AtomicU64,
        second: AtomicU64,
    }

    fn change(pair: &Arc<Pair>) {
        pair.transactions.apply(pair, |pair| {
            pair.first.fetch_add(1, Ordering::Relaxed);
            pair.second.fetch_add(1, Ordering::Relaxed);
        });
    }

    fn read(pair: &Pair) -> (u64, u64) {
        pair.transactions
            .snapshot(|| (pair.first.load(Ordering::Relaxed), pair.second.load(Ordering::Relaxed)))
    }

    #[test]
    fn events_within_a_snapshot_come_after_it() {
        let pair = Arc::new(Pair::default());
        change(&pair);
        pair.transactions.snapshot(|| {
            change(&pair);
            // Another thread does not wait for the snapshot either.
            std::thread::scope(|scope| scope.spawn(|| change(&pair)).join().map_or((), |()| ()));
            assert_eq!(pair.first.load(Ordering::Relaxed), 1);
        });
        assert_eq!(read(&pair), (3, 3));
    }

    #[test]
    fn parts_of_a_transaction_are_seen_together() {
        let pair = Arc::new(Pair::default());
        let begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let transaction = pair.transactions.begin();
            change(&pair);
            let reading = scope.spawn(|| {
                begun.store(true, Ordering::Release);
                read(&pair)
            });
            wait_until(|| begun.load(Ordering::Acquire));
            change(&pair);
            drop(transaction);
            assert_eq!(reading.join().ok(), Some((2, 2)));
        });
    }

    #[test]
    fn a_reading_that_panics_does_not_freeze_the_cells() {
        let pair = Arc::new(Pair::default());
        let reading = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pair.transactions.snapshot(|| {
                change(&pair);
                std::panic::panic_any(());
            });
        }));
        assert!(reading.is_err());
        change(&pair);
        assert_eq!(read(&pair), (2, 2));
    }

    #[test]
    fn transactions_of_two_caches_do_not_mix() {
        let one = Arc::new(Pair::default());
        let other = Arc::new(Pair::default());
        one.transactions.snapshot(|| {
            let transaction = one.transactions.begin();
            change(&one);
            other.transactions.snapshot(|| ());
            change(&other);
            change(&one);
            drop(transaction);
            assert_eq!(read(&other), (1, 1));
            assert_eq!(one.first.load(Ordering::Relaxed), 0);
        });
        assert_eq!(read(&one), (2, 2));
    }

    #[test]
    fn readings_of_many_threads_see_whole_events_and_none_is_lost() {
        const EVENTS: u64 = 20_000;
        let pair = Arc::new(Pair::default());
        std::thread::scope(|scope| {
            let writers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| (0..EVENTS).for_each(|_| change(&pair)))).collect();
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut last = 0;
                    while writers_run(&pair, 8 * EVENTS) {
                        let (first, second) = read(&pair);
                        assert_eq!(first, second);
                        assert!(first >= last, "{first} after {last}");
                        last = first;
                    }
                });
            }
            writers.into_iter().for_each(|writer| assert!(writer.join().is_ok()));
        });
        assert_eq!(read(&pair), (8 * EVENTS, 8 * EVENTS));
    }

    fn writers_run(pair: &Pair, all: u64) -> bool {
        pair.second.load(Ordering::Relaxed) < all
    }
}
