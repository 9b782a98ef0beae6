//! The events of a simulation in virtual time, and the decisions of chance.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pharos::metrics::cache::{Cache, Settings};
use pharos::metrics::catalog::Catalog;
use pharos::scheduler::rate_limiter::Limit;
use pharos::supervisor::Action;
use pharos::timeline::Instant;

use super::calls::{Call, Sequence};
use super::ensembles::{self, EnsembleCall, SimulatedEnsemble};
use super::models::{self, Counted, Instance, Model, Shared, UNITS};
use super::steps::Steps;
use super::worker::Worker;
use crate::cache::{Backend, ResponseCache, Settings as CacheSettings};
use crate::scheduler::{Limits, Timer};
use pharos_os::clock::virtual_time;

/// What was seen, to show what a simulation covers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Coverage {
    /// The sums of all models, at the end.
    pub(super) counted: Counted,
    pub(super) hits: u64,
    pub(super) deaths: u64,
    pub(super) executed_again: u64,
    pub(super) failed_loads: u64,
    /// Each was sent twice, and once for an unknown batch.
    pub(super) doubled_replies: u64,
    pub(super) hung: u64,
    pub(super) steps: u64,
    /// Responses of the decoupled model, and how often it waited for a client.
    pub(super) responses: u64,
    pub(super) waits: u64,
    /// The sums of all ensembles, at the end, and their responses.
    pub(super) ensembles: Counted,
    pub(super) ensemble_responses: u64,
}

/// What happens at a time.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A client of a model sends a request.
    Arrive(usize),
    /// A client goes away.
    Cancel(usize),
    /// A client reads further responses.
    Read(usize),
    /// A client of an ensemble sends a request.
    ArriveAtEnsemble(usize),
    /// A client of an ensemble goes away.
    CancelEnsemble(usize),
    /// A client of an ensemble reads further responses.
    ReadEnsemble(usize),
    /// The process of an instance has loaded its model.
    Loaded(Place),
    /// It could not.
    LoadFailed(Place),
    /// The first batch of a process is done, or has its next response.
    Done(Place),
    /// The process dies.
    Die(Place),
    /// The frontend notices its end.
    Ended(Place),
    /// The supervision of all instances looks at them.
    Tick,
}

/// A process: model, instance and the number of the process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) model: usize,
    pub(super) instance: usize,
    pub(super) generation: u64,
}

/// How probable faults are: one in so many, 0 for never.
#[derive(Clone, Copy, Debug)]
pub(super) struct Faults {
    pub(super) die: u64,
    pub(super) fail: u64,
    pub(super) late: u64,
    pub(super) double: u64,
    pub(super) hang: u64,
    pub(super) load: u64,
    pub(super) cancel: u64,
}

impl Coverage {
    /// Adds what another simulation has covered.
    pub(super) fn add(&mut self, other: &Self) {
        self.counted.add(&other.counted);
        self.hits += other.hits;
        self.deaths += other.deaths;
        self.executed_again += other.executed_again;
        self.failed_loads += other.failed_loads;
        self.doubled_replies += other.doubled_replies;
        self.hung += other.hung;
        self.steps += other.steps;
        self.responses += other.responses;
        self.waits += other.waits;
        self.ensembles.add(&other.ensembles);
        self.ensemble_responses += other.ensemble_responses;
    }
}

impl Faults {
    const NONE: Self = Self { die: 0, fail: 0, late: 0, double: 0, hang: 0, load: 0, cancel: 0 };
}

/// A random number generator (SplitMix64).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    /// Returns true with a probability of one in `of`; never for 0.
    pub(super) fn chance(&mut self, of: u64) -> bool {
        of > 0 && self.below(of) == 0
    }
}

/// A server with its processes and clients, at one time.
pub(super) struct World {
    pub(super) now: Instant,
    pub(super) random: Random,
    events: BTreeMap<(Instant, u64), Event>,
    next_event: u64,
    pub(super) shared: Shared,
    pub(super) models: Vec<Model>,
    pub(super) calls: Vec<Call>,
    pub(super) steps: Arc<Steps>,
    pub(super) ensembles: Vec<SimulatedEnsemble>,
    pub(super) ensemble_calls: Vec<EnsembleCall>,
    pub(super) sequences: Vec<Sequence>,
    pub(super) next_value: u64,
    pub(super) faults: Faults,
    pub(super) coverage: Coverage,
    /// A hash of all that has happened.
    pub(super) trace: u64,
    /// The number of times at which something has happened.
    pub(super) moments: u64,
    /// The requests whose clients wait.
    pub(super) open: Vec<usize>,
    pub(super) open_at_ensembles: Vec<usize>,
    /// The counters when they were last compared.
    pub(super) counters: BTreeMap<String, f64>,
    /// Whether clients send requests.
    loaded: bool,
}

