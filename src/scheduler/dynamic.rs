//! The dynamic batcher, after Triton's `dynamic_batch_scheduler.cc`; with a maximum batch of 1 it is the default
//! scheduler.
//!
//! # When a batch goes
//! Requests are walked in the order of service. The first fixes the shape key; the walk stops at a request that does
//! not fit: another shape, or too many items for the maximum batch. Reaching a preferred size marks that prefix, so the
//! largest reachable preferred size wins; passing the largest preferred size with nothing marked marks what is there.
//! Then, for an idle instance: a marked prefix goes at once, unless the oldest request has waited the queue delay;
//! otherwise all that was walked goes if it cannot grow, or the delay is over or there is none. Else the batch waits.
//!
//! # Timeouts
//! A request whose timeout action is REJECT leaves the queue when its timeout passes. With DELAY the walk moves it behind
//! the others of its level when it reaches the request after the timeout, so several late requests keep their order. The
//! request keeps its arrival time: it waits for other requests, for at most the queue delay since its arrival.
//!
//! # The second batch in flight
//! An instance that executes may be sent its next batch, so that gathering and sending cost no idle time. Triton's
//! waiting batches grow until an instance picks them up; a batch that we have sent cannot. So a busy instance gets only
//! a batch that cannot improve by waiting: one that has reached the largest preferred size, or is followed by a request
//! that does not fit. A partial batch stays in the queue, where it can still grow, until an instance is idle. Sending it
//! early would gain the gap between two executions (tens of microseconds) and cost batching for a whole execution: with
//! fewer clients than the maximum batch, two half batches would alternate for ever where one full batch could run. The
//! queue delay having passed is no reason either: the batch could not start any earlier. With a maximum batch of 1
//! every request is a full batch, so models that do not batch are always pipelined, unless a queue policy or priority
//! levels forbid it.
//!
//! # With the rate limiter
//! A batch that could go does not go: all idle instances ask for their resources, since any of them may get them first.
//! The batch is formed for the one that does, from what waits by then; when nothing is left that could go, the others ask
//! no longer.
//!
//! # Cost
//! The walk is kept between calls and goes on where it stopped, so a request is looked at once however often it is
//! asked for batches; what disturbs the walked part (a removal, a request in front of it) restarts it, at most one
//! maximum batch long.

use std::collections::VecDeque;
use std::time::Duration;

use super::instances::Instances;
use super::queue::{Entry, Position, Queue};
use super::{Action, RejectReason, Scheduler, Settings, Ticket, Waiting};
use crate::id::{InstanceId, RequestId};
use crate::timeline::{Instant, SendReason};

/// The batch that would be sent next: the part of the queue that was looked at.
#[derive(Debug, Default)]
struct NextBatch {
    last: Option<Position>,
    requests: usize,
    items: u64,
    shape_key: u64,
    /// When the oldest of them was enqueued.
    oldest: Instant,
    /// When the first of them, or the request that did not fit, is to be moved behind the others of its level.
    delayed_at: Option<Instant>,
    /// How many of them a preferred batch takes.
    marked: Option<usize>,
    /// They are exactly of a preferred size, rather than all before the request that passed the largest.
    preferred: bool,
    /// The next request does not fit.
    stopped: bool,
    /// It has another shape.
    other_shape: bool,
}

/// Batch sizes in items.
#[derive(Debug)]
struct Sizes {
    max: u64,
    preferred: Vec<u64>,
    largest_preferred: u64,
}

impl Sizes {
    fn new(settings: &Settings) -> Self {
        let max = u64::from(settings.max_batch_size.max(1));
        let usable = |size: &u64| (1..=max).contains(size);
        let preferred: Vec<u64> =
            settings.preferred_batch_sizes.iter().map(|&size| u64::from(size)).filter(usable).collect();
        let largest = preferred.iter().max().copied();
        match largest {
            Some(largest_preferred) => Self { max, preferred, largest_preferred },
            None => Self { max, preferred: vec![max], largest_preferred: max },
        }
    }
}

