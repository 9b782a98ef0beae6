//! Events of model repositories in object stores; `repository` is the address that the operator configured.

use super::super::builtin::Builtin;
use super::super::cache::Cache;
use super::super::labels::RELOAD_RESULTS;

/// Creates the counters of a store at 0, so that a rate includes the first event.
pub fn store_opened(cache: &Cache, repository: &str) {
    for result in RELOAD_RESULTS {
        count(cache, Builtin::RepositoryFetches, &[repository, result], 0.0);
    }
    count(cache, Builtin::RepositoryBytes, &[repository], 0.0);
    count(cache, Builtin::RepositorySeconds, &[repository], 0.0);
}

/// Counts an object of `bytes` bytes that was fetched in `seconds` seconds.
pub fn object_fetched(cache: &Cache, repository: &str, bytes: u64, seconds: f64) {
    let [success, _] = RELOAD_RESULTS;
    count(cache, Builtin::RepositoryFetches, &[repository, success], 1.0);
    count(cache, Builtin::RepositoryBytes, &[repository], bytes as f64);
    count(cache, Builtin::RepositorySeconds, &[repository], seconds);
}

/// Counts an object that could not be fetched.
pub fn object_fetch_failed(cache: &Cache, repository: &str) {
    let [_, failure] = RELOAD_RESULTS;
    count(cache, Builtin::RepositoryFetches, &[repository, failure], 1.0);
}

/// Records whether the store answered a request for its contents.
pub fn store_polled(cache: &Cache, repository: &str, answered: bool) {
    if let Ok(gauge) = cache.gauge(Builtin::RepositoryReachable.name(), &[repository]) {
        // A gauge accepts every value.
        let _ = gauge.add_or_update(f64::from(u8::from(answered)));
    }
}

fn count(cache: &Cache, counter: Builtin, labels: &[&str], by: f64) {
    if let Ok(series) = cache.counter(counter.name(), labels) {
        // A counter accepts every number that is not negative.
        let _ = series.add_or_update(by);
    }
}
