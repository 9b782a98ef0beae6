//! The session of a worker process: reads its frames and samples until the connection ends. Passes
//! replies to the model's driver, calls to [`Calls`], and the process's state changes to its
//! supervisor as [`Event`]s. Never starts or ends a process.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use pharos::error::InferError;
use pharos::id::InstanceId;
use pharos::metrics::cache::Cache;
use pharos::timeline::Instant;
use pharos::wire::ring::Consumer;
use pharos::wire::{
    BackendActivity, Done, Loaded, MAX_ACTIVITY_NAME, Response, ToFrontend, message_or_default,
};
use tokio::io::Interest;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{Notify, mpsc};

use crate::calls::{Caller, Calls, Models};
use crate::load_progress::InstanceProgress;
use crate::scheduler::Driver;
use crate::wire::{SharedLink, take_frames};
use pharos_os::clock;
use pharos_os::event_loops::{self, PolledSource};

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
    /// The connection has ended. A fault is its own cause; otherwise it probably ended with the
    /// process.
    Ended {
        reason: String,
        is_fault: bool,
    },
}

/// The connection to one process of an instance.
pub(crate) struct Session {
    link: SharedLink,
    driver: Arc<Driver>,
    instance: InstanceId,
    calls: Calls,
    cache: Arc<Cache>,
    progress: Arc<InstanceProgress>,
    events: mpsc::UnboundedSender<Event>,
    began: Instant,
    // Held while frames are handled, so that they keep their order.
    inbox: Mutex<Inbox>,
    failed: Notify,
}

/// The frames from the worker.
struct Inbox {
    consumer: Consumer,
    /// Bytes taken from the ring that are no complete frame yet.
    bytes: Vec<u8>,
    failure: Option<io::Error>,
}

/// The number of wake-ups after which their bytes are read from the socket. An edge-triggered
/// descriptor reports each new byte, also while others are unread, but the socket's buffer must not
/// fill.
const UNREAD_WAKE_UPS: u32 = 64;

/// How often the ring is emptied before other tasks of the event loop run.
const MAX_ROUNDS: u32 = 8;

impl Session {
    /// Starts a task on the event loop of the link that reads the worker's frames. `models` are the
    /// models that the worker may call, and `caller` is its own. `progress` gets what the worker
    /// reports about its load.
    pub(crate) fn start(
        link: SharedLink,
        driver: Arc<Driver>,
        instance: InstanceId,
        models: Weak<dyn Models>,
        caller: Arc<Caller>,
        cache: Arc<Cache>,
        progress: Arc<InstanceProgress>,
    ) -> mpsc::UnboundedReceiver<Event> {
        let (events, receiver) = mpsc::unbounded_channel();
        let calls = Calls::new(link.clone(), driver.clone(), models, caller);
        let Some((socket, consumer)) = link.take_reader() else {
            // Each link has one session.
            return receiver;
        };
        let inbox = Mutex::new(Inbox { consumer, bytes: Vec::new(), failure: None });
        let began = clock::now();
        let failed = Notify::new();
        let session = Self {
            link: link.clone(),
            driver,
            instance,
            calls,
            cache,
            progress,
            events,
            began,
            inbox,
            failed,
        };
        link.event_loop.spawn(Arc::new(session).run(socket));
        receiver
    }

    /// Reads frames until the connection ends.
    async fn run(self: Arc<Self>, socket: OwnedReadHalf) {
        let ring_link = self.link.clone();
        let cache = self.cache.clone();
        let driver = self.driver.clone();
        let mut pump =
            tokio::spawn(async move { ring_link.ring.pump(&cache, &driver.series).await });
        let ended = tokio::select! {
            ended = self.serve(&socket) => ended,
            fault = &mut pump => Err(io::Error::other(fault.unwrap_or_else(|error| error.to_string()))),
        };
        pump.abort();
        // Otherwise the loop keeps the driver and the memory of the worker until it sleeps next.
        let source: Arc<dyn PolledSource> = self.clone();
        event_loops::forget(&source);
        self.link.ring.close(&self.cache, &self.driver.series);
        let corrupt = self.link.fault().map(|corrupt| corrupt.to_string());
        let fault = corrupt.or_else(|| ended.err().map(|error| error.to_string()));
        self.link.end_readiness();
        let is_fault = fault.is_some();
        let reason = fault.unwrap_or_else(|| "the worker closed the connection".to_owned());
        self.report(Event::Ended { reason, is_fault });
    }