/// A decision that has not been polled yet. It keeps the entries, so that a batch for an instance that is lost in the
/// meantime can go back.
enum Decided {
    Execute(InstanceId, Vec<Entry>, SendReason),
    Reject(RequestId, RejectReason),
    Acquire(InstanceId),
    Withdraw(InstanceId),
    Release(InstanceId),
}

impl From<Decided> for Action {
    fn from(decided: Decided) -> Self {
        match decided {
            Decided::Execute(instance, batch, reason) => {
                let requests = batch.into_iter().map(|entry| entry.ticket.request).collect();
                Self::Execute { instance, requests, reason }
            }
            Decided::Reject(request, reason) => Self::Reject { request, reason },
            Decided::Acquire(instance) => Self::Acquire { instance },
            Decided::Withdraw(instance) => Self::Withdraw { instance },
            Decided::Release(instance) => Self::Release { instance },
        }
    }
}

/// See the module.
pub(super) struct DynamicBatcher {
    settings: Settings,
    sizes: Sizes,
    delay: Duration,
    max_in_flight: u32,
    queue: Queue,
    instances: Instances,
    walk: NextBatch,
    decided: VecDeque<Decided>,
    /// Requests that must be queued before anything runs.
    hold: Option<usize>,
    stopping: bool,
}

