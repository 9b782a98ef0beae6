//! Formats numbers as Java does: `Double.toString` since JDK 19 (the shortest decimal that rounds
//! to the number).

use std::fmt::Write;

/// Numbers from here to [`SCIENTIFIC_FROM`] are written without an exponent.
const PLAIN_FROM: f64 = 1e-3;
const SCIENTIFIC_FROM: f64 = 1e7;

/// Appends a number.
pub fn push_double(out: &mut String, value: f64) {
    if value.is_nan() {
        return out.push_str("NaN");
    }
    if value.is_sign_negative() {
        out.push('-');
    }
    let value = value.abs();
    if value.is_infinite() {
        return out.push_str("Infinity");
    }
    // Writing into a String cannot fail.
    let _ = if value != 0.0 && !(PLAIN_FROM..SCIENTIFIC_FROM).contains(&value) {
        push_scientific(out, value)
    } else if value == value.trunc() {
        write!(out, "{}.0", value as u32)
    } else {
        write!(out, "{value}")
    };
}

/// Formats as `D.DDDEN` with at least one digit after the point. Where one digit would identify the
/// number, Java uses the nearest number of two digits.
fn push_scientific(out: &mut String, value: f64) -> std::fmt::Result {
    let start = out.len();
    write!(out, "{value:e}")?;
    let e = out.get(start..).and_then(|text| text.find('e')).map_or(out.len(), |at| start + at);
    if e > start + 1 {
        out.replace_range(e..=e, "E");
        return Ok(());
    }
    let two = format!("{value:.1e}");
    if two.parse() == Ok(value) {
        out.truncate(start);
        out.push_str(&two.replace('e', "E"));
    } else {
        out.replace_range(e..=e, ".0E");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn java(value: f64) -> String {
        let mut out = String::new();
        push_double(&mut out, value);
        out
    }

    #[test]
    fn numbers_are_formatted_as_in_java() {
        for (value, expected) in [
            (1.0, "1.0"),
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (-2.5, "-2.5"),
            (100.0, "100.0"),
            (132.249, "132.249"),
            (1_430_607.325, "1430607.325"),
            (23_089.941_406_25, "23089.94140625"),
            (0.1, "0.1"),
            (0.1 + 0.2, "0.30000000000000004"),
            (0.001, "0.001"),
            (0.000_999, "9.99E-4"),
            (0.000_012_34, "1.234E-5"),
            (9_999_999.0, "9999999.0"),
            (9_999_999.999, "9999999.999"),
            (1e7, "1.0E7"),
            (-1e7, "-1.0E7"),
            (12_345_678.9, "1.23456789E7"),
            (1e21, "1.0E21"),
            (1e23, "1.0E23"),
            (2e23, "2.0E23"),
            (1e-7, "1.0E-7"),
            (123e-10, "1.23E-8"),
            (f64::MAX, "1.7976931348623157E308"),
            (f64::MIN_POSITIVE, "2.2250738585072014E-308"),
            // One digit (5E-324) would identify it; this is the nearest number of two digits.
            (f64::from_bits(1), "4.9E-324"),
            (f64::from_bits(2), "9.9E-324"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "Infinity"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(java(value), expected);
        }
    }

    proptest! {
        #[test]
        fn written_numbers_parse_to_the_same_value(bits: u64, whole in -100_000_000i32..100_000_000) {
            for value in [f64::from_bits(bits), f64::from(whole), f64::from(whole) / 1000.0] {
                let read: f64 = java(value).parse().unwrap();
                prop_assert!(read.to_bits() == value.to_bits() || (read.is_nan() && value.is_nan()), "{value:?}");
            }
        }
    }
}
