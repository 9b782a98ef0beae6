//! The sequence batcher, modelled on Triton's `sequence_batch_scheduler.cc`: the requests of a
//! sequence run one after the other on one instance, which keeps the sequence's state.
//!
//! # Sequences and slots
//! A START request creates a sequence. It takes the free slot with the smallest number, or waits
//! with all its requests in the backlog, first come first served. An END request releases the id as
//! soon as it is queued, so that the id can start again at once. The slot becomes free when END is
//! sent (`direct`: the sequence no longer needs its slot of the batch) or done (`oldest`). Requests
//! of one sequence never overtake each other and never run at the same time. START for an active id
//! continues in the same slot, as another sequence for the backend: each has a unique *key*,
//! independent of its correlation id.
//!
//! A sequence is ended early in these cases: a waiting request is cancelled (with all of the
//! sequence that wait behind it; those before it are executed; with implicit starts only that
//! request is removed), it was idle for too long, its timeout passes in the backlog,
//! or its instance is lost. [`Action::SequencesEnded`] reports sequences that end without an END
//! step to the instance. A sequence is idle if none of its requests waits or executes (as in
//! Triton's schema; Triton's code also ends sequences whose last request takes longer than the idle
//! time). A sequence whose instance is lost is never continued: all its waiting requests are
//! rejected, and so are later ones of the same id until START or until the idle time has passed. In
//! the backlog, a sequence without requests is idle too; with implicit starts it loses its place at
//! once.
//!
//! # Strategies
//! `direct`: slots are positions in the batch. A batch extends to the last slot with a waiting
//! request; slots without a request, or with another shape than the slot that has been ready for
//! the longest time, are padding. `oldest`: each instance has a dynamic batcher, which holds at
//! most one request of each sequence. Its responses are sent in the order in which requests were
//! issued, because an instance executes one batch at a time, so `preserve_ordering` needs no
//! further work.
//!
//! # Overlapping requests
//! With [`SequenceSettings::overlapping`] each request is a sequence for the backend, like an
//! iterative one, and the client's id determines when and where it begins: on the instance of the
//! id, in the order of arrival, as soon as the previous request was executed for the first time,
//! even if that one is rescheduled. A batch has at most one beginning request of an id, beside
//! any number of rescheduled ones, and lists its requests in the order of arrival. An id is idle
//! only when none of its requests waits or executes. Requests are independent: cancelling one does
//! not end others. START of an active id has no effect on the scheduler.
//!
//! No batch is sent to a busy instance: whether a sequence's next step is possible is known only
//! when the previous one is done. No request is sent twice: a second attempt would not find the
//! state of the first.

mod batches;
mod overlap;
mod settings;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use self::batches::Instance;
pub use self::settings::{
    InSequence, SequenceCounts, SequenceSettings, SequenceStrategy, SlotStep,
};
use self::table::{Assignment, Number, Sequence, Step, Table};
use super::{Action, RejectReason, Scheduler, Settings, Ticket, Waiting};
use crate::id::{CorrelationId, InstanceId, RequestId};
use crate::timeline::Instant;

/// The sequence batcher; see the module's documentation.
pub(super) struct SequenceBatcher {
    settings: Settings,
    sequences: SequenceSettings,
    table: Table,
    instances: BTreeMap<InstanceId, Instance>,
    /// Actions that precede the next batch.
    decided: VecDeque<Action>,
    /// The number of requests that must be queued before the first execution.
    hold: Option<usize>,
    stopping: bool,
    idle_evicted: u64,
    start_errors: u64,
    restarts: u64,
}

impl SequenceBatcher {
    pub(super) fn new(settings: Settings, sequences: SequenceSettings) -> Self {
        let capacity = match sequences.strategy {
            SequenceStrategy::Direct { .. } => settings.max_batch_size,
            SequenceStrategy::Oldest { max_candidate_sequences } => max_candidate_sequences,
        };
        Self {
            table: Table::new(capacity.max(1)),
            instances: BTreeMap::new(),
            decided: VecDeque::new(),
            hold: settings.delay_scheduler,
            stopping: false,
            idle_evicted: 0,
            start_errors: 0,
            restarts: 0,
            settings,
            sequences,
        }
    }

