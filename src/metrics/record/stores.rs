//! Events of model repositories in object stores; `repository` is the address that the operator configured.

use super::super::builtin::Builtin;
use super::super::cache::Cache;
use super::super::labels::{RELOAD_RESULTS, result};

/// Creates the counters of a store at 0, so that a rate includes the first event.
pub fn store_opened(cache: &Cache, repository: &str) {
    for result in RELOAD_RESULTS {
        cache.count(Builtin::RepositoryFetches, &[repository, result], 0.0);
    }
    cache.count(Builtin::RepositoryBytes, &[repository], 0.0);
    cache.count(Builtin::RepositorySeconds, &[repository], 0.0);
}

/// Counts an object of `bytes` bytes that was fetched in `seconds` seconds.
pub fn object_fetched(cache: &Cache, repository: &str, bytes: u64, seconds: f64) {
    cache.count(Builtin::RepositoryFetches, &[repository, result(true)], 1.0);
    cache.count(Builtin::RepositoryBytes, &[repository], bytes as f64);
    cache.count(Builtin::RepositorySeconds, &[repository], seconds);
}

/// Counts an object that could not be fetched.
pub fn object_fetch_failed(cache: &Cache, repository: &str) {
    cache.count(Builtin::RepositoryFetches, &[repository, result(false)], 1.0);
}

/// Records whether the store answered a request for its contents.
pub fn store_polled(cache: &Cache, repository: &str, answered: bool) {
    cache.set_gauge(Builtin::RepositoryReachable, &[repository], f64::from(u8::from(answered)));
}
