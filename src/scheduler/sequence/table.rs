//! The table of sequences: their waiting requests and their slots. Slots are assigned only in
//! [`Table::assign_slot`] and released only in [`Table::release_slot`].

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::id::{CorrelationId, InstanceId, RequestId, RequestMap};
use crate::timeline::Instant;

/// A sequence's number, in the order in which sequences began.
pub(super) type Number = u64;

/// A waiting request of a sequence.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) request: RequestId,
    /// The sequence's id for backends; each START begins another one.
    pub(super) key: u64,
    pub(super) shape_key: u64,
    pub(super) queued: Instant,
    pub(super) end: bool,
    /// When its timeout passes, if it arrived while its sequence waited for a slot.
    pub(super) deadline: Option<Instant>,
}

/// The assignment of a sequence to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Assignment {
    /// It waits for a slot.
    Backlog,
    /// It occupies this slot.
    Slot(InstanceId, u32),
    /// Its last request executes on this instance; its slot is already free.
    Leaving(InstanceId),
    /// It contains one rescheduled request on this instance, and has no slot: see [`Table::split`].
    Continued(InstanceId),
    /// Its instance was lost: it is kept only to reject its next requests with this reason.
    Lost,
}

/// The request of a sequence that was taken from its queue and is not done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Current {
    pub(super) request: RequestId,
    pub(super) key: u64,
    pub(super) shape_key: u64,
    pub(super) queued: Instant,
    pub(super) end: bool,
    /// Whether it is in a batch; otherwise it waits in its instance's batcher.
    pub(super) sent: bool,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: CorrelationId,
    pub(super) assignment: Assignment,
    pub(super) queue: VecDeque<Step>,
    pub(super) current: Option<Current>,
    /// When its latest batch ended.
    pub(super) served: Instant,
    /// The key of requests that arrive now.
    pub(super) key: u64,
    /// The key whose state the instance keeps.
    pub(super) running: Option<u64>,
    /// Whether it accepts no more requests.
    pub(super) closed: bool,
    /// Whether its next request must wait until it is resumed.
    pub(super) held: bool,
    /// The original sequence of its request, if it is [`Assignment::Continued`].
    pub(super) origin: Option<Number>,
    /// The number of its requests that are [`Assignment::Continued`].
    pub(super) continued: usize,
    /// When the sequence is ended: at the end of its idle time or, while its requests wait in the
    /// backlog, at their earliest timeout.
    alarm: Option<Instant>,
}

impl Sequence {
    fn new(id: CorrelationId, assignment: Assignment, key: u64) -> Self {
        let closed = false;
        let held = false;
        Self {
            id,
            assignment,
            queue: VecDeque::new(),
            current: None,
            served: Instant(0),
            key,
            running: None,
            closed,
            held,
            origin: None,
            continued: 0,
            alarm: None,
        }
    }

    /// Returns whether none of its requests waits or executes.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.current.is_none() && self.continued == 0
    }

    /// Returns the instance that executes it.
    pub(super) fn instance(&self) -> Option<InstanceId> {
        match self.assignment {
            Assignment::Slot(instance, _)
            | Assignment::Leaving(instance)
            | Assignment::Continued(instance) => Some(instance),
            Assignment::Backlog | Assignment::Lost => None,
        }
    }

    /// Returns the number of its requests that do not execute.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len() + usize::from(self.current.is_some_and(|current| !current.sent))
    }

    /// Returns the key of a waiting request.
    pub(super) fn key_of(&self, request: RequestId) -> Option<u64> {
        let issued =
            self.current.filter(|current| current.request == request).map(|current| current.key);
        issued
            .or_else(|| self.queue.iter().find(|step| step.request == request).map(|step| step.key))
    }

    /// Returns its next request, if it may be executed.
    pub(super) fn next(&self) -> Option<&Step> {
        self.queue.front().filter(|_| !self.held)
    }

    /// Returns since when its next request could be executed.
    pub(super) fn ready_since(&self, next: &Step) -> Instant {
        next.queued.max(self.served)
    }

    /// Returns the arrival time of its oldest waiting request.
    pub(super) fn oldest(&self) -> Option<Instant> {
        let issued = self.current.filter(|current| !current.sent).map(|current| current.queued);
        issued.or_else(|| self.queue.front().map(|step| step.queued))
    }
}