impl World {
    /// Creates a world at its start: no process runs.
    pub(super) fn new(seed: u64, empty: &Path) -> Self {
        let now = Instant(1_000_000_000);
        virtual_time::set(now);
        let mut random = Random::new(seed);
        let metrics = Arc::new(Cache::new(Catalog::shipped(), Settings::new("h")));
        let limit = Limit { name: "R".to_owned(), count: UNITS, device: None };
        let limits = random.chance(2).then(|| Limits::new(vec![limit]));
        let single_flight = random.chance(2);
        let cache = CacheSettings { backend: Backend::Local(2_000), single_flight };
        let responses = Arc::new(ResponseCache::new(&cache, metrics.clone()));
        let shared = Shared { metrics, timer: Timer::without_thread(), limits, responses };
        let models = models::all(&shared, empty, now);
        let faults = match random.below(4) {
            0 => Faults::NONE,
            1 => Faults { die: 200, fail: 50, late: 50, double: 50, hang: 0, load: 10, cancel: 20 },
            2 => Faults { die: 20, fail: 10, late: 10, double: 10, hang: 300, load: 4, cancel: 5 },
            _ => Faults { die: 60, fail: 0, late: 20, double: 20, hang: 500, load: 0, cancel: 10 },
        };
        let steps = Steps::new(&shared.metrics, &models);
        let ensembles = ensembles::all(&steps);
        let mut world = Self {
            now,
            random,
            events: BTreeMap::new(),
            next_event: 0,
            shared,
            models,
            calls: Vec::new(),
            steps,
            ensembles,
            ensemble_calls: Vec::new(),
            sequences: Vec::new(),
            next_value: 1_000,
            faults,
            coverage: Coverage::default(),
            trace: 0,
            moments: 0,
            open: Vec::new(),
            open_at_ensembles: Vec::new(),
            counters: BTreeMap::new(),
            loaded: true,
        };
        (0..world.models.len()).for_each(|model| world.after(0, Event::Arrive(model)));
        (0..world.ensembles.len())
            .for_each(|ensemble| world.after(0, Event::ArriveAtEnsemble(ensemble)));
        world.after(500_000, Event::Tick);
        world
    }

    /// Plans an event in `us` microseconds.
    pub(super) fn after(&mut self, us: u64, event: Event) {
        self.next_event += 1;
        self.events.insert((self.now + Duration::from_micros(us), self.next_event), event);
    }

    /// Adds to the hash of what has happened.
    pub(super) fn note(&mut self, what: u64) {
        self.trace = (self.trace.rotate_left(5) ^ what).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    /// Moves to the next time at which something happens, and lets it happen. Returns `false` if
    /// that is after `end`.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn step(&mut self, end: Instant) -> Result<bool, String> {
        let planned = self.events.keys().next().map(|(at, _)| *at);
        let instances = self.models.iter().flat_map(|model| &model.instances);
        let limit = instances.filter_map(|instance| instance.machine.poll_timeout()).min();
        let next = [planned, self.shared.timer.next(), limit].into_iter().flatten().min();
        let Some(at) = next.filter(|at| *at <= end) else { return Ok(false) };
        self.now = self.now.max(at);
        virtual_time::set(self.now);
        while self.shared.timer.fire() {}
        for (model, instance) in self.places() {
            let machine = &mut self.models[model].instances[instance].machine;
            if machine.poll_timeout().is_some_and(|at| at <= self.now) {
                machine.handle_timeout(self.now);
            }
        }
        if let Some(first) = self.events.first_entry().filter(|first| first.key().0 <= self.now) {
            let event = first.remove();
            self.note(self.now.0);
            self.on_event(event)?;
        }
        self.settle()?;
        self.check()?;
        Ok(true)
    }

    /// Ends the load and the faults.
    pub(super) fn end_load(&mut self) {
        self.loaded = false;
        self.faults = Faults::NONE;
    }

    /// Returns whether all requests are answered and all instances are ready.
    pub(super) fn is_quiet(&self) -> bool {
        let settled = |one: &Instance| one.process.is_some() == one.ready;
        let idle =
            |one: &Instance| one.process.as_ref().is_none_or(|process| process.batches.is_empty());
        let mut instances = self.models.iter().flat_map(|model| &model.instances);
        self.open.iter().all(|number| !self.calls[*number].waits())
            && self.open_at_ensembles.iter().all(|number| !self.ensemble_calls[*number].waits())
            && instances.all(|one| settled(one) && idle(one))
    }

    /// Returns all positions of instances.
    pub(super) fn places(&self) -> Vec<(usize, usize)> {
        let models = self.models.iter().enumerate();
        models
            .flat_map(|(model, one)| {
                (0..one.instances.len()).map(move |instance| (model, instance))
            })
            .collect()
    }

