//! Tracing at work: holds the settings, samples requests, and gives what was collected of them to a thread that writes files
//! or sends spans. What is sampled and what it looks like decides `pharos::trace`.
//!
//! Nothing here makes a request wait: with tracing off it costs one relaxed load, and what the thread cannot take is dropped
//! and counted.

mod collector;
mod files;
mod options;
mod post;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pharos::error::InferError;
use pharos::id::{TraceId, Traceparent};
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::{Cache, Series};
use pharos::request_trace::{Context, Finished, PartIds, Sink, Traced};
use pharos::service::TraceSettings;
use pharos::trace::otlp::{Random, SplitMix, span_id};
use pharos::trace::settings::{Mode, Settings, Update, Values, level_names};

use collector::Exporter;
use files::Files;
pub use options::{Collector, Tracing};

/// The most bytes of a caller's `tracestate` that are passed on (W3C Trace Context, 3.3.1.5, asks for 512 at least).
const MOST_STATE: usize = 512;

/// The tracing of a server.
pub struct Traces {
    /// Whether any request may be sampled.
    active: AtomicBool,
    // Held to sample and to change; never while anything is written.
    state: Mutex<State>,
    tracing: Tracing,
    sink: Arc<dyn Destination>,
}

struct State {
    settings: Settings,
    random: SplitMix,
}

/// Where traces go.
trait Destination: Sink {
    /// Writes or sends what waits, for so long at most, and ends.
    fn stop(&self, patience: Duration);
}

impl Traces {
    /// Starts what the options ask for.
    ///
    /// # Errors
    /// The trace file could not be written, or no thread is left.
    pub fn start(tracing: &Tracing, metrics: &Arc<Cache>) -> std::io::Result<Self> {
        let settings = Settings::new(
            tracing.mode,
            tracing.values,
            tracing.mode == Mode::OpenTelemetry || !tracing.file.as_os_str().is_empty(),
        );
        if let Some(fault) = settings.fault(&tracing.values).filter(|_| !tracing.values.levels.is_off()) {
            tracing::warn!("nothing is traced as --trace-config says: {fault}");
        }
        for flag in &tracing.overridden {
            tracing::warn!("{flag} is deprecated and means nothing beside the --trace-config that says the same");
        }
        for setting in &tracing.of_other_mode {
            tracing::warn!("--trace-config {setting} means nothing with mode={}", tracing.mode.name());
        }
        let counts = Counts::new(metrics);
        let sink: Arc<dyn Destination> = match tracing.mode {
            Mode::OpenTelemetry => Exporter::start(tracing.collector.clone(), counts)?,
            Mode::Triton if tracing.file.as_os_str().is_empty() => Arc::new(WithoutTracing::default()),
            Mode::Triton => Files::start(tracing.file.clone(), counts)?,
        };
        let active = AtomicBool::new(settings.any_active());
        let state = Mutex::new(State { settings, random: SplitMix(seed()) });
        Ok(Self { active, state, tracing: tracing.clone(), sink })
    }

    /// A request for a model has come: what collects its course, if it is sampled. `header` gives the request's headers (or
    /// metadata) by name.
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
        let caller = collected.then(|| header("traceparent")).flatten().and_then(|text| Traceparent::parse(&text));
        let mut state = self.lock();
        let sample = state.settings.sample(model, caller.is_some())?;
        if sample.limited {
            self.active.store(state.settings.any_active(), Ordering::Relaxed);
        }
        let context = collected.then(|| context(caller, &mut state.random, header));
        drop(state);
        Some(Traced::new(sample, context, self.sink.clone()))
    }

    /// The settings of a model, or (empty) of the server.
    pub fn settings(&self, model: &str) -> TraceSettings {
        shown(&self.lock().settings.of(model), &self.tracing)
    }

    /// Changes the settings of a model, or (empty) of the server, and gives those that hold now.
    ///
    /// # Errors
    /// INVALID_ARG if something would be traced and could not be; then nothing has changed.
    pub fn update(&self, model: &str, update: &Update) -> Result<TraceSettings, InferError> {
        let mut state = self.lock();
        state.settings.update(model, update)?;
        self.active.store(state.settings.any_active(), Ordering::Relaxed);
        Ok(shown(&state.settings.of(model), &self.tracing))
    }

    /// Samples nothing any more, and writes or sends what was collected, for so long at most.
    pub fn stop(&self, patience: Duration) {
        self.active.store(false, Ordering::Relaxed);
        self.sink.stop(patience);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As Triton shows them: the file's settings, or those of the collector.
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
            all.push(("url", one(collector.url.clone())));
            all.push(("protocol", one(if collector.grpc { "grpc" } else { "http/protobuf" }.to_owned())));
            if !collector.given_resource.is_empty() {
                all.push(("resource", one(collector.given_resource.clone())));
            }
            all.push(("bsp_max_queue_size", one(collector.max_queue_size.to_string())));
            all.push(("bsp_schedule_delay", one(collector.schedule_delay_ms.to_string())));
            all.push(("bsp_max_export_batch_size", one(collector.max_export_batch_size.to_string())));
        }
    }
    all
}

fn context(caller: Option<Traceparent>, random: &mut SplitMix, header: impl Fn(&str) -> Option<String>) -> Context {
    let span = span_id(random);
    match caller {
        Some(Traceparent { trace, span: parent }) => {
            let state = header("tracestate").filter(|state| state.len() <= MOST_STATE).unwrap_or_default();
            Context { trace, span, parent: Some(parent), state }
        }
        None => {
            let trace = loop {
                if let Some(trace) = TraceId::new(u128::from(random.next()) << 64 | u128::from(random.next())) {
                    break trace;
                }
            };
            Context { trace, span, parent: None, state: String::new() }
        }
    }
}

/// Another number for each start of the server: what the standard library seeds its hash maps with.
fn seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Tracing without a file: nothing is ever sampled.
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

/// What is counted.
#[derive(Clone)]
struct Counts {
    written: Option<Arc<Series>>,
    dropped: Option<Arc<Series>>,
    spans_exported: Option<Arc<Series>>,
    spans_dropped: Option<Arc<Series>>,
}

impl Counts {
    fn new(metrics: &Cache) -> Self {
        let counter = |metric: Builtin, result: &str| metrics.counter(metric.name(), &[result]).ok();
        Self {
            written: counter(Builtin::Traces, "written"),
            dropped: counter(Builtin::Traces, "dropped"),
            spans_exported: counter(Builtin::TraceSpans, "exported"),
            spans_dropped: counter(Builtin::TraceSpans, "dropped"),
        }
    }
}

/// Adds to a counter, if the definition of the metrics has it.
fn add(series: Option<&Arc<Series>>, count: usize) {
    if let Some(series) = series.filter(|_| count > 0) {
        // A counter takes every whole number.
        let _ = series.add_or_update(count as f64);
    }
}
