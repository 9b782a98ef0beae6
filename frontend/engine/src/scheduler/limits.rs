//! The rate limiter that all drivers share: performs what `pharos::scheduler::rate_limiter` decides.
//!
//! A driver stages, withdraws and releases its instances under its own lock, so that the limiter hears of one instance in
//! the order in which its scheduler decided. The limiter's lock is the innermost: nobody takes a driver's lock, runs a
//! turn or answers a client while holding it. Who has told the limiter something asks it who gets resources now. Grants to
//! its own instances go to its scheduler within the same turn; another driver's are handed to that driver, as a turn of
//! its own, when no lock is held.
//!
//! A grant on its way to its driver may be overtaken: the instance was lost, or nothing waits any more. So the driver looks
//! whether the instance still holds its resources and its scheduler still wants them. Whatever the scheduler gives up it
//! withdraws or releases in the same turn, hence nothing leaks: what is held is in use, or on its way to one that wants it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use pharos::id::InstanceId;
use pharos::scheduler::rate_limiter::{Limit, Member, RateLimiter, Usage};
use pharos::timeline::Instant;

use super::Driver;
use super::placement::Placement;
use pharos_os::clock;

/// The resources of the server. Exists only with the rate limiter on.
pub(crate) struct Limits {
    // Held for single calls of the limiter.
    state: Mutex<Shared>,
}

struct Shared {
    limiter: RateLimiter,
    owners: HashMap<Member, (Weak<Driver>, InstanceId)>,
    /// How much of each resource the log was last told of, by name and device.
    logged: BTreeMap<(String, Option<u32>), u32>,
}

impl Shared {
    /// Logs how much there is of each resource of which there is another amount than before.
    fn log_changes(&mut self) {
        let usage = self.limiter.usage().into_iter();
        let now: BTreeMap<_, _> = usage.map(|usage| ((usage.name, usage.device), usage.total)).collect();
        for ((name, device), total) in now.iter().filter(|(key, total)| self.logged.get(*key) != Some(*total)) {
            let device = device.map_or_else(|| "all".to_owned(), |device| device.to_string());
            // `Resource: R1\t Count: 3` is how Triton logs it, with the tab escaped.
            tracing::info!(
                "rate limiter: Device: {device}, Resource: {name}\\t Count: {total}",
                name = name.escape_debug()
            );
        }
        self.logged = now;
    }
}

/// An instance has been given its resources, and its driver does not know yet.
pub(super) struct Grant {
    driver: Weak<Driver>,
    pub(super) instance: InstanceId,
}

impl Limits {
    /// With these explicit limits.
    pub(crate) fn new(limits: Vec<Limit>) -> Arc<Self> {
        let shared = Shared { limiter: RateLimiter::new(limits), owners: HashMap::new(), logged: BTreeMap::new() };
        Arc::new(Self { state: Mutex::new(shared) })
    }

    /// A place for the instances of a model version, without any yet.
    pub(crate) fn registration(self: &Arc<Self>) -> Registration {
        let (members, owner, told_ns) = Default::default();
        Registration { limits: self.clone(), members, owner, told_ns }
    }

    /// Every resource with what there is of it and what is in use.
    pub(crate) fn usage(&self) -> Vec<Usage> {
        self.lock().limiter.usage()
    }

    fn poll(&self, now: Instant) -> Option<Grant> {
        let mut shared = self.lock();
        loop {
            let member = shared.limiter.poll(now)?;
            match shared.owners.get(&member) {
                Some((driver, instance)) => return Some(Grant { driver: driver.clone(), instance: *instance }),
                None => shared.limiter.withdraw(member),
            }
        }
    }

