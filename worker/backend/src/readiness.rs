//! Answers readiness queries of the frontend on a separate thread, so that a long batch does not
//! delay the answer.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use pharos::wire::ToFrontend;

use crate::backend::Readiness;
use crate::session::{Runtime, Session};

impl Runtime {
    /// Starts a thread on which `readiness` answers the frontend until the process ends. For the
    /// worker's runtime.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn answer_readiness(&self, readiness: Readiness) -> io::Result<()> {
        let session = self.session().clone();
        thread::Builder::new()
            .name("readiness".to_owned())
            .spawn(move || answer(&session, readiness))
            .map(drop)
    }
}

fn answer(session: &Arc<Session>, mut readiness: Readiness) {
    loop {
        let asked = session.connection.wait(|state| match state.is_stopping() {
            true => Some(false),
            false => std::mem::take(&mut state.readiness_asked).then_some(true),
        });
        if asked != Some(true) {
            return;
        }
        // A panic has printed its message; the model is not ready.
        let ready = catch_unwind(AssertUnwindSafe(&mut readiness)).unwrap_or(false);
        session.arenas.send(&ToFrontend::Ready(ready));
    }
}
