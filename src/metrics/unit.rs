//! Units of time and size. Durations are stored in nanoseconds; each definition shows them in its
//! unit. Samples in another unit than their definition's are converted.

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimeUnit {
    /// 10^-9 seconds.
    Nanoseconds,
    /// 10^-6 seconds.
    Microseconds,
    /// 10^-3 seconds.
    Milliseconds,
    /// The base unit.
    Seconds,
}

impl TimeUnit {
    /// Returns the unit of this name or abbreviation, as in the field `unit` of `metrics.yaml`.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "Nanoseconds" | "nanoseconds" | "ns" => Self::Nanoseconds,
            "Microseconds" | "microseconds" | "us" | "µs" => Self::Microseconds,
            "Milliseconds" | "milliseconds" | "ms" => Self::Milliseconds,
            "Seconds" | "seconds" | "s" => Self::Seconds,
            _ => return None,
        })
    }

    /// Returns its name in `metrics.yaml`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Nanoseconds => "Nanoseconds",
            Self::Microseconds => "Microseconds",
            Self::Milliseconds => "Milliseconds",
            Self::Seconds => "Seconds",
        }
    }

    /// Returns its name in UCUM (ucum.org).
    pub(super) fn ucum(self) -> &'static str {
        match self {
            Self::Nanoseconds => "ns",
            Self::Microseconds => "us",
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
        }
    }

    /// Returns the decimal exponent of the unit in seconds.
    fn exponent(self) -> i32 {
        match self {
            Self::Nanoseconds => -9,
            Self::Microseconds => -6,
            Self::Milliseconds => -3,
            Self::Seconds => 0,
        }
    }

    /// Returns the power of ten by which a value in this unit is multiplied to convert it to the
    /// other unit.
    pub(super) fn digits_to(self, other: Self) -> i32 {
        self.exponent() - other.exponent()
    }

    /// Converts nanoseconds to this unit: the nearest f64.
    pub(super) fn of_ns(self, ns: u64) -> f64 {
        let ns_per_unit = match self {
            Self::Nanoseconds => 1.0,
            Self::Microseconds => 1e3,
            Self::Milliseconds => 1e6,
            Self::Seconds => 1e9,
        };
        ns as f64 / ns_per_unit
    }

    /// Returns the shortest duration above an upper bound in this unit, in nanoseconds: 0 for a
    /// negative bound, and the maximum for one above all durations.
    pub(super) fn shortest_above(self, bound: f64) -> u64 {
        if bound < 0.0 {
            return 0;
        }
        let largest_within = shifted(bound, self.digits_to(Self::Nanoseconds)) as u64;
        largest_within.saturating_add(1)
    }
}

/// The units of sizes, in powers of 1024 bytes, as the gauges of the host's memory have them.
const SIZES: [(&[&str], i32); 4] = [
    (&["B", "Bytes", "bytes"], 0),
    (&["kB", "KB", "Kilobytes", "kilobytes"], 1),
    (&["MB", "Megabytes", "megabytes"], 2),
    (&["GB", "Gigabytes", "gigabytes"], 3),
];

/// The conversion of values from one unit to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conversion {
    /// The units are the same, or one of them is unknown: values remain as they are.
    #[default]
    None,
    /// Two units of time: the value is multiplied by this power of ten.
    Time(i32),
    /// Two units of size: the value is multiplied by this power of 1024.
    Size(i32),
}

impl Conversion {
    /// Returns the conversion between two units, by their names or abbreviations in `metrics.yaml`.
    pub fn between(from: &str, to: &str) -> Self {
        if from == to {
            return Self::None;
        }
        if let (Some(from), Some(to)) = (TimeUnit::from_name(from), TimeUnit::from_name(to)) {
            return Self::of(Self::Time, from.digits_to(to));
        }
        let power = |name: &str| {
            SIZES.iter().find(|(names, _)| names.contains(&name)).map(|(_, power)| *power)
        };
        match (power(from), power(to)) {
            (Some(from), Some(to)) => Self::of(Self::Size, from - to),
            _ => Self::None,
        }
    }

    fn of(unit: fn(i32) -> Self, power: i32) -> Self {
        if power == 0 { Self::None } else { unit(power) }
    }

    /// Converts a value.
    pub fn apply(self, value: f64) -> f64 {
        match self {
            Self::None => value,
            Self::Time(digits) => shifted(value, digits),
            Self::Size(power) => value * 1024_f64.powi(power),
        }
    }
}

