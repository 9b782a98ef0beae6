//! The worker's end of the connection: reads and writes frames, blocking.

use std::io::{self, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{Parameter, Parameters};
use pharos::wire::{
    Done, MAX_FRAME, PREFIX, ToFrontend, ToWorker, decode_to_worker, payload_length, ring,
};

use crate::error::{run_error, wire_error};
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
    /// Frames that are sent together.
    held: Vec<u8>,
    is_holding: bool,
}

/// The most bytes that are held.
const MAX_HELD: usize = 64 << 10;

/// Opens the worker's end of a connection: the socket, and the memory of its rings.
///
/// # Errors
/// No file descriptor is left, or the memory cannot be mapped.
pub fn connect(socket: UnixStream, frames: impl AsFd) -> io::Result<(Reader, Sender)> {
    let (producer, consumer) = ring::of_worker(frames)?;
    let writer = Writer {
        stream: FrameWriter::new(socket.try_clone()?, producer),
        out: Vec::new(),
        held: Vec::new(),
        is_holding: false,
    };
    let stream = BufReader::with_capacity(16 << 10, FrameReader::new(socket, consumer));
    Ok((Reader { stream, payload: Vec::new() }, Sender(Arc::new(Mutex::new(writer)))))
}

impl Reader {
    /// Sets how long [`Reader::read`] looks for the next frame before it sleeps, while frames come
    /// in that time.
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

    /// Whether data has arrived or the connection has ended, in which case [`Reader::read`] does
    /// not block for long.
    pub(crate) fn has_some(&self) -> bool {
        !self.stream.buffer().is_empty() || self.stream.get_ref().has_some()
    }
}

impl Sender {
    /// Sends a frame. Frames keep the order of the calls.
    ///
    /// # Errors
    /// The connection is broken; or the frame is longer than the frontend accepts, and nothing was
    /// sent.
    pub fn send(&self, frame: &ToFrontend) -> io::Result<()> {
        self.write(frame)?.map_err(too_long)
    }

    /// Sends a frame, or returns its length if it is longer than the frontend accepts.
    fn write(&self, frame: &ToFrontend) -> io::Result<Result<(), usize>> {
        let mut writer = self.0.lock();
        let Writer { stream, out, held, is_holding } = &mut *writer;
        out.clear();
        frame.encode(out);
        if out.len() > PREFIX + MAX_FRAME {
            return Ok(Err(out.len()));
        }
        if *is_holding && held.len() + out.len() <= MAX_HELD {
            held.extend_from_slice(out);
            return Ok(Ok(()));
        }
        // Frames keep their order.
        if !held.is_empty() {
            let written = stream.write_all(held);
            held.clear();
            written?;
        }
        stream.write_all(out).map(Ok)
    }

    /// Holds the frames that are sent from now on, up to 64 KiB of them, or sends them together: the
    /// frontend wakes once for all of them.
    pub(crate) fn hold(&self, hold: bool) {
        let mut writer = self.0.lock();
        let Writer { stream, held, is_holding, .. } = &mut *writer;
        *is_holding = hold;
        if !hold && !held.is_empty() {
            // Reading frames reports a broken connection.
            let _ = stream.write_all(held);
            held.clear();
        }
    }

    /// Sends the outcome of a batch. If it is longer than the frontend accepts, the requests with
    /// the longest response parameters fail, until the rest fits.
    ///
    /// # Errors
    /// The connection is broken; or the outcome is too long without any parameters.
    pub fn send_done(&self, done: Done) -> io::Result<()> {
        let mut frame = ToFrontend::Done(done);
        loop {
            match (self.write(&frame)?, &mut frame) {
                (Ok(()), _) => return Ok(()),
                (Err(len), ToFrontend::Done(done)) if !done.parameters.is_empty() => {
                    fail_longest(done, len - PREFIX - MAX_FRAME);
                }
                (Err(len), _) => return Err(too_long(len)),
            }
        }
    }

    /// Like [`Sender::send`], for a frame with content of the model, which may be too long. A
    /// broken connection is not reported here: reading frames reports it.
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

fn too_long(len: usize) -> io::Error {
    let text = format!("{len} bytes are more than the {MAX_FRAME} that fit into one message");
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Fails the requests with the longest response parameters, until the outcome is shorter by more
/// than `excess` bytes.
fn fail_longest(done: &mut Done, excess: usize) {
    done.parameters.sort_by_cached_key(|(_, parameters)| length(parameters));
    let mut shorter = 0;
    while shorter <= excess
        && let Some((request, parameters)) = done.parameters.pop()
    {
        let len = length(&parameters);
        let text = format!(
            "the response has parameters of {len} bytes; with those of its batch, they are more \
             than the {MAX_FRAME} bytes that fit into one message"
        );
        shorter += len.saturating_sub(2 * text.len());
        if done.failed.iter().all(|(failed, _)| *failed != request) {
            done.failed.push((request, wire_error(run_error(text))));
        }
    }
}

/// Returns the bytes of the names and texts of parameters.
fn length(parameters: &Parameters) -> usize {
    let value =
        |value: &Parameter| if let Parameter::String(text) = value { text.len() } else { 0 };
    parameters.iter().map(|(name, of)| name.len() + value(of)).sum()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;

    use pharos::timeline::ComputeStamps;
    use pharos::wire::decode_to_frontend;

    use super::*;

    /// Sends the outcome of a batch whose requests have parameters of these sizes in MiB; returns
    /// what the frontend receives.
    fn sent(sizes: &[usize]) -> Done {
        let (socket, worker) = UnixStream::pair().unwrap();
        let rings = ring::create().unwrap();
        let (_, consumer) = ring::of_frontend(&rings).unwrap();
        let mut reader = FrameReader::new(socket, consumer);
        let texts = sizes.iter().map(|size| Parameter::String("x".repeat(size << 20)));
        let parameters = (0..)
            .zip(texts)
            .map(|(request, text)| (request, vec![("a".to_owned(), text)]))
            .collect();
        let stamps = ComputeStamps::default();
        let done = Done {
            batch: 1,
            stamps,
            error: None,
            failed: Vec::new(),
            outputs: Vec::new(),
            parameters,
            rescheduled: Vec::new(),
            open: Vec::new(),
            held: false,
        };
        let sender =
            thread::spawn(move || connect(worker, &rings).unwrap().1.send_done(done).unwrap());
        let mut prefix = [0; PREFIX];
        reader.read_exact(&mut prefix).unwrap();
        let mut payload = vec![0; payload_length(prefix).unwrap()];
        reader.read_exact(&mut payload).unwrap();
        sender.join().unwrap();
        match decode_to_frontend(&payload).unwrap() {
            ToFrontend::Done(done) => done,
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn the_longest_parameters_of_a_batch_that_are_too_long_in_sum_fail_their_requests() {
        for (sizes, expected) in [
            (&[1, 20, 40][..], &[][..]),
            (&[1, 70, 2], &[1]),
            (&[30, 40, 31, 41], &[3, 1]),
            (&[64], &[0]),
        ] {
            let done = sent(sizes);
            let failed: Vec<u32> = done.failed.iter().map(|(request, _)| *request).collect();
            assert_eq!(failed, expected, "{sizes:?}");
            assert_eq!(done.parameters.len() + expected.len(), sizes.len());
            for (request, error) in &done.failed {
                let len = sizes[*request as usize] << 20;
                assert!(
                    error.message.contains(&format!("parameters of {} bytes", len + 1)),
                    "{}",
                    error.message
                );
            }
        }
    }
}
