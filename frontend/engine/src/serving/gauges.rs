//! Gauges that are updated before a scrape: queues, instance states, memory, sequences, resources.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use pharos::ensemble::Step;
use pharos::id::ModelVersion;
use pharos::load_report::ModelSample;
use pharos::metrics::builtin::Builtin;
use pharos::metrics::labels::InstanceState;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::repository::State as ModelState;
use pharos::repository::memory_budget::Memory;

use super::{Executor, ModelTable, Serving};
use crate::ensemble::Ensemble;
use crate::scheduler::Driver;
use crate::supervisor::{InstanceStatus, Instances};
use pharos_os::clock;

/// Rows of one gauge: label values and the value.
type Rows<'a> = Vec<(Vec<&'a str>, f64)>;

/// A version that serves, or that finishes its work. Several of them may have the same model and version.
struct ExecutingVersion {
    model: ModelVersion,
    executor: Arc<Executor>,
}

impl ModelTable {
    /// Updates the metrics cache before a scrape: reads the metrics that workers have sent, and sets the gauges.
    pub(crate) fn observe(&self) {
        let _turn = self.observing.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.metrics.clock().set(clock::now());
        let all = self.live();
        self.observe_ensembles(&all);
        // Ensembles have neither queues nor instances; their members do.
        let with_driver =
            |live: &'_ ExecutingVersion| Some((live.executor.driver()?.clone(), live.model.version.to_string()));
        let drivers: Vec<(Arc<Driver>, String)> = all.iter().filter_map(with_driver).collect();
        let doing: Vec<_> = all.iter().filter_map(|live| live.executor.instances()).map(Instances::states).collect();
        let (mut states, mut arenas) = (Rows::new(), Rows::new());
        for ((driver, version), doing) in drivers.iter().zip(&doing) {
            driver.drain_metrics(&self.shared.metrics);
            describe((driver, doing), version, &mut states, &mut arenas);
        }
        // For equal names, the first row wins: the instance of the serving version.
        self.shared.metrics.set_gauges(Builtin::InstanceState, &combined(states, |first, _| first));
        self.shared.metrics.set_gauges(Builtin::ArenaUsed, &summed(arenas));
        self.observe_states();
        self.observe_queues(&drivers);
        self.observe_load(&drivers, &doing);
        self.observe_limits(&drivers);
        self.observe_sequences(&drivers);
        if let Some(responses) = &self.shared.response_cache {
            responses.observe();
        }
        self.observe_memory(&all);
        self.observe_hits();
        let load_waits = self.load_waits.load(Ordering::Relaxed);
        self.shared.metrics.set_gauges(Builtin::OnDemandWaiting, &[(Vec::new(), load_waits as f64)]);
        self.shared.metrics.set_gauges(Builtin::BuildInfo, &[(vec![env!("CARGO_PKG_VERSION")], 1.0)]);
        let (total, used) = self.shared.pinned.total_and_used();
        self.shared.metrics.set_gauges(Builtin::PinnedMemoryTotal, &[(Vec::new(), total as f64)]);
        self.shared.metrics.set_gauges(Builtin::PinnedMemoryUsed, &[(Vec::new(), used as f64)]);
    }

    /// Sets the gauges of executing and waiting requests, and counts the busy time of instances.
    fn observe_load(&self, drivers: &[(Arc<Driver>, String)], instances: &[Vec<InstanceStatus>]) {
        let now = clock::now();
        let (mut executing, mut waiting) = (Rows::new(), Rows::new());
        let (mut slots, mut free, mut busy) = (Rows::new(), Rows::new(), Rows::new());
        for ((driver, version), instances) in drivers.iter().zip(instances) {
            let load = driver.load(now);
            let labels = || vec![&*driver.model.name, version.as_str()];
            executing.push((labels(), load.executing as f64));
            waiting.push((labels(), load.waiting as f64));
            slots.push((labels(), load.slots as f64));
            free.push((labels(), driver.free_batch_slots() as f64));
            let taken = driver.take_busy_ns(now);
            busy.extend(instances.iter().map(|instance| {
                let ns = taken.get(&instance.id).copied().unwrap_or_default();
                ([labels(), vec![instance.name.as_str()]].concat(), ns as f64 / 1e9)
            }));
        }
        self.shared.metrics.count_all(Builtin::InstanceBusy, &busy);
        for (server, model, rows) in [
            (Builtin::ExecutingRequests, Builtin::ModelExecuting, executing),
            (Builtin::WaitingRequests, Builtin::ModelWaiting, waiting),
            (Builtin::ExecutionSlots, Builtin::ModelSlots, slots),
        ] {
            self.shared.metrics.set_gauges(server, &[(Vec::new(), rows.iter().map(|(_, count)| count).sum::<f64>())]);
            self.shared.metrics.set_gauges(model, &summed(rows));
        }
        // For equal names, the first row wins: the batches of the serving version.
        self.shared.metrics.set_gauges(Builtin::ModelBatchSlots, &combined(free, |first, _| first));
    }

