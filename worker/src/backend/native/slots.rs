//! Things that are handed out to the library and come back: a slot is used again, but never freed while the instance
//! lives, so that a pointer to something that has been given back finds an empty slot, or, when it is old, what is in it by
//! now.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pharos::error::InferError;

use super::foreign::misuse;

/// Slots of one kind.
pub(super) struct Pool<T> {
    // Held while a slot is taken or given back; the library may do so from any thread.
    slots: Mutex<Slots<T>>,
}

struct Slots<T> {
    all: BTreeMap<usize, Box<Slot<T>>>,
    /// The one that has been free for longest first.
    free: VecDeque<usize>,
}

/// So many stay free: who gives something back twice, while other threads get theirs, is to find its slot empty.
const RESTING: usize = 64;

/// A place for one thing.
pub(super) struct Slot<T> {
    // The library may use it from any thread.
    value: Mutex<Option<T>>,
    /// The instance: a [`Handle`](super::running::Handle).
    pub(super) instance: *const c_void,
    number: usize,
}

// SAFETY: `instance` is only an address here; code that follows it keeps to the contract of `running`.
unsafe impl<T: Send> Send for Slot<T> {}
// SAFETY: as above, and the value is behind a lock.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self { slots: Mutex::new(Slots { all: BTreeMap::new(), free: VecDeque::new() }) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Pool<T> {
    /// Puts something into a slot.
    pub(super) fn put(&self, instance: *const c_void, value: T) -> *const Slot<T> {
        let mut slots = lock(&self.slots);
        let rested = if slots.free.len() > RESTING { slots.free.pop_front() } else { None };
        let number = rested.unwrap_or(slots.all.len());
        let empty = || Box::new(Slot { value: Mutex::new(None), instance, number });
        let slot = slots.all.entry(number).or_insert_with(empty);
        *lock(&slot.value) = Some(value);
        ptr::from_ref(&**slot)
    }

    /// Takes what is in a slot, which is free then.
    ///
    /// # Errors
    /// Nothing is in it.
    pub(super) fn take(&self, slot: &Slot<T>, what: &str) -> Result<T, InferError> {
        let value = lock(&slot.value).take().ok_or_else(|| gone(what))?;
        lock(&self.slots).free.push_back(slot.number);
        Ok(value)
    }
}

impl<T> Slot<T> {
    /// Does something with what is in it.
    ///
    /// # Errors
    /// Nothing is in it, or that of the action.
    pub(super) fn with<R>(
        &self,
        what: &str,
        action: impl FnOnce(&mut T) -> Result<R, InferError>,
    ) -> Result<R, InferError> {
        action(lock(&self.value).as_mut().ok_or_else(|| gone(what))?)
    }
}

fn gone(what: &str) -> InferError {
    misuse(format!("{what} has been given back already"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_back_is_not_found_any_more() {
        let pool = Pool::default();
        let one = pool.put(ptr::null(), 1);
        // SAFETY: slots live as long as their pool.
        let (one, two) = unsafe { (&*one, &*pool.put(ptr::null(), 2)) };
        assert_eq!(one.with("it", |value| Ok(*value)), Ok(1));
        assert_eq!(pool.take(one, "it"), Ok(1));
        assert_eq!(
            pool.take(one, "it").map_err(|error| error.message),
            Err("it has been given back already".to_owned())
        );
        assert!(one.with("it", |_| Ok(())).is_err());
        assert_eq!(two.with("it", |value| Ok(*value)), Ok(2));
        let mut again = 0;
        for number in 0..10 * RESTING {
            // SAFETY: as above.
            let slot = unsafe { &*pool.put(ptr::null(), 3) };
            if ptr::eq(slot, one) {
                again += 1;
                assert!(number >= RESTING, "after {number}");
            }
            assert_eq!(pool.take(slot, "it"), Ok(3));
        }
        assert!(again > 1, "a free slot is used again");
        assert!(lock(&pool.slots).all.len() <= RESTING + 3);
    }
}
