//! Events of connections, and of the files with certificates and tokens.

use super::super::builtin::Builtin;
use super::super::cache::Cache;
use super::super::labels::{Credentials, Listener, RELOAD_RESULTS, Refused, result};

/// Creates the series of a listener at 0, so that a rate includes the first event.
pub fn listener_opened(cache: &Cache, listener: Listener) {
    cache.count(Builtin::Connections, &[listener.as_str()], 0.0);
    for reason in Refused::ALL {
        cache.count(Builtin::ConnectionsRefused, &[listener.as_str(), reason.as_str()], 0.0);
    }
    connections_open(cache, listener, 0);
}

/// Counts an accepted connection.
pub fn connection_accepted(cache: &Cache, listener: Listener) {
    cache.count(Builtin::Connections, &[listener.as_str()], 1.0);
}

/// Sets the number of open connections.
pub fn connections_open(cache: &Cache, listener: Listener, open: usize) {
    cache.set_gauge(Builtin::ConnectionsOpen, &[listener.as_str()], open as f64);
}

/// Counts a connection that the server closed, with the reason.
pub fn connection_refused(cache: &Cache, listener: Listener, reason: Refused) {
    cache.count(Builtin::ConnectionsRefused, &[listener.as_str(), reason.as_str()], 1.0);
}

/// Creates the series of these files at 0.
pub fn credentials_watched(cache: &Cache, file: Credentials) {
    for result in RELOAD_RESULTS {
        cache.count(Builtin::CredentialReloads, &[file.as_str(), result], 0.0);
    }
}

/// Counts a reload of these files, successful or not.
pub fn credentials_reloaded(cache: &Cache, file: Credentials, succeeded: bool) {
    cache.count(Builtin::CredentialReloads, &[file.as_str(), result(succeeded)], 1.0);
}
