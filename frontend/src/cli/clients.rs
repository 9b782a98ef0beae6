//! The options about clients: who may ask, how many there may be, and how long they may take.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use regex::bytes::{Regex, RegexBuilder};

use super::{GRPC, HTTP, METRICS, boolean, milliseconds, seconds, whole};

const ACCESS: &str = "Access";
const CLIENTS: &str = "Clients";

/// Who may ask.
#[derive(Clone, Debug, Args)]
pub struct Tokens {
    /// A file of bearer tokens, one a line, that open inference, metadata, configurations, statistics and shared memory
    /// (and, without --management-token-file, everything); read again when it changes
    #[arg(id = "inference-token-file", long = "inference-token-file", value_name = "FILE", env = "PHAROS_INFERENCE_TOKEN_FILE", help_heading = ACCESS)]
    pub inference: Option<PathBuf>,
    /// A file of bearer tokens, one a line, that open everything; the model repository, trace and log settings are open to no
    /// others. Health needs no token; read again when it changes
    #[arg(id = "management-token-file", long = "management-token-file", value_name = "FILE", env = "PHAROS_MANAGEMENT_TOKEN_FILE", help_heading = ACCESS)]
    pub management: Option<PathBuf>,
}

/// How long clients may take, on every listener. A time of 0 is no limit.
#[derive(Clone, Debug, Args)]
pub struct Patience {
    /// Seconds that a client may take for the TLS handshake; 0 for any time
    #[arg(id = "client-handshake-timeout-secs", long = "client-handshake-timeout-secs", value_name = "SECONDS", default_value = "10", env = "PHAROS_CLIENT_HANDSHAKE_TIMEOUT_SECS", value_parser = seconds, help_heading = CLIENTS)]
    pub handshake: Duration,
    /// Seconds that an HTTP/1 client may take for the head of a request, on a new connection from its beginning; 0 for any
    /// time
    #[arg(id = "client-head-timeout-secs", long = "client-head-timeout-secs", value_name = "SECONDS", default_value = "60", env = "PHAROS_CLIENT_HEAD_TIMEOUT_SECS", value_parser = seconds, help_heading = CLIENTS)]
    pub head: Duration,
    /// Seconds for which nothing of a request's body may come, after which it must have come with 240 bytes a second; 0 for
    /// any time. gRPC streams may rest
    #[arg(id = "client-body-timeout-secs", long = "client-body-timeout-secs", value_name = "SECONDS", default_value = "60", env = "PHAROS_CLIENT_BODY_TIMEOUT_SECS", value_parser = seconds, help_heading = CLIENTS)]
    pub body: Duration,
    /// Seconds for which a client may take nothing of what is sent to it; 0 for any time
    #[arg(id = "client-write-timeout-secs", long = "client-write-timeout-secs", value_name = "SECONDS", default_value = "300", env = "PHAROS_CLIENT_WRITE_TIMEOUT_SECS", value_parser = seconds, help_heading = CLIENTS)]
    pub write: Duration,
    /// Seconds that a connection may wait for its next request; 0 for any time
    #[arg(id = "client-idle-timeout-secs", long = "client-idle-timeout-secs", value_name = "SECONDS", default_value = "300", env = "PHAROS_CLIENT_IDLE_TIMEOUT_SECS", value_parser = seconds, help_heading = CLIENTS)]
    pub idle: Duration,
}

