//! Label values of events of connections, and of files with certificates and tokens.

/// The listener that accepted a connection (label `listener`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// HTTP.
    Http,
    /// gRPC.
    Grpc,
    /// The metrics endpoint.
    Metrics,
}

impl Listener {
    /// All values, in order.
    pub const ALL: [Self; 3] = [Self::Http, Self::Grpc, Self::Metrics];

    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Metrics => "metrics",
        }
    }
}

/// Why the server refused or closed a connection (label `reason` of `pharos_connections_refused_total`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The limit of connections was reached.
    Limit,
    /// The client did not use TLS on a TLS listener.
    NotTls,
    /// The client used TLS on a listener without TLS.
    UnexpectedTls,
    /// The TLS handshake failed: versions, certificates, or malformed records.
    Handshake,
    /// The TLS handshake took too long.
    HandshakeTimeout,
    /// The client took too long to send the head of a request.
    HeadTimeout,
    /// The client read its response too slowly.
    SlowReader,
    /// The client sent invalid HTTP, or exceeded a limit of the protocol.
    Protocol,
}

impl Refused {
    /// All values, in order.
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

    /// Returns the label's value.
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

/// Files with certificates or tokens, which are reread when they change (label `file`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// Certificate and key of a listener.
    Tls(Listener),
    /// `--inference-token-file`.
    InferenceTokens,
    /// `--management-token-file`.
    ManagementTokens,
}

impl Credentials {
    /// Returns the label's value.
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