impl DynamicBatcher {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            sizes: Sizes::new(&settings),
            delay: Duration::from_micros(settings.max_queue_delay_us),
            max_in_flight: settings.max_in_flight(),
            queue: Queue::default(),
            instances: Instances::default(),
            walk: NextBatch::default(),
            decided: VecDeque::new(),
            hold: settings.delay_scheduler,
            stopping: false,
            settings,
        }
    }

    /// Appends a request that came at `queued`, earlier perhaps than others that are here (the part of the sequence batcher's
    /// `oldest` strategy), whether or not this scheduler is stopping.
    pub(super) fn push(&mut self, ticket: Ticket, queued: Instant) {
        let entry = self.entry(ticket, queued);
        self.queue.push(entry);
    }

    /// Takes a request that waits out without an answer.
    pub(super) fn withdraw(&mut self, request: RequestId) {
        if self.queue.remove(request).is_some() {
            self.walk = NextBatch::default();
        }
    }

    fn entry(&self, ticket: Ticket, queued: Instant) -> Entry {
        let level = self.settings.level(ticket.priority);
        let policy = self.settings.policy(level);
        let timeout = policy.timeout(ticket.timeout_us);
        let deadline = timeout.map(|timeout| queued + timeout.saturating_sub(ticket.waited));
        Entry { queued, deadline, timeout_action: policy.timeout_action, level, ticket }
    }

    fn reject(&mut self, request: RequestId, reason: RejectReason) {
        self.decided.push_back(Decided::Reject(request, reason));
    }

    /// Whether the level takes no more. What could go has gone and what is due has left before it is called full, so
    /// that the answer does not depend on how many requests the driver hands over between two polls.
    fn is_full(&mut self, level: u64, now: Instant) -> bool {
        let limit = self.settings.policy(level).max_queue_size as usize;
        let full = |queue: &Queue| limit != 0 && queue.level_len(level) >= limit;
        if full(&self.queue) {
            self.expire(now);
            if self.settings.rate_limited {
                return full(&self.queue);
            }
            while let Some(batch) = self.next_batch(now) {
                self.decided.push_back(batch);
            }
        }
        full(&self.queue)
    }

    /// The next batch that can go at this time.
    fn next_batch(&mut self, now: Instant) -> Option<Decided> {
        if self.settings.rate_limited {
            return self.next_wish(now);
        }
        let (instance, in_flight) = self.instances.least_loaded()?;
        if in_flight >= self.max_in_flight || self.is_held() {
            return None;
        }
        self.walk_on(now);
        let (requests, reason) = self.batch_to_send(in_flight == 0, now)?;
        Some(self.send(instance, requests, reason))
    }

    /// An instance that asks for its resources, or asks for them no longer, according to whether a batch could go.
    fn next_wish(&mut self, now: Instant) -> Option<Decided> {
        if self.could_send(now) {
            self.instances.ask().map(Decided::Acquire)
        } else {
            self.instances.unask(None).map(Decided::Withdraw)
        }
    }

    /// Whether a batch could go to an idle instance.
    pub(super) fn could_send(&mut self, now: Instant) -> bool {
        if self.is_held() {
            return false;
        }
        self.walk_on(now);
        self.batch_to_send(true, now).is_some()
    }

    /// What the instance has of the rate limiter is free.
    fn give_up(&mut self, instance: InstanceId) {
        if !self.settings.rate_limited {
            return;
        }
        if self.instances.is_busy(instance) {
            self.decided.push_back(Decided::Release(instance));
        } else if self.instances.unask(Some(instance)).is_some() {
            self.decided.push_back(Decided::Withdraw(instance));
        }
    }

    /// Takes the first requests out of the queue as a batch.
    fn send(&mut self, instance: InstanceId, requests: usize, reason: SendReason) -> Decided {
        let mut batch = Vec::with_capacity(requests);
        batch.extend((0..requests).map_while(|_| self.queue.pop()));
        self.walk = NextBatch::default();
        self.instances.sent(instance);
        Decided::Execute(instance, batch, reason)
    }

    fn expire(&mut self, now: Instant) {
        while let Some(entry) = self.queue.pop_expired(now) {
            self.walk = NextBatch::default();
            self.reject(entry.ticket.request, RejectReason::Timeout);
        }
    }

    /// The hold ends for good when enough requests are there.
    fn is_held(&mut self) -> bool {
        if self.hold.is_some_and(|wanted| self.queue.len() >= wanted) {
            self.hold = None;
        }
        self.hold.is_some()
    }

    /// Walks on to the end of the queue or to the first request that does not fit. Moves requests that are late behind
    /// the others of their levels on the way.
    fn walk_on(&mut self, now: Instant) {
        let Self { walk, sizes, queue, .. } = self;
        if walk.delayed_at.is_some_and(|time| time <= now) {
            *walk = NextBatch::default();
        }
        while !walk.stopped {
            let Some((position, entry)) = queue.after(walk.last) else { return };
            if entry.delayed_at().is_some_and(|time| time <= now) {
                queue.delay(position);
                continue;
            }
            walk.delayed_at = [walk.delayed_at, entry.delayed_at()].into_iter().flatten().min();
            let items = walk.items + u64::from(entry.ticket.batch_size.max(1));
            if walk.requests == 0 {
                walk.shape_key = entry.ticket.shape_key;
                walk.oldest = entry.queued;
            } else {
                if items > sizes.largest_preferred && walk.marked.is_none() {
                    walk.marked = Some(walk.requests);
                }
                if items > sizes.max || entry.ticket.shape_key != walk.shape_key {
                    walk.stopped = true;
                    walk.other_shape = items <= sizes.max;
                    return;
                }
            }
            walk.last = Some(position);
            walk.requests += 1;
            walk.items = items;
            walk.oldest = walk.oldest.min(entry.queued);
            if sizes.preferred.contains(&items) {
                walk.marked = Some(walk.requests);
                walk.preferred = true;
            }
        }
    }

    /// How many of the walked requests go now as one batch to an instance that is idle or busy, and why now.
    fn batch_to_send(&self, idle: bool, now: Instant) -> Option<(usize, SendReason)> {
        let walk = &self.walk;
        if walk.requests == 0 {
            return None;
        }
        let complete = walk.stopped || walk.items >= self.sizes.largest_preferred;
        if !idle && !complete {
            return None;
        }
        // When nothing more is let in there is nothing to wait for.
        let waited = self.stopping || (!self.delay.is_zero() && now - walk.oldest >= self.delay);
        if let Some(marked) = walk.marked.filter(|_| !waited) {
            let preferred = walk.preferred && !self.settings.preferred_batch_sizes.is_empty();
            return Some((marked, if preferred { SendReason::Preferred } else { SendReason::Full }));
        }
        let reason = match () {
            () if walk.other_shape => SendReason::Shape,
            () if complete => SendReason::Full,
            () if self.stopping => SendReason::Drain,
            () if waited => SendReason::Delay,
            () if self.delay.is_zero() => SendReason::Idle,
            () => return None,
        };
        Some((walk.requests, reason))
    }
}

