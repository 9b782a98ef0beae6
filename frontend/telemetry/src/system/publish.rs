//! Publishes readings as metrics: metrics of the host with the label `Level`, metrics with Triton's
//! names, and metrics of Pharos.
//!
//! A series that the last reading did not fill is removed from all views. The gauges with the label
//! `Level` are also logged when the log is due, and increments of counters at once, if the
//! definition logs them; the views always show the last reading.

use std::collections::BTreeMap;
use std::sync::Arc;

use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::{Cache, SampleError, Series};
use pharos::metrics::catalog::Kind;

use super::gpu::GpuReading;
use super::host::HostReading;
use super::process::ProcessReading;
use super::{Readings, WorkerOnGpu, WorkerReading};

/// The megabyte in metrics with the label `Level`.
const MEGABYTE: f64 = (1 << 20) as f64;
/// The gigabyte in metrics with the label `Level`.
const GIGABYTE: f64 = (1 << 30) as f64;
/// The value of the label `Level` of metrics of the machine.
const LEVEL: &str = "Host";

/// A series by metric and label values.
type Key = (Builtin, Vec<String>);

/// Writes readings into the cache.
pub(super) struct Publisher {
    cache: Arc<Cache>,
    hostname: String,
    /// The generation of the cache's definition that the handles belong to.
    generation: u64,
    series: BTreeMap<Key, PublishedSeries>,
    /// The last energy reading of each GPU in joules.
    energy: BTreeMap<String, f64>,
    /// The number of this reading.
    reading: u64,
    log: bool,
}

/// A series, and the last reading that filled it.
struct PublishedSeries {
    handle: Arc<Series>,
    reading: u64,
}

impl Publisher {
    pub(super) fn new(cache: Arc<Cache>) -> Self {
        Self {
            hostname: cache.hostname().to_owned(),
            generation: cache.generation(),
            cache,
            series: BTreeMap::new(),
            energy: BTreeMap::new(),
            reading: 0,
            log: false,
        }
    }

    /// Publishes readings. With `log`, logs each logged metric once, in the order of the log
    /// format.
    pub(super) fn publish(&mut self, readings: &Readings, log: bool) {
        self.reading += 1;
        self.log = log;
        if self.generation != self.cache.generation() {
            self.renew();
        }
        readings.gpus.iter().for_each(|gpu| self.gpu(gpu));
        readings.worker_gpus.iter().for_each(|worker| self.worker_on_gpu(worker));
        readings.host.iter().for_each(|host| self.host(host));
        readings.process.iter().for_each(|process| self.process(process));
        readings.workers.iter().for_each(|worker| self.worker(worker));
        self.remove_stale();
        self.energy.retain(|uuid, _| readings.gpus.iter().any(|gpu| gpu.uuid == *uuid));
    }

    /// Looks up all handles again, after the metrics were redefined.
    fn renew(&mut self) {
        self.generation = self.cache.generation();
        for ((metric, labels), shown) in std::mem::take(&mut self.series) {
            let values: Vec<&str> = labels.iter().map(String::as_str).collect();
            if let Ok(handle) = self.look_up(metric, &values) {
                self.series.insert((metric, labels), PublishedSeries { handle, ..shown });
            }
        }
    }

    fn host(&mut self, host: &HostReading) {
        let hostname = self.hostname.clone();
        let host_labels = [LEVEL, hostname.as_str()];
        if let Some(cpu) = host.cpu {
            self.set(Builtin::TsCpuUtilization, &host_labels, cpu * 100.0);
            self.set(Builtin::CpuUtilization, &[], cpu);
        }
        if let Some(disk) = host.disk {
            let used = disk.used as f64;
            let available = disk.available as f64;
            self.set(Builtin::TsDiskAvailable, &host_labels, available / GIGABYTE);
            self.set(Builtin::TsDiskUsage, &host_labels, used / GIGABYTE);
            self.set(Builtin::TsDiskUtilization, &host_labels, percent(used, used + available));
        }
        let total = host.memory.total as f64;
        let used = host.memory.used() as f64;
        self.set(Builtin::TsMemoryAvailable, &host_labels, (total - used) / MEGABYTE);
        self.set(Builtin::TsMemoryUsed, &host_labels, used / MEGABYTE);
        self.set(Builtin::TsMemoryUtilization, &host_labels, percent(used, total));
        self.set(Builtin::CpuMemoryTotal, &[], total);
        self.set(Builtin::CpuMemoryUsed, &[], used);
    }

