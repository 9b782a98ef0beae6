//! Certificates and keys in PEM files (RFC 7468): chains, and keys in PKCS#8, PKCS#1 and SEC1.

use std::io::Read;
use std::path::Path;

use ring::rsa::KeyPair;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The largest file; whole lists of authorities have some hundred kilobytes.
const MAX_FILE: u64 = 4 << 20;

/// The certificates of a file, the server's own first.
///
/// # Errors
/// It cannot be read, or has none.
pub(super) fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = read(path)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let certificates = certificates.map_err(|error| told(path, &error, "certificate"))?;
    if certificates.is_empty() {
        return Err(format!("'{}' has no certificate in PEM (-----BEGIN CERTIFICATE-----)", path.display()));
    }
    Ok(certificates)
}

/// The key of a file.
///
/// # Errors
/// It cannot be read, has none, one that a password protects, or one that is too short.
pub(super) fn key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let text = read(path)?;
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| {
        let shown = String::from_utf8_lossy(&text);
        if shown.contains("BEGIN ENCRYPTED PRIVATE KEY") || shown.contains("Proc-Type: 4,ENCRYPTED") {
            let advice = "only keys without one can be used (openssl pkey -in FILE -out NEW)";
            return format!("the key in '{}' is protected by a password; {advice}", path.display());
        }
        told(path, &error, "private key (PKCS#8, PKCS#1 or SEC1)")
    })?;
    if is_short(&key) {
        return Err(format!(
            "the RSA key in '{}' is too short: 2048 bits or more are needed. Make a new key with a certificate: openssl req -x509 \
             -newkey rsa:2048 -nodes -days 365 -subj /CN=HOST -keyout KEY -out CERTIFICATE",
            path.display()
        ));
    }
    Ok(key)
}

/// Whether a key is one of RSA with fewer than 2048 bits. TLS refuses such a key without the reason.
fn is_short(key: &PrivateKeyDer<'_>) -> bool {
    let rejected = match key {
        PrivateKeyDer::Pkcs1(key) => KeyPair::from_der(key.secret_pkcs1_der()).err(),
        PrivateKeyDer::Pkcs8(key) => KeyPair::from_pkcs8(key.secret_pkcs8_der()).err(),
        _ => None,
    };
    rejected.is_some_and(|rejected| rejected.to_string() == "TooSmall")
}

/// The authorities of a file, against which clients' certificates are checked.
///
/// # Errors
/// It cannot be read, or has none.
pub(super) fn authorities(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in chain(path)? {
        roots
            .add(certificate)
            .map_err(|error| format!("a certificate in '{}' is not valid: {error}", path.display()))?;
    }
    Ok(roots)
}

fn told(path: &Path, error: &pem::Error, what: &str) -> String {
    match error {
        pem::Error::NoItemsFound => format!("'{}' has no {what} in PEM", path.display()),
        error => format!("'{}' is not valid PEM: {error}", path.display()),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let unread = |error: std::io::Error| format!("'{}' cannot be read: {error}", path.display());
    let file = std::fs::File::open(path).map_err(unread)?;
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(unread)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(format!("'{}' is larger than {MAX_FILE} bytes", path.display()));
    }
    Ok(bytes)
}
