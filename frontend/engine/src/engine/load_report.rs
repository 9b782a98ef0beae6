//! Keeps the load reports: samples the counters at intervals, so that a request only takes the
//! latest report. Without requests for reports nothing is sampled.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use pharos::load_report::{LoadReport, PERIOD, Reports, Sample, Tracker};
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};

use super::Engine;
use pharos_os::clock;

/// The number of periods without a request for a report after which sampling ends.
const IDLE_PERIODS: u32 = 60;

/// The latest reports.
#[derive(Default)]
pub(super) struct LoadReports {
    // Held only to copy or replace the pointer. `None` while nothing is sampled.
    latest: RwLock<Option<Arc<Reports>>>,
    /// Whether a report was requested since the last sample.
    requested: AtomicBool,
    begin: Notify,
}

impl LoadReports {
    /// Returns the latest reports. `None` if sampling only begins now.
    fn latest(&self) -> Option<Arc<Reports>> {
        if !self.requested.load(Ordering::Relaxed) {
            self.requested.store(true, Ordering::Relaxed);
        }
        let latest = self.latest.read().clone();
        if latest.is_none() {
            self.begin.notify_one();
        }
        latest
    }

    fn set(&self, reports: Option<Reports>) {
        *self.latest.write() = reports.map(Arc::new);
    }
}

impl Engine {
    /// Keeps the load reports up to date while they are requested. Never ends; run it on a runtime
    /// that serves no requests, because each sample locks every model once.
    pub async fn keep_load_reports(self) {
        let reports = &self.inner.load_reports;
        loop {
            reports.begin.notified().await;
            let mut tracker = Tracker::default();
            let mut idle = 0;
            let mut period = interval(PERIOD);
            period.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while idle < IDLE_PERIODS {
                period.tick().await;
                idle = if reports.requested.swap(false, Ordering::Relaxed) { 0 } else { idle + 1 };
                reports.set(Some(tracker.add(clock::now(), self.sample())));
            }
            reports.set(None);
        }
    }

    /// Returns the latest report with the metrics of a model of the repository; the server's report
    /// if the model is unknown.
    pub(super) fn latest_report(&self, model: &str) -> Arc<LoadReport> {
        let reports = match self.inner.load_reports.latest() {
            Some(reports) => reports,
            // The first report has only levels, as the first sample of the tracker has.
            None => Arc::new(Tracker::default().add(clock::now(), self.sample())),
        };
        if let Some(report) = reports.of(model) {
            return report;
        }
        // The name may lack its namespace.
        let full_name = self.inner.loader.models().full_name(model);
        full_name.ok().and_then(|name| reports.of(&name)).unwrap_or_else(|| reports.of_server())
    }

    fn sample(&self) -> Sample {
        let (cpu, memory) = self.inner.latest.host.utilization(clock::now());
        self.inner.loader.models().load_sample(cpu, memory)
    }
}
