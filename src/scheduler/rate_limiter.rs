//! The rate limiter, modelled on Triton's `rate_limiter.cc`: an instance executes a batch only
//! while it holds its resources, which the instances of all models share.
//!
//! An instance for which a batch could be sent is *staged*. [`RateLimiter::poll`] returns the next
//! staged instance that gets its resources, all of them together; [`RateLimiter::release`] takes
//! them back when the batch has ended. One limiter serves all models. It has no clock and no lock,
//! and handles neither requests nor batches.
//!
//! # Order of service
//! Staged instances are served by their *turn*, which is the number of executions times the
//! priority, smallest first; among equal turns the smaller priority comes first, then the instance
//! that was staged first. So instances that are always busy execute in inverse proportion to their
//! priorities. The load counts as the first execution, as in Triton, whose limiter also
//! schedules the initialization of an instance: with the priorities 1 and 2, the first instance
//! begins with two executions.
//!
//! Unlike in Triton, old counts do not cause long delays: when an instance is staged, its turn is
//! raised to the turns of its competitors that are staged or executing, minus one execution of
//! theirs. Competitors are instances that need a common resource. So an instance that is new or was
//! idle starts near the others; otherwise it would have a large advantage until its count had
//! caught up. An instance that is staged again while a competitor waits can overtake it only within
//! the weights: each competitor is served before a waiting instance at most p/q + 2 times, where p
//! is the priority of the waiting instance and q the priority of the competitor.
//!
//! # Reservations of waiting instances
//! The first instance in the queue that lacks a resource reserves all free units of the resources
//! that it needs; instances after it get only the rest. Otherwise an instance that needs four units
//! would never find four free at once while others take and release one each. Triton serves no
//! other instance while the first one waits; here instances that take nothing from its reservation
//! continue. Since the number of instances served before it is bounded, the waiting instance
//! becomes the first among its competitors, reserves units as executions end, and then waits only
//! for running executions.
//!
//! # Amounts
//! The amount of a resource is the maximum that a single instance needs, separately for each
//! device, unless a limit is configured. Loading and unloading models change it. Units above a
//! reduced amount stay in use until they are released.

use std::collections::{BTreeMap, BTreeSet};

use crate::timeline::Instant;

mod pools;

use pools::Pools;
pub use pools::{Limit, Need, Usage};

/// The resources that one instance needs for each execution, and its weight.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Acquired and released together; empty for an instance that is never delayed.
    pub resources: Vec<Need>,
    /// An instance of priority 2 gets half as many executions as one of priority 1; 0 counts as 1.
    pub priority: u32,
}

/// The identifier of a registered instance; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member(u64);

/// A position in the queue of staged instances; the smallest is served first. Equal turns are
/// ordered by priority, then by the order of staging.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct QueuePosition {
    turn: u128,
    priority: u64,
    staged: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstanceState {
    Idle,
    Staged { position: QueuePosition, since: Instant },
    Holding,
}

#[derive(Debug)]
struct Instance {
    /// The pool and the amount of each resource.
    needs: Vec<(usize, u32)>,
    priority: u64,
    /// The number of executions and loads times the priority, or more if the instance was idle
    /// meanwhile.
    turn: u128,
    state: InstanceState,
    /// The total time in the queue, in nanoseconds.
    waited_ns: u64,
}

impl Instance {
    fn is_active(&self) -> bool {
        self.state != InstanceState::Idle
    }

    fn competes(&self, other: &Instance) -> bool {
        self.needs.iter().any(|(pool, _)| other.needs.iter().any(|(others, _)| pool == others))
    }
}

/// The rate limiter; see the module's documentation. Times never decrease from call to call.
/// Invalid calls (an unknown member, one that is staged already) are ignored.
#[derive(Debug, Default)]
pub struct RateLimiter {
    pools: Pools,
    instances: BTreeMap<Member, Instance>,
    queue: BTreeSet<(QueuePosition, Member)>,
    next_member: u64,
    next_staged: u64,
    /// Whether the state has changed since `poll` last returned `None`.
    changed: bool,
}

impl RateLimiter {
    /// Creates a limiter with these limits. Every other resource has as much as a single instance
    /// needs at most.
    pub fn new(limits: Vec<Limit>) -> Self {
        Self { pools: Pools::new(limits), ..Self::default() }
    }

    /// Registers the instances of a model version, all or none, and returns a member for each.
    ///
    /// # Errors
    /// With Triton's texts: an instance needs more than an explicit limit, or a resource is both
    /// global and per device.
    pub fn register(&mut self, demands: &[Demand]) -> Result<Vec<Member>, String> {
        let needs = self.pools.add(demands.iter().map(|demand| demand.resources.as_slice()))?;
        let mut members = Vec::with_capacity(demands.len());
        for (demand, needs) in demands.iter().zip(needs) {
            let member = Member(self.next_member);
            self.next_member += 1;
            let priority = u64::from(demand.priority.max(1));
            let turn = u128::from(priority);
            let instance =
                Instance { needs, priority, turn, state: InstanceState::Idle, waited_ns: 0 };
            self.instances.insert(member, instance);
            members.push(member);
        }
        self.changed = true;
        Ok(members)
    }

