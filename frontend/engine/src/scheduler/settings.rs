//! Derives the settings of a scheduler from a model's configuration.

use pharos::model::{self, ModelConfig, Scheduling, SequenceBatching};
use pharos::scheduler::{QueuePolicy, SequenceSettings, SequenceStrategy, Settings, TimeoutAction};

/// Delays the scheduler until this many requests wait, so that tests can control batches (Triton's
/// name).
const DELAY_VARIABLE: &str = "TRITONSERVER_DELAY_SCHEDULER";

/// Delays the scheduler until this many requests wait in sequences without a slot (Triton's name).
const BACKLOG_VARIABLE: &str = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER";

fn variable(name: &str) -> Option<usize> {
    std::env::var(name).ok().and_then(|count| count.parse().ok())
}

/// Returns the scheduler settings of a model.
pub(crate) fn of(config: &ModelConfig) -> Settings {
    let batching = match &config.scheduling {
        Scheduling::Dynamic(batching) => batching,
        Scheduling::Sequence(batching) => return sequences(config, batching),
        Scheduling::Default | Scheduling::Ensemble { .. } => return Settings::default(),
    };
    let policies = batching.priority_queue_policies.iter();
    Settings {
        max_batch_size: config.max_batch_size,
        preferred_batch_sizes: batching.preferred_batch_sizes.clone(),
        max_queue_delay_us: batching.max_queue_delay_us,
        preserve_ordering: batching.preserve_ordering,
        priority_levels: batching.priority_levels,
        default_priority_level: batching.default_priority_level,
        queue_policy: policy(&batching.default_queue_policy),
        priority_queue_policies: policies.map(|(level, own)| (*level, policy(own))).collect(),
        prefetch: true,
        rate_limited: false,
        delay_scheduler: variable(DELAY_VARIABLE),
        sequence: None,
    }
}

fn sequences(config: &ModelConfig, batching: &SequenceBatching) -> Settings {
    let most = config.max_batch_size.max(1);
    let (strategy, preferred_batch_sizes, max_queue_delay_us) = match &batching.strategy {
        model::SequenceStrategy::Direct { max_queue_delay_us, minimum_slot_utilization } => {
            let minimum_slot_utilization = *minimum_slot_utilization;
            (SequenceStrategy::Direct { minimum_slot_utilization }, Vec::new(), *max_queue_delay_us)
        }
        model::SequenceStrategy::Oldest {
            max_candidate_sequences,
            preferred_batch_sizes,
            max_queue_delay_us,
            ..
        } => {
            let max_candidate_sequences =
                if *max_candidate_sequences == 0 { most } else { *max_candidate_sequences };
            (
                SequenceStrategy::Oldest { max_candidate_sequences },
                preferred_batch_sizes.clone(),
                *max_queue_delay_us,
            )
        }
    };
    Settings {
        max_batch_size: most,
        preferred_batch_sizes,
        max_queue_delay_us,
        prefetch: false,
        delay_scheduler: variable(DELAY_VARIABLE),
        sequence: Some(SequenceSettings {
            strategy,
            max_idle_us: batching.max_sequence_idle_us,
            iterative: batching.iterative,
            overlapping: batching.overlapping,
            max_backlog: batching.max_queued_sequences,
            max_queue: batching.max_queue_size_per_sequence,
            implicit_start: batching.implicit_start,
            backlog_hold: variable(BACKLOG_VARIABLE).unwrap_or(0),
        }),
        ..Settings::default()
    }
}

fn policy(configured: &model::QueuePolicy) -> QueuePolicy {
    QueuePolicy {
        max_queue_size: configured.max_queue_size,
        default_timeout_us: configured.default_timeout_us,
        allow_timeout_override: configured.allow_timeout_override,
        timeout_action: match configured.timeout_action {
            model::TimeoutAction::Reject => TimeoutAction::Reject,
            model::TimeoutAction::Delay => TimeoutAction::Delay,
        },
    }
}
