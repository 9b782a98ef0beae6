//! The flags of TLS: the same five for each listener. Those of gRPC are Triton's; the others are
//! named after them.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use pharos_listener::TlsFiles;

use super::{GRPC, HTTP, METRICS, boolean};

/// The TLS options of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsOptions {
    /// The prefix of its flags.
    pub listener: &'static str,
    /// Use TLS.
    pub use_ssl: bool,
    /// Use TLS and require client certificates.
    pub mutual: bool,
    /// The server's certificate chain.
    pub certificate: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
    /// The authorities of client certificates.
    pub root: Option<PathBuf>,
}

impl TlsOptions {
    /// Returns the files if TLS is enabled. Calls `unused` with a message for each flag without
    /// effect.
    ///
    /// # Errors
    /// A required file is not given.
    pub fn paths(&self, mut unused: impl FnMut(String)) -> Result<Option<TlsFiles>, String> {
        let listener = self.listener;
        let flags = [
            ("server-cert", &self.certificate),
            ("server-key", &self.key),
            ("root-cert", &self.root),
        ];
        if !self.use_ssl && !self.mutual {
            for (flag, _) in flags.iter().filter(|(_, path)| path.is_some()) {
                unused(format!("--{listener}-{flag} has no effect without --{listener}-use-ssl"));
            }
            return Ok(None);
        }
        if self.root.is_some() && !self.mutual {
            unused(format!(
                "--{listener}-root-cert has no effect without --{listener}-use-ssl-mutual"
            ));
        }
        let asked = if self.mutual { "use-ssl-mutual" } else { "use-ssl" };
        let needed = |flag: &str, path: &Option<PathBuf>| {
            path.clone()
                .ok_or_else(|| format!("--{listener}-{asked} needs --{listener}-{flag} FILE"))
        };
        let authorities = self.mutual.then(|| needed("root-cert", &self.root)).transpose()?;
        Ok(Some(TlsFiles {
            certificate: needed("server-cert", &self.certificate)?,
            key: needed("server-key", &self.key)?,
            authorities,
        }))
    }
}

/// The flags of one listener.
macro_rules! flags {
    ($name:ident, $listener:literal, $variable:literal, $heading:expr, $of:literal) => {
        #[doc = concat!("TLS of ", $of, ".")]
        #[derive(Clone, Debug, Args)]
        pub struct $name {
            #[arg(
                help = concat!("Use TLS on ", $of), id = concat!($listener, "-use-ssl"),
                long = concat!($listener, "-use-ssl"), value_name = "BOOL", default_value = "false",
                default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
                env = concat!("PHAROS_", $variable, "_USE_SSL"), value_parser = boolean,
                help_heading = $heading
            )]
            use_ssl: bool,
            #[arg(
                help = concat!("Use TLS on ", $of, " and require client certificates"),
                id = concat!($listener, "-use-ssl-mutual"),
                long = concat!($listener, "-use-ssl-mutual"), value_name = "BOOL",
                default_value = "false", default_missing_value = "true", num_args = 0..=1,
                action = ArgAction::Set, env = concat!("PHAROS_", $variable, "_USE_SSL_MUTUAL"),
                value_parser = boolean, help_heading = $heading
            )]
            mutual: bool,
            /// PEM file of the server's certificate, followed by its intermediate certificates;
            /// reloaded when it changes
            #[arg(
                id = concat!($listener, "-server-cert"), long = concat!($listener, "-server-cert"),
                value_name = "FILE", env = concat!("PHAROS_", $variable, "_SERVER_CERT"),
                help_heading = $heading
            )]
            certificate: Option<PathBuf>,
            /// PEM file of the certificate's private key (PKCS#8, PKCS#1 or SEC1, unencrypted)
            #[arg(
                id = concat!($listener, "-server-key"), long = concat!($listener, "-server-key"),
                value_name = "FILE", env = concat!("PHAROS_", $variable, "_SERVER_KEY"),
                help_heading = $heading
            )]
            key: Option<PathBuf>,
            /// PEM file of the authorities that must have signed client certificates
            #[arg(
                id = concat!($listener, "-root-cert"), long = concat!($listener, "-root-cert"),
                value_name = "FILE", env = concat!("PHAROS_", $variable, "_ROOT_CERT"),
                help_heading = $heading
            )]
            root: Option<PathBuf>,
        }

        impl $name {
            /// Returns the options of the listener.
            pub fn options(&self) -> TlsOptions {
                let Self { use_ssl, mutual, certificate, key, root } = self.clone();
                TlsOptions { listener: $listener, use_ssl, mutual, certificate, key, root }
            }
        }
    };
}

flags!(HttpTls, "http", "HTTP", HTTP, "HTTP");
flags!(GrpcTls, "grpc", "GRPC", GRPC, "gRPC");
flags!(MetricsTls, "metrics", "METRICS", METRICS, "the metrics listener");

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn reports_missing_files_and_flags_without_effect() {
        let file = |name: &str| Some(PathBuf::from(name));
        let of = |use_ssl, mutual, certificate, key, root| {
            let options = TlsOptions { listener: "grpc", use_ssl, mutual, certificate, key, root };
            let mut unused = Vec::new();
            let paths = options.paths(|text| unused.push(text));
            (paths, unused.join("; "))
        };
        let paths = |authorities| {
            Ok(Some(TlsFiles { certificate: "c".into(), key: "k".into(), authorities }))
        };
        assert_eq!(of(false, false, None, None, None), (Ok(None), String::new()));
        assert_eq!(of(true, false, file("c"), file("k"), None), (paths(None), String::new()));
        assert_eq!(
            of(false, true, file("c"), file("k"), file("r")),
            (paths(file("r")), String::new())
        );
        let (result, unused) = of(true, false, file("c"), file("k"), file("r"));
        assert_eq!(
            (result, unused),
            (paths(None), "--grpc-root-cert has no effect without --grpc-use-ssl-mutual".into())
        );
        let (result, unused) = of(false, false, file("c"), None, None);
        assert_eq!(
            (result, unused),
            (Ok(None), "--grpc-server-cert has no effect without --grpc-use-ssl".into())
        );
        let error = |options: (Result<_, String>, String)| {
            options.0.map(|_: Option<TlsFiles>| ()).unwrap_err()
        };
        assert_eq!(
            error(of(true, false, None, file("k"), None)),
            "--grpc-use-ssl needs --grpc-server-cert FILE"
        );
        assert_eq!(
            error(of(true, false, file("c"), None, None)),
            "--grpc-use-ssl needs --grpc-server-key FILE"
        );
        assert_eq!(
            error(of(true, true, file("c"), file("k"), None)),
            "--grpc-use-ssl-mutual needs --grpc-root-cert FILE"
        );
    }
}
