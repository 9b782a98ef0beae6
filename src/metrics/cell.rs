//! The value of one series.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::atomic::add;
use super::catalog::{Kind, MetricSpec};
use super::native::Native;
use super::reading::{self, Details, Number, Reading};
use super::sample_error::SampleError;
use super::summary::{CoarseClock, Summary};
use super::transaction::Transactions;

/// The value of one series. Any number of threads may change it without a lock.
#[derive(Debug)]
pub struct Cell {
    value: CellValue,
    transactions: Arc<Transactions>,
    /// The number of loaded models whose workers write it; see `ModelSeries::add_owned`.
    pub(super) owners: AtomicUsize,
}

#[derive(Debug)]
enum CellValue {
    /// The bits of an f64.
    Counter(AtomicU64),
    /// The bits of an f64, or [`NO_VALUE`].
    Gauge(AtomicU64),
    Histogram(Histogram),
    Summary(Summary),
}

/// The bits of a gauge that has no value yet: a NaN that [`Cell::add_or_update`] does not store.
const NO_VALUE: u64 = f64::NAN.to_bits() | 1;

/// A distribution: counts of single buckets (not cumulative), one more than bounds.
#[derive(Debug)]
struct Histogram {
    bounds: Vec<f64>,
    buckets: Vec<AtomicU64>,
    sum: AtomicU64,
    /// Whether any observation was negative.
    negative: AtomicBool,
    native: Option<Box<Native>>,
}

impl Histogram {
    /// Records an observation, which must not be NaN, `times` times.
    fn observe(&self, value: f64, times: u32) {
        let at = self.bounds.partition_point(|&bound| bound < value);
        if let Some(bucket) = self.buckets.get(at) {
            bucket.fetch_add(u64::from(times), Ordering::Relaxed);
            add(&self.sum, value * f64::from(times));
        }
        if value < 0.0 {
            self.negative.store(true, Ordering::Relaxed);
        }
        if let Some(native) = &self.native {
            native.observe(value, u64::from(times));
        }
    }
}

impl Cell {
    pub(super) fn new(
        spec: &MetricSpec,
        clock: &Arc<CoarseClock>,
        transactions: Arc<Transactions>,
    ) -> Self {
        let value = match spec.kind {
            Kind::Counter => CellValue::Counter(AtomicU64::new(0)),
            Kind::Gauge if spec.begins_without_value() => {
                CellValue::Gauge(AtomicU64::new(NO_VALUE))
            }
            Kind::Gauge => CellValue::Gauge(AtomicU64::new(0)),
            Kind::Histogram => CellValue::Histogram(Histogram {
                bounds: spec.buckets.clone(),
                buckets: std::iter::repeat_with(AtomicU64::default)
                    .take(spec.buckets.len() + 1)
                    .collect(),
                sum: AtomicU64::new(0),
                negative: AtomicBool::new(false),
                native: spec.native.map(|spec| Box::new(Native::new(spec))),
            }),
            Kind::Summary => CellValue::Summary(Summary::new(&spec.quantiles, clock)),
        };
        Self { value, transactions, owners: AtomicUsize::new(0) }
    }

    /// Records one sample: a counter's increment, a gauge's new value, an observation.
    ///
    /// # Errors
    /// [`SampleError::BadValue`] for a counter's increment that is negative or not finite, and for
    /// an observation of NaN.
    pub fn add_or_update(self: &Arc<Self>, value: f64) -> Result<(), SampleError> {
        match &self.value {
            CellValue::Counter(_) if !(value.is_finite() && value >= 0.0) => {
                return Err(SampleError::BadValue(format!(
                    "invalid increment {value} of a counter: expected a finite number of at least \
                     0"
                )));
            }
            // Alone, a counter needs no transaction: it is one number.
            CellValue::Counter(bits) if !self.transactions.are_postponed_here() => add(bits, value),
            CellValue::Counter(_) => self.transactions.apply(self, move |cell| cell.add(value, 1)),
            CellValue::Gauge(bits) => {
                let value = if value.is_nan() { f64::NAN } else { value };
                bits.store(value.to_bits(), Ordering::Relaxed);
            }
            CellValue::Histogram(_) | CellValue::Summary(_) if value.is_nan() => {
                return Err(SampleError::BadValue(
                    "invalid observation NaN of a histogram or summary".to_owned(),
                ));
            }
            CellValue::Histogram(_) | CellValue::Summary(_) => {
                self.transactions.apply(self, move |cell| cell.add(value, 1));
            }
        }
        Ok(())
    }

    /// Records an observation that was made `times` times (at least 1). Sets a gauge to the value;
    /// fails for a counter.
    ///
    /// # Errors
    /// Returns the errors of [`Cell::add_or_update`].
    pub fn observe(self: &Arc<Self>, value: f64, times: u32) -> Result<(), SampleError> {
        match &self.value {
            CellValue::Histogram(_) | CellValue::Summary(_) if !value.is_nan() => {
                self.transactions.apply(self, move |cell| cell.add(value, times));
            }
            CellValue::Counter(_) => {
                return Err(SampleError::BadValue(
                    "a counter does not accept observations".to_owned(),
                ));
            }
            _ => return self.add_or_update(value),
        }
        Ok(())
    }

    /// Adds a valid sample of a counter, histogram or summary.
    fn add(&self, value: f64, times: u32) {
        match &self.value {
            CellValue::Counter(bits) => add(bits, value * f64::from(times)),
            CellValue::Histogram(histogram) => histogram.observe(value, times),
            CellValue::Summary(summary) => (0..times).for_each(|_| summary.observe(value)),
            CellValue::Gauge(_) => {}
        }
    }

    /// Returns whether it is a gauge that was created before its first value.
    pub(super) fn is_empty(&self) -> bool {
        matches!(&self.value, CellValue::Gauge(bits) if bits.load(Ordering::Relaxed) == NO_VALUE)
    }

    pub(super) fn read(&self, details: Details) -> Reading {
        match &self.value {
            CellValue::Counter(bits) | CellValue::Gauge(bits) => {
                Reading::Number(Number::Float(f64::from_bits(bits.load(Ordering::Relaxed))))
            }
            CellValue::Histogram(histogram) => {
                let native = histogram
                    .native
                    .as_ref()
                    .filter(|_| details.native)
                    .map(|native| native.read());
                let bounds = histogram.bounds.iter().copied().chain([f64::INFINITY]);
                let counts = histogram.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
                let sum = f64::from_bits(histogram.sum.load(Ordering::Relaxed));
                Reading::Histogram(reading::Histogram {
                    sum,
                    buckets: bounds.zip(counts).collect(),
                    negative: histogram.negative.load(Ordering::Relaxed),
                    native,
                    ..Default::default()
                })
            }
            CellValue::Summary(summary) => Reading::Summary(summary.read()),
        }
    }
}