    /// Hands grants to their drivers until no instance gets any more.
    fn deliver(&self, mut next: Option<Grant>) {
        while let Some(grant) = next {
            let now = clock::now();
            next = match grant.driver.upgrade() {
                Some(driver) => driver.granted(grant.instance, now),
                // Its registration ends with it and frees what it held.
                None => self.poll(now),
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A model version's place at the rate limiter, for as long as it lives.
pub(crate) struct Registration {
    limits: Arc<Limits>,
    // Held to look one up, or to change which there are.
    members: Mutex<HashMap<InstanceId, Member>>,
    owner: OnceLock<Weak<Driver>>,
    /// Nanoseconds of waiting that the metrics have been told of.
    told_ns: AtomicU64,
}

impl Registration {
    /// The driver that grants are handed to.
    pub(super) fn bind(&self, driver: &Weak<Driver>) {
        let _ = self.owner.set(driver.clone());
    }

    /// Takes more instances, all or none; the passive ones never execute and so need nothing.
    ///
    /// # Errors
    /// Why one of them could never execute; Triton's texts.
    pub(crate) fn add(&self, instances: &[(InstanceId, &Placement)]) -> Result<(), String> {
        let active = || instances.iter().filter(|(_, placement)| !placement.passive);
        let demands: Vec<_> = active().map(|(_, placement)| placement.demand.clone()).collect();
        let owner = self.owner.get().cloned().unwrap_or_default();
        let mut shared = self.limits.lock();
        let members = shared.limiter.register(&demands)?;
        let owners = active().zip(&members).map(|((instance, _), member)| (*member, (owner.clone(), *instance)));
        shared.owners.extend(owners);
        shared.log_changes();
        drop(shared);
        self.members().extend(active().map(|(instance, _)| *instance).zip(members));
        Ok(())
    }

    /// Forgets instances. What they held is free for others.
    pub(crate) fn remove(&self, instances: &[InstanceId]) {
        let mut members = self.members();
        let gone: Vec<Member> = instances.iter().filter_map(|instance| members.remove(instance)).collect();
        drop(members);
        self.unregister(&gone);
    }

    /// Gives resources to the next instance that waits for them, of any driver.
    pub(super) fn poll(&self, now: Instant) -> Option<Grant> {
        self.limits.poll(now)
    }

    /// Hands this grant, and those that follow from it, to their drivers.
    pub(super) fn deliver(&self, grant: Option<Grant>) {
        self.limits.deliver(grant);
    }

    /// Whether an instance holds its resources.
    pub(super) fn holds(&self, instance: InstanceId) -> bool {
        self.member(instance).is_some_and(|member| self.limits.lock().limiter.holds(member))
    }

    fn unregister(&self, members: &[Member]) {
        let mut shared = self.limits.lock();
        shared.limiter.unregister(members);
        members.iter().for_each(|member| drop(shared.owners.remove(member)));
        shared.log_changes();
        drop(shared);
        let next = self.limits.poll(clock::now());
        self.limits.deliver(next);
    }

    fn members(&self) -> MutexGuard<'_, HashMap<InstanceId, Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn member(&self, instance: InstanceId) -> Option<Member> {
        self.members().get(&instance).copied()
    }

    pub(super) fn is_own(&self, grant: &Grant) -> bool {
        self.owner.get().is_some_and(|owner| owner.ptr_eq(&grant.driver))
    }

    pub(super) fn tell(&self, instance: InstanceId, tell: impl FnOnce(&mut RateLimiter, Member)) {
        if let Some(member) = self.member(instance) {
            tell(&mut self.limits.lock().limiter, member);
        }
    }

    /// How many instances wait for their resources, and how long all have waited since this was last asked.
    pub(super) fn waiting(&self, now: Instant) -> (usize, Duration) {
        let members: Vec<Member> = self.members().values().copied().collect();
        let shared = self.limits.lock();
        let all = members.iter().map(|member| shared.limiter.waiting(*member, now));
        let (count, ns) = all.fold((0, 0), |(count, sum), (waits, ns)| (count + usize::from(waits), sum + ns));
        let told = self.told_ns.fetch_max(ns, Ordering::Relaxed);
        (count, Duration::from_nanos(ns.saturating_sub(told)))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let members: Vec<Member> = self.members().drain().map(|(_, member)| member).collect();
        self.unregister(&members);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::scheduler::rate_limiter::{Demand, Need};

    use super::*;

    fn placement(count: u32) -> Placement {
        let need = Need { name: "R".to_owned(), device: None, count };
        Placement {
            name: "m_0".to_owned(),
            passive: false,
            demand: Demand { resources: vec![need], priority: 1 },
            device: None,
            policy: String::new(),
        }
    }

    #[test]
    fn a_model_that_goes_takes_all_that_it_had_with_it() {
        let limits = Limits::new(Vec::new());
        let registration = limits.registration();
        registration.bind(&Weak::new());
        let (active, passive) = (placement(2), Placement { passive: true, ..placement(2) });
        registration.add(&[(InstanceId(0), &active), (InstanceId(1), &passive), (InstanceId(2), &active)]).unwrap();
        let mut instances: Vec<u32> = registration.members().keys().map(|instance| instance.0).collect();
        instances.sort_unstable();
        assert_eq!(instances, [0, 2]);
        registration.tell(InstanceId(0), |limiter, member| limiter.stage(member, Instant(1)));
        assert!(limits.poll(Instant(2)).is_some_and(|grant| grant.instance == InstanceId(0)));
        registration.tell(InstanceId(2), |limiter, member| limiter.stage(member, Instant(2)));
        assert_eq!((limits.usage()[0].used, registration.waiting(Instant(5)).0), (2, 1));
        drop(registration);
        assert_eq!(limits.usage(), []);
        assert!(limits.lock().owners.is_empty());
    }

    #[test]
    fn passive_instances_need_nothing() {
        let limits = Limits::new(vec![Limit { name: "R".to_owned(), count: 1, device: None }]);
        let registration = limits.registration();
        let passive = Placement { passive: true, ..placement(2) };
        assert!(registration.add(&[(InstanceId(0), &passive)]).is_ok());
        assert!(registration.add(&[(InstanceId(1), &placement(2))]).is_err());
    }

    #[test]
    fn resources_follow_the_instances() {
        let limits = Limits::new(Vec::new());
        let registration = limits.registration();
        let total = || limits.usage().first().map(|usage| usage.total);
        registration.add(&[(InstanceId(0), &placement(2))]).unwrap();
        registration.add(&[(InstanceId(1), &placement(8))]).unwrap();
        assert_eq!(total(), Some(8));
        registration.remove(&[InstanceId(1)]);
        assert_eq!(total(), Some(2));
        registration.remove(&[InstanceId(0), InstanceId(7)]);
        assert_eq!(total(), None);
    }
}
