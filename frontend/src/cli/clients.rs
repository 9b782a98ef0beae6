//! The flags of clients: access tokens, connection limits and timeouts, shared memory, times in
//! answers.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use pharos_edge::response_timing::{Mode, ResponseTiming};
use regex::bytes::{Regex, RegexBuilder};

use super::{GENERAL, GRPC, HTTP, METRICS, boolean, milliseconds, seconds, whole};

const ACCESS: &str = "Access control";
const CLIENTS: &str = "Client timeouts";

/// Shared memory of clients.
#[derive(Clone, Debug, Args)]
pub struct SharedMemory {
    /// Allow clients to register system and CUDA shared memory for inputs and outputs
    #[arg(
        id = "allow-client-shm", long = "allow-client-shm", value_name = "BOOL",
        default_value = "false", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_ALLOW_CLIENT_SHM", value_parser = boolean,
        help_heading = GENERAL
    )]
    pub allowed: bool,
}

/// The times of requests in their answers.
#[derive(Clone, Debug, Args)]
pub struct ResponseTimes {
    /// Send the times of a successful inference request with its answer (the header Server-Timing,
    /// or metadata over gRPC): always, on-request (to clients that send request-timing: true), or
    /// off
    #[arg(
        id = "response-timing", long = "response-timing", value_name = "WHEN",
        default_value = "on-request", env = "PHAROS_RESPONSE_TIMING", value_parser = timing_mode,
        help_heading = GENERAL
    )]
    mode: Mode,
    /// With --response-timing=always, send times with one of N answers, and to all clients that
    /// request them
    #[arg(
        id = "response-timing-rate", long = "response-timing-rate", value_name = "N",
        default_value_t = 1, env = "PHAROS_RESPONSE_TIMING_RATE",
        value_parser = whole(1..=u32::MAX), help_heading = GENERAL
    )]
    rate: u32,
}

impl ResponseTimes {
    /// Returns the setting, which all listeners share.
    pub fn setting(&self) -> ResponseTiming {
        ResponseTiming::new(self.mode, self.rate)
    }
}

fn timing_mode(text: &str) -> Result<Mode, String> {
    match text.to_ascii_lowercase().as_str() {
        "always" => Ok(Mode::Always),
        "on-request" => Ok(Mode::OnRequest),
        "off" => Ok(Mode::Off),
        _ => Err("allowed are always, on-request and off".to_owned()),
    }
}

/// Access control.
#[derive(Clone, Debug, Args)]
pub struct Tokens {
    /// File of bearer tokens, one per line, that permit inference, metadata, configurations,
    /// statistics and shared memory (without --management-token-file: everything); reloaded when
    /// it changes
    #[arg(
        id = "inference-token-file", long = "inference-token-file", value_name = "FILE",
        env = "PHAROS_INFERENCE_TOKEN_FILE", help_heading = ACCESS
    )]
    pub inference: Option<PathBuf>,
    /// File of bearer tokens, one per line, that permit everything; the model repository, trace
    /// and log settings require one. Health needs no token; reloaded when the file changes
    #[arg(
        id = "management-token-file", long = "management-token-file", value_name = "FILE",
        env = "PHAROS_MANAGEMENT_TOKEN_FILE", help_heading = ACCESS
    )]
    pub management: Option<PathBuf>,
}

