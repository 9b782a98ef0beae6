//! Reads samples from one worker's channel into the cache.

use std::sync::Arc;

use super::cache::{Cache, SampleError, Series};
use super::channel::{Corrupt, Definition, Event, Reader};
use super::emitter::LostSamples;
use super::record;
use super::series::ModelSeries;

/// One worker's channel, and the cache's series for its series numbers.
#[derive(Debug)]
pub struct Feed {
    reader: Reader,
    /// By series number.
    series: Vec<DefinedSeries>,
    /// The cache's generation in which the series were looked up.
    generation: u64,
    /// The producer's count of dropped samples that is already recorded.
    dropped: u64,
}

/// A series that a worker has defined, and the destination of its samples.
#[derive(Debug)]
struct DefinedSeries {
    definition: Definition,
    destination: Destination,
}

/// The destination of samples.
#[derive(Debug)]
enum Destination {
    Series(Arc<Series>),
    /// The metric is switched off: samples are discarded and not counted as dropped.
    Off,
    /// The cache refused the series for this reason: samples are counted as dropped.
    Refused(SampleError),
}

/// The increase of the worker's drop count between two readings, at most. Far more than its threads can record meanwhile.
const MAX_DROPPED: u64 = 1 << 24;

/// Returns the increase of the worker's drop count. Worker memory is not trusted: a decrease counts as 0, and a jump as
/// at most [`MAX_DROPPED`].
fn step(known: &mut u64, counted: u64) -> u64 {
    let before = *known;
    *known = counted.max(before);
    counted.saturating_sub(before).min(MAX_DROPPED)
}

/// The result of one call of [`Feed::drain`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Samples that were added to the cache.
    pub samples: u64,
    /// Samples that the cache refused. Recorded as dropped.
    pub refused: u64,
    /// Samples that the worker could not send since the last call. Recorded as dropped.
    pub dropped: u64,
    /// The first distinct errors of refused samples, for the log.
    pub refusals: Vec<SampleError>,
}

impl Drained {
    #[cold]
    fn refuse(&mut self, error: &SampleError) {
        self.refused += 1;
        if self.refusals.len() < LostSamples::REASONS && !self.refusals.contains(error) {
            self.refusals.push(error.clone());
        }
    }
}

impl Feed {
    /// Creates a feed from the start of a channel.
    pub fn new(reader: Reader) -> Self {
        Self { reader, series: Vec::new(), generation: 0, dropped: 0 }
    }

    /// Returns the number of bytes in the channel that wait to be read.
    pub fn waiting_bytes(&self) -> u64 {
        self.reader.waiting_bytes()
    }

