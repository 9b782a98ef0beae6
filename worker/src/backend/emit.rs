//! The function `emit`: identity that records metrics, for tests and measurements of metric transport to the frontend.
//!
//! | parameter | meaning |
//! |---|---|
//! | `metrics` | the metrics: `KIND NAME UNIT [DIMENSION,..]`, separated by `;`; default `counter Emitted Count` |
//! | `series` | label sets of each metric: the first dimension without a default is 0, 1, ...; default 1 |
//! | `samples` | samples per request, with its id, over all series in turn; a request can override it; default 0 |
//! | `rate` | total samples per second from background threads; default 0 |
//! | `threads` | number of background threads; default 1 |
//! | `seconds` | how long they record; default unlimited |
//!
//! Counters grow by 1 with each sample; for gauges and distributions the value is the sample's number modulo 100.
//!
//! A test must know what was recorded when the process is killed at any moment. So each thread writes counts to memory that
//! outlives the process (a memfd with the name [`LEDGER`], which the test opens in `/proc`): the number of samples begun, before
//! each sample, and the number of samples recorded, after it. Words 2n and 2n + 1 belong to thread n.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use pharos::error::InferError;
use pharos::infer::Parameter;
use pharos::metrics::catalog::Kind;
use pharos::shm::{self, SharedMemory};
use pharos_backend::runtime::clock;
use pharos_backend::{Batch, Context, Metric, Outputs, Requests, Series, load_error};

/// The name of the memory with the counts of samples.
const LEDGER: &str = "pharos-emit-ledger";
/// Its size in bytes: room for the maximum number of threads.
const LEDGER_BYTES: usize = 4096;
/// The maximum number of threads.
const MAX_THREADS: u64 = LEDGER_BYTES as u64 / 16;
/// How long a thread sleeps when it is ahead of its rate.
const PAUSE: Duration = Duration::from_millis(1);

/// Records samples.
pub(super) struct Emitter {
    series: Arc<[(Kind, Series)]>,
    samples: u64,
    /// Kept open for the test.
    _ledger: Option<OwnedFd>,
}

/// The task of a thread.
struct Task {
    series: Arc<[(Kind, Series)]>,
    rate: f64,
    end: Option<f64>,
    ledger: Arc<SharedMemory>,
    number: usize,
}

impl Emitter {
    /// Registers the metrics and starts the threads.
    ///
    /// # Errors
    /// A parameter is invalid, or a metric cannot be recorded.
    pub(super) fn create(context: &Context<'_>) -> Result<Self, InferError> {
        let text = context.config.parameters.get("metrics").map_or("counter Emitted Count", String::as_str);
        let labels = number(context, "series", 1)?;
        let mut series = Vec::new();
        for entry in text.split(';') {
            let (metric, kind, dimensions) = add(context, entry)?;
            for label in 0..labels {
                let label = label.to_string();
                let values: Vec<&str> = [label.as_str()].into_iter().chain([""; 9]).take(dimensions).collect();
                series.push((kind, metric.series(&values)?));
            }
        }
        let mut emitter = Self { series: series.into(), samples: number(context, "samples", 0)?, _ledger: None };
        emitter._ledger = emitter.start(context)?;
        Ok(emitter)
    }

    /// Starts the threads; returns the memory with their counts.
    fn start(&self, context: &Context<'_>) -> Result<Option<OwnedFd>, InferError> {
        let (rate, threads) = (number(context, "rate", 0)?, number(context, "threads", 1)?);
        if rate == 0 || threads == 0 {
            return Ok(None);
        }
        if threads > MAX_THREADS {
            return Err(load_error(format!("parameter 'threads' is {threads}; at most {MAX_THREADS} are allowed")));
        }
        let seconds = number(context, "seconds", 0)?;
        let cannot = |error: std::io::Error| load_error(format!("cannot emit samples: {error}"));
        let memory = shm::create(LEDGER, LEDGER_BYTES as u64).map_err(cannot)?;
        let ledger = Arc::new(SharedMemory::map(&memory, LEDGER_BYTES).map_err(cannot)?);
        for number in 0..threads {
            let (series, ledger) = (Arc::clone(&self.series), Arc::clone(&ledger));
            let (number, rate) = (usize::try_from(number).unwrap_or(0), rate as f64 / threads as f64);
            let task = Task { series, rate, end: (seconds > 0).then_some(seconds as f64), ledger, number };
            let thread = thread::Builder::new().name(format!("emit {number}"));
            thread.spawn(move || task.run()).map_err(cannot)?;
        }
        Ok(Some(memory))
    }