    /// Performs all that follows at this time: actions of supervisors, frames that have arrived,
    /// answers.
    fn settle(&mut self) -> Result<(), String> {
        loop {
            let mut changed = false;
            for (model, instance) in self.places() {
                while let Some(action) =
                    self.models[model].instances[instance].machine.poll_action()
                {
                    self.perform(model, instance, action);
                    changed = true;
                }
                changed |= self.read_frames(model, instance)?;
            }
            changed |= self.poll_calls()?;
            changed |= self.poll_ensemble_calls()?;
            if !changed {
                return Ok(());
            }
        }
    }

    fn on_event(&mut self, event: Event) -> Result<(), String> {
        let now = self.now;
        match event {
            Event::Arrive(_) | Event::ArriveAtEnsemble(_) if !self.loaded => {}
            Event::Arrive(model) => {
                self.send(model);
                let pause = 100 + self.random.below(6_000);
                self.after(pause, event);
            }
            Event::ArriveAtEnsemble(ensemble) => self.send_to_ensemble(ensemble),
            Event::Cancel(call) => self.cancel(call),
            Event::Read(call) => self.calls[call].read_on(),
            Event::CancelEnsemble(call) => self.cancel_ensemble(call),
            Event::ReadEnsemble(call) => self.ensemble_calls[call].read_on(),
            Event::Tick => {
                self.tick();
                self.after(500_000, event);
            }
            Event::Loaded(place) => {
                if let Some(one) = self.instance(place) {
                    one.machine.ready(now);
                }
            }
            Event::LoadFailed(place) => {
                if let Some(one) = self.instance(place) {
                    one.machine.load_failed("chance", now);
                }
            }
            Event::Done(place) => self.batch_done(place)?,
            Event::Die(place) => {
                if self.instance(place).and_then(|one| one.process.take()).is_some() {
                    self.coverage.deaths += 1;
                    let delay = self.random.below(300);
                    self.after(delay, Event::Ended(place));
                }
            }
            Event::Ended(place) => {
                if self.instance(place).is_some() {
                    self.take_out_of_service(place.model, place.instance);
                }
                if let Some(one) = self.instance(place) {
                    one.process = None;
                    one.generation += 1;
                    one.machine.exited("chance", now);
                }
            }
        }
        Ok(())
    }

    /// Returns the instance, if this is its current process.
    pub(super) fn instance(&mut self, place: Place) -> Option<&mut Instance> {
        let instance = self.models[place.model].instances.get_mut(place.instance)?;
        (instance.generation == place.generation).then_some(instance)
    }

    pub(super) fn place(&self, model: usize, instance: usize) -> Place {
        Place { model, instance, generation: self.models[model].instances[instance].generation }
    }

    fn take_out_of_service(&mut self, model: usize, instance: usize) {
        let model = &mut self.models[model];
        model.instances[instance].ready = false;
        model.driver.instance_lost(model.instances[instance].id);
    }

    /// Performs an action of a supervisor, as `crate::supervisor` does.
    fn perform(&mut self, model: usize, instance: usize, action: Action) {
        let place = self.place(model, instance);
        match action {
            Action::Spawn => {
                let now = self.now;
                // A model whose first load fails is not served at all.
                let faults = if self.models[model].instances[instance].once_ready {
                    self.faults.load
                } else {
                    0
                };
                if self.random.chance(faults) {
                    self.coverage.failed_loads += 1;
                    self.models[model].instances[instance].machine.not_started("no memory", now);
                    return;
                }
                let one = &mut self.models[model].instances[instance];
                one.process = Some(Worker::start());
                one.machine.spawned(now);
                let load = 1_000 + self.random.below(30_000);
                match self.random.below(8 * faults.max(1)) {
                    0 if faults > 0 => self.after(load, Event::LoadFailed(place)),
                    // It never loads: the start timeout ends it.
                    1 if faults > 0 => {}
                    2 if faults > 0 => self.after(load, Event::Die(place)),
                    _ => self.after(load, Event::Loaded(place)),
                }
            }
            Action::Kill { .. } => self.after(100, Event::Ended(place)),
            Action::ReportReady => {
                let model = &mut self.models[model];
                let one = &mut model.instances[instance];
                one.ready = true;
                one.once_ready = true;
                // A process that has died already is noticed later.
                if let Some(process) = &one.process {
                    model.driver.instance_ready(one.id, process.link.clone());
                }
            }
            Action::ReportLost { .. } | Action::ReportFailed { .. } => {
                self.take_out_of_service(model, instance);
                let model = &self.models[model];
                if model.is_broken() {
                    model.driver.reject_if_alone();
                }
            }
        }
    }
}
