//! How much of the model versions that load now is loaded, as their workers report it: for the
//! index, the metrics and the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pharos::id::ModelVersion;
use pharos::timeline::Instant;

/// How long a load lasts before the log shows its progress, and the time between two lines.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// The progress of one instance: 0 while it is not known, else the percentage plus one.
#[derive(Default)]
pub(crate) struct InstanceProgress(AtomicU8);

impl InstanceProgress {
    /// Records what a worker reports. A worker may report anything at any time: a percentage above
    /// 100 counts as 100, and one below an earlier one has no effect.
    pub(crate) fn report(&self, percent: u8) {
        self.0.fetch_max(percent.min(100) + 1, Ordering::Relaxed);
    }

    /// Forgets the reports: a new process loads the model.
    pub(crate) fn restart(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Returns the percentage, if it is known.
    fn percent(&self) -> Option<u8> {
        self.0.load(Ordering::Relaxed).checked_sub(1)
    }
}

/// The progress of the instances that one load of a version starts.
pub(crate) struct LoadProgress {
    model: ModelVersion,
    began: Instant,
    // Held for a few instructions.
    instances: Mutex<Vec<Arc<InstanceProgress>>>,
    // Held for a few instructions.
    next_line: Mutex<Instant>,
}

impl LoadProgress {
    fn new(model: ModelVersion, began: Instant) -> Self {
        let next_line = Mutex::new(began + LOG_INTERVAL);
        Self { model, began, instances: Mutex::default(), next_line }
    }

    /// Adds an instance.
    pub(crate) fn add_instance(&self) -> Arc<InstanceProgress> {
        let instance = Arc::<InstanceProgress>::default();
        self.instances.lock().push(instance.clone());
        instance
    }

    /// Returns the least percentage of the instances; `None` while one of them has reported
    /// nothing.
    fn percent(&self) -> Option<u8> {
        self.instances.lock().iter().map(|instance| instance.percent()).min().flatten()
    }

    /// Logs the progress of a load that takes long, if it is known and the last line is long ago.
    pub(crate) fn log(&self, now: Instant) {
        if let Some(line) = self.line(now) {
            tracing::info!(model = %self.model, "{line}");
        }
    }

    fn line(&self, now: Instant) -> Option<String> {
        let mut next_line = self.next_line.lock();
        let percent = self.percent().filter(|_| *next_line <= now)?;
        *next_line = now + LOG_INTERVAL;
        Some(format!("{percent} % loaded after {} s", (now - self.began).as_secs()))
    }
}

/// The loads of versions in progress.
#[derive(Clone, Default)]
pub(crate) struct Loads(
    // Held for a few instructions.
    Arc<Mutex<Vec<Arc<LoadProgress>>>>,
);

impl Loads {
    /// Begins a load, which ends when the result is dropped.
    pub(crate) fn begin(&self, model: ModelVersion, now: Instant) -> ActiveLoad {
        let progress = Arc::new(LoadProgress::new(model, now));
        self.0.lock().push(progress.clone());
        ActiveLoad { loads: self.clone(), progress }
    }

    /// Returns the versions whose progress is known, with the percentage that is loaded.
    pub(crate) fn percentages(&self) -> Vec<(ModelVersion, u8)> {
        let loads = self.0.lock();
        let known = loads.iter().filter_map(|load| Some((load.model.clone(), load.percent()?)));
        known.collect()
    }
}

/// A load that has not ended.
pub(crate) struct ActiveLoad {
    loads: Loads,
    progress: Arc<LoadProgress>,
}

impl ActiveLoad {
    /// Returns the progress, for the instances.
    pub(crate) fn progress(&self) -> Arc<LoadProgress> {
        self.progress.clone()
    }
}

impl Drop for ActiveLoad {
    fn drop(&mut self) {
        self.loads.0.lock().retain(|load| !Arc::ptr_eq(load, &self.progress));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant(seconds * 1_000_000_000)
    }

    fn begin(loads: &Loads) -> ActiveLoad {
        loads.begin(ModelVersion::new("m", 1), at(100))
    }

    #[test]
    fn reports_only_grow_up_to_100_percent() {
        let instance = InstanceProgress::default();
        assert_eq!(instance.percent(), None);
        for (reported, expected) in [(0, 0), (43, 43), (12, 43), (255, 100), (0, 100)] {
            instance.report(reported);
            assert_eq!(instance.percent(), Some(expected), "after {reported}");
        }
        instance.restart();
        assert_eq!(instance.percent(), None, "a new process begins");
    }

    #[test]
    fn a_version_has_the_least_percentage_of_its_instances_until_its_load_ends() {
        let loads = Loads::default();
        let load = begin(&loads);
        assert_eq!(loads.percentages(), [], "no instance has begun");
        let instances = [(); 2].map(|()| load.progress().add_instance());
        instances[0].report(80);
        assert_eq!(loads.percentages(), [], "the other one has reported nothing");
        instances[1].report(43);
        assert_eq!(loads.percentages(), [(ModelVersion::new("m", 1), 43)]);
        instances[1].report(90);
        assert_eq!(loads.percentages(), [(ModelVersion::new("m", 1), 80)]);
        drop(load);
        assert_eq!(loads.percentages(), []);
    }

    #[test]
    fn the_log_has_a_line_every_five_seconds_of_a_load_that_reports() {
        let load = begin(&Loads::default()).progress();
        let instance = load.add_instance();
        assert_eq!(load.line(at(106)), None, "nothing is known");
        instance.report(43);
        assert_eq!(load.line(at(104)), None, "the load is short");
        let line =
            |percent: u8, seconds: u64| Some(format!("{percent} % loaded after {seconds} s"));
        assert_eq!(load.line(at(112)), line(43, 12));
        instance.report(60);
        assert_eq!(load.line(at(116)), None, "the last line is 4 s ago");
        assert_eq!(load.line(at(117)), line(60, 17));
    }
}
