//! The value of a series at one moment, as plain data for every view.

use std::collections::BTreeMap;

use pharos_base::id::TraceId;

use super::unit::shifted;

/// A number; integers are exact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A count.
    Whole(u64),
    /// A level.
    Signed(i64),
    /// Anything else.
    Float(f64),
}

impl Number {
    /// The nearest f64.
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Whole(value) => value as f64,
            Self::Signed(value) => value as f64,
            Self::Float(value) => value,
        }
    }
}

/// A distribution by buckets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// The sum of all observations.
    pub sum: f64,
    /// The upper bound and the count of each bucket (not cumulative); the last bound is infinite.
    pub buckets: Vec<(f64, u64)>,
    /// Whether any observation was negative, so that the sum may fall.
    pub negative: bool,
    /// The latest traced observation of each bucket, by the bucket's position.
    pub exemplars: BTreeMap<usize, Exemplar>,
    /// The same observations in native buckets, if the metric has them and the view asks for them.
    /// Read before `buckets`, so it contains none of the observations that were recorded
    /// meanwhile.
    pub native: Option<Native>,
}

/// A distribution by exponential buckets: the bucket `index` has the upper bound 2^(index /
/// 2^schema).
#[derive(Clone, Debug, PartialEq)]
pub struct Native {
    /// The resolution, from -4 to 8.
    pub schema: i32,
    /// The largest absolute value that counts as zero.
    pub zero_threshold: f64,
    /// The observations that count as zero.
    pub zero_count: u64,
    /// Index and count of each bucket that is not empty, by index (not cumulative).
    pub positive: Vec<(i32, u64)>,
    /// The same for the absolute values of negative observations.
    pub negative: Vec<(i32, u64)>,
}

impl Native {
    /// The number of observations.
    pub fn count(&self) -> u64 {
        self.zero_count
            + self.positive.iter().chain(&self.negative).map(|(_, count)| count).sum::<u64>()
    }
}

/// The parts of readings that not every view needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Details {
    /// Exemplars, whose reading takes a lock.
    pub exemplars: bool,
    /// Native buckets.
    pub native: bool,
}

impl Histogram {
    /// The number of observations.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// Returns whether the sum only grows: no observation was negative, and no bucket expects one.
    pub(super) fn has_growing_sum(&self) -> bool {
        let expects_negative = self.buckets.first().is_some_and(|(bound, _)| *bound < 0.0);
        !self.negative && !expects_negative && !self.sum.is_nan()
    }
}

/// A distribution by quantiles.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The sum of all observations.
    pub sum: f64,
    /// The number of observations.
    pub count: u64,
    /// Quantiles and their values; NaN without observations in the window.
    pub quantiles: Vec<(f64, f64)>,
}

/// An observation with the trace that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Exemplar {
    /// The trace.
    pub trace: TraceId,
    /// The observation, in the metric's unit.
    pub value: f64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
}

/// The value of one series at one moment.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    /// A counter or a gauge.
    Number(Number),
    /// A histogram.
    Histogram(Histogram),
    /// A summary.
    Summary(Summary),
}

impl Reading {
    /// Returns whether a counter or a distribution with this value has had no event.
    pub(super) fn is_idle(&self) -> bool {
        match self {
            Self::Number(number) => number.as_f64() == 0.0,
            Self::Histogram(histogram) => histogram.count() == 0,
            Self::Summary(summary) => summary.count == 0,
        }
    }

    /// Returns the reading with every value multiplied by 10^`digits`, which is exact. Counts of
    /// observations stay.
    pub(super) fn shifted(self, digits: i32) -> Self {
        match self {
            Self::Number(number) => Self::Number(Number::Float(shifted(number.as_f64(), digits))),
            // Native buckets have powers of two as bounds, which no power of ten shifts exactly.
            Self::Histogram(Histogram { sum, mut buckets, negative, mut exemplars, native: _ }) => {
                buckets.iter_mut().for_each(|(bound, _)| *bound = shifted(*bound, digits));
                exemplars
                    .values_mut()
                    .for_each(|exemplar| exemplar.value = shifted(exemplar.value, digits));
                Self::Histogram(Histogram {
                    sum: shifted(sum, digits),
                    buckets,
                    negative,
                    exemplars,
                    native: None,
                })
            }
            Self::Summary(Summary { sum, count, mut quantiles }) => {
                quantiles.iter_mut().for_each(|(_, value)| *value = shifted(*value, digits));
                Self::Summary(Summary { sum: shifted(sum, digits), count, quantiles })
            }
        }
    }
}
