//! Reads samples from one worker's channel into the cache.

use std::sync::Arc;

use super::cache::{Cache, SampleError, Series};
use super::channel::{Corrupt, Definition, Described, Event, Reader};
use super::log_throttle::LostSamples;
use super::record;
use super::sample_error::MAX_DETECTED;
use super::series::ModelSeries;
use super::unit::Conversion;

/// One worker's channel, and the cache's series for its series numbers.
#[derive(Debug)]
pub struct Feed {
    reader: Reader,
    /// By series number.
    series: Vec<DefinedSeries>,
    /// The metrics that the model has described. A definition ends with its last series, and the
    /// model describes a metric once.
    described: Vec<Described>,
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
    /// Values are converted from the unit of the worker's definition to the unit of the metric.
    Series(Arc<Series>, Conversion),
    /// The metric is switched off: samples are discarded and not counted as dropped.
    Off,
    /// The cache refused the series for this reason: samples are counted as dropped.
    Refused(SampleError),
    /// The series was refused before the definition changed: the next sample looks it up again.
    Unknown,
}

/// Returns the destination of a series' samples.
fn find(
    cache: &Cache,
    model: &ModelSeries,
    described: &[Described],
    definition: &Definition,
) -> Destination {
    let mut found = cache.resolve_for(model, definition);
    if matches!(found, Err(SampleError::Undeclared(_) | SampleError::UnknownLabel { .. })) {
        for metric in described.iter().filter(|metric| metric.name == definition.name) {
            let _ = cache.describe(metric);
            found = cache.resolve_for(model, definition);
        }
    }
    match found {
        Ok(series) => {
            let conversion = Conversion::between(&definition.unit, &series.spec().unit);
            Destination::Series(series, conversion)
        }
        Err(SampleError::Disabled(_)) => Destination::Off,
        Err(error) => Destination::Refused(error),
    }
}

/// The increase of the worker's drop count between two readings, at most. Far more than its threads
/// can record meanwhile.
const MAX_DROPPED: u64 = 1 << 24;