    /// Returns the sequence for a request, after opening it if necessary.
    fn admit(&mut self, wanted: &InSequence) -> Result<Number, RejectReason> {
        let starts = wanted.start || self.sequences.implicit_start;
        let known = || self.sequences.implicit_start && self.table.find(&wanted.id).is_some();
        let alone = self.is_alone(wanted);
        if self.stopping && (wanted.start || alone || starts && !known()) {
            return Err(RejectReason::Stopping);
        }
        if alone {
            return self.open(CorrelationId::default());
        }
        if let Some(number) = self.table.find(&wanted.id) {
            let known = self.table.get(number);
            match known.map(|sequence| sequence.assignment) {
                Some(Assignment::Lost) if !starts => return Err(RejectReason::SequenceLost),
                Some(Assignment::Lost) | None => self.table.remove(number),
                Some(_) => {
                    let waiting = known.map_or(0, Sequence::waiting);
                    let too_many =
                        self.sequences.max_queue != 0 && waiting >= self.sequences.max_queue;
                    return if too_many { Err(RejectReason::QueueFull) } else { Ok(number) };
                }
            }
        } else if !starts {
            self.start_errors += 1;
            return Err(RejectReason::SequenceNotStarted);
        }
        self.open(wanted.id.clone())
    }

    /// Opens a sequence. The sequence of an iterative request is closed at once, so that no id
    /// refers to it.
    fn open(&mut self, id: CorrelationId) -> Result<Number, RejectReason> {
        if self
            .sequences
            .max_backlog
            .is_some_and(|limit| !self.table.has_free_slot() && self.table.backlogged() >= limit)
        {
            return Err(RejectReason::QueueFull);
        }
        Ok(self.table.open(id))
    }

    /// Adds an admitted request to its sequence.
    fn add(&mut self, number: Number, ticket: &Ticket, wanted: &InSequence, now: Instant) {
        let Some(sequence) = self.table.get_mut(number) else { return };
        let begun = !sequence.is_idle() || sequence.running.is_some();
        let backlogged = sequence.assignment == Assignment::Backlog;
        let was_idle = sequence.is_idle();
        // The backend decides whether an iterative request is the last step.
        let end = wanted.end && !self.sequences.iterative;
        let timeout = Some(ticket.timeout_us).filter(|timeout| backlogged && *timeout != 0);
        let deadline = timeout.map(|timeout| now + Duration::from_micros(timeout));
        let step = Step {
            request: ticket.request,
            key: 0,
            shape_key: ticket.shape_key,
            queued: now,
            end,
            deadline,
        };
        let overlaps = self.overlaps();
        let again = wanted.start && begun && !overlaps;
        self.table.push(number, step, again || overlaps);
        if again {
            self.restarts += 1;
            self.decided.push_back(Action::SequenceRestarted { request: ticket.request });
        }
        if was_idle || !backlogged {
            self.table.set_alarm(number, None);
        }
        if let Some(deadline) = deadline {
            self.table.set_earlier_alarm(number, deadline);
        }
        if wanted.end || self.is_alone(wanted) {
            self.table.close(number);
        }
        self.issue(number);
    }

    /// Returns the reason for rejecting requests of a lost instance.
    fn lost(&self) -> RejectReason {
        if self.sequences.iterative {
            RejectReason::RequestLost
        } else {
            RejectReason::SequenceLost
        }
    }

    fn reject(&mut self, request: RequestId, reason: RejectReason) {
        self.decided.push_back(Action::Reject { request, reason });
    }

