//! Work of a batch on the device: uploads, kernels and downloads, each in a separate stream, so
//! that the downloads of one output overlap the computation of the next, and the uploads of the
//! next batch overlap this one.
//!
//! Contract: copies use bytes of the process after the call returns. [`Work`] borrows the bytes,
//! waits for its copies before it is dropped, and is never leaked (it is passed to no code that
//! could). A [`Prefetch`] owns its source and waits too. Ranges of device memory belong to buffers
//! and regions that were checked on creation; lengths are checked here.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use pharos::timeline::Instant;
use pharos_backend::Received;
use pharos_backend::runtime::clock;

use super::{Buffer, Cuda, DeviceMemory, Driver, Event, Fault, Function, OWN, Stream};

/// The streams of the instance's device, and the events that measure its batches.
pub(crate) struct Queues {
    cuda: Arc<Cuda>,
    upload: Stream,
    compute: Stream,
    download: Stream,
    start: Event,
    uploaded: Event,
    ready: Event,
    computed: Event,
    end: Event,
}

/// The times of a batch on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spans {
    /// Waiting time for its inputs: the part of their copies that did not overlap the previous
    /// batch.
    pub(crate) inputs: Duration,
    /// Time of the computation.
    pub(crate) computing: Duration,
}

impl Queues {
    /// Creates the streams and events of the instance's device, which has been opened.
    ///
    /// # Errors
    /// The driver cannot create more.
    pub(crate) fn new(cuda: &Arc<Cuda>) -> Result<Self, Fault> {
        let stream = || cuda.call(|driver| driver.stream(OWN));
        let event = || cuda.call(|driver| driver.event(OWN));
        Ok(Self {
            cuda: cuda.clone(),
            upload: stream()?,
            compute: stream()?,
            download: stream()?,
            start: event()?,
            uploaded: event()?,
            ready: event()?,
            computed: event()?,
            end: event()?,
        })
    }

    /// Returns the driver's handle of the stream for kernels, for a library that computes in a
    /// given stream. Valid as long as this value.
    pub(crate) fn compute_stream(&self) -> usize {
        self.compute.0
    }

    /// Begins a batch after the previous one is finished.
    ///
    /// # Errors
    /// The driver's error.
    pub(crate) fn begin<'m>(&'m self) -> Result<Work<'m>, Fault> {
        let began = clock::now();
        let work = Work { queues: self, began, done: false, memory: PhantomData };
        work.call(|driver| driver.record(OWN, self.start, self.compute))?;
        Ok(work)
    }

    /// Starts copying an input of the next batch, ordered after the inputs of the current one.
    ///
    /// # Errors
    /// The driver's error, or the buffer is too small.
    pub(crate) fn ahead(
        &self,
        from: Box<dyn CopySource>,
        buffer: Buffer,
    ) -> Result<Prefetch, Fault> {
        let ahead =
            Prefetch { cuda: self.cuda.clone(), stream: self.upload, from, buffer: Some(buffer) };
        let bytes = ahead.from.bytes();
        let to = ahead.memory();
        if bytes.len() != to.len() {
            return Err(Fault::Refused("a buffer is too small".to_owned()));
        }
        self.cuda.call(|driver| {
            // SAFETY: `ahead` keeps the bytes in place, and waits for the copy when it is dropped;
            // the lengths are equal.
            unsafe { driver.upload(OWN, self.upload, to.address(), bytes) }
        })?;
        Ok(ahead)
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        let _ = self.cuda.call(|driver| {
            [self.upload, self.compute, self.download]
                .into_iter()
                .for_each(|stream| driver.close_stream(OWN, stream));
            let events = [self.start, self.uploaded, self.ready, self.computed, self.end];
            events.into_iter().for_each(|event| driver.close_event(OWN, event));
            Ok(())
        });
    }
}

/// Bytes that stay at their address as long as this value lives, even if it is moved.
pub(crate) trait CopySource: Send {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

impl CopySource for Received {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// An input of the next batch that is being copied.
pub(crate) struct Prefetch {
    cuda: Arc<Cuda>,
    stream: Stream,
    from: Box<dyn CopySource>,
    buffer: Option<Buffer>,
}

impl Prefetch {
    /// Whether it copies exactly these bytes.
    pub(crate) fn is_of(&self, bytes: &[u8]) -> bool {
        std::ptr::eq(self.from.bytes(), bytes)
    }

    /// Returns its destination.
    pub(crate) fn memory(&self) -> DeviceMemory {
        let len = self.from.bytes().len();
        self.buffer.as_ref().map_or(DeviceMemory::new(OWN, 0, 0), |buffer| buffer.first(len))
    }

