//! Pushes all metrics to an OpenTelemetry collector at an interval: one task on the main runtime.
//!
//! One export is in memory at a time. It is retried with growing pauses until its time limit;
//! afterwards the next one replaces it, which loses no count: cumulative values contain it, and
//! deltas start at the last accepted export. One log line reports the loss of the collector,
//! another its return.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::Cache;
use pharos::metrics::otlp::{Aggregation, Encoder, Export, Temporality};
use pharos::otlp::{Random, Rejected, Signal, SplitMix, resource_attributes};
use pharos::timeline::Instant;
use pharos_os::{blocking, clock};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use crate::otlp::{ACCEPTED, Endpoint, FAILED, Failure, Pauses, Sender, seed};

/// The settings of the push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The collector.
    pub endpoint: Endpoint,
    /// The time between exports.
    pub interval: Duration,
    /// The time limit of an export with its retries.
    pub limit: Duration,
    /// Whether values are cumulative.
    pub temporality: Temporality,
    /// The buckets of histograms.
    pub aggregation: Aggregation,
    /// Attributes of this server, in addition to the attributes of every server.
    pub resource: Vec<(String, String)>,
}

/// The running push.
#[derive(Debug)]
pub struct Push {
    url: String,
    stopping: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Push {
    /// Starts the push on the current runtime. `observe` updates the cache before each export, on a
    /// thread that may block. The collector may be unreachable.
    ///
    /// # Errors
    /// The endpoint's certificates or headers are not usable.
    pub fn start(
        settings: Settings,
        cache: &Arc<Cache>,
        observe: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let sender = Sender::new(&settings.endpoint, Signal::Metrics)?;
        let attributes = resource_attributes(&with_instance(settings.resource.clone()));
        let (stopping, stop) = watch::channel(false);
        for result in [ACCEPTED, FAILED] {
            cache.count(Builtin::OtlpExports, &[Signal::Metrics.as_str(), result], 0.0);
        }
        for result in [ACCEPTED, REJECTED] {
            cache.count(Builtin::OtlpPoints, &[result], 0.0);
        }
        let form = (settings.temporality, settings.aggregation);
        let url = settings.endpoint.url.clone();
        tracing::info!("metrics are pushed to {url} every {} ms", settings.interval.as_millis());
        let pusher = Pusher {
            sender,
            encoder: Arc::new(Mutex::new(Encoder::new(&attributes, form, clock::wall_ns()))),
            observe: Arc::new(observe),
            cache: Arc::clone(cache),
            settings,
            stop,
            lost: false,
            not_before: None,
        };
        Ok(Self { url, stopping, task: tokio::spawn(pusher.run()) })
    }

    /// Exports the last values, at most for `limit`, and ends.
    pub async fn stop(mut self, limit: Duration) {
        self.stopping.send_replace(true);
        if tokio::time::timeout(limit, &mut self.task).await.is_err() {
            self.task.abort();
            tracing::error!("the last metrics could not be sent to {} in time", self.url);
        }
    }
}

/// The result of data points that the collector rejected.
const REJECTED: &str = "rejected";

/// Adds the attribute that distinguishes this process from others of the same service: a random
/// UUID (version 4), as the semantic conventions for `service.instance.id` recommend.
fn with_instance(mut resource: Vec<(String, String)>) -> Vec<(String, String)> {
    const INSTANCE: &str = "service.instance.id";
    if !resource.iter().any(|(key, _)| key == INSTANCE) {
        let mut random = SplitMix(seed());
        let random_bits = u128::from(random.next()) << 64 | u128::from(random.next());
        // Version 4 and the variant, at their places from the right (RFC 9562, 5.4).
        let uuid = (random_bits & !(0xf << 76) & !(0x3 << 62)) | (0x4 << 76) | (0x2 << 62);
        let text = format!("{uuid:032x}");
        let parts =
            [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| text.get(range).unwrap_or_default());
        resource.push((INSTANCE.to_owned(), parts.join("-")));
    }
    resource
}

/// The state of the task.
struct Pusher {
    sender: Sender,
    /// Locked by the thread that encodes and by this task, never both.
    encoder: Arc<Mutex<Encoder>>,
    observe: Arc<dyn Fn() + Send + Sync>,
    cache: Arc<Cache>,
    settings: Settings,
    stop: watch::Receiver<bool>,
    /// Whether the last export failed.
    lost: bool,
    /// The time before which the collector wants no export.
    not_before: Option<Instant>,
}

impl Pusher {
    async fn run(mut self) {
        let mut ticks = tokio::time::interval(self.settings.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.reset();
        loop {
            let stopping = tokio::select! {
                _ = ticks.tick() => false,
                // An error means that nothing can stop the task any more but the end of the
                // runtime.
                _ = self.stop.wait_for(|stopping| *stopping) => true,
            };
            if stopping || self.not_before.is_none_or(|at| at <= clock::now()) {
                self.export().await;
            }
            if stopping {
                return;
            }
        }
    }

    /// Exports the present values, within the time limit. After a failure, the remaining messages
    /// are not sent.
    async fn export(&mut self) {
        let deadline = clock::now() + self.settings.limit;
        let mut exports = self.encode().await.into_iter();
        while let Some(export) = exports.next() {
            match self.deliver(&export, deadline).await {
                Ok(rejected) => self.accepted(export, rejected),
                Err(failure) => {
                    let failed = 1 + exports.len();
                    self.count(FAILED, failed);
                    tracing::debug!(
                        "{failed} messages with metrics were not sent: {}",
                        failure.text
                    );
                    return;
                }
            }
        }
    }

    /// Reads and encodes all metrics on a thread that may block.
    async fn encode(&self) -> Vec<Export> {
        let encoder = self.encoder.clone();
        let observe = self.observe.clone();
        let cache = self.cache.clone();
        let encoded = blocking::run(move || {
            observe();
            encoder.lock().encode(&cache, clock::wall_ns())
        });
        // A panic is already logged; the next export follows.
        encoded.await.unwrap_or_default()
    }

    /// Sends a message until it succeeds, cannot succeed, or the deadline has passed.
    async fn deliver(
        &mut self,
        export: &Export,
        deadline: Instant,
    ) -> Result<Option<Rejected>, Failure> {
        let mut pauses = Pauses::default();
        loop {
            let failure = match self.sender.send(&export.message, deadline - clock::now()).await {
                Ok(rejected) => return Ok(rejected),
                Err(failure) => failure,
            };
            self.failed(&failure);
            let pause = pauses.after(&failure);
            self.not_before = failure.after.map(|_| clock::now() + pause);
            if !failure.retryable || pause >= deadline - clock::now() || *self.stop.borrow() {
                return Err(failure);
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = self.stop.wait_for(|stopping| *stopping) => return Err(failure),
            }
        }
    }

    fn accepted(&mut self, export: Export, rejected: Option<Rejected>) {
        let url = &self.settings.endpoint.url;
        if std::mem::take(&mut self.lost) {
            tracing::info!("the collector of metrics at {url} answers again");
        }
        let points = export.points;
        let refused = rejected.as_ref().map_or(0, |rejected| rejected.count.min(points));
        if let Some(Rejected { reason, .. }) = rejected {
            tracing::warn!(
                "the collector of metrics at {url} rejected {refused} of {points} data points: \
                 {reason}"
            );
        }
        self.not_before = None;
        self.encoder.lock().accepted(export);
        self.count(ACCEPTED, 1);
        self.cache.count(Builtin::OtlpPoints, &[ACCEPTED], (points - refused) as f64);
        self.cache.count(Builtin::OtlpPoints, &[REJECTED], refused as f64);
    }

    fn failed(&mut self, failure: &Failure) {
        if !std::mem::replace(&mut self.lost, true) {
            let url = &self.settings.endpoint.url;
            tracing::warn!(
                "the collector of metrics at {url} does not accept exports: {}",
                failure.text
            );
        }
    }

    fn count(&self, result: &str, exports: usize) {
        self.cache.count(Builtin::OtlpExports, &[Signal::Metrics.as_str(), result], exports as f64);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn instances_have_a_uuid_unless_one_is_given() {
        let of = |resource: &[(&str, &str)]| {
            let resource = resource
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect();
            with_instance(resource)
        };
        let given = of(&[("service.instance.id", "a")]);
        assert_eq!(given, [("service.instance.id".to_owned(), "a".to_owned())]);
        let one = of(&[("zone", "z")]);
        let other = of(&[]);
        let id = &one.last().unwrap().1;
        assert_ne!(*id, other[0].1);
        let lengths: Vec<usize> = id.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert!(id[14..].starts_with('4') && id[19..].starts_with(['8', '9', 'a', 'b']), "{id}");
    }
}
