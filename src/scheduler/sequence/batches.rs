//! Forms batches from the steps of sequences, with either strategy, and requests resources from the
//! rate limiter if it is on.

use std::ops::Bound;
use std::time::Duration;

use super::table::{Assignment, Current, Number, Step};
use super::{
    Action, SequenceBatcher, SequenceSettings, SequenceStrategy, Settings, SlotStep, Ticket,
};
use crate::id::{InstanceId, RequestId};
use crate::scheduler::Scheduler;
use crate::scheduler::dynamic::DynamicBatcher;
use crate::timeline::{Instant, SendReason};

/// An idle instance's state at the rate limiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resources {
    None,
    Requested,
    Granted,
}

/// A ready instance.
pub(super) struct Instance {
    /// For the strategy `oldest`: the issued requests.
    batcher: Option<DynamicBatcher>,
    /// The sequences of the batch in execution.
    executing: Vec<Number>,
    resources: Resources,
    rate_limited: bool,
    /// For `oldest`: the number of requests that must have been issued before the first batch.
    hold: Option<usize>,
}

impl Instance {
    pub(super) fn new(
        id: InstanceId,
        settings: &Settings,
        sequences: &SequenceSettings,
        now: Instant,
    ) -> Self {
        let batcher = matches!(sequences.strategy, SequenceStrategy::Oldest { .. }).then(|| {
            let mut batcher = DynamicBatcher::new(Settings {
                max_batch_size: settings.max_batch_size,
                preferred_batch_sizes: settings.preferred_batch_sizes.clone(),
                max_queue_delay_us: settings.max_queue_delay_us,
                prefetch: false,
                ..Settings::default()
            });
            batcher.instance_ready(id, now);
            batcher
        });
        Self {
            batcher,
            executing: Vec::new(),
            resources: Resources::None,
            rate_limited: settings.rate_limited,
            hold: settings.delay_scheduler,
        }
    }

    pub(super) fn is_executing(&self) -> bool {
        !self.executing.is_empty()
    }

    /// Returns the action that releases the instance's resources or withdraws its request for them.
    pub(super) fn limiter_action(&self, id: InstanceId) -> Option<Action> {
        match self.resources {
            _ if !self.rate_limited => None,
            _ if !self.executing.is_empty() => Some(Action::Release { instance: id }),
            Resources::None => None,
            Resources::Requested | Resources::Granted => Some(Action::Withdraw { instance: id }),
        }
    }

    /// Marks the resources as granted, if the instance waits for them.
    pub(super) fn granted(&mut self) {
        if self.resources == Resources::Requested {
            self.resources = Resources::Granted;
        }
    }

    /// Ends the batch and returns its sequences.
    pub(super) fn done(&mut self, id: InstanceId, now: Instant) -> Vec<Number> {
        if let Some(batcher) = &mut self.batcher {
            batcher.batch_done(id, now);
        }
        std::mem::take(&mut self.executing)
    }

    pub(super) fn stop(&mut self, now: Instant) {
        self.hold = None;
        if let Some(batcher) = &mut self.batcher {
            batcher.stop(now);
        }
    }

    /// Withdraws an issued request.
    pub(super) fn withdraw(&mut self, request: RequestId) {
        if let Some(batcher) = &mut self.batcher {
            batcher.withdraw(request);
        }
    }

    fn push(&mut self, step: &Step) {
        if let Some(batcher) = &mut self.batcher {
            let ticket = Ticket {
                request: step.request,
                batch_size: 1,
                shape_key: step.shape_key,
                ..Ticket::default()
            };
            batcher.push(ticket, step.queued);
        }
    }
}

/// The sequences whose next steps are sent, by slot, and the reason for sending.
type Batch = (Vec<Option<Number>>, SendReason);

impl SequenceBatcher {
    /// Returns the next batch that can be sent, or the next action for the rate limiter.
    pub(super) fn next_batch(&mut self, now: Instant) -> Option<Action> {
        let mut from = Bound::Unbounded;
        while let Some((&id, instance)) = self.instances.range((from, Bound::Unbounded)).next() {
            from = Bound::Excluded(id);
            if !instance.executing.is_empty() || self.is_held(id) {
                continue;
            }
            let action = if self.settings.rate_limited {
                self.next_resource_action(id, now)
            } else {
                self.batch(id, now)
            };
            if action.is_some() {
                return action;
            }
        }
        None
    }

