//! The instances of a model version, which start together and can be resized later.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard, RwLock};
use pharos::id::InstanceId;
use pharos::metrics::labels::InstanceState;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::timeline::Instant;
use pharos::wire::Loaded;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use super::health::{Health, Loss, Outage};
use super::{Instance, Plan};
use crate::scheduler::Driver;
use crate::scheduler::placement::Placement;
use crate::wire::SharedLink;
use pharos_os::clock;
use pharos_os::descriptors::Reserved;

/// The first interval of checking whether a retired instance is idle; each one is twice as long as
/// the one before.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The longest such interval: sequences can last long.
const LONGEST_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The longest time for which a change waits for instances that it has removed and that still
/// execute requests. As a rule, batches end before; a stream of responses may last longer.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The state of an instance that is no longer restarted.
const GIVEN_UP: Option<InstanceState> = Some(InstanceState::Failed);

/// How an instance is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stop {
    No,
    /// The instance finishes its work. If it is lost, or not ready, it is stopped instead of
    /// restarted.
    Close,
    /// The worker may finish its work for a limited time.
    Drain,
    /// The worker is killed.
    Now,
}

/// What the version of a model holds of one of its instances: its numbers, and the signal that ends
/// it.
struct Handle {
    id: InstanceId,
    /// Whether it is retired and only finishes its work.
    closing: AtomicBool,
    health: Arc<Health>,
    /// Bytes by which loading has grown its process.
    memory: AtomicU64,
    /// Bytes of its arenas that are registered with its GPU driver.
    pinned: AtomicU64,
    /// The stop signal; dropping it stops the instance too. Closed at the end of the instance's
    /// task.
    stop: watch::Sender<Stop>,
    series: Arc<ModelSeries>,
}

impl Handle {
    fn new(
        id: InstanceId,
        health: Arc<Health>,
        series: Arc<ModelSeries>,
        stop: watch::Sender<Stop>,
    ) -> Self {
        let closing = AtomicBool::new(false);
        let memory = AtomicU64::new(0);
        let pinned = AtomicU64::new(0);
        Self { id, closing, health, memory, pinned, stop, series }
    }

    fn placement(&self) -> Arc<Placement> {
        self.health.placement()
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Returns the id of its process, if it has one.
    fn pid(&self) -> Option<u32> {
        let pid = self.health.pid.load(Ordering::Relaxed);
        (pid != 0).then_some(pid)
    }

    /// Lets the instance only finish its work. [`Handle::stop`] follows.
    fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.raise(Stop::Close);
    }

    fn ask_to_stop(&self) {
        self.raise(Stop::Drain);
    }

    /// Kills the worker.
    fn kill(&self) {
        self.raise(Stop::Now);
    }

    /// Ends the worker and waits until its process is gone. Any number of callers may wait.
    async fn stop(&self) {
        self.ask_to_stop();
        self.stop.closed().await;
        if self.health.state() == GIVEN_UP && self.health.reported.take().is_some() {
            // Until now it counted as failed.
            record::instance_state(&self.series, GIVEN_UP, None);
        }
    }

    fn raise(&self, to: Stop) {
        self.stop.send_if_modified(|stop| {
            let raised = *stop < to;
            *stop = to.max(*stop);
            raised
        });
    }
}

/// The health of all instances of a version, shared with each of them.
#[derive(Clone, Default)]
pub(super) struct InstanceHealth(Arc<RwLock<Vec<Arc<Health>>>>);

impl InstanceHealth {
    /// Returns whether any instance is ready or may become ready soon.
    pub(super) fn can_serve(&self) -> bool {
        self.0.read().iter().any(|health| health.can_serve())
    }

    /// Returns since when requests have waited for all instances; `None` if one is ready or starts
    /// for the first time.
    pub(super) fn waited_for(&self) -> Option<Instant> {
        let all = self.0.read();
        let active = all.iter().filter(|health| !health.passive);
        active.map(|health| health.waited_for()).collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Health>>)) {
        change(&mut self.0.write());
    }
}

/// The instances of a model version.
#[derive(Default)]
pub(crate) struct Instances {
    // Held only to copy or change the list. Shared with the tasks that end instances.
    all: Arc<Mutex<Vec<Arc<Handle>>>>,
    instance_health: InstanceHealth,
}

/// The changes needed to serve other placements.
#[derive(Default)]
struct Differences {
    /// Placements without an instance.
    new: Vec<Placement>,
    /// Instances that continue, with their placements.
    kept: Vec<(Arc<Handle>, Placement)>,
    /// Instances without a placement.
    gone: Vec<Arc<Handle>>,
}

