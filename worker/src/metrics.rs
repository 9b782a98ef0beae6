//! The worker's end of the metrics ring.

use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use pharos::metrics::catalog::{Catalog, RECORDED_BY_WORKER};
use pharos::metrics::channel::{Definition, Sample, Writer};
use pharos::metrics::tslog::push_request_id;
use pharos::timeline::Instant;
use pharos::wire::{BatchRequest, Done, Load};

/// A full ring is waited for this often and this long at a time before a sample is dropped (and counted).
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_micros(200);
/// The most bytes of a batch's request ids that go with a sample: a record of the ring has little more. A batch with more
/// is logged with those of its first requests.
const MAX_REQUEST_IDS: usize = 7 << 10;

/// Samples on their way to the frontend.
pub(crate) struct Metrics {
    writer: Writer,
    model: String,
    /// The series of `HandlerTime` and `PredictionTime`, as far as the definition has them.
    handler_time: Option<u32>,
    prediction_time: Option<u32>,
    request_ids: String,
}

impl Metrics {
    /// Opens the ring.
    ///
    /// # Errors
    /// It is no ring, or the definition of the metrics is wrong.
    pub(crate) fn open(descriptor: &OwnedFd, load: &Load) -> io::Result<Self> {
        let (writer, model) = (Writer::open(descriptor)?, load.model.clone());
        let mut metrics = Self { writer, model, handler_time: None, prediction_time: None, request_ids: String::new() };
        metrics.redefine(&load.metrics)?;
        Ok(metrics)
    }

    /// Takes another text of `metrics.yaml`.
    ///
    /// # Errors
    /// The text is no definition of metrics; then nothing has changed.
    pub(crate) fn redefine(&mut self, text: &str) -> io::Result<()> {
        let catalog = Catalog::parse(text, "metrics.yaml").map_err(io::Error::other)?;
        let Self { writer, model, .. } = self;
        // A series that is told already keeps its number.
        let series = RECORDED_BY_WORKER.map(|name| writer.intern(&of_backend(&catalog, name, model)?).ok());
        [self.handler_time, self.prediction_time] = series;
        Ok(())
    }

    /// One batch that had come at `arrived` is done: TorchServe's `HandlerTime` (in the backend) and `PredictionTime` (with
    /// the work around it), in milliseconds, for successes only.
    pub(crate) fn batch_executed(&mut self, done: &Done, requests: &[BatchRequest], arrived: Instant) {
        if done.error.is_some() {
            return;
        }
        self.request_ids.clear();
        for (position, request) in requests.iter().enumerate() {
            let all = self.request_ids.len();
            push_request_id(&mut self.request_ids, position, &request.id);
            if self.request_ids.len() > MAX_REQUEST_IDS {
                self.request_ids.truncate(all);
                break;
            }
        }
        let end = done.stamps.end;
        for (series, start) in [(self.handler_time, done.stamps.start), (self.prediction_time, arrived)] {
            let Some(series) = series else { continue };
            let value = end.ns_since(start) as f64 / 1e6;
            let sample = Sample { series, value, clock: end, request_id: &self.request_ids };
            let mut tries = 0;
            self.writer.sample_or_drop(&sample, || {
                thread::sleep(PAUSE);
                tries += 1;
                tries < TRIES
            });
        }
    }
}

/// The series of a metric that every backend records, if the definition has it with dimensions that are known here.
fn of_backend(catalog: &Catalog, name: &str, model: &str) -> Option<Definition> {
    let (_, spec) = catalog.find(name)?;
    let value = |dimension: &String| match dimension.as_str() {
        "ModelName" => Some(model.to_owned()),
        "Level" => Some("Model".to_owned()),
        "Hostname" => Some(hostname()),
        _ => None,
    };
    let labels = spec.dimensions.iter().map(|dimension| Some((dimension.clone(), value(dimension)?)));
    let labels = labels.collect::<Option<Vec<_>>>()?;
    Some(Definition { name: spec.name.clone(), kind: Some(spec.kind), unit: spec.unit.clone(), labels })
}

/// This machine's name.
fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