/// Timeouts of clients, on every listener; 0 disables a timeout.
#[derive(Clone, Debug, Args)]
pub struct ClientTimeouts {
    /// Timeout of the TLS handshake in seconds; 0 for no timeout
    #[arg(
        id = "client-handshake-timeout-secs", long = "client-handshake-timeout-secs",
        value_name = "SECONDS", default_value = "10", env = "PHAROS_CLIENT_HANDSHAKE_TIMEOUT_SECS",
        value_parser = seconds, help_heading = CLIENTS
    )]
    pub handshake: Duration,
    /// Timeout of the head of an HTTP/1 request in seconds, measured from the first byte, on a new
    /// connection from its start; 0 for no timeout
    #[arg(
        id = "client-head-timeout-secs", long = "client-head-timeout-secs", value_name = "SECONDS",
        default_value = "60", env = "PHAROS_CLIENT_HEAD_TIMEOUT_SECS", value_parser = seconds,
        help_heading = CLIENTS
    )]
    pub head: Duration,
    /// Maximum seconds without data of a request's body; bodies that take longer in total must
    /// average 240 bytes a second. 0 for no timeout. gRPC streams are exempt
    #[arg(
        id = "client-body-timeout-secs", long = "client-body-timeout-secs", value_name = "SECONDS",
        default_value = "60", env = "PHAROS_CLIENT_BODY_TIMEOUT_SECS", value_parser = seconds,
        help_heading = CLIENTS
    )]
    pub body: Duration,
    /// Maximum seconds for which a client reads nothing of a response; 0 for no timeout
    #[arg(
        id = "client-write-timeout-secs", long = "client-write-timeout-secs",
        value_name = "SECONDS", default_value = "300", env = "PHAROS_CLIENT_WRITE_TIMEOUT_SECS",
        value_parser = seconds, help_heading = CLIENTS
    )]
    pub write: Duration,
    /// Maximum seconds that a connection waits for its next request; 0 for no timeout
    #[arg(
        id = "client-idle-timeout-secs", long = "client-idle-timeout-secs", value_name = "SECONDS",
        default_value = "300", env = "PHAROS_CLIENT_IDLE_TIMEOUT_SECS", value_parser = seconds,
        help_heading = CLIENTS
    )]
    pub idle: Duration,
}

/// Limits and settings of HTTP connections.
#[derive(Clone, Debug, Args)]
pub struct HttpClients {
    /// Maximum number of HTTP connections; further ones get 503 and are closed. 0 for no limit
    /// [default: 16384, at most a third of the process's open file limit]
    #[arg(
        id = "http-max-connections", long = "http-max-connections", value_name = "N",
        env = "PHAROS_HTTP_MAX_CONNECTIONS", value_parser = whole(0..=usize::MAX),
        help_heading = HTTP
    )]
    pub max_connections: Option<usize>,
    /// Let other processes of this user listen on the same HTTP port (SO_REUSEPORT); the system
    /// distributes the connections
    #[arg(
        id = "reuse-http-port", long = "reuse-http-port", value_name = "BOOL",
        default_value = "false", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_REUSE_HTTP_PORT", value_parser = boolean,
        help_heading = HTTP
    )]
    pub reuse_port: bool,
    /// Number of threads that serve HTTP, gRPC and the metrics [default: one per core]
    #[arg(
        id = "http-thread-count", long = "http-thread-count", value_name = "N",
        env = "PHAROS_HTTP_THREAD_COUNT", value_parser = whole(1..=1024u32), help_heading = HTTP
    )]
    pub threads: Option<u32>,
    /// Maximum bytes of requests being received concurrently, over all listeners and including
    /// decompressed data [default: a quarter of the memory available to the process]
    #[arg(
        id = "receive-memory-byte-size", long = "receive-memory-byte-size", value_name = "BYTES",
        env = "PHAROS_RECEIVE_MEMORY_BYTE_SIZE", value_parser = clap::value_parser!(u64).range(1..),
        help_heading = HTTP
    )]
    pub receive_memory: Option<u64>,
    /// Regular expression of HTTP headers to forward as request parameters. It may match any part
    /// of the name; names are in lower case, and case is ignored unless the expression begins with
    /// (?-i)
    #[arg(
        id = "http-header-forward-pattern", long = "http-header-forward-pattern",
        value_name = "REGEX", env = "PHAROS_HTTP_HEADER_FORWARD_PATTERN", value_parser = pattern,
        help_heading = HTTP
    )]
    pub forward: Option<Regex>,
    /// Maximum number of connections to the metrics listener; 0 for no limit
    #[arg(
        id = "metrics-max-connections", long = "metrics-max-connections", value_name = "N",
        default_value_t = 256, env = "PHAROS_METRICS_MAX_CONNECTIONS",
        value_parser = whole(0..=usize::MAX), help_heading = METRICS
    )]
    pub metrics_max_connections: usize,
}

