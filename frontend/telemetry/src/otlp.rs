//! Sends OTLP messages to a collector, over HTTP with protobuf or over gRPC.
//! `pharos::metrics::otlp` and `pharos::trace::otlp` encode the messages.
//!
//! Source: the OpenTelemetry protocol, "OTLP/gRPC Response" and "OTLP/HTTP Response"
//! (opentelemetry.io/docs/specs/otlp).

use std::collections::HashSet;
use std::collections::hash_map::RandomState;
use std::fmt::Display;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue, USER_AGENT};
use http::{HeaderMap, Uri};
use parking_lot::Mutex;
use pharos::otlp::{Random, Rejected, Signal, SplitMix};
use pharos_os::client::ClientTls;

mod grpc;
mod http_post;

/// The maximum size of a response, bytes.
const MAX_ANSWER: usize = 64 << 10;
/// The default time limit of one attempt.
pub const TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before the first retry of an export; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause that the server chooses.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The longest pause that a collector can request.
const LONGEST_REQUESTED: Duration = Duration::from_secs(300);
/// The results of exports in the labels of metrics.
pub(crate) const ACCEPTED: &str = "accepted";
pub(crate) const FAILED: &str = "failed";
/// The number of different warnings of one collector that are logged.
const MAX_WARNINGS: usize = 16;
const PRODUCT: &str = concat!("pharos/", env!("CARGO_PKG_VERSION"));

/// A collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The URL as it is shown.
    pub url: String,
    /// Scheme, host, port and path; gRPC uses a fixed path.
    pub target: Uri,
    /// Whether to use gRPC instead of HTTP.
    pub grpc: bool,
    /// Headers of every export.
    pub headers: Vec<(String, String)>,
    /// Whether to compress exports.
    pub gzip: bool,
    /// The time limit of one attempt.
    pub timeout: Duration,
    /// The certificates of encrypted connections.
    pub tls: ClientTls,
}

impl Endpoint {
    /// Returns the default collector of a signal: OTLP over HTTP on this machine.
    pub fn local(signal: Signal) -> Self {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(http::uri::Scheme::HTTP);
        parts.authority = Some(http::uri::Authority::from_static("localhost:4318"));
        parts.path_and_query = Some(http::uri::PathAndQuery::from_static(signal.path()));
        // Cannot fail: all parts are present.
        let target = Uri::from_parts(parts).unwrap_or_default();
        Self {
            url: target.to_string(),
            target,
            grpc: false,
            headers: Vec::new(),
            gzip: false,
            timeout: TIMEOUT,
            tls: ClientTls::default(),
        }
    }
}

/// Why an attempt failed.
#[derive(Debug)]
pub struct Failure {
    /// Whether the export may be retried.
    pub retryable: bool,
    /// The time after which the collector accepts a retry, if it set one.
    pub after: Option<Duration>,
    /// The error text.
    pub text: String,
}

impl Failure {
    fn transient(error: impl Display) -> Self {
        Self { retryable: true, after: None, text: error.to_string() }
    }

    fn permanent(error: impl Display) -> Self {
        Self { retryable: false, after: None, text: error.to_string() }
    }
}

/// Sends the exports of one signal to one collector.
pub struct Sender {
    signal: Signal,
    url: String,
    timeout: Duration,
    client: Client,
    // Locked to look up one text.
    warnings: Mutex<Warnings>,
}

/// The warnings of a collector that were logged.
#[derive(Debug, Default)]
struct Warnings(HashSet<String>);

impl Warnings {
    /// Returns the rest of the log line after the text; `None` if the same text or too many others
    /// were logged before.
    fn admit(&mut self, text: &str) -> Option<&'static str> {
        if self.0.len() == MAX_WARNINGS || !self.0.insert(text.to_owned()) {
            return None;
        }
        Some(if self.0.len() == MAX_WARNINGS {
            "; its further warnings are not logged"
        } else {
            ""
        })
    }
}

enum Client {
    Http(http_post::Client),
    Grpc(grpc::Client),
}

impl Sender {
    /// Creates a client. The collector may be unreachable.
    ///
    /// # Errors
    /// A file of the endpoint's TLS is not usable, or a header is not valid.
    pub fn new(endpoint: &Endpoint, signal: Signal) -> Result<Self, String> {
        let headers = headers(&endpoint.headers)?;
        let client = match endpoint.grpc {
            true => Client::Grpc(grpc::Client::new(endpoint, signal, headers)?),
            false => Client::Http(http_post::Client::new(endpoint, headers)?),
        };
        Ok(Self {
            signal,
            url: endpoint.url.clone(),
            timeout: endpoint.timeout,
            client,
            warnings: Mutex::default(),
        })
    }

