//! Random simulations: clients with sequences, cancellations, idle times and lost instances. After
//! each event the invariants are checked against a simple record of the requests that each client
//! has sent.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::table::Assignment;
use super::*;
use crate::scheduler::tests::random::Random;

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Waits,
    Executes,
    Answered,
}

/// One use of a correlation id: from an accepted START to its end.
#[derive(Debug, Default)]
struct Life {
    /// The requests in order of arrival.
    requests: Vec<RequestId>,
    /// How many of the requests have been executed or are executing.
    sent: usize,
    /// Where its requests are executed: the instance and, with the direct strategy, the slot.
    place: Option<(InstanceId, usize)>,
    keys: BTreeSet<u64>,
    /// It was cancelled, lost, timed out or rejected: no request of it may be executed any more.
    over: bool,
}

struct World {
    random: Random,
    direct: bool,
    implicit: bool,
    capacity: u32,
    batcher: SequenceBatcher,
    now: Instant,
    next: u64,
    fates: BTreeMap<RequestId, Fate>,
    lives: Vec<Life>,
    of_request: HashMap<RequestId, usize>,
    /// The current life of each client's id.
    current: BTreeMap<u64, usize>,
    ready: BTreeMap<InstanceId, Vec<RequestId>>,
    /// The keys of which an instance has state.
    state: BTreeMap<u64, InstanceId>,
    starts: BTreeMap<RequestId, bool>,
    /// Requests that waited behind a cancelled one of their sequence.
    given_up: BTreeSet<RequestId>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let direct = random.chance(2);
        let max_batch_size = 1 + random.below(4) as u32;
        let strategy = match direct {
            true => SequenceStrategy::Direct {
                minimum_slot_utilization: [0.0, 0.6][random.below(2) as usize],
            },
            false => {
                SequenceStrategy::Oldest { max_candidate_sequences: 1 + random.below(5) as u32 }
            }
        };
        let mut settings = settings(max_batch_size, strategy);
        settings.max_queue_delay_us = [0, 40][random.below(2) as usize];
        let mut sequences = settings.sequence.clone().unwrap();
        sequences.implicit_start = random.chance(3);
        let implicit = sequences.implicit_start;
        let capacity = match strategy {
            SequenceStrategy::Direct { .. } => max_batch_size,
            SequenceStrategy::Oldest { max_candidate_sequences } => max_candidate_sequences,
        };
        let batcher = SequenceBatcher::new(settings, sequences);
        Self {
            random,
            direct,
            implicit,
            capacity,
            batcher,
            now: Instant(0),
            next: 0,
            fates: BTreeMap::new(),
            lives: Vec::new(),
            of_request: HashMap::new(),
            current: BTreeMap::new(),
            ready: BTreeMap::new(),
            state: BTreeMap::new(),
            starts: BTreeMap::new(),
            given_up: BTreeSet::new(),
        }
    }

    fn step(&mut self) {
        self.now = self.now + Duration::from_micros(self.random.below(30));
        if self.random.chance(60) {
            self.now = self.now + Duration::from_micros(IDLE);
        }
        self.batcher.handle_timeout(self.now);
        self.perform();
        match self.random.below(20) {
            0..10 => self.send(),
            10..17 => self.finish(),
            17 => self.cancel(),
            18 if self.random.chance(4) => self.lose(),
            _ => self.join(),
        }
        self.perform();
        self.check();
    }

    fn send(&mut self) {
        let client = self.random.below(9);
        let start = !self.implicit && !self.current.contains_key(&client) || self.random.chance(12);
        let end = self.random.chance(5);
        self.next += 1;
        let request = RequestId(self.next);
        if start || self.implicit {
            // START of an active id continues the same life with another key.
            let goes_on =
                self.batcher.table.find(&CorrelationId::Uint(client + 1)).is_some_and(|number| {
                    self.batcher
                        .table
                        .get(number)
                        .is_some_and(|sequence| sequence.assignment != Assignment::Lost)
                });
            if !goes_on {
                self.lives.push(Life::default());
                self.current.insert(client, self.lives.len() - 1);
            }
        }
        let life = self.current[&client];
        self.lives[life].requests.push(request);
        self.of_request.insert(request, life);
        self.fates.insert(request, Fate::Waits);
        self.starts.insert(request, start);
        let sequence = Some(InSequence { id: CorrelationId::Uint(client + 1), start, end });
        let timeout_us = if self.random.chance(10) { 1 + self.random.below(200) } else { 0 };
        let shape_key = u64::from(self.random.chance(8));
        let ticket =
            Ticket { request, batch_size: 1, shape_key, timeout_us, sequence, ..Ticket::default() };
        self.batcher.enqueue(ticket, self.now);
        if end {
            self.current.remove(&client);
        }
    }

    fn finish(&mut self) {
        let busy: Vec<InstanceId> = self
            .ready
            .iter()
            .filter(|(_, batch)| !batch.is_empty())
            .map(|(instance, _)| *instance)
            .collect();
        if busy.is_empty() {
            return;
        }
        let instance = busy[self.random.below(busy.len() as u64) as usize];
        for request in std::mem::take(self.ready.get_mut(&instance).unwrap()) {
            self.answer(request, Fate::Executes);
        }
        self.batcher.batch_done(instance, self.now);
    }

    fn cancel(&mut self) {
        if self.next > 0 {
            let request = RequestId(1 + self.random.below(self.next));
            self.batcher.cancel(request, self.now);
        }
    }

    fn lose(&mut self) {
        let instance = InstanceId(self.random.below(3) as u32);
        let Some(batch) = self.ready.remove(&instance) else { return };
        self.batcher.instance_lost(instance, self.now);
        batch.into_iter().for_each(|request| self.answer(request, Fate::Executes));
        self.state.retain(|_, at| *at != instance);
        for life in
            self.lives.iter_mut().filter(|life| life.place.is_some_and(|(at, _)| at == instance))
        {
            life.over = true;
        }
    }

    fn join(&mut self) {
        let instance = InstanceId(self.random.below(3) as u32);
        if let std::collections::btree_map::Entry::Vacant(vacant) = self.ready.entry(instance) {
            vacant.insert(Vec::new());
            self.batcher.instance_ready(instance, self.now);
        }
    }

    fn answer(&mut self, request: RequestId, from: Fate) {
        let fate = self.fates.get_mut(&request).unwrap();
        assert_eq!(*fate, from, "{request:?} is answered once, in the right state");
        *fate = Fate::Answered;
    }

    fn perform(&mut self) {
        while let Some(action) = self.batcher.poll_action(self.now) {
            match action {
                Action::Reject { request, reason } => {
                    self.answer(request, Fate::Waits);
                    let life = self.of_request[&request];
                    if reason == RejectReason::Cancelled && !self.implicit {
                        // Those behind it are not executed, up to the next START.
                        let requests = self.lives[life]
                            .requests
                            .iter()
                            .skip_while(|one| **one != request)
                            .skip(1);
                        self.given_up.extend(requests.take_while(|one| !self.starts[one]));
                    }
                    if matches!(reason, RejectReason::Cancelled | RejectReason::SequenceCancelled) {
                        // Others of the same life are still executed: earlier ones, with implicit
                        // starts all, otherwise those of the next sequence of the id.
                        self.lives[life].requests.retain(|one| *one != request);
                    }
                    let refused = matches!(
                        reason,
                        RejectReason::SequenceNotStarted | RejectReason::SequenceLost
                    );
                    assert!(
                        !refused || reason == RejectReason::SequenceLost || !self.starts[&request]
                    );
                    // Requests before a cancelled one are still executed.
                    self.lives[life].over |= matches!(
                        reason,
                        RejectReason::SequenceTimeout | RejectReason::SequenceLost
                    );
                }
                Action::ExecuteSteps { instance, slots, .. } => self.execute(instance, &slots),
                Action::SequencesEnded { instance, keys } => {
                    for key in keys {
                        assert_eq!(
                            self.state.remove(&key),
                            Some(instance),
                            "the end of an unknown key"
                        );
                    }
                }
                Action::SequenceRestarted { request } => {
                    assert!(self.starts[&request] && self.fates[&request] == Fate::Waits);
                }
                other => panic!("{other:?} without a limiter"),
            }
        }
    }

    fn execute(&mut self, instance: InstanceId, slots: &[Option<SlotStep>]) {
        let before = self.ready.get_mut(&instance).unwrap();
        assert!(before.is_empty(), "one batch at a time");
        assert!(slots.iter().any(Option::is_some), "a batch is not only padding");
        assert!(!self.direct || slots.len() <= self.capacity as usize);
        assert!(self.direct || slots.iter().all(Option::is_some), "no padding with oldest");
        let mut keys = BTreeSet::new();
        for (place, step) in
            slots.iter().enumerate().filter_map(|(place, step)| Some((place, (*step)?)))
        {
            before.push(step.request);
            assert!(
                !self.given_up.contains(&step.request),
                "its sequence has ended at a cancelled request"
            );
            assert!(keys.insert(step.key), "one request of a sequence in a batch");
            let fate = self.fates.get_mut(&step.request).unwrap();
            assert_eq!(*fate, Fate::Waits);
            *fate = Fate::Executes;
            let life = &mut self.lives[self.of_request[&step.request]];
            assert_eq!(life.requests[life.sent], step.request, "in order, and none omitted");
            life.sent += 1;
            assert!(!life.over, "{step:?} of {life:?}");
            let here = (instance, if self.direct { place } else { 0 });
            assert_eq!(*life.place.get_or_insert(here), here, "one slot for a sequence");
            assert_eq!(life.keys.insert(step.key), step.start, "a key starts once");
            assert!(
                self.implicit || step.start == self.starts[&step.request],
                "start is the request's START flag"
            );
            if step.start {
                assert_eq!(
                    self.state.insert(step.key, instance),
                    None,
                    "a key belongs to one sequence"
                );
            }
            assert_eq!(self.state.get(&step.key), Some(&instance), "the instance has its state");
            if step.end {
                self.state.remove(&step.key);
            }
        }
    }

    fn check(&self) {
        let table = &self.batcher.table;
        let seated: Vec<u64> = table
            .all()
            .filter(|(_, s)| matches!(s.assignment, Assignment::Slot(..)))
            .map(|(n, _)| n)
            .collect();
        let waiting =
            table.all().filter(|(_, s)| s.assignment == Assignment::Backlog).map(|(n, _)| n).min();
        assert!(
            waiting.is_none_or(|first| seated.iter().all(|number| *number < first)),
            "first come, first served"
        );
        assert!(
            waiting.is_none() || !table.has_free_slot(),
            "a slot is free although a sequence waits"
        );
        let mut owned = 0;
        for instance in self.ready.keys() {
            assert!(table.owners(*instance).len() <= self.capacity as usize);
            for (slot, number) in table.owners(*instance).iter().enumerate() {
                let Some(number) = number else { continue };
                owned += 1;
                let assignment = table.get(*number).map(|sequence| sequence.assignment);
                assert_eq!(
                    assignment,
                    Some(Assignment::Slot(*instance, slot as u32)),
                    "an owner has its slot"
                );
            }
        }
        assert_eq!(owned, seated.len(), "each sequence with a slot owns one");
        let waits = self.fates.values().filter(|fate| **fate == Fate::Waits).count();
        assert_eq!(self.batcher.queued(), waits, "the number of queued requests is right");
        assert!(self.batcher.poll_timeout().is_none_or(|at| at > self.now), "a busy loop");
        let delayed = self.batcher.settings.max_queue_delay_us > 0;
        for (instance, batch) in self.ready.iter().filter(|(_, batch)| batch.is_empty()) {
            let could = |s: &Sequence| {
                matches!(s.assignment, Assignment::Slot(at, _) | Assignment::Leaving(at) if at == *instance)
                    && s.oldest().is_some()
            };
            assert!(
                delayed || !table.all().any(|(_, s)| could(s)),
                "{instance:?} is idle, {batch:?}"
            );
        }
    }

    /// Runs until all requests are answered.
    fn end(mut self) {
        (0..3).for_each(|_| self.join());
        for instance in (0..3).map(InstanceId) {
            if let std::collections::btree_map::Entry::Vacant(place) = self.ready.entry(instance) {
                place.insert(Vec::new());
                self.batcher.instance_ready(instance, self.now);
            }
        }
        for _ in 0..100_000 {
            self.perform();
            self.check();
            if self.ready.values().any(|batch| !batch.is_empty()) {
                self.finish();
                continue;
            }
            let Some(at) = self.batcher.poll_timeout() else { break };
            self.now = at;
            self.batcher.handle_timeout(at);
        }
        assert!(
            self.fates.values().all(|fate| *fate == Fate::Answered),
            "every request is answered"
        );
        assert_eq!(self.batcher.table.all().count(), 0, "no sequence remains");
        assert_eq!(self.state, BTreeMap::new(), "no state remains in an instance");
        let counts = self.batcher.sequences().unwrap();
        assert_eq!((counts.active, counts.backlogged, counts.slots_used), (0, 0, 0));
    }
}

#[test]
fn random_runs_keep_the_invariants() {
    let mut executed = 0;
    for seed in 0..1500 {
        let mut world = World::new(seed);
        (0..300).for_each(|_| world.step());
        executed += world.lives.iter().map(|life| life.sent).sum::<usize>();
        world.end();
    }
    assert!(executed > 50_000, "the runs are not empty: {executed}");
}
