//! What a configuration that a client sends with a load may ask for. Configurations in the
//! repositories have no such limits, and a client may always ask for as much as the model's own
//! configuration does.

use super::proto::model_config::SchedulingChoice;
use super::proto::model_instance_group::Kind;
use super::proto::{self, model_sequence_batching::StrategyChoice};
use super::{Draft, VersionPolicy};
use crate::tensor::{byte_size, element_count};

/// The limits on configurations that clients send; 0 disables one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadLimits {
    /// The instances of all versions.
    pub instances: u64,
    /// The bytes of the samples that the instances hold at the same time while they warm up.
    pub warmup_bytes: u64,
    /// Priority levels, sequences that are batched at the same time, and limits of queues. A queue
    /// without a limit stays allowed: it takes memory only for requests that clients send, and
    /// these have limits elsewhere.
    pub queue_size: u64,
    /// The threads of an ONNX Runtime session.
    pub threads: u64,
}

/// The length prefix of an element of BYTES and one byte of text.
const BYTES_ELEMENT: u64 = 5;

/// The parameters of a model with numbers of threads.
const THREADS: [&str; 2] = ["intra_op_thread_count", "inter_op_thread_count"];

impl LoadLimits {
    /// The flags, in the order of the fields.
    pub const FLAGS: [&str; 4] = [
        "--load-request-max-instances",
        "--load-request-max-warmup-byte-size",
        "--load-request-max-queue-size",
        "--load-request-max-threads",
    ];

    /// Checks a configuration that a client sent. `own` is the one in the repository. `versions`
    /// returns the number of versions that a policy selects, and `gpus` is the number of usable
    /// GPUs.
    ///
    /// # Errors
    /// A text with the value that is too large, the limit and its flag.
    pub fn check(
        &self,
        sent: &Draft,
        own: &Draft,
        versions: impl Fn(&VersionPolicy) -> usize,
        gpus: usize,
    ) -> Result<(), String> {
        let [of_instances, of_warmup, of_queue, of_threads] = Self::FLAGS;
        let total = |draft: &Draft| {
            draft.instances(gpus).saturating_mul(
                draft.version_policy().map_or(1, |policy| versions(&policy).max(1) as u64),
            )
        };
        let bounds = |limit: u64, own: u64| if limit == 0 { u64::MAX } else { limit.max(own) };

        let instances = total(sent);
        exceeds(
            "instances in 'instance_group', over all versions",
            instances,
            bounds(self.instances, total(own)),
            of_instances,
        )?;

        let warmup = |draft: &Draft| draft.largest_sample().saturating_mul(total(draft));
        let what = "bytes for the largest sample of 'model_warmup' in every instance";
        exceeds(what, warmup(sent), bounds(self.warmup_bytes, warmup(own)), of_warmup)?;

        for (name, wanted) in sent.queue_sizes() {
            let there =
                own.queue_sizes().find(|(other, _)| *other == name).map_or(0, |(_, size)| size);
            let limit = bounds(self.queue_size, there);
            exceeds(&format!("as '{name}'"), wanted, limit, of_queue)?;
        }

        for name in THREADS {
            let count = |draft: &Draft| {
                draft.parameter(name).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
            };
            exceeds(
                &format!("threads as '{name}'"),
                count(sent),
                bounds(self.threads, count(own)),
                of_threads,
            )?;
        }
        Ok(())
    }
}

fn exceeds(what: &str, wanted: u64, limit: u64, flag: &str) -> Result<(), String> {
    if wanted <= limit {
        return Ok(());
    }
    Err(format!(
        "it asks for {wanted} {what}; a configuration sent with a load may ask for {limit} \
         ({flag} sets the limit)"
    ))
}

impl Draft {
    /// Returns the number of instances of a version, if there are so many usable GPUs.
    fn instances(&self, gpus: usize) -> u64 {
        let on_gpus = gpus.max(1) as u64;
        match self.proto.instance_group.as_slice() {
            [] if self.may_be_onnx() => 1,
            [] => on_gpus,
            groups => groups
                .iter()
                .map(|group| {
                    let devices = match group.kind() {
                        Kind::Cpu | Kind::Model => 1,
                        _ if !group.gpus.is_empty() => group.gpus.len() as u64,
                        Kind::Gpu => on_gpus,
                        // Backends that only read the model's file may have no support of GPUs.
                        Kind::Auto if self.may_be_onnx() => 1,
                        Kind::Auto => on_gpus,
                    };
                    u64::try_from(group.count).unwrap_or(0).max(1).saturating_mul(devices)
                })
                .fold(0, u64::saturating_add),
        }
    }

    /// Returns the bytes of the largest sample of the warm-ups: an instance makes one after the
    /// other.
    fn largest_sample(&self) -> u64 {
        self.proto
            .model_warmup
            .iter()
            .map(|warmup| {
                let item = warmup
                    .inputs
                    .values()
                    .map(|input| {
                        let of_type = proto::datatype(input.data_type)
                            .and_then(|datatype| byte_size(datatype, &input.dims));
                        of_type.unwrap_or_else(|| {
                            element_count(&input.dims)
                                .unwrap_or(u64::MAX)
                                .saturating_mul(BYTES_ELEMENT)
                        })
                    })
                    .fold(0, u64::saturating_add);
                item.saturating_mul(u64::from(warmup.batch_size.max(1)))
            })
            .max()
            .unwrap_or(0)
    }

