//! Starts, watches and restarts the worker processes of a model version, as `pharos::supervisor`
//! decides for each instance. Does not read replies: see `crate::worker_session`.

mod health;
mod instances;
mod running;

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pharos::error::InferError;
use pharos::id::InstanceId;
use pharos::metrics::cache::Cache;
use pharos::metrics::labels::InstanceState;
use pharos::metrics::record;
use pharos::supervisor::{Action, LossReason, Settings, State, Supervisor};
use pharos::timeline::Instant;
use pharos::wire::{Device, Done, Load, Loaded, MAX_FRAME, ToWorker, VERSION};
use tokio::sync::{oneshot, watch};

use crate::calls::{Caller, Models};
use crate::launch::Launch;
use crate::load_progress::{InstanceProgress, LoadProgress};
use crate::memory::PinnedPool;
use crate::model_memory::MemoryShare;
use crate::process::{self, Printed, ProcessPlacement, StartWorkers};
use crate::scheduler::Driver;
use crate::scheduler::placement::OnGpu;
use crate::store::scan::LoadedFiles;
use crate::wire::{SharedLink, ToSend};
use crate::worker_session::{Event, Session, WARM_UP};
use health::{Health, Loss, Next};
pub(crate) use instances::{Ending, InstanceStatus, Instances};
use instances::{InstanceHealth, Stop};
use pharos_os::descriptors::{Descriptors, Reserved};
use pharos_os::event_loops::EventLoops;
use pharos_os::{background, blocking, clock, scheduling};
use pharos_telemetry::system::{DeviceRequest, Devices, HostPolicies};
pub(crate) use running::WarmUpBatch;
use running::{DeviceShare, Running, Warming, failure, next_event, redefine};

/// The interval of trimming memory, draining samples and checking execution times.
const TICK: Duration = Duration::from_millis(500);

/// Returns the next multiple of [`TICK`], at which all instances tick: one wake-up of the runtime
/// is enough for all of them.
fn next_tick() -> Instant {
    let now = clock::now();
    let since_last = u128::from(now.0) % TICK.as_nanos();
    now + TICK.saturating_sub(Duration::from_nanos(u64::try_from(since_last).unwrap_or(0)))
}

/// How long a worker may take to stop before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Settings that all instances of a model version share.
pub(crate) struct Plan {
    /// The command that starts their processes.
    pub(crate) launch: Launch,
    /// The memory that is reserved for the instances that are started with these settings. Counted
    /// until all their processes have ended, even if their load is cancelled.
    #[expect(dead_code, reason = "freed when it is dropped")]
    pub(crate) memory: Option<Arc<MemoryShare>>,
    /// The files of the model. Kept until all processes of these instances have ended, even if
    /// their load is cancelled.
    #[expect(dead_code, reason = "removed when it is dropped")]
    pub(crate) files: Arc<dyn Any + Send + Sync>,
    /// The files of the version at its load, if the server has a response cache.
    pub(crate) loaded_files: Option<Arc<LoadedFiles>>,
    /// Starts their processes.
    pub(crate) workers: Arc<dyn StartWorkers>,
    pub(crate) directory: PathBuf,
    /// The directory of the model, with its versions.
    pub(crate) model_directory: PathBuf,
    /// The settings of `--backend-config` for the model's backend.
    pub(crate) backend_settings: Vec<(String, String)>,
    /// The progress of the load that starts the instances.
    pub(crate) progress: Arc<LoadProgress>,
    /// The directory of the initial values of states.
    pub(crate) initial_states: PathBuf,
    pub(crate) threads: u32,
    /// The longest time in microseconds that a worker looks for its next frame before it sleeps.
    pub(crate) spin_us: u32,
    pub(crate) settings: Settings,
    pub(crate) cache: Arc<Cache>,
    /// The warm-ups of each instance.
    pub(crate) warmups: Vec<WarmUp>,
    /// The models that its workers may call.
    pub(crate) models: Weak<dyn Models>,
    /// The model of the instances, as the caller of others.
    pub(crate) caller: Arc<Caller>,
    /// The text of `metrics.yaml`; it changes when the file is reloaded.
    pub(crate) metrics: watch::Receiver<Arc<str>>,
    /// The GPUs.
    pub(crate) devices: Arc<Devices>,
    /// How long a request may wait while no instance is ready.
    pub(crate) max_wait: Duration,
    /// The pinned memory for the arenas of instances on GPUs.
    pub(crate) pinned: Arc<PinnedPool>,
    /// The processors of host policies.
    pub(crate) policies: HostPolicies,
    /// The file descriptors of instances.
    pub(crate) descriptors: Arc<Descriptors>,
    /// The event loops that read the replies of workers.
    pub(crate) event_loops: EventLoops,
}

