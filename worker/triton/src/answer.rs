//! The response channel of one request, shared by the request, its response factories and its
//! responses: the request may be released before its last response is sent, and the other way
//! around. Dropping the last of them fails a request that is not answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pharos::error::{ErrorCode, InferError};
use pharos_backend::{ReceivedOnDevice, Reply, Responder};

use crate::fault::Fault;
use crate::kept::Kept;
use crate::model::Model;

/// How far a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// More responses may follow.
    Open,
    /// The last response is sent.
    Closed,
    /// The request is executed again and answered then.
    Rescheduled,
}

/// Where the responses go.
pub(crate) enum Channel {
    /// To the server, at any time.
    Single(Responder),
    /// To the batch, which waits for all its requests: the server stores the states of a batch when
    /// it ends.
    Joined(Kept),
}

/// The response channel of one request.
pub(crate) struct Answer {
    pub(crate) model: Arc<Model>,
    channel: Channel,
    /// The positions of the requested outputs; empty for all.
    wanted: Vec<u16>,
    /// Locked to read or write it only.
    progress: Mutex<Progress>,
    released: AtomicBool,
}

impl Answer {
    pub(crate) fn new(model: &Arc<Model>, channel: Channel, wanted: Vec<u16>) -> Arc<Self> {
        Arc::new(Self {
            model: model.clone(),
            channel,
            wanted,
            progress: Mutex::new(Progress::Open),
            released: AtomicBool::new(false),
        })
    }

    /// Returns the positions of the requested outputs; empty for all.
    pub(crate) fn wanted(&self) -> &[u16] {
        &self.wanted
    }

    /// Whether the client has requested the output at this position.
    pub(crate) fn wants(&self, output: usize) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|wanted| usize::from(*wanted) == output)
    }

    /// Whether the request is cancelled. A step of a sequence with states is executed to its end.
    pub(crate) fn is_cancelled(&self) -> bool {
        match &self.channel {
            Channel::Single(responder) => responder.is_cancelled(),
            Channel::Joined(_) => false,
        }
    }

    /// Returns the place of the request, for the traces of its calls.
    pub(crate) fn place(&self) -> (u64, u32) {
        match &self.channel {
            Channel::Single(responder) => responder.place(),
            Channel::Joined(kept) => kept.place(),
        }
    }

    /// Returns the memory on a GPU where the client wants `len` bytes of an output, if it is aligned. A
    /// batch that waits for its requests joins their outputs in the process's memory.
    pub(crate) fn place_on_device(&self, output: usize, len: usize) -> Option<ReceivedOnDevice> {
        match &self.channel {
            Channel::Single(responder) => {
                responder.place_on_device(output, len).filter(ReceivedOnDevice::is_aligned)
            }
            Channel::Joined(_) => None,
        }
    }

    /// Returns what the batch keeps of the request, if the batch waits for it.
    pub(crate) fn kept(&self) -> Option<&Kept> {
        match &self.channel {
            Channel::Single(_) => None,
            Channel::Joined(kept) => Some(kept),
        }
    }

    /// Marks the request as released by the backend.
    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Release);
        if let Some(kept) = self.kept() {
            kept.released();
        }
    }

    /// Whether the backend has released the request.
    pub(crate) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Whether the request needs no response any more.
    pub(crate) fn has_ended(&self) -> bool {
        *self.progress.lock() != Progress::Open
    }

    /// Marks the request as rescheduled.
    ///
    /// # Errors
    /// Its last response is sent.
    pub(crate) fn reschedule(&self) -> Result<(), Fault> {
        let mut progress = self.progress.lock();
        if *progress != Progress::Open {
            return Err(Fault::invalid(
                "a request is released to be rescheduled after its last response",
            ));
        }
        *progress = Progress::Rescheduled;
        Ok(())
    }

    /// Whether the request is rescheduled.
    pub(crate) fn is_rescheduled(&self) -> bool {
        *self.progress.lock() == Progress::Rescheduled
    }

    /// Sends a response. The only response of a model that is not decoupled is always its last.
    ///
    /// # Errors
    /// The last response is already sent, or this one cannot be sent.
    pub(crate) fn respond(&self, reply: Reply, last: bool) -> Result<(), Fault> {
        let last = last || !self.model.config.decoupled;
        self.advance(last)?;
        let responder = match &self.channel {
            Channel::Single(responder) => responder,
            Channel::Joined(kept) => {
                kept.reply(reply);
                return Ok(());
            }
        };
        match responder.respond(reply, last) {
            // The client is gone: the response counts as sent, as in Triton.
            Err(error) if error.code == ErrorCode::Cancelled => Ok(()),
            Err(error) if last => {
                responder.fail(error.clone());
                Err(error.into())
            }
            sent => sent.map_err(Fault::from),
        }
    }

    /// Ends the responses without another one.
    ///
    /// # Errors
    /// The last response is already sent, in a decoupled model. In others, the only response has
    /// ended the request.
    pub(crate) fn finish(&self) -> Result<(), Fault> {
        if let Err(fault) = self.advance(true) {
            return if self.model.config.decoupled { Err(fault) } else { Ok(()) };
        }
        match &self.channel {
            // Without a reply, the batch fails the request.
            Channel::Joined(_) => Ok(()),
            Channel::Single(responder) => match responder.finish() {
                Err(error) if error.code == ErrorCode::Cancelled => Ok(()),
                ended => ended.map_err(Fault::from),
            },
        }
    }

    /// Fails the request, unless it has ended.
    pub(crate) fn fail(&self, error: InferError) {
        if self.advance(true).is_err() {
            return;
        }
        match &self.channel {
            Channel::Single(responder) => responder.fail(error),
            Channel::Joined(kept) => kept.reply(Reply { error: Some(error), ..Reply::default() }),
        }
    }

    /// Notes a response, or with `last` the last one.
    fn advance(&self, last: bool) -> Result<(), Fault> {
        let mut progress = self.progress.lock();
        match *progress {
            Progress::Open => {
                if last {
                    *progress = Progress::Closed;
                }
                Ok(())
            }
            Progress::Closed => {
                Err(Fault::invalid("a response is sent after the request's last response"))
            }
            Progress::Rescheduled => {
                Err(Fault::invalid("a response is sent for a request that is rescheduled"))
            }
        }
    }
}
