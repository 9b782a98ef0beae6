//! The counts of one model, or of the requests by one alias. Each is stored once, as a count or in
//! nanoseconds. Recording code uses the fields; the table of built-in metrics refers to them by
//! [`ModelCount`].

use super::atomic::Count;

/// Defines the struct and the enum of its fields.
macro_rules! model_counts {
    ($($(#[$doc:meta])+ $variant:ident $field:ident;)*) => {
        /// A count of [`ModelCounts`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum ModelCount {
            $($(#[$doc])+ $variant,)*
        }

        /// The counts, all at 0 at first.
        #[derive(Clone, Debug, Default)]
        pub(super) struct ModelCounts {
            $($(#[$doc])+ pub(super) $field: Count,)*
        }

        impl ModelCounts {
            /// Returns the value of one count.
            pub(super) fn get(&self, count: ModelCount) -> u64 {
                match count {
                    $(ModelCount::$variant => self.$field.get(),)*
                }
            }
        }
    };
}

model_counts! {
    /// Requests that were parsed and whose model was found.
    Requests requests;
    /// Successful requests.
    SuccessCount success_count;
    /// Time from start to end of successful requests.
    SuccessNs success_ns;
    /// Time in the queue.
    QueueNs queue_ns;
    /// The part of `SuccessNs` of requests of clients, without warm-ups.
    ClientNs client_ns;
    /// The part of `QueueNs` of requests of clients, without warm-ups.
    ClientQueueNs client_queue_ns;
    /// Time for bringing inputs to the model.
    ComputeInputNs compute_input_ns;
    /// Time for executing the model.
    ComputeInferNs compute_infer_ns;
    /// Time for taking outputs from the model.
    ComputeOutputNs compute_output_ns;
    /// The sum of the batch sizes of successful requests.
    InferenceCount inference_count;
    /// Executions of batches.
    ExecutionCount execution_count;
    /// Requests that the response cache answered.
    CacheHits cache_hits;
    /// Time of the look-ups of these requests.
    CacheHitNs cache_hit_ns;
    /// Requests that the response cache had no response for.
    CacheMisses cache_misses;
    /// Time for looking up these requests and inserting their responses.
    CacheMissNs cache_miss_ns;
    /// Duration of the latest load, from the decision to the first ready instance.
    LoadNs load_ns;
    /// Instances that were lost and are being restarted.
    Restarts restarts;
    /// Requests that were refused because the queue was full.
    QueueRefusals queue_refusals;
    /// Outputs whose datatype or batch dimension differs from the configuration.
    OutputMismatches output_mismatches;
    /// Metric samples of the workers that were dropped or refused.
    SamplesDropped samples_dropped;
}