    /// Handles frames until the worker closes the connection. While frames arrive, the event loop
    /// polls for them ([`PolledSource`]); otherwise the worker wakes this task through the socket.
    ///
    /// # Errors
    /// The socket failed, or the worker sent an invalid frame.
    async fn serve(self: &Arc<Self>, socket: &OwnedReadHalf) -> io::Result<()> {
        let source: Arc<dyn PolledSource> = self.clone();
        let mut unread = 0;
        loop {
            self.link.flush_unsent();
            let is_polled = self.poll() && event_loops::poll_before_sleep(&source);
            if let Some(failure) = self.lock().failure.take() {
                return Err(failure);
            }
            if !is_polled && !self.request_wakeup() {
                continue;
            }
            let ready = tokio::select! {
                ready = socket.as_ref().ready(Interest::READABLE) => ready?,
                () = self.failed.notified() => continue,
            };
            unread += 1;
            if ready.is_read_closed() {
                self.poll();
                return self.lock().failure.take().map_or(Ok(()), Err);
            }
            if unread < UNREAD_WAKE_UPS {
                // Waits for the next wake-up, without a system call.
                let _ = socket
                    .as_ref()
                    .try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
                continue;
            }
            unread = 0;
            match socket.try_read(&mut [0; 2 * UNREAD_WAKE_UPS as usize]) {
                Ok(0) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock()
    }

    /// Handles the frames in the ring, but not without end if the worker writes them faster.
    /// Returns whether bytes have arrived.
    ///
    /// # Errors
    /// The ring or a frame is invalid.
    fn take_frames(&self, inbox: &mut Inbox) -> io::Result<bool> {
        let Inbox { consumer, bytes, .. } = inbox;
        for round in 0..MAX_ROUNDS {
            if consumer.read_all(bytes).map_err(io::Error::other)? == 0 {
                return Ok(round > 0);
            }
            take_frames(bytes, |frame| self.on_frame(frame))?;
        }
        Ok(true)
    }

    /// # Errors
    /// The frame, or the ring of samples, is invalid.
    fn on_frame(&self, mut frame: ToFrontend) -> io::Result<()> {
        if let ToFrontend::Done(Done { stamps, .. })
        | ToFrontend::Response(Response { stamps, .. }) = &mut frame
        {
            *stamps = stamps.within(self.began, clock::now());
        }
        match frame {
            ToFrontend::Done(done) if done.batch >= WARM_UP => {
                self.drain_samples();
                self.report(Event::WarmedUp(done));
            }
            ToFrontend::Done(done) => {
                self.drain_samples();
                self.driver.batch_done(self.instance, &self.link, done);
            }
            ToFrontend::Response(response) if response.batch >= WARM_UP => {
                self.driver.discard(&self.link, &response);
                if let Some(error) = response.error {
                    self.report(Event::WarmUpFailed(error.into()));
                }
            }
            ToFrontend::Response(response) => {
                self.drain_samples();
                self.driver.response(self.instance, &self.link, response)?;
            }
            ToFrontend::Call(call) => self.calls.infer(call),
            ToFrontend::Manage(manage) => self.calls.manage(manage),
            ToFrontend::Taken(call, taken) => self.calls.taken(call, taken),
            ToFrontend::CancelCall(call) => self.calls.abandon(call),
            ToFrontend::Returned(loans) => self.link.give_back(&loans),
            ToFrontend::RegionsLost(regions) => self.link.announce_again(&regions),
            ToFrontend::Ready(ready) => self.link.ready_reported(ready),
            ToFrontend::LoadProgress(percent) => self.progress.report(percent),
            ToFrontend::Activity(activity) => self.on_activity(&activity),
            ToFrontend::Loaded(loaded) => {
                self.progress.report(100);
                self.link.loaded(&loaded);
                self.report(Event::Loaded(loaded));
            }
            ToFrontend::LoadFailed(reason) => {
                self.report(Event::LoadFailed(message_or_default(reason)))
            }
        }
        self.link.ring.fault().map_or(Ok(()), |fault| Err(io::Error::other(fault)))
    }

    /// Adds what a backend reports to the trace of its request.
    fn on_activity(&self, activity: &BackendActivity) {
        let BackendActivity { batch, request, name, at } = activity;
        let found = self.driver.request_at(*batch, *request);
        let traced = found.as_ref().and_then(|found| found.request.traced.as_ref());
        if let Some(traced) = traced
            && name.len() <= MAX_ACTIVITY_NAME
        {
            traced.reported(name, (*at).clamp(self.began, clock::now()));
        }
    }

    /// Takes the samples before their reply, so that a client with the answer finds its samples in
    /// the metrics.
    fn drain_samples(&self) {
        self.link.ring.drain(&self.cache, &self.driver.series);
    }

    fn report(&self, event: Event) {
        // Fails if the supervisor has already ended the process.
        let _ = self.events.send(event);
    }
}

impl PolledSource for Session {
    fn poll(&self) -> bool {
        let mut inbox = self.lock();
        if inbox.failure.is_some() || inbox.consumer.is_empty() {
            return false;
        }
        // A panic must not end the event loop, which also serves other connections.
        let taken =
            catch_unwind(AssertUnwindSafe(|| self.take_frames(&mut inbox))).unwrap_or_else(|_| {
                Err(io::Error::other(
                    "handling a frame of the worker panicked; this is a bug in the server",
                ))
            });
        match taken {
            Ok(any) => any,
            Err(failure) => {
                inbox.failure = Some(failure);
                self.failed.notify_one();
                false
            }
        }
    }

    fn request_wakeup(&self) -> bool {
        let inbox = self.lock();
        inbox.failure.is_some() || inbox.consumer.sleep()
    }

    fn withdraw_wakeup(&self) {
        self.lock().consumer.wake();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use pharos::id::ModelVersion;
    use pharos::infer::{InferInput, InferRequest};
    use pharos::metrics::statistics;
    use pharos::tensor::{DataType, Tensor};
    use pharos::timeline::ComputeStamps;
    use pharos::wire::ToWorker;

    use super::*;
    use crate::load_progress::Loads;
    use crate::loader::Loader;
    use crate::scheduler::test_driver;
    use crate::wire::worker_end;

    const INSTANCE: InstanceId = InstanceId(0);

    /// The end of a batch, with stamps that no clock has shown.
    fn forged(batch: u64) -> ToFrontend {
        let stamps = ComputeStamps {
            output_start: Instant(u64::MAX),
            end: Instant(u64::MAX),
            ..Default::default()
        };
        ToFrontend::Done(Done { stamps, ..test_driver::done(batch) })
    }

    const CONFIG: &str = "backend: 'builtin' input { name: 'IN' data_type: TYPE_UINT8 dims: 1 }
                          output { name: 'OUT' data_type: TYPE_UINT8 dims: 1 }";

    #[tokio::test]
    async fn stamps_of_a_worker_are_within_the_time_of_its_session() {
        let began = clock::now();
        let (cache, driver) = test_driver::create(CONFIG);
        let (link, mut worker) = worker_end::connect();
        let models = Weak::<Loader>::new();
        let mut events = Session::start(
            link.clone(),
            driver.clone(),
            INSTANCE,
            models,
            Arc::default(),
            cache,
            Arc::default(),
        );
        worker.send(&forged(WARM_UP));
        let Some(Event::WarmedUp(Done { stamps, .. })) = events.recv().await else {
            panic!("no end of a warm-up")
        };
        assert!(began <= stamps.start && stamps.end <= clock::now(), "{stamps:?}");
        driver.instance_ready(INSTANCE, link);
        let tensor = Tensor { datatype: DataType::Uint8, shape: vec![1], data: vec![1].into() };
        let inputs = vec![InferInput { name: "IN".into(), tensor }];
        let mut request = InferRequest { inputs, ..InferRequest::default() };
        let checked = driver.config.check(&mut request).unwrap();
        let asked = driver.clone();
        let answer = tokio::spawn(async move { asked.infer(Box::new(request), checked).await });
        let batch = loop {
            match worker.received().as_slice() {
                [] => tokio::task::yield_now().await,
                [ToWorker::Execute(execute)] => break execute.batch,
                other => panic!("{other:?}"),
            }
        };
        worker.send(&forged(batch));
        let _ = answer.await.unwrap();
        let computed = statistics::of(&driver.series).batch_stats.first().unwrap().compute_infer.ns;
        assert!(computed <= clock::now().ns_since(began), "{computed}");
    }

    #[tokio::test]
    async fn the_progress_of_a_load_comes_from_its_worker_at_any_time() {
        let loads = Loads::default();
        let load = loads.begin(ModelVersion::new("m", 1), clock::now());
        let progress = load.progress().add_instance();
        let (cache, driver) = test_driver::create(CONFIG);
        let (link, mut worker) = worker_end::connect();
        let models = Weak::<Loader>::new();
        let mut events =
            Session::start(link, driver, INSTANCE, models, Arc::default(), cache, progress);
        let loaded = Loaded {
            engine: "test".to_owned(),
            memory: 0,
            details: false,
            has_readiness_check: false,
            pinned: 0,
        };
        for (frame, expected) in [
            (ToFrontend::LoadProgress(43), 43),
            (ToFrontend::LoadProgress(12), 43),
            (ToFrontend::Loaded(loaded), 100),
            (ToFrontend::LoadProgress(44), 100),
            (ToFrontend::LoadProgress(u8::MAX), 100),
        ] {
            worker.send(&frame);
            // Its event shows that the frame before it was read.
            worker.send(&forged(WARM_UP));
            while !matches!(events.recv().await.unwrap(), Event::WarmedUp(_)) {}
            let percents: Vec<u8> =
                loads.percentages().into_iter().map(|(_, percent)| percent).collect();
            assert_eq!(percents, [expected], "{frame:?}");
        }
    }
}