/// The number of consecutive losses after which an instance counts as broken, so that requests no
/// longer wait for it.
const LOSSES_UNTIL_BROKEN: u32 = 3;

/// One instance and its state.
struct Instance {
    id: InstanceId,
    plan: Arc<Plan>,
    driver: Arc<Driver>,
    health: Arc<Health>,
    progress: Arc<InstanceProgress>,
    /// The health of all instances of the model version, including this one.
    all: InstanceHealth,
    /// The number of losses since it was last ready.
    losses: u32,
    /// The state in the metrics.
    reported: Option<InstanceState>,
    /// Notifies the starter once: loaded, or the reason of the failure.
    outcome: Option<oneshot::Sender<Result<Loaded, String>>>,
    _descriptors: Reserved,
    /// Dropped last: after the end of the instance, everything else is freed.
    stop: watch::Receiver<Stop>,
}

impl Instance {
    fn name(&self) -> String {
        self.health.placement().name.clone()
    }

    async fn live(mut self) {
        let mut machine = Supervisor::new(self.plan.settings, clock::now());
        let mut running: Option<Running> = None;
        let mut wanted = Stop::No;
        let mut metrics = self.plan.metrics.clone();
        loop {
            while let Some(action) = self.next_action(&mut machine) {
                self.perform(action, &mut machine, &mut running).await;
            }
            if let Some(running) = running.as_mut().filter(|_| wanted == Stop::Now) {
                running.kill();
            }
            self.show(machine.state());
            if matches!(machine.state(), State::Failed | State::Stopped) && running.is_none() {
                record::worker_removed(&self.plan.cache, &self.driver.series, self.id.0);
                return self.take_out_of_service();
            }
            let tick = next_tick();
            let due = machine.poll_timeout().map_or(tick, |at| tick.min(at));
            tokio::select! {
                event = next_event(&mut running) => self.on_event(event, &mut machine, &mut running).await,
                () = clock::sleep_until(due) => self.tick(&mut machine, &mut running),
                Ok(()) = metrics.changed() => redefine(&running, &self.name(), &metrics.borrow_and_update()),
                // A dropped sender stops the instance too.
                changed = self.stop.changed(), if wanted < Stop::Drain || self.stop.has_changed().is_ok() => {
                    wanted = changed.map_or(Stop::Drain, |()| *self.stop.borrow_and_update());
                    if wanted > Stop::Close {
                        machine.stop(clock::now());
                    }
                }
            }
        }
    }

    /// Returns the next action. An instance that is being removed and is not ready has no work and
    /// is stopped.
    fn next_action(&self, machine: &mut Supervisor) -> Option<Action> {
        if *self.stop.borrow() == Stop::Close && !matches!(machine.state(), State::Ready { .. }) {
            machine.stop(clock::now());
        }
        machine.poll_action()
    }

    /// Waits for a part of a start or of an examination. Returns `None` if the instance is stopped,
    /// or removed, meanwhile.
    async fn unless_stopped<T>(&self, batched: impl Future<Output = T>) -> Option<T> {
        let mut batched = pin!(batched);
        let mut stop = self.stop.clone();
        // A dropped sender stops the instance too.
        let mut stopped = pin!(async { drop(stop.wait_for(|stop| *stop != Stop::No).await) });
        loop {
            tokio::select! {
                biased;
                done = &mut batched => return Some(done),
                () = &mut stopped => return None,
                () = clock::sleep_until(next_tick()) => self.limit_waiting(),
            }
        }
    }

