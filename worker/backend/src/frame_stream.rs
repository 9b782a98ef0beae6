//! One end of a connection as two blocking streams of bytes: through the rings, with the socket to
//! sleep and to wake.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pharos::wire::ring::{Consumer, Producer};
use pharos::yielding::Yielding;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, send};

use crate::clock;
use crate::spin::{Spin, yield_processor};

/// How often a writer yields the processor before it pauses for room in the ring.
const YIELDS: u32 = 64;
/// The pause of a writer that waits for room. The other side reads while this side writes, so that
/// room comes soon.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000 };

/// The reading half.
#[derive(Debug)]
pub struct FrameReader {
    socket: UnixStream,
    consumer: Consumer,
    spin: Spin,
}

/// The writing half.
#[derive(Debug)]
pub struct FrameWriter {
    socket: UnixStream,
    producer: Producer,
    yielding: Yielding,
}

impl FrameReader {
    /// Joins the socket of a connection with a ring.
    pub fn new(socket: UnixStream, consumer: Consumer) -> Self {
        Self { socket, consumer, spin: Spin::default() }
    }

    /// Sets how long a read looks for bytes before it sleeps, while they come in that time.
    pub fn set_spin(&mut self, limit: Duration) {
        self.spin = Spin::new(limit);
    }

    /// Whether bytes wait or the connection has ended.
    pub(crate) fn has_some(&self) -> bool {
        !self.consumer.is_empty() || has_ended(&self.socket, &Timespec::default())
    }
}

impl Read for FrameReader {
    /// Waits for bytes. Returns 0 if the other side has closed the connection and all its bytes are
    /// read.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut has_ended = false;
        let mut has_looked = false;
        loop {
            let count = self.consumer.read(buffer).map_err(io::Error::other)?;
            if count > 0 && self.consumer.must_wake_producer() {
                wake(&self.socket);
            }
            if count > 0 || has_ended || buffer.is_empty() {
                return Ok(count);
            }
            if !has_looked && self.spin.is_enabled() {
                has_looked = true;
                if self.spin.look(clock::now(), || !self.consumer.is_empty()) {
                    continue;
                }
            }
            if !self.consumer.sleep() {
                continue;
            }
            let woken = self.socket.read(&mut [0; 64]);
            self.consumer.wake();
            match woken {
                Ok(count) => has_ended = count == 0,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl FrameWriter {
    /// Joins the socket of a connection with a ring.
    pub fn new(socket: UnixStream, producer: Producer) -> Self {
        Self { socket, producer, yielding: Yielding::default() }
    }
}

impl Write for FrameWriter {
    /// Waits for room.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut attempts = 0;
        loop {
            let count = self.producer.write(bytes).map_err(io::Error::other)?;
            if self.producer.must_wake_consumer() {
                wake(&self.socket);
            }
            if count > 0 || bytes.is_empty() {
                return Ok(count);
            }
            attempts += 1;
            let now = clock::now();
            if attempts < YIELDS && self.yielding.is_allowed(now) {
                yield_processor(&mut self.yielding, now);
            } else if has_ended(&self.socket, &PAUSE) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Wakes the other side. If the socket's buffer is full, bytes wait there that wake it already; if
/// the connection has ended, its reader notices.
fn wake(socket: &UnixStream) {
    let _ = send(socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Returns whether the other side closes the connection within this time.
fn has_ended(socket: &UnixStream, within: &Timespec) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    matches!(poll(&mut polled, Some(within)), Ok(1..))
}