    /// With the rate limiter: returns a batch for an instance that has its resources; otherwise
    /// requests or withdraws them.
    fn next_resource_action(&mut self, id: InstanceId, now: Instant) -> Option<Action> {
        let resources = self.instances.get(&id)?.resources;
        let ready = self.could_send(id, now);
        let (after, action) = match (resources, ready) {
            (Resources::None, true) => (Resources::Requested, Action::Acquire { instance: id }),
            (Resources::Requested | Resources::Granted, false) => {
                (Resources::None, Action::Withdraw { instance: id })
            }
            (Resources::None, false) | (Resources::Requested, true) => return None,
            (Resources::Granted, true) => {
                self.instances.get_mut(&id)?.resources = Resources::None;
                return self.batch(id, now);
            }
        };
        self.instances.get_mut(&id)?.resources = after;
        Some(action)
    }

    fn could_send(&mut self, id: InstanceId, now: Instant) -> bool {
        match self.instances.get_mut(&id).map(|instance| &mut instance.batcher) {
            Some(Some(batcher)) => batcher.could_send(now),
            Some(None) => self.direct(id, now).is_some(),
            None => false,
        }
    }

    /// Returns a batch for an idle instance.
    fn batch(&mut self, id: InstanceId, now: Instant) -> Option<Action> {
        let overlaps = self.overlaps();
        let (batch, reason) = match &mut self.instances.get_mut(&id)?.batcher {
            Some(batcher) => match batcher.poll_action(now)? {
                Action::Execute { mut requests, reason, .. } => {
                    if overlaps {
                        requests.sort_unstable();
                    }
                    (
                        requests.iter().map(|request| self.table.waiting_in(*request)).collect(),
                        reason,
                    )
                }
                other => unreachable!("{other:?} from a batcher without limits and timeouts"),
            },
            None => {
                let (batch, reason) = self.direct(id, now)?;
                for number in batch.iter().flatten() {
                    self.table.issue(*number);
                }
                (batch, reason)
            }
        };
        Some(self.send(id, (batch, reason)))
    }