    async fn perform(
        &mut self,
        action: Action,
        machine: &mut Supervisor,
        running: &mut Option<Running>,
    ) {
        match action {
            Action::Spawn => self.begin(machine, running).await,
            Action::Kill { reason } => running::end(running, &reason),
            Action::ReportReady => {
                self.check_files().await;
                self.report_ready(running);
            }
            Action::ReportLost { reason } => {
                tracing::error!(instance = %self.name(), "instance lost: {reason}; {}", after_loss(machine.state()));
                self.losses = self.losses.saturating_add(1);
                self.take_out_of_service();
                self.health.first_loss.store(machine.first_loss().0, Ordering::Relaxed);
                // Keep the first of several consecutive losses.
                let _ = self.health.lost.compare_exchange(
                    0,
                    clock::now().0,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                let of_device = self.health.placement().device.is_some()
                    && matches!(reason, LossReason::DeviceLost(_) | LossReason::LoadFailed(_));
                self.health.set_failure(of_device.then(|| reason.to_string()));
                self.health.set_loss(Some(Loss {
                    reason: reason.to_string(),
                    at: clock::now(),
                    next: Next::of(machine.state()),
                }));
                self.health.broken.store(self.losses >= LOSSES_UNTIL_BROKEN, Ordering::Relaxed);
                if !self.all.can_serve() {
                    self.driver.reject_if_alone();
                }
            }
            Action::ReportFailed { reason } => {
                match self.outcome.take() {
                    Some(outcome) => drop(outcome.send(Err(self.why_ended(&reason)))),
                    None => {
                        tracing::error!(instance = %self.name(), "failed repeatedly and is not restarted any more")
                    }
                }
                self.health.broken.store(true, Ordering::Relaxed);
                if !self.all.can_serve() {
                    self.driver.reject_if_alone();
                }
            }
        }
    }

    /// Ends the use of the response cache if a worker has read files that have changed since the
    /// load of the model began: at its first start too, because the identity of the cache was
    /// computed before.
    async fn check_files(&self) {
        let Some(loaded) = self.plan.loaded_files.clone() else { return };
        if blocking::run(move || loaded.have_changed()).await.unwrap_or(true) {
            self.driver.stop_caching();
        }
    }

    /// Starts a process, sends it the model and starts the session that reads its replies.
    async fn spawn(&self, device_share: Option<DeviceShare>) -> io::Result<Running> {
        let started = clock::now();
        let name = self.name();
        let printed = Printed {
            name: record::worker_name(&self.plan.cache, &self.driver.series, self.id.0)
                .unwrap_or_else(|| name.clone()),
            cache: self.plan.cache.clone(),
            series: self.driver.series.clone(),
        };
        let placement = self.process_placement(&name, device_share.as_ref());
        let event_loop = self.plan.event_loops.of_link();
        let worker =
            self.plan.workers.start(&self.plan.launch, &placement, printed, event_loop).await?;
        let link = Arc::new(worker.link);
        let device = device_share.as_ref().map(DeviceShare::device);
        link.arenas.inputs.keep(device.as_ref().map_or(0, |device| device.pinned));
        send(&link, &self.load(&placement, device))?;
        let models = self.plan.models.clone();
        let caller = self.plan.caller.clone();
        let cache = self.plan.cache.clone();
        self.progress.restart();
        let events = Session::start(
            link.clone(),
            self.driver.clone(),
            self.id,
            models,
            caller,
            cache,
            self.progress.clone(),
        );
        let pid = worker.process.id();
        if let Some(pid) = pid.filter(|_| self.outcome.is_none() && background::is_entered()) {
            // Requests wait for a restart.
            background::end(pid);
        }
        tracing::debug!(instance = %self.name(), pid, "worker started");
        Ok(Running {
            process: worker.process,
            _temporary: worker.temporary,
            link,
            events,
            loaded: None,
            has_loaded: false,
            warming: None,
            started,
            kill_at: None,
            killed: false,
            has_ended: false,
            device_share,
        })
    }

    /// Returns the first message to a process.
    fn load(&self, placement: &ProcessPlacement<'_>, device: Option<Device>) -> ToWorker {
        ToWorker::Load(Load {
            wire_version: VERSION,
            model: self.driver.model.name.to_string(),
            version: self.driver.model.version,
            instance: self.name(),
            directory: self.plan.directory.to_string_lossy().into_owned(),
            model_directory: self.plan.model_directory.to_string_lossy().into_owned(),
            backend_settings: self.plan.backend_settings.clone(),
            verbose: tracing::enabled!(target: "worker", tracing::Level::DEBUG),
            config: self.driver.config.encode(),
            initial_states: self.plan.initial_states.to_string_lossy().into_owned(),
            threads: placement.threads,
            spin_us: self.plan.spin_us,
            metrics: self.plan.metrics.borrow().to_string(),
            auto_detect: self.plan.cache.auto_detect(),
            device,
        })
    }

    /// Records that a process has started.
    fn begun(&mut self, started: Running, machine: &mut Supervisor, running: &mut Option<Running>) {
        self.health.pid.store(started.process.id().unwrap_or(0), Ordering::Relaxed);
        *running = Some(started);
        machine.spawned(clock::now());
    }

    fn report_ready(&mut self, running: &mut Option<Running>) {
        let Some(running) = running else { return };
        if let Some(pid) = running.process.id() {
            // Otherwise it was never there, and its threads need not be read.
            if background::is_entered() {
                background::end(pid);
            }
            // Its first thread takes the requests.
            scheduling::shorten_slices(pid);
        }
        self.health.set_ready(running.link.clone());
        self.losses = 0;
        let load_ms = clock::now().ns_since(running.started) / 1_000_000;
        record::worker_loaded(&self.plan.cache, &self.driver.series, self.id.0, load_ms);
        if !self.health.passive {
            self.driver.instance_ready(self.id, running.link.clone());
        }
        match (self.outcome.take(), running.loaded.take()) {
            (Some(outcome), Some(loaded)) => {
                let _ = outcome.send(Ok(loaded));
            }
            _ => {
                tracing::info!(instance = %self.name(), "instance restarted");
                record::instance_restarted(&self.driver.series);
            }
        }
    }

    /// Updates the metrics' count of instances by state.
    fn show(&mut self, state: State) {
        let now = match state {
            State::Starting { .. } => Some(InstanceState::Starting),
            State::Ready { .. } => Some(InstanceState::Ready),
            State::Lost => Some(InstanceState::Lost),
            State::Backoff { .. } => Some(InstanceState::Backoff),
            State::Failed => Some(InstanceState::Failed),
            State::Stopping | State::Stopped => None,
        };
        if now != self.reported {
            record::instance_state(&self.driver.series, self.reported, now);
            self.reported = now;
            self.health.reported.set(now);
            self.health.set_next(Next::of(state));
        }
    }

    /// Takes the instance out of service; its requests go back to the driver.
    fn take_out_of_service(&self) {
        self.health.ready.store(false, Ordering::Relaxed);
        self.health.set_link(None);
        self.driver.instance_lost(self.id);
    }

    async fn on_event(
        &mut self,
        event: Event,
        machine: &mut Supervisor,
        running: &mut Option<Running>,
    ) {
        match event {
            Event::Loaded(loaded) => {
                if let Some(running) = running {
                    Self::registered(running, &loaded);
                    running.loaded = Some(loaded);
                    running.has_loaded = true;
                }
                self.warm_up(0, None, machine, running).await;
            }
            Event::WarmUpFailed(error) => warm_up_failed(running, error),
            Event::WarmedUp(done) => self.warmed_up(&done, machine, running).await,
            Event::LoadFailed(reason) => {
                let reason =
                    process::why_not_loaded(&self.plan.launch, &self.driver.model.name, reason);
                machine.load_failed(reason, clock::now());
            }
            Event::Ended { reason, is_fault } => {
                self.ended(&reason, is_fault, machine, running).await
            }
        }
    }

    /// Handles the end of the connection: waits briefly for the process to exit, and kills it
    /// otherwise.
    async fn ended(
        &mut self,
        reason: &str,
        is_fault: bool,
        machine: &mut Supervisor,
        running: &mut Option<Running>,
    ) {
        let Some(mut over) = running.take() else { return };
        // Immediately, so that nothing is sent to it while waiting for the process.
        self.take_out_of_service();
        if is_fault {
            // The fault caused the exit; the exit status adds nothing.
            machine.disconnected(reason, clock::now());
        }
        let exited = clock::timeout(Duration::from_secs(1), over.process.wait()).await;
        let how = match exited {
            Some(Ok(status)) => {
                if process::killed_by_system(status) && !over.killed && !is_fault {
                    self.driver.mark_killed();
                }
                // The cause is more useful than how the process ended.
                let why = self.unless_stopped(self.why_not_started(&over, machine)).await;
                match why {
                    Some(Some(reason)) => machine.load_failed(reason, clock::now()),
                    Some(None) => {}
                    None => machine.stop(clock::now()),
                }
                over.process.describe(status)
            }
            _ => {
                // The process still runs: it closed its connection or broke the protocol.
                machine.disconnected(reason, clock::now());
                over.kill();
                let _ = over.process.wait().await;
                reason.to_owned()
            }
        };
        self.health.pid.store(0, Ordering::Relaxed);
        if let Some(warming) = over.warming {
            machine.load_failed(
                warming.failure(self.why_ended(&LossReason::Exited(how.clone()))),
                clock::now(),
            );
        }
        machine.exited(how, clock::now());
    }

    /// Returns what is wrong with the interpreter of a worker that ended before it loaded its
    /// model.
    async fn why_not_started(&self, over: &Running, machine: &Supervisor) -> Option<String> {
        let loading = over.loaded.is_none() && matches!(machine.state(), State::Starting { .. });
        if loading {
            process::why_not_started(&self.plan.launch, &self.driver.model.name).await
        } else {
            None
        }
    }

    /// Rejects requests that have waited too long for any instance.
    fn limit_waiting(&self) {
        if let Some(lost) =
            self.all.waited_for().filter(|lost| clock::now() - *lost >= self.plan.max_wait)
        {
            self.driver.reject_waiting(self.plan.max_wait, lost);
        }
    }

    fn tick(&self, machine: &mut Supervisor, running: &mut Option<Running>) {
        if let Some(running) = running {
            running.link.arenas.inputs.trim();
            running.link.release_unused();
            running.link.ring.tick(&self.plan.cache, &self.driver.series);
            if running.kill_at.is_some_and(|at| at <= clock::now()) {
                if !running.killed {
                    tracing::warn!(
                        instance = %self.name(),
                        "worker killed: it did not end within {STOP_TIMEOUT:?} of the request to stop, for example because its \
                         model's `finalize` took longer"
                    );
                }
                running.kill();
            }
        }
        if self.outcome.is_some() {
            self.plan.progress.log(clock::now());
        }
        self.limit_waiting();
        self.look_at_device(machine, running);
        let limit = self.plan.settings.execution_timeout;
        if !limit.is_zero() {
            let now = clock::now();
            if let Some(reason) =
                running.as_ref().and_then(|running| running.warming.as_ref()?.overdue(now, limit))
            {
                machine.load_failed(reason, now);
            }
            machine.execution_finished(now);
            if let Some(since) = self.driver.executing_since(self.id) {
                machine.execution_started(since);
            }
        }
        if machine.poll_timeout().is_some_and(|at| at <= clock::now()) {
            machine.handle_timeout(clock::now());
        }
    }
}

/// Returns what follows the loss of an instance in this state.
fn after_loss(state: State) -> &'static str {
    match state {
        State::Failed => "the time for its restarts is over",
        State::Stopping | State::Stopped => "it is being removed and is not restarted",
        _ => "it will be restarted",
    }
}