    fn process(&mut self, process: &ProcessReading) {
        self.raise_to(Builtin::ProcessCpu, &[], process.cpu_seconds);
        self.set(Builtin::ProcessMemory, &[], process.resident_bytes as f64);
        if let Some(files) = process.open_files {
            self.set(Builtin::ProcessFds, &[], files as f64);
        }
        if let Some(start) = process.start_seconds {
            self.set(Builtin::ProcessStart, &[], start);
        }
    }

    fn worker(&mut self, reading: &WorkerReading) {
        let version = reading.worker.model.version.to_string();
        let labels =
            [&*reading.worker.model.name, version.as_str(), reading.worker.instance.as_str()];
        self.set(Builtin::WorkerCpu, &labels, reading.cpu_seconds);
        self.set(Builtin::WorkerMemory, &labels, reading.resident_bytes as f64);
    }

    fn worker_on_gpu(&mut self, reading: &WorkerOnGpu) {
        let WorkerOnGpu { worker, uuid, bytes, utilization } = reading;
        let version = worker.model.version.to_string();
        let labels =
            [&*worker.model.name, version.as_str(), worker.instance.as_str(), uuid.as_str()];
        self.set_some(Builtin::WorkerGpuMemory, &labels, bytes.map(|bytes| bytes as f64));
        self.set_some(Builtin::WorkerGpuUtilization, &labels, *utilization);
    }

    fn gpu(&mut self, gpu: &GpuReading) {
        let uuid = [gpu.uuid.as_str()];
        let memory = gpu.memory.map(|memory| (memory.total as f64, memory.used as f64));
        // Metrics with the label `Level` identify devices by number, and have no series for MIG
        // devices.
        if !gpu.mig {
            let number = gpu.index.to_string();
            let hostname = self.hostname.clone();
            let host_labels = [LEVEL, number.as_str(), hostname.as_str()];
            let utilization = memory.map(|(total, used)| percent(used, total));
            self.set_some(Builtin::TsGpuMemoryUtilization, &host_labels, utilization);
            self.set_some(
                Builtin::TsGpuMemoryUsed,
                &host_labels,
                memory.map(|(_, used)| used / MEGABYTE),
            );
            self.set_some(
                Builtin::TsGpuUtilization,
                &host_labels,
                gpu.utilization.map(|share| share * 100.0),
            );
        }
        self.set_some(Builtin::GpuUtilization, &uuid, gpu.utilization);
        self.set_some(Builtin::GpuMemoryTotal, &uuid, memory.map(|(total, _)| total));
        self.set_some(Builtin::GpuMemoryUsed, &uuid, memory.map(|(_, used)| used));
        self.set_some(Builtin::GpuPowerUsage, &uuid, gpu.power);
        self.set_some(Builtin::GpuPowerLimit, &uuid, gpu.power_limit);
        self.set_some(Builtin::GpuTemperature, &uuid, gpu.temperature);
        self.set_some(Builtin::GpuMemoryBandwidth, &uuid, gpu.bandwidth);
        // Counted from the server's start, as in Triton; a decrease means that the driver was
        // reloaded.
        if let Some(energy) = gpu.energy {
            let before = self.energy.insert(gpu.uuid.clone(), energy).unwrap_or(energy);
            self.set(
                Builtin::GpuEnergy,
                &uuid,
                if energy >= before { energy - before } else { energy },
            );
        }
    }

    fn set_some(&mut self, metric: Builtin, labels: &[&str], value: Option<f64>) {
        value.into_iter().for_each(|value| self.set(metric, labels, value));
    }

    /// Sets a gauge or adds to a counter. Ignores a metric that the definition omits or defines
    /// differently.
    fn set(&mut self, metric: Builtin, labels: &[&str], value: f64) {
        // The lines of a counter are its increments, which must add up.
        let log = self.log || (metric.kind() == Kind::Counter && value > 0.0);
        if let Some(series) = self.series(metric, labels) {
            // Only a decrease of a counter could be refused, which never occurs here.
            let _ = if log {
                series.add_or_update(value)
            } else {
                series.add_or_update_unlogged(value)
            };
        }
    }

