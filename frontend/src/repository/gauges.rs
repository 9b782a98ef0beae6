//! Gauges that are only looked at when somebody asks: what waits, what instances do, what their memory holds.

use std::sync::Arc;

use pharos::ensemble::Step;
use pharos::metrics::builtin::Builtin;
use pharos::metrics::labels::InstanceState;
use pharos::repository::State as ModelState;

use super::ensemble::Ensemble;
use super::{Repository, Serving};
use crate::clock;
use crate::scheduler::Driver;
use crate::supervisor::{Doing, Instances};

/// Rows of one gauge: label values and the value.
type Rows<'a> = Vec<(Vec<&'a str>, f64)>;

impl Repository {
    /// Brings the cache up to date before a scrape: takes what workers have sent, and sets the gauges.
    pub(crate) fn observe(&self) {
        self.cache.clock().tell(clock::now());
        let mut all = self.all();
        self.observe_ensembles(&all);
        // Ensembles have neither queues nor instances: their members do.
        all.retain(|serving| serving.ensemble().is_none());
        let versions: Vec<String> = all.iter().map(|serving| serving.model.version.to_string()).collect();
        let (mut states, mut arenas) = (Rows::new(), Rows::new());
        let doing: Vec<_> =
            all.iter().map(|serving| serving.instances().map(Instances::states).unwrap_or_default()).collect();
        for ((serving, version), doing) in all.iter().zip(&versions).zip(&doing) {
            let Some(driver) = serving.driver() else { continue };
            driver.drain_metrics(&self.cache);
            describe((driver, doing), version, &mut states, &mut arenas);
        }
        self.cache.set_gauges(Builtin::InstanceState, &states);
        self.cache.set_gauges(Builtin::ArenaUsed, &arenas);
        self.observe_states();
        self.observe_queues(&all, &versions);
        self.observe_limits(&all, &versions);
        self.observe_sequences(&all, &versions);
        if let Some(responses) = &self.responses {
            responses.observe();
        }
        self.cache.set_gauges(Builtin::BuildInfo, &[(vec![env!("CARGO_PKG_VERSION")], 1.0)]);
        for pool in [Builtin::PinnedMemoryTotal, Builtin::PinnedMemoryUsed] {
            // Nothing is pinned while nothing runs on a GPU.
            self.cache.set_gauges(pool, &[(Vec::new(), 0.0)]);
        }
    }

