//! Settings of the response cache.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of the response cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The storage of responses.
    pub backend: Backend,
    /// Whether concurrent equal requests are executed once.
    pub single_flight: bool,
}

/// The storage of responses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// In this process, with at most this number of bytes.
    Local(u64),
    /// In a Redis.
    Redis(RedisSettings),
}

/// A Redis server.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisSettings {
    /// A name or an address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The user name; empty for Redis' default user.
    pub user: String,
    /// The password; empty for no authentication.
    pub password: String,
    /// The number of the database.
    pub db: u32,
    /// The lifetime of a response; `None` sets no expiry.
    pub ttl: Option<Duration>,
    /// The time limit of a lookup.
    pub timeout: Duration,
    /// Whether the server is a node of a cluster.
    pub cluster: bool,
    /// TLS, if the connection is encrypted.
    pub tls: Option<RedisTls>,
}

/// PEM files for TLS with a Redis server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisTls {
    /// The certificate authorities; `None` for those of the system.
    pub cacert: Option<PathBuf>,
    /// The client's certificate, with its chain.
    pub cert: Option<PathBuf>,
    /// The key of the client's certificate.
    pub key: Option<PathBuf>,
}

impl std::fmt::Debug for RedisSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Redis at {}:{}, database {}", self.host, self.port, self.db)
    }
}
