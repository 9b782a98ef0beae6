//! One scrape, and the changes between two scrapes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use pharos::metrics::builtin::Builtin;
use pharos::timeline::Instant;

use crate::exposition::{Family, Key, parse};

/// One scrape.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    pub(crate) at: Instant,
    families: HashMap<String, Family>,
    values: HashMap<Arc<Key>, f64>,
}

impl Scrape {
    /// Reads a scrape. The keys of series that `before` has too are shared with it.
    pub(crate) fn new(text: &str, at: Instant, before: Option<&Self>) -> Self {
        let families =
            parse(text, |key| before?.values.get_key_value(key).map(|(key, _)| key.clone()));
        let values = families.values().flatten().cloned().collect();
        Self { at, families, values }
    }

    pub(crate) fn has(&self, metric: Builtin) -> bool {
        self.families.contains_key(metric.name())
    }

    /// Returns the series of a metric.
    pub(crate) fn list(&self, metric: Builtin) -> &[(Arc<Key>, f64)] {
        self.named(metric.name())
    }

    /// Returns the series of a sample name.
    fn named(&self, name: &str) -> &[(Arc<Key>, f64)] {
        self.families.get(name).map_or(&[], |family| family)
    }

    /// Returns the value of a series.
    pub(crate) fn value(&self, key: &Key) -> Option<f64> {
        self.values.get(key).copied()
    }

    /// Returns the value of the first series of a metric.
    pub(crate) fn one(&self, metric: Builtin) -> Option<f64> {
        self.list(metric).first().map(|(_, value)| *value)
    }

    /// Returns the sum of all series of a metric; `None` without any.
    pub(crate) fn sum(&self, metric: Builtin) -> Option<f64> {
        self.sum_of(metric, |_| true)
    }

    /// Returns the sum of the series that `keep` selects; `None` without any.
    pub(crate) fn sum_of(&self, metric: Builtin, keep: impl Fn(&Key) -> bool) -> Option<f64> {
        let mut kept = self
            .list(metric)
            .iter()
            .filter(|(key, _)| keep(key))
            .map(|(_, value)| *value)
            .peekable();
        kept.peek()?;
        Some(kept.sum())
    }

    /// Returns the sums of the series by `of`.
    pub(crate) fn sums<K: Ord>(&self, metric: Builtin, of: impl Fn(&Key) -> K) -> BTreeMap<K, f64> {
        let mut sums = BTreeMap::new();
        for (key, value) in self.list(metric) {
            *sums.entry(of(key)).or_default() += value;
        }
        sums
    }

    /// Returns the sums and numbers of the series with this name by `of`.
    pub(crate) fn means<K: Ord>(&self, name: &str, of: impl Fn(&Key) -> K) -> BTreeMap<K, Mean> {
        let mut means: BTreeMap<K, Mean> = BTreeMap::new();
        for (key, value) in self.named(name) {
            let mean = means.entry(of(key)).or_default();
            mean.sum += value;
            mean.series += 1.0;
        }
        means
    }

    /// Returns the number of series.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }
}

/// The sum of the values of some series, and their number.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mean {
    sum: f64,
    series: f64,
}

impl Mean {
    pub(crate) fn sum(&self) -> f64 {
        self.sum
    }

    /// Returns the mean. There is a series.
    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.series
    }
}

/// Two scrapes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval<'a> {
    pub(crate) before: &'a Scrape,
    pub(crate) now: &'a Scrape,
}

/// Returns the increase of a counter. One that fell was reset, so its value is the increase since
/// then.
pub(crate) fn rise(before: f64, now: f64) -> f64 {
    if now >= before { now - before } else { now }
}

