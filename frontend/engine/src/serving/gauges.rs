//! Gauges that are updated before a scrape: queues, instance states, memory, sequences, resources.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pharos::id::ModelVersion;
use pharos::load_report::{ModelSample, Sample};
use pharos::metrics::builtin::Builtin;
use pharos::metrics::labels::InstanceState;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::repository::State as ModelState;
use pharos::repository::memory_budget::Memory;

use super::{Executor, ModelTable};
use crate::ensemble::Ensemble;
use crate::scheduler::Driver;
use crate::supervisor::{InstanceStatus, Instances};
use pharos_os::clock;

/// Rows of one gauge: label values and the value.
type Rows<'a> = Vec<(Vec<&'a str>, f64)>;

/// A version that serves, or that finishes its work. Several of them may have the same model and
/// version.
struct ExecutingVersion {
    model: ModelVersion,
    executor: Arc<Executor>,
}

impl ModelTable {
    /// Updates the metrics cache before a scrape: reads the metrics that workers have sent, and
    /// sets the gauges.
    pub(crate) fn observe(&self) {
        let _turn = self.observing.lock();
        self.shared.metrics.clock().set(clock::now());
        let all = self.live();
        self.observe_ensembles(&all);
        let mut drivers = Vec::new();
        for live in &all {
            // Ensembles have neither queues nor instances; their members do.
            if let Some(driver) = live.executor.driver() {
                drivers.push((driver.clone(), live.model.version.to_string()));
            }
        }
        let doing: Vec<_> = all
            .iter()
            .filter_map(|live| live.executor.instances())
            .map(Instances::states)
            .collect();
        let mut states = Rows::new();
        let mut arenas = Rows::new();
        for ((driver, version), doing) in drivers.iter().zip(&doing) {
            driver.drain_metrics(&self.shared.metrics);
            describe(driver, version, doing, &mut states, &mut arenas);
        }
        // For equal names, the first row wins: the instance of the serving version.
        self.shared.metrics.set_gauges(Builtin::InstanceState, &combined(states, |first, _| first));
        self.shared.metrics.set_gauges(Builtin::ArenaUsed, &summed(arenas));
        self.observe_states();
        self.observe_queues(&drivers);
        self.observe_load(&drivers, &doing);
        self.observe_adapters(&drivers);
        self.observe_limits(&drivers);
        self.observe_sequences(&drivers);
        if let Some(responses) = &self.shared.response_cache {
            responses.observe();
        }
        self.observe_memory(&all);
        self.observe_hits();
        let load_waits = self.load_waits.load(Ordering::Relaxed);
        self.shared
            .metrics
            .set_gauges(Builtin::OnDemandWaiting, &[(Vec::new(), load_waits as f64)]);
        self.shared
            .metrics
            .set_gauges(Builtin::BuildInfo, &[(vec![env!("CARGO_PKG_VERSION")], 1.0)]);
        let (total, used) = self.shared.pinned.total_and_used();
        self.shared.metrics.set_gauges(Builtin::PinnedMemoryTotal, &[(Vec::new(), total as f64)]);
        self.shared.metrics.set_gauges(Builtin::PinnedMemoryUsed, &[(Vec::new(), used as f64)]);
    }

    /// Sets the gauges of executing and waiting requests, and counts the busy time of instances.
    fn observe_load(&self, drivers: &[(Arc<Driver>, String)], instances: &[Vec<InstanceStatus>]) {
        let now = clock::now();
        let mut executing = Rows::new();
        let mut waiting = Rows::new();
        let mut slots = Rows::new();
        let mut free = Rows::new();
        let mut busy = Rows::new();
        for ((driver, version), instances) in drivers.iter().zip(instances) {
            let load = driver.load(now);
            let labels = [&*driver.model.name, version.as_str()];
            executing.push((labels.to_vec(), load.executing as f64));
            waiting.push((labels.to_vec(), load.waiting as f64));
            slots.push((labels.to_vec(), load.slots as f64));
            free.push((labels.to_vec(), driver.free_batch_slots() as f64));
            let taken = driver.take_busy_ns(now);
            for instance in instances {
                let ns = taken.get(&instance.id).copied().unwrap_or_default();
                busy.push((vec![labels[0], labels[1], instance.name.as_str()], ns as f64 / 1e9));
            }
        }
        self.shared.metrics.count_all(Builtin::InstanceBusy, &busy);
        for (server, model, rows) in [
            (Builtin::ExecutingRequests, Builtin::ModelExecuting, executing),
            (Builtin::WaitingRequests, Builtin::ModelWaiting, waiting),
            (Builtin::ExecutionSlots, Builtin::ModelSlots, slots),
        ] {
            self.shared.metrics.set_gauges(
                server,
                &[(Vec::new(), rows.iter().map(|(_, count)| count).sum::<f64>())],
            );
            self.shared.metrics.set_gauges(model, &summed(rows));
        }
        // For equal names, the first row wins: the batches of the serving version.
        self.shared.metrics.set_gauges(Builtin::ModelBatchSlots, &combined(free, |first, _| first));
    }

