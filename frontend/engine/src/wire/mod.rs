//! The frontend's end of the connection to one worker: frames in both directions, tensors in shared
//! memory.
//!
//! A link lives as long as its process. Frames travel in rings of shared memory. Sending never
//! waits: bytes for which the ring has no room are queued, and written when the worker has read
//! ([`Link::flush_unsent`]).

mod gather;
mod leases;
mod readiness;
mod regions;
mod scatter;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod worker_end;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use pharos::wire::ring::{Consumer, Corrupt, Producer};
use pharos::wire::{
    FIRST_CALL_LOAN, Loaded, MAX_FRAME, PREFIX, ToFrontend, ToWorker, decode_to_frontend,
    payload_length,
};
use rustix::net::{SendFlags, Shutdown};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::memory::{Arenas, Lease};
use crate::sample_ring::SampleRing;
use pharos_os::event_loops::EventLoop;
use readiness::Readiness;
use regions::Regions;

pub(crate) use gather::{BatchedRequest, ToSend};
pub(crate) use readiness::all_ready;
pub(crate) use scatter::Scattered;

/// The connection to one worker process.
pub(crate) struct Link {
    writer: OwnedWriteHalf,
    /// Taken by the session.
    reader: Mutex<Option<(OwnedReadHalf, Consumer)>>,
    /// Serves the socket.
    pub(crate) event_loop: EventLoop,
    pub(crate) arenas: Arenas,
    pub(crate) ring: SampleRing,
    regions: Regions,
    // Held only for encoding, a copy into the ring and one non-blocking wake-up.
    outbox: Mutex<Outbox>,
    /// Input memory that the worker may read, by the numbers of batches and loans.
    leases: Mutex<HashMap<u64, Arc<Lease>>>,
    next_loan: AtomicU64,
    /// Whether the worker needs all details of requests.
    details: AtomicBool,
    readiness: Readiness,
}

struct Outbox {
    producer: Producer,
    /// Bytes for which the ring had no room.
    bytes: Vec<u8>,
    fault: Option<Corrupt>,
}

/// The parts of a link.
pub(crate) struct LinkParts {
    /// The connected socket.
    pub(crate) socket: UnixStream,
    /// The loop that reports the socket's events.
    pub(crate) event_loop: EventLoop,
    /// The rings of frames.
    pub(crate) frames: (Producer, Consumer),
    /// The socket of regions.
    pub(crate) regions: OwnedFd,
    pub(crate) arenas: Arenas,
    /// The ring of samples.
    pub(crate) ring: SampleRing,
}

impl Link {
    /// Creates a link.
    pub(crate) fn new(batched_requests: LinkParts) -> Self {
        let LinkParts { socket, event_loop, frames: (producer, consumer), regions, arenas, ring } =
            batched_requests;
        let (reader, writer) = socket.into_split();
        Self {
            writer,
            reader: Mutex::new(Some((reader, consumer))),
            event_loop,
            arenas,
            ring,
            regions: Regions::new(regions),
            outbox: Mutex::new(Outbox { producer, bytes: Vec::new(), fault: None }),
            leases: Mutex::default(),
            next_loan: AtomicU64::new(FIRST_CALL_LOAN),
            details: AtomicBool::new(false),
            readiness: Readiness::default(),
        }
    }

    /// Ends the connection, also if the other end stays open. The session still reads the frames in
    /// the ring.
    pub(crate) fn close(&self) {
        // Fails if the connection has ended already.
        let _ = rustix::net::shutdown(self.writer.as_ref(), Shutdown::Both);
    }

    /// Sends a frame, immediately or when the ring has room. The session reports faults of the
    /// connection. Returns `false` and sends nothing if the frame is longer than a worker accepts.
    pub(crate) fn send(&self, frame: &ToWorker) -> bool {
        let must_wake = {
            let mut outbox = self.outbox.lock();
            let start = outbox.bytes.len();
            frame.encode(&mut outbox.bytes);
            if outbox.bytes.len() - start > PREFIX + MAX_FRAME {
                outbox.bytes.truncate(start);
                return false;
            }
            self.flush(&mut outbox)
        };
        self.wake_worker_if(must_wake);
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

    /// Announces these regions again with the next batches that use them: the worker could not
    /// receive their descriptors.
    pub(crate) fn announce_again(&self, regions: &[u64]) {
        self.regions.announce_again(regions);
    }

    /// Notifies the worker of released outputs, so that it can return memory to the system.
    pub(crate) fn send_released(&self) {
        let offsets = self.arenas.outputs.take_released();
        if !offsets.is_empty() {
            self.send(&ToWorker::Release(offsets));
        }
    }

    /// Writes queued frames, as far as there is room. The worker sends a wake-up when there is
    /// more.
    pub(crate) fn flush_unsent(&self) {
        let must_wake = {
            let mut outbox = self.outbox.lock();
            !outbox.bytes.is_empty() && self.flush(&mut outbox)
        };
        self.wake_worker_if(must_wake);
    }

    /// Writes queued frames. Returns whether the worker must be woken, which the caller does
    /// without the lock: the worker that it wakes can take its processor, and an event loop would
    /// wait for the lock of a thread in the background.
    #[must_use]
    fn flush(&self, outbox: &mut Outbox) -> bool {
        if let Err(corrupt) = outbox.write() {
            // Ends the session, which reports the fault.
            outbox.fault = Some(corrupt);
            outbox.bytes.clear();
            self.close();
        }
        outbox.producer.must_wake_consumer()
    }

    /// Wakes a worker that sleeps. If the socket is full, it holds bytes that wake it already; its
    /// reader handles other errors.
    fn wake_worker_if(&self, must_wake: bool) {
        if must_wake {
            let _ = rustix::net::send(
                self.writer.as_ref(),
                &[1],
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            );
        }
    }

    /// Returns the fault of the ring of frames to the worker, if the worker has corrupted it.
    pub(crate) fn fault(&self) -> Option<Corrupt> {
        self.outbox.lock().fault
    }

    /// Returns the ends that a session reads: the socket and the ring of frames from the worker.
    /// Only once.
    pub(crate) fn take_reader(&self) -> Option<(OwnedReadHalf, Consumer)> {
        self.reader.lock().take()
    }
}

impl Outbox {
    /// # Errors
    /// The worker has corrupted the ring.
    fn write(&mut self) -> Result<(), Corrupt> {
        let mut sent = 0;
        while let Some(rest) = self.bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            let count = self.producer.write(rest)?;
            sent += count;
            if count == 0 && self.producer.sleep()? {
                break;
            }
        }
        self.bytes.drain(..sent);
        Ok(())
    }
}

/// Passes the complete frames at the front of the buffer to `on_frame`.
///
/// # Errors
/// A frame is invalid, or `on_frame` fails.
pub(crate) fn take_frames(
    buffer: &mut Vec<u8>,
    mut on_frame: impl FnMut(ToFrontend) -> io::Result<()>,
) -> io::Result<()> {
    let mut taken = 0;
    while let Some(prefix) =
        buffer.get(taken..taken + PREFIX).and_then(|prefix| prefix.try_into().ok())
    {
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

/// A link shared by instances and drivers.
pub(crate) type SharedLink = Arc<Link>;
