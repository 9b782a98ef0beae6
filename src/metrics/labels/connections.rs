//! Label values of events of connections, and of files with certificates and tokens.

named_enum! {
    /// The listener that accepted a connection (label `listener`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Listener {
        /// HTTP.
        Http => "http",
        /// gRPC.
        Grpc => "grpc",
        /// The metrics endpoint.
        Metrics => "metrics",
    }
    /// Returns the label's value.
    pub fn as_str;
}

named_enum! {
    /// Why the server refused or closed a connection (label `reason` of
    /// `pharos_connections_refused_total`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Refused {
        /// The limit of connections was reached.
        Limit => "LIMIT",
        /// The client did not use TLS on a TLS listener.
        NotTls => "NOT_TLS",
        /// The client used TLS on a listener without TLS.
        UnexpectedTls => "UNEXPECTED_TLS",
        /// The TLS handshake failed: versions, certificates, or malformed records.
        Handshake => "HANDSHAKE",
        /// The TLS handshake took too long.
        HandshakeTimeout => "HANDSHAKE_TIMEOUT",
        /// The client took too long to send the head of a request.
        HeadTimeout => "HEAD_TIMEOUT",
        /// The client read its response too slowly.
        SlowReader => "SLOW_READER",
        /// The client sent invalid HTTP, or exceeded a limit of the protocol.
        Protocol => "PROTOCOL",
    }
    /// Returns the label's value.
    pub fn as_str;
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