    /// Closes a sequence and rejects all its waiting requests, or a cancelled request and all
    /// behind it. If START has begun another sequence behind that request, this one continues in
    /// the slot.
    fn give_back(&mut self, number: Number, from: Option<RequestId>, reason: RejectReason) {
        if self.table.get(number).is_some_and(|sequence| {
            from.is_none_or(|from| sequence.key_of(from) == Some(sequence.key))
        }) {
            self.table.close(number);
        }
        for request in self.table.take_waiting(number, from) {
            if let Some(instance) = self.instance_of(number) {
                instance.withdraw(request);
            }
            self.reject(
                request,
                if from == Some(request) { RejectReason::Cancelled } else { reason },
            );
        }
    }

    /// Removes a cancelled request from a sequence that continues.
    fn remove_one(&mut self, number: Number, request: RequestId) {
        self.table.take_one(number, request);
        if let Some(instance) = self.instance_of(number) {
            instance.withdraw(request);
        }
        self.reject(request, RejectReason::Cancelled);
    }

    /// Continues a sequence after a request is done, or when no request of it waits any more:
    /// issues its next request, ends it, or starts its idle time.
    fn advance(&mut self, number: Number, now: Instant) {
        let Some(sequence) = self.table.get(number) else { return };
        if sequence.current.is_some() || sequence.assignment == Assignment::Lost {
            return;
        }
        let waits = !sequence.queue.is_empty();
        let origin = sequence.origin;
        let continues = sequence.continued > 0;
        // An implicit start needs no place in the backlog: the next request of the id starts the
        // sequence.
        let ends = sequence.closed
            || self.sequences.implicit_start && sequence.assignment == Assignment::Backlog;
        self.end_request(number);
        if waits {
            return self.issue(number);
        }
        if continues {
            return;
        }
        if ends {
            self.finish(number);
            return self.advance_origin(origin, now);
        }
        let idle = Duration::from_micros(self.sequences.max_idle_us);
        self.table.set_alarm(number, Some(now + idle));
    }

    /// Removes a sequence without waiting or executing requests.
    fn finish(&mut self, number: Number) {
        let Some(sequence) = self.table.get(number) else { return };
        if let (Some(instance), Some(key)) = (sequence.instance(), sequence.running) {
            self.decided.push_back(Action::SequencesEnded { instance, keys: vec![key] });
        }
        self.table.remove(number);
        self.assign_free_slots();
    }

    /// Assigns free slots to sequences in the backlog.
    fn assign_free_slots(&mut self) {
        while let Some(number) = self.table.assign_slot() {
            self.issue(number);
        }
    }

    /// Ends the sequences whose timeout or idle time has passed.
    fn expire(&mut self, now: Instant) {
        while let Some(number) = self.table.pop_alarm(now) {
            match self.table.get(number).map(|sequence| (sequence.assignment, sequence.is_idle())) {
                Some((Assignment::Backlog, false)) => {
                    self.give_back(number, None, RejectReason::SequenceTimeout)
                }
                Some((Assignment::Backlog | Assignment::Slot(..), _)) => self.idle_evicted += 1,
                Some((Assignment::Leaving(_) | Assignment::Continued(_) | Assignment::Lost, _))
                | None => {}
            }
            self.table.close(number);
            self.finish(number);
        }
    }

    /// Removes an instance and rejects the requests of its sequences.
    fn lose(&mut self, instance: InstanceId, now: Instant) {
        if let Some(gone) = self.instances.remove(&instance) {
            self.decided.extend(gone.limiter_action(instance));
        }
        for action in std::mem::take(&mut self.decided) {
            match action {
                Action::ExecuteSteps { instance: at, slots, .. } if at == instance => {
                    slots.iter().flatten().for_each(|step| self.reject(step.request, self.lost()));
                }
                Action::SequencesEnded { instance: at, .. } if at == instance => {}
                other => self.decided.push_back(other),
            }
        }
        let idle = Duration::from_micros(self.sequences.max_idle_us);
        for number in self.table.remove_instance(instance) {
            for request in self.table.take_waiting(number, None) {
                self.reject(request, self.lost());
            }
            let Some(sequence) = self.table.get_mut(number) else { continue };
            sequence.current = None;
            if sequence.closed {
                self.table.remove(number);
            } else {
                self.table.set_alarm(number, Some(now + idle));
            }
        }
    }

