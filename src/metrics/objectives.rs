//! Counts the good and the bad requests of one model, for each service level objective that covers
//! it.
//!
//! Each request is compared with the objective's threshold, so the counts are exact. They take no
//! lock: a changed definition appends a generation of objectives, which a request reaches over one
//! pointer for each change since the model's load.

use std::sync::{Arc, OnceLock};

use pharos_base::error::{ErrorCode, InferError, Reason};
use pharos_base::id::ModelName;
use pharos_base::timeline::Instant;
use pharos_base::timeline::is_late;

use super::atomic::Count;
use super::catalog::{Share, Sli, Slo};
use super::reading::Number;
use super::source::ObjectiveValue;

/// The requests that an objective has counted.
#[derive(Clone, Debug, Default)]
struct Requests {
    good: Count,
    bad: Count,
}

/// One objective of one model.
#[derive(Clone, Debug)]
pub(super) struct Objective {
    slo: Arc<str>,
    sli: Sli,
    /// The time in which a request must succeed; the maximum for any time.
    limit_ns: u64,
    share: Share,
    requests: Arc<Requests>,
}

impl Objective {
    /// Returns the name of the objective.
    pub(super) fn slo(&self) -> &str {
        &self.slo
    }

    /// Returns the name of the indicator.
    pub(super) fn sli(&self) -> &'static str {
        self.sli.as_str()
    }

    /// Returns a number; `None` if the objective does not have it.
    pub(super) fn read(&self, value: ObjectiveValue) -> Option<Number> {
        let good = self.requests.good.get();
        let bad = self.requests.bad.get();
        let all = good.saturating_add(bad);
        Some(match value {
            ObjectiveValue::Good => Number::Whole(good),
            ObjectiveValue::All => Number::Whole(all),
            ObjectiveValue::Share => Number::Float(self.share.ratio()),
            ObjectiveValue::Threshold if self.sli == Sli::Availability => return None,
            ObjectiveValue::Threshold => Number::Float(self.limit_ns as f64 / 1e9),
            ObjectiveValue::Budget if all == 0 => Number::Float(1.0),
            ObjectiveValue::Budget => {
                Number::Float(1.0 - bad as f64 / all as f64 / self.share.budget())
            }
        })
    }

    /// Returns whether it counts requests by their end.
    fn is_of_requests(&self) -> bool {
        matches!(self.sli, Sli::Latency | Sli::Availability)
    }

    /// Counts events that took `ns` each.
    fn add(&self, ns: u64, events: u64) {
        let counted = if ns <= self.limit_ns { &self.requests.good } else { &self.requests.bad };
        counted.add(events);
    }

    /// Counts a failure after `ns`, by the party at fault.
    fn add_failed(&self, fault: Fault, ns: u64) {
        if fault == Fault::Server || (fault == Fault::Abandoned && ns > self.limit_ns) {
            self.requests.bad.add(1);
        }
    }

    /// Returns whether the counts of `other` can continue here.
    fn counts_as(&self, other: &Objective) -> bool {
        (&self.slo, self.sli, self.limit_ns) == (&other.slo, other.sli, other.limit_ns)
    }
}

/// The objectives of one definition.
#[derive(Debug)]
struct Generation {
    objectives: Vec<Objective>,
    next: OnceLock<Box<Generation>>,
}

/// The objectives of one model.
#[derive(Debug, Default)]
pub(super) struct Objectives {
    first: OnceLock<Box<Generation>>,
}

impl Clone for Objectives {
    /// Copies the present objectives with the counts of this moment.
    fn clone(&self) -> Self {
        let objectives = self
            .current()
            .iter()
            .map(|objective| Objective {
                requests: Arc::new(Requests::clone(&objective.requests)),
                ..objective.clone()
            })
            .collect();
        Self { first: OnceLock::from(Box::new(Generation { objectives, next: OnceLock::new() })) }
    }
}

impl Objectives {
    /// Follows a definition. Objectives that only get another share keep their counts.
    /// Objectives of tokens are for models that generate text.
    pub(super) fn define(&self, model: &ModelName, slos: &[Slo], generates_text: bool) {
        let before = self.current();
        let covering = slos.iter().filter(|slo| slo.covers(model));
        let wanted = covering
            .flat_map(|slo| slo.indicators().map(|indicator| (Arc::from(&*slo.name), indicator)));
        let wanted = wanted.map(|(slo, (sli, limit_ns, share))| {
            let new = Objective {
                slo,
                sli,
                limit_ns: limit_ns.unwrap_or(u64::MAX),
                share,
                requests: Arc::default(),
            };
            let kept =
                before.iter().find(|old| new.counts_as(old)).map(|old| Arc::clone(&old.requests));
            Objective { requests: kept.unwrap_or_default(), ..new }
        });
        let objectives: Vec<Objective> = wanted
            .filter(|objective: &Objective| generates_text || objective.is_of_requests())
            .collect();
        if objectives.len() != before.len()
            || !objectives
                .iter()
                .zip(before)
                .all(|(new, old)| new.counts_as(old) && new.share == old.share)
        {
            // Only fails if another definition was added at the same time, which callers exclude.
            let _ = self.end().set(Box::new(Generation { objectives, next: OnceLock::new() }));
        }
    }

