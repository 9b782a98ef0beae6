//! The reader of one worker's ring of samples.
//!
//! The ring is drained before a reply is passed on, by a scrape, by the instance's tick, and at the
//! end of the connection. This suffices for samples of requests. For samples of a model's own
//! threads, the worker writes to a wake-up pipe when the ring is half full, and while samples
//! arrive, [`SampleRing::pump`] drains every [`PACE`]. A worker without samples causes no wake-ups.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::{Cache, Series};
use pharos::metrics::channel;
use pharos::metrics::feed::Feed;
use pharos::metrics::labels::Source;
use pharos::metrics::log_throttle::LostSamples;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use tokio::net::unix::pipe;
use tokio::sync::Notify;

use pharos_os::clock;

/// The size of a ring in bytes: 10,000 samples without request ids, a tenth of a second of a very
/// busy model.
const BYTES: usize = 256 << 10;

/// The interval at which a ring is drained while samples arrive without requests.
const PACE: Duration = Duration::from_millis(100);

/// One worker's ring of samples.
pub(crate) struct SampleRing {
    /// The name of the worker's instance.
    instance: String,
    // Locked while samples are copied into the cache: the reader of replies, the scrape, the pump
    // and the tick all drain.
    state: Mutex<State>,
    /// The read end of the wake-up pipe, to which the worker writes.
    wake_up: pipe::Receiver,
    /// Notified if the tick has found samples.
    found: Notify,
}

struct State {
    feed: Feed,
    fault: Option<String>,
    /// The counter of all samples, and the generation of the cache to which the counter belongs.
    samples: Option<(u64, Arc<Series>)>,
    refused: LostSamples,
    closed: bool,
}