/// Returns `value` multiplied by 10^`digits`. Moves the decimal point of the shortest decimal
/// number that denotes the value: 0.00051 becomes 510, where a
/// multiplication of floats yields 510.00000000000006.
pub(super) fn shifted(value: f64, digits: i32) -> f64 {
    if digits == 0 || !value.is_finite() {
        return value;
    }
    let text = format!("{value:e}");
    let moved = text.split_once('e').and_then(|(mantissa, exponent)| {
        let exponent: i32 = exponent.parse().ok()?;
        format!("{mantissa}e{}", exponent + digits).parse().ok()
    });
    moved.unwrap_or(value)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn moving_the_decimal_point_is_exact() {
        for (value, digits, expected) in [
            (0.00005, 6, 50.0),
            (0.0002, 6, 200.0),
            (0.000_005, 9, 5000.0),
            (2.0, 6, 2e6),
            (100.999, -6, 0.000_100_999),
            (0.3, 3, 300.0),
            (1.1, 0, 1.1),
            (0.0, 6, 0.0),
            (-0.5, 3, -500.0),
            (f64::INFINITY, 3, f64::INFINITY),
        ] {
            assert_eq!(shifted(value, digits), expected, "{value} by {digits}");
        }
        assert!(shifted(f64::NAN, 3).is_nan());
        // A product of floats is not exact.
        assert_ne!(0.00051 * 1e6, 510.0);
        assert_eq!(shifted(0.00051, 6), 510.0);
    }

    #[test]
    fn bounds_include_whole_nanoseconds() {
        for (unit, bound, ns) in [
            (TimeUnit::Seconds, 0.00005, 50_000),
            (TimeUnit::Seconds, 0.000_005, 5_000),
            (TimeUnit::Seconds, 10.0, 10_000_000_000),
            (TimeUnit::Milliseconds, 100.0, 100_000_000),
            (TimeUnit::Microseconds, 200.5, 200_500),
            (TimeUnit::Microseconds, 0.0015, 1),
            (TimeUnit::Nanoseconds, 7.0, 7),
            (TimeUnit::Seconds, -0.0, 0),
        ] {
            assert_eq!(unit.shortest_above(bound), ns + 1, "{bound} {unit:?}");
        }
        assert_eq!([-1.0, -1e-12].map(|bound| TimeUnit::Seconds.shortest_above(bound)), [0, 0]);
        assert_eq!(
            [1e30, f64::INFINITY].map(|bound| TimeUnit::Seconds.shortest_above(bound)),
            [u64::MAX; 2]
        );
    }

    #[test]
    fn values_are_converted_if_both_units_are_known() {
        for (from, to, value, expected) in [
            ("s", "ms", 0.5, 500.0),
            ("ms", "Seconds", 320.0, 0.32),
            ("Milliseconds", "ms", 7.0, 7.0),
            ("MB", "Kilobytes", 1.5, 1536.0),
            ("B", "GB", f64::from(1 << 30), 1.0),
            ("Bytes", "B", 9.0, 9.0),
            ("s", "MB", 2.0, 2.0),
            ("ms", "Ticks", 2.0, 2.0),
            ("", "ms", 2.0, 2.0),
            ("Count", "Count", 2.0, 2.0),
        ] {
            assert_eq!(
                Conversion::between(from, to).apply(value),
                expected,
                "{value} {from} in {to}"
            );
        }
        assert_eq!(Conversion::between("Bytes", "B"), Conversion::None);
        assert!(Conversion::between("s", "ms").apply(f64::NAN).is_nan());
    }

    #[test]
    fn units_have_names() {
        for (name, unit) in [
            ("us", TimeUnit::Microseconds),
            ("Seconds", TimeUnit::Seconds),
            ("ms", TimeUnit::Milliseconds),
        ] {
            assert_eq!(TimeUnit::from_name(name), Some(unit));
        }
        for unit in ["ns", "us", "ms", "s"] {
            assert_eq!(TimeUnit::from_name(unit).unwrap().ucum(), unit);
        }
        assert_eq!((TimeUnit::from_name("Count"), TimeUnit::from_name("")), (None, None));
        assert_eq!(TimeUnit::Seconds.digits_to(TimeUnit::Microseconds), 6);
        assert_eq!(TimeUnit::Milliseconds.digits_to(TimeUnit::Seconds), -3);
    }

    proptest! {
        /// Within 11 days, a duration in any unit denotes its nanoseconds exactly, and as a bound
        /// it includes them.
        #[test]
        fn durations_convert_exactly(ns in 0..1_000_000_000_000_000_u64) {
            for unit in [TimeUnit::Nanoseconds, TimeUnit::Microseconds, TimeUnit::Milliseconds, TimeUnit::Seconds] {
                let value = unit.of_ns(ns);
                prop_assert_eq!(unit.shortest_above(value), ns + 1);
                for other in [TimeUnit::Microseconds, TimeUnit::Seconds] {
                    prop_assert_eq!(shifted(value, unit.digits_to(other)), other.of_ns(ns));
                }
            }
        }
    }
}
