//! Invariants that must hold for any bytes from outside the process: one function per fuzz target. An ordinary test runs the
//! functions on the corpora and past findings (`frontend/http/tests/corpus.rs`).

use std::fmt::Debug;
use std::path::{Component, Path};
use std::sync::Arc;

use pharos::id::ModelVersion;
use pharos::metrics::cache::{Cache, Settings};
use pharos::metrics::catalog::{Catalog, Difference, Mode, Overrides, Setting, listing};
use pharos::metrics::channel;
use pharos::metrics::emitter::prometheus_name;
use pharos::metrics::exposition::{self, Format};
use pharos::metrics::intake::{self, Statsd};
use pharos::metrics::statsd::{self, Update};
use pharos::model::{Completion, Draft};
use pharos::repository::{Override, Stamp, VersionFingerprint};
use pharos::shm::SharedMemory;
use pharos::trace::read::{Traces, read};
use pharos::trace::{chrome, summary};
use pharos::wire::{PREFIX, decode_to_frontend, decode_to_worker};

/// Returns the check of a target by its name.
pub(crate) fn of(target: &str) -> Option<fn(&[u8])> {
    Some(match target {
        "http" => http,
        "regions" => regions,
        "wire" => wire,
        "ring" => ring,
        "config" => config,
        "statsd" => statsd,
        "legacy" => legacy,
        "metrics" => metrics,
        "repository" => repository,
        "trace" => trace,
        _ => return None,
    })
}

/// HTTP bodies: decoding never panics for any length in the header, and a decoded request can be encoded.
pub(crate) fn http(data: &[u8]) {
    pharos_http::fuzzing::request(data);
}

/// HTTP load requests with files and a configuration: files of any name stay in the model's directory, and any configuration is
/// either parsed or refused.
pub(crate) fn repository(data: &[u8]) {
    let Ok(Some(given)) = Override::new(pharos_http::fuzzing::load(data)) else { return };
    let inside = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
    for path in given.files.keys() {
        assert!(!path.as_os_str().is_empty() && inside(path), "{}", path.display());
    }
    if let Ok(draft) = Draft::from_json(&given.config) {
        let completion = Completion { directory: "m", auto_complete: true, ..Completion::default() };
        if let Ok(config) = draft.complete(&completion) {
            let made = VersionFingerprint::new(&config, Stamp::default());
            assert_eq!(made, VersionFingerprint::new(&config, Stamp::default()));
        }
    }
}

/// Names, keys and ranges of shared memory, and the wire messages about them.
pub(crate) fn regions(data: &[u8]) {
    pharos::fuzzing::shared_memory(data);
    if let Ok(regions) = pharos::wire::regions::decode(data) {
        let again = pharos::wire::regions::decode(&pharos::wire::regions::encode(&regions));
        assert_eq!(again, Ok(regions));
    }
}

/// Frames between frontend and worker: decoding never panics, and a decoded frame survives encoding and decoding.
pub(crate) fn wire(data: &[u8]) {
    // Compared as text, because a NaN among the parameters is not equal to itself.
    fn same<T: Debug, E: Debug>(frame: T, bytes: &[u8], decode: fn(&[u8]) -> Result<T, E>) {
        let again = decode(&bytes[PREFIX..]).expect("an encoded frame must decode");
        assert_eq!(format!("{again:?}"), format!("{frame:?}"));
    }
    let mut bytes = Vec::new();
    if let Ok(frame) = decode_to_frontend(data) {
        frame.encode(&mut bytes);
        same(frame, &bytes, decode_to_frontend);
    }
    bytes.clear();
    if let Ok(frame) = decode_to_worker(data) {
        frame.encode(&mut bytes);
        same(frame, &bytes, decode_to_worker);
    }
}

/// The metrics ring with a hostile producer: the reader neither panics nor loops for any contents of the producer's memory.
pub(crate) fn ring(data: &[u8]) {
    /// The offsets of the producer's words: its head and the records.
    const HEAD: usize = 8 * 8;
    const RECORDS: usize = 32 * 8;
    let (descriptor, mut reader) = channel::create(16 << 10).expect("the ring can be created");
    let length = std::fs::File::from(descriptor.try_clone().expect("a descriptor")).metadata().expect("a length").len();
    let length = usize::try_from(length).expect("a length");
    let memory = SharedMemory::map(&descriptor, length).expect("the ring can be mapped");
    // The first two bytes are the number of words that the producer claims to have written.
    let Some((claim, records)) = data.split_first_chunk::<2>() else { return };
    assert!(memory.copy_in(RECORDS, &records[..records.len().min(length - RECORDS)]));
    assert!(memory.copy_in(HEAD, &u64::from(u16::from_le_bytes(*claim)).to_ne_bytes()));
    for _ in 0..3 {
        let mut events = 0_usize;
        let _ = reader.drain(|_| events += 1);
        assert!(events <= length / 8, "more events than words");
        let _ = reader.dropped();
    }
}

/// config.pbtxt: parsing never panics, a parsed draft survives encoding and decoding, and a completed one can be rendered.
pub(crate) fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(draft) = Draft::from_text(text, "config.pbtxt") else { return };
    assert!(Draft::decode(&draft.encode()).is_ok());
    let completion = Completion { directory: "m", auto_complete: true, ..Completion::default() };
    if let Ok(config) = draft.complete(&completion) {
        assert!(config.to_json().starts_with('{'));
    }
}

