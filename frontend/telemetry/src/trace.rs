//! Runs tracing: holds the settings, samples requests, and passes the collected traces to a thread
//! that writes files or sends spans. `pharos::trace` decides what is sampled and how traces are
//! encoded.
//!
//! Requests never wait: tracing that is off costs one relaxed load, and traces that do not fit the
//! queue are dropped and counted.

mod collector;
mod files;
mod options;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::error::InferError;
use pharos::id::{TraceId, Traceparent};
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::{Cache, Series};
use pharos::otlp::{Random, Signal, SplitMix};
use pharos::request_trace::{Context, Finished, PartIds, Sink, Traced};
use pharos::service::TraceSettings;
use pharos::trace::otlp::span_id;
use pharos::trace::settings::{Mode, Settings, Update, Values, level_names};

use crate::otlp::{ACCEPTED, FAILED, seed};
use collector::Exporter;
use files::Files;
pub use options::{Collector, Tracing};

/// The maximum length of a caller's `tracestate` that is passed on (W3C Trace Context, 3.3.1.5,
/// requires at least 512).
const MAX_STATE: usize = 512;

/// The tracing of a server.
pub struct Traces {
    /// Whether any request may be sampled.
    active: AtomicBool,
    // Locked to sample and to change settings; never during a write.
    state: Mutex<State>,
    tracing: Tracing,
    sink: Arc<dyn Destination>,
}

struct State {
    settings: Settings,
    random: SplitMix,
}

/// The destination of traces.
trait Destination: Sink {
    /// Writes or sends the waiting traces, at most for `limit`, and ends.
    fn stop(&self, limit: Duration);
}

impl Traces {
    /// Starts tracing as the options define.
    ///
    /// # Errors
    /// The trace file is not writable, or the thread cannot be started.
    pub fn start(tracing: &Tracing, metrics: &Arc<Cache>) -> std::io::Result<Self> {
        let settings = Settings::new(
            tracing.mode,
            tracing.values,
            tracing.mode == Mode::OpenTelemetry || !tracing.file.as_os_str().is_empty(),
        );
        if let Some(fault) =
            settings.fault(&tracing.values).filter(|_| !tracing.values.levels.is_off())
        {
            tracing::warn!("no requests are traced (--trace-config): {fault}");
        }
        for flag in &tracing.overridden {
            tracing::warn!("{flag} is deprecated and ignored: --trace-config sets the same");
        }
        for setting in &tracing.of_other_mode {
            tracing::warn!(
                "--trace-config {setting} has no effect with mode={}",
                tracing.mode.name()
            );
        }
        let counts = Counts::new(metrics, tracing.mode);
        let sink: Arc<dyn Destination> = match tracing.mode {
            Mode::OpenTelemetry => Exporter::start(tracing.collector.clone(), counts)?,
            Mode::Triton if tracing.file.as_os_str().is_empty() => {
                Arc::new(WithoutTracing::default())
            }
            Mode::Triton => Files::start(tracing.file.clone(), counts)?,
        };
        let active = AtomicBool::new(settings.any_active());
        let state = Mutex::new(State { settings, random: SplitMix(seed()) });
        Ok(Self { active, state, tracing: tracing.clone(), sink })
    }

    /// Decides whether a request to a model is sampled, and returns the collector of its trace if
    /// so. `header` returns the request's headers (or metadata) by name.
    #[inline]
    pub fn sample(&self, model: &str, header: impl Fn(&str) -> Option<String>) -> Option<Traced> {
        if !self.active.load(Ordering::Relaxed) {
            return None;
        }
        self.sample_one(model, header)
    }

    #[cold]
    fn sample_one(&self, model: &str, header: impl Fn(&str) -> Option<String>) -> Option<Traced> {
        let collected = self.tracing.mode == Mode::OpenTelemetry;
        let caller = collected
            .then(|| header("traceparent"))
            .flatten()
            .and_then(|text| Traceparent::parse(&text));
        let mut state = self.lock();
        let sample = state.settings.sample(model, caller.is_some())?;
        if sample.limited {
            self.active.store(state.settings.any_active(), Ordering::Relaxed);
        }
        let context = collected.then(|| context(caller, &mut state.random, header));
        drop(state);
        Some(Traced::new(sample, context, self.sink.clone()))
    }

    /// Returns the settings of a model, or (empty) of the server.
    pub fn settings(&self, model: &str) -> TraceSettings {
        shown(&self.lock().settings.of(model), &self.tracing)
    }

