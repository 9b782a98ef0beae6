//! The scheduler of a model: its kind and its settings.

use std::collections::BTreeMap;

use super::controls::{ControlInput, controls};
use super::error::{ConfigError, error};
use super::proto::model_config::SchedulingChoice;
use super::proto::model_queue_policy::TimeoutAction as ProtoTimeoutAction;
use super::proto::{self, model_sequence_batching::StrategyChoice};

/// How requests are combined into batches.
#[derive(Clone, Debug, PartialEq)]
pub enum Scheduling {
    /// Each request is executed alone.
    Default,
    /// Requests that wait at the same time are executed together.
    Dynamic(DynamicBatching),
    /// Requests belong to sequences, each bound to an instance.
    Sequence(SequenceBatching),
    /// The model is a graph of other models.
    Ensemble {
        /// The steps of the graph.
        steps: Vec<EnsembleStep>,
        /// The maximum number of requests that a step may have in flight; 0 for no limit.
        max_inflight_requests: u32,
    },
}

/// The dynamic batcher's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DynamicBatching {
    /// The preferred batch sizes, each from 1 to the maximum batch size; empty only if the model
    /// does not batch.
    pub preferred_batch_sizes: Vec<u32>,
    /// How long a request may wait for others to form a batch, in microseconds.
    pub max_queue_delay_us: u64,
    /// Whether responses are sent in the order of their requests.
    pub preserve_ordering: bool,
    /// The number of priority levels; 0 for a single queue.
    pub priority_levels: u64,
    /// The level of requests without a priority: 1 to `priority_levels`, or 0 without levels.
    pub default_priority_level: u64,
    /// The policy of levels that are not in `priority_queue_policies`.
    pub default_queue_policy: QueuePolicy,
    /// Policies by level.
    pub priority_queue_policies: BTreeMap<u64, QueuePolicy>,
}

/// The limits of a queue, and how it treats expired requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePolicy {
    /// What happens to a request whose timeout has passed.
    pub timeout_action: TimeoutAction,
    /// The timeout in microseconds; 0 for none.
    pub default_timeout_us: u64,
    /// Whether a request may shorten its timeout.
    pub allow_timeout_override: bool,
    /// The maximum number of requests that may wait; 0 for no limit.
    pub max_queue_size: u32,
}

/// What happens to a request whose timeout has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeoutAction {
    /// The request is rejected.
    #[default]
    Reject,
    /// The request is served after all that have not timed out.
    Delay,
}

/// The sequence batcher's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceBatching {
    /// How sequences share an instance.
    pub strategy: SequenceStrategy,
    /// How long a sequence may be idle, in microseconds.
    pub max_sequence_idle_us: u64,
    /// Whether each request forms a sequence, which the backend may continue.
    pub iterative: bool,
    /// Whether iterative requests of one id share an instance and overlap. From the parameter
    /// `overlapping_sequences`.
    pub overlapping: bool,
    /// The control inputs that the server adds for each slot of a batch.
    pub controls: Vec<ControlInput>,
    /// The maximum number of sequences that may wait for a slot; `None` for no limit. From the
    /// parameter `max_queued_sequences`, because the schema has no such field.
    pub max_queued_sequences: Option<usize>,
    /// The maximum number of requests that may wait in one sequence; 0 for no limit. From the
    /// parameter `max_queue_size_per_sequence`.
    pub max_queue_size_per_sequence: usize,
    /// Whether the first request of an id starts a sequence, with or without START. From the
    /// parameter `implicit_sequence_start`.
    pub implicit_start: bool,
}

/// How sequences share an instance.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceStrategy {
    /// Each sequence has a slot of the batch.
    Direct {
        /// How long a batch may wait, in microseconds.
        max_queue_delay_us: u64,
        /// The share of occupied slots, 0 to 1, at which a batch does not wait.
        minimum_slot_utilization: f32,
    },
    /// The oldest requests of the candidates form the batch.
    Oldest {
        /// The maximum number of sequences in flight; 0 lets the server choose.
        max_candidate_sequences: u32,
        /// As in [`DynamicBatching`].
        preferred_batch_sizes: Vec<u32>,
        /// As in [`DynamicBatching`].
        max_queue_delay_us: u64,
        /// As in [`DynamicBatching`].
        preserve_ordering: bool,
    },
}

/// One step of an ensemble.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnsembleStep {
    /// The model to run.
    pub model_name: String,
    /// The repository that is searched first, with `--model-namespacing`; empty for the repository
    /// of the ensemble.
    pub model_namespace: String,
    /// The model's version; `None` for the latest.
    pub model_version: Option<u64>,
    /// Maps the model's inputs to the ensemble's tensors.
    pub input_map: BTreeMap<String, String>,
    /// Maps the model's outputs to the ensemble's tensors.
    pub output_map: BTreeMap<String, String>,
}