    /// Raises a counter to `total`.
    fn raise_to(&mut self, metric: Builtin, labels: &[&str], total: f64) {
        let now = self.series(metric, labels).map_or(total, |series| series.value());
        self.set(metric, labels, (total - now).max(0.0));
    }

    /// Returns the series, marked as filled by this reading.
    fn series(&mut self, metric: Builtin, labels: &[&str]) -> Option<Arc<Series>> {
        let key = (metric, labels.iter().map(|label| (*label).to_owned()).collect());
        let reading = self.reading;
        if let Some(shown) = self.series.get_mut(&key) {
            shown.reading = reading;
            return Some(shown.handle.clone());
        }
        let handle = self.look_up(metric, labels).ok()?;
        self.series.insert(key, PublishedSeries { handle: handle.clone(), reading });
        Some(handle)
    }

    fn look_up(&self, metric: Builtin, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        match metric.kind() {
            Kind::Counter => self.cache.counter(metric.name(), labels),
            _ => self.cache.gauge(metric.name(), labels),
        }
    }

    /// Removes every series that this reading did not fill.
    fn remove_stale(&mut self) {
        let reading = self.reading;
        let cache = &self.cache;
        self.series.retain(|(metric, _), shown| {
            let fresh = shown.reading == reading;
            if !fresh {
                cache.remove_series(metric.name(), |series| {
                    std::ptr::eq(series, &raw const *shown.handle)
                });
            }
            fresh
        });
    }
}

