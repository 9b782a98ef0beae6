//! The frontend's end of the connection to one worker: frames in both directions, tensors in shared memory.
//!
//! A link lives as long as its process. Sending never waits: bytes that the socket does not accept immediately are queued and
//! written by the task that also reads ([`Link::run`]).

mod gather;
mod leases;
mod mismatch;
mod readiness;
mod regions;
mod scatter;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pharos::wire::{
    FIRST_CALL_LOAN, Loaded, MAX_FRAME, PREFIX, ToFrontend, ToWorker, decode_to_frontend, payload_length,
};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;

use crate::memory::{Arenas, Lease};
use pharos_os::event_loops::EventLoop;
use pharos_telemetry::metrics::Ring;
use readiness::Readiness;
use regions::Regions;

pub(crate) use gather::{Part, ToSend};
pub(crate) use readiness::all_ready;
pub(crate) use scatter::Scattered;

/// The connection to one worker process.
pub(crate) struct Link {
    writer: OwnedWriteHalf,
    /// Taken by [`Link::run`].
    reader: Mutex<Option<OwnedReadHalf>>,
    /// Serves the socket.
    pub(crate) event_loop: EventLoop,
    pub(crate) arenas: Arenas,
    pub(crate) ring: Ring,
    regions: Regions,
    // Held only for encoding and one non-blocking write.
    outbox: Mutex<Outbox>,
    unsent: Notify,
    /// Input memory that the worker may read, by the numbers of batches and loans.
    leases: Mutex<HashMap<u64, Arc<Lease>>>,
    next_loan: AtomicU64,
    /// Whether the worker needs all details of requests.
    details: AtomicBool,
    readiness: Readiness,
}

#[derive(Default)]
struct Outbox {
    /// Bytes that the socket has not accepted yet.
    bytes: Vec<u8>,
}

impl Link {
    /// Creates a link over a connected socket and the event loop that serves it.
    pub(crate) fn new(
        (socket, event_loop): (UnixStream, EventLoop),
        regions: OwnedFd,
        (arenas, ring): (Arenas, Ring),
    ) -> Self {
        let (reader, writer) = socket.into_split();
        Self {
            writer,
            reader: Mutex::new(Some(reader)),
            event_loop,
            arenas,
            ring,
            regions: Regions::new(regions),
            outbox: Mutex::default(),
            unsent: Notify::new(),
            leases: Mutex::default(),
            next_loan: AtomicU64::new(FIRST_CALL_LOAN),
            details: AtomicBool::new(false),
            readiness: Readiness::default(),
        }
    }

    /// Sends a frame, immediately or when the socket accepts it. Socket errors are reported by [`Link::run`]. Returns `false` and
    /// sends nothing if the frame is longer than a worker accepts.
    pub(crate) fn send(&self, frame: &ToWorker) -> bool {
        let mut outbox = lock(&self.outbox);
        let start = outbox.bytes.len();
        frame.encode(&mut outbox.bytes);
        if outbox.bytes.len() - start > PREFIX + MAX_FRAME {
            outbox.bytes.truncate(start);
            return false;
        }
        self.flush(&mut outbox);
        true
    }

    /// Records what the worker reported about itself.
    pub(crate) fn loaded(&self, loaded: &Loaded) {
        self.details.store(loaded.details, Ordering::Relaxed);
        self.readiness.set_supported(loaded.has_readiness_check);
    }

    /// Notifies the worker of released outputs if they are too many to wait for its next batch.
    pub(crate) fn send_released_if_many(&self) {
        if self.arenas.outputs.should_notify() {
            self.send_released();
        }
    }

    /// Notifies the worker of released outputs and of client memory that is no longer in use.
    pub(crate) fn release_unused(&self) {
        self.send_released();
        let unused = self.regions.take_unused();
        if !unused.is_empty() {
            self.send(&ToWorker::Unmap(unused));
        }
    }

    /// Notifies the worker of released outputs, so that it can return memory to the system.
    pub(crate) fn send_released(&self) {
        let offsets = self.arenas.outputs.take_released();
        if !offsets.is_empty() {
            self.send(&ToWorker::Release(offsets));
        }
    }

    fn flush(&self, outbox: &mut Outbox) {
        while !outbox.bytes.is_empty() {
            match self.writer.try_write(&outbox.bytes) {
                Ok(written) => {
                    outbox.bytes.drain(..written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unsent.notify_one();
                    return;
                }
                // The reader detects the end of the connection too, and handles it.
                Err(_) => outbox.bytes.clear(),
            }
        }
    }

    /// Reads frames until the connection ends or `on_frame` fails, and writes the frames that [`Link::send`] queued.
    ///
    /// # Errors
    /// The socket failed, or the worker sent an invalid frame.
    pub(crate) async fn run(&self, mut on_frame: impl FnMut(ToFrontend) -> io::Result<()>) -> io::Result<()> {
        let reader = lock(&self.reader).take();
        let mut reader = reader.ok_or_else(|| io::Error::other("the connection already has a reader"))?;
        let mut buffer = Vec::with_capacity(16 << 10);
        loop {
            let unsent = !lock(&self.outbox).bytes.is_empty();
            tokio::select! {
                read = reader.read_buf(&mut buffer) => match read {
                    Ok(0) => return Ok(()),
                    Ok(_) => take_frames(&mut buffer, &mut on_frame)?,
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                    Err(error) => return Err(error),
                },
                writable = self.writer.writable(), if unsent => {
                    writable?;
                    self.flush(&mut lock(&self.outbox));
                }
                () = self.unsent.notified() => {}
            }
        }
    }
}

/// Passes the complete frames at the front of the buffer to `on_frame`.
fn take_frames(buffer: &mut Vec<u8>, on_frame: &mut impl FnMut(ToFrontend) -> io::Result<()>) -> io::Result<()> {
    let mut taken = 0;
    while let Some(prefix) = buffer.get(taken..taken + PREFIX).and_then(|prefix| prefix.try_into().ok()) {
        let length = payload_length(prefix).map_err(io::Error::other)?;
        let Some(payload) = buffer.get(taken + PREFIX..taken + PREFIX + length) else {
            buffer.reserve(length);
            break;
        };
        on_frame(decode_to_frontend(payload).map_err(io::Error::other)?)?;
        taken += PREFIX + length;
    }
    buffer.drain(..taken);
    if buffer.capacity() == buffer.len() {
        buffer.reserve(4096);
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A link shared by instances and drivers.
pub(crate) type SharedLink = Arc<Link>;
