//! A model's configuration as the settings of its scheduler.

use pharos::model::{self, ModelConfig, Scheduling};
use pharos::scheduler::{QueuePolicy, Settings, TimeoutAction};

/// Holds the scheduler back until this many requests wait, so that tests can form batches at will (Triton's name).
const DELAY_VARIABLE: &str = "TRITONSERVER_DELAY_SCHEDULER";

/// The settings for a model.
pub(crate) fn of(config: &ModelConfig) -> Settings {
    let Scheduling::Dynamic(batching) = &config.scheduling else { return Settings::default() };
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
        delay_scheduler: std::env::var(DELAY_VARIABLE).ok().and_then(|count| count.parse().ok()),
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
