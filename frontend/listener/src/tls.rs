//! TLS configuration of a listener, reloaded while it serves.
//!
//! A new configuration applies to new connections; open connections keep theirs. It has new keys
//! for session resumption, so that sessions accepted by an older list of authorities cannot be
//! resumed.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::RwLock;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{Error, ServerConfig};

use super::{HttpVersions, certificates};

/// The TLS files of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, followed by its intermediate certificates.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// The authorities of client certificates, which are then required.
    pub authorities: Option<PathBuf>,
}

/// The TLS configuration of a listener.
pub struct Tls {
    files: TlsFiles,
    versions: HttpVersions,
    // Held to clone or replace the pointer.
    config: RwLock<Arc<ServerConfig>>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn new(files: TlsFiles, versions: HttpVersions) -> Result<Self, String> {
        let config = RwLock::new(Arc::new(configure(&files, versions)?));
        Ok(Self { files, versions, config })
    }

    /// Reloads the files, for new connections.
    ///
    /// # Errors
    /// As [`Tls::new`]; nothing changes then.
    pub fn reload(&self) -> Result<(), String> {
        let config = Arc::new(configure(&self.files, self.versions)?);
        *self.config.write() = config;
        Ok(())
    }

    /// Returns the paths of the files.
    pub fn paths(&self) -> Vec<PathBuf> {
        let TlsFiles { certificate, key, authorities } = &self.files;
        [Some(certificate), Some(key), authorities.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        self.config.read().clone().into()
    }
}

fn configure(files: &TlsFiles, versions: HttpVersions) -> Result<ServerConfig, String> {
    let chain = certificates::chain(&files.certificate)?;
    let key = certificates::key(&files.key)?;
    // Explicit, so that the process-wide default provider does not matter.
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match &files.authorities {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(certificates::authorities(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
            let verifier = verifier
                .map_err(|error| format!("'{}' cannot be used: {error}", path.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config =
        builder.with_single_cert(chain, key).map_err(|error| unusable(files, &error))?;
    config.alpn_protocols = versions.protocols();
    Ok(config)
}

fn unusable(files: &TlsFiles, error: &Error) -> String {
    let certificate = files.certificate.display();
    let key = files.key.display();
    match error {
        Error::InconsistentKeys(_) => {
            format!("the key in '{key}' does not belong to the certificate in '{certificate}'")
        }
        Error::InvalidCertificate(error) => {
            format!(
                "the certificate in '{certificate}' cannot be used: it is not a valid X.509 \
                 certificate: {error:?}"
            )
        }
        error => format!(
            "the certificate in '{certificate}' with the key in '{key}' cannot be used: {error}"
        ),
    }
}
