//! Virtual time for tests: arrivals, cancellations, lost instances and a driver, without a clock or
//! a thread.
//!
//! The simulated driver does the same as the real one: it performs actions, tracks requests in
//! flight, resends a lost batch once, and passes answers through [`Reorder`] if configured. Each
//! instance executes its batches one after the other.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::{Action, RejectReason, Reorder, Scheduler, Ticket};
use crate::id::{InstanceId, RequestId};
use crate::timeline::Instant;

/// An external event.
#[derive(Clone, Debug)]
pub enum Event {
    /// A request arrives.
    Arrive(Ticket),
    /// A client cancels.
    Cancel(RequestId),
    /// An instance becomes ready.
    Join(InstanceId),
    /// An instance is lost with its batches.
    Lose(InstanceId),
    /// The model is unloaded.
    Stop,
    /// An instance finishes its batch, unless it was lost since (its generation has changed).
    Done(InstanceId, u32),
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Executed.
    Done,
    /// Rejected by the scheduler.
    Rejected(RejectReason),
    /// Lost with its instance, twice.
    Lost,
}

/// A logged event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// A batch was sent to an instance.
    Sent {
        /// When.
        at: Instant,
        /// The instance.
        instance: InstanceId,
        /// The number of batches that it held already.
        in_flight: usize,
        /// The batch.
        requests: Vec<RequestId>,
    },
    /// A request was answered.
    Answered {
        /// When the answer was sent.
        at: Instant,
        /// The request.
        request: RequestId,
        /// The outcome.
        outcome: Outcome,
    },
}

#[derive(Debug, Default)]
struct Worker {
    ready: bool,
    generation: u32,
    in_flight: VecDeque<Vec<RequestId>>,
}

/// The driver's record of a request.
#[derive(Clone, Debug)]
pub struct Known {
    /// The ticket.
    pub ticket: Ticket,
    /// When it arrived.
    pub queued: Instant,
    /// Whether it was in a lost batch.
    pub retried: bool,
    /// Whether it has an answer.
    pub finished: bool,
    /// Whether its answer was sent.
    pub answered: bool,
}

/// One model with its scheduler, instances and clients.
pub struct Sim {
    /// The current time.
    pub now: Instant,
    /// The events so far.
    pub log: Vec<Record>,
    /// Every request that arrived.
    pub requests: BTreeMap<RequestId, Known>,
    /// The durations of the executions, used in turn.
    pub service: Vec<Duration>,
    /// Whether the scheduler receives all events of one time before it is polled, instead of being
    /// polled after each.
    pub drain: bool,
    /// If set, answers are sent in order of arrival.
    pub reorder: Option<Reorder<Outcome>>,
    scheduler: Box<dyn Scheduler>,
    events: BTreeMap<(Instant, u64), Event>,
    scheduled: u64,
    executions: usize,
    steps: usize,
    workers: BTreeMap<InstanceId, Worker>,
}

impl Sim {
    /// Creates a simulation at time 0 in which every execution takes `service`.
    pub fn new(scheduler: Box<dyn Scheduler>, service: Duration) -> Self {
        Self {
            now: Instant(0),
            log: Vec::new(),
            requests: BTreeMap::new(),
            service: vec![service],
            drain: true,
            reorder: None,
            scheduler,
            events: BTreeMap::new(),
            scheduled: 0,
            executions: 0,
            steps: 0,
            workers: BTreeMap::new(),
        }
    }

    /// Schedules an event. Events of the same time happen in the order of these calls.
    pub fn at(&mut self, time: Duration, event: Event) {
        self.plan(Instant(0) + time, event);
    }

    /// Advances to the time of the next event; returns `false` at the end.
    pub fn step(&mut self) -> bool {
        let event = self.events.keys().next().map(|&(time, _)| time);
        let Some(next) = [event, self.scheduler.poll_timeout()].into_iter().flatten().min() else {
            return false;
        };
        self.steps += 1;
        assert!(
            self.steps < 100_000,
            "no end: at {next:?}, next timeout at {:?}",
            self.scheduler.poll_timeout()
        );
        assert!(next >= self.now, "time does not decrease: from {:?} to {next:?}", self.now);
        self.now = next;
        if self.scheduler.poll_timeout().is_some_and(|due| due <= next) {
            self.scheduler.handle_timeout(next);
        }
        while let Some(first) = self.events.first_entry().filter(|first| first.key().0 == next) {
            let event = first.remove();
            self.happen(event);
            if !self.drain {
                self.settle();
            }
        }
        self.settle();
        true
    }

    /// Advances until there are no more events.
    pub fn run(&mut self) {
        while self.step() {}
    }

    /// Advances to a time.
    pub fn run_until(&mut self, time: Duration) {
        let end = Instant(0) + time;
        while [self.events.keys().next().map(|key| key.0), self.scheduler.poll_timeout()]
            .into_iter()
            .flatten()
            .min()
            .is_some_and(|next| next <= end)
        {
            self.step();
        }
        self.now = end;
    }

    /// Returns the number of requests that arrived, were not rejected, and have not started to
    /// execute: the pending gauge.
    pub fn pending(&self) -> usize {
        let executing: usize =
            self.workers.values().filter_map(|worker| worker.in_flight.front()).map(Vec::len).sum();
        self.requests.values().filter(|known| !known.finished).count() - executing
    }

    /// Returns the number of batches in flight on each ready instance.
    pub fn in_flight(&self) -> impl Iterator<Item = usize> {
        self.workers.values().filter(|worker| worker.ready).map(|worker| worker.in_flight.len())
    }

