//! The latest GPU readings, for callers that cannot wait for the driver.

use std::sync::{Mutex, PoisonError};

use pharos::timeline::Instant;

use super::gpu::GpuReading;

/// The latest readings of the polling thread.
#[derive(Debug, Default)]
pub struct LatestGpus {
    /// The time until which the readings are valid, and the readings. Locked briefly.
    last: Mutex<Option<(Instant, Vec<GpuReading>)>>,
}

impl LatestGpus {
    /// Replaces the readings.
    pub(super) fn set(&self, gpus: Vec<GpuReading>, until: Instant) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((until, gpus));
    }

    /// Returns the latest reading of a whole device. `None` without a recent one, because the driver may hang.
    pub fn of(&self, number: u32, now: Instant) -> Option<GpuReading> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, gpus) = last.as_ref().filter(|(until, _)| now <= *until)?;
        gpus.iter().find(|gpu| gpu.index == number && !gpu.mig).cloned()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::at_ms;
    use super::*;

    #[test]
    fn returns_readings_until_they_are_too_old() {
        let latest = LatestGpus::default();
        assert_eq!(latest.of(0, at_ms(0)), None, "nothing has been read");
        let gpu = |index, mig| GpuReading { index, mig, utilization: Some(0.5), ..GpuReading::default() };
        latest.set(vec![gpu(0, false), gpu(1, true)], at_ms(100));
        assert_eq!(latest.of(0, at_ms(100)), Some(gpu(0, false)));
        assert_eq!(latest.of(1, at_ms(100)), None, "a MIG device is not the whole device");
        assert_eq!(latest.of(0, at_ms(101)), None);
        latest.set(vec![gpu(0, false)], at_ms(200));
        assert_eq!(latest.of(0, at_ms(101)), Some(gpu(0, false)));
    }
}
