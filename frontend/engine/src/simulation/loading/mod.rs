//! A deterministic simulation of the loader, the model table and the supervision of processes in
//! virtual time, with random faults. Clients send requests, load and unload models, and change the
//! repository. Everything is real, the files too, but the processes and the clock: see
//! `docs/src/internals/tests.md`.

mod clients;
mod repository;
mod workers;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pharos::metrics::cache::{Cache, Settings as CacheSettings};
use pharos::metrics::catalog::Catalog;
use pharos::metrics::exposition::{Format, render};
use pharos::repository::memory_budget::Memory;
use pharos::timeline::Instant;
use tokio::task::yield_now;

use super::world::Random;
use crate::loader::{Loader, Mode};
use crate::scheduler::Timer;
use clients::{Clients, Operation};
use pharos_os::clock::virtual_time;
use repository::Repository;
use workers::{Faults, ProcessCounts, Processes};

/// How long clients are active.
const LOAD: Duration = Duration::from_millis(1_500);

/// How long everything that has begun may take afterwards, and the end of the server.
const AFTERWARDS: Duration = Duration::from_secs(120);

/// The bytes that the server expects of each process, beyond the files of its model.
const PROCESS: u64 = 16 << 20;

/// The most processes that fit into the memory of models, if it is limited.
const FITTING: u64 = 4;

/// How often all tasks run before the processes read what was sent to them: a message passes
/// through several tasks.
const ROUNDS: usize = 8;

/// What was seen, to show what a simulation covers.
#[derive(Clone, Copy, Debug, Default)]
struct Coverage {
    processes: ProcessCounts,
    answered: u64,
    refused: u64,
    cancelled: u64,
    loads: u64,
    failed_loads: u64,
    unloads: u64,
    /// Models that were unloaded to make room, or without use.
    evictions: u64,
    changes: u64,
    steps: u64,
}

impl Coverage {
    /// Adds what another simulation has covered.
    fn add(&mut self, other: &Self) {
        self.processes.add(&other.processes);
        self.answered += other.answered;
        self.refused += other.refused;
        self.cancelled += other.cancelled;
        self.loads += other.loads;
        self.failed_loads += other.failed_loads;
        self.unloads += other.unloads;
        self.evictions += other.evictions;
        self.changes += other.changes;
        self.steps += other.steps;
    }
}