    /// Sends issued steps to the instance as a batch.
    fn send(&mut self, id: InstanceId, (batch, reason): Batch) -> Action {
        let mut ended = Vec::new();
        let mut slots = Vec::with_capacity(batch.len());
        for place in &batch {
            let current = place.and_then(|number| self.table.sent(number));
            slots.push(
                place
                    .zip(current)
                    .map(|(number, current)| self.begin(number, &current, &mut ended)),
            );
        }
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.executing = batch.into_iter().flatten().collect();
        }
        self.assign_free_slots();
        let execute = Action::ExecuteSteps { instance: id, slots, reason };
        if ended.is_empty() {
            return execute;
        }
        self.decided.push_back(execute);
        Action::SequencesEnded { instance: id, keys: ended }
    }

    /// Returns the step as it is sent to the backend. Adds a key that it replaces to `ended`.
    fn begin(&mut self, number: Number, current: &Current, ended: &mut Vec<u64>) -> SlotStep {
        let &Current { request, key, end, .. } = current;
        // The state stays until a step with END is done: if the batch cannot be sent, the instance
        // must be told of the end.
        let before = self.table.get_mut(number).and_then(|sequence| sequence.running.replace(key));
        ended.extend(before.filter(|before| *before != key));
        if end && self.is_direct() {
            self.table.release_slot(number);
        }
        SlotStep { request, key, start: before != Some(key), end }
    }

    /// With the strategy `oldest`: passes the sequence's next request to its instance's batcher,
    /// unless one is there.
    pub(super) fn issue(&mut self, number: Number) {
        let Some(sequence) = self.table.get(number) else { return };
        let (Assignment::Slot(instance, _) | Assignment::Continued(instance)) = sequence.assignment
        else {
            return;
        };
        let Some(instance) = self.instances.get_mut(&instance) else { return };
        if sequence.current.is_some() || sequence.held || instance.batcher.is_none() {
            return;
        }
        if let Some(step) = self.table.issue(number) {
            instance.push(&step);
        }
    }

    fn is_direct(&self) -> bool {
        matches!(self.sequences.strategy, SequenceStrategy::Direct { .. })
    }

    /// With the strategy `direct`: returns the batch that an idle instance would execute now.
    fn direct(&self, id: InstanceId, now: Instant) -> Option<Batch> {
        let owners = self.table.owners(id);
        let mut fronts: Vec<_> = owners
            .iter()
            .map(|owner| {
                let number = (*owner)?;
                self.table.get(number)?.next().map(|step| (number, step))
            })
            .collect();
        let last = fronts.iter().rposition(Option::is_some)?;
        fronts.truncate(last + 1);
        // The first slot is not preferred: a sequence that always has a request would stop
        // sequences of other shapes.
        let shape = fronts
            .iter()
            .flatten()
            .min_by_key(|&&(number, step)| self.table.get(number).map(|of| of.ready_since(step)))
            .map(|(_, step)| step.shape_key)?;
        let ready = fronts.iter().flatten().count();
        let oldest = fronts.iter().flatten().map(|(_, step)| step.queued).min()?;
        let reason = self.direct_reason(ready, now - oldest)?;
        let fits = |place: &(Number, &Step)| place.1.shape_key == shape;
        let other_shape = !fronts.iter().flatten().all(fits);
        let batch =
            fronts.into_iter().map(|place| place.filter(fits).map(|(number, _)| number)).collect();
        Some((batch, if other_shape { SendReason::Shape } else { reason }))
    }

    /// Returns why a batch with `ready` slots, of which the oldest has waited for `age`, is sent
    /// now; `None` if it waits.
    fn direct_reason(&self, ready: usize, age: Duration) -> Option<SendReason> {
        let all = self.settings.max_batch_size.max(1) as usize;
        let wait = self.direct_wait();
        Some(match wait {
            _ if ready >= all => SendReason::Full,
            _ if self.stopping => SendReason::Drain,
            None => SendReason::Idle,
            // Both are small integers.
            #[allow(clippy::cast_precision_loss)]
            Some((_, utilization)) if ready as f32 / all as f32 >= utilization => {
                SendReason::Preferred
            }
            Some((delay, _)) if age >= delay => SendReason::Delay,
            Some(_) => return None,
        })
    }

    /// Returns how long a batch may wait, and for which utilization; `None` if it may not wait.
    fn direct_wait(&self) -> Option<(Duration, f32)> {
        match self.sequences.strategy {
            SequenceStrategy::Direct { minimum_slot_utilization: utilization }
                if utilization > 0.0 && self.settings.max_queue_delay_us > 0 =>
            {
                Some((Duration::from_micros(self.settings.max_queue_delay_us), utilization))
            }
            _ => None,
        }
    }

    /// Returns when a batch for an idle instance may become due without any further event.
    pub(super) fn next_look(&self, id: InstanceId) -> Option<Instant> {
        let instance = self.instances.get(&id)?;
        if !instance.executing.is_empty() || instance.resources != Resources::None {
            return None;
        }
        if let Some(batcher) = &instance.batcher {
            return batcher.poll_timeout().filter(|_| instance.hold.is_none());
        }
        let (delay, _) = self.direct_wait().filter(|_| self.hold.is_none())?;
        self.table
            .owners(id)
            .iter()
            .filter_map(|owner| self.table.get((*owner)?)?.next().map(|step| step.queued))
            .min()
            .map(|oldest| oldest + delay)
    }

    /// Returns whether execution is held. The hold ends permanently once enough requests wait.
    fn is_held(&mut self, id: InstanceId) -> bool {
        let Some(instance) = self.instances.get_mut(&id) else { return true };
        let (hold, count) = match &instance.batcher {
            Some(batcher) => (&mut instance.hold, batcher.queued()),
            None => (&mut self.hold, self.table.waiting()),
        };
        let Some(wanted) = *hold else { return false };
        let backlog = self.table.waiting_in_backlog();
        let count = if instance.batcher.is_some() { count } else { count - backlog };
        if count >= wanted && backlog >= self.sequences.backlog_hold {
            *hold = None;
            return false;
        }
        true
    }

    /// Puts a request in flight back, before all others of its sequence. With `hold` it waits until
    /// it is resumed.
    pub(super) fn push_back_current(&mut self, request: RequestId, hold: bool) -> bool {
        let executing = self.instances.values().flat_map(|instance| &instance.executing);
        let found = executing.copied().find_map(|number| {
            let current =
                self.table.get(number)?.current.filter(|current| current.request == request)?;
            Some((number, current))
        });
        let Some((number, Current { key, shape_key, queued, end, .. })) = found else {
            return false;
        };
        let split = if self.overlaps() { self.split(number) } else { None };
        let holder = split.unwrap_or(number);
        self.table
            .push_front(holder, Step { request, key, shape_key, queued, end, deadline: None });
        if let Some(sequence) = self.table.get_mut(holder) {
            sequence.held = hold;
        }
        if split.is_some() {
            self.issue(holder);
        }
        true
    }
}