/// The slots of an instance, which are created when they are first used.
#[derive(Debug, Default)]
struct Slots {
    owners: Vec<Option<Number>>,
    /// The free slots of `owners`.
    free: BTreeSet<u32>,
    /// Whether slots are no longer assigned; sequences that have one keep it.
    closing: bool,
}

impl Slots {
    /// Returns the smallest free slot of `most`.
    fn first_free(&self, most: u32) -> Option<u32> {
        if self.closing {
            return None;
        }
        let fresh = u32::try_from(self.owners.len()).ok().filter(|fresh| *fresh < most);
        self.free.first().copied().or(fresh)
    }
}

/// The table of sequences; see the module's documentation.
#[derive(Debug)]
pub(super) struct Table {
    /// The number of slots of each instance.
    capacity: u32,
    sequences: HashMap<Number, Sequence>,
    /// Sequences that accept requests.
    by_id: HashMap<CorrelationId, Number>,
    /// Waiting requests, in any queue.
    waiting: RequestMap<Number>,
    /// Sequences that wait for a slot, in order of arrival.
    backlog: BTreeSet<Number>,
    alarms: BTreeSet<(Instant, Number)>,
    instances: BTreeMap<InstanceId, Slots>,
    /// The latest number of a sequence or key.
    next: u64,
}

