//! The rate limiter that all drivers share, as `pharos::scheduler::rate_limiter` decides.
//!
//! A driver stages, withdraws and releases its instances under its own lock, so that the limiter
//! gets the calls of an instance in the order of its scheduler's decisions. The limiter's lock is
//! the innermost: while it is held, no driver's lock is taken, no turn is run and no client is
//! answered. After calling the limiter, the driver asks it for the next grant. Grants to its own
//! instances go to its scheduler within the same turn. A grant to another driver's instance is
//! delivered to that driver as a separate turn, when no lock is held.
//!
//! A grant may arrive too late, when the instance was lost or nothing waits any more. The driver
//! therefore checks that the instance still holds its resources and that its scheduler still needs
//! them. The scheduler withdraws or releases in the same turn whatever it gives up, so no resources
//! leak: they are in use, or granted to an instance that needs them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::id::InstanceId;
use pharos::scheduler::rate_limiter::{Limit, Member, RateLimiter, Usage};
use pharos::timeline::Instant;

use super::Driver;
use super::placement::Placement;
use pharos_os::clock;

/// The resources of the server. Exists only if the rate limiter is on.
pub(crate) struct Limits {
    // Held for single calls of the limiter.
    state: Mutex<LimiterState>,
}

struct LimiterState {
    limiter: RateLimiter,
    owners: HashMap<Member, (Weak<Driver>, InstanceId)>,
    /// The last logged amount of each resource, by name and device.
    logged: BTreeMap<(String, Option<u32>), u32>,
}

impl LimiterState {
    /// Logs the amount of each resource whose amount has changed.
    fn log_changes(&mut self) {
        let usage = self.limiter.usage().into_iter();
        let now: BTreeMap<_, _> =
            usage.map(|usage| ((usage.name, usage.device), usage.total)).collect();
        for ((name, device), total) in
            now.iter().filter(|(key, total)| self.logged.get(*key) != Some(*total))
        {
            let device = device.map_or_else(|| "all".to_owned(), |device| device.to_string());
            // Triton logs `Resource: R1\t Count: 3`; the tab is escaped here.
            tracing::info!(
                "rate limiter: Device: {device}, Resource: {name}\\t Count: {total}",
                name = name.escape_debug()
            );
        }
        self.logged = now;
    }
}

/// A grant of resources that its driver has not processed yet.
pub(super) struct Grant {
    driver: Weak<Driver>,
    pub(super) instance: InstanceId,
}

impl Limits {
    /// Creates a limiter with these explicit limits.
    pub(crate) fn new(limits: Vec<Limit>) -> Arc<Self> {
        let shared = LimiterState {
            limiter: RateLimiter::new(limits),
            owners: HashMap::new(),
            logged: BTreeMap::new(),
        };
        Arc::new(Self { state: Mutex::new(shared) })
    }

    /// Creates the registration of a model version without instances.
    pub(crate) fn registration(self: &Arc<Self>) -> Registration {
        Registration {
            limits: self.clone(),
            members: Mutex::default(),
            owner: OnceLock::new(),
            removed_ns: AtomicU64::new(0),
            recorded_ns: AtomicU64::new(0),
        }
    }

    /// Returns the total and the used amount of every resource.
    pub(crate) fn usage(&self) -> Vec<Usage> {
        self.lock().limiter.usage()
    }

    fn poll(&self, now: Instant) -> Option<Grant> {
        let mut shared = self.lock();
        loop {
            let member = shared.limiter.poll(now)?;
            match shared.owners.get(&member) {
                Some((driver, instance)) => {
                    return Some(Grant { driver: driver.clone(), instance: *instance });
                }
                None => shared.limiter.withdraw(member),
            }
        }
    }

