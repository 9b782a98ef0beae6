//! What is configured of the response cache.

use std::path::PathBuf;
use std::time::Duration;

/// What is configured of the response cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where responses are kept.
    pub backend: Backend,
    /// Whether concurrent equal requests are executed once.
    pub single_flight: bool,
}

/// Where responses are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// In this process, at most this number of bytes.
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
    /// How long a response is kept; `None` leaves it to Redis.
    pub ttl: Option<Duration>,
    /// The longest look-up.
    pub timeout: Duration,
    /// Whether the server is a node of a cluster.
    pub cluster: bool,
    /// TLS, if the connection is encrypted.
    pub tls: Option<RedisTls>,
}

/// PEM files for TLS with a Redis server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisTls {
    /// The certificate authorities; `None` for those that the machine trusts.
    pub cacert: Option<PathBuf>,
    /// The client's certificate, with its chain.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
}

impl std::fmt::Debug for RedisSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Redis at {}:{}, database {}", self.host, self.port, self.db)
    }
}
