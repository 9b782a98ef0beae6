//! The models of a simulation: one for each way of scheduling, with real drivers and supervisors.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pharos::id::{InstanceId, ModelVersion};
use pharos::metrics::cache::Cache;
use pharos::model::{Completion, Draft, ModelConfig};
use pharos::supervisor::{Backoff, RestartPolicy, Settings, Supervisor};
use pharos::timeline::Instant;

use super::worker::Worker;
use crate::cache::{ModelResponseCache, ResponseCache};
use crate::scheduler::{Driver, DriverSettings, Limits, Timer, placement, settings};
use crate::store::identity::{Files, identity};
use crate::store::scan::{LoadedFiles, VersionFiles};

const TENSORS: &str = "input { name: 'IN' data_type: TYPE_UINT64 dims: 1 } output { name: 'OUT' \
                       data_type: TYPE_UINT64 dims: 1 }";

/// The queue timeout of the model `levels`, in microseconds.
pub(super) const QUEUE_TIMEOUT_US: u64 = 5_000;

/// The longest delay of batches, in microseconds: that of the model `plain`.
pub(super) const QUEUE_DELAY_US: u64 = 500;

/// Names and configurations. With the rate limiter, instances need one unit of the resource `R`,
/// those of `plain` two.
const CONFIGS: [(&str, &str); 9] = [
    (
        "plain",
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 2, 4 ] \
         max_queue_delay_microseconds: 500 }
         instance_group { count: 2 kind: KIND_CPU RATE }",
    ),
    (
        "levels",
        "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 200
         priority_levels: 2 default_priority_level: 2
         default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 5000 \
         allow_timeout_override: true
         max_queue_size: 16 } } instance_group { count: 1 kind: KIND_CPU RATE }",
    ),
    (
        "ordered",
        "max_batch_size: 2 dynamic_batching { preserve_ordering: true } instance_group { count: 3 \
         kind: KIND_CPU RATE }",
    ),
    (
        "cached",
        "max_batch_size: 4 dynamic_batching { } response_cache { enable: true }
         instance_group { count: 2 kind: KIND_CPU RATE }",
    ),
    (
        "direct",
        "max_batch_size: 3 sequence_batching { max_sequence_idle_microseconds: 200000 direct { } }
         instance_group { count: 2 kind: KIND_CPU }",
    ),
    (
        "oldest",
        "max_batch_size: 2 sequence_batching { max_sequence_idle_microseconds: 200000
         oldest { max_candidate_sequences: 4 } } instance_group { count: 2 kind: KIND_CPU }",
    ),
    ("single", "instance_group { count: 2 kind: KIND_CPU RATE }"),
    (
        "streamed",
        "max_batch_size: 3 model_transaction_policy { decoupled: true } dynamic_batching { }
         instance_group { count: 2 kind: KIND_CPU RATE }",
    ),
    (
        "implicit",
        "max_batch_size: 2 sequence_batching { max_sequence_idle_microseconds: 200000
         oldest { max_candidate_sequences: 3 } } instance_group { count: 1 kind: KIND_CPU }
         parameters { key: 'implicit_sequence_start' value { string_value: 'true' } }",
    ),
];

/// How long a sequence may be idle.
pub(super) const SEQUENCE_IDLE: Duration = Duration::from_millis(200);

/// The resource that an instance needs.
const RATE: &str =
    "rate_limiter { resources [ { name: 'R' count: COUNT global: true } ] priority: PRIORITY }";

/// The units of the resource.
pub(super) const UNITS: u32 = 3;

/// One instance with its process.
pub(super) struct Instance {
    pub(super) id: InstanceId,
    pub(super) machine: Supervisor,
    /// Its process, while it lives.
    pub(super) process: Option<Worker>,
    /// Counts its processes: events of earlier ones are ignored.
    pub(super) generation: u64,
    /// Whether it was ready at some time.
    pub(super) once_ready: bool,
    /// Whether it serves.
    pub(super) ready: bool,
    /// Units of the resource that it needs.
    pub(super) units: u32,
}

/// One model.
pub(super) struct Model {
    pub(super) name: &'static str,
    pub(super) config: Arc<ModelConfig>,
    pub(super) driver: Arc<Driver>,
    pub(super) instances: Vec<Instance>,
    /// Values of requests that were answered with success, or got a response: they must not be
    /// executed again.
    pub(super) answered: HashSet<u64>,
    /// The requests of the model and their ends.
    pub(super) counted: Counted,
}