    /// Sets the gauges of the memory of models, of each memory that is limited.
    fn observe_memory(&self, all: &[ExecutingVersion]) {
        let memory = &self.shared.memory;
        let version =
            |live: &'_ ExecutingVersion| Some((live.model.version.to_string(), live.executor.memory()?.bytes()));
        let versions: Vec<_> = all.iter().filter_map(|live| Some((&live.model.name, version(live)?))).collect();
        let bytes_in = |limited: Memory| {
            let used = versions.iter().filter_map(move |(name, (version, bytes))| {
                Some((vec![&***name, version.as_str()], bytes.get(limited)? as f64))
            });
            used.collect::<Rows<'_>>()
        };
        if let Some(limit) = memory.limits().get(Memory::Main) {
            let used = memory.totals(Memory::Main).used;
            self.shared.metrics.set_gauges(Builtin::ModelMemory, &summed(bytes_in(Memory::Main)));
            self.shared.metrics.set_gauges(Builtin::ModelMemoryLimit, &[(Vec::new(), limit as f64)]);
            self.shared.metrics.set_gauges(Builtin::ModelMemoryUsed, &[(Vec::new(), used as f64)]);
        }
        let (mut of_models, mut limits, mut used) = (Rows::new(), Rows::new(), Rows::new());
        for (number, uuid) in &self.shared.gpu_uuids {
            let limited = Memory::Gpu(*number);
            let Some(limit) = memory.limits().get(limited) else { continue };
            limits.push((vec![uuid.as_str()], limit as f64));
            used.push((vec![uuid.as_str()], memory.totals(limited).used as f64));
            let of_gpu = bytes_in(limited).into_iter();
            of_models.extend(of_gpu.map(|(labels, bytes)| ([labels, vec![uuid.as_str()]].concat(), bytes)));
        }
        self.shared.metrics.set_gauges(Builtin::ModelGpuMemory, &summed(of_models));
        self.shared.metrics.set_gauges(Builtin::ModelGpuMemoryLimit, &limits);
        self.shared.metrics.set_gauges(Builtin::ModelGpuMemoryUsed, &used);
    }

    /// Counts the requests since the last scrape that found their model loaded, of models that are loaded on demand.
    fn observe_hits(&self) {
        self.all().iter().for_each(|serving| self.count_hits(&serving.model, &serving.series));
    }

    /// Counts the requests to a version since the last count that found it loaded, if the model is loaded on demand.
    pub(super) fn count_hits(&self, model: &ModelVersion, series: &ModelSeries) {
        let table = self.snapshot();
        if let Some(on_demand) = table.on_demand.get(&*model.name) {
            record::on_demand_hits(&self.shared.metrics, &model.name, on_demand.hits(series.take_requested()));
        }
    }

    /// Returns the load of each version with instances, for load reports: levels and busy time. The caller adds the counters of its
    /// series, those of all models at one moment.
    pub(crate) fn load_samples(&self) -> Vec<(Arc<ModelSeries>, ModelSample)> {
        let now = clock::now();
        let sample = |live: ExecutingVersion| {
            let driver = live.executor.driver()?;
            let load = driver.load(now);
            let sample = ModelSample {
                name: live.model.name.full().into(),
                id: Arc::as_ptr(driver).addr(),
                executing: load.executing as u64,
                waiting: load.waiting as u64,
                slots: load.slots,
                instances: load.instances as u64,
                busy_ns: load.busy_ns,
                succeeded: 0,
                queue_ns: 0,
            };
            Some((Arc::clone(&driver.series), sample))
        };
        self.live().into_iter().filter_map(sample).collect()
    }

