//! The worker's end of the metrics ring.

use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use pharos::metrics::catalog::Catalog;
use pharos::metrics::channel::{Sample, Writer};
use pharos::wire::{BatchRequest, Done, Load};

/// A full ring is waited for this often and this long at a time before a sample is dropped (and counted).
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_micros(200);

/// Samples on their way to the frontend.
pub(crate) struct Metrics {
    writer: Writer,
    /// The series of `PredictionTime`, if the definition has it.
    prediction_time: Option<u32>,
    request_ids: String,
}

impl Metrics {
    /// Opens the ring.
    ///
    /// # Errors
    /// It is not the ring of a frontend with the same definition of metrics.
    pub(crate) fn open(descriptor: &OwnedFd, load: &Load) -> io::Result<Self> {
        let catalog = Catalog::parse(&load.metrics, "metrics.yaml").map_err(io::Error::other)?;
        let mut writer = Writer::open(descriptor, catalog.fingerprint())?;
        let labels = [load.model.clone(), "Model".to_owned(), hostname()];
        let spec = catalog.find("PredictionTime").filter(|(_, spec)| spec.dimensions.len() == labels.len());
        let prediction_time = spec.and_then(|(metric, _)| writer.intern(metric, &labels).ok());
        Ok(Self { writer, prediction_time, request_ids: String::new() })
    }

    /// One batch went through the backend: TorchServe's `PredictionTime`, in milliseconds, for successes only.
    pub(crate) fn batch_executed(&mut self, done: &Done, requests: &[BatchRequest]) {
        let Some(series) = self.prediction_time.filter(|_| done.error.is_none()) else { return };
        self.request_ids.clear();
        for request in requests {
            if !self.request_ids.is_empty() {
                self.request_ids.push(',');
            }
            self.request_ids.push_str(&request.id);
        }
        let value = done.stamps.end.ns_since(done.stamps.start) as f64 / 1e6;
        let sample = Sample { series, value, clock: done.stamps.end, request_id: &self.request_ids };
        let mut tries = 0;
        self.writer.sample_or_drop(&sample, || {
            thread::sleep(PAUSE);
            tries += 1;
            tries < TRIES
        });
    }
}

/// This machine's name.
fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
