//! A connection whose frontend's end a test holds.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pharos::wire::ring;
use pharos_backend::runtime::{FrameReader, FrameWriter, Reader, Sender, connect};

/// The frontend's end: the bytes of frames in both directions.
pub(super) struct FrontendEnd {
    socket: UnixStream,
    reader: FrameReader,
    writer: FrameWriter,
}

/// Returns both ends of a connection, the worker's first.
pub(super) fn connection() -> ((Reader, Sender), FrontendEnd) {
    let (socket, worker) = UnixStream::pair().unwrap();
    let frames = ring::create().unwrap();
    let (producer, consumer) = ring::of_frontend(&frames).unwrap();
    let reader = FrameReader::new(socket.try_clone().unwrap(), consumer);
    let writer = FrameWriter::new(socket.try_clone().unwrap(), producer);
    (connect(worker, &frames).unwrap(), FrontendEnd { socket, reader, writer })
}

impl FrontendEnd {
    /// Limits how long a read waits.
    pub(super) fn set_read_timeout(&self, timeout: Duration) {
        self.socket.set_read_timeout(Some(timeout)).unwrap();
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
