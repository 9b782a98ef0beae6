//! Events of connections, and of the files that say who may connect.

use super::super::builtin::Builtin;
use super::super::cache::Cache;
use super::super::labels::{Credentials, Listener, RELOAD_RESULTS, Refused};

/// The series of a listener are there from now on, at 0: a rate then sees the first event too.
pub fn listener_opened(cache: &Cache, listener: Listener) {
    count(cache, Builtin::Connections, &[listener.as_str()], 0.0);
    for reason in Refused::ALL {
        count(cache, Builtin::ConnectionsRefused, &[listener.as_str(), reason.as_str()], 0.0);
    }
    connections_open(cache, listener, 0);
}

/// A connection was accepted.
pub fn connection_accepted(cache: &Cache, listener: Listener) {
    count(cache, Builtin::Connections, &[listener.as_str()], 1.0);
}

/// So many connections are open now.
pub fn connections_open(cache: &Cache, listener: Listener, open: usize) {
    if let Ok(gauge) = cache.gauge(Builtin::ConnectionsOpen.name(), &[listener.as_str()]) {
        // A gauge takes every value.
        let _ = gauge.add_or_update(open as f64);
    }
}

/// A connection was closed by the server for this reason.
pub fn connection_refused(cache: &Cache, listener: Listener, reason: Refused) {
    count(cache, Builtin::ConnectionsRefused, &[listener.as_str(), reason.as_str()], 1.0);
}

/// The series of these files are there from now on, at 0.
pub fn credentials_watched(cache: &Cache, file: Credentials) {
    for result in RELOAD_RESULTS {
        count(cache, Builtin::CredentialReloads, &[file.as_str(), result], 0.0);
    }
}

/// The files were read again, with or without success.
pub fn credentials_read(cache: &Cache, file: Credentials, succeeded: bool) {
    let [success, failure] = RELOAD_RESULTS;
    count(cache, Builtin::CredentialReloads, &[file.as_str(), if succeeded { success } else { failure }], 1.0);
}

fn count(cache: &Cache, counter: Builtin, labels: &[&str], by: f64) {
    if let Ok(series) = cache.counter(counter.name(), labels) {
        // A counter takes every number that is not negative.
        let _ = series.add_or_update(by);
    }
}
