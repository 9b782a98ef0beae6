//! The order of the loads of one model version. A reload replaces the series that views show, while
//! the earlier load still answers the requests that it accepted. Its later events count in the
//! series that are shown.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// The place of one load among the loads of its model version.
#[derive(Debug)]
pub(super) struct Succession<T> {
    /// Whether a successor exists. An event reads only this while no load has replaced its own.
    is_replaced: AtomicBool,
    /// The latest load that has replaced this one, so that those in between can end.
    successor: Mutex<Option<Arc<T>>>,
    /// The earlier loads that have not ended.
    predecessors: Mutex<Vec<Weak<T>>>,
}

impl<T> Default for Succession<T> {
    fn default() -> Self {
        Self {
            is_replaced: AtomicBool::new(false),
            successor: Mutex::default(),
            predecessors: Mutex::default(),
        }
    }
}

impl<T> Succession<T> {
    /// Makes `new` the successor of `before` and of all that `before` has replaced. `of` returns
    /// the succession of a load. Calls for the same model version must follow one another.
    pub(super) fn replace(new: &Arc<T>, before: &Arc<T>, of: impl Fn(&T) -> &Self) {
        let mut all = of(before).predecessors();
        all.push(Arc::clone(before));
        all.retain(|other| !Arc::ptr_eq(other, new));
        for other in &all {
            of(other).set_successor(Some(Arc::clone(new)));
        }
        of(new).set_successor(None);
        *of(new).predecessors.lock() = all.iter().map(Arc::downgrade).collect();
    }

    fn set_successor(&self, new: Option<Arc<T>>) {
        let is_replaced = new.is_some();
        // Dropped after the lock: it may be the last owner.
        let _former = std::mem::replace(&mut *self.successor.lock(), new);
        self.is_replaced.store(is_replaced, Ordering::Release);
    }

    /// Returns the latest successor of the load `this`, or the load itself.
    pub(super) fn current<'t>(&self, this: &'t T) -> Current<'t, T> {
        let successor = match self.is_replaced.load(Ordering::Acquire) {
            false => None,
            true => self.successor.lock().clone(),
        };
        Current { this, successor }
    }

    /// Returns the earlier loads that have not ended.
    pub(super) fn predecessors(&self) -> Vec<Arc<T>> {
        self.predecessors.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

/// A load, or its latest successor.
#[derive(Debug)]
pub(super) struct Current<'t, T> {
    this: &'t T,
    successor: Option<Arc<T>>,
}

impl<T> Deref for Current<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.successor.as_deref().unwrap_or(self.this)
    }
}
