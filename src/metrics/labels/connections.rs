//! What can happen to connections, and to the files that say who may connect.

/// Where a connection came in (label `listener`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// HTTP.
    Http,
    /// gRPC.
    Grpc,
    /// The metrics.
    Metrics,
}

impl Listener {
    /// Every value, in order.
    pub const ALL: [Self; 3] = [Self::Http, Self::Grpc, Self::Metrics];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Metrics => "metrics",
        }
    }
}

/// Why the server closed a connection that would have gone on (label `reason` of `pharos_connections_refused_total`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There were as many as are allowed.
    Limit,
    /// The client spoke no TLS where only that is spoken.
    NotTls,
    /// The client spoke TLS where none is spoken.
    UnexpectedTls,
    /// The TLS handshake failed: versions, certificates, or bytes that are none.
    Handshake,
    /// The TLS handshake took too long.
    HandshakeTimeout,
    /// The head of a request took too long.
    HeadTimeout,
    /// The client did not take its answer.
    SlowReader,
    /// What the client sent is no HTTP, or more of it than is allowed.
    Protocol,
}

impl Refused {
    /// Every value, in order.
    pub const ALL: [Self; 8] = [
        Self::Limit,
        Self::NotTls,
        Self::UnexpectedTls,
        Self::Handshake,
        Self::HandshakeTimeout,
        Self::HeadTimeout,
        Self::SlowReader,
        Self::Protocol,
    ];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "LIMIT",
            Self::NotTls => "NOT_TLS",
            Self::UnexpectedTls => "UNEXPECTED_TLS",
            Self::Handshake => "HANDSHAKE",
            Self::HandshakeTimeout => "HANDSHAKE_TIMEOUT",
            Self::HeadTimeout => "HEAD_TIMEOUT",
            Self::SlowReader => "SLOW_READER",
            Self::Protocol => "PROTOCOL",
        }
    }
}

/// Files that say who may connect, and are read again when they change (label `file`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// Certificates and key of a listener.
    Tls(Listener),
    /// `--inference-token-file`.
    InferenceTokens,
    /// `--management-token-file`.
    ManagementTokens,
}

impl Credentials {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tls(Listener::Http) => "http_tls",
            Self::Tls(Listener::Grpc) => "grpc_tls",
            Self::Tls(Listener::Metrics) => "metrics_tls",
            Self::InferenceTokens => "inference_tokens",
            Self::ManagementTokens => "management_tokens",
        }
    }
}
