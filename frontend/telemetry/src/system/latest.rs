//! The latest readings of the host and the GPUs, for callers that cannot wait for them.

use std::sync::Arc;

use parking_lot::Mutex;
use pharos::timeline::Instant;

use super::gpu::GpuReading;
use super::host::HostReading;

/// A value that is valid for a limited time.
#[derive(Debug)]
struct Recent<T> {
    /// The time until which the value is valid, and the value. Locked briefly.
    last: Mutex<Option<(Instant, T)>>,
}

// Derived, it would require `T: Default`.
impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self { last: Mutex::new(None) }
    }
}

impl<T> Recent<T> {
    fn set(&self, value: T, until: Instant) {
        *self.last.lock() = Some((until, value));
    }

    /// Returns what `of` returns for the value; `None` without a valid one.
    fn read<R>(&self, now: Instant, of: impl FnOnce(&T) -> Option<R>) -> Option<R> {
        let last = self.last.lock();
        last.as_ref().filter(|(until, _)| now <= *until).and_then(|(_, value)| of(value))
    }
}

/// The latest readings of the polling thread.
#[derive(Clone, Debug, Default)]
pub struct Latest {
    /// Of the GPUs.
    pub gpus: Arc<LatestGpus>,
    /// Of the host.
    pub host: Arc<LatestHost>,
}

/// The latest readings of the GPUs.
#[derive(Debug, Default)]
pub struct LatestGpus(Recent<Vec<GpuReading>>);

impl LatestGpus {
    /// Replaces the readings.
    pub(super) fn set(&self, gpus: Vec<GpuReading>, until: Instant) {
        self.0.set(gpus, until);
    }

    /// Returns the latest reading of a whole device. `None` without a recent one, because the
    /// driver may hang.
    pub fn of(&self, number: u32, now: Instant) -> Option<GpuReading> {
        self.0.read(now, |gpus| gpus.iter().find(|gpu| gpu.index == number && !gpu.mig).cloned())
    }
}

/// The latest reading of the host.
#[derive(Debug, Default)]
pub struct LatestHost(Recent<HostReading>);

impl LatestHost {
    /// Replaces the reading.
    pub(super) fn set(&self, host: HostReading, until: Instant) {
        self.0.set(host, until);
    }

    /// Returns the busy fraction of the processors and the used fraction of the memory; `None`
    /// without a recent reading.
    pub fn utilization(&self, now: Instant) -> (Option<f64>, Option<f64>) {
        let fractions = self.0.read(now, |host| {
            let total = host.memory.total;
            let memory = (total > 0).then(|| (host.memory.used() as f64 / total as f64).min(1.0));
            Some((host.cpu, memory))
        });
        fractions.unwrap_or_default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::memory::Memory;
    use super::super::tests::at_ms;
    use super::*;

    #[test]
    fn the_host_is_known_until_its_reading_is_too_old() {
        let latest = LatestHost::default();
        assert_eq!(latest.utilization(at_ms(0)), (None, None));
        let memory = Memory { total: 400, available: 100 };
        latest.set(HostReading { cpu: Some(0.25), memory, disk: None }, at_ms(100));
        assert_eq!(latest.utilization(at_ms(100)), (Some(0.25), Some(0.75)));
        assert_eq!(latest.utilization(at_ms(101)), (None, None));
        latest.set(
            HostReading { cpu: None, memory: Memory { total: 0, available: 0 }, disk: None },
            at_ms(200),
        );
        assert_eq!(latest.utilization(at_ms(150)), (None, None));
    }

    #[test]
    fn returns_readings_until_they_are_too_old() {
        let latest = LatestGpus::default();
        assert_eq!(latest.of(0, at_ms(0)), None, "nothing has been read");
        let gpu =
            |index, mig| GpuReading { index, mig, utilization: Some(0.5), ..GpuReading::default() };
        latest.set(vec![gpu(0, false), gpu(1, true)], at_ms(100));
        assert_eq!(latest.of(0, at_ms(100)), Some(gpu(0, false)));
        assert_eq!(latest.of(1, at_ms(100)), None, "a MIG device is not the whole device");
        assert_eq!(latest.of(0, at_ms(101)), None);
        latest.set(vec![gpu(0, false)], at_ms(200));
        assert_eq!(latest.of(0, at_ms(101)), Some(gpu(0, false)));
    }
}