/// A server with its processes, clients and repository, at one time.
struct World {
    now: Instant,
    random: Random,
    mode: Mode,
    /// How many of a hundred actions of clients change the repository, load or unload a model, or
    /// cancel something.
    rates: [u64; 4],
    processes: Arc<Processes>,
    timer: Arc<Timer>,
    loader: Arc<Loader>,
    repository: Repository,
    clients: Clients,
    coverage: Coverage,
    /// A hash of all that has happened.
    trace: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let now = Instant(1_000_000_000);
        virtual_time::set(now);
        let mut random = Random::new(seed);
        let mode = match random.below(4) {
            0 => Mode::Poll(Duration::from_millis(200)),
            1 => Mode::Explicit,
            _ => Mode::OnDemand,
        };
        let faults = match random.below(3) {
            0 => Faults::default(),
            1 => Faults { start: 100, load: 20, die: 100, fail: 50, stay: 50 },
            _ => Faults { start: 20, load: 4, die: 20, fail: 10, stay: 10 },
        };
        let limit = (random.chance(2) && mode.by_request()).then_some(FITTING * (PROCESS + 4096));
        let repository = Repository::new();
        let processes = Processes::new(Random::new(random.below(u64::MAX)), faults);
        let timer = Timer::without_thread();
        let metrics = Arc::new(Cache::new(Catalog::shipped(), CacheSettings::new("h")));
        let settings = repository.settings(mode.clone(), limit, &mut random);
        let loader = Loader::new(settings, metrics, "".into(), timer.clone()).unwrap();
        let loader = Arc::new(loader.with_workers(Arc::new(processes.clone())));
        let (clients, coverage) = Default::default();
        let rates = [10, 12, 12, 6].map(|most| random.below(most));
        Self {
            now,
            random,
            mode,
            rates,
            processes,
            timer,
            loader,
            repository,
            clients,
            coverage,
            trace: 0,
        }
    }

    /// Adds to the hash of what has happened.
    fn note(&mut self, what: u64) {
        self.trace = (self.trace.rotate_left(5) ^ what).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    /// Lets everything happen that happens at this time.
    ///
    /// # Errors
    /// What is wrong.
    async fn settle(&mut self) -> Result<(), String> {
        loop {
            for _ in 0..ROUNDS {
                yield_now().await;
            }
            if !self.processes.read() {
                break;
            }
        }
        self.collect().await?;
        self.check()
    }

    /// Moves to the next time at which something happens, but not beyond `end`, and lets it happen.
    /// Returns `false` if nothing more happens.
    ///
    /// # Errors
    /// What is wrong.
    async fn step(&mut self, end: Instant) -> Result<bool, String> {
        self.settle().await?;
        let next = [virtual_time::next(), self.timer.next(), self.processes.next()]
            .into_iter()
            .flatten()
            .min();
        let Some(next) = next.filter(|next| *next <= end) else { return Ok(false) };
        self.now = self.now.max(next);
        virtual_time::set(self.now);
        self.note(self.now.0);
        while self.timer.fire() {}
        self.processes.act(self.now)?;
        self.coverage.steps += 1;
        Ok(true)
    }

    /// Lets time pass until `end`.
    ///
    /// # Errors
    /// What is wrong.
    async fn pass(&mut self, end: Instant) -> Result<(), String> {
        while self.step(end).await? {}
        self.now = end;
        virtual_time::set(end);
        Ok(())
    }

    /// Lets time pass until all that clients have begun is done.
    ///
    /// # Errors
    /// What is wrong, or is not done.
    async fn finish(&mut self) -> Result<(), String> {
        let end = self.now + AFTERWARDS;
        while self.clients.any_open() && self.step(end).await? {}
        match self.clients.open() {
            Some(open) => Err(format!("{open} is never done")),
            None => Ok(()),
        }
    }

    /// # Errors
    /// What is wrong at this time.
    fn check(&self) -> Result<(), String> {
        let table = self.loader.models().snapshot();
        for entry in table.states.index(true) {
            let versions = table.serving.get(&entry.name);
            let serves = versions
                .is_some_and(|all| entry.version.is_none_or(|version| all.contains_key(&version)));
            if !serves {
                return Err(format!("'{}' is ready and does not serve", entry.name));
            }
        }
        for (name, versions) in &table.serving {
            let ready: Vec<u64> = table.states.ready_versions(name).collect();
            if let Some(version) = versions.keys().find(|version| !ready.contains(version)) {
                return Err(format!("version {version} of '{name}' serves and is not ready"));
            }
        }
        let memory = &self.loader.models().shared.memory;
        if memory.is_limited() {
            let used = memory.totals(Memory::Main).used;
            let limit = memory.limits().of(Memory::Main);
            let processes = self.processes.living() as u64;
            if used > limit || processes > FITTING {
                return Err(format!(
                    "{used} of {limit} bytes are used by {processes} processes, of which \
                     {FITTING} fit"
                ));
            }
        }
        Ok(())
    }

    /// Returns the number of models that were unloaded to make room, or without use.
    fn evictions(&self) -> u64 {
        let text = render(&self.loader.models().shared.metrics, Format::Text);
        let of = |line: &str| {
            line.strip_prefix("pharos_on_demand_unloads_total{")?
                .rsplit(' ')
                .next()?
                .parse::<f64>()
                .ok()
        };
        text.lines().filter_map(of).sum::<f64>() as u64
    }

    /// Ends the server.
    ///
    /// # Errors
    /// Something is left.
    async fn end(&mut self) -> Result<(), String> {
        self.clients.begin(Operation::ShutDown, {
            let loader = self.loader.clone();
            async move {
                let left = loader.shut_down(Duration::from_secs(30)).await;
                if left == Default::default() {
                    Ok(None)
                } else {
                    Err(format!("{left:?} is left at the end"))
                }
            }
        });
        self.finish().await?;
        // What watches the repositories and the models notices it at its next look.
        self.pass(self.now + Duration::from_secs(20)).await?;
        let waiting = self.loader.models().load_waits.load(Ordering::Relaxed);
        let living = self.processes.living();
        let owners = Arc::strong_count(&self.loader);
        if living > 0 || waiting > 0 || owners > 1 {
            return Err(format!(
                "{living} processes, {waiting} requests that wait and {owners} owners of the \
                 loader are left"
            ));
        }
        Ok(())
    }
}

/// Runs a simulation. Returns what it covered, and a hash of all that has happened.
///
/// # Errors
/// What was wrong, and when.
fn run(seed: u64) -> Result<(Coverage, u64), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let mut world = World::new(seed);
    let begun = world.now;
    let outcome = super::caught(|| runtime.block_on(simulate(&mut world)));
    let at = world.now - begun;
    let mode = &world.mode;
    outcome.map_err(|error| format!("seed {seed}, after {at:?}, {mode:?}: {error}"))?;
    world.coverage.processes = world.processes.seen();
    world.coverage.evictions = world.evictions();
    Ok((world.coverage, world.trace))
}

async fn simulate(world: &mut World) -> Result<(), String> {
    world.start();
    world.finish().await?;
    let end = world.now + LOAD;
    while world.now < end {
        world.act();
        let pause = Duration::from_micros(world.random.below(8_000));
        world.pass(world.now + pause).await?;
    }
    world.processes.end_faults();
    world.finish().await?;
    world.recover().await?;
    world.end().await
}

/// The number of simulations in `make test`.
const SEEDS: u64 = 400;

#[test]
fn every_load_and_request_ends_and_nothing_is_left() {
    let all = super::run_all(0..SEEDS, run, Coverage::add);
    let requests = [all.answered, all.refused, all.cancelled];
    let changes = [all.loads, all.failed_loads, all.unloads, all.evictions, all.changes];
    assert!(
        requests.into_iter().chain(changes).all(|count| count > 0),
        "something never happened: {all:?}"
    );
}

#[test]
fn a_seed_reproduces_a_simulation() {
    for seed in 1_000..1_005 {
        assert_eq!(run(seed).unwrap().1, run(seed).unwrap().1, "seed {seed}");
    }
}

/// `make simulate SECONDS=... FIRST_SEED=...`
#[test]
#[ignore = "runs for PHAROS_SIMULATE_SECONDS: make simulate"]
fn simulate_for_long() {
    super::for_long(SEEDS, run, Coverage::add);
}
