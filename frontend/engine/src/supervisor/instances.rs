//! The instances of a model version, which start together and can be resized later.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use pharos::id::InstanceId;
use pharos::metrics::labels::InstanceState;
use pharos::timeline::Instant;
use pharos::wire::Loaded;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use super::outage::{Loss, Outage};
use super::{Health, Instance, Plan};
use crate::scheduler::Driver;
use crate::scheduler::placement::Placement;
use crate::wire::SharedLink;
use pharos_os::clock;
use pharos_os::descriptors::Reserved;

/// The interval of checking whether a retired instance is idle.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The interval of checking a retired instance with running sequences.
const SEQUENCE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The health of all instances of a version, shared with each of them.
#[derive(Clone, Default)]
pub(super) struct InstanceHealth(Arc<RwLock<Vec<Arc<Health>>>>);

impl InstanceHealth {
    /// Returns whether any instance is ready or may become ready soon.
    pub(super) fn can_serve(&self) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).iter().any(|health| health.can_serve())
    }

    /// Returns since when requests have waited for all instances; `None` if one is ready or starts for the first time.
    pub(super) fn waited_for(&self) -> Option<Instant> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let active = all.iter().filter(|health| !health.passive);
        active.map(|health| health.waited_for()).collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Health>>)) {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The instances of a model version.
#[derive(Default)]
pub(crate) struct Instances {
    // Held only to copy or change the list. Shared with the tasks that wait for the ends of sequences.
    all: Arc<Mutex<Vec<Arc<Handle>>>>,
    instance_health: InstanceHealth,
}

struct Handle {
    id: InstanceId,
    /// The placement that it serves now. Locked only to copy or replace it.
    placement: Mutex<Placement>,
    /// Whether it is retired and only finishes its work.
    closing: AtomicBool,
    health: Arc<Health>,
    /// Bytes by which loading has grown its process.
    memory: AtomicU64,
    /// Bytes of its arenas that are registered with its GPU driver.
    pinned: AtomicU64,
    /// The stop signal; dropping it stops the instance too.
    stop: watch::Sender<Stop>,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// How an instance is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    No,
    /// Its worker may finish its work for a limited time.
    Drain,
    /// Its worker is killed.
    Now,
}

impl Handle {
    fn placement(&self) -> Placement {
        self.placement.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the placement that the instance serves.
    fn assign(&self, placement: Placement) {
        self.health.rename(&placement.name);
        *self.placement.lock().unwrap_or_else(PoisonError::into_inner) = placement;
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Returns the id of its process, if it has one.
    fn pid(&self) -> Option<u32> {
        let pid = self.health.pid.load(Ordering::Relaxed);
        (pid != 0).then_some(pid)
    }

    fn ask_to_stop(&self) {
        self.stop.send_if_modified(|stop| {
            let first = *stop == Stop::No;
            if first {
                *stop = Stop::Drain;
            }
            first
        });
    }

    /// Ends the worker and waits until its process is gone.
    async fn stop(&self) {
        self.ask_to_stop();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            let _ = task.await;
        }
    }
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

/// A starting instance and its outcome.
type Starting = (Arc<Handle>, oneshot::Receiver<Result<Loaded, String>>);

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

/// The state of an instance that is no longer restarted.
const GIVEN_UP: Option<InstanceState> = Some(InstanceState::Failed);

impl Instances {
    /// Starts all instances and waits until all have loaded the model. Returns the engine and the total memory.
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
        loaded.map(|loaded| (instances, loaded)).ok_or_else(|| "the model has no instances".to_owned())
    }

    /// Starts instances for new `placements` and, once they are ready, stops those without a placement after they have executed
    /// their requests. Instances with a placement continue unchanged. An instance with running sequences stops after their ends,
    /// in the background.
    ///
    /// # Errors
    /// The first reason why an instance could not start; nothing has changed then.
    pub(crate) async fn resize(
        &self,
        plan: &Arc<Plan>,
        placements: &[Placement],
        driver: &Arc<Driver>,
    ) -> Result<(), String> {
        let Differences { new, kept, gone } = self.differences(placements);
        self.add(plan, &new, driver).await?;
        kept.into_iter().for_each(|(handle, placement)| handle.assign(placement));
        self.remove(&gone, driver).await;
        self.sort(placements);
        Ok(())
    }

    /// Assigns placements to instances: the same placement if possible, else an equivalent one. A placement whose instance is no
    /// longer restarted gets a new instance.
    fn differences(&self, placements: &[Placement]) -> Differences {
        let mut gone = self.handles();
        gone.retain(|handle| !handle.is_closing());
        let (mut new, mut kept) = (placements.to_vec(), Vec::new());
        let same: fn(&Placement, &Placement) -> bool = |one, other| one == other;
        for fits in [same, Placement::is_like] {
            let stays = |handle: &Arc<Handle>, placement: &Placement| {
                handle.health.state() != GIVEN_UP && fits(&handle.placement(), placement)
            };
            new.retain(|placement| match gone.iter().position(|handle| stays(handle, placement)) {
                Some(position) => {
                    kept.push((gone.remove(position), placement.clone()));
                    false
                }
                None => true,
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
        let begin = |(one, reserved)| self.begin((plan, reserved), one, driver);
        let starting: Vec<Starting> = numbered.into_iter().zip(reserved).map(begin).collect();
        let mut handles = Vec::new();
        let mut outcomes = Vec::new();
        for (handle, outcome) in starting {
            self.instance_health.change(|all| all.push(handle.health.clone()));
            handles.push(handle);
            outcomes.push(outcome);
        }
        self.all().extend(handles.iter().cloned());
        let mut sum: Option<Loaded> = None;
        for (handle, outcome) in handles.iter().zip(outcomes) {
            match outcome.await.unwrap_or_else(|_| Err("the instance ended while it was loading".to_owned())) {
                Ok(loaded) => {
                    handle.memory.store(loaded.memory, Ordering::Relaxed);
                    handle.pinned.store(loaded.pinned, Ordering::Relaxed);
                    sum = Some(combined(sum, loaded));
                }
                Err(reason) => {
                    self.remove(&handles, driver).await;
                    return Err(reason);
                }
            }
        }
        Ok(sum)
    }

    /// Starts the task of one instance.
    fn begin(
        &self,
        (plan, reserved): (&Arc<Plan>, Reserved),
        (id, placement): (InstanceId, &Placement),
        driver: &Arc<Driver>,
    ) -> Starting {
        let health = Arc::new(Health::new(&placement.name, placement.passive));
        let (outcome, started) = oneshot::channel();
        let (stop, stopped) = watch::channel(Stop::No);
        let instance = Instance {
            id,
            placement: placement.clone(),
            plan: plan.clone(),
            driver: driver.clone(),
            health: health.clone(),
            all: self.instance_health.clone(),
            losses: 0,
            reported: None,
            outcome: Some(outcome),
            _descriptors: reserved,
        };
        let task = Mutex::new(Some(tokio::spawn(instance.live(stopped))));
        let (closing, memory, pinned) = Default::default();
        let placement = Mutex::new(placement.clone());
        (Arc::new(Handle { id, placement, closing, health, memory, pinned, stop, task }), started)
    }

    /// Ends these instances after they have executed their requests. Waits only for those without sequences.
    async fn remove(&self, gone: &[Arc<Handle>], driver: &Arc<Driver>) {
        for handle in gone {
            handle.closing.store(true, Ordering::Relaxed);
            self.instance_health.change(|all| all.retain(|health| !Arc::ptr_eq(health, &handle.health)));
            driver.retire(handle.id);
        }
        let (lasting, short): (Vec<_>, Vec<_>) =
            gone.iter().cloned().partition(|handle| driver.has_sequences_on(handle.id));
        for handle in lasting {
            let (all, driver) = (self.all.clone(), driver.clone());
            tokio::spawn(async move { end(&all, &[handle], &driver, SEQUENCE_POLL_INTERVAL).await });
        }
        end(&self.all, &short, driver, POLL_INTERVAL).await;
    }

    /// Sorts the instances in the order of the placements.
    fn sort(&self, placements: &[Placement]) {
        let place = |handle: &Arc<Handle>| {
            let own = handle.placement();
            placements.iter().position(|placement| !handle.is_closing() && *placement == own).unwrap_or(usize::MAX)
        };
        self.all().sort_by_cached_key(place);
    }

    /// Returns the bytes by which loading has grown all processes together, and the bytes that they have registered with their
    /// GPU drivers.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let of = |handle: &Arc<Handle>| [&handle.memory, &handle.pinned].map(|bytes| bytes.load(Ordering::Relaxed));
        self.all().iter().map(of).fold((0, 0), |sum, [memory, pinned]| (sum.0 + memory, sum.1 + pinned))
    }

    /// Returns the status of each instance.
    pub(crate) fn states(&self) -> Vec<InstanceStatus> {
        let doing = |handle: &Arc<Handle>| {
            let Placement { name, device, .. } = handle.placement();
            let gpu = device.map(|device| device.number);
            InstanceStatus { id: handle.id, name, state: handle.health.state(), pid: handle.pid(), gpu }
        };
        self.all().iter().map(doing).collect()
    }

    /// Returns whether an instance is no longer restarted.
    pub(crate) fn any_given_up(&self) -> bool {
        self.all().iter().any(|handle| handle.health.state() == GIVEN_UP && !handle.is_closing())
    }

    /// Returns the state of each instance and, while it is lost, the time of the first of its consecutive losses.
    pub(crate) fn health(&self) -> Vec<(Option<InstanceState>, Option<Instant>)> {
        self.all().iter().map(|handle| (handle.health.state(), handle.health.lost())).collect()
    }

    /// Returns the number of instances that are ready for requests.
    pub(crate) fn ready(&self) -> usize {
        let all = self.all();
        let active = all.iter().filter(|handle| !handle.health.passive && !handle.is_closing());
        active.filter(|handle| handle.health.ready.load(Ordering::Relaxed)).count()
    }

    /// Returns which part of the instances does not run after a loss, with the last failure and the next start; `None` if all run
    /// or start for the first time.
    pub(crate) fn outage(&self) -> Option<String> {
        let all = self.all();
        let active = all.iter().filter(|handle| !handle.health.passive && !handle.is_closing());
        let active: Vec<&Health> = active.map(|handle| &*handle.health).collect();
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
        self.all().iter().filter(|handle| !handle.health.passive).filter_map(|handle| handle.health.link()).collect()
    }

    /// Returns the name of each instance, with the id of its process if it has one.
    pub(crate) fn processes(&self) -> Vec<(String, Option<u32>)> {
        self.all().iter().map(|handle| (handle.placement().name, handle.pid())).collect()
    }

    /// Returns the ids of the processes.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.all().iter().filter_map(|handle| handle.pid()).collect()
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
        for handle in self.handles() {
            handle.stop.send_replace(Stop::Now);
        }
    }

    fn handles(&self) -> Vec<Arc<Handle>> {
        self.all().clone()
    }

    fn all(&self) -> MutexGuard<'_, Vec<Arc<Handle>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until retired instances are idle, checking every `interval`, then ends and removes them.
async fn end(all: &Mutex<Vec<Arc<Handle>>>, gone: &[Arc<Handle>], driver: &Arc<Driver>, interval: Duration) {
    for handle in gone {
        while !driver.is_retired(handle.id) {
            clock::sleep(interval).await;
        }
        handle.ask_to_stop();
    }
    for handle in gone {
        handle.stop().await;
    }
    let ids: Vec<InstanceId> = gone.iter().map(|handle| handle.id).collect();
    driver.dismiss(&ids);
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|handle| !gone.iter().any(|gone| Arc::ptr_eq(gone, handle)));
}

/// Combines the load results of several instances: the engine of the first, the memory of all.
fn combined(first: Option<Loaded>, next: Loaded) -> Loaded {
    match first {
        Some(first) => Loaded { memory: first.memory + next.memory, pinned: first.pinned + next.pinned, ..first },
        None => next,
    }
}
