//! One worker's ring of samples, at the end where it is read.
//!
//! Who drains it: whoever brings a reply (before the reply is passed on), a scrape, the instance's tick, and the end of the
//! connection. That is enough for samples that go with requests. For those of a model's own threads the worker rings a bell
//! when the ring is half full, and while samples come, [`Ring::pump`] looks every [`PACE`]. Nobody wakes up for a worker
//! that sends nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::{Cache, SampleError, Series};
use pharos::metrics::channel;
use pharos::metrics::emitter::Throttle;
use pharos::metrics::feed::Feed;
use pharos::metrics::labels::Source;
use pharos::metrics::series::ModelSeries;
use tokio::net::unix::pipe;
use tokio::sync::Notify;

use pharos_os::clock;

/// The size of a ring in bytes: 10,000 samples without request ids, a tenth of a second of a very busy model.
const BYTES: usize = 256 << 10;

/// How often a ring is looked into while samples come that no request brings along.
const PACE: Duration = Duration::from_millis(100);

/// One worker's ring of samples.
pub struct Ring {
    /// The name of the worker's instance.
    instance: String,
    // Held while samples are copied into the cache: the reader of replies, the scrape, the pump and the tick all drain.
    state: Mutex<State>,
    /// Rung by the worker.
    bell: pipe::Receiver,
    /// The tick has found samples that nobody fetched.
    found: Notify,
}

struct State {
    feed: Feed,
    fault: Option<String>,
    /// The count of all samples, and the cache's generation that it is of.
    samples: Option<(u64, Arc<Series>)>,
    refused: Refused,
    closed: bool,
}

/// Samples refused since it was last said.
#[derive(Default)]
struct Refused {
    count: u64,
    why: Option<SampleError>,
    throttle: Throttle,
}