/// Limits and settings of gRPC connections.
#[derive(Clone, Debug, Args)]
pub struct GrpcClients {
    /// Maximum number of gRPC connections; further ones are closed. 0 for no limit [default: as
    /// for HTTP]
    #[arg(
        id = "grpc-max-connections", long = "grpc-max-connections", value_name = "N",
        env = "PHAROS_GRPC_MAX_CONNECTIONS", value_parser = whole(0..=usize::MAX),
        help_heading = GRPC
    )]
    pub max_connections: Option<usize>,
    /// Let other processes of this user listen on the same gRPC port (SO_REUSEPORT); the system
    /// distributes the connections
    #[arg(
        id = "reuse-grpc-port", long = "reuse-grpc-port", value_name = "BOOL",
        default_value = "false", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_REUSE_GRPC_PORT", value_parser = boolean,
        help_heading = GRPC
    )]
    pub reuse_port: bool,
    /// Regular expression of gRPC headers to forward as request parameters, matched as for HTTP
    #[arg(
        id = "grpc-header-forward-pattern", long = "grpc-header-forward-pattern",
        value_name = "REGEX", env = "PHAROS_GRPC_HEADER_FORWARD_PATTERN", value_parser = pattern,
        help_heading = GRPC
    )]
    pub forward: Option<Regex>,
    /// Compress responses to all clients that accept it: none, low, medium or high (all at level 6
    /// of 9). With none, only compressed requests get compressed responses
    #[arg(
        id = "grpc-infer-response-compression-level",
        long = "grpc-infer-response-compression-level", value_name = "LEVEL",
        default_value = "none", env = "PHAROS_GRPC_INFER_RESPONSE_COMPRESSION_LEVEL",
        ignore_case = true, value_parser = ["none", "low", "medium", "high"], help_heading = GRPC
    )]
    pub compression: String,
    /// Milliseconds between keepalive pings on an idle connection
    #[arg(
        id = "grpc-keepalive-time", long = "grpc-keepalive-time", value_name = "MILLISECONDS",
        default_value = "120000", env = "PHAROS_GRPC_KEEPALIVE_TIME", value_parser = milliseconds,
        help_heading = GRPC
    )]
    pub keepalive_time: Duration,
    /// Milliseconds to wait for the reply to a keepalive ping before the connection is closed
    #[arg(
        id = "grpc-keepalive-timeout", long = "grpc-keepalive-timeout", value_name = "MILLISECONDS",
        default_value = "20000", env = "PHAROS_GRPC_KEEPALIVE_TIMEOUT", value_parser = milliseconds,
        help_heading = GRPC
    )]
    pub keepalive_timeout: Duration,
    /// Milliseconds after which a connection is shut down gracefully (GOAWAY), varied by up to a
    /// tenth [default: never]
    #[arg(
        id = "grpc-max-connection-age", long = "grpc-max-connection-age",
        value_name = "MILLISECONDS", env = "PHAROS_GRPC_MAX_CONNECTION_AGE",
        value_parser = milliseconds, help_heading = GRPC
    )]
    pub max_age: Option<Duration>,
    /// Milliseconds after that age for which calls in flight may continue [default: unlimited]
    #[arg(
        id = "grpc-max-connection-age-grace", long = "grpc-max-connection-age-grace",
        value_name = "MILLISECONDS", env = "PHAROS_GRPC_MAX_CONNECTION_AGE_GRACE",
        value_parser = milliseconds, help_heading = GRPC
    )]
    pub max_age_grace: Option<Duration>,
    /// Accepted, no effect: pings are sent with and without calls in flight
    #[arg(
        id = "grpc-keepalive-permit-without-calls", long = "grpc-keepalive-permit-without-calls",
        value_name = "BOOL", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_GRPC_KEEPALIVE_PERMIT_WITHOUT_CALLS",
        value_parser = boolean, help_heading = GRPC
    )]
    permit_without_calls: Option<bool>,
    /// Accepted, no effect: one unanswered ping closes the connection
    #[arg(
        id = "grpc-http2-max-pings-without-data", long = "grpc-http2-max-pings-without-data",
        value_name = "N", env = "PHAROS_GRPC_HTTP2_MAX_PINGS_WITHOUT_DATA",
        value_parser = whole(0..=u32::MAX), help_heading = GRPC
    )]
    max_pings: Option<u32>,
    /// Accepted, no effect: the rate of client pings is not limited
    #[arg(
        id = "grpc-http2-min-recv-ping-interval-without-data",
        long = "grpc-http2-min-recv-ping-interval-without-data", value_name = "MILLISECONDS",
        env = "PHAROS_GRPC_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA",
        value_parser = whole(0..=u32::MAX), help_heading = GRPC
    )]
    min_ping_interval: Option<u32>,
    /// Accepted, no effect: the rate of client pings is not limited
    #[arg(
        id = "grpc-http2-max-ping-strikes", long = "grpc-http2-max-ping-strikes", value_name = "N",
        env = "PHAROS_GRPC_HTTP2_MAX_PING_STRIKES", value_parser = whole(0..=u32::MAX),
        help_heading = GRPC
    )]
    max_ping_strikes: Option<u32>,
    /// Accepted, no effect: calls do not occupy threads; see --http-thread-count
    #[arg(
        id = "grpc-infer-thread-count", long = "grpc-infer-thread-count", value_name = "N",
        env = "PHAROS_GRPC_INFER_THREAD_COUNT", value_parser = whole(0..=u32::MAX),
        help_heading = GRPC
    )]
    infer_threads: Option<u32>,
    /// Accepted, no effect: calls are not pooled
    #[arg(
        id = "grpc-infer-allocation-pool-size", long = "grpc-infer-allocation-pool-size",
        value_name = "N", env = "PHAROS_GRPC_INFER_ALLOCATION_POOL_SIZE",
        value_parser = whole(0..=u32::MAX), help_heading = GRPC
    )]
    allocation_pool: Option<u32>,
    /// Accepted, no effect: responses are not pooled
    #[arg(
        id = "grpc-max-response-pool-size", long = "grpc-max-response-pool-size", value_name = "N",
        env = "PHAROS_GRPC_MAX_RESPONSE_POOL_SIZE", value_parser = whole(0..=u32::MAX),
        help_heading = GRPC
    )]
    response_pool: Option<u32>,
}

