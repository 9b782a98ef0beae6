//! A connection whose frontend's end a test holds, and the load of the model that the tests run.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pharos::metrics::worker_metrics::WorkerMetrics;
use pharos::wire::{Load, PREFIX, ToFrontend, VERSION, decode_to_frontend, payload_length, ring};
use pharos_backend::runtime::{FrameReader, FrameWriter, Reader, Sender, connect};

/// The frontend's end: the bytes of frames in both directions.
pub(super) struct FrontendEnd {
    socket: UnixStream,
    reader: FrameReader,
    writer: FrameWriter,
}

/// Returns both ends of a connection, the worker's first.
pub(super) fn connection() -> (Reader, Sender, FrontendEnd) {
    let (socket, worker) = UnixStream::pair().unwrap();
    let frames = ring::create().unwrap();
    let (producer, consumer) = ring::of_frontend(&frames).unwrap();
    let reader = FrameReader::new(socket.try_clone().unwrap(), consumer);
    let writer = FrameWriter::new(socket.try_clone().unwrap(), producer);
    let (worker_reader, worker_sender) = connect(worker, &frames).unwrap();
    (worker_reader, worker_sender, FrontendEnd { socket, reader, writer })
}

/// The load of version 1 of the model `m`, on a processor.
pub(super) fn load(config: Vec<u8>) -> Load {
    Load {
        initial_states: String::new(),
        wire_version: VERSION,
        model: "m".into(),
        version: 1,
        instance: "m_0".into(),
        directory: String::new(),
        model_directory: String::new(),
        backend_settings: Vec::new(),
        verbose: false,
        config,
        threads: 1,
        spin_us: 0,
        metrics: WorkerMetrics::default().encode(),
        auto_detect: false,
        device: None,
    }
}

impl FrontendEnd {
    /// Limits how long a read waits.
    pub(super) fn set_read_timeout(&self, timeout: Duration) {
        self.socket.set_read_timeout(Some(timeout)).unwrap();
    }

    /// Reads until the worker closes the connection; returns the frames.
    pub(super) fn frames_to_the_end(&mut self) -> Vec<ToFrontend> {
        let mut bytes = Vec::new();
        let mut frames = Vec::new();
        self.read_to_end(&mut bytes).unwrap();
        let mut rest = bytes.as_slice();
        while let Some((prefix, after)) = rest.split_first_chunk::<PREFIX>() {
            let (payload, after) = after.split_at(payload_length(*prefix).unwrap());
            frames.push(decode_to_frontend(payload).unwrap());
            rest = after;
        }
        frames
    }
}

impl Read for FrontendEnd {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reader.read(buffer)
    }
}

impl Write for FrontendEnd {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
