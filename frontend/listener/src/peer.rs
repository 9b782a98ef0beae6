//! The client of a connection: its address, and the name in its certificate.

use std::net::SocketAddr;
use std::sync::Arc;

use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::{DirectoryString, GeneralName};

/// The client of a connection, in the extensions of each of its requests unless nothing is known of
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The address, if the listener [adds it](crate::Settings::adds_peer).
    pub address: Option<SocketAddr>,
    /// The name in the verified certificate, if the client has one.
    pub certificate_name: Option<Arc<str>>,
}

/// Returns the name in a certificate: the common name of the subject (RFC 5280, 4.1.2.6). A
/// certificate without one is named by the first URI among its alternative names, as SPIFFE does,
/// else by the first DNS name there. `None` if it has none of these.
pub(super) fn certificate_name(certificate: &[u8]) -> Option<Arc<str>> {
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
    Some(name.or_else(alternative)?.into())
}

fn text(name: &DirectoryString) -> &str {
    match name {
        DirectoryString::PrintableString(name) => name.as_str(),
        DirectoryString::TeletexString(name) => name.as_str(),
        DirectoryString::Utf8String(name) => name,
        _ => "",
    }
}
