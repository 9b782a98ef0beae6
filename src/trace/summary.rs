//! Durations of traced requests: percentiles of each stage for each model.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::read::Trace;
use crate::printable::printable;
use crate::request_trace::Activity;

/// How several intervals of a stage become one duration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Measure {
    /// Their sum: a request may be executed, and answered, several times.
    Sum,
    /// The time from the last start to the last end.
    Last,
}

/// The first and the last activity of a stage, one pair for each protocol.
type Bounds = &'static [(Activity, Activity)];

/// The stages in display order. `receive`, `request`, `send` and their whole, `total`, are of the
/// request as the client sees it. The others are parts of `request`; `queue` ends and `reply`
/// starts in the worker.
const STAGES: &[(&str, Measure, Bounds)] = &[
    (
        "total",
        Measure::Last,
        &[
            (Activity::HttpRecvStart, Activity::HttpSendEnd),
            (Activity::GrpcWaitReadStart, Activity::GrpcSendEnd),
        ],
    ),
    (
        "receive",
        Measure::Sum,
        &[
            (Activity::HttpRecvStart, Activity::HttpRecvEnd),
            (Activity::GrpcWaitReadStart, Activity::GrpcWaitReadEnd),
        ],
    ),
    ("request", Measure::Sum, &[(Activity::RequestStart, Activity::RequestEnd)]),
    ("queue", Measure::Sum, &[(Activity::QueueStart, Activity::ComputeStart)]),
    ("compute input", Measure::Sum, &[(Activity::ComputeStart, Activity::ComputeInputEnd)]),
    ("compute infer", Measure::Sum, &[(Activity::ComputeInputEnd, Activity::ComputeOutputStart)]),
    ("compute output", Measure::Sum, &[(Activity::ComputeOutputStart, Activity::ComputeEnd)]),
    ("reply", Measure::Last, &[(Activity::ComputeEnd, Activity::RequestEnd)]),
    (
        "send",
        Measure::Sum,
        &[
            (Activity::HttpSendStart, Activity::HttpSendEnd),
            (Activity::GrpcSendStart, Activity::GrpcSendEnd),
        ],
    ),
];

/// The durations of one stage of one model, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stage {
    /// The stage's name.
    pub stage: &'static str,
    /// The number of traces with this stage.
    pub count: usize,
    /// The mean.
    pub mean_us: f64,
    /// The median.
    pub p50_us: f64,
    /// The 90th percentile.
    pub p90_us: f64,
    /// The 95th percentile.
    pub p95_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The maximum.
    pub max_us: f64,
}

/// A summary of the traces of one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// The model's name.
    pub model: String,
    /// The model's version.
    pub version: i64,
    /// The number of traces, including steps.
    pub traces: usize,
    /// The number of traces that are steps of ensembles.
    pub steps: usize,
    /// The number of requests that this model did not execute: answered by the response cache or
    /// by steps.
    pub not_executed: usize,
    /// The number of failed requests.
    pub failed: usize,
    /// The number of traces without an end: truncated, cancelled or lost.
    pub unfinished: usize,
    /// The stages with at least one duration.
    pub stages: Vec<Stage>,
}

/// Summarizes traces by model.
pub fn summarize<'a>(traces: impl Iterator<Item = &'a Trace>) -> Vec<Model> {
    let mut models: BTreeMap<(&str, i64), Vec<&Trace>> = BTreeMap::new();
    for trace in traces.filter(|trace| !trace.model.is_empty()) {
        models.entry((&trace.model, trace.version)).or_default().push(trace);
    }
    models.into_iter().map(|((model, version), traces)| of_model(model, version, &traces)).collect()
}

fn of_model(model: &str, version: i64, traces: &[&Trace]) -> Model {
    let count =
        |wanted: &dyn Fn(&Trace) -> bool| traces.iter().filter(|trace| wanted(trace)).count();
    let ended = |trace: &Trace| trace.at(Activity::RequestEnd).is_some();
    let stages = STAGES.iter().filter_map(|(name, measure, bounds)| {
        stage(
            name,
            traces
                .iter()
                .filter_map(|trace| {
                    bounds.iter().find_map(|(from, to)| measured(trace, *measure, *from, *to))
                })
                .collect(),
        )
    });
    Model {
        model: model.to_owned(),
        version,
        traces: traces.len(),
        steps: count(&|trace| trace.parent != 0),
        not_executed: count(&|trace| {
            ended(trace) && trace.error.is_none() && trace.at(Activity::ComputeStart).is_none()
        }),
        failed: count(&|trace| trace.error.is_some()),
        unfinished: count(&|trace| !trace.stamps.is_empty() && !ended(trace)),
        stages: stages.collect(),
    }
}

fn measured(trace: &Trace, measure: Measure, from: Activity, to: Activity) -> Option<u64> {
    match measure {
        Measure::Sum => trace.between(from, to),
        Measure::Last => trace.last(to)?.checked_sub(trace.last(from)?),
    }
}