    /// Sends a message once, for at most `limit` and the endpoint's time limit. Returns the data
    /// that the collector rejected, if any. Logs each warning of the collector once.
    ///
    /// # Errors
    /// The collector is unreachable, refuses the message, or does not answer in time.
    pub async fn send(
        &self,
        message: &Bytes,
        limit: Duration,
    ) -> Result<Option<Rejected>, Failure> {
        let limit = self.timeout.min(limit);
        let attempt = tokio::time::timeout(limit, async {
            match &self.client {
                Client::Http(client) => client.post(message.clone()).await,
                Client::Grpc(client) => client.export(message.clone()).await,
            }
        });
        let Ok(answered) = attempt.await else {
            return Err(Failure::transient(format!("no response within {} ms", limit.as_millis())));
        };
        let answer = answered?;
        Ok(self.signal.rejected(&answer).and_then(|Rejected { count, reason }| {
            let reason = shortened(reason.as_bytes());
            if count == 0 {
                self.warn(&reason);
                return None;
            }
            Some(Rejected { count, reason })
        }))
    }

    /// Logs a warning about an export that the collector accepted in full, if the text is new.
    fn warn(&self, text: &str) {
        let admitted = self.warnings.lock().admit(text);
        if let Some(end) = admitted {
            let signal = self.signal.as_str();
            let url = &self.url;
            tracing::warn!(
                "the collector of {signal} at {url} accepted an export with a warning: {text}{end}"
            );
        }
    }
}

fn headers(given: &[(String, String)]) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::with_capacity(given.len() + 1);
    headers.insert(USER_AGENT, HeaderValue::from_static(PRODUCT));
    for (name, value) in given {
        let key: HeaderName =
            name.parse().map_err(|_| format!("'{name}' is not a valid name of a header"))?;
        // The value may be a secret.
        let mut value = HeaderValue::from_str(value)
            .map_err(|_| format!("the value of the header '{name}' is not valid"))?;
        value.set_sensitive(true);
        headers.insert(key, value);
    }
    Ok(headers)
}

/// Growing pauses between the attempts of one export.
#[derive(Debug)]
pub struct Pauses {
    next: Duration,
    random: SplitMix,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { next: FIRST_PAUSE, random: SplitMix(seed()) }
    }
}

impl Pauses {
    /// Returns the pause after a failure: three to five quarters of a time that doubles with each
    /// failure, so that servers do not retry in step; not less than the collector requested.
    pub fn after(&mut self, failure: &Failure) -> Duration {
        let pause = self.next * 3 / 4 + self.next / 2 * (self.random.next() as u32 % 1000) / 1000;
        self.next = (self.next * 2).min(LONGEST_PAUSE);
        pause.max(failure.after.unwrap_or_default().min(LONGEST_REQUESTED))
    }
}

/// Returns a seed that differs in each process: the random keys of the standard library's hash
/// maps.
pub(crate) fn seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn shortened(text: &[u8]) -> String {
    String::from_utf8_lossy(text.get(..200).unwrap_or(text)).into_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_respect_the_collector() {
        let mut pauses = Pauses::default();
        let failed = Failure::transient("");
        let base = |count: u32| (FIRST_PAUSE * 2u32.pow(count)).min(LONGEST_PAUSE);
        for count in 0..6 {
            let pause = pauses.after(&failed);
            let base = base(count);
            assert!(pause >= base * 3 / 4 && pause <= base * 5 / 4, "{count}: {pause:?}");
        }
        let wait = |seconds| Failure {
            after: Some(Duration::from_secs(seconds)),
            ..Failure::transient("")
        };
        assert_eq!(pauses.after(&wait(60)), Duration::from_secs(60));
        assert_eq!(pauses.after(&wait(1_000_000)), LONGEST_REQUESTED);
    }

    #[test]
    fn each_warning_is_logged_once_and_their_number_is_limited() {
        let mut warnings = Warnings::default();
        assert_eq!(
            (warnings.admit("a"), warnings.admit("a"), warnings.admit("b")),
            (Some(""), None, Some(""))
        );
        let ends: Vec<_> = (0..100).map(|number| warnings.admit(&number.to_string())).collect();
        let last = Some("; its further warnings are not logged");
        assert_eq!(ends.iter().flatten().count(), MAX_WARNINGS - 2);
        assert_eq!((ends[MAX_WARNINGS - 3], ends[MAX_WARNINGS - 2]), (last, None));
    }

    #[test]
    fn headers_are_checked_before_the_first_export() {
        let given = |name: &str, value: &str| headers(&[(name.to_owned(), value.to_owned())]);
        assert_eq!(given("x-key", "v").unwrap().get("x-key").unwrap(), "v");
        assert!(given("x key", "v").unwrap_err().contains("'x key'"));
        let wrong = given("x-key", "secret\n").unwrap_err();
        assert!(wrong.contains("'x-key'") && !wrong.contains("secret"));
    }
}