    /// Returns the requests that the scheduler holds.
    pub fn waiting(&self) -> impl Iterator<Item = &Known> {
        let sent = |request| {
            self.workers
                .values()
                .flat_map(|worker| worker.in_flight.iter().flatten())
                .any(|id| *id == request)
        };
        self.requests.values().filter(move |known| !known.finished && !sent(known.ticket.request))
    }

    /// Returns the scheduler under test.
    pub fn scheduler(&self) -> &dyn Scheduler {
        &*self.scheduler
    }

    /// Returns the batches that were sent.
    pub fn batches(&self) -> impl Iterator<Item = Vec<u64>> {
        self.log.iter().filter_map(|record| match record {
            Record::Sent { requests, .. } => {
                Some(requests.iter().map(|request| request.0).collect())
            }
            Record::Answered { .. } => None,
        })
    }

    /// Returns the answers in the order in which they were sent.
    pub fn answers(&self) -> impl Iterator<Item = (Instant, RequestId, Outcome)> {
        self.log.iter().filter_map(|record| match *record {
            Record::Answered { at, request, outcome } => Some((at, request, outcome)),
            Record::Sent { .. } => None,
        })
    }

    fn plan(&mut self, time: Instant, event: Event) {
        self.scheduled += 1;
        self.events.insert((time, self.scheduled), event);
    }

    fn happen(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Arrive(ticket) => {
                let known = Known {
                    ticket: ticket.clone(),
                    queued: now,
                    retried: false,
                    finished: false,
                    answered: false,
                };
                assert!(
                    self.requests.insert(ticket.request, known).is_none(),
                    "each request arrives once"
                );
                if let Some(reorder) = &mut self.reorder {
                    reorder.expect(ticket.request);
                }
                self.scheduler.enqueue(ticket, now);
            }
            Event::Cancel(request) => self.scheduler.cancel(request, now),
            Event::Join(instance) => {
                self.workers.entry(instance).or_default().ready = true;
                self.scheduler.instance_ready(instance, now);
            }
            Event::Lose(instance) => self.lose(instance),
            Event::Stop => self.scheduler.stop(now),
            Event::Done(instance, generation) => self.done(instance, generation),
        }
    }

    fn lose(&mut self, instance: InstanceId) {
        let worker = self.workers.entry(instance).or_default();
        worker.ready = false;
        worker.generation += 1;
        let lost: Vec<RequestId> = worker.in_flight.drain(..).flatten().collect();
        self.scheduler.instance_lost(instance, self.now);
        for request in lost {
            let Some(known) = self.requests.get_mut(&request) else { continue };
            if known.retried {
                self.answer(request, Outcome::Lost);
            } else {
                known.retried = true;
                self.scheduler.requeue(known.ticket.clone(), known.queued, self.now);
            }
        }
    }

    fn done(&mut self, instance: InstanceId, generation: u32) {
        let Some(worker) =
            self.workers.get_mut(&instance).filter(|worker| worker.generation == generation)
        else {
            return;
        };
        let finished = worker.in_flight.pop_front().unwrap_or_default();
        let more = !worker.in_flight.is_empty();
        self.scheduler.batch_done(instance, self.now);
        if more {
            self.execute(instance, generation);
        }
        finished.into_iter().for_each(|request| self.answer(request, Outcome::Done));
    }

    fn execute(&mut self, instance: InstanceId, generation: u32) {
        let service = self.service[self.executions % self.service.len()];
        self.executions += 1;
        self.plan(self.now + service, Event::Done(instance, generation));
    }

    /// Performs actions until `poll_action` returns `None`. Panics if it never does.
    fn settle(&mut self) {
        for _ in 0..=2 * self.requests.len() {
            match self.scheduler.poll_action(self.now) {
                None => return,
                Some(Action::Reject { request, reason }) => {
                    self.answer(request, Outcome::Rejected(reason))
                }
                Some(Action::Execute { instance, requests, .. }) => self.send(instance, requests),
                Some(other) => unreachable!("{other:?} without a rate limiter"),
            }
        }
        assert!(self.scheduler.poll_action(self.now).is_none(), "more actions than requests");
    }

    fn send(&mut self, instance: InstanceId, requests: Vec<RequestId>) {
        let Some(worker) = self.workers.get_mut(&instance).filter(|worker| worker.ready) else {
            unreachable!("{instance:?} is not ready but received {requests:?}")
        };
        assert!(!requests.is_empty(), "a batch is not empty");
        let in_flight = worker.in_flight.len();
        let generation = worker.generation;
        worker.in_flight.push_back(requests.clone());
        self.log.push(Record::Sent { at: self.now, instance, in_flight, requests });
        if in_flight == 0 {
            self.execute(instance, generation);
        }
    }

    fn answer(&mut self, request: RequestId, outcome: Outcome) {
        let Some(known) = self.requests.get_mut(&request) else {
            unreachable!("{request:?} never arrived")
        };
        assert!(!known.finished, "{request:?} is answered once");
        known.finished = true;
        let out_of_order = matches!(outcome, Outcome::Rejected(_));
        let leaving = match &mut self.reorder {
            None => Some(outcome),
            Some(reorder) if out_of_order => {
                reorder.remove(request);
                Some(outcome)
            }
            Some(reorder) => reorder.finish(request, outcome),
        };
        if let Some(outcome) = leaving {
            self.leave(request, outcome);
        }
        while let Some((request, outcome)) = self.reorder.as_mut().and_then(Reorder::pop) {
            self.leave(request, outcome);
        }
    }

    fn leave(&mut self, request: RequestId, outcome: Outcome) {
        let Some(known) = self.requests.get_mut(&request) else {
            unreachable!("{request:?} never arrived")
        };
        assert!(!known.answered, "the answer to {request:?} is sent once");
        known.answered = true;
        self.log.push(Record::Answered { at: self.now, request, outcome });
    }
}
