//! TLS of a listener: what its files say, and that they may change while it serves.
//!
//! A new configuration holds for new connections; those that are open keep theirs. With it come new keys for the
//! resumption of sessions, so that nobody comes in by what an older list of authorities let in.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{Error, ServerConfig};

use super::{Speaks, certificates};

/// The files of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, and behind it those that lead to an authority.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authorities of clients' certificates; with it only clients that have one are let in.
    pub authorities: Option<PathBuf>,
}

/// What a listener does TLS with.
pub struct Tls {
    files: TlsFiles,
    speaks: Speaks,
    // Held to clone or replace the pointer.
    config: RwLock<Arc<ServerConfig>>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// Which of them cannot be used, and why.
    pub fn new(files: TlsFiles, speaks: Speaks) -> Result<Self, String> {
        let config = RwLock::new(Arc::new(configure(&files, speaks)?));
        Ok(Self { files, speaks, config })
    }

    /// Reads the files again, for connections to come.
    ///
    /// # Errors
    /// As [`Tls::new`]; then nothing has changed.
    pub fn reload(&self) -> Result<(), String> {
        let config = Arc::new(configure(&self.files, self.speaks)?);
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// The files that it reads.
    pub fn paths(&self) -> Vec<PathBuf> {
        let TlsFiles { certificate, key, authorities } = &self.files;
        [Some(certificate), Some(key), authorities.as_ref()].into_iter().flatten().cloned().collect()
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        self.config.read().unwrap_or_else(PoisonError::into_inner).clone().into()
    }
}

fn configure(files: &TlsFiles, speaks: Speaks) -> Result<ServerConfig, String> {
    let (chain, key) = (certificates::chain(&files.certificate)?, certificates::key(&files.key)?);
    // Named, so that nothing depends on what else may set a default for the process.
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match &files.authorities {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(certificates::authorities(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
            let verifier = verifier.map_err(|error| format!("'{}' cannot be used: {error}", path.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| unusable(files, &error))?;
    config.alpn_protocols = speaks.protocols();
    Ok(config)
}

fn unusable(files: &TlsFiles, error: &Error) -> String {
    let (certificate, key) = (files.certificate.display(), files.key.display());
    match error {
        Error::InconsistentKeys(_) => {
            format!("the key in '{key}' does not belong to the certificate in '{certificate}'")
        }
        Error::InvalidCertificate(error) => {
            format!("the certificate in '{certificate}' cannot be used: {error:?}, it is no valid X.509 certificate")
        }
        error => format!("the certificate in '{certificate}' with the key in '{key}' cannot be used: {error}"),
    }
}
