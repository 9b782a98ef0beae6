//! Tests of requests with several executions.

use std::sync::Arc;

use pharos_base::id::ModelVersion;
use pharos_base::timeline::Instant;

use super::tests::{TIMELINE, metric};
use super::*;
use crate::cache::Settings;
use crate::catalog::{Catalog, Overrides, Setting};

/// A request of an iterative sequence with three executions: the distributions have what the
/// counters have.
#[test]
fn distributions_contain_each_execution_of_a_request() {
    let summaries = Overrides { settings: vec![Setting::SummaryLatencies(true)], mode: None }
        .apply(Catalog::shipped());
    let cache = Arc::new(Cache::new(summaries, Settings::new("h")));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let unfinished = Timeline { request_end: Instant(0), ..TIMELINE };
    (0..2).for_each(|_| inference_rescheduled(&series, &unfinished));
    inference_done(&series, &TIMELINE, 1);
    for (stage, ns) in [
        ("queue", 500_000),
        ("compute_input", 10_000),
        ("compute_infer", 1_000_000),
        ("compute_output", 20_000),
    ] {
        let us = f64::from(3 * ns) / 1e3;
        assert_eq!(metric(&cache, &format!("nv_inference_{stage}_duration_us")), us, "{stage}");
        assert_eq!(
            metric(&cache, &format!("pharos_{stage}_duration_seconds_sum")),
            us / 1e6,
            "{stage}"
        );
        assert_eq!(
            metric(&cache, &format!("pharos_{stage}_duration_seconds_count")),
            3.0,
            "{stage}"
        );
        assert_eq!(metric(&cache, &format!("nv_inference_{stage}_summary_us_sum")), us, "{stage}");
    }
    for request in [
        "nv_inference_request_success",
        "pharos_request_duration_seconds_count",
        "nv_inference_request_summary_us_count",
    ] {
        assert_eq!(metric(&cache, request), 1.0, "{request}");
    }
}
