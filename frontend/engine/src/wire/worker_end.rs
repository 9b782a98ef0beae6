//! The worker's end of a link, for tests that play the worker.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;

use std::io::Write;

use pharos::wire::ring::{self, Consumer, Producer};
use pharos::wire::{PREFIX, ToFrontend, ToWorker, decode_to_worker, payload_length};
use tokio::net::UnixStream;

use super::{Link, LinkParts, SharedLink};
use crate::memory;
use crate::sample_ring::SampleRing;
use pharos_os::event_loops::EventLoops;

/// What a worker has of a link. The connection is open while this lives.
pub(crate) struct WorkerEnd {
    frames: (Producer, Consumer),
    /// The memory of the arena of inputs.
    pub(crate) inputs: OwnedFd,
    /// The memory of the arena of outputs.
    pub(crate) outputs: OwnedFd,
    sockets: (StdStream, StdStream),
}

/// Creates a link that is shared, and the worker's end of it. The caller is in a Tokio runtime.
pub(crate) fn connect() -> (SharedLink, WorkerEnd) {
    let (link, end) = create();
    (Arc::new(link), end)
}

/// Creates a link and the worker's end of it. The caller is in a Tokio runtime.
pub(crate) fn create() -> (Link, WorkerEnd) {
    let (ours, theirs) = StdStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let frames = ring::create().unwrap();
    let (arenas, inputs, outputs) = memory::create().unwrap();
    let (ring, _, _) = SampleRing::create("m_0").unwrap();
    let (regions, of_regions) = StdStream::pair().unwrap();
    let link = Link::new(LinkParts {
        socket: UnixStream::from_std(ours).unwrap(),
        event_loop: EventLoops::default().of_link(),
        frames: ring::of_frontend(&frames).unwrap(),
        regions: regions.into(),
        arenas,
        ring,
    });
    theirs.set_nonblocking(true).unwrap();
    let frames = ring::of_worker(&frames).unwrap();
    (link, WorkerEnd { frames, inputs, outputs, sockets: (theirs, of_regions) })
}

impl WorkerEnd {
    /// Returns the frames that were sent to the worker since the last call.
    pub(crate) fn received(&mut self) -> Vec<ToWorker> {
        let mut bytes = Vec::new();
        self.frames.1.read_all(&mut bytes).unwrap();
        let mut rest = bytes.as_slice();
        let mut frames = Vec::new();
        while let Some((prefix, after)) = rest.split_first_chunk::<PREFIX>() {
            let (payload, after) = after.split_at(payload_length(*prefix).unwrap());
            frames.push(decode_to_worker(payload).unwrap());
            rest = after;
        }
        frames
    }

    /// Sends a frame to the frontend, which has room for it, and wakes the frontend.
    pub(crate) fn send(&mut self, frame: &ToFrontend) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        assert_eq!(self.frames.0.write(&bytes).unwrap(), bytes.len());
        // The frontend may have closed the connection, or has not read earlier wake-ups.
        let _ = self.sockets.0.write(&[1]);
    }
}