    /// Returns the sizes of queues, with the names of their fields; 0 for no limit.
    fn queue_sizes(&self) -> impl Iterator<Item = (String, u64)> {
        let mut sizes = Vec::new();
        let mut dynamic = None;
        let mut oldest = None;
        match &self.proto.scheduling_choice {
            Some(SchedulingChoice::DynamicBatching(batching)) => dynamic = Some(batching),
            Some(SchedulingChoice::SequenceBatching(batching)) => {
                if let Some(StrategyChoice::Oldest(strategy)) = &batching.strategy_choice {
                    oldest = Some(strategy);
                }
            }
            _ => {}
        }
        let default = dynamic.and_then(|batching| batching.default_queue_policy.as_ref());
        sizes.push((
            "max_queue_size".to_owned(),
            default.map_or(0, |policy| u64::from(policy.max_queue_size)),
        ));
        if let Some(batching) = dynamic {
            let levels = batching.priority_queue_policy.iter();
            sizes.extend(levels.map(|(level, policy)| {
                (
                    format!("max_queue_size of priority level {level}"),
                    u64::from(policy.max_queue_size),
                )
            }));
            if batching.priority_levels > 0 {
                sizes.push(("priority_levels".to_owned(), batching.priority_levels));
            }
        }
        if let Some(strategy) = oldest.filter(|strategy| strategy.max_candidate_sequences > 0) {
            let most = u64::try_from(strategy.max_candidate_sequences).unwrap_or(0);
            sizes.push(("max_candidate_sequences".to_owned(), most));
        }
        sizes.into_iter()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LIMITS: LoadLimits =
        LoadLimits { instances: 8, warmup_bytes: 1 << 20, queue_size: 100, threads: 16 };

    fn check(limits: LoadLimits, sent: &str, own: &str) -> Result<(), String> {
        let own = Draft::from_text(own, "config.pbtxt").unwrap();
        limits.check(
            &Draft::from_json(sent).unwrap(),
            &own,
            |policy: &VersionPolicy| if *policy == VersionPolicy::All { 3 } else { 1 },
            2,
        )
    }

    #[test]
    fn a_client_asks_for_as_much_as_the_limits_or_the_operator_permit() {
        for (sent, part) in [
            (r#"{"instance_group":[{"count":9,"kind":"KIND_CPU"}]}"#, "asks for 9 instances"),
            (
                r#"{"instance_group":[{"count":4,"kind":"KIND_CPU"},{"count":5,"kind":"KIND_CPU"}]}"#,
                "asks for 9 instances",
            ),
            (r#"{"instance_group":[{"count":5,"kind":"KIND_GPU"}]}"#, "asks for 10 instances"),
            (
                r#"{"instance_group":[{"count":2,"kind":"KIND_GPU","gpus":[0,1,2,3,4]}]}"#,
                "asks for 10 instances",
            ),
            (
                r#"{"version_policy":{"all":{}},"instance_group":[{"count":3,"kind":"KIND_CPU"}]}"#,
                "asks for 9 instances",
            ),
            (
                r#"{"model_warmup":[{"name":"w","inputs":{"A":{"data_type":"TYPE_FP32","dims":[1048576],"zero_data":true}}}]}"#,
                "asks for 4194304 bytes for the largest sample of 'model_warmup'",
            ),
            (
                r#"{"model_warmup":[{"name":"w","inputs":{"A":{"data_type":"TYPE_FP32","dims":[9223372036854775807],
                    "zero_data":true}}}]}"#,
                "asks for 18446744073709551615 bytes",
            ),
            (
                r#"{"model_warmup":[{"name":"w","inputs":{"A":{"data_type":"TYPE_STRING","dims":[1048576],"zero_data":true}}}]}"#,
                "asks for 5242880 bytes",
            ),
            (
                r#"{"instance_group":[{"count":4,"kind":"KIND_CPU"}],"model_warmup":[{"name":"w","batch_size":2,"inputs":{"A":
                    {"data_type":"TYPE_FP32","dims":[65536],"zero_data":true}}}]}"#,
                "asks for 2097152 bytes",
            ),
            (
                r#"{"dynamic_batching":{"default_queue_policy":{"max_queue_size":101}}}"#,
                "asks for 101 as 'max_queue_size'",
            ),
            (
                r#"{"dynamic_batching":{"priority_levels":101,"default_priority_level":1}}"#,
                "asks for 101 as 'priority_levels'",
            ),
            (
                r#"{"parameters":{"intra_op_thread_count":{"string_value":"17"}}}"#,
                "asks for 17 threads",
            ),
        ] {
            let error = check(LIMITS, sent, r#"backend: "onnxruntime""#).unwrap_err();
            assert!(
                error.contains(part) && error.contains("--load-request-max-"),
                "{sent}: {error}"
            );
            assert_eq!(
                check(LoadLimits::default(), sent, r#"backend: "onnxruntime""#),
                Ok(()),
                "{sent}"
            );
        }
        for sent in [
            r#"{"backend":"onnxruntime"}"#,
            r#"{"instance_group":[{"count":8,"kind":"KIND_CPU"}]}"#,
            r#"{"dynamic_batching":{"default_queue_policy":{"max_queue_size":100}}}"#,
            r#"{"dynamic_batching":{}}"#,
        ] {
            assert_eq!(check(LIMITS, sent, ""), Ok(()), "{sent}");
        }
        let many = "instance_group { count: 20 kind: KIND_CPU }";
        assert_eq!(
            check(LIMITS, r#"{"instance_group":[{"count":20,"kind":"KIND_CPU"}]}"#, many),
            Ok(())
        );
        assert!(
            check(LIMITS, r#"{"instance_group":[{"count":21,"kind":"KIND_CPU"}]}"#, many).is_err()
        );
    }
}