/// What a starting instance reports once: loaded, or the reason of the failure.
type Outcome = Result<Loaded, String>;

/// Instances that are being removed. They end in the background, after their requests and
/// sequences.
#[derive(Default)]
pub(crate) struct Ending {
    tasks: Vec<JoinHandle<()>>,
    /// One for each instance without sequences; complete with its end.
    awaited: Vec<oneshot::Receiver<()>>,
}

impl Ending {
    /// Keeps a value until the processes of all are gone.
    pub(crate) fn keep(&mut self, value: impl Send + 'static) {
        let tasks = std::mem::take(&mut self.tasks);
        if !tasks.is_empty() {
            tokio::spawn(async move {
                for task in tasks {
                    let _ = task.await;
                }
                drop(value);
            });
        }
    }

    /// Waits until the instances have executed their requests and ended, as Triton does, but no
    /// longer than [`LONGEST_WAIT`], and not for those with sequences, which clients may keep open
    /// for long. Returns whether the awaited ones have ended.
    pub(crate) async fn wait(self) -> bool {
        let ended = clock::timeout(LONGEST_WAIT, async move {
            for ended in self.awaited {
                // The sender is dropped at the end.
                let _ = ended.await;
            }
        });
        ended.await.is_some()
    }
}

/// The state of an instance, its process and its GPU.
#[derive(Clone, Debug)]
pub(crate) struct InstanceStatus {
    pub(crate) id: InstanceId,
    pub(crate) name: String,
    pub(crate) state: Option<InstanceState>,
    /// The id of its process, if it has one.
    pub(crate) pid: Option<u32>,
    /// The number of its GPU, if it runs on one.
    pub(crate) gpu: Option<u32>,
}

impl Instances {
    /// Starts all instances and waits until all have loaded the model. Returns the engine and the
    /// total memory.
    ///
    /// # Errors
    /// The first reason why an instance could not start; the others are stopped.
    pub(crate) async fn start(
        plan: Arc<Plan>,
        placements: &[Placement],
        driver: &Arc<Driver>,
    ) -> Result<(Self, Loaded), String> {
        let instances = Self::default();
        let loaded = instances.add(&plan, placements, driver).await?;
        loaded
            .map(|loaded| (instances, loaded))
            .ok_or_else(|| "the model has no instances".to_owned())
    }

    /// Starts instances for new `placements` and, once they are ready, removes those without a
    /// placement. Instances with a placement continue unchanged. Returns the removed ones, which
    /// end after their requests and sequences.
    ///
    /// # Errors
    /// The first reason why an instance could not start; nothing has changed then.
    pub(crate) async fn resize(
        &self,
        plan: &Arc<Plan>,
        placements: &[Placement],
        driver: &Arc<Driver>,
    ) -> Result<Ending, String> {
        let Differences { new, kept, gone } = self.differences(placements);
        self.add(plan, &new, driver).await?;
        kept.into_iter().for_each(|(handle, placement)| handle.health.assign(placement));
        let ending = self.remove(&gone, driver);
        self.sort(placements);
        Ok(ending)
    }

    /// Assigns placements to instances: the same placement if possible, else an equivalent one. A
    /// placement whose instance is no longer restarted gets a new instance.
    fn differences(&self, placements: &[Placement]) -> Differences {
        let mut gone = self.handles();
        gone.retain(|handle| !handle.is_closing());
        let mut new = placements.to_vec();
        let mut kept = Vec::new();
        let same: fn(&Placement, &Placement) -> bool = Placement::eq;
        for fits in [same, Placement::is_like] {
            new.retain(|placement| {
                let staying = gone.iter().position(|handle| {
                    handle.health.state() != GIVEN_UP && fits(&handle.placement(), placement)
                });
                if let Some(position) = staying {
                    kept.push((gone.remove(position), placement.clone()));
                }
                staying.is_none()
            });
        }
        Differences { new, kept, gone }
    }

