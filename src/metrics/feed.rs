//! From one worker's channel into the cache.

use std::sync::Arc;

use super::cache::{Cache, Cell, SampleError};
use super::channel::{Corrupt, Event, Reader};
use super::record;
use super::series::ModelSeries;

/// One worker's channel and what its series numbers stand for in the cache.
#[derive(Debug)]
pub struct Feed {
    reader: Reader,
    /// By series number; `None` for a series that the cache refused, whose samples are counted as dropped.
    cells: Vec<Option<Arc<Cell>>>,
    /// The producer's count of dropped samples, as far as it is recorded.
    dropped: u64,
}

/// What one call of [`Feed::drain`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Samples now in the cache.
    pub samples: u64,
    /// Samples that the cache refused. Recorded as dropped.
    pub refused: u64,
    /// Samples that the worker could not send since the last call. Recorded as dropped.
    pub dropped: u64,
    /// Why the first refused one was refused, for the log.
    pub refusal: Option<SampleError>,
}

impl Feed {
    /// A feed from a channel's start.
    pub fn new(reader: Reader) -> Self {
        Self { reader, cells: Vec::new(), dropped: 0 }
    }

    /// Takes every committed sample into the cache; what is lost is recorded for the model. Costs two loads when nothing
    /// is waiting, so it can be called before each reply.
    ///
    /// # Errors
    /// When the channel is corrupt: the worker is not to be trusted any more. Samples before that are in the cache.
    pub fn drain(&mut self, cache: &Cache, model: &ModelSeries) -> Result<Drained, Corrupt> {
        let Self { reader, cells, dropped } = self;
        let mut drained = Drained::default();
        let counted = reader.dropped();
        // The worker could also turn its count back: that is no reason to add 2^64.
        drained.dropped = counted.saturating_sub(*dropped);
        *dropped = counted.max(*dropped);
        let result = reader.drain(|event| match event {
            Event::Series { metric, labels } => match cache.series(metric, &labels) {
                Ok(cell) => cells.push(Some(cell)),
                Err(error) => {
                    cells.push(None);
                    drained.refusal.get_or_insert(error);
                }
            },
            Event::Sample(sample) => match cells.get(sample.series as usize) {
                Some(Some(cell)) => match cell.add_or_update(sample.value) {
                    Ok(()) => drained.samples += 1,
                    Err(error) => {
                        drained.refused += 1;
                        drained.refusal.get_or_insert(error);
                    }
                },
                _ => drained.refused += 1,
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
    use crate::metrics::cache::Reading;
    use crate::metrics::catalog::{Catalog, MetricId};
    use crate::metrics::channel::{self, Sample, Writer};
    use crate::timeline::Instant;

    #[test]
    fn samples_reach_the_cache_and_losses_are_counted() {
        let text = "model_metrics:\n  counter:\n    - {name: Orders, unit: Count, dimensions: [shop]}\n";
        let catalog = Catalog::parse(text, "m.yaml").unwrap();
        let (fd, reader) = channel::create(0, catalog.fingerprint()).unwrap();
        let mut writer = Writer::open(&fd, catalog.fingerprint()).unwrap();
        let cache = Cache::new(catalog, "host");
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let mut feed = Feed::new(reader);
        assert_eq!(feed.drain(&cache, &model), Ok(Drained::default()));

        let shop = ["a".to_owned()];
        let good = writer.intern(MetricId(0), &shop).unwrap();
        let bad = writer.intern(MetricId(0), &[]).unwrap();
        let unknown = writer.intern(MetricId(8), &[]).unwrap();
        for (series, value) in [(good, 2.0), (bad, 1.0), (good, -1.0), (unknown, 1.0), (good, 3.0)] {
            writer.sample(&Sample { series, value, clock: Instant(0), request_id: "r" }).unwrap();
        }
        writer.count_dropped();
        let drained = feed.drain(&cache, &model).unwrap();
        assert_eq!((drained.samples, drained.refused, drained.dropped), (2, 3, 1));
        assert!(matches!(drained.refusal, Some(SampleError::WrongLabels { .. })));
        assert_eq!(cache.series(MetricId(0), &shop).unwrap().read(), Reading::Number(5.0));
        assert_eq!(model.samples_dropped.get(), 4);
        assert_eq!(feed.drain(&cache, &model), Ok(Drained::default()));
        assert_eq!(model.samples_dropped.get(), 4);
    }
}