/// What clients have seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    pub(super) sent: u64,
    pub(super) succeeded: u64,
    pub(super) failed: u64,
    pub(super) cancelled: u64,
    /// Refused before the queue.
    pub(super) refused: u64,
    /// Replies of processes.
    pub(super) executions: u64,
}

impl Counted {
    /// Adds what the clients of others have seen.
    pub(super) fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.succeeded += other.succeeded;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.refused += other.refused;
        self.executions += other.executions;
    }
}

impl Model {
    /// Returns whether requests belong to sequences.
    pub(super) fn has_sequences(&self) -> bool {
        matches!(self.name, "direct" | "oldest") || self.starts_implicitly()
    }

    /// Returns whether the first request of an id starts a sequence.
    pub(super) fn starts_implicitly(&self) -> bool {
        self.name == "implicit"
    }

    /// Returns whether no instance will ever be ready.
    pub(super) fn is_broken(&self) -> bool {
        self.instances
            .iter()
            .all(|instance| matches!(instance.machine.state(), pharos::supervisor::State::Failed))
    }
}

/// The parts that all models share.
pub(super) struct Shared {
    pub(super) metrics: Arc<Cache>,
    pub(super) timer: Arc<Timer>,
    pub(super) limits: Option<Arc<Limits>>,
    pub(super) responses: Arc<ResponseCache>,
}

/// The limits of instances: short, so that they expire in a simulation.
fn limits_of_instances() -> Settings {
    Settings {
        start_timeout: Duration::from_secs(5),
        execution_timeout: Duration::from_secs(2),
        restart: RestartPolicy {
            backoff: Backoff::Exponential {
                first: Duration::from_millis(10),
                max: Duration::from_millis(500),
            },
            healthy_after: Duration::from_secs(1),
            window: None,
        },
    }
}

/// Creates all models at time `now`, with processes that have not started yet.
pub(super) fn all(shared: &Shared, empty: &Path, now: Instant) -> Vec<Model> {
    (0..CONFIGS.len()).map(|number| model(shared, empty, number, now)).collect()
}

fn model(shared: &Shared, empty: &Path, number: usize, now: Instant) -> Model {
    let (name, text) = CONFIGS[number];
    let units = if number == 0 { 2 } else { 1 };
    let rate = match &shared.limits {
        Some(_) => RATE
            .replace("COUNT", &units.to_string())
            .replace("PRIORITY", &(1 + number % 2).to_string()),
        None => String::new(),
    };
    let text = format!("backend: 'builtin' {} {TENSORS}", text.replace("RATE", &rate));
    let draft = Draft::from_text(&text, "config.pbtxt").unwrap();
    let config =
        Arc::new(draft.complete(&Completion { directory: name, ..Completion::default() }).unwrap());
    let version = ModelVersion::new(name, 1);
    let series = shared.metrics.model_loaded(&version, &[]);
    let files =
        VersionFiles { model: empty.to_owned(), version: empty.to_owned(), outside: Vec::new() };
    let identity =
        identity(&[Files::new(&version, &config, &LoadedFiles::new(files).unwrap())]).unwrap();
    let cache =
        (name == "cached").then(|| ModelResponseCache::new(shared.responses.clone(), identity));
    let rated = shared.limits.as_ref().filter(|_| text.contains("rate_limiter"));
    let registration = rated.map(|limits| limits.registration());
    if config.decoupled {
        shared.metrics.model_decoupled(&series);
    }
    let has_limits = registration.is_some();
    let scheduling = settings::of(&config);
    let settings = DriverSettings {
        config: config.clone(),
        series,
        scheduling,
        limits: registration,
        response_cache: cache,
    };
    let driver = Driver::new(settings, shared.timer.clone());
    let placements = placement::of(&config, 1);
    let first = u32::try_from(number * 10).unwrap();
    let ids: Vec<InstanceId> = (first..).take(placements.len()).map(InstanceId).collect();
    let placed: Vec<_> = ids.iter().copied().zip(&placements).collect();
    driver.admit(&placed).unwrap();
    let instance = |id| Instance {
        id,
        machine: Supervisor::new(limits_of_instances(), now),
        process: None,
        generation: 0,
        once_ready: false,
        ready: false,
        units: if has_limits { units } else { 0 },
    };
    let instances = ids.into_iter().map(instance).collect();
    Model { name, config, driver, instances, answered: HashSet::new(), counted: Counted::default() }
}