/// Sends the first message to a process.
///
/// # Errors
/// The message is too long.
fn send(link: &SharedLink, load: &ToWorker) -> io::Result<()> {
    if link.send(load) {
        return Ok(());
    }
    let mut frame = Vec::new();
    load.encode(&mut frame);
    let bytes = frame.len();
    Err(io::Error::other(format!(
        "the message with its configuration and metrics.yaml has {bytes} bytes; {MAX_FRAME} are \
         allowed"
    )))
}

/// Below this amount of pinned memory, in bytes, a log line warns. 16 MiB are a batch of 27 images
/// of 224 x 224 in FP32.
const LOW_PINNED: u64 = 16 << 20;

/// Why no process was started.
enum NotStarted {
    /// The GPU cannot be used, or no model may be loaded onto it.
    Device(String),
    Process(io::Error),
}

impl Instance {
    /// Returns the placement of the process: the processors of the host policy, else those near its
    /// GPU, with one thread each.
    fn process_placement<'a>(
        &'a self,
        name: &'a str,
        device_share: Option<&'a DeviceShare>,
    ) -> ProcessPlacement<'a> {
        let processors = match self.plan.policies.processors(&self.health.placement().policy) {
            [] => device_share.map_or(&[][..], |device_share| device_share.chosen.cpus.as_slice()),
            of_policy => of_policy,
        };
        let threads = match u32::try_from(processors.len()) {
            Ok(0) | Err(_) => self.plan.threads,
            Ok(few) => self.plan.threads.min(few),
        };
        ProcessPlacement {
            instance: name,
            threads,
            gpu: device_share.map(|device_share| &device_share.chosen),
            processors,
            start_timeout: self.plan.settings.start_timeout,
        }
    }

    /// Starts a process, unless the instance is stopped meanwhile.
    async fn begin(&mut self, machine: &mut Supervisor, running: &mut Option<Running>) {
        match self.unless_stopped(self.start()).await {
            Some(Ok(started)) => self.begun(started, machine, running),
            Some(Err(NotStarted::Device(reason))) => {
                // The reason alone is enough: no process has ended.
                machine.load_failed(reason, clock::now());
                machine.exited("it was not started", clock::now());
            }
            Some(Err(NotStarted::Process(error))) => {
                machine.not_started(error.to_string(), clock::now())
            }
            None => {
                machine.stop(clock::now());
                machine.not_started(LossReason::Stopped.to_string(), clock::now());
            }
        }
    }

    /// Starts a process, on a GPU if the instance needs one and it can be used now. If the future
    /// is dropped, the process ends.
    async fn start(&self) -> Result<Running, NotStarted> {
        let placement = self.health.placement();
        let device_share = match &placement.device {
            None => None,
            Some(device) => Some(self.take(device).await.map_err(NotStarted::Device)?),
        };
        self.spawn(device_share).await.map_err(NotStarted::Process)
    }

    /// # Errors
    /// The GPU cannot be used, or no model may be loaded onto it.
    async fn take(&self, device: &OnGpu) -> Result<DeviceShare, String> {
        // An instance that was ready before is only restarted.
        let loading = self.outcome.is_some();
        let wanted = DeviceRequest { number: device.number, turn: device.turn, loading };
        let chosen =
            self.plan.devices.choose(wanted).await.map_err(|reason| self.about(device, &reason))?;
        tracing::info!(instance = %self.name(), "instance placed on GPU {} ({})", chosen.number, chosen.uuid);
        let share = self.plan.pinned.share();
        if share.each() < LOW_PINNED {
            let mib = share.each() >> 20;
            tracing::info!(instance = %self.name(), "only {mib} MiB of pinned memory are left for each direction; \
                larger tensors are copied more slowly (see --pinned-memory-pool-byte-size)");
        }
        Ok(DeviceShare { chosen, share })
    }

    /// Returns the unregistered part of the instance's share of pinned memory after its model was
    /// loaded.
    fn registered(running: &mut Running, loaded: &Loaded) {
        let Some(device_share) = &mut running.device_share else { return };
        if device_share.share.each() > 0 && loaded.pinned == 0 {
            tracing::debug!(gpu = device_share.chosen.number, "no memory is pinned");
            running.link.arenas.inputs.keep(0);
        }
        device_share.share.registered(loaded.pinned);
    }

    /// Reports a lost GPU to the supervisor of the process.
    fn look_at_device(&self, machine: &mut Supervisor, running: &Option<Running>) {
        if running.is_some()
            && let Some(device) = &self.health.placement().device
            && let Some(reason) = self.plan.devices.lost(device.number)
        {
            machine.device_lost(self.about(device, &reason), clock::now());
        }
    }

    fn about(&self, device: &OnGpu, reason: &str) -> String {
        format!("instance group {} of model {}: {reason}", device.group, self.driver.model.name)
    }
}

