//! The function `emit`: identity that records metrics, for tests and measurements of metric
//! transport to the frontend.
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
//! Counters grow by 1 with each sample; for gauges and distributions the value is the sample's
//! number modulo 100.
//!
//! A test must know what was recorded when the process is killed at any moment. So each thread
//! writes counts to memory that outlives the process (a memfd with the name [`LEDGER`], which the
//! test opens in `/proc`): the number of samples begun, before each sample, and the number of
//! samples recorded, after it. Words 2n and 2n + 1 belong to thread n.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use pharos::error::InferError;
use pharos::infer::Parameter;
use pharos::metrics::catalog::Kind;
use pharos::shm::{self, SharedMemory};
use pharos_backend::{Batch, Context, Outputs, Requests, Series, load_error};

use crate::number;

/// The name of the memory with the counts of samples.
const LEDGER: &str = "pharos-emit-ledger";
/// Its size in bytes: room for the maximum number of threads.
const LEDGER_BYTES: usize = 4096;
/// The maximum number of threads.
const MAX_THREADS: u64 = LEDGER_BYTES as u64 / 16;
/// How long a thread sleeps when it is ahead of its rate.
const PAUSE: Duration = Duration::from_millis(1);

/// Records samples.
pub(crate) struct Emitter {
    series: Arc<[(Kind, Series)]>,
    samples: u64,
    /// Kept open for the test.
    _ledger: Option<OwnedFd>,
}

/// A thread that records samples at a rate.
struct Recorder {
    series: Arc<[(Kind, Series)]>,
    /// Samples per second.
    rate: f64,
    /// The seconds after which the thread ends.
    end: Option<f64>,
    ledger: Arc<SharedMemory>,
    number: usize,
}

impl Emitter {
    /// Registers the metrics and starts the threads.
    ///
    /// # Errors
    /// A parameter is invalid, or a metric cannot be recorded.
    pub(crate) fn new(context: &Context<'_>) -> Result<Self, InferError> {
        let metrics = context
            .config
            .parameters
            .get("metrics")
            .map_or("counter Emitted Count", String::as_str);
        let labels = number(context, "series")?.unwrap_or(1);
        let mut series = Vec::new();
        for entry in metrics.split(';') {
            add_series(context, entry, labels, &mut series)?;
        }
        let series: Arc<[_]> = series.into();
        let samples = number(context, "samples")?.unwrap_or(0);
        let ledger = start(context, &series)?;
        Ok(Self { series, samples, _ledger: ledger })
    }

    /// Records the samples of a batch's requests.
    pub(crate) fn execute(&self, batch: &Batch<'_>, outputs: &Outputs<'_>) {
        let mut count = 0;
        for (position, request) in batch.requests.iter().enumerate() {
            let samples = match request.parameters.iter().find(|(name, _)| name == "samples") {
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

/// Adds the series of the metric that an entry `KIND NAME UNIT [DIMENSION,..]` describes, one for
/// each label.
fn add_series(
    context: &Context<'_>,
    entry: &str,
    labels: u64,
    series: &mut Vec<(Kind, Series)>,
) -> Result<(), InferError> {
    let wrong = || {
        let text = "of the parameter 'metrics' must be KIND NAME UNIT [DIMENSION,..]";
        load_error(format!(
            "'{entry}' {text} with one of the kinds counter, gauge, histogram, summary"
        ))
    };
    let words: Vec<&str> = entry.split_whitespace().collect();
    let (&[kind, name, unit], lists) = words.split_first_chunk::<3>().ok_or_else(wrong)?;
    let kinds = [Kind::Counter, Kind::Gauge, Kind::Histogram, Kind::Summary];
    let kind = kinds.into_iter().find(|known| known.as_str() == kind).ok_or_else(wrong)?;
    let dimensions: Vec<&str> = lists.iter().flat_map(|list| list.split(',')).collect();
    let without_default = dimensions
        .iter()
        .filter(|name| !["ModelName", "Level", "Hostname"].contains(*name))
        .count();
    let metric = context.metrics.add_metric(name, unit, &dimensions, kind)?;
    for label in 0..labels {
        let label = label.to_string();
        let values: Vec<&str> =
            [label.as_str()].into_iter().chain([""; 9]).take(without_default).collect();
        series.push((kind, metric.series(&values)?));
    }
    Ok(())
}

/// Starts the threads; returns the memory with their counts.
fn start(
    context: &Context<'_>,
    series: &Arc<[(Kind, Series)]>,
) -> Result<Option<OwnedFd>, InferError> {
    let rate = number(context, "rate")?.unwrap_or(0);
    let threads = number(context, "threads")?.unwrap_or(1);
    if rate == 0 || threads == 0 {
        return Ok(None);
    }
    if threads > MAX_THREADS {
        return Err(load_error(format!(
            "parameter 'threads' is {threads}; at most {MAX_THREADS} are allowed"
        )));
    }
    let seconds = number(context, "seconds")?.unwrap_or(0);
    let cannot = |error: std::io::Error| load_error(format!("cannot emit samples: {error}"));
    let memory = shm::create(LEDGER, LEDGER_BYTES as u64).map_err(cannot)?;
    let ledger = Arc::new(SharedMemory::map(&memory, LEDGER_BYTES).map_err(cannot)?);
    for number in 0..threads {
        let recorder = Recorder {
            series: Arc::clone(series),
            rate: rate as f64 / threads as f64,
            end: (seconds > 0).then_some(seconds as f64),
            ledger: Arc::clone(&ledger),
            number: usize::try_from(number).unwrap_or(0),
        };
        let thread = thread::Builder::new().name(format!("emit {number}"));
        thread.spawn(move || recorder.run()).map_err(cannot)?;
    }
    Ok(Some(memory))
}

impl Recorder {
    fn run(&self) {
        let words = self.ledger.words();
        let (Some(begun), Some(recorded)) =
            (words.get(2 * self.number), words.get(2 * self.number + 1))
        else {
            return;
        };
        let start = Instant::now();
        let mut count = 0;
        loop {
            let elapsed = start.elapsed().as_secs_f64();
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
    let position = usize::try_from(number).unwrap_or(0).checked_rem(series.len());
    let Some((kind, series)) = position.and_then(|position| series.get(position)) else { return };
    let value = if *kind == Kind::Counter { 1.0 } else { (number % 100) as f64 };
    series.add_or_update_for(value, requests);
}
