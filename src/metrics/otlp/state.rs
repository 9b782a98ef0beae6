//! The state of a series that only grows, and its growth between two exports.

use super::points::Span;
use crate::metrics::catalog::Kind;
use crate::metrics::reading::{Histogram, Number, Reading};

/// The state of a series at one export.
#[derive(Debug)]
pub(super) enum State {
    /// A counter.
    Number(Number),
    /// The counts and the sum of a distribution.
    Distribution { counts: Box<[u64]>, sum: f64 },
}

impl State {
    /// Returns the state of a series; `None` for gauges, which have none.
    pub(super) fn of(kind: Kind, reading: &Reading) -> Option<Self> {
        match reading {
            Reading::Number(_) if kind == Kind::Gauge => None,
            Reading::Number(number) => Some(Self::Number(*number)),
            Reading::Histogram(Histogram { sum, buckets, .. }) => {
                Some(Self::Distribution { counts: buckets.iter().map(|(_, count)| *count).collect(), sum: *sum })
            }
            Reading::Summary(summary) => Some(Self::Distribution { counts: [summary.count].into(), sum: summary.sum }),
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
            _ => false,
        }
    }

    /// Returns the growth from this state to a later reading, with the exemplars of that time.
    pub(super) fn growth(&self, reading: Reading, span: Span) -> Reading {
        match (self, reading) {
            (Self::Number(Number::Whole(old)), Reading::Number(Number::Whole(new))) => {
                Reading::Number(Number::Whole(new.saturating_sub(*old)))
            }
            (Self::Number(old), Reading::Number(new)) => Reading::Number(Number::Float(new.as_f64() - old.as_f64())),
            (Self::Distribution { counts, sum }, Reading::Histogram(mut histogram)) => {
                histogram.sum -= sum;
                for ((_, new), old) in histogram.buckets.iter_mut().zip(counts) {
                    *new = new.saturating_sub(*old);
                }
                // The store has times in milliseconds.
                histogram.exemplars.retain(|_, exemplar| exemplar.at_ms >= span.start_ns / 1_000_000);
                Reading::Histogram(histogram)
            }
            (_, reading) => reading,
        }
    }
}