/// Returns a cache with one metric of each type that also accepts a few undeclared metrics.
fn small_cache() -> Arc<Cache> {
    let text = "model_metrics:\n  counter: [{name: Hits, unit: Count, dimensions: [page]}]\n  gauge: [{name: Level, unit: m}]\n  \
                histogram: [{name: Size, unit: B}]\n  summary: [{name: Spread, unit: B}]\n";
    let settings = Settings { auto_detect: true, max_series: 4, ..Settings::new("host") };
    Arc::new(Cache::new(Catalog::parse(text, "metrics.yaml").expect("a valid definition"), settings))
}

/// Checks that each line of the exposition has a valid name and a value.
fn scraped_well(cache: &Arc<Cache>) {
    for line in exposition::render(cache, Format::Text).lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').expect("a series and its value");
        let name = series.split('{').next().expect("a name");
        assert_eq!(prometheus_name(name), name, "{line}");
        assert!(value == "+Inf" || value == "-Inf" || value == "NaN" || value.parse::<f64>().is_ok(), "{line}");
    }
}

/// StatsD datagrams: parsing never panics, returns only valid values, and leaves the cache in a state that can be rendered.
pub(crate) fn statsd(data: &[u8]) {
    let mut lines = 0_usize;
    statsd::parse(data, |text, outcome| {
        lines += 1;
        assert!(!text.is_empty() && !text.contains(&b'\n'));
        let Ok(line) = outcome else { return };
        assert_eq!(prometheus_name(&line.name), line.name);
        assert!(!line.updates.is_empty() && line.labels.windows(2).all(|pair| pair[0].0 < pair[1].0));
        for update in line.updates.into_iter().flatten() {
            match update {
                Update::Set(value) | Update::Change(value) => assert!(value.is_finite()),
                Update::Observe { value, times, .. } => assert!(value.is_finite() && (1..=1000).contains(&times)),
                // A sampling rate near 0 may make the increment infinite; the cache refuses it.
                Update::Increment(value) => assert!(!value.is_nan()),
                Update::Member(_) => {}
            }
        }
    });
    assert!(lines <= data.len());
    let (cache, mut statsd) = (small_cache(), Statsd::default());
    statsd.datagram(&cache, data, |_, refusal| assert!(!refusal.to_string().is_empty()));
    statsd.flush(&cache);
    scraped_well(&cache);
}

/// Lines that a worker prints after the marker: parsing never panics and leaves the cache in a state that can be rendered.
pub(crate) fn legacy(data: &[u8]) {
    let cache = small_cache();
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    for line in data.split_inclusive(|&byte| byte == b'\n') {
        if let Err(refusal) = intake::stdout_line(&cache, &model, line) {
            assert!(!refusal.to_string().is_empty());
        }
        let _ = intake::stdout_line(&cache, &model, &[line, b"\n"].concat());
    }
    scraped_well(&cache);
}

/// Trace files: reading never panics, the traces can be summarised and rendered, and a truncated file yields no more traces than
/// the whole one.
pub(crate) fn trace(data: &[u8]) {
    let Ok(found) = read(data) else { return };
    let models = summary::summarize(found.traces.iter());
    assert!(models.iter().map(|model| model.traces).sum::<usize>() <= found.traces.len());
    assert!(summary::table(&models).lines().count() >= 2 * models.len());
    assert!(summary::json(&models).starts_with('{') && chrome::render(found.traces.iter()).ends_with("]}\n"));
    let stamps = |traces: &Traces| traces.traces.iter().map(|trace| trace.stamps.len()).sum::<usize>();
    if let Ok(cut) = read(&data[..data.len() / 2]) {
        assert!(found.broken > 0 || stamps(&cut) <= stamps(&found));
    }
}

/// metrics.yaml: parsing never panics and terminates quickly; a catalog can be listed, modified, compared, served, and loaded in
/// place of another one.
pub(crate) fn metrics(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let catalog = match Catalog::parse(text, "metrics.yaml") {
        Ok(catalog) => catalog,
        Err(error) => return assert!(error.line > 0 && error.column > 0 && !error.message.is_empty(), "{error}"),
    };
    for (id, spec) in catalog.iter() {
        assert_eq!(catalog.find(&spec.name).map(|(found, _)| found), Some(id));
        assert!(!spec.unit.is_empty() && spec.buckets.is_sorted() && spec.quantiles.is_sorted());
    }
    for form in listing::Form::NAMES.into_iter().filter_map(listing::Form::from_name) {
        assert!(listing::list(&catalog, form).lines().count() >= catalog.len().min(1));
    }
    let settings = vec![Setting::CounterLatencies(false), Setting::SummaryLatencies(true)];
    let switched = Overrides { settings, mode: Some(Mode::Legacy) }.apply(catalog.clone());
    assert_eq!(Difference::between(&catalog, &catalog), Difference::default());
    let cache = Arc::new(Cache::new(catalog, Settings::new("host")));
    cache.reload(switched);
    for format in [Format::Text, Format::OpenMetrics] {
        let _ = exposition::render(&cache, format);
    }
}