    /// The state of every version that is known.
    fn observe_states(&self) {
        let table = self.table();
        let known = table.states.iter().flat_map(|(name, model)| {
            model.versions.iter().map(move |(version, status)| (name, version.to_string(), status.state))
        });
        let known: Vec<_> = known.collect();
        let rows = known.iter().flat_map(|(name, version, now)| {
            let value = |state| if state == *now { 1.0 } else { 0.0 };
            ModelState::ALL.map(|state| (vec![*name, version.as_str(), state.as_str()], value(state)))
        });
        self.cache.set_gauges(Builtin::ModelState, &rows.collect::<Rows<'_>>());
    }

    /// What the steps of ensembles have under way. Only those with a limit have such series.
    fn observe_ensembles(&self, all: &[Arc<Serving>]) {
        let of = |serving: &'_ Arc<Serving>| {
            let taken = serving.ensemble().into_iter().flat_map(Ensemble::places_taken).enumerate();
            let model = &serving.model;
            let row = |(number, (step, count)): (usize, (&Step, usize))| {
                (model.name.to_string(), model.version.to_string(), number.to_string(), step.model.clone(), count)
            };
            taken.map(row).collect::<Vec<_>>()
        };
        let steps: Vec<_> = all.iter().flat_map(of).collect();
        let rows = steps.iter().map(|(model, version, step, member, count)| {
            (vec![model.as_str(), version.as_str(), step.as_str(), member.as_str()], *count as f64)
        });
        self.cache.set_gauges(Builtin::EnsembleInflight, &rows.collect::<Rows<'_>>());
    }

    /// Who waits for resources, and what there is of them. Without a rate limiter there are no such series.
    fn observe_limits(&self, all: &[Arc<Serving>], versions: &[String]) {
        let Some(limits) = &self.limits else { return };
        let mut waiting = Rows::new();
        for (serving, version) in all.iter().zip(versions) {
            let Some((count, waited)) = serving.driver().and_then(|driver| driver.resource_waits()) else { continue };
            let labels = [&*serving.model.name, version.as_str()];
            if let Ok(series) = self.cache.counter(Builtin::RateLimiterWait.name(), &labels) {
                // A time is never negative.
                let _ = series.add_or_update(waited.as_secs_f64());
            }
            waiting.push((labels.to_vec(), count as f64));
        }
        let is_there = |labels: &[String]| waiting.iter().any(|(there, _)| labels.iter().eq(there.iter().copied()));
        self.cache.remove_series(Builtin::RateLimiterWait.name(), |series| !is_there(series.labels()));
        self.cache.set_gauges(Builtin::RateLimiterWaiting, &waiting);
        let usage = limits.usage();
        let device = |device: Option<u32>| device.map_or_else(|| "global".to_owned(), |device| device.to_string());
        let devices: Vec<String> = usage.iter().map(|usage| device(usage.device)).collect();
        let labels = || usage.iter().zip(&devices).map(|(usage, device)| vec![usage.name.as_str(), device.as_str()]);
        let limits: Rows<'_> = labels().zip(usage.iter().map(|usage| f64::from(usage.total))).collect();
        let used: Rows<'_> = labels().zip(usage.iter().map(|usage| usage.used as f64)).collect();
        self.cache.set_gauges(Builtin::RateLimiterLimit, &limits);
        self.cache.set_gauges(Builtin::RateLimiterUsed, &used);
    }

    /// What there is of sequences. Only models with sequences have such series.
    fn observe_sequences(&self, all: &[Arc<Serving>], versions: &[String]) {
        let (mut sequences, mut slots, mut used) = (Rows::new(), Rows::new(), Rows::new());
        for (serving, version) in all.iter().zip(versions) {
            let Some(driver) = serving.driver() else { continue };
            let Some((now, new)) = driver.sequences() else { continue };
            let labels = [&*driver.model.name, version.as_str()];
            sequences.push(([labels[0], labels[1], "active"].to_vec(), now.active as f64));
            sequences.push(([labels[0], labels[1], "backlogged"].to_vec(), now.backlogged as f64));
            slots.push((labels.to_vec(), now.slots as f64));
            used.push((labels.to_vec(), now.slots_used as f64));
            let counts = [(Builtin::SequencesIdleEvicted, new.0), (Builtin::SequenceStartErrors, new.1)];
            for (counter, count) in counts {
                if let Ok(series) = self.cache.counter(counter.name(), &labels) {
                    // A count is never negative.
                    let _ = series.add_or_update(count as f64);
                }
            }
        }
        let is_there = |labels: &[String]| slots.iter().any(|(there, _)| labels.iter().eq(there.iter().copied()));
        for counter in [Builtin::SequencesIdleEvicted, Builtin::SequenceStartErrors] {
            self.cache.remove_series(counter.name(), |series| !is_there(series.labels()));
        }
        self.cache.set_gauges(Builtin::Sequences, &sequences);
        self.cache.set_gauges(Builtin::SequenceSlots, &slots);
        self.cache.set_gauges(Builtin::SequenceSlotsUsed, &used);
    }

    fn observe_queues(&self, all: &[Arc<Serving>], versions: &[String]) {
        let now = clock::now();
        let drivers = || all.iter().filter_map(|serving| serving.driver());
        let waiting: Vec<_> = drivers().map(|driver| driver.waiting()).collect();
        let oldest = all.iter().zip(versions).zip(&waiting).map(|((serving, version), waiting)| {
            let seconds = waiting.oldest.map_or(0.0, |oldest| (now - oldest).as_secs_f64());
            (vec![&*serving.model.name, version.as_str()], seconds)
        });
        self.cache.set_gauges(Builtin::OldestPending, &oldest.collect::<Rows<'_>>());
        let levels = drivers().zip(versions).zip(&waiting).flat_map(|((driver, version), waiting)| {
            let known = driver.levels();
            let others = waiting.levels.iter().map(|(level, _)| *level).filter(|level| !known.contains(level));
            let levels: Vec<u64> = known.clone().chain(others).collect();
            levels.into_iter().map(move |level| {
                let found = waiting.levels.iter().find(|(waits, _)| *waits == level);
                (driver, version, level.to_string(), found.map_or(0, |(_, count)| *count))
            })
        });
        let levels: Vec<_> = levels.collect();
        let rows = levels.iter().map(|(driver, version, level, count)| {
            (vec![&*driver.model.name, version.as_str(), level.as_str()], *count as f64)
        });
        self.cache.set_gauges(Builtin::PendingByPriority, &rows.collect::<Rows<'_>>());
    }
}

/// What the instances of one model version do, and what their memory holds.
fn describe<'a>(
    (driver, instances): (&'a Driver, &'a [Doing]),
    version: &'a str,
    states: &mut Rows<'a>,
    arenas: &mut Rows<'a>,
) {
    let model = &*driver.model.name;
    let used = driver.arenas_used();
    for (id, name, now) in instances {
        for state in InstanceState::ALL {
            let value = if *now == Some(state) { 1.0 } else { 0.0 };
            states.push((vec![model, version, name, state.as_str()], value));
        }
        if let Some((_, inputs, outputs)) = used.iter().find(|(used, ..)| used == id) {
            arenas.push((vec![model, version, name, "input"], *inputs as f64));
            arenas.push((vec![model, version, name, "output"], *outputs as f64));
        }
    }
}
