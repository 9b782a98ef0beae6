//! Limits on log lines about events that may repeat without end: one line a second, with the number
//! of suppressed events.

use std::fmt::Display;

use pharos_base::timeline::Instant;

/// Lets one event a second pass, and counts the suppressed ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct Throttle {
    last: Option<Instant>,
    held: u64,
}

impl Throttle {
    const SECOND_NS: u64 = 1_000_000_000;

    /// Returns the number of events suppressed since the last one that passed, if this event
    /// passes.
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

    /// Adds lost samples, and reasons that this or later samples are lost for. Returns what to log,
    /// at most once a second: the number of samples and the reasons.
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
    fn one_event_a_second_passes() {
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(Instant(5)), Some(0));
        assert_eq!(throttle.admit(Instant(6)), None);
        assert_eq!(throttle.admit(Instant(1_000_000_004)), None);
        assert_eq!(throttle.admit(Instant(1_000_000_005)), Some(2));
        assert_eq!(throttle.admit(Instant(9_000_000_000)), Some(0));
    }
}
