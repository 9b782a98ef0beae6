//! The objects behind the opaque pointers of the interface.
//!
//! Each object begins with a number of its type, which is cleared when the object is deleted. Every
//! function checks this number first, so a pointer to an object of another type, or a second
//! deletion, is an error instead of a corrupt heap. The memory of a deleted object is returned to the
//! allocator only after many later deletions; a library that uses it meanwhile gets the same error.

use std::alloc::Layout;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::fault::Fault;
use crate::foreign::put;

/// A type of objects.
pub(crate) trait Kind {
    /// The number at the start of its objects; different for each type.
    const TAG: u32;
    /// Its name for messages, with the article.
    const NAME: &'static str;
}

/// An object of the interface.
#[repr(C)]
pub(crate) struct Object<T> {
    tag: AtomicU32,
    value: UnsafeCell<MaybeUninit<T>>,
}

/// The tag of a deleted object.
const DELETED: u32 = 0x6465_6c00;
/// How many deleted objects keep their memory: few enough to stay in a processor's cache.
const KEPT: usize = 256;

/// The memory of a deleted object.
struct Deleted {
    memory: *mut u8,
    layout: Layout,
}

// SAFETY: nothing else uses the memory of a deleted object except to read its tag, which is atomic.
unsafe impl Send for Deleted {}

/// Deleted objects, the oldest first. Locked to add or remove an entry only.
static DELETED_OBJECTS: Mutex<VecDeque<Deleted>> = Mutex::new(VecDeque::new());

impl<T: Kind> Object<T> {
    pub(crate) fn new(value: T) -> Self {
        let value = UnsafeCell::new(MaybeUninit::new(value));
        Self { tag: AtomicU32::new(T::TAG), value }
    }

    /// Marks the object as deleted.
    ///
    /// # Errors
    /// It is deleted already.
    fn clear(&self) -> Result<(), Fault> {
        let cleared =
            self.tag.compare_exchange(T::TAG, DELETED, Ordering::AcqRel, Ordering::Relaxed);
        cleared.map(drop).map_err(|_| deleted::<T>())
    }
}

/// Creates an object, which lives until [`take`] or [`discard`].
pub(crate) fn make<T: Kind>(value: T) -> *mut Object<T> {
    Box::into_raw(Box::new(Object::new(value)))
}

/// Objects that belong to another one, in one piece of memory: a library gets pointers to them, and
/// cannot delete them.
pub(crate) struct Objects<T: Kind>(ManuallyDrop<Vec<Object<T>>>);

// SAFETY: the objects may be used from any thread.
unsafe impl<T: Kind + Send> Send for Objects<T> {}

impl<T: Kind> Objects<T> {
    /// Creates room for this many objects, which keep their places.
    pub(crate) fn with_room(count: usize) -> Self {
        Self(ManuallyDrop::new(Vec::with_capacity(count)))
    }

    /// Adds an object; `None` if there is no room.
    pub(crate) fn add(&mut self, value: T) -> Option<*mut Object<T>> {
        if self.0.len() == self.0.capacity() {
            return None;
        }
        self.0.push(Object::new(value));
        self.pointer(self.0.len() - 1)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns a pointer to the object at this position.
    pub(crate) fn pointer(&self, position: usize) -> Option<*mut Object<T>> {
        // Not from a reference to the element: the library uses the pointer later.
        (position < self.0.len()).then(|| self.0.as_ptr().wrapping_add(position).cast_mut())
    }

    /// Returns the values of the objects.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        // SAFETY: initialized: only `drain` takes values out, and it leaves no object here.
        self.0.iter().map(|object| unsafe { (*object.value.get()).assume_init_ref() })
    }

    /// Deletes the objects and returns their values.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        let objects = std::mem::replace(&mut self.0, ManuallyDrop::new(Vec::new()));
        Drained { objects, next: 0 }
    }
}

impl<T: Kind> From<Vec<Object<T>>> for Objects<T> {
    fn from(objects: Vec<Object<T>>) -> Self {
        Self(ManuallyDrop::new(objects))
    }
}

impl<T: Kind> Drop for Objects<T> {
    fn drop(&mut self) {
        self.drain().for_each(drop);
    }
}

