//! The session of a worker process: reads its frames and samples until the connection ends. Passes replies to the model's driver,
//! calls to [`Calls`], and the process's state changes to its supervisor as [`Event`]s. Never starts or ends a process.

use std::io;
use std::sync::{Arc, Weak};

use pharos::error::InferError;
use pharos::id::InstanceId;
use pharos::metrics::cache::Cache;
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{Done, Loaded, ToFrontend, message_or_default};
use tokio::sync::mpsc;

use crate::calls::{Calls, Models};
use crate::scheduler::Driver;
use crate::wire::{Link, SharedLink};
use pharos_os::clock;

/// The first batch number of warm-up batches.
pub(crate) const WARM_UP: u64 = 1 << 63;

/// A state change for the supervisor of the process.
pub(crate) enum Event {
    Loaded(Loaded),
    LoadFailed(String),
    /// A decoupled model has answered a warm-up request with an error.
    WarmUpFailed(InferError),
    /// A warm-up batch is done.
    WarmedUp(Done),
    /// The connection has ended, with the reason.
    Ended(String),
}

/// The connection to one process of an instance.
pub(crate) struct Session {
    link: SharedLink,
    driver: Arc<Driver>,
    instance: InstanceId,
    calls: Calls,
    cache: Arc<Cache>,
    events: mpsc::UnboundedSender<Event>,
    began: Instant,
}

impl Session {
    /// Starts a task on the event loop of the link that reads the worker's frames. `models` are the models that the worker may call.
    pub(crate) fn start(
        link: SharedLink,
        driver: Arc<Driver>,
        instance: InstanceId,
        models: Weak<dyn Models>,
        cache: Arc<Cache>,
    ) -> mpsc::UnboundedReceiver<Event> {
        let (events, receiver) = mpsc::unbounded_channel();
        let calls = Calls::new(link.clone(), driver.clone(), models);
        let session = Self { link: link.clone(), driver, instance, calls, cache, events, began: clock::now() };
        link.event_loop.spawn(session.run());
        receiver
    }

    /// Reads frames until the connection ends.
    async fn run(self) {
        let (ring_link, cache, driver) = (self.link.clone(), self.cache.clone(), self.driver.clone());
        let mut pump = tokio::spawn(async move { ring_link.ring.pump(&cache, &driver.series).await });
        let end = tokio::select! {
            end = Link::run(&self.link, |frame| self.on_frame(frame)) => end,
            fault = &mut pump => Err(io::Error::other(fault.unwrap_or_else(|error| error.to_string()))),
        };
        pump.abort();
        self.link.ring.close(&self.cache, &self.driver.series);
        let reason = end.err().map_or_else(|| "the worker closed the connection".to_owned(), |error| error.to_string());
        self.report(Event::Ended(reason));
    }

    /// # Errors
    /// The frame, or the ring of samples, is invalid.
    fn on_frame(&self, frame: ToFrontend) -> io::Result<()> {
        match frame {
            ToFrontend::Done(done) if done.batch >= WARM_UP => {
                self.drain_samples();
                self.report(Event::WarmedUp(done));
            }
            ToFrontend::Done(mut done) => {
                done.stamps = self.plausible(done.stamps);
                self.drain_samples();
                self.driver.batch_done(self.instance, &self.link, done);
            }
            ToFrontend::Response(response) if response.batch >= WARM_UP => {
                self.driver.discard(&self.link, &response);
                if let Some(error) = response.error {
                    self.report(Event::WarmUpFailed(error.into()));
                }
            }
            ToFrontend::Response(mut response) => {
                response.stamps = self.plausible(response.stamps);
                self.drain_samples();
                self.driver.response(self.instance, &self.link, response)?;
            }
            ToFrontend::Call(call) => self.calls.infer(call),
            ToFrontend::Manage(manage) => self.calls.manage(manage),
            ToFrontend::Taken(call, taken) => self.calls.taken(call, taken),
            ToFrontend::CancelCall(call) => self.calls.abandon(call),
            ToFrontend::Returned(loans) => self.link.give_back(&loans),
            ToFrontend::Ready(ready) => self.link.ready_reported(ready),
            ToFrontend::Loaded(loaded) => {
                self.link.loaded(&loaded);
                self.report(Event::Loaded(loaded));
            }
            ToFrontend::LoadFailed(reason) => self.report(Event::LoadFailed(message_or_default(reason))),
        }
        self.link.ring.fault().map_or(Ok(()), |fault| Err(io::Error::other(fault)))
    }

    /// Takes the samples before their reply, so that a client with the answer finds its samples in the metrics.
    fn drain_samples(&self) {
        self.link.ring.drain(&self.cache, &self.driver.series);
    }

    /// Clamps the worker's stamps to the time of the session.
    fn plausible(&self, stamps: ComputeStamps) -> ComputeStamps {
        stamps.within(self.began, clock::now())
    }

    fn report(&self, event: Event) {
        // Fails if the supervisor has already ended the process.
        let _ = self.events.send(event);
    }
}