    /// Returns the place of the next definition.
    fn end(&self) -> &OnceLock<Box<Generation>> {
        let mut end = &self.first;
        while let Some(generation) = end.get() {
            end = &generation.next;
        }
        end
    }

    /// Returns the objectives of the latest definition.
    pub(super) fn current(&self) -> &[Objective] {
        let mut end = &self.first;
        let mut objectives = &[][..];
        while let Some(generation) = end.get() {
            end = &generation.next;
            objectives = &generation.objectives;
        }
        objectives
    }

    /// Counts a request that succeeded after `ns`.
    pub(super) fn succeeded(&self, ns: u64) {
        let current = self.current().iter().filter(|objective| objective.is_of_requests());
        current.for_each(|objective| objective.add(ns, 1));
    }

    /// Counts the tokens of a response: the time to the first token, if the response has it, and
    /// `intervals` tokens that followed another one after `interval_ns`.
    pub(super) fn tokens(&self, first_ns: Option<u64>, intervals: u64, interval_ns: u64) {
        for objective in self.current() {
            match (objective.sli, first_ns) {
                (Sli::FirstToken, Some(ns)) => objective.add(ns, 1),
                (Sli::TokenInterval, _) => objective.add(interval_ns, intervals),
                _ => {}
            }
        }
    }

    /// Counts a stream that failed after `ns` without a token.
    pub(super) fn no_token(&self, fault: Fault, ns: u64) {
        let current = self.current().iter().filter(|one| one.sli == Sli::FirstToken);
        current.for_each(|objective| objective.add_failed(fault, ns));
    }

    /// Counts a request that failed after `ns`, by the party at fault.
    pub(super) fn failed(&self, fault: Fault, ns: u64) {
        let current = self.current().iter().filter(|objective| objective.is_of_requests());
        current.for_each(|objective| objective.add_failed(fault, ns));
    }
}

/// The party at fault for a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The server or the model: the request is bad.
    Server,
    /// The request was not valid, or not allowed: it does not count.
    Client,
    /// The client left before the response: the request is bad if it had exceeded the time in which
    /// it must succeed, and otherwise does not count.
    Abandoned,
}

impl From<Reason> for Fault {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::NotReady
            | Reason::QueueFull
            | Reason::Timeout
            | Reason::Backend
            | Reason::InstanceLost
            | Reason::Internal => Self::Server,
            Reason::Malformed
            | Reason::Invalid
            | Reason::UnknownModel
            | Reason::TooLarge
            | Reason::SharedMemory
            | Reason::Unsupported
            | Reason::RateLimited
            | Reason::Restricted
            | Reason::Unauthenticated => Self::Client,
            Reason::Cancelled => Self::Abandoned,
        }
    }
}

impl From<&InferError> for Fault {
    /// A model that refuses a request as invalid, by its code, is not at fault.
    fn from(error: &InferError) -> Self {
        match error.code {
            ErrorCode::InvalidArg
            | ErrorCode::NotFound
            | ErrorCode::AlreadyExists
            | ErrorCode::Unsupported
                if error.reason == Reason::Backend =>
            {
                Self::Client
            }
            _ => Self::from(error.reason),
        }
    }
}

/// Why a request failed.
#[derive(Clone, Copy, Debug)]
pub struct Failed {
    pub(super) reason: Reason,
    pub(super) fault: Fault,
}

impl Failed {
    /// The client left before `now`. If that was at its deadline, the server is at fault.
    pub fn abandoned(deadline: Option<Instant>, now: Instant) -> Self {
        let fault = if is_late(deadline, now) { Fault::Server } else { Fault::Abandoned };
        Self { reason: Reason::Cancelled, fault }
    }

    /// The request failed at `now` with this error; `deadline` is its client's.
    pub fn of(error: &InferError, deadline: Option<Instant>, now: Instant) -> Self {
        match error.reason {
            Reason::Cancelled => Self::abandoned(deadline, now),
            _ => error.into(),
        }
    }
}

impl From<Reason> for Failed {
    fn from(reason: Reason) -> Self {
        Self { reason, fault: reason.into() }
    }
}

