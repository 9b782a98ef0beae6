//! The server's pinned memory: limits how much of the instances' arenas may be registered with the
//! drivers of their GPUs (`--pinned-memory-pool-byte-size`). Registered memory cannot be returned
//! to the system.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::CAPACITY;

/// The unit of shares: a smaller amount is not worth registering.
const UNIT: u64 = 1 << 20;

/// The limit and the use of pinned memory.
#[derive(Debug)]
pub(crate) struct PinnedPool {
    size: u64,
    // Held only to update the counts.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes given to instances, registered or not.
    given: u64,
    registered: u64,
    /// The number of running instances on GPUs.
    instances: usize,
}

impl PinnedPool {
    /// Creates a pool of `size` bytes.
    pub(crate) fn new(size: u64) -> Arc<Self> {
        Arc::new(Self { size, state: Mutex::default() })
    }

    /// Returns the share of a starting instance: half of what is left, so that later instances get
    /// some too, divided equally between both of its arenas.
    pub(crate) fn share(self: &Arc<Self>) -> Share {
        let mut state = self.lock();
        let each = ((self.size - state.given) / 4).min(CAPACITY) / UNIT * UNIT;
        state.given += 2 * each;
        state.instances += 1;
        Share { pool: self.clone(), each, given: 2 * each, registered: 0 }
    }

    /// Returns the size of the pool (0 while no instance runs on a GPU) and the registered bytes.
    pub(crate) fn total_and_used(&self) -> (u64, u64) {
        let state = self.lock();
        (if state.instances > 0 { self.size } else { 0 }, state.registered)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// The share of one instance; returned to the pool on drop.
#[derive(Debug)]
pub(crate) struct Share {
    pool: Arc<PinnedPool>,
    each: u64,
    given: u64,
    registered: u64,
}

impl Share {
    /// Returns the number of bytes at the start of each arena.
    pub(crate) fn each(&self) -> u64 {
        self.each
    }

    /// Records that the instance has registered `bytes` of both arenas together, and returns the
    /// rest to the pool.
    pub(crate) fn registered(&mut self, bytes: u64) {
        let bytes = bytes.min(self.given);
        let mut state = self.pool.lock();
        state.given -= self.given - bytes;
        state.registered += bytes;
        state.registered -= self.registered;
        self.given = bytes;
        self.registered = bytes;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.given -= self.given;
        state.registered -= self.registered;
        state.instances -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_share_the_pool_and_give_back_what_they_do_not_register() {
        let pool = PinnedPool::new(256 << 20);
        assert_eq!(pool.total_and_used(), (0, 0));
        let mut one = pool.share();
        let mut two = pool.share();
        assert_eq!((one.each(), two.each()), (64 << 20, 32 << 20));
        assert_eq!(pool.total_and_used(), (256 << 20, 0));
        one.registered(128 << 20);
        // The driver has refused the registration.
        two.registered(0);
        assert_eq!(pool.total_and_used(), (256 << 20, 128 << 20));
        let three = pool.share();
        assert_eq!(three.each(), 32 << 20);
        drop(one);
        assert_eq!(pool.total_and_used(), (256 << 20, 0));
        assert_eq!(pool.share().each(), 48 << 20);
        drop((two, three));
        assert_eq!(pool.total_and_used(), (0, 0));
    }

    #[test]
    fn a_small_pool_pins_nothing_and_shares_never_exceed_the_pool() {
        let pool = PinnedPool::new((4 << 20) - 1);
        assert_eq!(pool.share().each(), 0);
        let pool = PinnedPool::new(9 << 20);
        let shares: Vec<Share> = (0..9).map(|_| pool.share()).collect();
        assert_eq!(shares.iter().map(|share| 2 * share.each()).sum::<u64>(), 6 << 20);
        let mut greedy = PinnedPool::new(8 << 20).share();
        greedy.registered(u64::MAX);
        assert_eq!(greedy.pool.total_and_used().1, 4 << 20);
        let pool = PinnedPool::new(1 << 60);
        assert_eq!(pool.share().each(), CAPACITY);
    }
}
