//! Reads certificate chains and private keys (PKCS#8, PKCS#1 and SEC1) from PEM files (RFC 7468).

use std::io::Read;
use std::path::Path;

use ring::rsa::KeyPair;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The maximum size of a file; bundles of authorities have several hundred kilobytes.
const MAX_FILE: u64 = 4 << 20;

/// Returns the certificates of a file, in their order.
///
/// # Errors
/// The file cannot be read, or contains no certificate.
pub(super) fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = read(path)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let certificates = certificates.map_err(|error| describe(path, &error, "certificate"))?;
    if certificates.is_empty() {
        return Err(format!(
            "'{}' has no certificate in PEM (-----BEGIN CERTIFICATE-----)",
            path.display()
        ));
    }
    Ok(certificates)
}

/// Returns the private key of a file.
///
/// # Errors
/// The file cannot be read or contains no key, or the key is encrypted or too short.
pub(super) fn key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let text = read(path)?;
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| {
        let shown = String::from_utf8_lossy(&text);
        if shown.contains("BEGIN ENCRYPTED PRIVATE KEY") || shown.contains("Proc-Type: 4,ENCRYPTED")
        {
            let advice = "remove the password with `openssl pkey -in FILE -out NEW`";
            return format!("the key in '{}' is protected by a password; {advice}", path.display());
        }
        describe(path, &error, "private key (PKCS#8, PKCS#1 or SEC1)")
    })?;
    if is_short(&key) {
        return Err(format!(
            "the RSA key in '{}' is too short: 2048 bits or more are needed. Create a new key and \
             certificate: openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=HOST \
             -keyout KEY -out CERTIFICATE",
            path.display()
        ));
    }
    Ok(key)
}

/// Returns whether a key is an RSA key of fewer than 2048 bits. rustls refuses these without the
/// reason.
fn is_short(key: &PrivateKeyDer<'_>) -> bool {
    let rejected = match key {
        PrivateKeyDer::Pkcs1(key) => KeyPair::from_der(key.secret_pkcs1_der()).err(),
        PrivateKeyDer::Pkcs8(key) => KeyPair::from_pkcs8(key.secret_pkcs8_der()).err(),
        _ => None,
    };
    // Only the text of ring's error gives the reason.
    rejected.is_some_and(|rejected| rejected.to_string() == "TooSmall")
}

/// Returns the authorities of a file, which client certificates are verified against.
///
/// # Errors
/// The file cannot be read, contains no certificate, or one that is not valid.
pub(super) fn authorities(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in chain(path)? {
        roots.add(certificate).map_err(|error| {
            format!("a certificate in '{}' is not valid: {error}", path.display())
        })?;
    }
    Ok(roots)
}

fn describe(path: &Path, error: &pem::Error, what: &str) -> String {
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
