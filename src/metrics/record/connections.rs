//! Events of connections, and of the files with certificates and tokens.

use super::super::builtin::Builtin;
use super::super::cache::Cache;
use super::super::labels::{Credentials, Listener, RELOAD_RESULTS, Refused};

/// Creates the series of a listener at 0, so that a rate includes the first event.
pub fn listener_opened(cache: &Cache, listener: Listener) {
    count(cache, Builtin::Connections, &[listener.as_str()], 0.0);
    for reason in Refused::ALL {
        count(cache, Builtin::ConnectionsRefused, &[listener.as_str(), reason.as_str()], 0.0);
    }
    connections_open(cache, listener, 0);
}

/// Counts an accepted connection.
pub fn connection_accepted(cache: &Cache, listener: Listener) {
    count(cache, Builtin::Connections, &[listener.as_str()], 1.0);
}

/// Sets the number of open connections.
pub fn connections_open(cache: &Cache, listener: Listener, open: usize) {
    if let Ok(gauge) = cache.gauge(Builtin::ConnectionsOpen.name(), &[listener.as_str()]) {
        // A gauge accepts every value.
        let _ = gauge.add_or_update(open as f64);
    }
}

/// Counts a connection that the server closed, with the reason.
pub fn connection_refused(cache: &Cache, listener: Listener, reason: Refused) {
    count(cache, Builtin::ConnectionsRefused, &[listener.as_str(), reason.as_str()], 1.0);
}

/// Creates the series of these files at 0.
pub fn credentials_watched(cache: &Cache, file: Credentials) {
    for result in RELOAD_RESULTS {
        count(cache, Builtin::CredentialReloads, &[file.as_str(), result], 0.0);
    }
}

/// Counts a reload of these files, successful or not.
pub fn credentials_reloaded(cache: &Cache, file: Credentials, succeeded: bool) {
    let [success, failure] = RELOAD_RESULTS;
    count(cache, Builtin::CredentialReloads, &[file.as_str(), if succeeded { success } else { failure }], 1.0);
}

fn count(cache: &Cache, counter: Builtin, labels: &[&str], by: f64) {
    if let Ok(series) = cache.counter(counter.name(), labels) {
        // A counter accepts every number that is not negative.
        let _ = series.add_or_update(by);
    }
}
