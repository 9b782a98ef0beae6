//! Reads lines of text into the cache: those that workers print ([`worker_lines`]) and those that
//! programs send ([`statsd`]).
//!
//! A line reaches the same series as the equal sample in a worker's ring. Refused lines are counted
//! here; the caller decides whether to log them.

use std::sync::Arc;

use super::builtin::Builtin;
use super::cache::{Cache, SampleError, Series};
use super::catalog::{Kind, MetricSpec, WorkerLabel};
use super::channel::Definition;
use super::label_schema::LabelSchema;
use super::labels::Source;
use super::record;
use super::series::ModelSeries;
use super::statsd::{self, Sets, Update};
use super::text_lines::{Malformed, prometheus_name};
use super::unit::Conversion;
use super::worker_lines;

/// The longest metric line of a worker, in bytes with marker and line feed. Enough for some 1,700
/// request ids.
pub const MAX_LINE: usize = 64 << 10;

/// Why a line was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub enum Refusal {
    /// The line could not be parsed.
    Malformed(#[from] Malformed),
    /// The cache refused the sample.
    Sample(#[from] SampleError),
}

/// Records the line that a worker of `model` has printed. `body` is the text after the marker
/// ([`worker_lines::strip`]) up to and including the line feed. Refuses a text without a line feed:
/// the process died while writing it, or it exceeds [`MAX_LINE`].
///
/// A defined metric keeps its type and unit, whatever the line contains; a value in another unit of
/// time or size is converted. A detected one gets the dimensions of its lines, followed by
/// `Hostname` if the line gives a host. A line of a metric that is switched off is ignored.
///
/// # Errors
/// The line is malformed (counted by source) or refused (counted as a dropped sample of the model).
pub fn stdout_line(cache: &Cache, model: &ModelSeries, body: &[u8]) -> Result<(), Refusal> {
    let whole = body
        .strip_suffix(b"\n")
        .ok_or(Malformed("the line is cut off, or longer than 65536 bytes"));
    let line = whole
        .and_then(worker_lines::parse)
        .inspect_err(|_| count(cache, Builtin::LinesMalformed, Source::Stdout, 1))?;
    let result = take_printed(cache, model, &line);
    match result {
        Ok(()) => count(cache, Builtin::Samples, Source::Stdout, 1),
        Err(Refusal::Sample(SampleError::Disabled(_))) => return Ok(()),
        Err(_) => record::samples_dropped(model, 1),
    }
    result
}

fn take_printed(
    cache: &Cache,
    model: &ModelSeries,
    line: &worker_lines::Line<'_>,
) -> Result<(), Refusal> {
    let name = prometheus_name(line.name);
    let known = cache.find(&name).map(|(spec, _)| spec);
    let definition = match &known {
        Some(spec) if spec.builtin.is_some() => {
            return Err(SampleError::Reserved(spec.name.clone()).into());
        }
        Some(spec) if !spec.detected => {
            let host = line.hostname.unwrap_or(cache.hostname());
            let schema = LabelSchema::new(&spec.name, &spec.dimensions).accepting_appended();
            let values = schema.align(&line.dimensions, |label| host_or_empty(label, host))?;
            declared(spec, None, &values)
        }
        _ => {
            let mut labels: Vec<(String, String)> = line
                .dimensions
                .iter()
                .map(|(name, value)| (prometheus_name(name).into_owned(), (*value).to_owned()))
                .collect();
            if let Some(host) =
                line.hostname.filter(|_| !labels.iter().any(|(name, _)| name == "Hostname"))
            {
                labels.push(("Hostname".to_owned(), host.to_owned()));
            }
            let unit = worker_lines::unit_name(line.unit).to_owned();
            let kind = if known.is_none() { Some(worker_lines::kind_of(line)?) } else { None };
            Definition { name: name.into_owned(), kind, unit, labels }
        }
    };
    let series = cache.resolve_for(model, &definition)?;
    let value = Conversion::between(line.unit, &series.spec().unit).apply(line.value);
    Ok(series.add_or_update_for(value, line.request_ids)?)
}

/// Returns the value of a label that a line does not have.
fn host_or_empty<'a>(label: &str, host: &'a str) -> Option<&'a str> {
    Some(if WorkerLabel::is_host(label) { host } else { "" })
}

