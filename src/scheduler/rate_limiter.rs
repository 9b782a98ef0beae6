//! The rate limiter, after Triton's `rate_limiter.cc`: an instance executes a batch only while it holds its resources,
//! which it shares with the instances of all models.
//!
//! An instance that could be given a batch is *staged*; [`RateLimiter::poll`] says which staged instance gets its
//! resources, all of them together; [`RateLimiter::release`] takes them back when the batch has ended. One limiter serves
//! all models. It has no clock and no lock, and knows neither requests nor batches.
//!
//! # Who is next
//! Staged instances are served by their *turn*, executions so far times priority, the smallest first; of equal ones that
//! with the smaller priority, then the one that was staged first. So instances that are always busy execute in inverse proportion to their priorities.
//! A count is not held against anybody for ever, which it is in Triton: when an instance is staged, its turn is brought up
//! to those that compete with it (that is, that need a resource which it needs too) and are staged or execute, short of
//! one execution of theirs. So one that is new or was idle begins where the others are, rather than far behind them, where
//! it would have everything to itself until it has caught up. And whoever comes back to the line while another one waits
//! comes back no further before it than the weights say: each competitor is served at most as often before it as its
//! priority divided by theirs, and twice more.
//!
//! # What a waiting instance keeps
//! An instance whose turn it is and that lacks a resource keeps what is free of all that it needs: who comes after it
//! gets only what is left beyond that. Else one that needs four of a resource would never find four free at once while
//! others come and go with one each. Triton serves nobody while the first one waits; here those go on that take nothing
//! away from it. Since only so many are served before it, the one that waits becomes the first of those that it competes
//! with, gathers what it needs as executions end, and then waits for no more than those that run.
//!
//! # How much there is
//! The most that a single instance needs, on each device for itself, unless a limit is given. Loading and unloading models
//! change it; what an unloaded model made larger than it is now stays in use until it is given back.

use std::collections::{BTreeMap, BTreeSet};

use crate::timeline::Instant;

mod pools;

use pools::Pools;
pub use pools::{Limit, Need, Usage};

/// What one instance needs for each execution, and its weight.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Taken and given back together; empty for an instance that is never held up.
    pub resources: Vec<Need>,
    /// An instance of priority 2 gets half as many executions as one of priority 1; 0 counts as 1.
    pub priority: u32,
}

/// An instance that the limiter knows; never given to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member(u64);

/// A place in the line of those that are staged; the smallest is served first. Ties are broken by the
/// smaller priority, then by the order of staging.
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
    /// Pool and amount.
    needs: Vec<(usize, u32)>,
    priority: u64,
    /// Executions times priority, or more if it was idle meanwhile.
    turn: u128,
    state: InstanceState,
    /// Nanoseconds that it has been staged, all times together.
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

/// See the module. Times never go backwards from call to call; what makes no sense (a member that is not known, one that
/// is staged twice) is ignored.
#[derive(Debug, Default)]
pub struct RateLimiter {
    pools: Pools,
    instances: BTreeMap<Member, Instance>,
    line: BTreeSet<(QueuePosition, Member)>,
    next_member: u64,
    next_staged: u64,
    /// Something has happened since nobody could be served.
    changed: bool,
}

impl RateLimiter {
    /// One with these explicit limits; every other resource has as much as a single instance needs at most.
    pub fn new(limits: Vec<Limit>) -> Self {
        Self { pools: Pools::new(limits), ..Self::default() }
    }

    /// Takes the instances of a model version, all or none, and gives a member for each.
    ///
    /// # Errors
    /// Triton's texts: an instance needs more than an explicit limit gives, or a resource is both global and of devices.
    pub fn register(&mut self, demands: &[Demand]) -> Result<Vec<Member>, String> {
        let needs = self.pools.add(demands.iter().map(|demand| demand.resources.as_slice()))?;
        let mut members = Vec::with_capacity(demands.len());
        for (demand, needs) in demands.iter().zip(needs) {
            let member = Member(self.next_member);
            self.next_member += 1;
            let priority = u64::from(demand.priority.max(1));
            let instance = Instance { needs, priority, turn: 0, state: InstanceState::Idle, waited_ns: 0 };
            self.instances.insert(member, instance);
            members.push(member);
        }
        self.changed = true;
        Ok(members)
    }

    /// Forgets instances. What they hold is free, and what others need decides how much there is.
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