impl Table {
    /// Creates a table with `capacity` slots for each instance.
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity,
            sequences: HashMap::new(),
            by_id: HashMap::new(),
            waiting: RequestMap::default(),
            backlog: BTreeSet::new(),
            alarms: BTreeSet::new(),
            instances: BTreeMap::new(),
            next: 0,
        }
    }

    pub(super) fn get(&self, number: Number) -> Option<&Sequence> {
        self.sequences.get(&number)
    }

    pub(super) fn get_mut(&mut self, number: Number) -> Option<&mut Sequence> {
        self.sequences.get_mut(&number)
    }

    /// Returns all sequences in arbitrary order.
    pub(super) fn all(&self) -> impl Iterator<Item = (Number, &Sequence)> {
        self.sequences.iter().map(|(number, sequence)| (*number, sequence))
    }

    /// Returns the sequence that accepts requests with this id.
    pub(super) fn find(&self, id: &CorrelationId) -> Option<Number> {
        self.by_id.get(id).copied()
    }

    /// Returns the sequence in which the request waits.
    pub(super) fn waiting_in(&self, request: RequestId) -> Option<Number> {
        self.waiting.get(&request).copied()
    }

    /// Returns the number of waiting requests.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of sequences in the backlog.
    pub(super) fn backlogged(&self) -> usize {
        self.backlog.len()
    }

    /// Returns the number of requests of sequences in the backlog.
    pub(super) fn waiting_in_backlog(&self) -> usize {
        self.backlog
            .iter()
            .filter_map(|number| self.get(*number))
            .map(|sequence| sequence.queue.len())
            .sum()
    }

    /// Returns the number of occupied slots, and the total.
    pub(super) fn slots(&self) -> (usize, u64) {
        let used = self.instances.values().map(|slots| slots.owners.len() - slots.free.len()).sum();
        let open = self.instances.values().filter(|slots| !slots.closing).count();
        (used, open as u64 * u64::from(self.capacity))
    }

    /// Returns the owners of an instance's slots, as far as they were ever used.
    pub(super) fn owners(&self, instance: InstanceId) -> &[Option<Number>] {
        self.instances.get(&instance).map_or(&[], |slots| &slots.owners)
    }

    /// Returns an unused number for a sequence or key.
    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns whether a slot is free.
    pub(super) fn has_free_slot(&self) -> bool {
        self.free_slot().is_some()
    }

    /// Returns the free slot with the smallest number, so that instances fill evenly.
    fn free_slot(&self) -> Option<(InstanceId, u32)> {
        let free = self
            .instances
            .iter()
            .filter_map(|(id, slots)| Some((slots.first_free(self.capacity)?, *id)));
        free.min().map(|(slot, instance)| (instance, slot))
    }

    /// Adds a sequence. It takes a free slot if there is one, otherwise it is last in the backlog.
    pub(super) fn open(&mut self, id: CorrelationId) -> Number {
        let number = self.insert(id, Assignment::Backlog);
        self.backlog.insert(number);
        self.assign_slot();
        number
    }

    /// Records until `at` that the sequence with this id was lost.
    pub(super) fn mark_lost(&mut self, id: CorrelationId, at: Instant) {
        let number = self.insert(id, Assignment::Lost);
        self.set_alarm(number, Some(at));
    }

    fn insert(&mut self, id: CorrelationId, assignment: Assignment) -> Number {
        let number = self.fresh();
        self.by_id.insert(id.clone(), number);
        self.sequences.insert(number, Sequence::new(id, assignment, number));
        number
    }

    /// Moves the request that a sequence executes and that is rescheduled to a new sequence without
    /// a slot on the same instance, so that the sequence's next request can follow. Returns the
    /// number of the new sequence.
    pub(super) fn split(&mut self, number: Number) -> Option<Number> {
        let fresh = self.fresh();
        let origin = self.sequences.get_mut(&number)?;
        let Assignment::Slot(instance, _) = origin.assignment else { return None };
        let key = origin.running.take()?;
        origin.continued += 1;
        let sequence =
            Sequence::new(CorrelationId::default(), Assignment::Continued(instance), key);
        let closed = true;
        self.sequences.insert(
            fresh,
            Sequence { closed, running: Some(key), origin: Some(number), ..sequence },
        );
        Some(fresh)
    }

    /// Assigns the smallest free slot to the first sequence of the backlog, and removes it from
    /// there.
    pub(super) fn assign_slot(&mut self) -> Option<Number> {
        let (instance, slot) = self.free_slot()?;
        let number = self.backlog.pop_first()?;
        let slots = self.instances.get_mut(&instance)?;
        let at = slot as usize;
        slots.free.remove(&slot);
        if at >= slots.owners.len() {
            slots.owners.resize(at + 1, None);
        }
        slots.owners[at] = Some(number);
        // Timeouts end with the backlog. The idle time continues.
        if self.get(number).is_some_and(|sequence| !sequence.is_idle()) {
            self.set_alarm(number, None);
        }
        if let Some(sequence) = self.get_mut(number) {
            sequence.assignment = Assignment::Slot(instance, slot);
        }
        Some(number)
    }

    /// Releases a sequence's slot, if it has one.
    pub(super) fn release_slot(&mut self, number: Number) {
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        let Assignment::Slot(instance, slot) = sequence.assignment else { return };
        sequence.assignment = Assignment::Leaving(instance);
        if let Some(slots) = self.instances.get_mut(&instance)
            && let Some(owner) = slots.owners.get_mut(slot as usize)
        {
            *owner = None;
            slots.free.insert(slot);
        }
    }

    /// Appends a request. With `again` it starts a new key.
    pub(super) fn push(&mut self, number: Number, step: Step, again: bool) {
        let key = if again { self.fresh() } else { 0 };
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        if again {
            sequence.key = key;
        }
        self.waiting.insert(step.request, number);
        sequence.queue.push_back(Step { key: sequence.key, ..step });
    }

    /// Puts a request back to the front of a sequence's queue.
    pub(super) fn push_front(&mut self, number: Number, step: Step) {
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        self.waiting.insert(step.request, number);
        sequence.queue.push_front(step);
    }

    /// Takes the sequence's next request for execution. It counts as waiting until it is
    /// [`Table::sent`].
    pub(super) fn issue(&mut self, number: Number) -> Option<Step> {
        let sequence = self.sequences.get_mut(&number)?;
        let step = sequence.queue.pop_front()?;
        let Step { request, key, shape_key, queued, end, .. } = step;
        sequence.current = Some(Current { request, key, shape_key, queued, end, sent: false });
        Some(step)
    }

    /// Marks the issued request as sent: it no longer waits.
    pub(super) fn sent(&mut self, number: Number) -> Option<Current> {
        let current = self.sequences.get_mut(&number)?.current.as_mut()?;
        current.sent = true;
        let current = *current;
        self.waiting.remove(&current.request);
        Some(current)
    }

    /// Removes waiting requests of a sequence and returns them in order: all, or those with the key
    /// of `from`, starting at it.
    pub(super) fn take_waiting(
        &mut self,
        number: Number,
        from: Option<RequestId>,
    ) -> Vec<RequestId> {
        let Some(sequence) = self.sequences.get_mut(&number) else { return Vec::new() };
        let key = from.and_then(|from| sequence.key_of(from));
        let first =
            from.and_then(|from| sequence.queue.iter().position(|step| step.request == from));
        let issued = match first {
            Some(_) => None,
            None => {
                sequence.current.take_if(|current| !current.sent).map(|current| current.request)
            }
        };
        let first = first.unwrap_or(0);
        let count = sequence
            .queue
            .iter()
            .skip(first)
            .take_while(|step| key.is_none_or(|key| step.key == key))
            .count();
        let queued = sequence.queue.drain(first..first + count).map(|step| step.request);
        let requests: Vec<RequestId> = issued.into_iter().chain(queued).collect();
        for request in &requests {
            self.waiting.remove(request);
        }
        self.update_timeout(number);
        requests
    }

    /// Removes one waiting request of a sequence.
    pub(super) fn take_one(&mut self, number: Number, request: RequestId) {
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        let issued =
            sequence.current.take_if(|current| !current.sent && current.request == request);
        if issued.is_none() {
            sequence.queue.retain(|step| step.request != request);
        }
        self.waiting.remove(&request);
        self.update_timeout(number);
    }

    /// After requests were removed: the timeout of a sequence in the backlog is the earliest of
    /// those that still wait.
    fn update_timeout(&mut self, number: Number) {
        let Some(sequence) = self.get(number) else { return };
        if sequence.assignment == Assignment::Backlog {
            let earliest = sequence.queue.iter().filter_map(|step| step.deadline).min();
            self.set_alarm(number, earliest);
        }
    }

    /// Closes a sequence: it accepts no more requests, and its id may start another.
    pub(super) fn close(&mut self, number: Number) {
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        sequence.closed = true;
        if self.by_id.get(&sequence.id) == Some(&number) {
            self.by_id.remove(&sequence.id);
        }
    }

    /// Removes a sequence without waiting requests, and releases its slot.
    pub(super) fn remove(&mut self, number: Number) {
        self.close(number);
        self.release_slot(number);
        self.set_alarm(number, None);
        self.backlog.remove(&number);
        self.sequences.remove(&number);
    }

    /// Sets when the sequence is ended.
    pub(super) fn set_alarm(&mut self, number: Number, at: Option<Instant>) {
        let Some(sequence) = self.sequences.get_mut(&number) else { return };
        if let Some(old) = std::mem::replace(&mut sequence.alarm, at) {
            self.alarms.remove(&(old, number));
        }
        if let Some(at) = at {
            self.alarms.insert((at, number));
        }
    }

    /// Like [`Table::set_alarm`], unless an earlier time is set.
    pub(super) fn set_earlier_alarm(&mut self, number: Number, at: Instant) {
        if self.get(number).is_some_and(|sequence| sequence.alarm.is_none_or(|alarm| at < alarm)) {
            self.set_alarm(number, Some(at));
        }
    }

    /// Returns when the next sequence is ended.
    pub(super) fn next_alarm(&self) -> Option<Instant> {
        self.alarms.first().map(|(at, _)| *at)
    }

    /// Returns a sequence whose alarm time has passed, and clears its alarm.
    pub(super) fn pop_alarm(&mut self, now: Instant) -> Option<Number> {
        let &(_, number) = self.alarms.first().filter(|(at, _)| *at <= now)?;
        self.set_alarm(number, None);
        Some(number)
    }

    /// Adds an instance with free slots only.
    pub(super) fn join(&mut self, instance: InstanceId) {
        self.instances.entry(instance).or_default();
    }

    /// Stops assigning slots of the instance.
    pub(super) fn close_instance(&mut self, instance: InstanceId) {
        if let Some(slots) = self.instances.get_mut(&instance) {
            slots.closing = true;
        }
    }

    /// Removes an instance and its slots. Returns its sequences, the oldest first, which no longer
    /// have slots.
    pub(super) fn remove_instance(&mut self, instance: InstanceId) -> Vec<Number> {
        self.instances.remove(&instance);
        let mut lost = Vec::new();
        for (number, sequence) in &mut self.sequences {
            let assignment = sequence.assignment;
            if matches!(assignment, Assignment::Slot(at, _) | Assignment::Leaving(at) | Assignment::Continued(at) if at == instance)
            {
                sequence.assignment = Assignment::Lost;
                sequence.running = None;
                sequence.continued = 0;
                lost.push(*number);
            }
        }
        lost.sort_unstable();
        lost
    }
}