/// Deletes objects one after the other, and their memory at the end.
struct Drained<T: Kind> {
    objects: ManuallyDrop<Vec<Object<T>>>,
    next: usize,
}

impl<T: Kind> Iterator for Drained<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let object = self.objects.get(self.next)?;
        self.next += 1;
        // Nothing else clears the tag of an object that belongs to another one.
        object.tag.store(DELETED, Ordering::Release);
        // SAFETY: initialized, and read here only.
        Some(unsafe { (*object.value.get()).assume_init_read() })
    }
}

impl<T: Kind> Drop for Drained<T> {
    fn drop(&mut self) {
        self.by_ref().for_each(drop);
        if let Ok(layout) = Layout::array::<Object<T>>(self.objects.capacity())
            && layout.size() > 0
        {
            keep(self.objects.as_mut_ptr().cast(), layout);
        }
    }
}

/// Creates an object for the library, which deletes it, and writes the pointer to its place. Without
/// a valid place there is no object: nothing could delete it, and it would keep what it refers to, for
/// example the request of a response.
///
/// # Safety
/// The contract of this package.
///
/// # Errors
/// The place is null or not aligned.
pub(crate) unsafe fn give<T: Kind>(place: *mut *mut Object<T>, value: T) -> Result<(), Fault> {
    // SAFETY: the caller guarantees it.
    unsafe {
        put(place, std::ptr::null_mut())?;
        put(place, make(value))
    }
}

/// Returns the value of an object.
///
/// # Safety
/// The contract of this package: the pointer is null, or points to an object that [`make`] has
/// returned. The reference is not used after the object is deleted.
///
/// # Errors
/// The pointer is null, or the object has another type or is deleted.
pub(crate) unsafe fn get<'a, T: Kind>(pointer: *const Object<T>) -> Result<&'a T, Fault> {
    // SAFETY: the caller guarantees it.
    let object = unsafe { live(pointer) }?;
    // SAFETY: the value of an object that is not deleted is initialized, and only `take` moves it.
    Ok(unsafe { (*object.value.get()).assume_init_ref() })
}

/// Deletes an object and returns its value.
///
/// # Safety
/// As for [`get`].
///
/// # Errors
/// As for [`get`].
pub(crate) unsafe fn take<T: Kind>(pointer: *mut Object<T>) -> Result<T, Fault> {
    // SAFETY: the caller guarantees it.
    let object = unsafe { live(pointer) }?;
    object.clear()?;
    // SAFETY: initialized, and the cleared tag ends all further access to it.
    let value = unsafe { (*object.value.get()).assume_init_read() };
    keep(pointer.cast(), Layout::new::<Object<T>>());
    Ok(value)
}

/// Deletes an object with its value.
///
/// # Safety
/// As for [`get`].
///
/// # Errors
/// As for [`get`].
pub(crate) unsafe fn discard<T: Kind>(pointer: *mut Object<T>) -> Result<(), Fault> {
    // SAFETY: the caller guarantees it.
    let object = unsafe { live(pointer) }?;
    object.clear()?;
    // SAFETY: initialized, and the cleared tag ends all further access to it.
    unsafe { (*object.value.get()).assume_init_drop() };
    keep(pointer.cast(), Layout::new::<Object<T>>());
    Ok(())
}

/// Keeps the memory of deleted objects, allocated with this layout, until many others are deleted.
fn keep(memory: *mut u8, layout: Layout) {
    let oldest = {
        let mut all = DELETED_OBJECTS.lock();
        all.push_back(Deleted { memory, layout });
        if all.len() > KEPT { all.pop_front() } else { None }
    };
    if let Some(Deleted { memory, layout }) = oldest {
        // SAFETY: allocated with this layout, and removed from the list exactly once.
        unsafe { std::alloc::dealloc(memory, layout) };
    }
}

/// Deletes an object; null is allowed, as in Triton.
///
/// # Safety
/// As for [`get`].
///
/// # Errors
/// The object has another type or is deleted.
pub(crate) unsafe fn delete<T: Kind>(pointer: *mut Object<T>) -> Result<(), Fault> {
    // SAFETY: the caller guarantees it.
    if pointer.is_null() { Ok(()) } else { unsafe { discard(pointer) } }
}