impl From<&InferError> for Failed {
    fn from(error: &InferError) -> Self {
        Self { reason: error.reason, fault: error.into() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::catalog::Catalog;
    use super::*;

    const SLO: &str =
        "{name: a, model: m, latency: {threshold: 1ms, share: 90%}, availability: 99%}";

    fn slos(text: &str) -> Vec<Slo> {
        Catalog::parse(&format!("slos: [{text}]"), "m.yaml").unwrap().slos().to_vec()
    }

    fn counts(objectives: &Objectives) -> Vec<(&'static str, u64, u64)> {
        let of =
            |objective: &Objective| (objective.requests.good.get(), objective.requests.bad.get());
        objectives.current().iter().map(|one| (one.sli(), of(one).0, of(one).1)).collect()
    }

    fn defined(text: &str) -> Objectives {
        let objectives = Objectives::default();
        objectives.define(&ModelName::from("m"), &slos(text), true);
        objectives
    }

    #[test]
    fn counts_each_request_exactly() {
        let objectives = defined(SLO);
        [0, 999_999, 1_000_000, 1_000_001].into_iter().for_each(|ns| objectives.succeeded(ns));
        assert_eq!(counts(&objectives), [("latency", 3, 1), ("availability", 4, 0)]);
        objectives.failed(Fault::Server, 5);
        objectives.failed(Fault::Client, 2_000_000);
        assert_eq!(counts(&objectives), [("latency", 3, 2), ("availability", 4, 1)]);
        // A client that gives up on a slow request has seen a slow request.
        objectives.failed(Fault::Abandoned, 1_000_000);
        objectives.failed(Fault::Abandoned, 1_000_001);
        assert_eq!(counts(&objectives), [("latency", 3, 3), ("availability", 4, 1)]);
    }

    #[test]
    fn tokens_count_for_their_objectives() {
        let text = "{name: a, availability: 99%, time_to_first_token: {threshold: 1ms, share: 9%}, \
                    inter_token_latency: {threshold: 1us, share: 9%}}";
        let objectives = defined(text);
        objectives.tokens(Some(1_000_000), 0, 0);
        objectives.tokens(Some(1_000_001), 0, 0);
        objectives.tokens(None, 3, 1000);
        objectives.tokens(None, 2, 1001);
        objectives.succeeded(5);
        objectives.failed(Fault::Server, 5);
        objectives.no_token(Fault::Server, 5);
        objectives.no_token(Fault::Client, 5);
        objectives.no_token(Fault::Abandoned, 5);
        objectives.no_token(Fault::Abandoned, 1_000_001);
        let expected =
            [("availability", 1, 1), ("time_to_first_token", 1, 3), ("inter_token_latency", 3, 2)];
        assert_eq!(counts(&objectives), expected);
        let without_text = Objectives::default();
        without_text.define(&ModelName::from("m"), &slos(text), false);
        assert_eq!(counts(&without_text), [("availability", 0, 0)]);
    }

    #[test]
    fn the_budget_shrinks_with_each_bad_request() {
        let objectives = defined("{name: a, availability: 90%}");
        let budget = || match objectives.current()[0].read(ObjectiveValue::Budget) {
            Some(Number::Float(budget)) => (budget * 1e6).round() / 1e6,
            other => panic!("{other:?}"),
        };
        assert_eq!(budget(), 1.0);
        (0..19).for_each(|_| objectives.succeeded(1));
        objectives.failed(Fault::Server, 1);
        assert_eq!(budget(), 0.5);
        (0..5).for_each(|_| objectives.failed(Fault::Server, 1));
        assert_eq!(budget(), -1.4);
    }

    #[test]
    fn a_new_definition_keeps_counts_of_the_same_requests() {
        let objectives = defined(SLO);
        let model = ModelName::from("m");
        objectives.succeeded(1);
        objectives.define(&model, &slos(&SLO.replace("90%", "95%")), true);
        assert_eq!(counts(&objectives), [("latency", 1, 0), ("availability", 1, 0)]);
        objectives.define(&model, &slos(&SLO.replace("1ms", "2ms")), true);
        assert_eq!(counts(&objectives), [("latency", 0, 0), ("availability", 1, 0)]);
        objectives.define(&model, &slos(&SLO.replace("model: m", "model: n")), true);
        assert!(objectives.current().is_empty());
        objectives.succeeded(1);
        let others = Objectives::default();
        others.define(&ModelName::from("n"), &slos(SLO), true);
        assert!(others.current().is_empty() && others.first.get().is_none());
    }

    #[test]
    fn errors_of_clients_do_not_count() {
        for (code, reason, expected) in [
            (ErrorCode::Internal, Reason::Backend, Fault::Server),
            (ErrorCode::InvalidArg, Reason::Backend, Fault::Client),
            (ErrorCode::InvalidArg, Reason::Invalid, Fault::Client),
            (ErrorCode::Unavailable, Reason::QueueFull, Fault::Server),
            (ErrorCode::DeadlineExceeded, Reason::Timeout, Fault::Server),
            (ErrorCode::Cancelled, Reason::Cancelled, Fault::Abandoned),
        ] {
            assert_eq!(Fault::from(&InferError::new(code, reason, "")), expected, "{reason:?}");
        }
    }
}