    /// Removes instances and releases their resources. The needs of the others determine the
    /// amounts.
    pub fn unregister(&mut self, members: &[Member]) {
        for &member in members {
            self.free(member);
            if let Some(instance) = self.instances.remove(&member) {
                self.pools.remove(&instance.needs);
            }
        }
        self.pools.resize(self.instances.values().map(|instance| instance.needs.as_slice()));
        self.changed = true;
    }

    /// Stages an instance: a batch could be sent to it, and it requests its resources.
    pub fn stage(&mut self, member: Member, now: Instant) {
        let Some(turn) = self.turn_of(member) else { return };
        let staged = self.next_staged;
        self.next_staged += 1;
        if let Some(instance) = self.instances.get_mut(&member) {
            let position = QueuePosition { turn, priority: instance.priority, staged };
            instance.turn = turn;
            instance.state = InstanceState::Staged { position, since: now };
            self.queue.insert((position, member));
            self.changed = true;
        }
    }

    /// Releases the resources of an instance that has executed its batch or is lost. A staged
    /// instance leaves the queue.
    pub fn release(&mut self, member: Member) {
        self.free(member);
    }

    /// Withdraws an instance that has nothing left to execute: it leaves the queue. If it holds its
    /// resources, they are released and do not count as an execution.
    pub fn withdraw(&mut self, member: Member) {
        if self.holds(member)
            && let Some(instance) = self.instances.get_mut(&member)
        {
            instance.turn = instance.turn.saturating_sub(u128::from(instance.priority));
        }
        self.free(member);
    }

    /// Grants the next staged instance its resources and returns it; `None` if no instance can have
    /// them now. After every change, call it until it returns `None`.
    pub fn poll(&mut self, now: Instant) -> Option<Member> {
        if !std::mem::take(&mut self.changed) || self.queue.is_empty() {
            return None;
        }
        let next = self.next()?;
        self.grant(next, now);
        self.changed = true;
        Some(next)
    }

    /// Returns whether the instance holds its resources.
    pub fn holds(&self, member: Member) -> bool {
        self.instances.get(&member).is_some_and(|instance| instance.state == InstanceState::Holding)
    }

    /// Returns whether the instance is staged, and its total waiting time since registration in
    /// nanoseconds.
    pub fn waiting(&self, member: Member, now: Instant) -> (bool, u64) {
        let Some(instance) = self.instances.get(&member) else { return (false, 0) };
        match instance.state {
            InstanceState::Staged { since, .. } => (true, instance.waited_ns + now.ns_since(since)),
            InstanceState::Idle | InstanceState::Holding => (false, instance.waited_ns),
        }
    }

    /// Returns the amount and use of every resource, by name and device.
    pub fn usage(&self) -> Vec<Usage> {
        self.pools.usage()
    }

    /// Returns the first instance in the queue that can have all its resources. Those before it
    /// keep their reservations.
    fn next(&self) -> Option<Member> {
        let mut reserved = BTreeMap::<usize, u64>::new();
        for &(_, member) in &self.queue {
            let needs = &self.instances.get(&member)?.needs;
            let left = |reserved: &BTreeMap<usize, u64>, pool| {
                let free = self.pools.free(pool);
                free.saturating_sub(reserved.get(&pool).copied().unwrap_or(0))
            };
            if needs.iter().all(|&(pool, count)| u64::from(count) <= left(&reserved, pool)) {
                return Some(member);
            }
            for &(pool, count) in needs {
                let reserves = left(&reserved, pool).min(u64::from(count));
                *reserved.entry(pool).or_default() += reserves;
            }
        }
        None
    }

    fn grant(&mut self, member: Member, now: Instant) {
        let Some(granted) = self.instances.get_mut(&member) else { return };
        if let InstanceState::Staged { position, since } = granted.state {
            self.queue.remove(&(position, member));
            granted.waited_ns += now.ns_since(since);
        }
        granted.state = InstanceState::Holding;
        granted.turn += u128::from(granted.priority);
        self.pools.take(&granted.needs);
    }

    /// Returns the turn of an instance to be staged: its own, or raised to the turns of its
    /// competitors. `None` if it is not idle.
    fn turn_of(&self, member: Member) -> Option<u128> {
        let instance = self.instances.get(&member).filter(|instance| !instance.is_active())?;
        let busy =
            self.instances.values().filter(|other| other.is_active() && other.competes(instance));
        let latest = busy.map(|other| other.turn.saturating_sub(u128::from(other.priority))).max();
        Some(latest.map_or(instance.turn, |latest| latest.max(instance.turn)))
    }

    fn free(&mut self, member: Member) {
        let Some(instance) = self.instances.get_mut(&member) else { return };
        match std::mem::replace(&mut instance.state, InstanceState::Idle) {
            InstanceState::Idle => return,
            InstanceState::Staged { position, .. } => drop(self.queue.remove(&(position, member))),
            InstanceState::Holding => self.pools.give_back(&instance.needs),
        }
        self.changed = true;
    }
}