    /// Records the samples of a batch's requests.
    pub(super) fn execute(&self, batch: &Batch<'_>, outputs: &Outputs<'_>) {
        let mut count = 0;
        for (position, request) in batch.requests.iter().enumerate() {
            let own = request.parameters.iter().find(|(name, _)| name == "samples");
            let samples = match own {
                Some((_, Parameter::Int(own))) => u64::try_from(*own).unwrap_or(0),
                Some((_, Parameter::Uint(own))) => *own,
                _ => self.samples,
            };
            for _ in 0..samples {
                emit(&self.series, count, Requests::One(position));
                count += 1;
            }
        }
        outputs.metrics().flush();
    }
}

impl Task {
    fn run(&self) {
        let word = |at: usize| self.ledger.words().get(2 * self.number + at);
        let (Some(begun), Some(recorded)) = (word(0), word(1)) else { return };
        let start = clock::now();
        let mut count = 0;
        loop {
            let elapsed = clock::now().ns_since(start) as f64 / 1e9;
            let due = (self.rate * self.end.map_or(elapsed, |end| elapsed.min(end))) as u64;
            while count < due {
                begun.store(count + 1, Ordering::Release);
                emit(&self.series, count, Requests::None);
                count += 1;
                recorded.store(count, Ordering::Release);
            }
            if self.end.is_some_and(|end| elapsed >= end) {
                return;
            }
            thread::sleep(PAUSE);
        }
    }
}

/// Records the sample with this number.
fn emit(series: &[(Kind, Series)], number: u64, requests: Requests<'_>) {
    let at = usize::try_from(number).unwrap_or(0).checked_rem(series.len());
    let Some((kind, series)) = at.and_then(|at| series.get(at)) else { return };
    let value = if *kind == Kind::Counter { 1.0 } else { (number % 100) as f64 };
    series.add_or_update_for(value, requests);
}

/// Adds the metric of `KIND NAME UNIT [DIMENSION,..]`; also returns the number of its dimensions without a default.
fn add(context: &Context<'_>, entry: &str) -> Result<(Metric, Kind, usize), InferError> {
    let wrong = || {
        let text = "of the parameter 'metrics' must be KIND NAME UNIT [DIMENSION,..]";
        load_error(format!("'{entry}' {text} with one of the kinds counter, gauge, histogram, summary"))
    };
    let words: Vec<&str> = entry.split_whitespace().collect();
    let (&[kind, name, unit], dimensions) = words.split_first_chunk::<3>().ok_or_else(wrong)?;
    let kinds = [Kind::Counter, Kind::Gauge, Kind::Histogram, Kind::Summary];
    let kind = kinds.into_iter().find(|known| known.as_str() == kind).ok_or_else(wrong)?;
    let dimensions: Vec<&str> = dimensions.iter().flat_map(|list| list.split(',')).collect();
    let free = dimensions.iter().filter(|name| !["ModelName", "Level", "Hostname"].contains(*name)).count();
    Ok((context.metrics.add_metric(name, unit, &dimensions, kind)?, kind, free))
}

/// Parses a parameter that is a whole number.
fn number(context: &Context<'_>, name: &str, default: u64) -> Result<u64, InferError> {
    let Some(text) = context.config.parameters.get(name) else { return Ok(default) };
    text.parse().map_err(|_| load_error(format!("parameter '{name}' is '{text}'; it must be a whole number")))
}
