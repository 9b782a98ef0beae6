//! A reference implementation of the dynamic batcher: a list that is scanned from its start at
//! every call. It is slow but keeps no derived state; the real batcher must make the same
//! decisions.

use std::collections::VecDeque;
use std::time::Duration;

use crate::id::{InstanceId, RequestId};
use crate::scheduler::{Action, RejectReason, Scheduler, Settings, Ticket, TimeoutAction};
use crate::timeline::Instant;

#[derive(Clone, Debug)]
struct Item {
    ticket: Ticket,
    queued: Instant,
    deadline: Option<Instant>,
    level: u64,
    delayed: bool,
}

pub(super) struct Reference {
    settings: Settings,
    queue: Vec<Item>,
    instances: Vec<(InstanceId, u32, u64)>,
    sent: u64,
    actions: VecDeque<Action>,
    stopping: bool,
}

impl Reference {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            queue: Vec::new(),
            instances: Vec::new(),
            sent: 0,
            actions: VecDeque::new(),
            stopping: false,
        }
    }

    fn item(&self, ticket: Ticket, queued: Instant) -> Item {
        let level = self.settings.level(ticket.priority);
        let timeout = self.settings.policy(level).timeout(ticket.timeout_us);
        let deadline = timeout.map(|timeout| queued + timeout.saturating_sub(ticket.waited));
        Item { level, queued, deadline, delayed: false, ticket }
    }

    fn expire(&mut self, now: Instant) {
        loop {
            let due = |item: &Item| {
                item.deadline.filter(|deadline| *deadline <= now && !self.delays(item))
            };
            let first = (0..self.queue.len())
                .filter_map(|index| {
                    Some((due(&self.queue[index])?, self.queue[index].ticket.request, index))
                })
                .min();
            let Some((_, request, index)) = first else { return };
            self.queue.remove(index);
            self.actions.push_back(Action::Reject { request, reason: RejectReason::Timeout });
        }
    }

    fn delays(&self, item: &Item) -> bool {
        self.settings.policy(item.level).timeout_action == TimeoutAction::Delay
    }

    /// Returns the index of the first late request that the scan reaches.
    fn late(&self, now: Instant) -> Option<usize> {
        let max = self.settings.max_batch_size.max(1);
        let mut items = 0;
        for (index, item) in self.queue.iter().enumerate() {
            if self.delays(item) && item.deadline.is_some_and(|deadline| deadline <= now) {
                return Some(index);
            }
            items += item.ticket.batch_size.max(1);
            if index > 0 && (items > max || item.ticket.shape_key != self.queue[0].ticket.shape_key)
            {
                return None;
            }
        }
        None
    }

    /// Moves the late requests that the scan reaches behind the others of their levels.
    fn delay(&mut self, now: Instant) {
        while let Some(index) = self.late(now) {
            let item = self.queue.remove(index);
            self.queue.push(Item { delayed: true, deadline: None, ..item });
            self.queue.sort_by_key(|item| (item.level, item.delayed));
        }
    }

    /// Returns the length of the batch to send now, by the rules in the documentation of the
    /// dynamic batcher.
    fn count(&self, idle: bool, now: Instant) -> Option<usize> {
        let max = self.settings.max_batch_size.max(1);
        let mut preferred: Vec<u32> = self.settings.preferred_batch_sizes.clone();
        preferred.retain(|size| (1..=max).contains(size));
        if preferred.is_empty() {
            preferred.push(max);
        }
        let max_preferred = *preferred.iter().max()?;
        let first = self.queue.first()?;
        let mut taken = 0;
        let mut items = 0;
        let mut best = None;
        let mut stopped = false;
        for item in &self.queue {
            let size = item.ticket.batch_size.max(1);
            if taken > 0 {
                if items + size > max_preferred && best.is_none() {
                    best = Some(taken);
                }
                if items + size > max || item.ticket.shape_key != first.ticket.shape_key {
                    stopped = true;
                    break;
                }
            }
            taken += 1;
            items += size;
            if preferred.contains(&items) {
                best = Some(taken);
            }
        }
        let oldest = self.queue[..taken].iter().map(|item| item.queued).min()?;
        let delay = Duration::from_micros(self.settings.max_queue_delay_us);
        let waited = self.stopping || (delay != Duration::ZERO && now - oldest >= delay);
        let complete = stopped || items >= max_preferred;
        match best {
            _ if !idle && !complete => None,
            Some(best) if !waited => Some(best),
            _ if complete || waited || delay == Duration::ZERO => Some(taken),
            _ => None,
        }
    }

    fn advance(&mut self, now: Instant) {
        self.expire(now);
        loop {
            self.queue.sort_by_key(|item| (item.level, item.delayed));
            let Some(chosen) =
                self.instances.iter_mut().min_by_key(|(_, in_flight, sent)| (*in_flight, *sent))
            else {
                return;
            };
            let instance = chosen.0;
            let in_flight = chosen.1;
            if in_flight >= self.settings.max_in_flight() {
                return;
            }
            self.delay(now);
            let Some(count) = self.count(in_flight == 0, now) else { return };
            self.sent += 1;
            let sent = self.sent;
            self.instances.iter_mut().filter(|known| known.0 == instance).for_each(|known| {
                known.1 += 1;
                known.2 = sent;
            });
            let requests = self.queue.drain(..count).map(|item| item.ticket.request).collect();
            self.actions.push_back(Action::Execute {
                instance,
                requests,
                reason: super::SendReason::Idle,
            });
        }
    }
}

