//! The response cache: stores the responses of models that enable it, in this process or in a Redis
//! that several servers share, and can execute concurrent equal requests once.
//!
//! A cache error costs a miss and never fails a request. Every error is counted, and at most one
//! per second is logged. No lock is held while tensors are hashed or copied.

mod connection;
mod flight;
mod local;
mod redis;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pharos::cache::{Entry, Identity, Key};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::Cache;
use pharos::metrics::log_throttle::Throttle;
use pharos::metrics::record::MissTimes;
use pharos::model::ModelConfig;
use pharos::timeline::Instant;

use flight::{FlightLeader, FlightOutcome, Flights};
use local::Local;
use pharos_os::clock;
use redis::Redis;

/// The response cache of all models.
pub(crate) struct ResponseCache {
    store: Store,
    /// `Some` if concurrent equal requests are executed once.
    flights: Option<Flights>,
    report: Arc<Report>,
}

enum Store {
    Local(Local),
    Redis(Redis),
}

/// When a lookup began and ended.
#[derive(Clone, Copy)]
pub(crate) struct LookUpTimes {
    pub(crate) started: Instant,
    pub(crate) ended: Instant,
}

/// The result of a lookup.
pub(crate) enum Found {
    /// The entry, and when the lookup began and ended.
    Hit(Arc<Entry>, LookUpTimes),
    /// No entry: the caller executes the request and stores its response with this value.
    Miss(Miss),
}

/// A request that was not found. Dropping it without a response lets another waiting request
/// execute instead.
pub(crate) struct Miss {
    key: Key,
    lookup_ns: u64,
    lead: Option<FlightLeader>,
}

impl Miss {
    /// Returns whether equal requests wait for the response to this one.
    pub(crate) fn leads(&self) -> bool {
        self.lead.is_some()
    }

    /// Passes the response to the requests that wait for it, without storing it. Returns the times
    /// of the look-up and of this.
    pub(crate) fn pass_on(self, response: &InferResponse) -> MissTimes {
        let started = clock::now();
        if let Some(lead) = self.lead.filter(FlightLeader::has_followers) {
            lead.finish(&Arc::new(Entry::copy_of(response)));
        }
        MissTimes { lookup_ns: self.lookup_ns, insertion_ns: clock::now().ns_since(started) }
    }
}

impl ResponseCache {
    /// Creates an empty cache, or one that uses a Redis. Needs a Tokio runtime; Redis need not be
    /// reachable yet.
    pub(crate) fn new(settings: &Settings, metrics: Arc<Cache>) -> Self {
        let report = Arc::new(Report { metrics, throttle: Mutex::default() });
        let store = match &settings.backend {
            Backend::Local(size) => Store::Local(Local::new(*size)),
            Backend::Redis(redis) => Store::Redis(Redis::start(redis.clone(), report.clone())),
        };
        let how = if settings.single_flight {
            "; concurrent equal requests are executed once"
        } else {
            ""
        };
        match &settings.backend {
            Backend::Local(size) => {
                tracing::info!("response cache: up to {size} bytes in this process{how}")
            }
            Backend::Redis(redis) => tracing::info!("response cache: {redis:?}{how}"),
        }
        Self { store, flights: settings.single_flight.then(Flights::default), report }
    }

    /// Sets the gauges of the local cache.
    pub(crate) fn observe(&self) {
        let Store::Local(local) = &self.store else { return };
        let usage = local.usage();
        self.report
            .metrics
            .set_gauges(Builtin::CacheEntries, &[(Vec::new(), usage.entries as f64)]);
        self.report.metrics.set_gauges(Builtin::CacheBytes, &[(Vec::new(), usage.bytes as f64)]);
        self.report.metrics.count(Builtin::CacheEvictions, &[], usage.evicted as f64);
    }
}

/// The cache of one loaded model version.
pub(crate) struct ModelResponseCache {
    shared: Arc<ResponseCache>,
    identity: Identity,
}

impl ModelResponseCache {
    /// `identity` includes the files of the version and of the members of an ensemble, so that
    /// responses of other files under the same name are never returned.
    pub(crate) fn new(shared: Arc<ResponseCache>, identity: Identity) -> Self {
        Self { shared, identity }
    }

