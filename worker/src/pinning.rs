//! Registration of the arenas with a GPU driver, for direct copies.
//!
//! Contract: an arena drops the guard before it unmaps the memory (see `memory` in
//! `pharos_backend`), and every copy borrows the arena.

use std::sync::Arc;

use pharos_backend::runtime::{Guard, Session};

use crate::device::{Cuda, Fault, OWN};

/// Registers the beginning of both arenas with the driver if the model uses the instance's device
/// from this process; returns the number of bytes registered. A model that loads nothing on a
/// device gets no context there.
pub(crate) fn pin(session: &Session, cuda: &Arc<Cuda>) -> u64 {
    let Some(device) = cuda.device().filter(|device| device.pinned > 0) else { return 0 };
    if !cuda.call(|driver| Ok(driver.is_active(OWN))).unwrap_or(false) {
        return 0;
    }
    let register = |start, len| register(cuda, start, len);
    let inputs = session.arenas.inputs.pin(device.pinned, register);
    let outputs = session.arenas.outputs.pin(device.pinned, register);
    let outputs = outputs.and_then(|pinned| {
        pinned
            .ok_or_else(|| Fault::Refused("outputs are in use at the end of the range".to_owned()))
    });
    [inputs, outputs]
        .into_iter()
        .map(|pinned| {
            pinned
                .map_err(|fault| {
                    let number = device.number;
                    eprintln!(
                        "pharos-worker: cannot pin memory for copies from and to GPU {number}: \
                         {fault}"
                    );
                })
                .unwrap_or(0)
        })
        .sum()
}

/// Memory registered with the driver.
struct Registered {
    cuda: Arc<Cuda>,
    start: *mut u8,
}

// SAFETY: the address of a mapping that lives longer; no memory is accessed through it.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Drop for Registered {
    fn drop(&mut self) {
        let _ = self.cuda.call(|driver| {
            // SAFETY: registered by `register`; a copy borrows the arena that this value is a part
            // of.
            unsafe { driver.unregister(OWN, self.start) };
            Ok(())
        });
    }
}

fn register(cuda: &Arc<Cuda>, start: *mut u8, len: usize) -> Result<Guard, Fault> {
    // SAFETY: within the mapping, which is unmapped after the guard is dropped.
    cuda.call(|driver| unsafe { driver.register(OWN, start, len) })?;
    Ok(Box::new(Registered { cuda: cuda.clone(), start }))
}
