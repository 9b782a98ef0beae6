//! The worker's end of a link, for tests that play the worker.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;

use pharos::wire::ring::{self, Consumer};
use pharos::wire::{PREFIX, ToWorker, decode_to_worker, payload_length};
use tokio::net::UnixStream;

use super::{Link, LinkParts, SharedLink};
use crate::memory;
use pharos_os::event_loops::EventLoops;
use pharos_telemetry::metrics::Ring;

/// What a worker has of a link. The connection is open while this lives.
pub(crate) struct WorkerEnd {
    frames: Consumer,
    /// The memory of the arena of inputs.
    pub(crate) inputs: OwnedFd,
    /// The memory of the arena of outputs.
    pub(crate) outputs: OwnedFd,
    _sockets: (StdStream, StdStream),
}

/// Creates a link and the worker's end of it. The caller is in a Tokio runtime.
pub(crate) fn connect() -> (SharedLink, WorkerEnd) {
    let (ours, theirs) = StdStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let frames = ring::create().unwrap();
    let (arenas, inputs, outputs) = memory::create().unwrap();
    let (ring, _, _) = Ring::create("m_0").unwrap();
    let (regions, of_regions) = StdStream::pair().unwrap();
    let link = Link::new(LinkParts {
        socket: UnixStream::from_std(ours).unwrap(),
        event_loop: EventLoops::default().of_link(),
        frames: ring::of_frontend(&frames).unwrap(),
        regions: regions.into(),
        arenas,
        ring,
    });
    let frames = ring::of_worker(&frames).unwrap().1;
    (Arc::new(link), WorkerEnd { frames, inputs, outputs, _sockets: (theirs, of_regions) })
}

impl WorkerEnd {
    /// Returns the frames that were sent to the worker since the last call.
    pub(crate) fn received(&mut self) -> Vec<ToWorker> {
        let mut bytes = Vec::new();
        self.frames.read_all(&mut bytes).unwrap();
        let (mut rest, mut frames) = (bytes.as_slice(), Vec::new());
        while let Some((prefix, after)) = rest.split_first_chunk::<PREFIX>() {
            let (payload, after) = after.split_at(payload_length(*prefix).unwrap());
            frames.push(decode_to_worker(payload).unwrap());
            rest = after;
        }
        frames
    }
}