impl GrpcClients {
    /// Returns the given flags that have no effect, each with the reason.
    pub fn without_effect(&self) -> Vec<String> {
        let pings = "the rate of client pings is not limited";
        let flags = [
            (
                "keepalive-permit-without-calls",
                self.permit_without_calls.is_some(),
                "pings are sent with and without calls in flight",
            ),
            (
                "http2-max-pings-without-data",
                self.max_pings.is_some(),
                "one unanswered ping closes the connection",
            ),
            ("http2-min-recv-ping-interval-without-data", self.min_ping_interval.is_some(), pings),
            ("http2-max-ping-strikes", self.max_ping_strikes.is_some(), pings),
            (
                "infer-thread-count",
                self.infer_threads.is_some(),
                "calls do not occupy threads; see --http-thread-count",
            ),
            ("infer-allocation-pool-size", self.allocation_pool.is_some(), "calls are not pooled"),
            ("max-response-pool-size", self.response_pool.is_some(), "responses are not pooled"),
        ];
        let given = flags.into_iter().filter(|(_, given, _)| *given);
        given.map(|(flag, _, why)| format!("--grpc-{flag} has no effect: {why}")).collect()
    }

    /// Returns whether responses are compressed for all clients that accept it.
    pub fn compress(&self) -> bool {
        !self.compression.eq_ignore_ascii_case("none")
    }
}

/// Parses a pattern for names of headers, which are ASCII.
fn pattern(text: &str) -> Result<Regex, String> {
    let pattern =
        RegexBuilder::new(text).unicode(false).case_insensitive(true).size_limit(1 << 20).build();
    pattern.map_err(|error| format!("invalid regular expression: {error}"))
}