    /// Sets the gauges of the memory of models, of each memory that is limited.
    fn observe_memory(&self, all: &[ExecutingVersion]) {
        let memory = &self.shared.memory;
        let mut versions = Vec::new();
        for live in all {
            if let Some(share) = live.executor.memory() {
                versions.push((&*live.model.name, live.model.version.to_string(), share.bytes()));
            }
        }
        let bytes_in = |limited: Memory| {
            let mut rows = Rows::new();
            for (name, version, bytes) in &versions {
                if let Some(bytes) = bytes.get(limited) {
                    rows.push((vec![*name, version.as_str()], bytes as f64));
                }
            }
            rows
        };
        if let Some(limit) = memory.limits().get(Memory::Main) {
            let used = memory.totals(Memory::Main).used;
            self.shared.metrics.set_gauges(Builtin::ModelMemory, &summed(bytes_in(Memory::Main)));
            self.shared
                .metrics
                .set_gauges(Builtin::ModelMemoryLimit, &[(Vec::new(), limit as f64)]);
            self.shared.metrics.set_gauges(Builtin::ModelMemoryUsed, &[(Vec::new(), used as f64)]);
        }
        let mut of_models = Rows::new();
        let mut limits = Rows::new();
        let mut used = Rows::new();
        for (number, uuid) in &self.shared.gpu_uuids {
            let limited = Memory::Gpu(*number);
            let Some(limit) = memory.limits().get(limited) else { continue };
            limits.push((vec![uuid.as_str()], limit as f64));
            used.push((vec![uuid.as_str()], memory.totals(limited).used as f64));
            for (labels, bytes) in bytes_in(limited) {
                of_models.push(([labels, vec![uuid.as_str()]].concat(), bytes));
            }
        }
        self.shared.metrics.set_gauges(Builtin::ModelGpuMemory, &summed(of_models));
        self.shared.metrics.set_gauges(Builtin::ModelGpuMemoryLimit, &limits);
        self.shared.metrics.set_gauges(Builtin::ModelGpuMemoryUsed, &used);
    }

    /// Counts the requests since the last scrape that found their model loaded, of models that are
    /// loaded on demand.
    fn observe_hits(&self) {
        self.all().iter().for_each(|serving| self.count_hits(&serving.model, &serving.series));
    }

    /// Counts the requests to a version since the last count that found it loaded, if the model is
    /// loaded on demand.
    pub(super) fn count_hits(&self, model: &ModelVersion, series: &ModelSeries) {
        let table = self.snapshot();
        if let Some(on_demand) = table.on_demand.get(&*model.name) {
            record::on_demand_hits(
                &self.shared.metrics,
                &model.name,
                on_demand.hits(series.take_requested()),
            );
        }
    }

    /// Returns a sample for load reports, with this utilization of the host: the load of each
    /// version with instances, and the counters of all models at one moment.
    pub(crate) fn load_sample(&self, cpu: Option<f64>, memory: Option<f64>) -> Sample {
        let now = clock::now();
        let mut loads = Vec::new();
        for ExecutingVersion { model, executor } in self.live() {
            if let Some(driver) = executor.driver() {
                loads.push((model, driver.clone(), driver.load(now)));
            }
        }
        let ((requests, errors), queued) = self.shared.metrics.transactions().snapshot(|| {
            let queued: Vec<_> =
                loads.iter().map(|(_, driver, _)| driver.series.queued()).collect();
            (self.shared.metrics.inferences(), queued)
        });
        let mut models = Vec::with_capacity(loads.len());
        for ((model, driver, load), (succeeded, queue_ns)) in loads.into_iter().zip(queued) {
            models.push(ModelSample {
                name: model.name.full().into(),
                id: Arc::as_ptr(&driver).addr(),
                executing: load.executing as u64,
                waiting: load.waiting as u64,
                slots: load.slots,
                instances: load.instances as u64,
                busy_ns: load.busy_ns,
                succeeded,
                queue_ns,
                engines: driver.series.engine_levels(),
            });
        }
        Sample { cpu, memory, requests, errors, models }
    }

