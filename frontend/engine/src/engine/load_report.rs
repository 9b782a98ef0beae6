//! Keeps the load reports: samples the counters at intervals, so that a request only takes the latest report.

use std::sync::{Arc, PoisonError, RwLock};

use pharos::load_report::{LoadReport, PERIOD, Reports, Sample, Tracker};
use tokio::time::{MissedTickBehavior, interval};

use super::Engine;
use pharos_os::clock;

/// The latest reports.
#[derive(Default)]
pub(super) struct LoadReports(
    // Held only to copy or replace the pointer.
    RwLock<Arc<Reports>>,
);

impl LoadReports {
    fn latest(&self) -> Arc<Reports> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, reports: Reports) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(reports);
    }
}

impl Engine {
    /// Keeps the load reports up to date. Never ends; run it on a runtime that serves no requests, because each sample locks every
    /// model once.
    pub async fn keep_load_reports(self) {
        let mut tracker = Tracker::default();
        let mut period = interval(PERIOD);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            period.tick().await;
            self.inner.load_reports.set(tracker.add(clock::now(), self.sample()));
        }
    }

    /// Returns the latest report with the metrics of a model of the repository; that of the server if the model is unknown.
    pub(super) fn latest_report(&self, model: &str) -> Arc<LoadReport> {
        let reports = self.inner.load_reports.latest();
        let in_namespace = || reports.of(&self.inner.loader.models().full_name(model).ok()?);
        reports.of(model).or_else(in_namespace).unwrap_or_else(|| reports.of_server())
    }

    fn sample(&self) -> Sample {
        let (requests, errors) = self.inner.cache.inferences();
        let (cpu, memory) = self.inner.latest.host.utilization(clock::now());
        Sample { cpu, memory, requests, errors, models: self.inner.loader.models().load_samples() }
    }
}
