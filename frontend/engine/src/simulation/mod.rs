//! A deterministic simulation of the drivers, supervisors, schedulers, rate limiter, response cache
//! and metrics in virtual time, with random faults. Everything is real but the processes, the
//! clients and the clock: see `docs/src/internals/tests.md`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout
)]

mod calls;
mod checks;
mod ensembles;
mod loading;
mod models;
mod processes;
mod steps;
mod worker;
mod world;

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use models::SEQUENCE_IDLE;
use world::{Coverage, World};

/// How long clients send requests, and how long the server may take afterwards to answer all.
const LOAD: Duration = Duration::from_millis(1_500);
const AFTERWARDS: Duration = Duration::from_secs(60);

/// Seeds that have found faults.
const KEPT: [u64; 0] = [];

/// Runs a simulation. Returns what it covered, and a hash of all that has happened.
///
/// # Errors
/// What was wrong, and when.
fn run(seed: u64) -> Result<(Coverage, u64), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let empty = tempfile::tempdir().unwrap();
    let mut world = World::new(seed, empty.path());
    let begun = world.now;
    let outcome = caught(|| simulate(&mut world));
    let at = world.now - begun;
    outcome.map_err(|error| format!("seed {seed}, after {at:?}: {error}"))?;
    Ok((world.coverage, world.trace))
}

/// Runs a simulation, and returns the text of a panic as its error.
fn caught(simulate: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(simulate)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_default())
    })
}

fn simulate(world: &mut World) -> Result<(), String> {
    let end = world.now + LOAD;
    while world.step(end)? {}
    world.end_load();
    let end = world.now + AFTERWARDS;
    while world.step(end)? && !world.is_quiet() {}
    if let Some((number, call)) = world.calls.iter().enumerate().find(|(_, call)| call.waits()) {
        return Err(format!(
            "request {number} to '{}' is never answered",
            world.models[call.model].name
        ));
    }
    if let Some((number, _)) =
        world.ensemble_calls.iter().enumerate().find(|(_, call)| call.waits())
    {
        return Err(format!("request {number} to an ensemble is never answered"));
    }
    let end = world.now + SEQUENCE_IDLE;
    while world.step(end)? {}
    world.check_end()?;
    world.check_sequences()?;
    world.check_end_of_ensembles()
}

/// The number of simulations in `make test`.
const SEEDS: u64 = 120;

#[test]
fn nothing_is_lost_whatever_fails() {
    let all = run_all(KEPT.into_iter().chain(0..SEEDS), run, Coverage::add);
    let faults = [
        all.deaths,
        all.executed_again,
        all.failed_loads,
        all.doubled_replies,
        all.hung,
        all.waits,
    ];
    let happened = faults
        .into_iter()
        .chain([all.hits, all.responses, all.ensemble_responses])
        .all(|count| count > 0);
    assert!(happened, "something never happened: {all:?}");
}

/// Runs a simulation with each seed, until one fails. Returns the sum of what they covered.
fn run_all<C: Default>(
    seeds: impl Iterator<Item = u64>,
    run: impl Fn(u64) -> Result<(C, u64), String>,
    add: impl Fn(&mut C, &C),
) -> C {
    let mut all = C::default();
    for seed in seeds {
        match run(seed) {
            Ok((coverage, _)) => add(&mut all, &coverage),
            Err(error) => panic!("{error}"),
        }
    }
    all
}

#[test]
fn a_seed_reproduces_a_simulation() {
    for seed in 1_000..1_010 {
        assert_eq!(run(seed).unwrap().1, run(seed).unwrap().1, "seed {seed}");
    }
}

/// `make simulate SECONDS=... FIRST_SEED=...`
#[test]
#[ignore = "runs for PHAROS_SIMULATE_SECONDS: make simulate"]
fn simulate_for_long() {
    for_long(SEEDS, run, Coverage::add);
}

/// Runs simulations for the time that the environment says. Prints what was covered, and each seed
/// that fails.
#[allow(clippy::disallowed_methods)]
fn for_long<C: Debug + Default>(
    first: u64,
    run: impl Fn(u64) -> Result<(C, u64), String>,
    add: impl Fn(&mut C, &C),
) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seconds = number("PHAROS_SIMULATE_SECONDS").unwrap_or(60);
    let first = number("PHAROS_SIMULATE_FIRST_SEED").unwrap_or(first);
    let begun = std::time::Instant::now();
    let mut seed = first;
    let mut failures = Vec::new();
    let mut all = C::default();
    while begun.elapsed() < Duration::from_secs(seconds) {
        match run(seed) {
            Ok((coverage, _)) => add(&mut all, &coverage),
            Err(error) => {
                println!("{error}");
                failures.push(seed);
            }
        }
        seed += 1;
    }
    let count = seed - first;
    let hours = begun.elapsed().as_secs_f64() / 3600.0;
    println!("{count} simulations, {:.0} in an hour; {all:?}", count as f64 / hours);
    assert!(failures.is_empty(), "these seeds fail: {failures:?}");
}