impl SampleRing {
    /// Creates a ring. Returns it with the descriptors of its memory and of its wake-up pipe, which
    /// the worker inherits.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub(crate) fn create(instance: &str) -> io::Result<(Self, OwnedFd, OwnedFd)> {
        let (descriptor, reader) = channel::create(BYTES)?;
        let (worker_end, wake_up) = pipe::pipe()?;
        // Non-blocking: a full pipe wakes the reader already.
        let worker_end = worker_end.into_nonblocking_fd()?;
        let feed = Feed::new(reader);
        let state = State {
            feed,
            fault: None,
            samples: None,
            refused: LostSamples::default(),
            closed: false,
        };
        let ring = Self {
            instance: instance.to_owned(),
            state: Mutex::new(state),
            wake_up,
            found: Notify::new(),
        };
        Ok((ring, descriptor, worker_end))
    }

    /// Moves the committed samples of the worker into the cache. Returns their number.
    pub(crate) fn drain(&self, cache: &Cache, series: &ModelSeries) -> u64 {
        self.lock().drain(cache, series)
    }

    /// Drains the ring without a reply or a scrape.
    pub(crate) fn tick(&self, cache: &Cache, series: &ModelSeries) {
        if self.drain(cache, series) > 0 {
            self.found.notify_one();
        }
    }

    /// Drains the ring for a scrape, and sets the gauge of the waiting bytes.
    pub(crate) fn scrape(&self, cache: &Cache, series: &ModelSeries) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        let waiting = state.feed.waiting_bytes();
        let model = series.model();
        let labels = [&*model.name, &model.version.to_string(), &self.instance];
        cache.set_gauge(Builtin::ChannelBytes, &labels, waiting as f64);
        state.drain(cache, series);
    }

    /// Drains the ring for the last time and removes the gauges of the process: the worker has
    /// ended.
    pub(crate) fn close(&self, cache: &Cache, series: &ModelSeries) {
        let mut state = self.lock();
        state.drain(cache, series);
        state.closed = true;
        record::states_lost(cache, series, &self.instance);
        let version = series.model().version.to_string();
        cache.remove_series(Builtin::ChannelBytes.name(), |shown| {
            let labels = [
                ("model", &*series.model().name),
                ("version", &version),
                ("instance", &self.instance),
            ];
            labels.into_iter().all(|(name, value)| {
                let position =
                    shown.spec().dimensions.iter().position(|dimension| dimension == name);
                position
                    .and_then(|position| shown.labels().get(position))
                    .is_some_and(|label| label == value)
            })
        });
    }

    /// Drains on each wake-up by the worker, and every `PACE` while samples arrive. Returns the
    /// reason when the ring is corrupt.
    pub(crate) async fn pump(&self, cache: &Cache, series: &ModelSeries) -> String {
        let mut coming = false;
        loop {
            tokio::select! {
                woken = self.woken() => if let Err(error) = woken {
                    return format!("cannot read the wake-up pipe of the metrics ring: {error}");
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

    /// Returns the fault of the ring, if the worker has corrupted it.
    pub(crate) fn fault(&self) -> Option<String> {
        self.lock().fault.clone()
    }

    /// Waits until the worker writes to the wake-up pipe.
    async fn woken(&self) -> io::Result<()> {
        loop {
            self.wake_up.readable().await?;
            match self.wake_up.try_read(&mut [0; 64]) {
                // The worker has ended; its connection reports that.
                Ok(0) => std::future::pending().await,
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
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
                if drained.refused > 0
                    && let Some((count, why)) =
                        self.refused.add(drained.refused, drained.refusals, clock::now())
                {
                    tracing::warn!(model = %series.model(), "{count} metric samples were refused: {why}");
                }
                drained.samples
            }
            Err(corrupt) => {
                self.fault = Some(format!("the metrics ring is corrupt: {corrupt}"));
                0
            }
        }
    }

    /// Counts samples of all rings. Looks up the series only after the definition of the metrics
    /// has changed.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::id::ModelVersion;
    use pharos::metrics::cache::Settings;
    use pharos::metrics::catalog::{Catalog, Kind, STATE_BYTES};
    use pharos::metrics::channel::{Definition, Sample, Writer};
    use pharos::metrics::exposition::{self, Format};
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
  gauge:
    - {name: pharos_sequence_state_bytes, unit: Bytes, dimensions: [instance, version, model]}
";

    struct World {
        cache: Arc<Cache>,
        series: Arc<ModelSeries>,
        ring: Arc<SampleRing>,
        writer: Writer,
        wake_up: OwnedFd,
    }

    fn world() -> World {
        let cache = Arc::new(Cache::new(
            Catalog::parse(DEFINITION, "m.yaml").unwrap(),
            Settings::new("host"),
        ));
        let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let (ring, memory, wake_up) = SampleRing::create("m_0").unwrap();
        World {
            cache,
            series,
            ring: Arc::new(ring),
            writer: Writer::open(&memory).unwrap(),
            wake_up,
        }
    }

    impl World {
        fn push(&mut self, count: usize) {
            let orders = Definition {
                name: "Orders".into(),
                kind: Some(Kind::Counter),
                unit: String::new(),
                labels: vec![],
            };
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
    async fn a_scrape_shows_the_waiting_bytes_until_the_worker_ends() {
        let mut world = world();
        world.push(10);
        world.ring.scrape(&world.cache, &world.series);
        let shown = |cache: &Cache| {
            cache.gauge(Builtin::ChannelBytes.name(), &["m", "1", "m_0"]).unwrap().value()
        };
        assert!(shown(&world.cache) >= 10.0 * 24.0);
        assert_eq!(world.orders(), 10.0);
        assert_eq!(world.cache.counter(Builtin::Samples.name(), &["ring"]).unwrap().value(), 10.0);
        world.push(1);
        world.ring.close(&world.cache, &world.series);
        assert_eq!((world.orders(), shown(&world.cache)), (11.0, 0.0), "a new series");
        world.cache.remove_series(Builtin::ChannelBytes.name(), |_| true);
        world.ring.scrape(&world.cache, &world.series);
        assert_eq!(shown(&world.cache), 0.0, "a late scrape does not restore the series");
    }

    #[tokio::test]
    async fn the_states_of_an_ended_worker_are_not_shown() {
        let mut world = world();
        let states = |world: &World| {
            let text = exposition::render(&world.cache, Format::Text);
            text.lines()
                .filter(|line| line.starts_with("pharos_sequence"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        for (instance, bytes) in [("m_0", 40.0), ("m_1", 50.0)] {
            let labels = [("model", "m"), ("version", "1"), ("instance", instance)];
            let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
            let name = STATE_BYTES.to_owned();
            let unit = String::new();
            let series = world
                .writer
                .intern(&Definition { name, kind: Some(Kind::Gauge), unit, labels })
                .unwrap();
            world
                .writer
                .sample(&Sample { series, value: bytes, clock: Instant(0), request_id: "" })
                .unwrap();
        }
        world.ring.drain(&world.cache, &world.series);
        assert_eq!(states(&world).len(), 2);
        world.ring.close(&world.cache, &world.series);
        let other = "pharos_sequence_state_bytes{instance=\"m_1\",version=\"1\",model=\"m\"} 50";
        assert_eq!(states(&world), [other]);
    }

    #[tokio::test]
    async fn the_pump_drains_on_wake_up_and_while_samples_arrive() {
        let mut world = world();
        let ring = world.ring.clone();
        let cache = world.cache.clone();
        let series = world.series.clone();
        let pump = tokio::spawn(async move { ring.pump(&cache, &series).await });
        world.push(5);
        tokio::time::sleep(2 * PACE).await;
        assert_eq!(world.orders(), 0.0, "the worker has not written to the pipe");
        rustix::io::write(&world.wake_up, &[1]).unwrap();
        world.until(5.0).await;
        world.push(1);
        world.until(6.0).await;
        tokio::time::sleep(3 * PACE).await;
        world.push(1);
        tokio::time::sleep(2 * PACE).await;
        assert_eq!(world.orders(), 6.0, "the samples had stopped");
        world.ring.tick(&world.cache, &world.series);
        assert_eq!(world.orders(), 7.0);
        world.push(1);
        world.until(8.0).await;
        pump.abort();
    }
}