    /// Ends the instance's batch, which was executed or could not be sent, and returns the
    /// sequences in it.
    fn end_batch(&mut self, instance: InstanceId, now: Instant, was_executed: bool) -> Vec<Number> {
        let Some(known) = self.instances.get_mut(&instance) else { return Vec::new() };
        if !known.is_executing() {
            return Vec::new();
        }
        self.decided.extend(known.limiter_action(instance));
        let executed = known.done(instance, now);
        for number in &executed {
            if let Some(sequence) = self.table.get_mut(*number) {
                if was_executed && sequence.current.is_some_and(|current| current.end) {
                    sequence.running = None;
                }
                sequence.current = None;
                sequence.served = now;
            }
        }
        executed
    }

    fn instance_of(&mut self, number: Number) -> Option<&mut Instance> {
        let instance = self.table.get(number)?.instance()?;
        self.instances.get_mut(&instance)
    }
}

impl Scheduler for SequenceBatcher {
    fn enqueue(&mut self, ticket: Ticket, now: Instant) {
        if self.table.waiting_in(ticket.request).is_some() {
            return;
        }
        self.expire(now);
        let wanted = ticket.sequence.clone().unwrap_or_default();
        match self.admit(&wanted) {
            Ok(number) => self.add(number, &ticket, &wanted, now),
            Err(reason) => self.reject(ticket.request, reason),
        }
    }

    fn cancel(&mut self, request: RequestId, now: Instant) {
        if let Some(number) = self.table.waiting_in(request) {
            match self.sequences.implicit_start || self.overlaps() {
                true => self.remove_one(number, request),
                false => self.give_back(number, Some(request), RejectReason::SequenceCancelled),
            }
            self.advance(number, now);
        }
    }

    fn batch_done(&mut self, instance: InstanceId, now: Instant) {
        for number in self.end_batch(instance, now, true) {
            self.advance(number, now);
        }
    }

    fn batch_unsent(&mut self, instance: InstanceId, now: Instant) {
        if self.overlaps() {
            // Requests do not depend on each other.
            return self.batch_done(instance, now);
        }
        let idle = Duration::from_micros(self.sequences.max_idle_us);
        for number in self.end_batch(instance, now, false) {
            // A step is missing: continuing without it would use a wrong state.
            for request in self.table.take_waiting(number, None) {
                self.reject(request, self.lost());
            }
            let Some(sequence) = self.table.get(number) else { continue };
            let id = sequence.id.clone();
            let closed = sequence.closed;
            self.table.close(number);
            self.finish(number);
            if !closed {
                self.table.mark_lost(id, now + idle);
            }
        }
    }

    fn resources_granted(&mut self, instance: InstanceId, _now: Instant) {
        if let Some(known) = self.instances.get_mut(&instance) {
            known.granted();
        }
    }

    fn instance_ready(&mut self, instance: InstanceId, now: Instant) {
        self.lose(instance, now);
        self.instances
            .insert(instance, Instance::new(instance, &self.settings, &self.sequences, now));
        self.table.join(instance);
        self.assign_free_slots();
    }

    fn instance_lost(&mut self, instance: InstanceId, now: Instant) {
        self.lose(instance, now);
    }

    fn instance_closing(&mut self, instance: InstanceId, now: Instant) {
        self.table.close_instance(instance);
        let executes = self.instances.get(&instance).is_some_and(Instance::is_executing);
        if !executes && !self.has_sequences_on(instance) {
            self.lose(instance, now);
        }
    }

    fn has_sequences_on(&self, instance: InstanceId) -> bool {
        self.table.owners(instance).iter().any(Option::is_some)
    }