    /// The instance could be given a batch and asks for its resources.
    pub fn stage(&mut self, member: Member, now: Instant) {
        let Some(turn) = self.turn_of(member) else { return };
        let staged = self.next_staged;
        self.next_staged += 1;
        if let Some(instance) = self.instances.get_mut(&member) {
            let position = QueuePosition { turn, priority: instance.priority, staged };
            instance.turn = turn;
            instance.state = InstanceState::Staged { position, since: now };
            self.line.insert((position, member));
            self.changed = true;
        }
    }

    /// The instance has executed its batch, or is lost: its resources are free. One that is staged is so no longer.
    pub fn release(&mut self, member: Member) {
        self.free(member);
    }

    /// The instance has nothing to execute any more: it is no longer staged, and if it was given its resources they are
    /// free and count as no execution.
    pub fn withdraw(&mut self, member: Member) {
        if self.holds(member)
            && let Some(instance) = self.instances.get_mut(&member)
        {
            instance.turn = instance.turn.saturating_sub(u128::from(instance.priority));
        }
        self.free(member);
    }

    /// Gives the next staged instance its resources; `None` when no more can have them now. Call it until then whenever
    /// anything has happened.
    pub fn poll(&mut self, now: Instant) -> Option<Member> {
        if !std::mem::take(&mut self.changed) || self.line.is_empty() {
            return None;
        }
        let next = self.next()?;
        self.grant(next, now);
        self.changed = true;
        Some(next)
    }

    /// Whether the instance holds its resources.
    pub fn holds(&self, member: Member) -> bool {
        self.instances.get(&member).is_some_and(|instance| instance.state == InstanceState::Holding)
    }

    /// Whether the instance is staged, and how long it has waited since it was registered, in nanoseconds.
    pub fn waiting(&self, member: Member, now: Instant) -> (bool, u64) {
        let Some(instance) = self.instances.get(&member) else { return (false, 0) };
        match instance.state {
            InstanceState::Staged { since, .. } => (true, instance.waited_ns + now.ns_since(since)),
            InstanceState::Idle | InstanceState::Holding => (false, instance.waited_ns),
        }
    }

    /// Every resource with what there is of it and what is in use, by name and device.
    pub fn usage(&self) -> Vec<Usage> {
        self.pools.usage()
    }

    /// The first in the line that can have all it needs. Those before it keep what is free of what they need.
    fn next(&self) -> Option<Member> {
        let mut kept = BTreeMap::<usize, u64>::new();
        for &(_, member) in &self.line {
            let needs = &self.instances.get(&member)?.needs;
            let left = |kept: &BTreeMap<usize, u64>, pool| {
                let free = self.pools.free(pool);
                free.saturating_sub(kept.get(&pool).copied().unwrap_or(0))
            };
            if needs.iter().all(|&(pool, count)| u64::from(count) <= left(&kept, pool)) {
                return Some(member);
            }
            for &(pool, count) in needs {
                let keeps = left(&kept, pool).min(u64::from(count));
                *kept.entry(pool).or_default() += keeps;
            }
        }
        None
    }

    fn grant(&mut self, member: Member, now: Instant) {
        let Some(granted) = self.instances.get_mut(&member) else { return };
        if let InstanceState::Staged { position, since } = granted.state {
            self.line.remove(&(position, member));
            granted.waited_ns += now.ns_since(since);
        }
        granted.state = InstanceState::Holding;
        granted.turn += u128::from(granted.priority);
        self.pools.take(&granted.needs);
    }

    /// The turn of an instance that is to be staged: its own, or where its competitors are. `None` if it is not idle.
    fn turn_of(&self, member: Member) -> Option<u128> {
        let instance = self.instances.get(&member).filter(|instance| !instance.is_active())?;
        let busy = self.instances.values().filter(|other| other.is_active() && other.competes(instance));
        let latest = busy.map(|other| other.turn.saturating_sub(u128::from(other.priority))).max();
        Some(latest.map_or(instance.turn, |latest| latest.max(instance.turn)))
    }

    fn free(&mut self, member: Member) {
        let Some(instance) = self.instances.get_mut(&member) else { return };
        match std::mem::replace(&mut instance.state, InstanceState::Idle) {
            InstanceState::Idle => return,
            InstanceState::Staged { position, .. } => drop(self.line.remove(&(position, member))),
            InstanceState::Holding => self.pools.give_back(&instance.needs),
        }
        self.changed = true;
    }
}