/// Returns the definition for a sample of a defined metric, with label values in the order of its
/// dimensions.
fn declared(spec: &MetricSpec, kind: Option<Kind>, values: &[&str]) -> Definition {
    let labels = spec
        .dimensions
        .iter()
        .cloned()
        .zip(values.iter().map(|value| (*value).to_owned()))
        .collect();
    Definition { name: spec.name.clone(), kind, unit: spec.unit.clone(), labels }
}

/// Reads datagrams, and keeps the sets of the current interval.
#[derive(Debug, Default)]
pub struct Statsd {
    sets: Sets,
}

impl Statsd {
    /// Reads a datagram. Counts refused lines by source and passes each to `refused`. Each value of
    /// a line counts like a line.
    pub fn datagram<'a>(
        &mut self,
        cache: &Cache,
        datagram: &'a [u8],
        mut refused: impl FnMut(&'a [u8], Refusal),
    ) {
        if datagram.len() > statsd::MAX_DATAGRAM {
            count(cache, Builtin::LinesMalformed, Source::Statsd, 1);
            return refused(datagram, Malformed("the datagram is longer than 65536 bytes").into());
        }
        let mut samples = 0;
        let mut lines = 0;
        statsd::parse(datagram, |text, outcome| {
            let mut refused = |refusal, values| {
                lines += values;
                refused(text, refusal);
            };
            match outcome {
                Ok(line) => samples += self.line(cache, line, &mut refused),
                Err(fault) => refused(fault.into(), 1),
            }
        });
        count(cache, Builtin::Samples, Source::Statsd, samples);
        count(cache, Builtin::LinesMalformed, Source::Statsd, lines);
    }

    /// Returns whether sets wait for the end of the interval.
    pub fn has_sets(&self) -> bool {
        !self.sets.is_empty()
    }

    /// Ends the interval: sets the gauge of each set to the number of its members. Call it at equal
    /// intervals while [`Statsd::has_sets`] returns true.
    pub fn flush(&mut self, cache: &Cache) {
        for ((name, labels), count) in self.sets.flush() {
            // Fails if the definition has changed since the members arrived, and the number is
            // discarded.
            if let Ok(series) = find(cache, &name, &labels, Update::Set(0.0)) {
                let _ = series.add_or_update(count as f64);
            }
        }
    }

    /// Records the values of a line that are accepted. Returns their number, and passes each reason
    /// to `refused` with the number of values that it refuses.
    fn line(
        &mut self,
        cache: &Cache,
        line: statsd::Line,
        refused: &mut impl FnMut(Refusal, u64),
    ) -> u64 {
        let mut valid = Vec::with_capacity(line.updates.len());
        for update in &line.updates {
            match *update {
                Ok(update) => valid.push(update),
                Err(fault) => refused(fault.into(), 1),
            }
        }
        let Some(first) = valid.first() else { return 0 };
        let series = match find(cache, &line.name, &line.labels, *first) {
            Ok(series) => series,
            Err(error) => {
                refused(error.into(), valid.len() as u64);
                return 0;
            }
        };
        let mut accepted = 0;
        for update in valid {
            match self.update(&line, &series, update) {
                Ok(()) => accepted += 1,
                Err(refusal) => refused(refusal, 1),
            }
        }
        accepted
    }

    /// Records one value of a line.
    fn update(
        &mut self,
        line: &statsd::Line,
        series: &Series,
        update: Update,
    ) -> Result<(), Refusal> {
        match update {
            Update::Increment(value) | Update::Set(value) => series.add_or_update(value)?,
            Update::Change(delta) => series.add_or_update(series.value() + delta)?,
            Update::Observe { value, times, milliseconds } => {
                let value = if milliseconds { timed(series.spec(), value) } else { value };
                series.observe(value, times)?;
            }
            Update::Member(member) => {
                self.sets.insert((line.name.clone(), line.labels.clone()), member)?
            }
        }
        Ok(())
    }
}