    /// Returns the serving versions, followed by the retired versions that have not ended.
    fn live(&self) -> Vec<ExecutingVersion> {
        let live = |serving: &Arc<Serving>| ExecutingVersion {
            model: serving.model.clone(),
            executor: serving.executor.clone(),
        };
        let mut all: Vec<ExecutingVersion> = self.all().iter().map(live).collect();
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(
            retired
                .iter()
                .filter_map(|old| Some(ExecutingVersion { model: old.model.clone(), executor: old.served()? })),
        );
        all
    }

    /// Sets the state gauge of every known version, and the result of the latest load of every known model.
    fn observe_states(&self) {
        let snapshot = self.snapshot();
        let loads = snapshot.states.iter().map(|(name, model)| (vec![name], if model.load_failed { 0.0 } else { 1.0 }));
        self.shared.metrics.set_gauges(Builtin::ModelLastLoad, &loads.collect::<Rows<'_>>());
        let known = snapshot.states.iter().flat_map(|(name, model)| {
            model.versions.iter().map(move |(version, status)| (name, version.to_string(), status.state))
        });
        let known: Vec<_> = known.collect();
        let rows = known.iter().flat_map(|(name, version, now)| {
            let value = |state| if state == *now { 1.0 } else { 0.0 };
            ModelState::ALL.map(|state| (vec![*name, version.as_str(), state.as_str()], value(state)))
        });
        self.shared.metrics.set_gauges(Builtin::ModelState, &rows.collect::<Rows<'_>>());
    }

    /// Sets the gauges of running ensemble steps. Only ensembles with a limit have these series.
    fn observe_ensembles(&self, all: &[ExecutingVersion]) {
        let of = |ExecutingVersion { model, executor }: &'_ ExecutingVersion| {
            let taken = executor.ensemble().into_iter().flat_map(Ensemble::places_taken).enumerate();
            let row = |(number, (step, count)): (usize, (&Step, usize))| {
                (model.name.to_string(), model.version.to_string(), number.to_string(), step.model.clone(), count)
            };
            taken.map(row).collect::<Vec<_>>()
        };
        let steps: Vec<_> = all.iter().flat_map(of).collect();
        let rows = steps.iter().map(|(model, version, step, member, count)| {
            (vec![model.as_str(), version.as_str(), step.as_str(), member.as_str()], *count as f64)
        });
        self.shared.metrics.set_gauges(Builtin::EnsembleInflight, &summed(rows.collect()));
    }

    /// Sets the gauges of the rate limiter: waiting requests, limits and use. They exist only with a rate limiter.
    fn observe_limits(&self, drivers: &[(Arc<Driver>, String)]) {
        let Some(limits) = &self.shared.limits else { return };
        let (mut waiting, mut waited) = (Rows::new(), Rows::new());
        for (driver, version) in drivers {
            let Some((count, time)) = driver.resource_waits() else { continue };
            let labels = vec![&*driver.model.name, version.as_str()];
            waiting.push((labels.clone(), count as f64));
            waited.push((labels, time.as_secs_f64()));
        }
        self.shared.metrics.count_all(Builtin::RateLimiterWait, &waited);
        self.shared.metrics.set_gauges(Builtin::RateLimiterWaiting, &summed(waiting));
        let usage = limits.usage();
        let device = |device: Option<u32>| device.map_or_else(|| "global".to_owned(), |device| device.to_string());
        let devices: Vec<String> = usage.iter().map(|usage| device(usage.device)).collect();
        let labels = || usage.iter().zip(&devices).map(|(usage, device)| vec![usage.name.as_str(), device.as_str()]);
        let limits: Rows<'_> = labels().zip(usage.iter().map(|usage| f64::from(usage.total))).collect();
        let used: Rows<'_> = labels().zip(usage.iter().map(|usage| usage.used as f64)).collect();
        self.shared.metrics.set_gauges(Builtin::RateLimiterLimit, &limits);
        self.shared.metrics.set_gauges(Builtin::RateLimiterUsed, &used);
    }

    /// Sets the gauges of sequences. Only models with sequences have these series.
    fn observe_sequences(&self, drivers: &[(Arc<Driver>, String)]) {
        let (mut sequences, mut slots, mut used) = (Rows::new(), Rows::new(), Rows::new());
        let mut events = SEQUENCE_COUNTERS.map(|_| Rows::new());
        for (driver, version) in drivers {
            let Some((now, new)) = driver.sequences() else { continue };
            let labels = [&*driver.model.name, version.as_str()];
            sequences.push(([labels[0], labels[1], "active"].to_vec(), now.active as f64));
            sequences.push(([labels[0], labels[1], "backlogged"].to_vec(), now.backlogged as f64));
            slots.push((labels.to_vec(), now.slots as f64));
            used.push((labels.to_vec(), now.slots_used as f64));
            events.iter_mut().zip(new).for_each(|(rows, count)| rows.push((labels.to_vec(), count as f64)));
        }
        for (counter, rows) in SEQUENCE_COUNTERS.into_iter().zip(&events) {
            self.shared.metrics.count_all(counter, rows);
        }
        self.shared.metrics.set_gauges(Builtin::Sequences, &summed(sequences));
        self.shared.metrics.set_gauges(Builtin::SequenceSlots, &summed(slots));
        self.shared.metrics.set_gauges(Builtin::SequenceSlotsUsed, &summed(used));
    }

    /// Counts the sequence events of a driver since the last scrape, if its model has sequences.
    pub(super) fn count_sequences(&self, driver: &Driver) {
        let Some((_, new)) = driver.sequences() else { return };
        let version = driver.model.version.to_string();
        for (counter, count) in SEQUENCE_COUNTERS.into_iter().zip(new) {
            self.shared.metrics.count(counter, &[&*driver.model.name, version.as_str()], count as f64);
        }
    }

    fn observe_queues(&self, drivers: &[(Arc<Driver>, String)]) {
        let now = clock::now();
        let waiting: Vec<_> = drivers.iter().map(|(driver, _)| driver.waiting()).collect();
        let oldest = drivers.iter().zip(&waiting).map(|((driver, version), waiting)| {
            let seconds = waiting.oldest.map_or(0.0, |oldest| (now - oldest).as_secs_f64());
            (vec![&*driver.model.name, version.as_str()], seconds)
        });
        self.shared.metrics.set_gauges(Builtin::OldestPending, &combined(oldest.collect(), f64::max));
        let levels = drivers.iter().zip(&waiting).flat_map(|((driver, version), waiting)| {
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
        self.shared.metrics.set_gauges(Builtin::PendingByPriority, &summed(rows.collect()));
    }
}

/// The counters of sequence events, in the order of [`Driver::sequences`].
const SEQUENCE_COUNTERS: [Builtin; 3] =
    [Builtin::SequencesIdleEvicted, Builtin::SequenceStartErrors, Builtin::SequenceRestarts];

/// Combines rows with equal labels: those of the serving version and of earlier versions that finish their work.
fn combined<'a>(rows: Rows<'a>, with: impl Fn(f64, f64) -> f64) -> Rows<'a> {
    let mut all: BTreeMap<Vec<&str>, f64> = BTreeMap::new();
    for (labels, value) in rows {
        all.entry(labels).and_modify(|known| *known = with(*known, value)).or_insert(value);
    }
    all.into_iter().collect()
}

fn summed(rows: Rows<'_>) -> Rows<'_> {
    combined(rows, |one, other| one + other)
}

/// Adds the states and arena use of the instances of one model version.
fn describe<'a>(
    (driver, instances): (&'a Driver, &'a [InstanceStatus]),
    version: &'a str,
    states: &mut Rows<'a>,
    arenas: &mut Rows<'a>,
) {
    let model = &*driver.model.name;
    let used = driver.arenas_used();
    for InstanceStatus { id, name, state: now, .. } in instances {
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