    /// Rejects the request: no request is sent twice.
    fn requeue(&mut self, ticket: Ticket, _queued: Instant, _now: Instant) {
        if self.table.waiting_in(ticket.request).is_none() {
            self.reject(ticket.request, self.lost());
        }
    }

    fn stop(&mut self, now: Instant) {
        self.stopping = true;
        self.hold = None;
        self.instances.values_mut().for_each(|instance| instance.stop(now));
    }

    fn reject_all(&mut self, reason: RejectReason, now: Instant) {
        let mut all: Vec<Number> = self.table.all().map(|(number, _)| number).collect();
        // Start with the youngest, so that no slot is assigned to a sequence that is about to be
        // removed.
        all.sort_unstable_by(|one, other| other.cmp(one));
        for number in all {
            self.give_back(number, None, reason);
            match self.table.get(number).map(|sequence| sequence.assignment) {
                Some(Assignment::Lost) => self.table.remove(number),
                _ => self.advance(number, now),
            }
        }
    }

    fn reject_queued_before(&mut self, queued: Instant, reason: RejectReason, now: Instant) {
        let mut all: Vec<Number> = self
            .table
            .all()
            .filter(|(_, sequence)| sequence.oldest().is_some_and(|oldest| oldest < queued))
            .map(|(number, _)| number)
            .collect();
        all.sort_unstable_by(|one, other| other.cmp(one));
        for number in all {
            self.give_back(number, None, reason);
            self.advance(number, now);
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        // An expired queue delay takes effect when the next batch is polled.
        self.expire(now);
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let batches = self.instances.keys().filter_map(|instance| self.next_look(*instance));
        batches.chain(self.table.next_alarm()).min()
    }

    fn poll_action(&mut self, now: Instant) -> Option<Action> {
        self.expire(now);
        self.decided.pop_front().or_else(|| self.next_batch(now))
    }

    fn reschedule(&mut self, request: RequestId, hold: bool) -> bool {
        self.sequences.iterative && self.push_back_current(request, hold)
    }

    fn resume(&mut self, request: RequestId) {
        let Some(number) = self.table.waiting_in(request) else { return };
        if let Some(sequence) = self.table.get_mut(number) {
            sequence.held = false;
            self.issue(number);
        }
    }

    fn waiting(&self) -> Waiting {
        let waiting = self.table.waiting();
        let oldest = self.table.all().filter_map(|(_, sequence)| sequence.oldest()).min();
        Waiting { levels: if waiting == 0 { Vec::new() } else { vec![(0, waiting)] }, oldest }
    }

    fn has_sequence(&self, id: &CorrelationId) -> bool {
        let known = self.table.find(id).and_then(|number| self.table.get(number));
        known.is_some_and(|sequence| !matches!(sequence.assignment, Assignment::Lost))
    }

    fn end_sequence(&mut self, id: &CorrelationId, now: Instant) {
        if let Some(number) = self.table.find(id) {
            self.table.close(number);
            self.advance(number, now);
        }
    }

    fn close_sequences(&mut self, now: Instant) {
        let numbers: Vec<Number> = self
            .table
            .all()
            .filter_map(|(number, sequence)| {
                (sequence.assignment != Assignment::Lost).then_some(number)
            })
            .collect();
        for number in numbers {
            self.table.close(number);
            self.advance(number, now);
        }
    }

    fn sequences(&self) -> Option<SequenceCounts> {
        let (slots_used, slots) = self.table.slots();
        Some(SequenceCounts {
            active: self
                .table
                .all()
                .filter(|(_, sequence)| {
                    matches!(sequence.assignment, Assignment::Slot(..) | Assignment::Leaving(_))
                })
                .count(),
            backlogged: self.table.backlogged(),
            slots_used,
            slots,
            idle_evicted: self.idle_evicted,
            start_errors: self.start_errors,
            restarts: self.restarts,
        })
    }

    fn queued(&self) -> usize {
        self.table.waiting()
    }
}