/// Returns the increase of the worker's drop count. Worker memory is not trusted: a decrease counts
/// as 0, and a jump as at most [`MAX_DROPPED`].
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
        Self { reader, series: Vec::new(), described: Vec::new(), generation: 0, dropped: 0 }
    }

    /// Returns the number of bytes in the channel that wait to be read.
    pub fn waiting_bytes(&self) -> u64 {
        self.reader.waiting_bytes()
    }

    /// Reads every committed sample into the cache and records losses for the model. Costs two
    /// loads if the channel is empty, so callers may call it before each reply.
    ///
    /// # Errors
    /// The channel is corrupt, and the worker must not be trusted any more. Earlier samples are in
    /// the cache.
    pub fn drain(&mut self, cache: &Cache, model: &ModelSeries) -> Result<Drained, Corrupt> {
        let mut drained = Drained::default();
        let generation = cache.generation();
        let Self { reader, series, described, dropped, .. } = self;
        if self.generation != generation {
            self.generation = generation;
            for known in series.iter_mut() {
                known.destination = match known.destination {
                    Destination::Series(..) => find(cache, model, described, &known.definition),
                    // A gauge without a sample would be shown with 0.
                    _ => Destination::Unknown,
                };
            }
        }
        drained.dropped = step(dropped, reader.dropped());
        let result = reader.drain(|event| match event {
            Event::Series(definition) => {
                let destination = find(cache, model, described, &definition);
                series.push(DefinedSeries { definition, destination });
            }
            Event::Metric(metric) if model.has_ended() => drop(metric),
            Event::Metric(metric) => {
                // An invalid description fails again for its series, which are then reported for
                // each sample.
                let _ = cache.describe(&metric);
                if described.len() < MAX_DETECTED && !described.contains(&metric) {
                    described.push(metric);
                }
            }
            Event::Sample(sample) => {
                let Some(known) = series.get_mut(sample.series as usize) else {
                    drained.refused += 1;
                    return;
                };
                if matches!(known.destination, Destination::Unknown) {
                    known.destination = find(cache, model, described, &known.definition);
                }
                match &known.destination {
                    Destination::Off | Destination::Unknown => {}
                    Destination::Series(series, conversion) => {
                        match series
                            .add_or_update_for(conversion.apply(sample.value), sample.request_id)
                        {
                            Ok(()) => drained.samples += 1,
                            Err(error) => drained.refuse(&error),
                        }
                    }
                    Destination::Refused(error) => drained.refuse(error),
                }
            }
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
    use pharos_base::id::ModelVersion;
    use pharos_base::timeline::Instant;

    use super::*;
    use crate::cache::Settings;
    use crate::catalog::{Catalog, Kind};
    use crate::channel::{self, Sample, Writer};

    const ORDERS: &str =
        "model_metrics:\n  counter:\n    - {name: Orders, unit: Count, dimensions: [shop]}\n";

    fn orders(label: &str) -> Definition {
        Definition {
            name: "Orders".to_owned(),
            kind: Some(Kind::Counter),
            unit: "Count".to_owned(),
            labels: vec![(label.to_owned(), "a".to_owned())],
        }
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
        let unknown =
            writer.intern(&Definition { name: "None".to_owned(), ..orders("shop") }).unwrap();
        for (series, value) in [(good, 2.0), (bad, 1.0), (good, -1.0), (unknown, 1.0), (good, 3.0)]
        {
            push(&mut writer, series, value);
        }
        writer.count_dropped();
        let drained = feed.drain(&cache, &model).unwrap();
        assert_eq!((drained.samples, drained.refused, drained.dropped), (2, 3, 1));
        assert!(
            matches!(drained.refusals[..], [SampleError::UnknownLabel { .. }, ..]),
            "{drained:?}"
        );
        assert_eq!(cache.counter("Orders", &["a"]).unwrap().value(), 5.0);
        assert_eq!(model.cells.counts.samples_dropped.get(), 4);
        assert_eq!(feed.drain(&cache, &model), Ok(Drained::default()));
        assert_eq!(model.cells.counts.samples_dropped.get(), 4);
    }

    #[test]
    fn a_jump_of_the_drop_count_is_limited() {
        let mut known = 0;
        let steps = [3, 3, 0, 5, 1_000_000_000_000_000_000, 7, u64::MAX, 0, u64::MAX]
            .map(|read| step(&mut known, read));
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
        assert_eq!(
            feed.drain(&cache, &model),
            Ok(Drained::default()),
            "nothing was sent, so nothing is refused"
        );
        push(&mut writer, series, 2.0);
        assert!(matches!(
            feed.drain(&cache, &model).unwrap().refusals[..],
            [SampleError::Undeclared(_)]
        ));
        cache.reload(Catalog::parse(ORDERS, "m.yaml").unwrap());
        push(&mut writer, series, 4.0);
        assert_eq!(feed.drain(&cache, &model).unwrap().samples, 1);
        let off = cache.registry().catalog().clone().with_enabled("Orders", false);
        let on = cache.registry().catalog().clone();
        cache.reload(off);
        push(&mut writer, series, 8.0);
        assert_eq!(
            feed.drain(&cache, &model),
            Ok(Drained::default()),
            "switched off: neither counted nor lost"
        );
        assert!(cache.counter("Orders", &["a"]).is_err());
        cache.reload(on);
        feed.drain(&cache, &model).unwrap();
        cache.counter("Orders", &["a"]).unwrap().add_or_update(4.0).unwrap();
        assert_eq!(cache.counter("Orders", &["a"]).unwrap().value(), 4.0);
    }

    fn named(name: &str, kind: Kind, labels: &[(&str, &str)]) -> Definition {
        let labels =
            labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Definition { name: name.to_owned(), kind: Some(kind), unit: "Count".to_owned(), labels }
    }

    /// The samples of the model `b` with another type are refused while the model `a` has series of
    /// the name, and recorded then.
    #[test]
    fn a_detected_definition_ends_with_its_last_series() {
        let text = "mode: prometheus";
        let settings = Settings { auto_detect: true, ..Settings::new("host") };
        let cache = Cache::new(Catalog::parse(text, "m.yaml").unwrap(), settings);
        let [(a, mut feed_a, mut to_a), (b, mut feed_b, mut to_b)] = ["a", "b"].map(|name| {
            let (fd, reader) = channel::create(0).unwrap();
            let model = cache.model_loaded(&ModelVersion::new(name, 1), &[]);
            (model, Feed::new(reader), Writer::open(&fd).unwrap())
        });
        let counter = to_a.intern(&named("Answers", Kind::Counter, &[("lang", "x")])).unwrap();
        push(&mut to_a, counter, 2.0);
        assert_eq!(feed_a.drain(&cache, &a).unwrap().samples, 1);
        // Other labels are kept beside the labels of the first model.
        let other = to_b.intern(&named("Answers", Kind::Counter, &[("tier", "y")])).unwrap();
        push(&mut to_b, other, 4.0);
        assert_eq!(feed_b.drain(&cache, &b).unwrap().samples, 1);
        assert_eq!(cache.registry().family("Answers").unwrap().all().len(), 2);
        let gauge = to_b.intern(&named("Depth", Kind::Gauge, &[("sea", "y")])).unwrap();
        let counter = to_a.intern(&named("Depth", Kind::Counter, &[])).unwrap();
        push(&mut to_a, counter, 1.0);
        assert_eq!(feed_a.drain(&cache, &a).unwrap().samples, 1);
        push(&mut to_b, gauge, 3.0);
        assert!(matches!(
            feed_b.drain(&cache, &b).unwrap().refusals[..],
            [SampleError::WrongKind { .. }]
        ));
        cache.model_unloaded(&a);
        assert!(cache.registry().family("Depth").is_none(), "the definition has ended");
        assert_eq!(cache.registry().family("Answers").unwrap().all().len(), 1);
        assert_eq!(feed_b.drain(&cache, &b), Ok(Drained::default()));
        assert!(
            cache.registry().family("Depth").is_none(),
            "a gauge without a sample is not shown"
        );
        push(&mut to_b, gauge, 5.0);
        push(&mut to_b, other, 6.0);
        assert_eq!(feed_b.drain(&cache, &b).unwrap().samples, 2);
        let value = |definition: &Definition| cache.resolve(definition).unwrap().value();
        assert_eq!(value(&named("Depth", Kind::Gauge, &[("sea", "y")])), 5.0);
        assert_eq!(value(&named("Answers", Kind::Counter, &[("tier", "y")])), 10.0);
        cache.model_unloaded(&b);
        assert!(
            cache.registry().family("Answers").is_none()
                && cache.registry().family("Depth").is_none()
        );
    }

    /// Lines have no type, so both models have theirs.
    #[test]
    fn metric_logs_have_samples_of_every_type() {
        let settings = Settings { auto_detect: true, ..Settings::new("host") };
        let cache = Cache::new(Catalog::parse("mode: tslog", "m.yaml").unwrap(), settings);
        let models = [("a", Kind::Counter), ("b", Kind::Gauge)].map(|(name, kind)| {
            let model = cache.model_loaded(&ModelVersion::new(name, 1), &[]);
            let (fd, reader) = channel::create(0).unwrap();
            let mut feed = Feed::new(reader);
            let mut writer = Writer::open(&fd).unwrap();
            let series = writer.intern(&named("Answers", kind, &[("lang", "x")])).unwrap();
            push(&mut writer, series, 1.0);
            assert_eq!(feed.drain(&cache, &model).unwrap().samples, 1, "{name}");
            model
        });
        assert_eq!(cache.registry().detected(), 2);
        // The second takes the place of the first.
        cache.model_unloaded(&models[0]);
        assert_eq!(cache.registry().family("Answers").unwrap().spec().kind, Kind::Gauge);
        cache.model_unloaded(&models[1]);
        assert_eq!(cache.registry().detected(), 0);
    }

    /// As `pb_utils.MetricFamily`: a model describes a metric once, also if the definition ends
    /// meanwhile.
    #[test]
    fn a_description_is_repeated_after_its_metric_has_ended() {
        let cache = cache();
        let [first, second] =
            [1, 2].map(|version| cache.model_loaded(&ModelVersion::new("m", version), &[]));
        let metric = Described {
            name: "held".to_owned(),
            kind: Kind::Gauge,
            description: String::new(),
            buckets: Vec::new(),
            dimensions: vec!["a".to_owned()],
        };
        let (fd, reader) = channel::create(0).unwrap();
        let mut feed = Feed::new(reader);
        let mut writer = Writer::open(&fd).unwrap();
        cache.describe(&metric).unwrap();
        let series = named("held", Kind::Gauge, &[("a", "x")]);
        cache.resolve_for(&first, &series).unwrap();
        writer.describe(&metric).unwrap();
        feed.drain(&cache, &second).unwrap();
        cache.model_unloaded(&first);
        assert!(cache.registry().family("held").is_none());
        let number = writer.intern(&series).unwrap();
        push(&mut writer, number, 3.0);
        assert_eq!(feed.drain(&cache, &second).unwrap().samples, 1);
        assert_eq!(cache.resolve(&series).unwrap().value(), 3.0);
    }

    #[test]
    fn series_are_removed_with_the_last_model_that_writes_them() {
        let cache = cache();
        let models =
            [1, 2].map(|version| cache.model_loaded(&ModelVersion::new("m", version), &[]));
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
