//! Delays of builtin models, which end when all requests of the batch are cancelled.

use std::thread;
use std::time::Duration;

use pharos::error::InferError;
use pharos_backend::Batch;
use pharos_backend::runtime::clock;

/// How long a delay sleeps before it checks again whether the batch is cancelled.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Waits, and regularly checks whether the batch is cancelled.
pub(super) fn delay(duration: Duration, batch: &Batch<'_>) -> Result<(), InferError> {
    let end = clock::now() + duration;
    loop {
        if batch.all_cancelled() {
            return Err(InferError::cancelled());
        }
        match end - clock::now() {
            Duration::ZERO => return Ok(()),
            left => thread::sleep(left.min(CHECK_INTERVAL)),
        }
    }
}
