//! Numbers as text: the shortest digits that denote the value, in Go's notation.

use std::fmt::Write;

use super::Format;
use crate::reading::Number;

/// Values from here on are written with an exponent, as Triton does; below, integers have all their
/// digits.
const LARGE_VALUE: f64 = 1e16;

/// The same for the values of the labels `le` and `quantile` in OpenMetrics, whose canonical
/// numbers have the form of Go's `%g`.
const LARGE_CANONICAL: f64 = 1e6;

/// Values below it, except 0, are written with an exponent.
const SMALL: f64 = 1e-4;

/// Writes a value; integers are exact.
pub(super) fn push_number(text: &mut String, number: Number) {
    // Writing into a String cannot fail.
    let _ = match number {
        Number::Whole(value) => write!(text, "{value}"),
        Number::Signed(value) => write!(text, "{value}"),
        Number::Float(value) => {
            push_value(text, value);
            Ok(())
        }
    };
}

/// Writes a value.
pub(super) fn push_value(text: &mut String, value: f64) {
    push(text, value, LARGE_VALUE);
}

/// Writes the value of a label `le` or `quantile`: `1` in the classic format, the canonical `1.0`
/// in OpenMetrics.
pub(super) fn push_label(text: &mut String, value: f64, format: Format) {
    if format == Format::Text {
        return push(text, value, LARGE_VALUE);
    }
    let start = text.len();
    push(text, value, LARGE_CANONICAL);
    let plain = text.get(start..).is_some_and(|written| !written.contains(['.', 'e']));
    if plain && value.is_finite() {
        text.push_str(".0");
    }
}

/// Writes a number; those from `large` on have an exponent.
fn push(text: &mut String, value: f64, large: f64) {
    let size = value.abs();
    if value.is_nan() {
        text.push_str("NaN");
    } else if value.is_infinite() {
        text.push_str(if value > 0.0 { "+Inf" } else { "-Inf" });
    } else if size == 0.0 || (SMALL..large).contains(&size) {
        let _ = write!(text, "{value}");
    } else {
        push_with_exponent(text, value);
    }
}

/// Writes a finite number with an exponent of at least two digits: `5e-05`.
fn push_with_exponent(text: &mut String, value: f64) {
    let written = format!("{value:e}");
    let (mantissa, exponent) = written.split_once('e').unwrap_or((&written, "0"));
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    let _ = write!(text, "{mantissa}e{sign}{digits:0>2}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(push: impl FnOnce(&mut String)) -> String {
        let mut text = String::new();
        push(&mut text);
        text
    }

    #[test]
    fn values_are_written_as_triton_and_go_do() {
        for (value, expected) in [
            (0.0, "0"),
            (1.0, "1"),
            (-4.0, "-4"),
            (2.5, "2.5"),
            (100.999, "100.999"),
            (0.0001, "0.0001"),
            (0.00005, "5e-05"),
            (0.000_012_5, "1.25e-05"),
            (-1e-10, "-1e-10"),
            (1e6, "1000000"),
            (1_234_567.0, "1234567"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (f64::INFINITY, "+Inf"),
            (f64::NEG_INFINITY, "-Inf"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(written(|text| push_value(text, value)), expected);
        }
        assert_eq!(
            written(|text| push_number(text, Number::Whole(u64::MAX))),
            "18446744073709551615"
        );
        assert_eq!(written(|text| push_number(text, Number::Signed(-7))), "-7");
        assert_eq!(written(|text| push_number(text, Number::Float(1.25))), "1.25");
    }

    /// The examples of OpenMetrics 1.0, "Considerations: Canonical Numbers".
    #[test]
    fn labels_of_openmetrics_are_canonical_numbers() {
        for (value, text, canonical) in [
            (0.0, "0", "0.0"),
            (0.001, "0.001", "0.001"),
            (0.99, "0.99", "0.99"),
            (1.0, "1", "1.0"),
            (10.0, "10", "10.0"),
            (1e-10, "1e-10", "1e-10"),
            (1e-5, "1e-05", "1e-05"),
            (1e-4, "0.0001", "0.0001"),
            (1e5, "100000", "100000.0"),
            (1e6, "1000000", "1e+06"),
            (1_048_576.0, "1048576", "1.048576e+06"),
            (1e10, "10000000000", "1e+10"),
            (f64::INFINITY, "+Inf", "+Inf"),
        ] {
            assert_eq!(
                [Format::Text, Format::OpenMetrics]
                    .map(|of| written(|text| push_label(text, value, of))),
                [text, canonical]
            );
        }
    }
}
