//! The counts of one model, or of the requests by one alias: each number is kept once, as an exact count or in nanoseconds.
//! Code that records uses the fields; rows of the table of built-in metrics name them by [`ModelCount`].

use super::atomic::Count;

/// Writes the struct and the enum of its fields.
macro_rules! model_counts {
    ($($(#[$doc:meta])+ $variant:ident $field:ident;)*) => {
        /// A count of [`ModelCounts`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum ModelCount {
            $($(#[$doc])+ $variant,)*
        }

        /// The counts, all at 0 at first.
        #[derive(Debug, Default)]
        pub(super) struct ModelCounts {
            $($(#[$doc])+ pub(super) $field: Count,)*
        }

        impl ModelCounts {
            /// The value of one of them.
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
    /// From start to end of successful requests.
    SuccessNs success_ns;
    /// In the queue.
    QueueNs queue_ns;
    /// Bringing inputs to the model.
    ComputeInputNs compute_input_ns;
    /// Executing the model.
    ComputeInferNs compute_infer_ns;
    /// Taking outputs from the model.
    ComputeOutputNs compute_output_ns;
    /// The sum of the batch sizes of successful requests.
    InferenceCount inference_count;
    /// Executions of batches.
    ExecutionCount execution_count;
    /// Requests that the response cache answered.
    CacheHits cache_hits;
    /// Looking up those.
    CacheHitNs cache_hit_ns;
    /// Requests that were looked up in the response cache in vain.
    CacheMisses cache_misses;
    /// Looking up those and inserting their responses.
    CacheMissNs cache_miss_ns;
    /// The latest load, from the decision to the first ready instance.
    LoadNs load_ns;
    /// Instances that were lost and are started again.
    Restarts restarts;
    /// Outputs whose datatype or batch dimension is not the configuration's.
    OutputMismatches output_mismatches;
    /// Metric samples of the workers that were lost or refused.
    SamplesDropped samples_dropped;
}
