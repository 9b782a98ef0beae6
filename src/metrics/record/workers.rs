//! Events of the workers of a model.

use std::sync::Arc;

use super::super::builtin::Builtin;
use super::super::cache::Cache;
use super::super::catalog::STATE_BYTES;
use super::super::family::Series;
use super::super::series::ModelSeries;

/// Returns the name of the worker with this number for clients; `None` unless requests are counted by alias.
pub fn worker_name(cache: &Cache, series: &ModelSeries, instance: u32) -> Option<String> {
    let (name, version) = series.alias();
    cache.naming().map(|naming| (naming.worker)(instance, name, version))
}

/// Sets the gauge `WorkerLoadTime` of a worker: an instance loaded its model in `ms`. The series is removed with the instance or
/// the model.
pub fn worker_loaded(cache: &Cache, series: &ModelSeries, instance: u32, ms: u64) {
    if let Some(gauge) = load_time(cache, series, instance) {
        cache.own(series, &gauge);
        // A gauge accepts every value.
        let _ = gauge.add_or_update(ms as f64);
    }
}

/// Removes the gauge `WorkerLoadTime` of a worker: the instance has ended.
pub fn worker_removed(cache: &Cache, series: &ModelSeries, instance: u32) {
    if let Some(gauge) = load_time(cache, series, instance) {
        // Not owned: the worker never loaded its model, and the look-up has created the series.
        cache.own(series, &gauge);
        cache.release(series.release(|owned| Arc::ptr_eq(&owned.cell, &gauge.cell)));
    }
}

/// Removes the gauge of the states that the process of an instance has kept: the process has ended.
pub fn states_lost(cache: &Cache, series: &ModelSeries, instance: &str) {
    cache.release(series.release(|owned: &Series| {
        owned.spec().name == STATE_BYTES
            && owned.spec().labelled(owned.labels()).any(|label| label == ("instance", instance))
    }));
}

fn load_time(cache: &Cache, series: &ModelSeries, instance: u32) -> Option<Arc<Series>> {
    let worker = worker_name(cache, series, instance).unwrap_or_else(|| {
        let (name, version) = series.alias();
        format!("W-{instance}-{name}_{version}")
    });
    cache.gauge(Builtin::WorkerLoadTime.name(), &[worker.as_str(), "Host", cache.hostname()]).ok()
}