    /// Reads every committed sample into the cache and records losses for the model. Costs two loads if the channel is
    /// empty, so callers may call it before each reply.
    ///
    /// # Errors
    /// The channel is corrupt, and the worker must not be trusted any more. Earlier samples are in the cache.
    pub fn drain(&mut self, cache: &Cache, model: &ModelSeries) -> Result<Drained, Corrupt> {
        let mut drained = Drained::default();
        let find = |definition: &Definition| match cache.resolve_for(model, definition) {
            Ok(series) => Destination::Series(series),
            Err(SampleError::Disabled(_)) => Destination::Off,
            Err(error) => Destination::Refused(error),
        };
        let generation = cache.generation();
        if self.generation != generation {
            self.generation = generation;
            self.series.iter_mut().for_each(|known| known.destination = find(&known.definition));
        }
        let Self { reader, series, dropped, .. } = self;
        drained.dropped = step(dropped, reader.dropped());
        let result = reader.drain(|event| match event {
            Event::Series(definition) => {
                let destination = find(&definition);
                series.push(DefinedSeries { definition, destination });
            }
            // An invalid description fails again for its series, which are then reported for each sample.
            Event::Metric(metric) => drop(cache.describe(&metric)),
            Event::Sample(sample) => match series.get(sample.series as usize).map(|known| &known.destination) {
                Some(Destination::Off) => {}
                Some(Destination::Series(series)) => match series.add_or_update_for(sample.value, sample.request_id) {
                    Ok(()) => drained.samples += 1,
                    Err(error) => drained.refuse(&error),
                },
                Some(Destination::Refused(error)) => drained.refuse(error),
                None => drained.refused += 1,
            },
        });
        let lost = drained.refused.saturating_add(drained.dropped);
        if lost > 0 {
            record::samples_dropped(model, lost);
        }
        result.map(|_| drained)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::id::ModelVersion;
    use crate::metrics::cache::Settings;
    use crate::metrics::catalog::{Catalog, Kind};
    use crate::metrics::channel::{self, Sample, Writer};
    use crate::timeline::Instant;

    const ORDERS: &str = "model_metrics:\n  counter:\n    - {name: Orders, unit: Count, dimensions: [shop]}\n";

    fn orders(label: &str) -> Definition {
        let labels = vec![(label.to_owned(), "a".to_owned())];
        Definition { name: "Orders".to_owned(), kind: Some(Kind::Counter), unit: "Count".to_owned(), labels }
    }

    fn cache() -> Cache {
        Cache::new(Catalog::parse(ORDERS, "m.yaml").unwrap(), Settings::new("host"))
    }

    fn push(writer: &mut Writer, series: u32, value: f64) {
        writer.sample(&Sample { series, value, clock: Instant(0), request_id: "r" }).unwrap();
    }

    #[test]
    fn samples_reach_the_cache_and_losses_are_counted() {
        let (fd, reader) = channel::create(0).unwrap();
        let mut writer = Writer::open(&fd).unwrap();
        let cache = cache();
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let mut feed = Feed::new(reader);
        assert_eq!(feed.drain(&cache, &model), Ok(Drained::default()));

        let good = writer.intern(&orders("shop")).unwrap();
        let bad = writer.intern(&orders("store")).unwrap();
        let unknown = writer.intern(&Definition { name: "None".to_owned(), ..orders("shop") }).unwrap();
        for (series, value) in [(good, 2.0), (bad, 1.0), (good, -1.0), (unknown, 1.0), (good, 3.0)] {
            push(&mut writer, series, value);
        }
        writer.count_dropped();
        let drained = feed.drain(&cache, &model).unwrap();
        assert_eq!((drained.samples, drained.refused, drained.dropped), (2, 3, 1));
        assert!(matches!(drained.refusals[..], [SampleError::WrongLabels { .. }, ..]), "{drained:?}");
        assert_eq!(cache.counter("Orders", &["a"]).unwrap().value(), 5.0);
        assert_eq!(model.cells.counts.samples_dropped.get(), 4);
        assert_eq!(feed.drain(&cache, &model), Ok(Drained::default()));
        assert_eq!(model.cells.counts.samples_dropped.get(), 4);
    }

    #[test]
    fn a_jump_of_the_drop_count_is_limited() {
        let mut known = 0;
        let steps =
            [3, 3, 0, 5, 1_000_000_000_000_000_000, 7, u64::MAX, 0, u64::MAX].map(|read| step(&mut known, read));
        assert_eq!(steps, [3, 0, 0, 2, MAX_DROPPED, 0, MAX_DROPPED, 0, 0]);
    }

    #[test]
    fn a_new_definition_applies_to_known_series() {
        let (fd, reader) = channel::create(0).unwrap();
        let mut writer = Writer::open(&fd).unwrap();
        let cache = cache();
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let mut feed = Feed::new(reader);
        let series = writer.intern(&orders("shop")).unwrap();
        push(&mut writer, series, 1.0);
        feed.drain(&cache, &model).unwrap();
        cache.reload(Catalog::parse("mode: prometheus", "m.yaml").unwrap());
        assert_eq!(feed.drain(&cache, &model), Ok(Drained::default()), "nothing was sent, so nothing is refused");
        push(&mut writer, series, 2.0);
        assert!(matches!(feed.drain(&cache, &model).unwrap().refusals[..], [SampleError::Undeclared(_)]));
        cache.reload(Catalog::parse(ORDERS, "m.yaml").unwrap());
        push(&mut writer, series, 4.0);
        assert_eq!(feed.drain(&cache, &model).unwrap().samples, 1);
        let off = cache.registry().catalog().clone().with_enabled("Orders", false);
        let on = cache.registry().catalog().clone();
        cache.reload(off);
        push(&mut writer, series, 8.0);
        assert_eq!(feed.drain(&cache, &model), Ok(Drained::default()), "switched off: neither counted nor lost");
        assert!(cache.counter("Orders", &["a"]).is_err());
        cache.reload(on);
        feed.drain(&cache, &model).unwrap();
        cache.counter("Orders", &["a"]).unwrap().add_or_update(4.0).unwrap();
        assert_eq!(cache.counter("Orders", &["a"]).unwrap().value(), 4.0);
    }

    #[test]
    fn series_are_removed_with_the_last_model_that_writes_them() {
        let cache = cache();
        let models = [1, 2].map(|version| cache.model_loaded(&ModelVersion::new("m", version), &[]));
        for model in &models {
            let (fd, reader) = channel::create(0).unwrap();
            let mut writer = Writer::open(&fd).unwrap();
            writer.intern(&orders("shop")).unwrap();
            Feed::new(reader).drain(&cache, model).unwrap();
        }
        let [first, second] = models;
        let count = || cache.registry().family("Orders").unwrap().all().len();
        cache.model_unloaded(&first);
        assert_eq!(count(), 1);
        cache.model_unloaded(&second);
        assert_eq!(count(), 0);
    }
}