impl Scheduler for Reference {
    fn enqueue(&mut self, ticket: Ticket, now: Instant) {
        let request = ticket.request;
        if self.stopping {
            return self
                .actions
                .push_back(Action::Reject { request, reason: RejectReason::Stopping });
        }
        let item = self.item(ticket, now);
        let limit = self.settings.policy(item.level).max_queue_size as usize;
        let full = |queue: &[Item]| {
            limit > 0 && queue.iter().filter(|other| other.level == item.level).count() >= limit
        };
        if full(&self.queue) {
            self.advance(now);
        }
        if full(&self.queue) {
            return self
                .actions
                .push_back(Action::Reject { request, reason: RejectReason::QueueFull });
        }
        self.queue.push(item);
    }

    fn cancel(&mut self, request: RequestId, _now: Instant) {
        if let Some(index) = self.queue.iter().position(|item| item.ticket.request == request) {
            self.queue.remove(index);
            self.actions.push_back(Action::Reject { request, reason: RejectReason::Cancelled });
        }
    }

    fn batch_done(&mut self, instance: InstanceId, _now: Instant) {
        self.instances
            .iter_mut()
            .filter(|known| known.0 == instance)
            .for_each(|known| known.1 -= 1);
    }

    fn instance_ready(&mut self, instance: InstanceId, _now: Instant) {
        self.instances.push((instance, 0, 0));
    }

    fn instance_lost(&mut self, instance: InstanceId, _now: Instant) {
        self.instances.retain(|known| known.0 != instance);
    }

    fn requeue(&mut self, ticket: Ticket, queued: Instant, _now: Instant) {
        let item = self.item(ticket, queued);
        let index = self
            .queue
            .iter()
            .position(|other| {
                (other.level, other.delayed) == (item.level, false)
                    && (other.queued, other.ticket.request) > (item.queued, item.ticket.request)
            })
            .unwrap_or(self.queue.len());
        self.queue.insert(index, item);
    }

    fn stop(&mut self, _now: Instant) {
        self.stopping = true;
    }

    fn reject_all(&mut self, reason: RejectReason, _now: Instant) {
        self.queue.sort_by_key(|item| (item.level, item.delayed));
        self.actions.extend(
            self.queue
                .drain(..)
                .map(|item| Action::Reject { request: item.ticket.request, reason }),
        );
    }

    fn reject_queued_before(&mut self, queued: Instant, reason: RejectReason, _now: Instant) {
        let late = self.queue.extract_if(.., |item| item.queued < queued);
        self.actions
            .extend(late.map(|item| Action::Reject { request: item.ticket.request, reason }));
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.expire(now);
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let idle = self.instances.iter().any(|known| known.1 == 0);
        let delay = Duration::from_micros(self.settings.max_queue_delay_us);
        let oldest = self
            .queue
            .iter()
            .map(|item| item.queued)
            .min()
            .filter(|_| idle)
            .map(|oldest| oldest + delay);
        self.queue
            .iter()
            .filter(|item| idle || !self.delays(item))
            .filter_map(|item| item.deadline)
            .chain(oldest)
            .min()
    }

    fn poll_action(&mut self, now: Instant) -> Option<Action> {
        self.advance(now);
        self.actions.pop_front()
    }

    fn waiting(&self) -> super::Waiting {
        super::Waiting::default()
    }

    fn queued(&self) -> usize {
        self.queue.len()
    }
}
