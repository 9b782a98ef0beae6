//! The buckets of histograms whose definition has none, by unit.

use crate::kind::Kind;
use crate::unit::{TimeUnit, shifted};

/// Upper bounds of a histogram of durations in seconds: 50 us to 10 s.
const DURATIONS: [f64; 17] = [
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0, 10.0,
];

/// Upper bounds of a histogram in seconds or in an unknown unit: the default bounds of Prometheus'
/// Java client.
pub(super) const SECOND_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];

/// Upper bounds of a histogram in milliseconds: 0.25 ms to 10 s.
pub(crate) const MILLISECOND_BUCKETS: [f64; 15] = [
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0,
    10_000.0,
];

/// Upper bounds of a histogram in percent, finer at both ends.
const PERCENT_BUCKETS: [f64; 14] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 100.0];

/// Upper bounds of a histogram in bytes: 256 B to 1 GiB, in powers of 4.
const BYTE_BUCKETS: [f64; 12] = {
    let mut bounds = [256.0; 12];
    let mut at = 1;
    while at < bounds.len() {
        bounds[at] = bounds[at - 1] * 4.0;
        at += 1;
    }
    bounds
};

/// Returns the default buckets of a metric for its unit; empty unless it is a histogram.
pub(super) fn default_buckets(kind: Kind, unit: &str) -> Vec<f64> {
    if kind != Kind::Histogram {
        return Vec::new();
    }
    let bounds: &[f64] = match (TimeUnit::from_name(unit), unit) {
        (Some(unit @ TimeUnit::Microseconds), _) => {
            let digits = TimeUnit::Seconds.digits_to(unit);
            return DURATIONS.iter().map(|bound| shifted(*bound, digits)).collect();
        }
        (Some(TimeUnit::Milliseconds), _) => &MILLISECOND_BUCKETS,
        (_, "%" | "Percent" | "percent") => &PERCENT_BUCKETS,
        (_, "B" | "Bytes" | "bytes") => &BYTE_BUCKETS,
        _ => &SECOND_BUCKETS,
    };
    bounds.to_vec()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn default_buckets_depend_on_the_unit() {
        let buckets = |unit: &str| default_buckets(Kind::Histogram, unit);
        assert_eq!(buckets("Milliseconds"), MILLISECOND_BUCKETS);
        assert_eq!(
            (buckets("Seconds"), buckets("Items")),
            (SECOND_BUCKETS.to_vec(), SECOND_BUCKETS.to_vec())
        );
        assert_eq!(buckets("Microseconds").first(), Some(&50.0));
        assert_eq!(buckets("Percent").last(), Some(&100.0));
        assert_eq!(
            (buckets("B").first(), buckets("Bytes").last()),
            (Some(&256.0), Some(&f64::from(1 << 30)))
        );
        for unit in ["us", "ms", "%", "B", "s"] {
            assert!(buckets(unit).is_sorted_by(|a, b| a < b), "{unit}");
        }
        assert!(default_buckets(Kind::Gauge, "ms").is_empty());
    }
}
