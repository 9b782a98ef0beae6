//! The dynamic batcher, modelled on Triton's `dynamic_batch_scheduler.cc`. With a maximum batch
//! size of 1 it is the default scheduler.
//!
//! # When a batch is sent
//! The batcher scans requests in the order of service. The first request determines the shape key;
//! the scan stops at a request that does not fit: another shape, or too many items for the maximum
//! batch size. Reaching a preferred size marks that prefix, so the largest reachable preferred size
//! wins. Passing the largest preferred size without a mark marks the prefix before it. Then, for an
//! idle instance: a marked prefix is sent at once, unless the oldest request has waited for the
//! queue delay. Otherwise all scanned requests are sent if the batch cannot grow, the delay has
//! passed, or no delay is configured. Else the batch waits.
//!
//! # Timeouts
//! A request with the timeout action REJECT leaves the queue when its timeout passes. With DELAY,
//! the scan moves it behind the others of its level when it reaches the request after the timeout,
//! so late requests keep their order. The request keeps its arrival time: it waits for other
//! requests at most until the queue delay since its arrival has passed.
//!
//! # The second batch in flight
//! A busy instance may receive its next batch, so that gathering and sending cause no idle time.
//! Triton's waiting batches grow until an instance fetches them; here a batch in flight cannot
//! grow. So a busy instance receives only a batch that cannot improve by waiting: one that has
//! reached the largest preferred size, or is followed by a request that does not fit. A
//! partial batch stays in the queue, where it can grow, until an instance is idle. Sending it early
//! would save the gap between two executions (tens of microseconds) but reduce batching: with fewer
//! clients than the maximum batch size, two half batches would alternate permanently where one full
//! batch could run. An expired queue delay does not change this, because the batch could not start
//! any earlier. With a maximum batch size of 1 every request is a full batch, so models that do not
//! batch are always pipelined, unless a queue policy or priority levels forbid it.
//!
//! # With the rate limiter
//! When a batch could be sent, all idle instances first request their resources, since any of them
//! may receive them first. The batch is formed for that instance, from the requests that wait by
//! then. If no further batch could be sent, the other instances withdraw their requests for
//! resources.
//!
//! # Cost
//! The scan continues where it stopped in the previous call, so each request is scanned once. A
//! change of the scanned part (a removal, or a request inserted before its end) restarts the scan,
//! which is at most one maximum batch long.

use std::collections::VecDeque;
use std::time::Duration;

use super::instances::Instances;
use super::queue::{Entry, Position, Queue};
use super::{Action, RejectReason, Scheduler, Settings, Ticket, Waiting};
use crate::id::{InstanceId, RequestId};
use crate::timeline::{Instant, SendReason};

/// The batch that would be sent next: the scanned part of the queue.
#[derive(Debug, Default)]
struct NextBatch {
    last: Option<Position>,
    requests: usize,
    items: u64,
    shape_key: u64,
    /// When the oldest of the requests was enqueued.
    oldest: Instant,
    /// When the first of the requests, or the one that did not fit, must be moved behind the
    /// others of its level.
    delayed_at: Option<Instant>,
    /// The length of the marked prefix.
    marked: Option<usize>,
    /// Whether the marked prefix has exactly a preferred size. Otherwise it ends before the
    /// request that passed the largest one.
    preferred: bool,
    /// Whether the next request does not fit.
    stopped: bool,
    /// Whether the next request has another shape.
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
        let preferred: Vec<u64> = settings
            .preferred_batch_sizes
            .iter()
            .map(|&size| u64::from(size))
            .filter(|size| (1..=max).contains(size))
            .collect();
        let largest = preferred.iter().max().copied();
        match largest {
            Some(largest_preferred) => Self { max, preferred, largest_preferred },
            None => Self { max, preferred: vec![max], largest_preferred: max },
        }
    }
}

/// A decision that has not been polled yet. It keeps the entries, so that the batch can return to
/// the queue if its instance is lost in the meantime.
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

