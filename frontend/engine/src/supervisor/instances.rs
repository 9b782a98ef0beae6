//! The instances of a model version, which start together and can be resized later.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::task::Poll;
use std::time::Duration;

use pharos::id::InstanceId;
use pharos::metrics::labels::InstanceState;
use pharos::timeline::Instant;
use pharos::wire::Loaded;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use super::handle::{GIVEN_UP, Handle, Stop};
use super::outage::{Loss, Outage};
use super::{Health, Instance, Plan};
use crate::scheduler::Driver;
use crate::scheduler::placement::Placement;
use crate::wire::SharedLink;
use pharos_os::clock;
use pharos_os::descriptors::Reserved;

/// The first interval of checking whether a retired instance is idle; each one is twice as long as the one before.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The longest such interval: sequences can last long.
const LONGEST_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The longest time for which a change waits for instances that it has removed and that still execute requests. As a rule, batches
/// end before; a stream of responses may last longer.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

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

/// A starting instance and its outcome.
type Starting = (Arc<Handle>, oneshot::Receiver<Outcome>);

/// Instances that are being removed. They end in the background, after their requests and sequences.
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

    /// Waits until the instances have executed their requests and ended, as Triton does, but no longer than [`LONGEST_WAIT`], and not
    /// for those with sequences, which clients may keep open for long. Returns whether the awaited ones have ended.
    pub(crate) async fn wait(self) -> bool {
        let ends = async move {
            for ended in self.awaited {
                // The sender is dropped at the end.
                let _ = ended.await;
            }
        };
        clock::timeout(LONGEST_WAIT, ends).await.is_some()
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

    /// Starts instances for new `placements` and, once they are ready, removes those without a placement. Instances with a
    /// placement continue unchanged. Returns the removed ones, which end after their requests and sequences.
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

    /// Assigns placements to instances: the same placement if possible, else an equivalent one. A placement whose instance is no
    /// longer restarted gets a new instance.
    fn differences(&self, placements: &[Placement]) -> Differences {
        let mut gone = self.handles();
        gone.retain(|handle| !handle.is_closing());
        let (mut new, mut kept) = (placements.to_vec(), Vec::new());
        let same: fn(&Placement, &Placement) -> bool = Placement::eq;
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
        (plan, reserved): (&Arc<Plan>, Reserved),
        (id, placement): (InstanceId, &Placement),
        driver: &Arc<Driver>,
    ) -> Starting {
        let health = Arc::new(Health::new(placement));
        let (outcome, started) = oneshot::channel();
        let (stop, stopped) = watch::channel(Stop::No);
        let instance = Instance {
            id,
            plan: plan.clone(),
            driver: driver.clone(),
            health: health.clone(),
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
            self.instance_health.change(|all| all.retain(|health| !Arc::ptr_eq(health, &handle.health)));
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
        let place = |handle: &Arc<Handle>| {
            let own = handle.placement();
            placements.iter().position(|placement| !handle.is_closing() && *placement == *own).unwrap_or(usize::MAX)
        };
        self.all().sort_by_cached_key(place);
    }

    /// Returns the bytes by which loading has grown the processes together, and the bytes that they have registered with their
    /// GPU drivers. Without instances that are being removed.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let of = |handle: &Arc<Handle>| [&handle.memory, &handle.pinned].map(|bytes| bytes.load(Ordering::Relaxed));
        let all = self.all();
        all.iter()
            .filter(|handle| !handle.is_closing())
            .map(of)
            .fold((0, 0), |sum, [memory, pinned]| (sum.0 + memory, sum.1 + pinned))
    }

    /// Returns the status of each instance.
    pub(crate) fn states(&self) -> Vec<InstanceStatus> {
        let doing = |handle: &Arc<Handle>| {
            let placement = handle.placement();
            let (name, gpu) = (placement.name.clone(), placement.device.as_ref().map(|device| device.number));
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
        self.all().iter().map(|handle| (handle.placement().name.clone(), handle.pid())).collect()
    }

    /// Returns the ids of the processes, without those of instances that are being removed.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.all().iter().filter(|handle| !handle.is_closing()).filter_map(|handle| handle.pid()).collect()
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
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
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
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|other| !Arc::ptr_eq(other, &handle));
}

/// Waits until all instances have loaded the model. Returns what they report, in their order.
///
/// # Errors
/// The first reason why one could not, at once.
async fn loaded(mut outcomes: Vec<oneshot::Receiver<Outcome>>) -> Result<Vec<Loaded>, String> {
    let mut loaded = vec![None; outcomes.len()];
    poll_fn(move |cx| {
        for (outcome, loaded) in outcomes.iter_mut().zip(&mut loaded).filter(|(_, loaded)| loaded.is_none()) {
            if let Poll::Ready(ended) = Pin::new(outcome).poll(cx) {
                match ended.unwrap_or_else(|_| Err("the instance ended while it was loading".to_owned())) {
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