    /// Delivers grants to their drivers until no instance gets any more.
    fn deliver(&self, mut next: Option<Grant>) {
        while let Some(grant) = next {
            let now = clock::now();
            next = match grant.driver.upgrade() {
                Some(driver) => driver.granted(grant.instance, now),
                // Dropping the registration frees what it held.
                None => self.poll(now),
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, LimiterState> {
        self.state.lock()
    }
}

/// The registration of a model version with the rate limiter.
pub(crate) struct Registration {
    limits: Arc<Limits>,
    // Held only to look up or change entries.
    members: Mutex<HashMap<InstanceId, Member>>,
    owner: OnceLock<Weak<Driver>>,
    /// Nanoseconds that removed instances have waited.
    removed_ns: AtomicU64,
    /// Nanoseconds of waiting that the metrics already include.
    recorded_ns: AtomicU64,
}

impl Registration {
    /// Sets the driver that receives the grants.
    pub(super) fn bind(&self, driver: &Weak<Driver>) {
        let _ = self.owner.set(driver.clone());
    }

    /// Adds all of these instances or none. Passive ones never execute and need nothing.
    ///
    /// # Errors
    /// Why an instance could never execute; Triton's texts.
    pub(crate) fn add(&self, instances: &[(InstanceId, &Placement)]) -> Result<(), String> {
        let mut active = Vec::new();
        let mut demands = Vec::new();
        for (instance, placement) in instances {
            if !placement.passive {
                active.push(*instance);
                demands.push(placement.demand.clone());
            }
        }
        let owner = self.owner.get().cloned().unwrap_or_default();
        let mut shared = self.limits.lock();
        let members = shared.limiter.register(&demands)?;
        for (instance, member) in active.iter().zip(&members) {
            shared.owners.insert(*member, (owner.clone(), *instance));
        }
        shared.log_changes();
        drop(shared);
        self.members().extend(active.into_iter().zip(members));
        Ok(())
    }

    /// Removes instances and frees their resources.
    pub(crate) fn remove(&self, instances: &[InstanceId]) {
        let mut members = self.members();
        let gone: Vec<Member> =
            instances.iter().filter_map(|instance| members.remove(instance)).collect();
        drop(members);
        let waited = self.waited(&gone, clock::now()).1;
        self.removed_ns.fetch_add(waited, Ordering::Relaxed);
        self.unregister(&gone);
    }

    /// Grants resources to the next waiting instance of any driver.
    pub(super) fn poll(&self, now: Instant) -> Option<Grant> {
        self.limits.poll(now)
    }

    /// Delivers this grant, and the grants that follow from it, to their drivers.
    pub(super) fn deliver(&self, grant: Option<Grant>) {
        self.limits.deliver(grant);
    }

    /// Returns whether an instance holds its resources.
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
        self.members.lock()
    }

    fn member(&self, instance: InstanceId) -> Option<Member> {
        self.members().get(&instance).copied()
    }

    pub(super) fn is_own(&self, grant: &Grant) -> bool {
        self.owner.get().is_some_and(|owner| owner.ptr_eq(&grant.driver))
    }

    pub(super) fn update(
        &self,
        instance: InstanceId,
        update: impl FnOnce(&mut RateLimiter, Member),
    ) {
        if let Some(member) = self.member(instance) {
            update(&mut self.limits.lock().limiter, member);
        }
    }

    /// Returns the number of instances that wait for resources, and the total waiting time since
    /// the last call.
    pub(super) fn waiting(&self, now: Instant) -> (usize, Duration) {
        let members: Vec<Member> = self.members().values().copied().collect();
        let (count, ns) = self.waited(&members, now);
        let ns = ns + self.removed_ns.load(Ordering::Relaxed);
        let recorded = self.recorded_ns.fetch_max(ns, Ordering::Relaxed);
        (count, Duration::from_nanos(ns.saturating_sub(recorded)))
    }

    /// Returns how many of these instances wait, and the sum of their waiting times in nanoseconds.
    fn waited(&self, members: &[Member], now: Instant) -> (usize, u64) {
        let shared = self.limits.lock();
        let all = members.iter().map(|member| shared.limiter.waiting(*member, now));
        all.fold((0, 0), |(count, sum), (waits, ns)| (count + usize::from(waits), sum + ns))
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
    fn dropping_a_registration_frees_all_of_its_resources() {
        let limits = Limits::new(Vec::new());
        let registration = limits.registration();
        registration.bind(&Weak::new());
        let active = placement(2);
        let passive = Placement { passive: true, ..placement(2) };
        registration
            .add(&[(InstanceId(0), &active), (InstanceId(1), &passive), (InstanceId(2), &active)])
            .unwrap();
        let mut instances: Vec<u32> =
            registration.members().keys().map(|instance| instance.0).collect();
        instances.sort_unstable();
        assert_eq!(instances, [0, 2]);
        registration.update(InstanceId(0), |limiter, member| limiter.stage(member, Instant(1)));
        assert!(limits.poll(Instant(2)).is_some_and(|grant| grant.instance == InstanceId(0)));
        registration.update(InstanceId(2), |limiter, member| limiter.stage(member, Instant(2)));
        assert_eq!((limits.usage()[0].used, registration.waiting(Instant(5)).0), (2, 1));
        drop(registration);
        assert_eq!(limits.usage(), []);
        assert!(limits.lock().owners.is_empty());
    }

    #[test]
    fn the_waiting_time_of_removed_instances_stays_counted() {
        let limits = Limits::new(Vec::new());
        let registration = limits.registration();
        registration.bind(&Weak::new());
        let one = placement(1);
        let all = [InstanceId(0), InstanceId(1), InstanceId(2)];
        registration.add(&all.map(|instance| (instance, &one))).unwrap();
        for instance in all {
            registration.update(instance, |limiter, member| limiter.stage(member, Instant(1)));
        }
        assert!(limits.poll(Instant(1)).is_some_and(|grant| grant.instance == all[0]));
        let (count, recorded) = registration.waiting(clock::now());
        assert!(count == 2 && recorded > Duration::ZERO);
        registration.remove(&all[2..]);
        let second = Duration::from_secs(1);
        let (count, more) = registration.waiting(clock::now() + second);
        assert!(count == 1 && more >= second, "{more:?} after {recorded:?}");
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
    fn totals_follow_the_instances() {
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