/// Returns the percentage of `part` in `whole`.
fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole * 100.0 } else { 0.0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use pharos::id::ModelVersion;
    use pharos::metrics::cache::Settings;
    use pharos::metrics::catalog::Catalog;
    use pharos::metrics::exposition::{self, Format};
    use pharos::metrics::journal::Batch;

    use super::super::Worker;
    use super::super::gpu::GpuMemory;
    use super::super::host::Disk;
    use super::super::memory::Memory;
    use super::*;

    fn publisher() -> Publisher {
        Publisher::new(Arc::new(Cache::new(Catalog::shipped(), Settings::new("box"))))
    }

    /// Returns the samples of all families that readings fill, from a scrape, with sorted labels.
    fn scrape(publisher: &Publisher) -> BTreeMap<String, f64> {
        let text = exposition::render(&publisher.cache, Format::Text);
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let samples = lines.filter_map(|line| line.rsplit_once(' '));
        let ours = |(name, value): (&str, &str)| Some((sorted(name), value.parse().ok()?));
        let read = [
            "CPU",
            "Disk",
            "GPU",
            "Memory",
            "nv_cpu",
            "nv_gpu",
            "nv_energy",
            "pharos_gpu",
            "pharos_worker",
            "process",
        ];
        samples
            .filter_map(ours)
            .filter(|(name, _)| read.iter().any(|start| name.starts_with(start)))
            .collect()
    }

    fn sorted(series: &str) -> String {
        let Some((name, labels)) = series.split_once('{') else { return series.to_owned() };
        let mut labels: Vec<&str> = labels.trim_end_matches('}').split(',').collect();
        labels.sort_unstable();
        format!("{name}{{{}}}", labels.join(","))
    }

    fn assert_shows(publisher: &Publisher, expected: &[(&str, f64)]) {
        let shown = scrape(publisher);
        for (series, value) in expected {
            let found = shown.get(&sorted(series)).copied();
            assert!(
                found.is_some_and(|found| (found - value).abs() < 1e-9),
                "{series} {value}, not {found:?}: {shown:#?}"
            );
        }
    }

    fn host() -> HostReading {
        let memory = Memory { total: 1000 << 20, available: 750 << 20 };
        HostReading {
            cpu: Some(0.125),
            memory,
            disk: Some(Disk { used: 30 << 30, available: 10 << 30 }),
        }
    }

    fn gpu(uuid: &str) -> GpuReading {
        GpuReading {
            index: 1,
            uuid: uuid.to_owned(),
            utilization: Some(0.5),
            bandwidth: Some(0.25),
            memory: Some(GpuMemory { total: 400 << 20, used: 100 << 20 }),
            power: Some(250.5),
            power_limit: Some(400.0),
            energy: Some(1000.0),
            temperature: Some(60.0),
            ..GpuReading::default()
        }
    }

    fn worker(instance: &str, cpu_seconds: f64) -> WorkerReading {
        let worker = Worker { model: ModelVersion::new("m", 3), instance: instance.to_owned() };
        WorkerReading { worker, pid: Some(7), cpu_seconds, resident_bytes: 4096 }
    }

    #[test]
    fn publishes_the_host_in_the_units_of_both_servers() {
        let mut publisher = publisher();
        publisher.publish(&Readings { host: Some(host()), ..Readings::default() }, true);
        assert_shows(
            &publisher,
            &[
                ("CPUUtilization{Level=\"Host\",Hostname=\"box\"}", 12.5),
                ("MemoryUsed{Level=\"Host\",Hostname=\"box\"}", 250.0),
                ("MemoryAvailable{Level=\"Host\",Hostname=\"box\"}", 750.0),
                ("MemoryUtilization{Level=\"Host\",Hostname=\"box\"}", 25.0),
                ("DiskUsage{Level=\"Host\",Hostname=\"box\"}", 30.0),
                ("DiskAvailable{Level=\"Host\",Hostname=\"box\"}", 10.0),
                ("DiskUtilization{Level=\"Host\",Hostname=\"box\"}", 75.0),
                ("nv_cpu_utilization", 0.125),
                ("nv_cpu_memory_total_bytes", f64::from(1000 << 20)),
                ("nv_cpu_memory_used_bytes", f64::from(250 << 20)),
            ],
        );
    }

    /// The gauges are logged when the log is due; the lines of a counter must add up to its value.
    #[test]
    fn every_increment_of_a_counter_is_logged() {
        let text =
            "ts_metrics:\n  counter:\n    - {name: process_cpu_seconds_total, unit: Seconds}\n";
        let cache =
            Arc::new(Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("box")));
        let mut publisher = Publisher::new(cache.clone());
        let journal = cache.journal();
        let mut batch = Batch::default();
        journal.attach_writer(|| {});
        journal.take(&mut batch, 100, 0);
        for (cpu_seconds, log) in [(1.5, false), (2.0, true), (2.0, false), (4.25, false)] {
            let process = ProcessReading {
                cpu_seconds,
                resident_bytes: 0,
                open_files: None,
                start_seconds: None,
            };
            publisher.publish(&Readings { process: Some(process), ..Readings::default() }, log);
        }
        journal.take(&mut batch, 100, 0);
        let mut lines = Vec::new();
        batch.for_each(|line, value, _| lines.push(line.shown(value)));
        assert_eq!(lines, [1.5, 0.5, 2.25]);
    }

    #[test]
    fn publishes_a_gpu_in_the_units_of_both_servers() {
        let mut publisher = publisher();
        let readings = |energy| Readings {
            gpus: vec![GpuReading { energy: Some(energy), ..gpu("GPU-1") }],
            ..Readings::default()
        };
        publisher.publish(&readings(1000.0), false);
        assert_shows(&publisher, &[("nv_energy_consumption{gpu_uuid=\"GPU-1\"}", 0.0)]);
        publisher.publish(&readings(1250.5), false);
        let uuid = "{gpu_uuid=\"GPU-1\"}";
        let host_labels = "{Level=\"Host\",DeviceId=\"1\",Hostname=\"box\"}";
        assert_shows(
            &publisher,
            &[
                (&format!("nv_gpu_utilization{uuid}"), 0.5),
                (&format!("nv_gpu_memory_total_bytes{uuid}"), f64::from(400 << 20)),
                (&format!("nv_gpu_memory_used_bytes{uuid}"), f64::from(100 << 20)),
                (&format!("nv_gpu_power_usage{uuid}"), 250.5),
                (&format!("nv_gpu_power_limit{uuid}"), 400.0),
                (&format!("nv_energy_consumption{uuid}"), 250.5),
                (&format!("pharos_gpu_temperature_celsius{uuid}"), 60.0),
                (&format!("pharos_gpu_memory_bandwidth_utilization{uuid}"), 0.25),
                (&format!("GPUUtilization{host_labels}"), 50.0),
                (&format!("GPUMemoryUsed{host_labels}"), 100.0),
                (&format!("GPUMemoryUtilization{host_labels}"), 25.0),
            ],
        );
        publisher.publish(&readings(10.0), false);
        assert_shows(&publisher, &[(&format!("nv_energy_consumption{uuid}"), 260.5)]);
    }

    #[test]
    fn removes_series_that_are_no_longer_read() {
        let of_gpus = |publisher: &Publisher| {
            scrape(publisher)
                .keys()
                .filter(|name| name.contains("gpu_uuid") || name.contains("DeviceId"))
                .count()
        };
        let mut publisher = publisher();
        let mig = GpuReading { mig: true, uuid: "MIG-1".to_owned(), power: None, ..gpu("MIG-1") };
        let on_gpu = |uuid: &str, bytes, utilization| {
            let worker = worker("m_0", 0.0).worker;
            WorkerOnGpu { worker, uuid: uuid.to_owned(), bytes, utilization }
        };
        let worker_gpus = vec![on_gpu("GPU-1", Some(7), Some(0.5)), on_gpu("MIG-1", Some(5), None)];
        publisher.publish(
            &Readings { gpus: vec![gpu("GPU-1"), mig], worker_gpus, ..Readings::default() },
            false,
        );
        assert_eq!(of_gpus(&publisher), 11 + 8 - 1 + 3, "{:#?}", scrape(&publisher));
        let of = |uuid: &str| {
            format!("{{model=\"m\",version=\"3\",instance=\"m_0\",gpu_uuid=\"{uuid}\"}}")
        };
        assert_shows(
            &publisher,
            &[
                (&format!("pharos_worker_gpu_memory_bytes{}", of("GPU-1")), 7.0),
                (&format!("pharos_worker_gpu_utilization{}", of("GPU-1")), 0.5),
                (&format!("pharos_worker_gpu_memory_bytes{}", of("MIG-1")), 5.0),
            ],
        );
        let without_rates = GpuReading { utilization: None, bandwidth: None, ..gpu("GPU-1") };
        publisher.publish(&Readings { gpus: vec![without_rates], ..Readings::default() }, false);
        assert_eq!(of_gpus(&publisher), 8, "{:#?}", scrape(&publisher));
        publisher.publish(&Readings::default(), false);
        assert_eq!(of_gpus(&publisher), 0, "{:#?}", scrape(&publisher));
    }

    #[test]
    fn counters_add_up_readings() {
        let mut publisher = publisher();
        let process = |cpu_seconds| ProcessReading {
            cpu_seconds,
            resident_bytes: 1 << 20,
            open_files: Some(12),
            start_seconds: Some(1.75e9),
        };
        let readings = |own, added| Readings {
            process: Some(process(own)),
            workers: vec![worker("m_0", added)],
            ..Readings::default()
        };
        publisher.publish(&readings(2.5, 1.0), false);
        publisher.publish(&readings(4.0, 0.25), false);
        let m = "{model=\"m\",version=\"3\",instance=\"m_0\"}";
        assert_shows(
            &publisher,
            &[
                ("process_cpu_seconds_total", 4.0),
                ("process_resident_memory_bytes", f64::from(1 << 20)),
                ("process_open_fds", 12.0),
                ("process_start_time_seconds", 1.75e9),
                (&format!("pharos_worker_cpu_seconds_total{m}"), 1.25),
                (&format!("pharos_worker_resident_bytes{m}"), 4096.0),
            ],
        );
    }

    #[test]
    fn publishes_by_a_new_definition() {
        let mut publisher = publisher();
        let readings = Readings {
            host: Some(host()),
            workers: vec![worker("m_0", 1.0)],
            ..Readings::default()
        };
        publisher.publish(&readings, false);
        let text = "ts_metrics:\n  gauge:\n    - {name: MemoryUsed, unit: Megabytes, dimensions: \
                    [Level, Hostname]}\n";
        publisher.cache.reload(Catalog::parse(text, "less.yaml").unwrap());
        publisher.publish(&Readings { host: Some(host()), ..Readings::default() }, true);
        let shown = scrape(&publisher);
        assert_eq!(
            shown.into_iter().collect::<Vec<_>>(),
            [(sorted("MemoryUsed{Level=\"Host\",Hostname=\"box\"}"), 250.0)]
        );
        publisher.cache.reload(Catalog::shipped());
        publisher.publish(&readings, false);
        let m = "{model=\"m\",version=\"3\",instance=\"m_0\"}";
        assert_shows(&publisher, &[(&format!("pharos_worker_cpu_seconds_total{m}"), 1.0)]);
    }
}