/// Returns the series of a line, if the update is allowed for the metric's type.
fn find(
    cache: &Cache,
    name: &str,
    labels: &[(String, String)],
    update: Update,
) -> Result<Arc<Series>, SampleError> {
    // The types that the update is allowed for; a detected metric gets the first.
    let (kinds, unit): (&[Kind], &str) = match update {
        Update::Increment(_) => (&[Kind::Counter], "Count"),
        Update::Set(_) | Update::Change(_) => (&[Kind::Gauge], ""),
        Update::Member(_) => (&[Kind::Gauge], "Count"),
        Update::Observe { milliseconds, .. } => {
            let unit = if milliseconds { "Milliseconds" } else { "" };
            (&[Kind::Histogram, Kind::Summary, Kind::Gauge], unit)
        }
    };
    let wanted = kinds.first().copied();
    let Some((spec, _)) = cache.find(name) else {
        let name = name.to_owned();
        let unit = unit.to_owned();
        return cache.resolve(&Definition { name, kind: wanted, unit, labels: labels.to_vec() });
    };
    let kind = if kinds.contains(&spec.kind) { Some(spec.kind) } else { wanted };
    if spec.detected {
        let name = name.to_owned();
        let unit = spec.unit.clone();
        return cache.resolve(&Definition { name, kind, unit, labels: labels.to_vec() });
    }
    let schema = LabelSchema::new(&spec.name, &spec.dimensions);
    let values = schema.align(labels, |label| host_or_empty(label, cache.hostname()))?;
    cache.resolve(&declared(&spec, kind, &values))
}

/// Converts milliseconds to the unit of the metric, if that is one of time.
fn timed(spec: &MetricSpec, milliseconds: f64) -> f64 {
    Conversion::between("ms", &spec.unit).apply(milliseconds)
}