/// How many clients there may be, and what of their requests goes where.
#[derive(Clone, Debug, Args)]
pub struct HttpClients {
    /// Connections of HTTP at a time; the one too many is answered with 503 and closed; 0 for any number [default: 16384, or
    /// a third of the files that the process may open]
    #[arg(id = "http-max-connections", long = "http-max-connections", value_name = "N", env = "PHAROS_HTTP_MAX_CONNECTIONS", value_parser = whole(0..=usize::MAX), help_heading = HTTP)]
    pub max_connections: Option<usize>,
    /// Let other processes of this user listen on the HTTP port too; the system shares the connections out
    #[arg(id = "reuse-http-port", long = "reuse-http-port", value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_REUSE_HTTP_PORT", value_parser = boolean, help_heading = HTTP)]
    pub reuse_port: bool,
    /// Threads that serve the clients of HTTP, gRPC and the metrics [default: one for each core]
    #[arg(id = "http-thread-count", long = "http-thread-count", value_name = "N", env = "PHAROS_HTTP_THREAD_COUNT", value_parser = whole(1..=1024u32), help_heading = HTTP)]
    pub threads: Option<u32>,
    /// Bytes of requests that may be in reception at a time, over all listeners; decompressed data counts too [default: a
    /// quarter of the memory that this process may use]
    #[arg(id = "receive-memory-byte-size", long = "receive-memory-byte-size", value_name = "BYTES", env = "PHAROS_RECEIVE_MEMORY_BYTE_SIZE", value_parser = clap::value_parser!(u64).range(1..), help_heading = HTTP)]
    pub receive_memory: Option<u64>,
    /// Headers of HTTP whose name matches become parameters of the request: a regular expression, found anywhere in the
    /// name, capital or not (unless it begins with (?-i)); names arrive in small letters
    #[arg(id = "http-header-forward-pattern", long = "http-header-forward-pattern", value_name = "REGEX", env = "PHAROS_HTTP_HEADER_FORWARD_PATTERN", value_parser = pattern, help_heading = HTTP)]
    pub forward: Option<Regex>,
    /// Connections to the metrics listener at a time; 0 for any number
    #[arg(id = "metrics-max-connections", long = "metrics-max-connections", value_name = "N", default_value_t = 256, env = "PHAROS_METRICS_MAX_CONNECTIONS", value_parser = whole(0..=usize::MAX), help_heading = METRICS)]
    pub max_scrapers: usize,
}

/// The same of gRPC, and how its connections are kept.
#[derive(Clone, Debug, Args)]
pub struct GrpcClients {
    /// Connections of gRPC at a time; the one too many is told so and closed; 0 for any number [default: as for HTTP]
    #[arg(id = "grpc-max-connections", long = "grpc-max-connections", value_name = "N", env = "PHAROS_GRPC_MAX_CONNECTIONS", value_parser = whole(0..=usize::MAX), help_heading = GRPC)]
    pub max_connections: Option<usize>,
    /// Let other processes of this user listen on the gRPC port too; the system shares the connections out
    #[arg(id = "reuse-grpc-port", long = "reuse-grpc-port", value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_REUSE_GRPC_PORT", value_parser = boolean, help_heading = GRPC)]
    pub reuse_port: bool,
    /// Headers of gRPC whose name matches become parameters of the request, as those of HTTP
    #[arg(id = "grpc-header-forward-pattern", long = "grpc-header-forward-pattern", value_name = "REGEX", env = "PHAROS_GRPC_HEADER_FORWARD_PATTERN", value_parser = pattern, help_heading = GRPC)]
    pub forward: Option<Regex>,
    /// Compress answers for all clients that can read it: none, low, medium or high. There is one level of work (6 of 9);
    /// with none, who compresses a request gets a compressed answer
    #[arg(id = "grpc-infer-response-compression-level", long = "grpc-infer-response-compression-level", value_name = "LEVEL", default_value = "none", env = "PHAROS_GRPC_INFER_RESPONSE_COMPRESSION_LEVEL", ignore_case = true, value_parser = ["none", "low", "medium", "high"], help_heading = GRPC)]
    pub compression: String,
    /// Milliseconds after which an idle connection is asked whether its client is still there
    #[arg(id = "grpc-keepalive-time", long = "grpc-keepalive-time", value_name = "MILLISECONDS", default_value = "120000", env = "PHAROS_GRPC_KEEPALIVE_TIME", value_parser = milliseconds, help_heading = GRPC)]
    pub keepalive_time: Duration,
    /// Milliseconds that the client may take to answer that
    #[arg(id = "grpc-keepalive-timeout", long = "grpc-keepalive-timeout", value_name = "MILLISECONDS", default_value = "20000", env = "PHAROS_GRPC_KEEPALIVE_TIMEOUT", value_parser = milliseconds, help_heading = GRPC)]
    pub keepalive_timeout: Duration,
    /// Milliseconds after which a connection is asked to be made anew, a tenth more or less [default: never]
    #[arg(id = "grpc-max-connection-age", long = "grpc-max-connection-age", value_name = "MILLISECONDS", env = "PHAROS_GRPC_MAX_CONNECTION_AGE", value_parser = milliseconds, help_heading = GRPC)]
    pub max_age: Option<Duration>,
    /// Milliseconds that calls on such a connection may then take [default: any time]
    #[arg(id = "grpc-max-connection-age-grace", long = "grpc-max-connection-age-grace", value_name = "MILLISECONDS", env = "PHAROS_GRPC_MAX_CONNECTION_AGE_GRACE", value_parser = milliseconds, help_heading = GRPC)]
    pub max_age_grace: Option<Duration>,
    /// Accepted and without effect: connections are asked whether or not there are calls
    #[arg(id = "grpc-keepalive-permit-without-calls", long = "grpc-keepalive-permit-without-calls", value_name = "BOOL", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_GRPC_KEEPALIVE_PERMIT_WITHOUT_CALLS", value_parser = boolean, help_heading = GRPC)]
    permit_without_calls: Option<bool>,
    /// Accepted and without effect: an unanswered question closes the connection
    #[arg(id = "grpc-http2-max-pings-without-data", long = "grpc-http2-max-pings-without-data", value_name = "N", env = "PHAROS_GRPC_HTTP2_MAX_PINGS_WITHOUT_DATA", value_parser = whole(0..=u32::MAX), help_heading = GRPC)]
    max_pings: Option<u32>,
    /// Accepted and without effect: clients may ask as often as they like
    #[arg(id = "grpc-http2-min-recv-ping-interval-without-data", long = "grpc-http2-min-recv-ping-interval-without-data", value_name = "MILLISECONDS", env = "PHAROS_GRPC_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA", value_parser = whole(0..=u32::MAX), help_heading = GRPC)]
    min_ping_interval: Option<u32>,
    /// Accepted and without effect: clients may ask as often as they like
    #[arg(id = "grpc-http2-max-ping-strikes", long = "grpc-http2-max-ping-strikes", value_name = "N", env = "PHAROS_GRPC_HTTP2_MAX_PING_STRIKES", value_parser = whole(0..=u32::MAX), help_heading = GRPC)]
    max_ping_strikes: Option<u32>,
    /// Accepted and without effect: calls are no threads
    #[arg(id = "grpc-infer-thread-count", long = "grpc-infer-thread-count", value_name = "N", env = "PHAROS_GRPC_INFER_THREAD_COUNT", value_parser = whole(0..=u32::MAX), help_heading = GRPC)]
    infer_threads: Option<u32>,
    /// Accepted and without effect: calls are not pooled
    #[arg(id = "grpc-infer-allocation-pool-size", long = "grpc-infer-allocation-pool-size", value_name = "N", env = "PHAROS_GRPC_INFER_ALLOCATION_POOL_SIZE", value_parser = whole(0..=u32::MAX), help_heading = GRPC)]
    allocation_pool: Option<u32>,
    /// Accepted and without effect: responses are not pooled
    #[arg(id = "grpc-max-response-pool-size", long = "grpc-max-response-pool-size", value_name = "N", env = "PHAROS_GRPC_MAX_RESPONSE_POOL_SIZE", value_parser = whole(0..=u32::MAX), help_heading = GRPC)]
    response_pool: Option<u32>,
}

