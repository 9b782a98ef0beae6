//! The state of a series that only grows, and its growth between two exports.

use super::points::Span;
use crate::catalog::Kind;
use crate::reading::{Exemplar, Histogram, Native, Number, Reading};

/// The state of a series at one export.
#[derive(Debug)]
pub(super) enum State {
    /// A counter.
    Number(Number),
    /// The counts and the sum of a distribution.
    Distribution { counts: Box<[u64]>, sum: f64 },
    /// The same with native buckets.
    Exponential { native: Native, sum: f64 },
}

impl State {
    /// Returns the state of a series; `None` for gauges, which have none.
    pub(super) fn of(kind: Kind, reading: &Reading) -> Option<Self> {
        match reading {
            Reading::Number(_) if kind == Kind::Gauge => None,
            Reading::Number(number) => Some(Self::Number(*number)),
            Reading::Histogram(Histogram { sum, native: Some(native), .. }) => {
                Some(Self::Exponential { native: native.clone(), sum: *sum })
            }
            Reading::Histogram(Histogram { sum, buckets, .. }) => Some(Self::Distribution {
                counts: buckets.iter().map(|(_, count)| *count).collect(),
                sum: *sum,
            }),
            Reading::Summary(summary) => {
                Some(Self::Distribution { counts: [summary.count].into(), sum: summary.sum })
            }
        }
    }

    /// Returns whether `later` can be a later state of the same series.
    pub(super) fn precedes(&self, later: &Self) -> bool {
        match (self, later) {
            (Self::Number(Number::Whole(old)), Self::Number(Number::Whole(new))) => old <= new,
            (Self::Number(old), Self::Number(new)) => old.as_f64() <= new.as_f64(),
            (Self::Distribution { counts: old, .. }, Self::Distribution { counts: new, .. }) => {
                old.len() == new.len() && old.iter().zip(new).all(|(old, new)| old <= new)
            }
            (Self::Exponential { native: old, .. }, Self::Exponential { native: new, .. }) => {
                old.precedes(new)
            }
            _ => false,
        }
    }

    /// Returns the growth from this state to a later reading, with the exemplars of that time.
    pub(super) fn growth(&self, reading: Reading, span: Span) -> Reading {
        match (self, reading) {
            (Self::Number(Number::Whole(old)), Reading::Number(Number::Whole(new))) => {
                Reading::Number(Number::Whole(new.saturating_sub(*old)))
            }
            (Self::Number(old), Reading::Number(new)) => {
                Reading::Number(Number::Float(new.as_f64() - old.as_f64()))
            }
            (Self::Distribution { counts, sum }, Reading::Histogram(mut histogram)) => {
                histogram.sum -= sum;
                for ((_, new), old) in histogram.buckets.iter_mut().zip(counts) {
                    *new = new.saturating_sub(*old);
                }
                histogram.exemplars.retain(|_, exemplar| span.contains(exemplar));
                Reading::Histogram(histogram)
            }
            (Self::Exponential { native, sum }, Reading::Histogram(mut histogram)) => {
                histogram.sum -= sum;
                histogram.native = histogram.native.map(|new| native.growth(new));
                histogram.exemplars.retain(|_, exemplar| span.contains(exemplar));
                Reading::Histogram(histogram)
            }
            (_, reading) => reading,
        }
    }
}

impl Span {
    /// Returns whether an exemplar is not older. The store has times in milliseconds.
    fn contains(&self, exemplar: &Exemplar) -> bool {
        exemplar.at_ms >= self.start_ns / 1_000_000
    }
}

impl Native {
    /// Returns whether `later` can be a later reading of the same observations, whose schema may be
    /// lower.
    fn precedes(&self, later: &Self) -> bool {
        let has_all = |old: &[(i32, u64)], new: &[(i32, u64)]| {
            old.iter().all(|(at, count)| *count <= count_at(new, *at))
        };
        self.zero_threshold == later.zero_threshold
            && self.zero_count <= later.zero_count
            && self.lowered_to(later.schema).is_some_and(|old| {
                has_all(&old.positive, &later.positive) && has_all(&old.negative, &later.negative)
            })
    }

    /// Returns the observations between this reading and a later one.
    fn growth(&self, mut later: Self) -> Self {
        let Some(old) = self.lowered_to(later.schema) else { return later };
        later.zero_count = later.zero_count.saturating_sub(old.zero_count);
        for (new, old) in
            [(&mut later.positive, &old.positive), (&mut later.negative, &old.negative)]
        {
            new.iter_mut()
                .for_each(|(index, count)| *count = count.saturating_sub(count_at(old, *index)));
            new.retain(|(_, count)| *count > 0);
        }
        later
    }

    /// Returns the same observations at a schema; `None` if this schema is lower.
    fn lowered_to(&self, schema: i32) -> Option<Self> {
        let mut lowered = (self.schema >= schema).then(|| self.clone())?;
        while lowered.schema > schema {
            lowered.lower();
        }
        Some(lowered)
    }
}

/// Returns the count of the bucket with this index.
fn count_at(buckets: &[(i32, u64)], index: i32) -> u64 {
    let found = buckets.binary_search_by_key(&index, |(index, _)| *index).ok();
    found.and_then(|at| buckets.get(at)).map_or(0, |(_, count)| *count)
}
