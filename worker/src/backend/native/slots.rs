//! Handles for the library. A slot is reused but never freed while the instance lives, so a pointer
//! to a released handle finds an empty slot or, if it is old, the slot's current content.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use parking_lot::Mutex;
use pharos::error::InferError;
use pharos_backend::{Reply, Responder};

use super::foreign::misuse;

/// The slots of one kind.
pub(super) struct Pool<T> {
    // Locked while a slot is taken or released; the library may do so from any thread.
    slots: Mutex<Slots<T>>,
}

struct Slots<T> {
    all: BTreeMap<usize, Box<Slot<T>>>,
    /// Free slots, the longest free first.
    free: VecDeque<usize>,
}

/// This many slots stay free, so that a second release of a handle finds an empty slot even while
/// other threads take slots.
const MIN_FREE: usize = 64;

/// A slot for one value.
pub(super) struct Slot<T> {
    // The library may use it from any thread.
    value: Mutex<Option<T>>,
    /// The instance: a [`Handle`](super::running::Handle).
    pub(super) instance: *const c_void,
    number: usize,
}

// SAFETY: `instance` is only an address here; code that dereferences it follows the contract of
// `running`.
unsafe impl<T: Send> Send for Slot<T> {}
// SAFETY: as above, and the value is protected by a lock.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self { slots: Mutex::new(Slots { all: BTreeMap::new(), free: VecDeque::new() }) }
    }
}

impl<T> Pool<T> {
    /// Stores a value in a slot.
    pub(super) fn put(&self, instance: *const c_void, value: T) -> *const Slot<T> {
        let mut slots = self.slots.lock();
        let reusable = if slots.free.len() > MIN_FREE { slots.free.pop_front() } else { None };
        let number = reusable.unwrap_or(slots.all.len());
        let empty = || Box::new(Slot { value: Mutex::new(None), instance, number });
        let slot = slots.all.entry(number).or_insert_with(empty);
        *slot.value.lock() = Some(value);
        ptr::from_ref(&**slot)
    }

    /// Removes the value from a slot, which becomes free.
    ///
    /// # Errors
    /// The slot is empty.
    pub(super) fn take(&self, slot: &Slot<T>, what: &str) -> Result<T, InferError> {
        let value = slot.value.lock().take().ok_or_else(|| gone(what))?;
        self.slots.lock().free.push_back(slot.number);
        Ok(value)
    }
}

impl<T> Slot<T> {
    /// Runs an action on the value.
    ///
    /// # Errors
    /// The slot is empty, or the action's error.
    pub(super) fn with<R>(
        &self,
        what: &str,
        action: impl FnOnce(&mut T) -> Result<R, InferError>,
    ) -> Result<R, InferError> {
        action(self.value.lock().as_mut().ok_or_else(|| gone(what))?)
    }
}

fn gone(what: &str) -> InferError {
    misuse(format!("{what} was already released"))
}

/// `pharos_response`.
pub(super) type Responding = Slot<Answer>;
/// `pharos_responder`.
pub(super) type Detached = Slot<Arc<Responder>>;

/// The origin of a response.
pub(super) enum Answer {
    /// The batch being executed; the response is in
    /// [`Running::open`](super::running::Running::open).
    OfBatch,
    /// A request that the library answers individually.
    Own(Arc<Responder>, Reply),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_values_are_no_longer_found() {
        let pool = Pool::default();
        let one = pool.put(ptr::null(), 1);
        // SAFETY: slots live as long as their pool.
        let (one, two) = unsafe { (&*one, &*pool.put(ptr::null(), 2)) };
        assert_eq!(one.with("it", |value| Ok(*value)), Ok(1));
        assert_eq!(pool.take(one, "it"), Ok(1));
        assert_eq!(
            pool.take(one, "it").map_err(|error| error.message),
            Err("it was already released".to_owned())
        );
        assert!(one.with("it", |_| Ok(())).is_err());
        assert_eq!(two.with("it", |value| Ok(*value)), Ok(2));
        let mut reused = 0;
        for number in 0..10 * MIN_FREE {
            // SAFETY: as above.
            let slot = unsafe { &*pool.put(ptr::null(), 3) };
            if ptr::eq(slot, one) {
                reused += 1;
                assert!(number >= MIN_FREE, "after {number}");
            }
            assert_eq!(pool.take(slot, "it"), Ok(3));
        }
        assert!(reused > 1, "free slots are reused");
        assert!(pool.slots.lock().all.len() <= MIN_FREE + 3);
    }
}