impl GrpcClients {
    /// The flags that are given and have no effect, each with why.
    pub fn without_effect(&self) -> Vec<String> {
        let pings = "clients may ask as often as they like";
        let flags = [
            (
                "keepalive-permit-without-calls",
                self.permit_without_calls.is_some(),
                "idle connections are always asked",
            ),
            ("http2-max-pings-without-data", self.max_pings.is_some(), "an unanswered question closes the connection"),
            ("http2-min-recv-ping-interval-without-data", self.min_ping_interval.is_some(), pings),
            ("http2-max-ping-strikes", self.max_ping_strikes.is_some(), pings),
            ("infer-thread-count", self.infer_threads.is_some(), "calls are no threads; see --http-thread-count"),
            ("infer-allocation-pool-size", self.allocation_pool.is_some(), "calls are not pooled"),
            ("max-response-pool-size", self.response_pool.is_some(), "responses are not pooled"),
        ];
        let given = flags.into_iter().filter(|(_, given, _)| *given);
        given.map(|(flag, _, why)| format!("--grpc-{flag} has no effect: {why}")).collect()
    }

    /// Whether answers are compressed for all clients that can read that.
    pub fn compress(&self) -> bool {
        !self.compression.eq_ignore_ascii_case("none")
    }
}

/// A pattern for names of headers, which are ASCII.
fn pattern(text: &str) -> Result<Regex, String> {
    let pattern = RegexBuilder::new(text).unicode(false).case_insensitive(true).size_limit(1 << 20).build();
    pattern.map_err(|error| format!("it is no regular expression: {error}"))
}