/// The dynamic batcher; see the module's documentation.
pub(super) struct DynamicBatcher {
    settings: Settings,
    sizes: Sizes,
    delay: Duration,
    max_in_flight: u32,
    queue: Queue,
    instances: Instances,
    scan: NextBatch,
    decided: VecDeque<Decided>,
    /// The number of requests that must be queued before the first execution.
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
            scan: NextBatch::default(),
            decided: VecDeque::new(),
            hold: settings.delay_scheduler,
            stopping: false,
            settings,
        }
    }

    /// Appends a request that arrived at `queued`, which may be before the arrival of queued
    /// requests (for the sequence batcher's strategy `oldest`). Works even if this scheduler is
    /// stopping.
    pub(super) fn push(&mut self, ticket: Ticket, queued: Instant) {
        let entry = self.entry(ticket, queued);
        self.queue.push(entry);
    }

    /// Removes a waiting request without answering it.
    pub(super) fn withdraw(&mut self, request: RequestId) {
        if self.queue.remove(request).is_some() {
            self.scan = NextBatch::default();
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

    /// Returns whether the level is full. First sends all batches that can be sent and removes
    /// expired requests, so that the result does not depend on how many requests the driver
    /// enqueues between two polls.
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

    /// Returns the next batch that can be sent now.
    fn next_batch(&mut self, now: Instant) -> Option<Decided> {
        if self.settings.rate_limited {
            return self.next_resource_action(now);
        }
        let (instance, in_flight) = self.instances.least_loaded()?;
        if in_flight >= self.max_in_flight || self.is_held() {
            return None;
        }
        self.continue_scan(now);
        let (requests, reason) = self.batch_to_send(in_flight == 0, now)?;
        Some(self.send(instance, requests, reason))
    }

    /// Requests resources for an instance if a batch could be sent; otherwise withdraws such a
    /// request.
    fn next_resource_action(&mut self, now: Instant) -> Option<Decided> {
        if self.could_send(now) {
            self.instances.reserve().map(Decided::Acquire)
        } else {
            self.instances.unreserve(None).map(Decided::Withdraw)
        }
    }

    /// Returns whether a batch could be sent to an idle instance.
    pub(super) fn could_send(&mut self, now: Instant) -> bool {
        if self.is_held() {
            return false;
        }
        self.continue_scan(now);
        self.batch_to_send(true, now).is_some()
    }

    /// Releases the instance's resources, or withdraws its request for them.
    fn release_resources(&mut self, instance: InstanceId) {
        if !self.settings.rate_limited {
            return;
        }
        if self.instances.is_busy(instance) {
            self.decided.push_back(Decided::Release(instance));
        } else if self.instances.unreserve(Some(instance)).is_some() {
            self.decided.push_back(Decided::Withdraw(instance));
        }
    }

    /// Takes the first requests from the queue as a batch.
    fn send(&mut self, instance: InstanceId, requests: usize, reason: SendReason) -> Decided {
        let mut batch = Vec::with_capacity(requests);
        batch.extend((0..requests).map_while(|_| self.queue.pop()));
        self.scan = NextBatch::default();
        self.instances.sent(instance);
        Decided::Execute(instance, batch, reason)
    }

    fn expire(&mut self, now: Instant) {
        while let Some(entry) = self.queue.pop_expired(now) {
            self.scan = NextBatch::default();
            self.reject(entry.ticket.request, RejectReason::Timeout);
        }
    }

    /// Returns whether execution is held. The hold ends permanently once enough requests are
    /// queued.
    fn is_held(&mut self) -> bool {
        if self.hold.is_some_and(|wanted| self.queue.len() >= wanted) {
            self.hold = None;
        }
        self.hold.is_some()
    }

    /// Continues the scan to the end of the queue or to the first request that does not fit. On the
    /// way, moves late requests behind the others of their levels.
    fn continue_scan(&mut self, now: Instant) {
        let Self { scan, sizes, queue, .. } = self;
        if scan.delayed_at.is_some_and(|time| time <= now) {
            *scan = NextBatch::default();
        }
        while !scan.stopped {
            let Some((position, entry)) = queue.after(scan.last) else { return };
            if entry.delayed_at().is_some_and(|time| time <= now) {
                queue.delay(position);
                continue;
            }
            scan.delayed_at = [scan.delayed_at, entry.delayed_at()].into_iter().flatten().min();
            let items = scan.items + u64::from(entry.ticket.batch_size.max(1));
            if scan.requests == 0 {
                scan.shape_key = entry.ticket.shape_key;
                scan.oldest = entry.queued;
            } else {
                if items > sizes.largest_preferred && scan.marked.is_none() {
                    scan.marked = Some(scan.requests);
                }
                if items > sizes.max || entry.ticket.shape_key != scan.shape_key {
                    scan.stopped = true;
                    scan.other_shape = items <= sizes.max;
                    return;
                }
            }
            scan.last = Some(position);
            scan.requests += 1;
            scan.items = items;
            scan.oldest = scan.oldest.min(entry.queued);
            if sizes.preferred.contains(&items) {
                scan.marked = Some(scan.requests);
                scan.preferred = true;
            }
        }
    }

    /// Returns how many scanned requests to send now as one batch to an idle or busy instance, and
    /// the reason.
    fn batch_to_send(&self, idle: bool, now: Instant) -> Option<(usize, SendReason)> {
        let scan = &self.scan;
        if scan.requests == 0 {
            return None;
        }
        let complete = scan.stopped || scan.items >= self.sizes.largest_preferred;
        if !idle && !complete {
            return None;
        }
        // While stopping, no further requests can arrive, so waiting is pointless.
        let waited = self.stopping || (!self.delay.is_zero() && now - scan.oldest >= self.delay);
        if let Some(marked) = scan.marked.filter(|_| !waited) {
            let preferred = scan.preferred && !self.settings.preferred_batch_sizes.is_empty();
            return Some((
                marked,
                if preferred { SendReason::Preferred } else { SendReason::Full },
            ));
        }
        let reason = match () {
            () if scan.other_shape => SendReason::Shape,
            () if complete => SendReason::Full,
            () if self.stopping => SendReason::Drain,
            () if waited => SendReason::Delay,
            () if self.delay.is_zero() => SendReason::Idle,
            () => return None,
        };
        Some((scan.requests, reason))
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
        // Scanned requests that were not sent extend to the end of the queue: only a request of a
        // higher priority invalidates the scan.
        if self.scan.last.is_some_and(|last| self.queue.in_earlier_lane(position, last)) {
            self.scan = NextBatch::default();
        }
    }

    fn cancel(&mut self, request: RequestId, _now: Instant) {
        if self.queue.remove(request).is_some() {
            self.scan = NextBatch::default();
            self.reject(request, RejectReason::Cancelled);
        }
    }

    fn batch_done(&mut self, instance: InstanceId, _now: Instant) {
        self.release_resources(instance);
        self.instances.done(instance);
    }

    fn resources_granted(&mut self, instance: InstanceId, now: Instant) {
        if self.instances.unreserve(Some(instance)).is_none() {
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
        self.release_resources(instance);
        self.instances.add(instance);
    }

    fn instance_lost(&mut self, instance: InstanceId, _now: Instant) {
        self.release_resources(instance);
        self.instances.remove(instance);
        for decided in std::mem::take(&mut self.decided) {
            match decided {
                Decided::Execute(chosen, batch, _) if chosen == instance => {
                    self.scan = NextBatch::default();
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
            self.scan = NextBatch::default();
        }
    }

    fn stop(&mut self, _now: Instant) {
        self.stopping = true;
        self.hold = None;
    }

    fn reject_all(&mut self, reason: RejectReason, _now: Instant) {
        self.scan = NextBatch::default();
        while let Some(entry) = self.queue.pop() {
            self.reject(entry.ticket.request, reason);
        }
    }

    fn reject_queued_before(&mut self, queued: Instant, reason: RejectReason, _now: Instant) {
        let mut late = Vec::new();
        let mut last = None;
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
        // An expired queue delay takes effect when the next batch is polled.
        self.expire(now);
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let idle = self.instances.least_loaded().is_some_and(|(_, in_flight)| in_flight == 0);
        let waiting = idle && self.hold.is_none() && self.scan.requests > 0;
        let delay_over = waiting.then(|| self.scan.oldest + self.delay);
        let delayed_at = self.scan.delayed_at.filter(|_| waiting);
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