    /// Returns the serving versions, followed by the retired versions that have not ended.
    fn live(&self) -> Vec<ExecutingVersion> {
        let mut all = Vec::new();
        for serving in self.all() {
            all.push(ExecutingVersion {
                model: serving.model.clone(),
                executor: serving.executor.clone(),
            });
        }
        for retired in self.retired.lock().iter() {
            if let Some(executor) = retired.served() {
                all.push(ExecutingVersion { model: retired.model.clone(), executor });
            }
        }
        all
    }

    /// Sets the state gauge of every known version, the result of the latest load of every known
    /// model, and the progress of loads.
    fn observe_states(&self) {
        let snapshot = self.snapshot();
        let loads = snapshot
            .states
            .iter()
            .map(|(name, model)| (vec![name], if model.load_failed { 0.0 } else { 1.0 }));
        self.shared.metrics.set_gauges(Builtin::ModelLastLoad, &loads.collect::<Rows<'_>>());
        let mut known = Vec::new();
        for (name, model) in snapshot.states.iter() {
            for (version, status) in &model.versions {
                known.push((name, version.to_string(), status.state));
            }
        }
        let mut rows = Rows::new();
        for (name, version, now) in &known {
            for state in ModelState::ALL {
                let value = if state == *now { 1.0 } else { 0.0 };
                rows.push((vec![*name, version.as_str(), state.as_str()], value));
            }
        }
        self.shared.metrics.set_gauges(Builtin::ModelState, &rows);
        let mut loading = Vec::new();
        for (model, percent) in self.loads.percentages() {
            loading.push((model.name, model.version.to_string(), percent));
        }
        let rows = loading.iter().map(|(name, version, percent)| {
            (vec![&**name, version.as_str()], f64::from(*percent) / 100.0)
        });
        let rows: Rows<'_> = rows.collect();
        self.shared.metrics.set_gauges(Builtin::ModelLoadProgress, &rows);
    }

    /// Sets the gauges of running ensemble steps. Only ensembles with a limit have these series.
    fn observe_ensembles(&self, all: &[ExecutingVersion]) {
        let mut steps = Vec::new();
        for ExecutingVersion { model, executor } in all {
            let taken = executor.ensemble().into_iter().flat_map(Ensemble::places_taken);
            for (number, (step, count)) in taken.enumerate() {
                let labels = [
                    model.name.to_string(),
                    model.version.to_string(),
                    number.to_string(),
                    step.model.clone(),
                ];
                steps.push((labels, count));
            }
        }
        let rows = steps
            .iter()
            .map(|(labels, count)| (labels.iter().map(String::as_str).collect(), *count as f64));
        self.shared.metrics.set_gauges(Builtin::EnsembleInflight, &summed(rows.collect()));
    }

    /// Sets the gauge that names the adapters of the requests in engines. Only models with adapters
    /// have this series.
    fn observe_adapters(&self, drivers: &[(Arc<Driver>, String)]) {
        let name = Builtin::LlmAdapters.name();
        if self.shared.metrics.find(name).is_none() {
            return;
        }
        let joined = |names: &BTreeSet<String>| {
            names.iter().map(String::as_str).collect::<Vec<_>>().join(",")
        };
        let mut found = Vec::new();
        for (driver, version) in drivers {
            if let Some(adapters) = driver.series.adapters_in_use() {
                let running = joined(&adapters.running);
                let waiting = joined(&adapters.waiting);
                found.push((driver, version, adapters.slots.to_string(), running, waiting));
            }
        }
        let now = clock::wall_ns() as f64 / 1e9;
        let rows = found.iter().map(|(driver, version, slots, running, waiting)| {
            (vec![&*driver.model.name, version.as_str(), slots, running, waiting], now)
        });
        self.shared.metrics.set_gauges(Builtin::LlmAdapters, &rows.collect::<Rows<'_>>());
    }

    /// Sets the gauges of the rate limiter: waiting requests, limits and use. They exist only with
    /// a rate limiter.
    fn observe_limits(&self, drivers: &[(Arc<Driver>, String)]) {
        let Some(limits) = &self.shared.limits else { return };
        let mut waiting = Rows::new();
        let mut waited = Rows::new();
        for (driver, version) in drivers {
            let Some((count, time)) = driver.resource_waits() else { continue };
            let labels = vec![&*driver.model.name, version.as_str()];
            waiting.push((labels.clone(), count as f64));
            waited.push((labels, time.as_secs_f64()));
        }
        self.shared.metrics.count_all(Builtin::RateLimiterWait, &waited);
        self.shared.metrics.set_gauges(Builtin::RateLimiterWaiting, &summed(waiting));
        let usage = limits.usage();
        let mut devices = Vec::new();
        for resource in &usage {
            devices.push(
                resource.device.map_or_else(|| "global".to_owned(), |device| device.to_string()),
            );
        }
        let mut totals = Rows::new();
        let mut used = Rows::new();
        for (resource, device) in usage.iter().zip(&devices) {
            let labels = vec![resource.name.as_str(), device.as_str()];
            totals.push((labels.clone(), f64::from(resource.total)));
            used.push((labels, resource.used as f64));
        }
        self.shared.metrics.set_gauges(Builtin::RateLimiterLimit, &totals);
        self.shared.metrics.set_gauges(Builtin::RateLimiterUsed, &used);
    }

    /// Sets the gauges of sequences. Only models with sequences have these series.
    fn observe_sequences(&self, drivers: &[(Arc<Driver>, String)]) {
        let mut sequences = Rows::new();
        let mut slots = Rows::new();
        let mut used = Rows::new();
        let mut events = SEQUENCE_COUNTERS.map(|_| Rows::new());
        for (driver, version) in drivers {
            let Some((now, new)) = driver.sequences() else { continue };
            let labels = [&*driver.model.name, version.as_str()];
            sequences.push(([labels[0], labels[1], "active"].to_vec(), now.active as f64));
            sequences.push(([labels[0], labels[1], "backlogged"].to_vec(), now.backlogged as f64));
            slots.push((labels.to_vec(), now.slots as f64));
            used.push((labels.to_vec(), now.slots_used as f64));
            events
                .iter_mut()
                .zip(new)
                .for_each(|(rows, count)| rows.push((labels.to_vec(), count as f64)));
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
            self.shared.metrics.count(
                counter,
                &[&*driver.model.name, version.as_str()],
                count as f64,
            );
        }
    }

    fn observe_queues(&self, drivers: &[(Arc<Driver>, String)]) {
        let now = clock::now();
        let waiting: Vec<_> = drivers.iter().map(|(driver, _)| driver.waiting()).collect();
        let oldest = drivers.iter().zip(&waiting).map(|((driver, version), waiting)| {
            let seconds = waiting.oldest.map_or(0.0, |oldest| (now - oldest).as_secs_f64());
            (vec![&*driver.model.name, version.as_str()], seconds)
        });
        self.shared
            .metrics
            .set_gauges(Builtin::OldestPending, &combined(oldest.collect(), f64::max));
        let mut levels = Vec::new();
        for ((driver, version), waiting) in drivers.iter().zip(&waiting) {
            let known = driver.levels();
            let others = waiting
                .levels
                .iter()
                .map(|(level, _)| *level)
                .filter(|level| !known.contains(level));
            for level in known.clone().chain(others) {
                let found = waiting.levels.iter().find(|(waits, _)| *waits == level);
                levels.push((
                    driver,
                    version,
                    level.to_string(),
                    found.map_or(0, |(_, count)| *count),
                ));
            }
        }
        let rows = levels.iter().map(|(driver, version, level, count)| {
            (vec![&*driver.model.name, version.as_str(), level.as_str()], *count as f64)
        });
        self.shared.metrics.set_gauges(Builtin::PendingByPriority, &summed(rows.collect()));
    }
}

/// The counters of sequence events, in the order of [`Driver::sequences`].
const SEQUENCE_COUNTERS: [Builtin; 3] =
    [Builtin::SequencesIdleEvicted, Builtin::SequenceStartErrors, Builtin::SequenceRestarts];

/// Combines rows with equal labels: the row of the serving version, and rows of earlier versions
/// that finish their work.
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
    driver: &'a Driver,
    version: &'a str,
    instances: &'a [InstanceStatus],
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
