//! Percentiles and spreads.

use std::fmt;

/// A median with its range: on shared machines, a number without its spread is meaningless.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Computes the spread of some numbers; `None` without numbers.
    pub(crate) fn of(numbers: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut numbers: Vec<f64> = numbers.into_iter().collect();
        numbers.sort_by(f64::total_cmp);
        let (min, max) = (*numbers.first()?, *numbers.last()?);
        let middle = numbers.len() / 2;
        let upper = *numbers.get(middle)?;
        let lower = if numbers.len().is_multiple_of(2) { *numbers.get(middle - 1)? } else { upper };
        Some(Self { median: f64::midpoint(lower, upper), min, max })
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{} ({}..{})", brief(self.median), brief(self.min), brief(self.max));
        formatter.pad(&text)
    }
}

/// Formats a number with about three significant digits.
fn brief(number: f64) -> String {
    match number {
        number if number >= 99.95 => format!("{number:.0}"),
        number if number >= 9.995 => format!("{number:.1}"),
        number => format!("{number:.2}"),
    }
}

/// Returns the smallest of the sorted numbers such that at least this share of them is not greater;
/// 0 without numbers.
pub(crate) fn percentile(sorted: &[u64], share: f64) -> u64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn computes_percentiles() {
        let sorted: Vec<u64> = (1..=200).collect();
        let seen = [0.0, 0.5, 0.99, 1.0].map(|share| percentile(&sorted, share));
        assert_eq!(seen, [1, 100, 198, 200]);
        assert_eq!(percentile(&[1, 2, 3], 0.5), 2);
        assert_eq!(percentile(&[], 0.5), 0);
    }

    #[test]
    fn computes_and_formats_spreads() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([0.5, 12.25, 1234.5]).unwrap().to_string(), "12.2 (0.50..1234)");
    }
}