    /// Returns the buffer, once the work that uses it is done. Dropping an unused `Prefetch` waits
    /// for its copy.
    pub(crate) fn into_buffer(mut self) -> Option<Buffer> {
        self.buffer.take()
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        if self.buffer.is_some() {
            let _ = self.cuda.call(|driver| driver.synchronize(OWN, self.stream));
        }
    }
}

/// A batch on the device. Its borrows last until it is dropped, and dropping it waits for all work
/// that it began.
pub(crate) struct Work<'m> {
    queues: &'m Queues,
    began: Instant,
    done: bool,
    memory: PhantomData<&'m mut [u8]>,
}

impl<'m> Work<'m> {
    fn call<T>(&self, call: impl FnOnce(&dyn Driver) -> Result<T, Fault>) -> Result<T, Fault> {
        self.queues.cuda.call(call)
    }

    /// Returns the start time.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// Copies bytes of an input to the device.
    pub(crate) fn upload(&mut self, from: &'m [u8], to: DeviceMemory) -> Result<(), Fault> {
        if from.len() != to.len() || to.device() != OWN {
            return Err(misfit());
        }
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: borrowed for longer than this value lives, which waits for the copy; the lengths
        // agree.
        self.call(|driver| unsafe { driver.upload(OWN, self.queues.upload, to.address(), from) })
    }

    /// Copies bytes of an input from this or another device.
    pub(crate) fn bring(&mut self, from: DeviceMemory, to: DeviceMemory) -> Result<(), Fault> {
        self.copy(self.queues.upload, from, to)
    }

    /// Fills an input with zeros.
    pub(crate) fn zero(&mut self, memory: DeviceMemory) -> Result<(), Fault> {
        self.call(|driver| driver.zero(OWN, self.queues.upload, memory))
    }

    /// Makes kernels wait for the inputs, including inputs that were copied ahead.
    pub(crate) fn inputs_follow_no_more(&mut self) -> Result<(), Fault> {
        let Queues { upload, compute, uploaded, ready, .. } = *self.queues;
        self.call(|driver| {
            driver.record(OWN, uploaded, upload)?;
            driver.wait(OWN, compute, uploaded)?;
            driver.record(OWN, ready, compute)
        })
    }

    /// Runs a kernel.
    pub(crate) fn launch(
        &mut self,
        function: Function,
        arguments: &[u64],
        threads: u64,
    ) -> Result<(), Fault> {
        if threads == 0 {
            return Ok(());
        }
        self.call(|driver| driver.launch(OWN, self.queues.compute, function, arguments, threads))
    }

    /// Announces that a library is about to compute in [`Queues::compute_stream`], reading `from`
    /// and writing `to`.
    pub(crate) fn foreign_compute(
        &mut self,
        from: &[DeviceMemory],
        to: &[DeviceMemory],
    ) -> Result<(), Fault> {
        self.call(|driver| driver.foreign_compute(OWN, self.queues.compute, from, to))
    }

    /// Makes following downloads wait for the kernels launched so far.
    pub(crate) fn computed(&mut self) -> Result<(), Fault> {
        let Queues { compute, download, computed, .. } = *self.queues;
        self.call(|driver| {
            driver.record(OWN, computed, compute)?;
            driver.wait(OWN, download, computed)
        })
    }

    /// Copies an output to the process.
    pub(crate) fn download(&mut self, from: DeviceMemory, into: &'m mut [u8]) -> Result<(), Fault> {
        if from.len() != into.len() || from.device() != OWN {
            return Err(misfit());
        }
        if into.is_empty() {
            return Ok(());
        }
        // SAFETY: as in `upload`, and borrowed exclusively.
        self.call(|driver| unsafe {
            driver.download(OWN, self.queues.download, from.address(), into)
        })
    }

    /// Copies an output to its destination on this or another device.
    pub(crate) fn send(&mut self, from: DeviceMemory, to: DeviceMemory) -> Result<(), Fault> {
        self.copy(self.queues.download, from, to)
    }

    /// Waits for all work. Requires a call of [`Work::computed`] after the last kernel.
    ///
    /// # Errors
    /// The driver's error for any of the work.
    pub(crate) fn finish(mut self) -> Result<Spans, Fault> {
        let Queues { download, start, ready, computed, end, .. } = *self.queues;
        self.call(|driver| {
            driver.record(OWN, end, download)?;
            // Does not wait for the streams: the upload of the next batch may be in progress.
            driver.wait_here(OWN, end)
        })?;
        self.done = true;
        let between = |from, to| self.call(|driver| driver.elapsed(OWN, from, to));
        Ok(Spans { inputs: between(start, ready)?, computing: between(ready, computed)? })
    }

    fn copy(&self, stream: Stream, from: DeviceMemory, to: DeviceMemory) -> Result<(), Fault> {
        if from.len() != to.len() {
            return Err(misfit());
        }
        if from.is_empty() {
            Ok(())
        } else {
            self.call(|driver| driver.copy(OWN, stream, from, to))
        }
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        // A lost device no longer writes; borrowed memory is released with the process.
        let Queues { upload, compute, download, .. } = *self.queues;
        for stream in [upload, compute, download] {
            let _ = self.call(|driver| driver.synchronize(OWN, stream));
        }
    }
}

fn misfit() -> Fault {
    Fault::Refused("source and destination of a copy differ in length".to_owned())
}
