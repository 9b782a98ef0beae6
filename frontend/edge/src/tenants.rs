//! The tenant of a request, from its headers or from the certificate of its connection.

use http::header::AUTHORIZATION;
use http::{Extensions, HeaderMap};
use pharos::access::tokens::bearer;
use pharos::id::TenantId;
use pharos::metrics::catalog::TenantSource;
use pharos::service::Service;
use pharos_listener::Peer;

/// Returns the tenant of a request with these headers (or metadata) and extensions.
pub fn of(service: &dyn Service, headers: &HeaderMap, extensions: &Extensions) -> TenantId {
    service.tenant(&|source| match source {
        // A search costs less than the hash of a name that has not been parsed.
        TenantSource::Header(name) => {
            headers.iter().find(|(known, _)| known.as_str() == name).map(|(_, value)| value.as_bytes())
        }
        // The same token as in the check of access, which also ignores other schemes.
        TenantSource::Token => headers.get_all(AUTHORIZATION).iter().find_map(|value| bearer(value.as_bytes())),
        TenantSource::Certificate => extensions.get::<Peer>()?.certificate_name.as_ref().map(|name| name.as_bytes()),
    })
}