    /// Looks up the response to a checked request. With single flight, waits for the response of an
    /// equal request that is being executed. Dropping the future cancels the lookup.
    pub(crate) async fn look_up(
        &self,
        config: &ModelConfig,
        request: &InferRequest,
        batch_size: u64,
    ) -> Found {
        let started = clock::now();
        let key = self.identity.key(request);
        let hit = |entry| Found::Hit(entry, LookUpTimes { started, ended: clock::now() });
        let cache = &*self.shared;
        if let Store::Local(local) = &cache.store
            && let Some(entry) = local.get(&key)
        {
            return hit(entry);
        }
        let stored = async {
            match &cache.store {
                // Another request may have stored it between the first lookup and joining the
                // flight.
                Store::Local(local) => cache.flights.as_ref().and_then(|_| local.get(&key)),
                Store::Redis(redis) => Box::pin(redis.get(&key)).await.and_then(|bytes| {
                    let checked = Entry::decode(&bytes, &key).and_then(|entry| {
                        entry.check(config, request, batch_size).map(|()| Arc::new(entry))
                    });
                    checked
                        .inspect_err(|invalid| {
                            cache.report.record(CacheError::Entry, &invalid.to_string())
                        })
                        .ok()
                }),
            }
        };
        let (found, lead) = match &cache.flights {
            None => (stored.await, None),
            Some(flights) => match Box::pin(flights.join(key, stored)).await {
                FlightOutcome::Entry(entry) => (Some(entry), None),
                FlightOutcome::Lead(lead) => (None, Some(lead)),
            },
        };
        match found {
            Some(entry) => hit(entry),
            None => Found::Miss(Miss { key, lookup_ns: clock::now().ns_since(started), lead }),
        }
    }

    /// Stores copies of the response to a request that was not found, and passes it to the requests
    /// that wait for it. Returns the times of the look-up and of this insertion.
    pub(crate) fn store(&self, miss: Miss, response: &InferResponse) -> MissTimes {
        let started = clock::now();
        let Miss { key, lookup_ns, lead } = miss;
        let cache = &*self.shared;
        let waited_for = lead.as_ref().is_some_and(FlightLeader::has_followers);
        let mut entry = None;
        match &cache.store {
            Store::Local(local) => {
                let fits = local.fits(Entry::size_of(response));
                if fits || waited_for {
                    let copy = entry.insert(Arc::new(Entry::copy_of(response)));
                    if fits {
                        local.insert(key, copy.clone());
                    }
                }
                if !fits {
                    let text = format!(
                        "a response of {} bytes is larger than the cache",
                        Entry::size_of(response)
                    );
                    cache.report.record(CacheError::TooLarge, &text);
                }
            }
            Store::Redis(redis) => {
                redis.set(&key, || Entry::encode(response, &key), Entry::size_of(response));
                entry = waited_for.then(|| Arc::new(Entry::copy_of(response)));
            }
        }
        if let (Some(lead), Some(entry)) = (lead, entry) {
            lead.finish(&entry);
        }
        MissTimes { lookup_ns, insertion_ns: clock::now().ns_since(started) }
    }
}

/// Reasons of cache errors (label `reason` of `pharos_cache_errors_total`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CacheError {
    /// There is no connection, or it broke.
    Connection,
    /// The server did not respond in time.
    Timeout,
    /// The server responded with an error or an unexpected value.
    Reply,
    /// The stored bytes are not a valid entry of this request.
    Entry,
    /// Too many commands or bytes are pending.
    Busy,
    /// The response is larger than the cache accepts.
    TooLarge,
}

impl CacheError {
    fn as_str(self) -> &'static str {
        match self {
            Self::Connection => "connection",
            Self::Timeout => "timeout",
            Self::Reply => "reply",
            Self::Entry => "entry",
            Self::Busy => "busy",
            Self::TooLarge => "too_large",
        }
    }
}

/// Counts errors and logs at most one per second.
struct Report {
    metrics: Arc<Cache>,
    throttle: Mutex<Throttle>,
}

impl Report {
    /// Records a lookup or store that failed.
    fn record(&self, error: CacheError, text: &str) {
        self.metrics.count(Builtin::CacheErrors, &[error.as_str()], 1.0);
        let held = self.throttle.lock().admit(clock::now());
        if let Some(held) = held {
            let more = if held > 0 {
                format!(" (and {held} more errors since the last message)")
            } else {
                String::new()
            };
            tracing::warn!("response cache: {text}{more}");
        }
    }
}

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
    /// The port.
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
    /// The certificate authorities; `None` for the system's authorities.
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