impl Ring {
    /// A ring, and the descriptors of its memory and of its bell, which the worker inherits.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn create(instance: &str) -> io::Result<(Self, OwnedFd, OwnedFd)> {
        let (descriptor, reader) = channel::create(BYTES)?;
        let (theirs, bell) = pipe::pipe()?;
        // Not blocking: a pipe that is full has been heard of.
        let theirs = theirs.into_nonblocking_fd()?;
        let feed = Feed::new(reader);
        let state = State { feed, fault: None, samples: None, refused: Refused::default(), closed: false };
        let ring = Self { instance: instance.to_owned(), state: Mutex::new(state), bell, found: Notify::new() };
        Ok((ring, descriptor, theirs))
    }

    /// Takes what the worker has committed into the cache; gives the number of samples.
    pub fn drain(&self, cache: &Cache, series: &ModelSeries) -> u64 {
        self.lock().drain(cache, series)
    }

    /// [`Ring::drain`], at times when nothing has asked for it.
    pub fn tick(&self, cache: &Cache, series: &ModelSeries) {
        if self.drain(cache, series) > 0 {
            self.found.notify_one();
        }
    }

    /// [`Ring::drain`] for a scrape, which also shows how much was waiting.
    pub fn scrape(&self, cache: &Cache, series: &ModelSeries) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        let waiting = state.feed.waiting_bytes();
        let model = series.model();
        let labels = [&*model.name, &model.version.to_string(), &self.instance];
        // An error means that the definition of the metrics leaves it out.
        if let Ok(gauge) = cache.gauge(Builtin::ChannelBytes.name(), &labels) {
            let _ = gauge.add_or_update(waiting as f64);
        }
        state.drain(cache, series);
    }

    /// [`Ring::drain`] for the last time: the worker is gone, and with it what is shown of its ring.
    pub fn close(&self, cache: &Cache, series: &ModelSeries) {
        let mut state = self.lock();
        state.drain(cache, series);
        state.closed = true;
        let version = series.model().version.to_string();
        cache.remove_series(Builtin::ChannelBytes.name(), |shown| {
            let is = |name: &str, value: &str| {
                let at = shown.spec().dimensions.iter().position(|dimension| dimension == name);
                at.and_then(|at| shown.labels().get(at)).is_some_and(|label| label == value)
            };
            is("model", &series.model().name) && is("version", &version) && is("instance", &self.instance)
        });
    }

    /// Drains when the worker rings, and every `PACE` while samples come. Ends, with the reason, when the worker has
    /// broken the ring.
    pub async fn pump(&self, cache: &Cache, series: &ModelSeries) -> String {
        let mut coming = false;
        loop {
            tokio::select! {
                rung = self.rung() => if let Err(error) = rung {
                    return format!("the bell of the metrics ring cannot be heard: {error}");
                },
                () = self.found.notified() => {}
                () = tokio::time::sleep(PACE), if coming => {}
            }
            coming = self.drain(cache, series) > 0;
            if let Some(fault) = self.fault() {
                return fault;
            }
        }
    }

    /// What is wrong with the ring, if the worker has broken it.
    pub fn fault(&self) -> Option<String> {
        self.lock().fault.clone()
    }

    /// Waits until the worker has rung.
    async fn rung(&self) -> io::Result<()> {
        loop {
            self.bell.readable().await?;
            match self.bell.try_read(&mut [0; 64]) {
                // The worker is gone, which its connection tells too.
                Ok(0) => std::future::pending().await,
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn drain(&mut self, cache: &Cache, series: &ModelSeries) -> u64 {
        if self.fault.is_some() {
            return 0;
        }
        match self.feed.drain(cache, series) {
            Ok(drained) => {
                if drained.samples > 0 {
                    self.count(cache, drained.samples);
                }
                if drained.refused > 0 || drained.refusal.is_some() {
                    self.refused.note(drained.refused, drained.refusal, series);
                }
                drained.samples
            }
            Err(corrupt) => {
                self.fault = Some(format!("the metrics ring is corrupt: {corrupt}"));
                0
            }
        }
    }

    /// Counts samples over all rings. Asks for the series only when the definition of the metrics has changed.
    fn count(&mut self, cache: &Cache, samples: u64) {
        let generation = cache.generation();
        if self.samples.as_ref().is_none_or(|(of, _)| *of != generation) {
            let series = cache.counter(Builtin::Samples.name(), &[Source::Ring.as_str()]).ok();
            self.samples = series.map(|series| (generation, series));
        }
        if let Some((_, series)) = &self.samples {
            let _ = series.add_or_update(samples as f64);
        }
    }
}

impl Refused {
    /// Says it at most once a second, with the first reason since.
    fn note(&mut self, count: u64, why: Option<SampleError>, series: &ModelSeries) {
        self.count = self.count.saturating_add(count);
        self.why = why.or(self.why.take());
        // A series that is refused is no loss yet: its samples are.
        if let Some(why) = self.why.as_ref().filter(|_| self.count > 0)
            && self.throttle.pass(clock::now()).is_some()
        {
            tracing::warn!(model = %series.model(), "{} metric samples were refused: {why}", self.count);
            self.count = 0;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::id::ModelVersion;
    use pharos::metrics::cache::Settings;
    use pharos::metrics::catalog::{Catalog, Kind};
    use pharos::metrics::channel::{Definition, Sample, Writer};
    use pharos::timeline::Instant;

    use super::*;

    const DEFINITION: &str = "
ts_metrics:
  counter:
    - {name: pharos_metric_samples_total, unit: Count, dimensions: [source]}
  gauge:
    - {name: pharos_metric_channel_bytes, unit: Bytes, dimensions: [version, model, instance]}
model_metrics:
  counter:
    - {name: Orders, unit: Count}
";

    struct World {
        cache: Arc<Cache>,
        series: Arc<ModelSeries>,
        ring: Arc<Ring>,
        writer: Writer,
        bell: OwnedFd,
    }

    fn world() -> World {
        let cache = Arc::new(Cache::new(Catalog::parse(DEFINITION, "m.yaml").unwrap(), Settings::new("host")));
        let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let (ring, memory, bell) = Ring::create("m_0").unwrap();
        World { cache, series, ring: Arc::new(ring), writer: Writer::open(&memory).unwrap(), bell }
    }

    impl World {
        fn push(&mut self, count: usize) {
            let orders =
                Definition { name: "Orders".into(), kind: Some(Kind::Counter), unit: String::new(), labels: vec![] };
            let series = self.writer.intern(&orders).unwrap();
            for _ in 0..count {
                let sample = Sample { series, value: 1.0, clock: Instant(0), request_id: "" };
                self.writer.sample(&sample).unwrap();
            }
        }

        fn orders(&self) -> f64 {
            self.cache.counter("Orders", &[]).unwrap().value()
        }

        async fn until(&self, orders: f64) {
            while self.orders() < orders {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test]
    async fn a_scrape_shows_what_waited_until_the_worker_is_gone() {
        let mut world = world();
        world.push(10);
        world.ring.scrape(&world.cache, &world.series);
        let shown = |cache: &Cache| cache.gauge(Builtin::ChannelBytes.name(), &["m", "1", "m_0"]).unwrap().value();
        assert!(shown(&world.cache) >= 10.0 * 24.0);
        assert_eq!(world.orders(), 10.0);
        assert_eq!(world.cache.counter(Builtin::Samples.name(), &["ring"]).unwrap().value(), 10.0);
        world.push(1);
        world.ring.close(&world.cache, &world.series);
        assert_eq!((world.orders(), shown(&world.cache)), (11.0, 0.0), "the series is a new one");
        world.cache.remove_series(Builtin::ChannelBytes.name(), |_| true);
        world.ring.scrape(&world.cache, &world.series);
        assert_eq!(shown(&world.cache), 0.0, "a late scrape brings nothing back");
    }

    #[tokio::test]
    async fn the_pump_comes_when_it_is_called_and_while_samples_come() {
        let mut world = world();
        let (ring, cache, series) = (world.ring.clone(), world.cache.clone(), world.series.clone());
        let pump = tokio::spawn(async move { ring.pump(&cache, &series).await });
        world.push(5);
        tokio::time::sleep(2 * PACE).await;
        assert_eq!(world.orders(), 0.0, "nobody has called");
        rustix::io::write(&world.bell, &[1]).unwrap();
        world.until(5.0).await;
        world.push(1);
        world.until(6.0).await;
        tokio::time::sleep(3 * PACE).await;
        world.push(1);
        tokio::time::sleep(2 * PACE).await;
        assert_eq!(world.orders(), 6.0, "the samples had ceased");
        world.ring.tick(&world.cache, &world.series);
        assert_eq!(world.orders(), 7.0);
        world.push(1);
        world.until(8.0).await;
        pump.abort();
    }
}
