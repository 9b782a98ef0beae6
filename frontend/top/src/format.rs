//! Numbers as text for people, in at most eight characters.

/// The text for a missing value.
pub(crate) const NONE: &str = "-";

/// A unit: values from `from` on are divided by `factor`.
struct Step {
    from: f64,
    factor: f64,
    unit: &'static str,
}

const fn step(from: f64, factor: f64, unit: &'static str) -> Step {
    Step { from, factor, unit }
}

fn with(steps: &[Step], value: Option<f64>) -> String {
    let Some(value) = value.filter(|value| !value.is_nan()) else { return NONE.to_owned() };
    let step = steps.iter().find(|step| value.abs() >= step.from).or(steps.last());
    step.map_or_else(
        || digits(value),
        |step| format!("{}{}", digits(value / step.factor), step.unit),
    )
}

/// Formats with three significant digits, without trailing zeros.
fn digits(value: f64) -> String {
    let places = match value.abs() {
        size if size >= 100.0 => return format!("{value:.0}"),
        size if size >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{value:.places$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

pub(crate) fn number(value: Option<f64>) -> String {
    with(
        &[step(1e9, 1e9, "G"), step(1e6, 1e6, "M"), step(1e4, 1e3, "k"), step(0.0, 1.0, "")],
        value,
    )
}

pub(crate) fn rate(value: Option<f64>) -> String {
    value.map_or_else(|| NONE.to_owned(), |value| format!("{}/s", number(Some(value))))
}

pub(crate) fn seconds(value: Option<f64>) -> String {
    if value == Some(0.0) {
        return "0 s".to_owned();
    }
    let steps = [
        step(172_800.0, 86_400.0, " d"),
        step(7200.0, 3600.0, " h"),
        step(120.0, 60.0, " min"),
        step(1.0, 1.0, " s"),
        step(1e-3, 1e-3, " ms"),
        step(0.0, 1e-6, " us"),
    ];
    with(&steps, value)
}

pub(crate) fn bytes(value: Option<f64>) -> String {
    const KIB: f64 = 1024.0;
    const MIB: f64 = 1024.0 * KIB;
    const GIB: f64 = 1024.0 * MIB;
    const TIB: f64 = 1024.0 * GIB;
    let steps = [
        step(TIB, TIB, " TiB"),
        step(GIB, GIB, " GiB"),
        step(MIB, MIB, " MiB"),
        step(KIB, KIB, " KiB"),
        step(0.0, 1.0, " B"),
    ];
    with(&steps, value)
}

pub(crate) fn percent(value: Option<f64>) -> String {
    value
        .filter(|value| !value.is_nan())
        .map_or_else(|| NONE.to_owned(), |value| format!("{} %", digits(100.0 * value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_three_digits_and_a_unit() {
        for (text, expected) in [
            (number(Some(0.0)), "0"),
            (number(Some(1234.0)), "1234"),
            (number(Some(12_345.0)), "12.3k"),
            (number(Some(2.5e6)), "2.5M"),
            (number(None), "-"),
            (rate(Some(9.999)), "10/s"),
            (seconds(Some(0.0)), "0 s"),
            (seconds(Some(0.000_25)), "250 us"),
            (seconds(Some(0.0123)), "12.3 ms"),
            (seconds(Some(3.0)), "3 s"),
            (seconds(Some(600.0)), "10 min"),
            (seconds(Some(f64::NAN)), "-"),
            (bytes(Some(1536.0)), "1.5 KiB"),
            (bytes(Some(5.0)), "5 B"),
            (percent(Some(0.1234)), "12.3 %"),
            (percent(Some(-9.0)), "-900 %"),
            (percent(None), "-"),
        ] {
            assert_eq!(text, expected);
        }
    }
}
