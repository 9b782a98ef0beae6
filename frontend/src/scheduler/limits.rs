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

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use pharos::id::InstanceId;
use pharos::metrics::record;
use pharos::scheduler::Action;
use pharos::scheduler::rate_limiter::{Limit, Member, RateLimiter, Usage};
use pharos::timeline::Instant;

use super::placement::Placement;
use super::{Driver, Effects, State};
use crate::clock;

/// The resources of the server. Exists only with the rate limiter on.
pub(crate) struct Limits {
    // Held for single calls of the limiter.
    state: Mutex<Shared>,
}

struct Shared {
    limiter: RateLimiter,
    owners: HashMap<Member, (Weak<Driver>, InstanceId)>,
}

/// An instance has been given its resources, and its driver does not know yet.
pub(super) struct Grant {
    driver: Weak<Driver>,
    instance: InstanceId,
}

impl Limits {
    /// With these explicit limits.
    pub(crate) fn new(limits: Vec<Limit>) -> Arc<Self> {
        let shared = Shared { limiter: RateLimiter::new(limits), owners: HashMap::new() };
        Arc::new(Self { state: Mutex::new(shared) })
    }

    /// Takes the instances of a model version; the passive ones never execute and so need nothing.
    ///
    /// # Errors
    /// Why one of them could never execute; Triton's texts.
    pub(crate) fn register(self: &Arc<Self>, placements: &[Placement]) -> Result<Registration, String> {
        let active = || placements.iter().zip((0..).map(InstanceId)).filter(|(placement, _)| !placement.passive);
        let demands: Vec<_> = active().map(|(placement, _)| placement.demand.clone()).collect();
        let members = self.lock().limiter.register(&demands)?;
        let members = active().map(|(_, instance)| instance).zip(members).collect();
        Ok(Registration { limits: self.clone(), members, owner: OnceLock::new(), told_ns: AtomicU64::new(0) })
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

    /// Hands grants to their drivers until nobody gets any more.
    pub(super) fn deliver(&self, mut next: Option<Grant>) {
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
    members: HashMap<InstanceId, Member>,
    owner: OnceLock<Weak<Driver>>,
    /// Nanoseconds of waiting that the metrics have been told of.
    told_ns: AtomicU64,
}

impl Registration {
    /// The driver that grants are handed to.
    pub(super) fn bind(&self, driver: &Weak<Driver>) {
        let _ = self.owner.set(driver.clone());
        let owners = self.members.iter().map(|(instance, member)| (*member, (driver.clone(), *instance)));
        self.limits.lock().owners.extend(owners);
    }

    fn is_own(&self, grant: &Grant) -> bool {
        self.owner.get().is_some_and(|owner| owner.ptr_eq(&grant.driver))
    }

    fn tell(&self, instance: InstanceId, tell: impl FnOnce(&mut RateLimiter, Member)) {
        if let Some(member) = self.members.get(&instance) {
            tell(&mut self.limits.lock().limiter, *member);
        }
    }

    /// How many instances wait for their resources, and how long all have waited since this was last asked.
    fn waiting(&self, now: Instant) -> (usize, Duration) {
        let shared = self.limits.lock();
        let all = self.members.values().map(|member| shared.limiter.waiting(*member, now));
        let (count, ns) = all.fold((0, 0), |(count, sum), (waits, ns)| (count + usize::from(waits), sum + ns));
        let told = self.told_ns.fetch_max(ns, Ordering::Relaxed);
        (count, Duration::from_nanos(ns.saturating_sub(told)))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let members: Vec<Member> = self.members.values().copied().collect();
        let mut shared = self.limits.lock();
        shared.limiter.unregister(&members);
        members.iter().for_each(|member| drop(shared.owners.remove(member)));
        drop(shared);
        let next = self.limits.poll(clock::now());
        self.limits.deliver(next);
    }
}

impl Driver {
    /// Performs the scheduler's decisions as far as that is done under the lock.
    pub(super) fn decide(&self, state: &mut State, effects: &mut Effects, now: Instant) {
        loop {
            while let Some(action) = state.scheduler.poll_action(now) {
                match action {
                    Action::Execute { instance, requests, reason } => {
                        record::batch_sent(&self.series, reason);
                        self.start(state, effects, (instance, now), &requests);
                    }
                    Action::ExecuteSteps { instance, slots, reason } => {
                        record::batch_sent(&self.series, reason);
                        self.start_steps(state, effects, (instance, now), &slots);
                    }
                    Action::SequencesEnded { instance, keys } => {
                        let link = state.members.get(&instance).map(|member| member.link.clone());
                        effects.ended.extend(link.map(|link| (link, keys)));
                    }
                    Action::SequenceRestarted { request } => {
                        let known = state.queued.get(&request);
                        effects.restarted.extend(known.map(|known| known.part.request.correlation_id.clone()));
                    }
                    Action::Reject { request, reason } => self.reject(state, request, reason),
                    Action::Acquire { instance } => {
                        self.ask_limiter(effects, instance, |limiter, member| limiter.stage(member, now));
                    }
                    Action::Withdraw { instance } => self.ask_limiter(effects, instance, RateLimiter::withdraw),
                    Action::Release { instance } => self.ask_limiter(effects, instance, RateLimiter::release),
                }
            }
            if !self.take_grant(state, effects, now) {
                return;
            }
        }
    }

    /// The scheduler wants something of the rate limiter.
    fn ask_limiter(&self, effects: &mut Effects, instance: InstanceId, wish: impl FnOnce(&mut RateLimiter, Member)) {
        if let Some(limits) = &self.limits {
            limits.tell(instance, wish);
            effects.asked = true;
        }
    }

    /// Whether the scheduler has something more to decide, since the limiter has given resources to an instance of its own.
    /// One of another driver is left in the effects.
    fn take_grant(&self, state: &mut State, effects: &mut Effects, now: Instant) -> bool {
        let Some(registration) = self.limits.as_ref().filter(|_| effects.asked) else { return false };
        match registration.limits.poll(now) {
            Some(grant) if registration.is_own(&grant) => {
                state.scheduler.resources_granted(grant.instance, now);
                true
            }
            foreign => {
                effects.grant = foreign;
                false
            }
        }
    }

    /// Hands on what a turn has left of grants.
    pub(super) fn deliver(&self, grant: Option<Grant>) {
        if let Some(registration) = &self.limits {
            registration.limits.deliver(grant);
        }
    }

    /// A turn for a grant that somebody else's turn has brought about; gives the next one.
    fn granted(&self, instance: InstanceId, now: Instant) -> Option<Grant> {
        self.turn_alone(now, |state, effects| {
            let Some(registration) = &self.limits else { return };
            effects.asked = true;
            let member = registration.members.get(&instance);
            if member.is_some_and(|member| registration.limits.lock().limiter.holds(*member)) {
                state.scheduler.resources_granted(instance, now);
            }
        })
    }

    /// Instances that wait for resources, and how long all have waited since this was last asked; `None` without a rate
    /// limiter.
    pub(crate) fn resource_waits(&self) -> Option<(usize, Duration)> {
        self.limits.as_ref().map(|registration| registration.waiting(clock::now()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::scheduler::rate_limiter::{Demand, Need};

    use super::*;

    fn placement(passive: bool) -> Placement {
        let need = Need { name: "R".to_owned(), device: None, count: 2 };
        Placement {
            name: "m_0".to_owned(),
            passive,
            demand: Demand { resources: vec![need], priority: 1 },
            device: None,
            policy: String::new(),
        }
    }

    #[test]
    fn a_model_that_goes_takes_all_that_it_had_with_it() {
        let limits = Limits::new(Vec::new());
        let registration = limits.register(&[placement(false), placement(true), placement(false)]).unwrap();
        let instances = || registration.members.keys().map(|instance| instance.0);
        assert_eq!((instances().min(), instances().max(), instances().count()), (Some(0), Some(2), 2));
        registration.bind(&Weak::new());
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
        assert!(limits.register(&[placement(true)]).is_ok());
        assert!(limits.register(&[placement(false)]).is_err());
    }
}
