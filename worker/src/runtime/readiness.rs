//! Whether the model is ready, when the frontend asks: on a thread of its own, so that a long batch does not keep the answer.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use pharos::wire::ToFrontend;

use super::{Runtime, Shared};
use crate::backend::Readiness;

impl Runtime {
    /// Has `readiness` answer from now on, until the process ends.
    ///
    /// # Errors
    /// There can be no other thread.
    pub(crate) fn answer_for(&self, readiness: Readiness) -> io::Result<()> {
        let shared = self.0.clone();
        thread::Builder::new().name("readiness".to_owned()).spawn(move || answer(&shared, readiness)).map(drop)
    }
}

fn answer(shared: &Arc<Shared>, mut readiness: Readiness) {
    loop {
        let asked = shared.wait(|state| match state.is_stopping() {
            true => Some(false),
            false => std::mem::take(&mut state.asked).then_some(true),
        });
        if asked != Some(true) {
            return;
        }
        // A panic there has been told, and is no yes.
        let ready = catch_unwind(AssertUnwindSafe(&mut readiness)).unwrap_or(false);
        shared.send(&ToFrontend::Ready(ready));
    }
}