    async fn add(
        &self,
        plan: &Arc<Plan>,
        placements: &[Placement],
        driver: &Arc<Driver>,
    ) -> Result<Option<Loaded>, String> {
        let first = self.all().iter().map(|handle| handle.id.0 + 1).max().unwrap_or(0);
        let numbered: Vec<_> = (first..).map(InstanceId).zip(placements).collect();
        let reserved = plan.descriptors.reserve(&driver.model.name, placements.len())?;
        driver.admit(&numbered)?;
        let mut handles = Vec::new();
        let mut outcomes = Vec::new();
        for ((id, placement), reserved) in numbered.into_iter().zip(reserved) {
            let (handle, outcome) = self.begin(plan, id, placement, reserved, driver);
            handles.push(handle);
            outcomes.push(outcome);
        }
        for handle in &handles {
            self.instance_health.change(|all| all.push(handle.health.clone()));
        }
        self.all().extend(handles.iter().cloned());
        match loaded(outcomes).await {
            Ok(all) => {
                for (handle, loaded) in handles.iter().zip(&all) {
                    handle.memory.store(loaded.memory, Ordering::Relaxed);
                    handle.pinned.store(loaded.pinned, Ordering::Relaxed);
                }
                Ok(all.into_iter().reduce(combined))
            }
            Err(reason) => {
                self.remove(&handles, driver).wait().await;
                Err(reason)
            }
        }
    }

    /// Starts the task of one instance.
    fn begin(
        &self,
        plan: &Arc<Plan>,
        id: InstanceId,
        placement: &Placement,
        reserved: Reserved,
        driver: &Arc<Driver>,
    ) -> (Arc<Handle>, oneshot::Receiver<Outcome>) {
        let health = Arc::new(Health::new(placement));
        let (outcome, started) = oneshot::channel();
        let (stop, stopped) = watch::channel(Stop::No);
        let instance = Instance {
            id,
            plan: plan.clone(),
            driver: driver.clone(),
            health: health.clone(),
            progress: plan.progress.add_instance(),
            all: self.instance_health.clone(),
            losses: 0,
            reported: None,
            outcome: Some(outcome),
            _descriptors: reserved,
            stop: stopped,
        };
        tokio::spawn(instance.live());
        (Arc::new(Handle::new(id, health, driver.series.clone(), stop)), started)
    }

    /// Ends these instances after their requests and sequences.
    fn remove(&self, gone: &[Arc<Handle>], driver: &Arc<Driver>) -> Ending {
        for handle in gone {
            self.instance_health
                .change(|all| all.retain(|health| !Arc::ptr_eq(health, &handle.health)));
            driver.retire(handle.id);
            handle.close();
        }
        let mut ending = Ending::default();
        for handle in gone {
            let (ended, awaited) = oneshot::channel::<()>();
            let ends = end(self.all.clone(), handle.clone(), driver.clone());
            ending.tasks.push(tokio::spawn(async move {
                ends.await;
                drop(ended);
            }));
            if !driver.has_sequences_on(handle.id) {
                ending.awaited.push(awaited);
            }
        }
        ending
    }

    /// Sorts the instances in the order of the placements.
    fn sort(&self, placements: &[Placement]) {
        self.all().sort_by_cached_key(|handle| {
            let own = handle.placement();
            placements
                .iter()
                .position(|placement| !handle.is_closing() && *placement == *own)
                .unwrap_or(usize::MAX)
        });
    }