impl Scheduler for DynamicBatcher {
    fn enqueue(&mut self, ticket: Ticket, now: Instant) {
        let request = ticket.request;
        if self.stopping {
            return self.reject(request, RejectReason::Stopping);
        }
        if self.queue.contains(request) {
            return;
        }
        let entry = self.entry(ticket, now);
        if self.is_full(entry.level, now) {
            return self.reject(request, RejectReason::QueueFull);
        }
        let position = self.queue.push(entry);
        // What was walked and not sent reaches to the end of the queue: only a more important request disturbs it.
        if self.walk.last.is_some_and(|last| self.queue.in_earlier_lane(position, last)) {
            self.walk = NextBatch::default();
        }
    }

    fn cancel(&mut self, request: RequestId, _now: Instant) {
        if self.queue.remove(request).is_some() {
            self.walk = NextBatch::default();
            self.reject(request, RejectReason::Cancelled);
        }
    }

    fn batch_done(&mut self, instance: InstanceId, _now: Instant) {
        self.give_up(instance);
        self.instances.done(instance);
    }

    fn resources_granted(&mut self, instance: InstanceId, now: Instant) {
        if self.instances.unask(Some(instance)).is_none() {
            return;
        }
        self.expire(now);
        let batch = if self.could_send(now) { self.batch_to_send(true, now) } else { None };
        let decided = match batch {
            Some((requests, reason)) => self.send(instance, requests, reason),
            None => Decided::Withdraw(instance),
        };
        self.decided.push_back(decided);
    }

    fn instance_ready(&mut self, instance: InstanceId, _now: Instant) {
        self.give_up(instance);
        self.instances.join(instance);
    }

    fn instance_lost(&mut self, instance: InstanceId, _now: Instant) {
        self.give_up(instance);
        self.instances.leave(instance);
        for decided in std::mem::take(&mut self.decided) {
            match decided {
                Decided::Execute(chosen, batch, _) if chosen == instance => {
                    self.walk = NextBatch::default();
                    batch.into_iter().for_each(|entry| self.queue.push_by_age(entry));
                }
                other => self.decided.push_back(other),
            }
        }
    }

    fn instance_closing(&mut self, instance: InstanceId, now: Instant) {
        if self.instances.is_busy(instance) {
            self.instances.close(instance);
        } else {
            self.instance_lost(instance, now);
        }
    }

    fn requeue(&mut self, ticket: Ticket, queued: Instant, _now: Instant) {
        if !self.queue.contains(ticket.request) {
            let entry = self.entry(ticket, queued);
            self.queue.push_by_age(entry);
            self.walk = NextBatch::default();
        }
    }

    fn stop(&mut self, _now: Instant) {
        self.stopping = true;
        self.hold = None;
    }

    fn reject_all(&mut self, reason: RejectReason, _now: Instant) {
        self.walk = NextBatch::default();
        while let Some(entry) = self.queue.pop() {
            self.reject(entry.ticket.request, reason);
        }
    }

    fn reject_queued_before(&mut self, queued: Instant, reason: RejectReason, _now: Instant) {
        let (mut late, mut last) = (Vec::new(), None);
        while let Some((position, entry)) = self.queue.after(last) {
            last = Some(position);
            late.extend((entry.queued < queued).then_some(entry.ticket.request));
        }
        for request in late {
            self.withdraw(request);
            self.reject(request, reason);
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        // A queue delay that is over shows when the next batch is asked for.
        self.expire(now);
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let idle = self.instances.least_loaded().is_some_and(|(_, in_flight)| in_flight == 0);
        let waiting = idle && self.hold.is_none() && self.walk.requests > 0;
        let delay_over = waiting.then(|| self.walk.oldest + self.delay);
        let delayed_at = self.walk.delayed_at.filter(|_| waiting);
        [delay_over, delayed_at, self.queue.next_deadline()].into_iter().flatten().min()
    }

    fn poll_action(&mut self, now: Instant) -> Option<Action> {
        self.expire(now);
        self.decided.pop_front().or_else(|| self.next_batch(now)).map(Action::from)
    }

    fn waiting(&self) -> Waiting {
        self.queue.waiting()
    }

    fn queued(&self) -> usize {
        self.queue.len()
    }
}
