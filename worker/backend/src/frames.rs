//! The worker's end of the connection: reads and writes frames, blocking.

use std::io::{self, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::wire::{MAX_FRAME, PREFIX, ToFrontend, ToWorker, decode_to_worker, payload_length, ring};

use crate::frame_stream::{FrameReader, FrameWriter};

/// Reads frames.
pub struct Reader {
    stream: BufReader<FrameReader>,
    payload: Vec<u8>,
}

/// Writes frames, from any thread.
#[derive(Clone)]
pub struct Sender(Arc<Mutex<Writer>>);

struct Writer {
    stream: FrameWriter,
    out: Vec<u8>,
}

/// Opens the worker's end of a connection: the socket, and the memory of its rings.
///
/// # Errors
/// No file descriptor is left, or the memory cannot be mapped.
pub fn connect(socket: UnixStream, frames: impl AsFd) -> io::Result<(Reader, Sender)> {
    let (producer, consumer) = ring::of_worker(frames)?;
    let writer = Writer { stream: FrameWriter::new(socket.try_clone()?, producer), out: Vec::new() };
    let stream = BufReader::with_capacity(16 << 10, FrameReader::new(socket, consumer));
    Ok((Reader { stream, payload: Vec::new() }, Sender(Arc::new(Mutex::new(writer)))))
}

impl Reader {
    /// Sets how long [`Reader::read`] looks for the next frame before it sleeps, while frames come in that time.
    pub fn set_spin(&mut self, limit: Duration) {
        self.stream.get_mut().set_spin(limit);
    }

    /// Reads the next frame; `None` when the frontend has closed the connection.
    ///
    /// # Errors
    /// The connection is broken, or the bytes are not a frame.
    pub fn read(&mut self) -> io::Result<Option<ToWorker>> {
        let mut prefix = [0; PREFIX];
        match self.stream.read_exact(&mut prefix) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let length = payload_length(prefix).map_err(io::Error::other)?;
        self.payload.resize(length, 0);
        self.stream.read_exact(&mut self.payload)?;
        decode_to_worker(&self.payload).map(Some).map_err(io::Error::other)
    }

    /// Whether data has arrived or the connection has ended, in which case [`Reader::read`] does not block for long.
    pub(crate) fn has_some(&self) -> bool {
        !self.stream.buffer().is_empty() || self.stream.get_ref().has_some()
    }
}

impl Sender {
    /// Sends a frame. Frames keep the order of the calls.
    ///
    /// # Errors
    /// The connection is broken; or the frame is longer than the frontend accepts, and nothing was sent.
    pub fn send(&self, frame: &ToFrontend) -> io::Result<()> {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Writer { stream, out } = &mut *writer;
        out.clear();
        frame.encode(out);
        if out.len() > PREFIX + MAX_FRAME {
            let text = format!("{} bytes are more than the {MAX_FRAME} that fit into one message", out.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        stream.write_all(out)
    }

    /// Like [`Sender::send`], for a frame with content of the model, which may be too long. A broken connection is not reported
    /// here: reading frames reports it.
    ///
    /// # Errors
    /// The frame is too long; nothing was sent.
    pub(crate) fn send_if_it_fits(&self, frame: &ToFrontend) -> Result<(), InferError> {
        match self.send(frame) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, error.to_string()))
            }
            _ => Ok(()),
        }
    }
}
