//! The worker's end of the connection: frames in, frames out, blocking.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;

use pharos::wire::{PREFIX, ToFrontend, ToWorker, decode_to_worker, payload_length};

/// Frames over a socket.
pub(crate) struct Connection {
    reader: BufReader<UnixStream>,
    payload: Vec<u8>,
    out: Vec<u8>,
    /// Frames that came while a batch waited for something else.
    kept: VecDeque<ToWorker>,
}

impl Connection {
    pub(crate) fn new(socket: UnixStream) -> Self {
        let reader = BufReader::with_capacity(16 << 10, socket);
        Self { reader, payload: Vec::new(), out: Vec::new(), kept: VecDeque::new() }
    }

    /// The next frame; `None` when the frontend has closed the connection.
    pub(crate) fn receive(&mut self) -> io::Result<Option<ToWorker>> {
        match self.kept.pop_front() {
            Some(frame) => Ok(Some(frame)),
            None => self.read(),
        }
    }

    /// Has [`Connection::receive`] give this frame, which [`Connection::read`] gave too early.
    pub(crate) fn keep(&mut self, frame: ToWorker) {
        self.kept.push_back(frame);
    }

    /// The next frame that comes over the socket, past those that are kept.
    pub(crate) fn read(&mut self) -> io::Result<Option<ToWorker>> {
        let mut prefix = [0; PREFIX];
        match self.reader.read_exact(&mut prefix) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let length = payload_length(prefix).map_err(io::Error::other)?;
        self.payload.resize(length, 0);
        self.reader.read_exact(&mut self.payload)?;
        decode_to_worker(&self.payload).map(Some).map_err(io::Error::other)
    }

    pub(crate) fn send(&mut self, frame: &ToFrontend) -> io::Result<()> {
        self.out.clear();
        frame.encode(&mut self.out);
        self.reader.get_mut().write_all(&self.out)
    }
}
