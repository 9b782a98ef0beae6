//! The tenant of a request, from its headers or from the certificate of its connection.

use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{Extensions, HeaderMap};
use pharos::access::tokens::bearer;
use pharos::id::TenantId;
use pharos::metrics::catalog::TenantSource;
use pharos::service::Service;
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::{DirectoryString, GeneralName};

/// The name in the verified certificate of the client; one of the extensions of each request on its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateName(Arc<str>);

impl CertificateName {
    /// Returns the common name of the subject (RFC 5280, 4.1.2.6). A certificate without one is named by the first URI among its
    /// alternative names, as SPIFFE does, else by the first DNS name there. `None` if it has none of these.
    pub(super) fn of(certificate: &[u8]) -> Option<Self> {
        let certificate = Certificate::from_der(certificate).ok()?;
        let certificate = certificate.tbs_certificate();
        let common_name = certificate.subject().common_name().ok().flatten();
        let name = common_name.map(|name| text(&name).to_owned()).filter(|name| !name.is_empty());
        let alternative = || {
            let (_, SubjectAltName(names)) = certificate.get_extension().ok().flatten()?;
            let uri = names.iter().find_map(|name| match name {
                GeneralName::UniformResourceIdentifier(uri) => Some(uri.as_str()),
                _ => None,
            });
            let dns = || {
                names.iter().find_map(|name| match name {
                    GeneralName::DnsName(name) => Some(name.as_str()),
                    _ => None,
                })
            };
            uri.or_else(dns).map(str::to_owned)
        };
        Some(Self(name.or_else(alternative)?.into()))
    }
}

fn text(name: &DirectoryString) -> &str {
    match name {
        DirectoryString::PrintableString(name) => name.as_str(),
        DirectoryString::TeletexString(name) => name.as_str(),
        DirectoryString::Utf8String(name) => name,
        _ => "",
    }
}

/// Returns the tenant of a request with these headers (or metadata) and extensions.
pub fn of(service: &dyn Service, headers: &HeaderMap, extensions: &Extensions) -> TenantId {
    service.tenant(&|source| match source {
        // A search costs less than the hash of a name that has not been parsed.
        TenantSource::Header(name) => {
            headers.iter().find(|(known, _)| known.as_str() == name).map(|(_, value)| value.as_bytes())
        }
        // The same token as in the check of access, which also ignores other schemes.
        TenantSource::Token => headers.get_all(AUTHORIZATION).iter().find_map(|value| bearer(value.as_bytes())),
        TenantSource::Certificate => extensions.get::<CertificateName>().map(|name| name.0.as_bytes()),
    })
}