/// Checks and converts the choice of scheduler.
pub(super) fn scheduling(
    proto: &proto::ModelConfig,
    max_batch_size: u32,
) -> Result<Scheduling, ConfigError> {
    let name = proto.name.as_str();
    Ok(match &proto.scheduling_choice {
        None => Scheduling::Default,
        Some(SchedulingChoice::DynamicBatching(raw)) => {
            Scheduling::Dynamic(dynamic(raw, name, max_batch_size)?)
        }
        Some(SchedulingChoice::SequenceBatching(raw)) => {
            Scheduling::Sequence(sequence(raw, proto, max_batch_size)?)
        }
        Some(SchedulingChoice::EnsembleScheduling(raw)) => {
            let steps = raw
                .step
                .iter()
                .enumerate()
                .map(|(number, step)| ensemble_step(number, step, name))
                .collect::<Result<_, _>>()?;
            Scheduling::Ensemble { steps, max_inflight_requests: raw.max_inflight_requests }
        }
    })
}

fn preferred(sizes: &[i32], max: u32, which: &str, name: &str) -> Result<Vec<u32>, ConfigError> {
    sizes
        .iter()
        .map(|&size| match u32::try_from(size) {
            Err(_) | Ok(0) => {
                error(format!("{which} must be positive for {name}: {size} is given"))
            }
            Ok(size) if size > max => error(format!(
                "{which} must be <= max batch size for {name}: {size} is given, the maximum is \
                 {max}"
            )),
            Ok(size) => Ok(size),
        })
        .collect()
}

fn dynamic(
    raw: &proto::ModelDynamicBatching,
    name: &str,
    max: u32,
) -> Result<DynamicBatching, ConfigError> {
    let levels = raw.priority_levels;
    if levels > 0 && !(1..=levels).contains(&raw.default_priority_level) {
        return error(format!("default priority level must be in range [1, {levels}] for {name}"));
    }
    if levels > 0 && raw.priority_queue_policy.keys().any(|level| !(1..=levels).contains(level)) {
        return error(format!(
            "priority queue policy must have priority level in range [1, {levels}] for {name}"
        ));
    }
    let config = DynamicBatching {
        preferred_batch_sizes: preferred(
            &raw.preferred_batch_size,
            max,
            "dynamic batching preferred size",
            name,
        )?,
        max_queue_delay_us: raw.max_queue_delay_microseconds,
        preserve_ordering: raw.preserve_ordering,
        priority_levels: levels,
        default_priority_level: raw.default_priority_level,
        default_queue_policy: raw
            .default_queue_policy
            .as_ref()
            .map(queue_policy)
            .unwrap_or_default(),
        priority_queue_policies: raw
            .priority_queue_policy
            .iter()
            .map(|(level, policy)| (*level, queue_policy(policy)))
            .collect(),
    };
    if config.preserve_ordering {
        if levels > 1 {
            return error(format!(
                "Only one priority level is allowed when 'preserve_ordering' is true for {name}"
            ));
        }
        let mut policies =
            config.priority_queue_policies.values().chain([&config.default_queue_policy]);
        if policies.any(|policy| policy.timeout_action == TimeoutAction::Delay) {
            return error(format!(
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is \
                 true for {name}"
            ));
        }
    }
    Ok(config)
}

fn queue_policy(raw: &proto::ModelQueuePolicy) -> QueuePolicy {
    QueuePolicy {
        timeout_action: match raw.timeout_action() {
            ProtoTimeoutAction::Reject => TimeoutAction::Reject,
            ProtoTimeoutAction::Delay => TimeoutAction::Delay,
        },
        default_timeout_us: raw.default_timeout_microseconds,
        allow_timeout_override: raw.allow_timeout_override,
        max_queue_size: raw.max_queue_size,
    }
}