/// # Safety
/// As for [`get`].
unsafe fn live<'a, T: Kind>(pointer: *const Object<T>) -> Result<&'a Object<T>, Fault> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Fault::invalid(format!("{} is {pointer:?}, which is not valid", T::NAME)));
    }
    // SAFETY: the caller guarantees it.
    let object = unsafe { &*pointer };
    match object.tag.load(Ordering::Acquire) {
        tag if tag == T::TAG => Ok(object),
        DELETED => Err(deleted::<T>()),
        _ => Err(Fault::invalid(format!(
            "a pointer is used as {} and points to something else",
            T::NAME
        ))),
    }
}

fn deleted<T: Kind>() -> Fault {
    Fault::invalid(format!("{} is used after its deletion or release", T::NAME))
}

/// Names a type of objects: its type, its number and its name.
macro_rules! kinds {
    ($($type:ty = $tag:literal, $name:literal;)*) => { $(
        impl $crate::object::Kind for $type {
            const TAG: u32 = 0x7068_0000 + $tag;
            const NAME: &'static str = $name;
        }
    )* };
}
pub(crate) use kinds;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Number(u64);
    struct Other;
    struct Holder(#[allow(dead_code)] Arc<()>);
    kinds! {
        Number = 1001, "a number";
        Other = 1002, "another object";
        Holder = 1003, "a holder";
    }

    #[test]
    fn without_a_place_for_the_pointer_there_is_no_object() {
        let held = Arc::new(());
        // SAFETY: null is not valid, which the function checks; then a valid place.
        unsafe {
            assert!(give(std::ptr::null_mut(), Holder(held.clone())).is_err());
            assert_eq!(Arc::strong_count(&held), 1);
            let mut place = std::ptr::null_mut();
            assert!(give(&raw mut place, Holder(held.clone())).is_ok());
            assert_eq!(Arc::strong_count(&held), 2);
            assert!(take(place).is_ok());
        }
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn objects_that_belong_to_another_one_keep_their_places_until_it_is_deleted() {
        let mut numbers = Objects::with_room(2);
        let pointers = [7, 8].map(|number| numbers.add(Number(number)).unwrap());
        assert!(numbers.add(Number(9)).is_none(), "there is room for two");
        assert_eq!(numbers.pointer(1), Some(pointers[1]));
        assert_eq!(numbers.pointer(2), None);
        assert_eq!(numbers.iter().map(|number| number.0).collect::<Vec<_>>(), [7, 8]);
        // SAFETY: the memory of deleted objects is kept until many others are deleted.
        let read =
            |pointer: *mut Object<Number>| unsafe { get(pointer) }.map(|number| number.0).ok();
        assert_eq!(pointers.map(read), [Some(7), Some(8)]);
        assert_eq!(numbers.drain().map(|number| number.0).collect::<Vec<_>>(), [7, 8]);
        assert_eq!(pointers.map(read), [None, None]);

        let held = Arc::new(());
        let holders = Objects::from(vec![Object::new(Holder(held.clone()))]);
        assert_eq!(Arc::strong_count(&held), 2);
        drop(holders);
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn wrong_pointers_are_errors() {
        let number = make(Number(7));
        // SAFETY: the pointers are null or of objects that `make` has returned.
        unsafe {
            assert_eq!(get(number).map(|number| number.0).ok(), Some(7));
            let text = |fault: Option<Fault>| fault.map(|fault| fault.text.into_owned());
            assert_eq!(
                text(get(number.cast::<Object<Other>>()).err()).as_deref(),
                Some("a pointer is used as another object and points to something else")
            );
            assert_eq!(
                text(get::<Number>(std::ptr::null()).err()).as_deref(),
                Some("a number is 0x0, which is not valid")
            );
            assert_eq!(take(number).map(|number| number.0).ok(), Some(7));
            for fault in [take(number).err(), get(number).err()] {
                assert_eq!(
                    text(fault).as_deref(),
                    Some("a number is used after its deletion or release")
                );
            }
        }
    }
}