    /// Returns the bytes by which loading has grown the processes together, and the bytes that they
    /// have registered with their GPU drivers. Without instances that are being removed.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let mut memory = 0;
        let mut pinned = 0;
        for handle in self.all().iter().filter(|handle| !handle.is_closing()) {
            memory += handle.memory.load(Ordering::Relaxed);
            pinned += handle.pinned.load(Ordering::Relaxed);
        }
        (memory, pinned)
    }

    /// Returns the status of each instance.
    pub(crate) fn states(&self) -> Vec<InstanceStatus> {
        let all = self.all();
        let states = all.iter().map(|handle| {
            let placement = handle.placement();
            InstanceStatus {
                id: handle.id,
                name: placement.name.clone(),
                state: handle.health.state(),
                pid: handle.pid(),
                gpu: placement.device.as_ref().map(|device| device.number),
            }
        });
        states.collect()
    }

    /// Returns whether an instance is no longer restarted.
    pub(crate) fn any_given_up(&self) -> bool {
        self.all().iter().any(|handle| handle.health.state() == GIVEN_UP && !handle.is_closing())
    }

    /// Returns the state of each instance and, while it is lost, the time of the first of its
    /// consecutive losses.
    pub(crate) fn health(&self) -> Vec<(Option<InstanceState>, Option<Instant>)> {
        self.all().iter().map(|handle| (handle.health.state(), handle.health.lost())).collect()
    }

    /// Returns the number of instances that are ready for requests.
    pub(crate) fn ready(&self) -> usize {
        let all = self.all();
        let active = all.iter().filter(|handle| !handle.health.passive && !handle.is_closing());
        active.filter(|handle| handle.health.ready.load(Ordering::Relaxed)).count()
    }

    /// Returns which part of the instances does not run after a loss, with the last failure and the
    /// next start; `None` if all run or start for the first time.
    pub(crate) fn outage(&self) -> Option<String> {
        let all = self.all();
        let mut active: Vec<&Health> = Vec::new();
        for handle in all.iter().filter(|handle| !handle.health.passive && !handle.is_closing()) {
            active.push(&handle.health);
        }
        let losses: Vec<Loss> = active.iter().filter_map(|health| health.loss()).collect();
        let running = active.iter().filter(|health| health.ready.load(Ordering::Relaxed)).count();
        let outage = Outage { running, total: active.len(), losses, now: clock::now() };
        (!outage.losses.is_empty()).then(|| outage.to_string())
    }

    /// Returns the reasons why instances are not ready whose causes are not their processes.
    pub(crate) fn failure_reasons(&self) -> Vec<String> {
        self.all().iter().filter_map(|handle| handle.health.failure()).collect()
    }

    /// Returns the connections of the instances that are ready for requests.
    pub(crate) fn links(&self) -> Vec<SharedLink> {
        self.all()
            .iter()
            .filter(|handle| !handle.health.passive)
            .filter_map(|handle| handle.health.link())
            .collect()
    }

    /// Returns the name of each instance, with the id of its process if it has one.
    pub(crate) fn processes(&self) -> Vec<(String, Option<u32>)> {
        self.all().iter().map(|handle| (handle.placement().name.clone(), handle.pid())).collect()
    }

    /// Returns the ids of the processes of instances that are not being removed.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.all()
            .iter()
            .filter(|handle| !handle.is_closing())
            .filter_map(|handle| handle.pid())
            .collect()
    }

    /// Returns whether requests can be accepted: an instance is ready or being restarted.
    pub(crate) fn can_serve(&self) -> bool {
        self.instance_health.can_serve()
    }

    /// Ends all workers and waits until their processes are gone.
    pub(crate) async fn stop(&self) {
        let all = self.handles();
        for handle in &all {
            handle.ask_to_stop();
        }
        for handle in &all {
            handle.stop().await;
        }
    }

    /// Kills all workers, even while [`Instances::stop`] waits for them.
    pub(crate) fn kill(&self) {
        self.handles().iter().for_each(|handle| handle.kill());
    }

    fn handles(&self) -> Vec<Arc<Handle>> {
        self.all().clone()
    }

    fn all(&self) -> MutexGuard<'_, Vec<Arc<Handle>>> {
        self.all.lock()
    }
}

/// Waits until a retired instance is idle, then ends and removes it.
async fn end(all: Arc<Mutex<Vec<Arc<Handle>>>>, handle: Arc<Handle>, driver: Arc<Driver>) {
    let mut interval = POLL_INTERVAL;
    while !driver.is_retired(handle.id) {
        clock::sleep(interval).await;
        interval = (2 * interval).min(LONGEST_POLL_INTERVAL);
    }
    handle.stop().await;
    driver.dismiss(handle.id);
    let mut all = all.lock();
    all.retain(|other| !Arc::ptr_eq(other, &handle));
}

/// Waits until all instances have loaded the model. Returns what they report, in their order.
///
/// # Errors
/// The first reason why one could not, at once.
async fn loaded(mut outcomes: Vec<oneshot::Receiver<Outcome>>) -> Result<Vec<Loaded>, String> {
    let mut loaded = vec![None; outcomes.len()];
    poll_fn(move |cx| {
        for (outcome, loaded) in
            outcomes.iter_mut().zip(&mut loaded).filter(|(_, loaded)| loaded.is_none())
        {
            if let Poll::Ready(ended) = Pin::new(outcome).poll(cx) {
                match ended
                    .unwrap_or_else(|_| Err("the instance ended while it was loading".to_owned()))
                {
                    Ok(reported) => *loaded = Some(reported),
                    Err(reason) => return Poll::Ready(Err(reason)),
                }
            }
        }
        if loaded.iter().all(Option::is_some) {
            Poll::Ready(Ok(loaded.drain(..).flatten().collect()))
        } else {
            Poll::Pending
        }
    })
    .await
}

/// Combines the load results of several instances: the engine of the first, the memory of all.
fn combined(first: Loaded, next: Loaded) -> Loaded {
    Loaded { memory: first.memory + next.memory, pinned: first.pinned + next.pinned, ..first }
}