fn stage(stage: &'static str, mut times: Vec<u64>) -> Option<Stage> {
    times.sort_unstable();
    let us = |ns: u64| ns as f64 / 1000.0;
    // Nearest rank: the smallest duration that at least `percent` of all durations do not exceed.
    let percentile = |percent: usize| {
        let rank = (times.len() * percent).div_ceil(100).max(1);
        times.get(rank - 1).map_or(0.0, |ns| us(*ns))
    };
    let sum: u128 = times.iter().map(|ns| u128::from(*ns)).sum();
    let max_us = us(*times.last()?);
    Some(Stage {
        stage,
        count: times.len(),
        mean_us: sum as f64 / times.len() as f64 / 1000.0,
        p50_us: percentile(50),
        p90_us: percentile(90),
        p95_us: percentile(95),
        p99_us: percentile(99),
        max_us,
    })
}

/// Formats a summary as a table.
pub fn table(models: &[Model]) -> String {
    let mut out = String::new();
    for Model { model, version, traces, steps, not_executed, failed, unfinished, stages } in models
    {
        let _ = write!(
            out,
            "{} version {version}: {traces} trace{}",
            printable(model),
            if *traces == 1 { "" } else { "s" }
        );
        for (count, what) in [
            (steps, "steps of ensembles"),
            (not_executed, "not executed (cache or steps)"),
            (failed, "failed"),
            (unfinished, "unfinished"),
        ] {
            if *count > 0 {
                let _ = write!(out, ", {count} {what}");
            }
        }
        let heads = ["count", "mean us", "p50", "p90", "p95", "p99", "max"];
        let _ = write!(out, "\n  {:<15}", "stage");
        heads.iter().for_each(|head| {
            let _ = write!(out, "{head:>12}");
        });
        out.push('\n');
        for stage in stages {
            let _ = write!(out, "  {:<15}{:>12}", stage.stage, stage.count);
            for us in [
                stage.mean_us,
                stage.p50_us,
                stage.p90_us,
                stage.p95_us,
                stage.p99_us,
                stage.max_us,
            ] {
                let _ = write!(out, "{us:>12.1}");
            }
            out.push('\n');
        }
        out.push('\n');
    }
    out
}

/// Formats a summary as JSON.
pub fn json(models: &[Model]) -> String {
    // Serializing numbers and strings as JSON cannot fail.
    serde_json::to_string_pretty(&serde_json::json!({ "models": models })).unwrap_or_default()
        + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(id: u64, model: &str, stamps: &[(Activity, u64)]) -> Trace {
        Trace {
            id,
            model: model.to_owned(),
            version: 1,
            stamps: stamps.to_vec(),
            ..Trace::default()
        }
    }

    #[test]
    fn stages_have_counts_and_percentiles() {
        use Activity::{
            ComputeEnd, ComputeStart, GrpcSendEnd, GrpcSendStart, GrpcWaitReadStart, QueueStart,
            RequestEnd, RequestStart,
        };
        let mut traces: Vec<Trace> = (1..=100)
            .map(|id| {
                let queue = [(QueueStart, 0), (ComputeStart, id * 1000)];
                trace(id, "m", &[&queue[..], &[(RequestStart, 0), (RequestEnd, 500_000)]].concat())
            })
            .collect();
        traces.push(trace(
            101,
            "m",
            &[(RequestStart, 0), (RequestEnd, 1000), (GrpcSendStart, 5), (GrpcSendEnd, 2005)],
        ));
        traces.push(trace(102, "m", &[(RequestStart, 0)]));
        traces.push(trace(103, "", &[]));
        let models = summarize(traces.iter());
        let [model] = &models[..] else { panic!("{models:?}") };
        assert_eq!(
            (model.traces, model.not_executed, model.unfinished, model.failed),
            (102, 1, 1, 0)
        );
        let stage = |name: &str| model.stages.iter().find(|stage| stage.stage == name);
        let Some(queue) = stage("queue") else { panic!("{model:?}") };
        let ranks =
            (queue.count, queue.p50_us, queue.p90_us, queue.p99_us, queue.max_us, queue.mean_us);
        assert_eq!(ranks, (100, 50.0, 90.0, 99.0, 100.0, 50.5));
        assert_eq!(stage("send").map(|send| (send.count, send.p50_us)), Some((1, 2.0)));
        assert_eq!((stage("receive"), stage("total"), stage("reply")), (None, None, None));
        let table = table(&models);
        assert!(
            table.contains("m version 1: 102 traces, 1 not executed") && table.contains("queue"),
            "{table}"
        );
        assert!(json(&models).contains("\"p99_us\": 99.0"));
        let again = [
            (ComputeEnd, 10_000),
            (GrpcWaitReadStart, 1000),
            (ComputeEnd, 20_000),
            (RequestEnd, 23_000),
        ];
        let sent = [(GrpcSendEnd, 24_000), (GrpcSendEnd, 31_000)];
        let models = summarize([trace(1, "m", &[&again[..], &sent].concat())].iter());
        let found: Vec<_> =
            models[0].stages.iter().map(|stage| (stage.stage, stage.max_us)).collect();
        assert_eq!(found, [("total", 30.0), ("reply", 3.0)]);
    }
}