/// A warm-up of the model's configuration. Its requests are made for its runs and dropped after
/// them: they may take gigabytes, and an instance has the requests of one warm-up at a time.
pub(crate) struct WarmUp {
    pub(crate) name: String,
    /// The number of runs.
    pub(crate) count: u32,
    /// Makes the requests. Blocks.
    pub(crate) make: Box<dyn Fn() -> Result<WarmUpBatch, String> + Send + Sync>,
}

/// Records an error among the responses of a warm-up.
fn warm_up_failed(running: &mut Option<Running>, error: InferError) {
    if let Some(warming) = running.as_mut().and_then(|running| running.warming.as_mut()) {
        warming.failed.get_or_insert(error);
    }
}

impl Instance {
    /// Returns why the instance cannot be loaded; for a Python process that ended, prefixed with
    /// Triton's text.
    fn why_ended(&self, reason: &LossReason) -> String {
        match reason {
            LossReason::Exited(how) if self.plan.launch.interpreter.is_some() => {
                format!(
                    "Stub process '{}' is not healthy. The worker process ended: {how}",
                    self.name()
                )
            }
            _ => reason.to_string(),
        }
    }

    /// Sends the warm-up run after `over` completed ones; after the last run, the instance is
    /// ready. `last` is the warm-up of the last run, by its index, and its requests.
    async fn warm_up(
        &self,
        over: u32,
        last: Option<(usize, Arc<WarmUpBatch>)>,
        machine: &mut Supervisor,
        running: &mut Option<Running>,
    ) {
        let all = self.plan.warmups.iter().enumerate();
        let mut runs = all.flat_map(|(index, warm_up)| {
            std::iter::repeat_n((index, warm_up), warm_up.count as usize)
        });
        let next = runs.nth(over as usize);
        let (Some(running), Some((index, warm_up))) = (running.as_mut(), next) else {
            return machine.ready(clock::now());
        };
        let batch = match last {
            Some((last, batch)) if last == index => batch,
            other => {
                // Before the next ones are made.
                drop(other);
                let plan = self.plan.clone();
                let make = move || {
                    plan.warmups
                        .get(index)
                        .map_or_else(|| Err(String::new()), |warm_up| (warm_up.make)())
                };
                let made = self.unless_stopped(blocking::run(make)).await;
                match made.map(|made| made.unwrap_or_else(|error| Err(error.to_string()))) {
                    Some(Ok(batch)) => Arc::new(batch),
                    Some(Err(error)) => {
                        return machine.load_failed(failure(&warm_up.name, error), clock::now());
                    }
                    None => return machine.stop(clock::now()),
                }
            }
        };
        let since = clock::now();
        let batched_requests = batch.batched_requests(since);
        let number = WARM_UP + u64::from(over);
        let controls = &batch.controls;
        let to_send = ToSend {
            batch: number,
            flags: 0,
            batched_requests: &batched_requests,
            steps: &[],
            controls,
            resumed: Vec::new(),
        };
        match running.link.execute(&self.driver.config, &to_send) {
            Ok(()) => {
                let name = warm_up.name.clone();
                running.warming = Some(Warming {
                    over,
                    name,
                    index,
                    batch,
                    batched_requests,
                    since,
                    failed: None,
                });
            }
            Err(error) => machine.load_failed(failure(&warm_up.name, error), since),
        }
    }

    async fn warmed_up(
        &self,
        done: &Done,
        machine: &mut Supervisor,
        running: &mut Option<Running>,
    ) {
        let Some(link) = running.as_ref().map(|running| running.link.clone()) else { return };
        link.inputs_read(done);
        let Some(warming) = running.as_mut().and_then(|running| running.warming.take()) else {
            return;
        };
        let recorded = self.driver.warmed_up(&warming.batched_requests, &link, done, warming.since);
        link.inputs_lent(done);
        let Warming { over, name, index, batch, batched_requests, failed, .. } = warming;
        drop(batched_requests);
        match recorded.and(failed.map_or(Ok(()), Err)) {
            Ok(()) => self.warm_up(over + 1, Some((index, batch)), machine, running).await,
            Err(error) => machine.load_failed(failure(&name, error), clock::now()),
        }
    }
}