/// Adds to a counter by source, if it is defined.
fn count(cache: &Cache, builtin: Builtin, source: Source, by: u64) {
    if by > 0 {
        cache.count(builtin, &[source.as_str()], by as f64);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos_base::id::ModelVersion;

    use super::*;
    use crate::cache::Settings;
    use crate::catalog::{Catalog, MILLISECOND_BUCKETS};
    use crate::exposition::{self, Format};

    const OWN: &str = "
ts_metrics:
  counter:
    - {name: pharos_metric_samples_total, unit: Count, dimensions: [source]}
    - {name: pharos_metric_lines_malformed_total, unit: Count, dimensions: [source]}
    - {name: pharos_metric_samples_dropped_total, unit: Count, dimensions: [model, version]}
    - {name: pharos_requests_total, unit: Count, dimensions: [protocol, route, code]}
model_metrics:
  counter:
    - {name: Orders, unit: Count, dimensions: [shop, Hostname]}
  gauge:
    - {name: Level, unit: m, dimensions: [tank]}
    - {name: Off, unit: m, enabled: false}
  histogram:
    - {name: Size, unit: B, buckets: [1, 10]}
  summary:
    - {name: Spread, unit: B}
";

    fn cache(auto_detect: bool) -> Arc<Cache> {
        let settings = Settings { auto_detect, ..Settings::new("here") };
        Arc::new(Cache::new(Catalog::parse(OWN, "m.yaml").unwrap(), settings))
    }

    /// The samples of a metric as a scrape shows them.
    fn shown(cache: &Arc<Cache>, name: &str) -> Vec<String> {
        let text = exposition::render(cache, Format::Text);
        text.lines().filter(|line| line.starts_with(name)).map(str::to_owned).collect()
    }

    fn print(cache: &Cache, model: &ModelSeries, line: &str) -> Result<(), Refusal> {
        stdout_line(cache, model, format!("{line}\n").as_bytes())
    }

    fn send(cache: &Cache, statsd: &mut Statsd, datagram: &str) -> Vec<String> {
        let mut refusals = Vec::new();
        statsd
            .datagram(cache, datagram.as_bytes(), |_, refusal| refusals.push(refusal.to_string()));
        refusals
    }

    fn value(cache: &Cache, name: &str, labels: &[&str]) -> f64 {
        let (spec, _) = cache.find(name).unwrap();
        let values: Vec<(String, String)> = spec
            .dimensions
            .iter()
            .cloned()
            .zip(labels.iter().map(|label| (*label).to_owned()))
            .collect();
        let definition =
            Definition { name: name.to_owned(), kind: None, unit: String::new(), labels: values };
        cache.resolve(&definition).unwrap().value()
    }

    #[test]
    fn every_emitter_reaches_the_same_series() {
        let cache = cache(false);
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        print(
            &cache,
            &model,
            "Orders.whatever:2|#Level:Model,shop:a|#type:GAUGE|#hostname:here,1,id",
        )
        .unwrap();
        print(&cache, &model, "Orders.Count:3|#shop:a").unwrap();
        let refused = send(
            &cache,
            &mut Statsd::default(),
            "Orders:1|c|@0.25|#shop:a\nOrders:1:1|c|#shop:a,Hostname:here",
        );
        assert!(refused.is_empty(), "{refused:?}");
        let ring = Definition {
            name: "Orders".to_owned(),
            kind: Some(Kind::Counter),
            unit: "Count".to_owned(),
            labels: vec![("shop".to_owned(), "a".to_owned())],
        };
        cache.resolve(&ring).unwrap().add_or_update(10.0).unwrap();
        assert_eq!(shown(&cache, "Orders"), ["Orders{shop=\"a\",Hostname=\"here\"} 21"]);
        assert_eq!(cache.counter(Builtin::Samples.name(), &["stdout"]).unwrap().value(), 2.0);
        assert_eq!(cache.counter(Builtin::Samples.name(), &["statsd"]).unwrap().value(), 3.0);
    }

    #[test]
    fn gauges_distributions_and_sets() {
        let cache = cache(false);
        let mut statsd = Statsd::default();
        let lines = "Level:5|g|#tank:x\nLevel:+2:-3.5|g|#tank:x\nSize:0.5|h\nSize:5|ms|@0.1\n\
                     Spread:7|d|@0.5\nLevel:9|ms|#tank:y\n";
        assert!(send(&cache, &mut statsd, lines).is_empty());
        assert_eq!((value(&cache, "Level", &["x"]), value(&cache, "Level", &["y"])), (3.5, 9.0));
        let expected = [
            "Size_bucket{le=\"1\"} 1",
            "Size_bucket{le=\"10\"} 11",
            "Size_bucket{le=\"+Inf\"} 11",
            "Size_sum 50.5",
            "Size_count 11",
        ];
        assert_eq!(shown(&cache, "Size"), expected);
        assert_eq!(value(&cache, "Spread", &[]), 2.0);
        assert!(!statsd.has_sets());
        assert!(
            send(
                &cache,
                &mut statsd,
                "Level:ann|s|#tank:z\nLevel:bob|s|#tank:z\nLevel:ann|s|#tank:z"
            )
            .is_empty()
        );
        assert_eq!(value(&cache, "Level", &["z"]), 0.0);
        for expected in [2.0, 0.0] {
            assert!(statsd.has_sets());
            statsd.flush(&cache);
            assert_eq!(value(&cache, "Level", &["z"]), expected);
        }
        assert!(!statsd.has_sets());
    }

    #[test]
    fn timers_have_the_unit_of_their_metric() {
        let text = "
model_metrics:
  gauge:
    - {name: Last, unit: s}
  histogram:
    - {name: Wait, unit: Seconds, buckets: [0.1, 1]}
    - {name: WaitUs, unit: us, buckets: [100]}
    - {name: WaitMs, unit: ms, buckets: [100]}
    - {name: Size, unit: Bytes, buckets: [100]}
  summary:
    - {name: Times, unit: s, quantiles: [0.5]}
";
        let cache =
            Arc::new(Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("here")));
        let lines = "Wait:320:30|ms\nWait:0.5|h\nWaitUs:0.25|ms\nWaitMs:7|ms\nSize:9|ms\nTimes:\
                     320|ms\nLast:1500|ms";
        let refused = send(&cache, &mut Statsd::default(), lines);
        assert!(refused.is_empty(), "{refused:?}");
        // A histogram or distribution of StatsD has no unit: its values are in the metric's unit.
        assert_eq!(
            shown(&cache, "Wait_"),
            [
                "Wait_bucket{le=\"0.1\"} 1",
                "Wait_bucket{le=\"1\"} 3",
                "Wait_bucket{le=\"+Inf\"} 3",
                "Wait_sum 0.85",
                "Wait_count 3"
            ]
        );
        let sums = ["WaitUs_sum", "WaitMs_sum", "Size_sum", "Times_sum", "Last"];
        let found: Vec<String> = sums.iter().flat_map(|name| shown(&cache, name)).collect();
        assert_eq!(
            found,
            ["WaitUs_sum 250", "WaitMs_sum 7", "Size_sum 9", "Times_sum 0.32", "Last 1.5"]
        );
    }

    #[test]
    fn lines_that_do_not_fit_are_refused_and_counted() {
        let cache = cache(false);
        let mut statsd = Statsd::default();
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        for (line, expected) in [
            ("Orders:1|g|#shop:a", "`Orders` is a counter, not a gauge"),
            ("Level:1|c|#tank:a", "`Level` is a gauge, not a counter"),
            ("Orders:1|ms|#shop:a", "`Orders` is a counter, not a histogram"),
            ("Size:a|s", "`Size` is a histogram, not a gauge"),
            ("Orders:-1|c|#shop:a", "invalid increment -1"),
            (
                "Orders:1|c|#shop:a,extra:b",
                "`Orders` has no dimension `extra`, only [shop, Hostname]",
            ),
            ("Orders:1|c|#Level:b", "no dimension `Level`"),
            ("Level:nan|g|#tank:a", "not a finite number"),
            ("Unknown:1|c|#shop:a", "`Unknown` is not defined in metrics.yaml"),
            ("pharos_requests_total:1|c", "recorded by the server itself"),
            ("Orders", "name:value|type"),
        ] {
            let refusals = send(&cache, &mut statsd, line);
            assert!(
                matches!(refusals.as_slice(), [text] if text.contains(expected)),
                "{line}: {refusals:?}"
            );
        }
        assert_eq!(
            cache.counter(Builtin::LinesMalformed.name(), &["statsd"]).unwrap().value(),
            11.0
        );

        for (line, expected) in [
            ("Orders.Count:1|#a:1,b:2,c:3", "`Orders` has no dimension `a`, only [shop, Hostname]"),
            ("Orders.Count:1|#store:a", "`Orders` has no dimension `store`"),
            ("Orders.Count:1|#shop:a,tier:b", "`Orders` has no dimension `tier`"),
            ("Orders.Count:1|#shop:a,shop:b", "two values for the dimension `shop`"),
            ("Orders.Count:-1|#shop:a", "invalid increment -1"),
            ("Unknown.ms:1|#", "`Unknown` is not defined in metrics.yaml"),
            ("pharos_requests_total.Count:1|#", "recorded by the server itself"),
            ("Orders.Count:nan|#", "invalid increment NaN"),
            ("Size.B:nan|#", "invalid observation NaN"),
            ("Orders.Count:many|#", "not a number"),
        ] {
            let refusal = print(&cache, &model, line).unwrap_err().to_string();
            assert!(refusal.contains(expected), "{line}: {refusal}");
        }
        assert_eq!(
            cache.counter(Builtin::LinesMalformed.name(), &["stdout"]).unwrap().value(),
            1.0
        );
        assert_eq!(
            shown(&cache, "pharos_metric_samples_dropped_total{model=\"m\""),
            ["pharos_metric_samples_dropped_total{model=\"m\",version=\"1\"} 9"]
        );
        print(&cache, &model, "Level.m:nan|#tank:a").unwrap();
        assert!(value(&cache, "Level", &["a"]).is_nan(), "as in Prometheus");
    }

    /// A line with several values is equal to as many lines with one value each.
    #[test]
    fn each_value_of_a_line_counts_alone() {
        let cache = cache(false);
        let mut statsd = Statsd::default();
        let counted =
            |builtin: Builtin| cache.counter(builtin.name(), &["statsd"]).unwrap().value();
        let mut samples = 0.0;
        let mut malformed = 0.0;
        for (line, accepted, expected) in [
            ("Orders:1:-1:5|c|#shop:a", 2.0, &["invalid increment -1"][..]),
            (
                "Orders:x:1:nan:-2:2|m|#shop:a",
                2.0,
                &["not a number", "not a finite number", "invalid increment -2"],
            ),
            ("Orders:1|c:-1|c:z|c:1|c", 2.0, &["invalid increment -1", "not a number"]),
            ("Level:3:x:+2|g|#tank:x", 2.0, &["not a number"]),
            ("Size:0.5:x:5|ms", 2.0, &["not a number"]),
            ("Spread:::7|d", 1.0, &["not a number", "not a number"]),
            ("Spread:x|h", 0.0, &["not a number"]),
        ] {
            let refusals = send(&cache, &mut statsd, line);
            assert_eq!(refusals.len(), expected.len(), "{line}: {refusals:?}");
            assert!(
                refusals.iter().zip(expected).all(|(text, part)| text.contains(part)),
                "{line}: {refusals:?}"
            );
            samples += accepted;
            malformed += expected.len() as f64;
            assert_eq!(
                (counted(Builtin::Samples), counted(Builtin::LinesMalformed)),
                (samples, malformed),
                "{line}"
            );
        }
        assert_eq!(
            (value(&cache, "Orders", &["a", "here"]), value(&cache, "Orders", &["", "here"])),
            (9.0, 2.0)
        );
        assert_eq!((value(&cache, "Level", &["x"]), value(&cache, "Spread", &[])), (5.0, 1.0));
        assert!(shown(&cache, "Size").contains(&"Size_sum 5.5".to_owned()));
        // One reason for all of a line.
        let refusals = send(&cache, &mut statsd, "Level:1:2:3|c|#tank:x");
        assert_eq!(refusals, ["metric `Level` is a gauge, not a counter"]);
        assert_eq!(
            (counted(Builtin::Samples), counted(Builtin::LinesMalformed)),
            (samples, malformed + 3.0)
        );
    }

    #[test]
    fn undeclared_metrics_are_detected() {
        let cache = cache(true);
        let mut statsd = Statsd::default();
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let line = "bad-name.ms:3|#dash-label:x,Level:Model|#type:HISTOGRAM|#hostname:there,1,id";
        print(&cache, &model, line).unwrap();
        let (spec, _) = cache.find("bad_name").unwrap();
        assert_eq!((spec.kind, spec.unit.as_str()), (Kind::Histogram, "Milliseconds"));
        assert_eq!(spec.dimensions, ["dash_label", "Level", "Hostname"]);
        assert_eq!(spec.buckets, MILLISECOND_BUCKETS);
        print(&cache, &model, "Calls.Count:1|#a:b").unwrap();
        assert_eq!(cache.find("Calls").unwrap().0.kind, Kind::Counter);

        let lines = "web.hits:1|c|#b:2,a:1\nweb.temp:3|g\nweb.time:3|ms\nweb.users:ann|s";
        assert!(send(&cache, &mut statsd, lines).is_empty());
        let found = |name: &str| {
            let (spec, _) = cache.find(name).unwrap();
            (spec.kind, spec.unit.clone(), spec.dimensions.clone())
        };
        assert_eq!(
            found("web_hits"),
            (Kind::Counter, "Count".into(), vec!["a".into(), "b".into()])
        );
        assert_eq!(found("web_temp"), (Kind::Gauge, "unit".into(), vec![]));
        assert_eq!(found("web_time"), (Kind::Histogram, "Milliseconds".into(), vec![]));
        assert_eq!(cache.find("web_time").unwrap().0.buckets, MILLISECOND_BUCKETS);
        assert_eq!(found("web_users"), (Kind::Gauge, "Count".into(), vec![]));
        // A series has the labels of its samples.
        assert!(send(&cache, &mut statsd, "web.hits:1|c|#c:2\nweb.hits:1|c|#a:1").is_empty());
        let hits = ["web_hits{a=\"1\",b=\"2\"} 1", "web_hits{a=\"1\"} 1", "web_hits{c=\"2\"} 1"];
        let mut found = shown(&cache, "web_hits{");
        found.sort_unstable();
        assert_eq!(found, hits);
        print(&cache, &model, "Calls.Count:1|#d:e").unwrap();
        assert_eq!(shown(&cache, "Calls{"), ["Calls{d=\"e\"} 1", "Calls{a=\"b\"} 1"]);
        print(&cache, &model, "bad-name.s:2|#Level:Model|#hostname:there,1,id").unwrap();
        assert!(
            shown(&cache, "bad_name_sum")
                .contains(&"bad_name_sum{Level=\"Model\",Hostname=\"there\"} 2000".to_owned())
        );
        for bad in ["x:1|h|#le:1", "x:1|c|#__a:1", "Off:1|g"] {
            assert!(!send(&cache, &mut statsd, bad).is_empty(), "{bad}");
        }
        assert!(print(&cache, &model, "x.ms:1|#a:1,a:2").is_err());
    }

    #[test]
    fn metrics_that_are_off_are_ignored() {
        for auto_detect in [true, false] {
            let cache = cache(auto_detect);
            let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
            for line in
                ["PredictionTime.ms:2|#ModelName:m,Level:Model", "HandlerTime.ms:2|#", "Off.m:1|#"]
            {
                print(&cache, &model, line).unwrap();
            }
            assert!(
                ["PredictionTime", "HandlerTime", "Off"]
                    .iter()
                    .all(|name| cache.find(name).is_none())
            );
            assert_eq!(model.cells.counts.samples_dropped.get(), 0);
        }
    }

    /// As for a unit in the file. The unit of a sample of a defined metric does not matter.
    #[test]
    fn the_unit_of_an_undeclared_metric_is_limited() {
        for auto_detect in [true, false] {
            let cache = cache(auto_detect);
            let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
            let long = "u".repeat(65);
            let refusal =
                print(&cache, &model, &format!("New.{long}:1|#")).unwrap_err().to_string();
            assert_eq!(refusal, "the unit of metric `New` has 65 bytes; the limit is 64");
            assert!(cache.find("New").is_none());
            print(&cache, &model, &format!("Orders.{long}:1|#shop:a")).unwrap();
            assert_eq!(
                print(&cache, &model, &format!("New.{}:1|#", "u".repeat(64))).is_ok(),
                auto_detect
            );
        }
    }

    #[test]
    fn lines_that_are_cut_off_or_too_long_are_refused_whole() {
        let cache = cache(false);
        let mut statsd = Statsd::default();
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        assert!(stdout_line(&cache, &model, b"Orders.Count:12|#shop:a").is_err());
        let long = "Orders:1|c|#shop:a\n".repeat(statsd::MAX_DATAGRAM / 19 + 1);
        assert!(send(&cache, &mut statsd, &long)[0].contains("65536"));
        assert!(shown(&cache, "Orders{").is_empty());
        for source in [Source::Stdout, Source::Statsd].map(Source::as_str) {
            assert_eq!(
                cache.counter(Builtin::LinesMalformed.name(), &[source]).unwrap().value(),
                1.0
            );
        }
    }

    #[test]
    fn series_of_printed_lines_are_removed_with_the_model() {
        let cache = cache(false);
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        print(&cache, &model, "Orders.Count:1|#shop:a").unwrap();
        assert_eq!(shown(&cache, "Orders{").len(), 1);
        cache.model_unloaded(&model);
        assert!(shown(&cache, "Orders{").is_empty());
    }

    /// The pipe of an ended worker may still have lines, and a process that it has started may
    /// still print some.
    #[test]
    fn late_lines_of_an_unloaded_model_create_no_series() {
        let cache = cache(true);
        let model = ModelVersion::new("m", 1);
        let other = ModelVersion::new("n", 1);
        let model = cache.model_loaded(&model, &[]);
        let other = cache.model_loaded(&other, &[]);
        print(&cache, &other, "Orders.Count:1|#shop:shared").unwrap();
        cache.model_unloaded(&model);
        for line in ["Orders.Count:1|#shop:late", "New.Count:1|#a:b"] {
            let refusal = print(&cache, &model, line).unwrap_err().to_string();
            assert!(
                refusal.contains("the model was unloaded before the sample arrived"),
                "{refusal}"
            );
        }
        print(&cache, &model, "Orders.Count:2|#shop:shared").unwrap();
        assert_eq!(shown(&cache, "Orders{"), ["Orders{shop=\"shared\",Hostname=\"here\"} 3"]);
        assert!(shown(&cache, "New").is_empty());
        cache.model_unloaded(&other);
        assert!(shown(&cache, "Orders{").is_empty(), "the late sample has added no owner");
    }
}
