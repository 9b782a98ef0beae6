//! Quantiles of the latest observations.
//!
//! A summary keeps its last [`SLOTS`] observations, each with the second of its recording; a
//! reading sorts the observations of the last [`WINDOW_SECONDS`]. Recording takes one addition and
//! one store. Ranks are exact; values are rounded to 24 bits. Count and sum cover all observations,
//! as Prometheus requires.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use pharos_base::timeline::Instant;

use super::atomic::add;
use super::reading;

/// The number of observations that quantiles are computed from at most.
pub const SLOTS: usize = 1024;
/// The maximum age of these observations, as in Triton's summaries.
pub const WINDOW_SECONDS: u32 = 60;

/// The latest known time in whole seconds. Seconds start at 1: 0 marks an unused slot.
#[derive(Debug, Default)]
pub struct CoarseClock(AtomicU32);

impl CoarseClock {
    /// Sets the time. Earlier times than the present one are ignored.
    pub fn set(&self, now: Instant) {
        let second = u32::try_from(now.0 / 1_000_000_000 + 1).unwrap_or(u32::MAX);
        if self.0.load(Ordering::Relaxed) < second {
            self.0.fetch_max(second, Ordering::Relaxed);
        }
    }

    fn second(&self) -> u32 {
        self.0.load(Ordering::Relaxed).max(1)
    }
}

/// A distribution by quantiles.
#[derive(Debug)]
pub(super) struct Summary {
    quantiles: Vec<f64>,
    clock: Arc<CoarseClock>,
    /// The second in the upper half, the bits of an f32 in the lower half.
    slots: Box<[AtomicU64]>,
    count: AtomicU64,
    /// The bits of an f64.
    sum: AtomicU64,
}

impl Clone for Summary {
    /// Copies the observations and values of this moment.
    fn clone(&self) -> Self {
        let copy = |cell: &AtomicU64| AtomicU64::new(cell.load(Ordering::Relaxed));
        Self {
            quantiles: self.quantiles.clone(),
            clock: Arc::clone(&self.clock),
            slots: self.slots.iter().map(copy).collect(),
            count: copy(&self.count),
            sum: copy(&self.sum),
        }
    }
}

impl Summary {
    pub(super) fn new(quantiles: &[f64], clock: &Arc<CoarseClock>) -> Self {
        let slots = std::iter::repeat_with(AtomicU64::default).take(SLOTS).collect();
        let quantiles = quantiles.to_vec();
        Self {
            quantiles,
            clock: Arc::clone(clock),
            slots,
            count: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }

    pub(super) fn clock(&self) -> &CoarseClock {
        &self.clock
    }

    /// Records one observation, which must not be NaN.
    pub(super) fn observe(&self, value: f64) {
        let at = self.count.fetch_add(1, Ordering::Relaxed) as usize % SLOTS;
        add(&self.sum, value);
        if let Some(slot) = self.slots.get(at) {
            let packed = u64::from(self.clock.second()) << 32 | u64::from((value as f32).to_bits());
            slot.store(packed, Ordering::Relaxed);
        }
    }

    /// Returns sum, count and quantiles. A quantile's value is the observation at rank
    /// `ceil(quantile * n)`.
    pub(super) fn read(&self) -> reading::Summary {
        let now = self.clock.second();
        let slots = self.slots.iter().map(|slot| slot.load(Ordering::Relaxed));
        let fresh = slots.filter(|slot| {
            let second = (slot >> 32) as u32;
            second > 0 && now.saturating_sub(second) <= WINDOW_SECONDS
        });
        let mut values: Vec<f32> = fresh.map(|slot| f32::from_bits(slot as u32)).collect();
        values.sort_unstable_by(f32::total_cmp);
        let of = |quantile: f64| {
            let rank = (quantile * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).map_or(f64::NAN, |value| f64::from(*value))
        };
        let quantiles = self.quantiles.iter().map(|quantile| (*quantile, of(*quantile))).collect();
        let sum = f64::from_bits(self.sum.load(Ordering::Relaxed));
        let count = self.count.load(Ordering::Relaxed);
        reading::Summary { sum, count, quantiles }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(clock: &CoarseClock, second: u64) {
        clock.set(Instant(second * 1_000_000_000));
    }

    #[test]
    fn quantiles_cover_the_last_minute() {
        let clock = Arc::new(CoarseClock::default());
        let summary = Summary::new(&[0.0, 0.5, 0.9, 1.0], &clock);
        assert!(summary.read().quantiles.iter().all(|(_, value)| value.is_nan()));
        at(&clock, 100);
        for value in 1..=10 {
            summary.observe(f64::from(value));
        }
        let expected = vec![(0.0, 1.0), (0.5, 5.0), (0.9, 9.0), (1.0, 10.0)];
        assert_eq!(summary.read(), reading::Summary { sum: 55.0, count: 10, quantiles: expected });
        at(&clock, 150);
        summary.observe(100.0);
        at(&clock, 170);
        let quantiles = vec![(0.0, 100.0), (0.5, 100.0), (0.9, 100.0), (1.0, 100.0)];
        assert_eq!(summary.read(), reading::Summary { sum: 155.0, count: 11, quantiles });
        at(&clock, 120);
        assert_eq!(summary.read().quantiles.first(), Some(&(0.0, 100.0)), "time does not go back");
    }

    #[test]
    fn quantiles_cover_only_the_latest_observations() {
        let clock = Arc::new(CoarseClock::default());
        let summary = Summary::new(&[0.0, 1.0], &clock);
        for value in 0..3 * SLOTS {
            summary.observe(value as f64);
        }
        let reading::Summary { count, quantiles, .. } = summary.read();
        assert_eq!(count, 3 * SLOTS as u64);
        assert_eq!(quantiles, [(0.0, 2048.0), (1.0, 3071.0)]);
    }
}
