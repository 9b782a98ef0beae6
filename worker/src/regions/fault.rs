//! Handles the truncation of client memory during an access: the kernel sends SIGBUS, and the
//! handler maps zero pages at the fault and records it. Faults elsewhere end the process as usual.
//!
//! Contract of the handler: it only accesses atomics and makes two system calls (`mmap` over pages
//! of a mapping that a [`Guard`] covers, `sigaction` to restore the previous handler for a foreign
//! fault). It allocates nothing and takes no lock. List entries are never freed, only reused, so
//! the list can be walked at any moment. The handler replaces pages only within a watched range;
//! the owner of a range must unmap it after ending the watch.

use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use libc::{
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, SIGBUS,
};

/// A range of addresses.
struct Entry {
    /// 0 while the entry is unused.
    start: AtomicUsize,
    len: AtomicUsize,
    taken: AtomicBool,
    cut_off: AtomicBool,
    next: AtomicPtr<Entry>,
}

// A signal handler can only access statics.
static FIRST: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
/// The previous action for SIGBUS: Rust's handler, which ends the process.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());
static PAGE: AtomicUsize = AtomicUsize::new(0);
static INSTALL: Once = Once::new();

/// A watched range.
pub(super) struct Guard(&'static Entry);

impl Guard {
    /// Whether a fault occurred in the range.
    pub(super) fn is_truncated(&self) -> bool {
        self.0.cut_off.load(Ordering::Acquire)
    }

    /// Ends the watch.
    pub(super) fn release(&self) {
        self.0.start.store(0, Ordering::Release);
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Watches whole pages of a mapping.
pub(super) fn watch(start: usize, len: usize) -> Guard {
    INSTALL.call_once(install);
    let entry = free().unwrap_or_else(add);
    entry.cut_off.store(false, Ordering::Relaxed);
    entry.len.store(len, Ordering::Relaxed);
    entry.start.store(start, Ordering::Release);
    Guard(entry)
}

/// Claims an unused entry for the caller.
fn free() -> Option<&'static Entry> {
    let mut entries = entries();
    entries.find(|entry| {
        entry.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    })
}

/// Adds a new entry for the caller.
fn add() -> &'static Entry {
    let entry: &'static mut Entry = Box::leak(Box::new(Entry {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        taken: AtomicBool::new(true),
        cut_off: AtomicBool::new(false),
        next: AtomicPtr::new(ptr::null_mut()),
    }));
    let mut first = FIRST.load(Ordering::Acquire);
    let this: *mut Entry = entry;
    loop {
        // SAFETY: leaked, and only its atomics are written.
        unsafe { (*this).next.store(first, Ordering::Relaxed) };
        match FIRST.compare_exchange_weak(first, this, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: leaked above, and only its atomics are written from now on.
            Ok(_) => return unsafe { &*this },
            Err(other) => first = other,
        }
    }
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    let mut next: *const Entry = FIRST.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: entries are leaked, and their link does not change once they are in the list.
        let entry = unsafe { next.as_ref() }?;
        next = entry.next.load(Ordering::Relaxed);
        Some(entry)
    })
}

fn install() {
    PAGE.store(rustix::param::page_size(), Ordering::Relaxed);
    // SAFETY: all bytes zero is a valid `sigaction`: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let before = Box::leak(Box::new(action));
    // SAFETY: both are valid, and the handler keeps the contract above. It is installed before the
    // first range is watched.
    let installed = unsafe { libc::sigaction(SIGBUS, ptr::null(), before) } == 0;
    BEFORE.store(before, Ordering::Release);
    if installed {
        // SAFETY: as above.
        unsafe { libc::sigaction(SIGBUS, &action, ptr::null_mut()) };
    }
}

extern "C" fn on_fault(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid `info` to a handler with SA_SIGINFO, whose address field is
    // set for SIGBUS.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    if code == libc::BUS_ADRERR && replace(address) {
        return;
    }
    // A foreign fault: restore the previous action, which receives the fault as soon as the
    // instruction is repeated. SAFETY: `BEFORE` was filled by `install`, which ran before this
    // handler could.
    unsafe { libc::sigaction(SIGBUS, BEFORE.load(Ordering::Acquire), ptr::null_mut()) };
}

/// Maps zero pages from an address to the end of its watched range; returns whether there is such a
/// range.
fn replace(address: usize) -> bool {
    let page = PAGE.load(Ordering::Relaxed).max(1);
    for entry in entries() {
        let start = entry.start.load(Ordering::Acquire);
        let end = start.saturating_add(entry.len.load(Ordering::Relaxed));
        if start == 0 || !(start..end).contains(&address) {
            continue;
        }
        entry.cut_off.store(true, Ordering::Release);
        let from = address / page * page;
        let access = PROT_READ | PROT_WRITE;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        // SAFETY: the pages belong to a watched mapping, so no other code owns them; for its
        // readers this is like a write by the client.
        let mapped =
            unsafe { libc::mmap(from as *mut libc::c_void, end - from, access, flags, -1, 0) };
        return mapped != MAP_FAILED;
    }
    false
}