fn sequence(
    raw: &proto::ModelSequenceBatching,
    model: &proto::ModelConfig,
    max: u32,
) -> Result<SequenceBatching, ConfigError> {
    let name = model.name.as_str();
    let controls = controls(model, raw)?;
    let strategy = match &raw.strategy_choice {
        Some(StrategyChoice::Oldest(oldest)) => SequenceStrategy::Oldest {
            max_candidate_sequences: u32::try_from(oldest.max_candidate_sequences).or_else(
                |_| {
                    let given = oldest.max_candidate_sequences;
                    error(format!(
                        "sequence batching max_candidate_sequences must be 0 or greater for \
                         {name}: it is {given}"
                    ))
                },
            )?,
            preferred_batch_sizes: preferred(
                &oldest.preferred_batch_size,
                max.max(1),
                "sequence batching preferred batch size",
                name,
            )?,
            max_queue_delay_us: oldest.max_queue_delay_microseconds,
            preserve_ordering: oldest.preserve_ordering,
        },
        Some(StrategyChoice::Direct(direct)) => {
            if !(0.0..=1.0).contains(&direct.minimum_slot_utilization) {
                return error(format!(
                    "sequence batching minimum slot utilization must be in range (0.0, 1.0] for \
                     {name}: it is {}",
                    direct.minimum_slot_utilization
                ));
            }
            SequenceStrategy::Direct {
                max_queue_delay_us: direct.max_queue_delay_microseconds,
                minimum_slot_utilization: direct.minimum_slot_utilization,
            }
        }
        None => SequenceStrategy::Direct { max_queue_delay_us: 0, minimum_slot_utilization: 0.0 },
    };
    Ok(SequenceBatching {
        strategy,
        max_sequence_idle_us: raw.max_sequence_idle_microseconds,
        iterative: raw.iterative_sequence,
        overlapping: overlapping(raw, model)?,
        controls,
        max_queued_sequences: match parameter(model, "max_queued_sequences") {
            Some("none") => Some(0),
            _ => Some(limit(model, "max_queued_sequences", " or 'none' (no sequence may wait)")?)
                .filter(|limit| *limit != 0),
        },
        max_queue_size_per_sequence: limit(model, "max_queue_size_per_sequence", "")?,
        implicit_start: flag(model, "implicit_sequence_start")?,
    })
}

/// Returns whether iterative requests of one id overlap.
fn overlapping(
    raw: &proto::ModelSequenceBatching,
    model: &proto::ModelConfig,
) -> Result<bool, ConfigError> {
    const NAME: &str = "overlapping_sequences";
    let oldest = matches!(raw.strategy_choice, Some(StrategyChoice::Oldest(_)));
    match flag(model, NAME)? {
        true if !(raw.iterative_sequence && oldest) => error(format!(
            "parameter '{NAME}' needs 'sequence_batching' with 'iterative_sequence: true' and the \
             strategy 'oldest' for {}",
            model.name
        )),
        overlaps => Ok(overlaps),
    }
}

/// Returns a limit from the free parameters; 0 if it is missing. `others` names the other values
/// that the parameter may have.
fn limit(model: &proto::ModelConfig, name: &str, others: &str) -> Result<usize, ConfigError> {
    let Some(text) = parameter(model, name) else { return Ok(0) };
    text.parse().or_else(|_| {
        let allowed = format!("a whole number from 0 (no limit) to {}{others}", usize::MAX);
        error(format!("parameter '{name}' must be {allowed} for {}, got '{text}'", model.name))
    })
}

/// Returns a boolean from the free parameters; false if it is missing.
pub(super) fn flag(model: &proto::ModelConfig, name: &str) -> Result<bool, ConfigError> {
    match parameter(model, name) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => error(format!(
            "parameter '{name}' must be true or false for {}, got '{other}'",
            model.name
        )),
    }
}

/// Returns the value of a free parameter.
fn parameter<'a>(model: &'a proto::ModelConfig, name: &str) -> Option<&'a str> {
    model.parameters.get(name).map(|parameter| parameter.string_value.trim())
}

fn ensemble_step(
    number: usize,
    raw: &proto::model_ensembling::Step,
    name: &str,
) -> Result<EnsembleStep, ConfigError> {
    let missing = match raw {
        step if step.model_name.is_empty() => "model_name",
        step if step.input_map.is_empty() => "input_map",
        step if step.output_map.is_empty() => "output_map",
        _ => {
            return Ok(EnsembleStep {
                model_name: raw.model_name.clone(),
                model_namespace: raw.model_namespace.clone(),
                model_version: step_version(raw, name)?,
                input_map: raw.input_map.clone(),
                output_map: raw.output_map.clone(),
            });
        }
    };
    error(format!("must specify '{missing}' in step {number} of ensemble '{name}'"))
}

/// Returns a step's version; `None` for the latest. A missing version is 0, which Triton also
/// refuses.
fn step_version(
    raw: &proto::model_ensembling::Step,
    name: &str,
) -> Result<Option<u64>, ConfigError> {
    match (raw.model_version, u64::try_from(raw.model_version)) {
        (-1, _) => Ok(None),
        (_, Ok(version)) if version > 0 => Ok(Some(version)),
        (version, _) => error(format!(
            "ensemble '{name}' depends on '{}' whose required version {version} is not loaded: \
             'model_version' of a step is 1 or greater, or -1 for the latest",
            raw.model_name
        )),
    }
}