    /// Changes the settings of a model, or (empty) of the server, and returns the result.
    ///
    /// # Errors
    /// INVALID_ARG if requests would be traced without a destination; then nothing has changed.
    pub fn update(&self, model: &str, update: &Update) -> Result<TraceSettings, InferError> {
        let mut state = self.lock();
        state.settings.update(model, update)?;
        self.active.store(state.settings.any_active(), Ordering::Relaxed);
        Ok(shown(&state.settings.of(model), &self.tracing))
    }

    /// Stops sampling, and writes or sends the collected traces, at most for `limit`.
    pub fn stop(&self, limit: Duration) {
        self.active.store(false, Ordering::Relaxed);
        self.sink.stop(limit);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Lists the settings as Triton does, including the settings of the file or of the collector.
fn shown(values: &Values, tracing: &Tracing) -> TraceSettings {
    let one = |value: String| vec![value];
    let mut all = vec![
        ("trace_level", level_names(values.levels).into_iter().map(str::to_owned).collect()),
        ("trace_rate", one(values.rate.to_string())),
        ("trace_count", one(values.count.to_string())),
    ];
    let mode = ("trace_mode", one(tracing.mode.name().to_owned()));
    match tracing.mode {
        Mode::Triton => {
            all.push(("log_frequency", one(values.log_frequency.to_string())));
            all.push(("trace_file", one(tracing.file.to_string_lossy().into_owned())));
            all.push(mode);
        }
        Mode::OpenTelemetry => {
            let collector = &tracing.collector;
            all.push(mode);
            all.push(("url", one(collector.endpoint.url.clone())));
            all.push((
                "protocol",
                one(if collector.endpoint.grpc { "grpc" } else { "http/protobuf" }.to_owned()),
            ));
            if !collector.given_resource.is_empty() {
                all.push(("resource", one(collector.given_resource.clone())));
            }
            all.push(("bsp_max_queue_size", one(collector.max_queue_size.to_string())));
            all.push(("bsp_schedule_delay", one(collector.schedule_delay_ms.to_string())));
            all.push((
                "bsp_max_export_batch_size",
                one(collector.max_export_batch_size.to_string()),
            ));
        }
    }
    all
}

fn context(
    caller: Option<Traceparent>,
    random: &mut SplitMix,
    header: impl Fn(&str) -> Option<String>,
) -> Context {
    let span = span_id(random);
    match caller {
        Some(Traceparent { trace, span: parent }) => {
            let state =
                header("tracestate").filter(|state| state.len() <= MAX_STATE).unwrap_or_default();
            Context { trace, span, parent: Some(parent), state }
        }
        None => {
            let trace = loop {
                if let Some(trace) =
                    TraceId::new(u128::from(random.next()) << 64 | u128::from(random.next()))
                {
                    break trace;
                }
            };
            Context { trace, span, parent: None, state: String::new() }
        }
    }
}

/// The destination without a file: nothing is ever sampled.
#[derive(Default)]
struct WithoutTracing(PartIds);

impl Sink for WithoutTracing {
    fn finished(&self, _: Finished) {}

    fn next_id(&self) -> u64 {
        self.0.next()
    }
}

impl Destination for WithoutTracing {
    fn stop(&self, _: Duration) {}
}

/// The counters of traces, spans and exports.
#[derive(Clone, Default)]
struct Counts {
    written: Option<Arc<Series>>,
    dropped: Option<Arc<Series>>,
    spans_exported: Option<Arc<Series>>,
    spans_dropped: Option<Arc<Series>>,
    exports: Option<Arc<Series>>,
    exports_failed: Option<Arc<Series>>,
}

impl Counts {
    fn new(metrics: &Cache, mode: Mode) -> Self {
        let counter =
            |metric: Builtin, labels: &[&str]| metrics.counter(metric.name(), labels).ok();
        let mut counts = Self {
            written: counter(Builtin::Traces, &["written"]),
            dropped: counter(Builtin::Traces, &["dropped"]),
            spans_exported: counter(Builtin::TraceSpans, &["exported"]),
            spans_dropped: counter(Builtin::TraceSpans, &["dropped"]),
            exports: None,
            exports_failed: None,
        };
        if mode == Mode::OpenTelemetry {
            let signal = Signal::Traces.as_str();
            counts.exports = counter(Builtin::OtlpExports, &[signal, ACCEPTED]);
            counts.exports_failed = counter(Builtin::OtlpExports, &[signal, FAILED]);
        }
        counts
    }
}

/// Adds to a counter, if the definition of the metrics includes it.
fn add(series: Option<&Arc<Series>>, count: usize) {
    if let Some(series) = series.filter(|_| count > 0) {
        // A counter accepts every whole number.
        let _ = series.add_or_update(count as f64);
    }
}