impl Interval<'_> {
    /// Returns the seconds between the scrapes.
    pub(crate) fn seconds(&self) -> f64 {
        (self.now.at - self.before.at).as_secs_f64().max(0.001)
    }

    /// Returns the increases of a counter by `of`. If the previous scrape had other series of the
    /// counter, a new one has begun at 0.
    pub(crate) fn gains<K: Ord>(
        &self,
        metric: Builtin,
        of: impl Fn(&Key) -> K,
    ) -> BTreeMap<K, f64> {
        self.gains_of(metric.name(), of)
    }

    fn gains_of<K: Ord>(&self, name: &str, of: impl Fn(&Key) -> K) -> BTreeMap<K, f64> {
        let mut gains = BTreeMap::new();
        let is_new_counter = self.before.named(name).is_empty();
        for (key, value) in self.now.named(name) {
            let gain = match self.before.value(key) {
                Some(before) => rise(before, *value),
                None if is_new_counter => 0.0,
                None => *value,
            };
            *gains.entry(of(key)).or_default() += gain;
        }
        gains
    }

    /// Returns the increase of all series of a counter; `None` without any.
    pub(crate) fn gain(&self, metric: Builtin) -> Option<f64> {
        self.gains(metric, |_| ()).remove(&())
    }

    /// Returns the increase per second.
    pub(crate) fn rate(&self, metric: Builtin) -> Option<f64> {
        Some(self.gain(metric)? / self.seconds())
    }

    /// Returns the distributions of the observations between the scrapes, by `of`.
    pub(crate) fn distributions<K: Ord + Clone>(
        &self,
        metric: Builtin,
        of: impl Fn(&Key) -> K,
    ) -> BTreeMap<K, Distribution> {
        let mut all: BTreeMap<K, Distribution> = BTreeMap::new();
        let by_bound = self.gains_of(&format!("{}_bucket", metric.name()), |key| {
            let bound = match key.label("le") {
                "+Inf" => f64::INFINITY,
                text => text.parse().unwrap_or(f64::NAN),
            };
            (of(key), Bound(bound))
        });
        for ((key, Bound(bound)), cumulative) in by_bound {
            all.entry(key).or_default().0.push((bound, cumulative));
        }
        all
    }
}

/// The upper bound of a bucket, which is ordered.
#[derive(Clone, Copy, Debug)]
struct Bound(f64);

impl PartialEq for Bound {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Bound {}

impl PartialOrd for Bound {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Bound {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Upper bounds and cumulative counts, ascending.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Distribution(Vec<(f64, f64)>);

impl Distribution {
    /// Returns a quantile as Prometheus computes it: linear within a bucket, at most the last
    /// finite bound. `None` without observations.
    pub(crate) fn quantile(&self, quantile: f64) -> Option<f64> {
        let total = self.0.last().map(|(_, count)| *count).filter(|count| *count > 0.0)?;
        let rank = quantile * total;
        let at = self.0.iter().position(|(_, count)| *count >= rank && *count > 0.0)?;
        let (low, below) =
            at.checked_sub(1).and_then(|before| self.0.get(before)).copied().unwrap_or_default();
        let (high, count) = *self.0.get(at)?;
        if high.is_infinite() {
            return Some(low);
        }
        let inside = count - below;
        Some(if inside > 0.0 {
            low + (high - low) * (rank - below).max(0.0) / inside
        } else {
            high
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const METRIC: Builtin = Builtin::InferenceCount;

    fn at(seconds: u64) -> Instant {
        Instant(seconds * 1_000_000_000)
    }

    fn model(key: &Key) -> String {
        key.label("model").to_owned()
    }

    #[test]
    fn rates_cover_two_scrapes_and_resets_count_from_zero() {
        let before = Scrape::new(
            "nv_inference_count{model=\"m\"} 10\nnv_inference_count{model=\"n\"} 5\n",
            at(0),
            None,
        );
        let now = Scrape::new(
            "nv_inference_count{model=\"m\"} 30\nnv_inference_count{model=\"n\"} \
             2\nnv_inference_count{model=\"new\"} 9\n",
            at(2),
            None,
        );
        let interval = Interval { before: &before, now: &now };
        assert_eq!(interval.rate(METRIC), Some(15.5));
        let gains = interval.gains(METRIC, model);
        assert_eq!((gains["m"], gains["n"], gains["new"]), (20.0, 2.0, 9.0));
        assert_eq!(
            (
                interval.gain(Builtin::ExecutionCount),
                now.sum(METRIC),
                now.sum_of(METRIC, |_| false)
            ),
            (None, Some(41.0), None)
        );
    }

    #[test]
    fn quantiles_are_those_of_prometheus() {
        let text = |counts: [u32; 3]| {
            let [low, high, all] = counts;
            format!(
                "pharos_batch_size_bucket{{le=\"100\"}} \
                 {low}\npharos_batch_size_bucket{{le=\"1000\"}} \
                 {high}\npharos_batch_size_bucket{{le=\"+Inf\"}} {all}\n"
            )
        };
        let before = Scrape::new(&text([1, 2, 3]), at(0), None);
        let now = Scrape::new(&text([11, 92, 103]), at(1), None);
        let all = Interval { before: &before, now: &now }.distributions(Builtin::BatchSize, |_| ());
        let quantile = |q| all[&()].quantile(q).unwrap();
        assert_eq!(
            (quantile(0.05), quantile(0.5), quantile(0.99)),
            (50.0, 100.0 + 900.0 * 40.0 / 80.0, 1000.0)
        );
        let none = Interval { before: &now, now: &now }.distributions(Builtin::BatchSize, |_| ());
        assert_eq!(none[&()].quantile(0.5), None);
    }
}
