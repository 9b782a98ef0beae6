//! Shared by the parsers of text lines ([`worker_lines`](super::worker_lines), [`statsd`](super::statsd)): errors,
//! valid names, default buckets, and a limit on log lines.

use std::borrow::Cow;
use std::fmt::Display;

use super::builtin::DURATIONS;
use super::kind::Kind;
use super::unit::{TimeUnit, shifted};
use crate::timeline::Instant;

/// The number of characters of a refused line that are shown at most.
const SHOWN: usize = 120;

/// Upper bounds of a histogram in seconds or in an unknown unit: those of Prometheus' Java client.
pub const SECOND_BUCKETS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];

/// Upper bounds of a histogram in milliseconds: 0.25 ms to 10 s.
pub const MILLISECOND_BUCKETS: [f64; 15] =
    [0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0];

/// Upper bounds of a histogram in percent, finer at both ends.
const PERCENT_BUCKETS: [f64; 14] = [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 100.0];

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

/// The reason why a line does not match the grammar. Does not contain the line itself, which the caller logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

/// Returns the default buckets of a metric for its unit; empty unless it is a histogram.
pub fn default_buckets(kind: Kind, unit: &str) -> Vec<f64> {
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

/// Makes a name valid for Prometheus: replaces every character except ASCII letters, digits and `_` by `_`, and
/// prepends `_` to a leading digit. Applies to names of metrics and labels. Borrows the name if nothing changes.
pub fn prometheus_name(name: &str) -> Cow<'_, str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let leading_digit = name.starts_with(|c: char| c.is_ascii_digit());
    if !leading_digit && name.chars().all(fits) {
        return Cow::Borrowed(name);
    }
    let front = leading_digit.then_some('_');
    Cow::Owned(front.into_iter().chain(name.chars().map(|c| if fits(c) { c } else { '_' })).collect())
}

/// Prepares a line from outside for the log: cuts it after 120 characters and escapes control characters.
pub fn shortened(line: &[u8]) -> String {
    let cut = line.get(..SHOWN * 4).unwrap_or(line);
    let text = String::from_utf8_lossy(cut);
    let mut shown: String = text.chars().take(SHOWN).flat_map(escaped).collect();
    if cut.len() < line.len() || text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    shown
}

fn escaped(c: char) -> impl Iterator<Item = char> {
    let escape = c.is_control().then(|| c.escape_default());
    let plain = escape.is_none().then_some(c);
    escape.into_iter().flatten().chain(plain)
}

/// Lets one event a second pass, and counts the suppressed ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throttle {
    last: Option<Instant>,
    held: u64,
}

impl Throttle {
    const SECOND_NS: u64 = 1_000_000_000;

    /// Returns the number of events suppressed since the last one that passed, if this event passes.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.ns_since(last) < Self::SECOND_NS) {
            self.held += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held))
    }
}

/// The metric samples that were lost since the last log line.
#[derive(Debug, Default)]
pub struct LostSamples {
    count: u64,
    /// The first distinct reasons.
    reasons: Vec<String>,
    throttle: Throttle,
}

impl LostSamples {
    /// The number of reasons that a line names.
    pub const REASONS: usize = 8;

    /// Adds lost samples, and reasons that this or later samples are lost for. Returns what to log, at most once a second: the number
    /// of samples and the reasons.
    pub fn add(
        &mut self,
        count: u64,
        reasons: impl IntoIterator<Item: Display>,
        now: Instant,
    ) -> Option<(u64, String)> {
        self.count = self.count.saturating_add(count);
        for reason in reasons {
            if self.reasons.len() >= Self::REASONS {
                break;
            }
            let reason = reason.to_string();
            if !self.reasons.contains(&reason) {
                self.reasons.push(reason);
            }
        }
        if self.count == 0 || self.reasons.is_empty() || self.throttle.admit(now).is_none() {
            return None;
        }
        let reasons = std::mem::take(&mut self.reasons);
        Some((std::mem::take(&mut self.count), reasons.join("; ")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_reasons_since_the_last_line() {
        let mut lost = LostSamples::default();
        let second = |second: u64| Instant(second * 1_000_000_000);
        let none: [&str; 0] = [];
        assert_eq!(lost.add(1, none, second(1)), None, "without a reason");
        assert_eq!(lost.add(1, ["a"], second(1)), Some((2, "a".to_owned())));
        assert_eq!(lost.add(1, ["b"], second(1)), None, "too soon");
        assert_eq!(lost.add(1, ["a", "b"], second(1)), None);
        assert_eq!(lost.add(0, none, second(2)), Some((2, "b; a".to_owned())));
        assert_eq!(lost.add(0, ["a"], second(3)), None, "no sample was lost");
        let many: Vec<String> = (0..20).map(|number| number.to_string()).collect();
        let (count, reasons) = lost.add(20, many, second(3)).unwrap();
        assert_eq!((count, reasons.as_str()), (20, "a; 0; 1; 2; 3; 4; 5; 6"));
    }

    #[test]
    fn invalid_characters_of_names_are_replaced() {
        for (name, expected) in [
            ("plain_1", "plain_1"),
            ("web.requests", "web_requests"),
            ("bad-name", "bad_name"),
            ("2xx", "_2xx"),
            ("größe", "gr__e"),
            ("a:b", "a_b"),
            ("", ""),
        ] {
            assert_eq!(prometheus_name(name), expected);
        }
    }

    #[test]
    fn a_refused_line_is_shown_short_and_on_one_line() {
        assert_eq!(shortened(b"a:1|x\nb"), "a:1|x\\nb");
        assert_eq!(shortened(&[b'x'; SHOWN]), "x".repeat(SHOWN));
        assert_eq!(shortened(&[b'x'; 4 * SHOWN + 1]), "x".repeat(SHOWN) + "...");
        assert_eq!(shortened("é".repeat(SHOWN + 1).as_bytes()), "é".repeat(SHOWN) + "...");
        assert_eq!(shortened(b"\x1b[31m\xff"), "\\u{1b}[31m\u{fffd}");
    }

    #[test]
    fn one_event_a_second_passes() {
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(Instant(5)), Some(0));
        assert_eq!(throttle.admit(Instant(6)), None);
        assert_eq!(throttle.admit(Instant(1_000_000_004)), None);
        assert_eq!(throttle.admit(Instant(1_000_000_005)), Some(2));
        assert_eq!(throttle.admit(Instant(9_000_000_000)), Some(0));
    }

    #[test]
    fn default_buckets_depend_on_the_unit() {
        let buckets = |unit: &str| default_buckets(Kind::Histogram, unit);
        assert_eq!(buckets("Milliseconds"), MILLISECOND_BUCKETS);
        assert_eq!((buckets("Seconds"), buckets("Items")), (SECOND_BUCKETS.to_vec(), SECOND_BUCKETS.to_vec()));
        assert_eq!(buckets("Microseconds").first(), Some(&50.0));
        assert_eq!(buckets("Percent").last(), Some(&100.0));
        assert_eq!((buckets("B").first(), buckets("Bytes").last()), (Some(&256.0), Some(&f64::from(1 << 30))));
        for unit in ["us", "ms", "%", "B", "s"] {
            assert!(buckets(unit).is_sorted_by(|a, b| a < b), "{unit}");
        }
        assert!(default_buckets(Kind::Gauge, "ms").is_empty());
    }
}
