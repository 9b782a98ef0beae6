//! Costs of the responses of a decoupled model, by their number within the request, and the time to
//! the first response.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// The number of responses that are counted separately. All later ones are counted with the last of
/// these, since a model may send any number.
pub(super) const MAX_RESPONSES: u64 = 1024;

/// The outcome of a response of a decoupled model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseKind {
    /// It has outputs.
    Success,
    /// It has no outputs.
    Empty,
    /// It is an error.
    Fail,
    /// It ends a cancelled request.
    Cancel,
}

/// A number of events and their total duration.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Timed {
    pub(super) count: u64,
    pub(super) ns: u64,
}

/// The n-th responses of all requests, with the categories of the statistics extension.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ResponseCell {
    pub(super) compute_infer: Timed,
    pub(super) compute_output: Timed,
    pub(super) success: Timed,
    pub(super) fail: Timed,
    pub(super) empty_response: Timed,
    pub(super) cancel: Timed,
}

/// The responses of one decoupled model.
#[derive(Debug, Default)]
pub(super) struct ResponseCells {
    /// Whether the model is decoupled; other models have no such series.
    on: AtomicBool,
    /// By number of the response. The lock is held for a few additions for each response.
    cells: Mutex<BTreeMap<u64, ResponseCell>>,
}

impl Clone for ResponseCells {
    fn clone(&self) -> Self {
        Self { on: AtomicBool::new(self.is_on()), cells: Mutex::new(self.read()) }
    }
}

impl ResponseCells {
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(super) fn switch_on(&self) {
        self.on.store(true, Ordering::Relaxed);
    }

    /// Counts the response of this number, with the nanoseconds of execution and of its outputs.
    pub(super) fn add(&self, number: u64, kind: ResponseKind, infer_ns: u64, output_ns: u64) {
        let add = |duration: &mut Timed, ns: u64| {
            duration.count += 1;
            duration.ns = duration.ns.wrapping_add(ns);
        };
        let mut cells = self.cells.lock();
        let cell = cells.entry(number.min(MAX_RESPONSES - 1)).or_default();
        let total = infer_ns.wrapping_add(output_ns);
        match kind {
            ResponseKind::Success => add(&mut cell.success, total),
            ResponseKind::Empty => add(&mut cell.empty_response, total),
            ResponseKind::Fail => add(&mut cell.fail, total),
            ResponseKind::Cancel => return add(&mut cell.cancel, total),
        }
        add(&mut cell.compute_infer, infer_ns);
        if kind != ResponseKind::Empty {
            add(&mut cell.compute_output, output_ns);
        }
    }

    /// Returns all counts, by number of the response.
    pub(super) fn read(&self) -> BTreeMap<u64, ResponseCell> {
        self.cells.lock().clone()
    }
}
