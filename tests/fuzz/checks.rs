//! Invariants that must hold for any bytes from outside the process: one function per fuzz target.
//! An ordinary test runs the functions on the corpora and past findings
//! (`frontend/tests/corpus.rs`).

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use pharos::cache::{Entry, Identifier};
use pharos::id::ModelVersion;
use pharos::infer::InferRequest;
use pharos::metrics::cache::{Cache, Settings};
use pharos::metrics::catalog::{Catalog, Difference, Mode, Overrides, Setting, listing};
use pharos::metrics::channel;
use pharos::metrics::exposition::{self, Format};
use pharos::metrics::intake::{self, Statsd};
use pharos::metrics::statsd::{self, Update};
use pharos::metrics::text_lines::prometheus_name;
use pharos::model::text_files::{TextFiles, TextModel};
use pharos::model::{Completion, Draft};
use pharos::repository::{Override, Stamp, VersionFingerprint};
use pharos::shm::SharedMemory;
use pharos::trace::read::{Traces, read};
use pharos::trace::{chrome, summary};
use pharos::wire::{PREFIX, decode_to_frontend, decode_to_worker};
use pharos_openai::classes::ClassifyRequest;
use pharos_openai::embeddings::EmbeddingRequest;
use pharos_openai::reasoning::{ReasoningDelta, ReasoningParser};
use pharos_openai::scores::{RerankRequest, ScoreRequest};
use pharos_openai::stop::{Stop, StopScanner};
use pharos_openai::tei;
use pharos_openai::template::{CHATML, ChatTemplate, CivilTime, TemplateSource};
use pharos_openai::tokenize::{DetokenizeRequest, TokenizeRequest};
use pharos_openai::tools::{ToolDelta, ToolParser};
use pharos_openai::{ChatRequest, CompletionRequest, ResponsesRequest};

/// A check of any bytes. Panics if they break an invariant.
pub(crate) type Check = fn(&[u8]);

/// The check of each target.
pub(crate) const CHECKS: &[(&str, Check)] = &[
    ("archive", archive),
    ("cached", cached),
    ("config", config),
    ("grpc", grpc),
    ("http", http),
    ("legacy", legacy),
    ("metrics", metrics),
    ("model_output", model_output),
    ("openai", openai),
    ("regions", regions),
    ("repository", repository),
    ("ring", ring),
    ("statsd", statsd),
    ("torchserve", torchserve),
    ("trace", trace),
    ("triton", triton),
    ("wire", wire),
];

/// Calls of Triton's interface for backends: each gives a result or an error.
pub(crate) fn triton(data: &[u8]) {
    pharos_triton::fuzzing::calls(data);
}

/// HTTP bodies: decoding never panics for any length in the header, and a decoded request can be
/// encoded.
pub(crate) fn http(data: &[u8]) {
    pharos_http::fuzzing::request(data);
}

/// Bodies of OpenAI's API: nothing panics, a chat can be rendered, and the event of an error is one
/// event.
pub(crate) fn openai(data: &[u8]) {
    let chat = ChatRequest::parse(data);
    if let Ok(chat) = &chat {
        let _ = (chat.forced_call_schema(), chat.media().count());
        for template in &*TEMPLATES {
            let expectations = template.expectations();
            if let Ok(input) = expectations.input(chat, CivilTime::from_unix(0))
                && let Ok(prompt) = template.render(&input)
            {
                let _ = expectations.prompt(chat, prompt);
            }
        }
    }
    let errors = [
        chat.err(),
        CompletionRequest::parse(data).err(),
        ResponsesRequest::parse(data).err(),
        EmbeddingRequest::parse(data).err(),
        RerankRequest::parse(data).err(),
        ScoreRequest::parse(data).err(),
        TokenizeRequest::parse(data).err(),
        DetokenizeRequest::parse(data).err(),
        ClassifyRequest::parse(data).err(),
        tei::EmbedRequest::parse(data).err(),
        tei::RerankRequest::parse(data).err(),
        tei::PredictRequest::parse(data).err(),
        tei::SimilarityRequest::parse(data).err(),
        tei::TokenizeRequest::parse(data).err(),
        tei::DecodeRequest::parse(data).err(),
    ];
    for error in errors.into_iter().flatten() {
        assert!((400..500).contains(&error.status), "{error:?}");
        let event = error.to_event();
        let lines = event.iter().filter(|byte| matches!(byte, b'\n' | b'\r')).count();
        assert!(event.ends_with(b"\n\n") && lines == 2, "{}", event.escape_ascii());
    }
}

/// Chat templates that read contents as texts and as parts.
static TEMPLATES: LazyLock<[ChatTemplate; 2]> = LazyLock::new(|| {
    let parts = "{% for message in messages %}{% for part in message.content %}\
                 {{ part.text or part.type }}{% endfor %}{{ tools | tojson }}{% endfor %}";
    [CHATML, parts].map(|text| {
        let source = TemplateSource::Single(text.to_owned());
        ChatTemplate::new(source, BTreeMap::new(), None).expect("a template")
    })
});

/// What models write: the parsers of tool calls, of reasoning and of stop strings give the same for
/// a text as a whole and in pieces. The first byte is the length of the pieces, in characters.
pub(crate) fn model_output(data: &[u8]) {
    let Some((length, text)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(text).into_owned();
    let characters: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = characters
        .chunks(usize::from(*length).max(1))
        .map(|piece| piece.iter().collect())
        .collect();
    let whole = [text];
    for name in ["hermes", "llama3_json", "mistral", "pythonic", "json"] {
        assert_eq!(tool_calls(name, &whole), tool_calls(name, &pieces), "{name}");
    }
    for name in ["deepseek_r1", "qwen3"] {
        assert_eq!(reasoning(name, &whole), reasoning(name, &pieces), "{name}");
    }
    for include in [false, true] {
        assert_eq!(until_stop(include, &whole), until_stop(include, &pieces), "{include}");
    }
}

/// Returns the texts and calls in what a model writes, in a short form.
fn tool_calls(name: &str, pieces: &[String]) -> String {
    let mut parser = ToolParser::named(name).expect("the name of a parser");
    let mut deltas = Vec::new();
    let is_short = pieces.iter().all(|piece| parser.push(piece, &mut deltas).is_ok());
    if is_short {
        parser.finish(&mut deltas);
    }
    let mut found = String::new();
    let mut calls = 0;
    for delta in deltas {
        match delta {
            ToolDelta::Text(text) => found.push_str(&text),
            ToolDelta::Begin { index, name } => {
                assert_eq!(index, calls, "calls are counted");
                calls += 1;
                found.push_str(&format!("\u{1}{name}\u{2}"));
            }
            ToolDelta::Arguments { index, text } => {
                assert_eq!(index + 1, calls, "arguments belong to the last call");
                found.push_str(&text);
            }
            ToolDelta::End { index } => {
                assert_eq!(index + 1, calls, "the last call ends");
                found.push('\u{3}');
            }
        }
    }
    found
}

/// Returns the reasoning and the answer in what a model writes.
fn reasoning(name: &str, pieces: &[String]) -> (String, String) {
    let mut parser = ReasoningParser::named(name).expect("the name of a parser");
    let mut deltas = Vec::new();
    pieces.iter().for_each(|piece| parser.push(piece, &mut deltas));
    parser.finish(&mut deltas);
    let mut found = (String::new(), String::new());
    for delta in deltas {
        match delta {
            ReasoningDelta::Reasoning(text) => found.0.push_str(&text),
            ReasoningDelta::Content(text) => found.1.push_str(&text),
        }
    }
    found
}

/// Returns the text up to a stop string, and which one it was.
fn until_stop(include: bool, pieces: &[String]) -> (String, Option<usize>) {
    let stops = ["ab", "aab", "</s>", "é"].map(str::to_owned);
    let mut scanner = StopScanner::new(&stops, include);
    let mut found = String::new();
    for piece in pieces {
        match scanner.push(piece) {
            Stop::Text(text) => found.push_str(&text),
            Stop::Stopped { text, which } => return (found + &text, Some(which)),
        }
    }
    (found + &scanner.finish(), None)
}

/// Messages of gRPC inference requests, in pieces and with typed contents.
pub(crate) fn grpc(data: &[u8]) {
    pharos_grpc::fuzzing::request(data);
}

/// Archives of models and environments: nothing is written outside of the target directory, nor
/// more than the limits allow.
pub(crate) fn archive(data: &[u8]) {
    const LIMITS: (u64, u64) = (1 << 20, 64);
    let folder = tempfile::tempdir().expect("a temporary directory");
    // Two directories above, for the paths of an archive that lead out of its target by more than
    // one.
    let inner = folder.path().join("above/inner");
    fs::create_dir_all(&inner).expect("directories");
    let [file, model, environment] =
        ["archive", "model", "environment"].map(|name| inner.join(name));
    fs::write(&file, data).expect("a file");
    fs::create_dir(&model).expect("a directory");
    let _ = pharos_torchserve::fuzzing::unpack_model(&file, &model, LIMITS.0, LIMITS.1);
    let _ = pharos_engine::fuzzing::unpack_environment(&file, &environment, LIMITS.0, LIMITS.1);
    assert_eq!(fs::read(&file).expect("the archive"), data);
    let outside = outside(folder.path(), &inner, &[&file, &model, &environment]);
    assert!(outside.is_empty(), "{outside:?} are outside of the target");
    for target in [model, environment] {
        let (bytes, files) = contents(&target);
        // The parents of a file are not counted; the last file may have one byte too many.
        assert!(
            bytes <= LIMITS.0 + 1 && files <= 64 * LIMITS.1,
            "{bytes} bytes, {files} files in {}",
            target.display()
        );
    }
}

/// Returns what is in a directory and the directories down to `inner`, except `known`, which is in
/// the latter.
pub(crate) fn outside(top: &Path, inner: &Path, known: &[&PathBuf]) -> Vec<PathBuf> {
    let entries = |directory: &Path| {
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
    };
    let mut found: Vec<PathBuf> = entries(inner).filter(|path| !known.contains(&path)).collect();
    let mut below = inner;
    while let Some(above) = below.parent().filter(|_| below != top) {
        found.extend(entries(above).filter(|path| path != below));
        below = above;
    }
    found
}

/// Returns the number of bytes and of entries in a directory, without those of links.
fn contents(directory: &Path) -> (u64, u64) {
    let (mut bytes, mut entries) = (0, 0);
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(metadata) = fs::symlink_metadata(entry.path()) else { continue };
        entries += 1;
        if metadata.is_dir() {
            let inside = contents(&entry.path());
            bytes += inside.0;
            entries += inside.1;
        } else if metadata.is_file() {
            bytes += metadata.len();
        }
    }
    (bytes, entries)
}

/// TorchServe's config.properties, model-config.yaml and forms. A form is its content type, a line
/// break and its body.
pub(crate) fn torchserve(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        pharos_torchserve::fuzzing::texts(text);
    }
    let Some(end) = data.iter().position(|&byte| byte == b'\n') else { return };
    let (content_type, body) =
        (String::from_utf8_lossy(&data[..end]), Bytes::copy_from_slice(&data[end + 1..]));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(pharos_torchserve::fuzzing::form(&content_type, body));
}

/// Entries of the response cache that another program may have written: decoding never panics, and
/// a decoded entry survives encoding and decoding.
pub(crate) fn cached(data: &[u8]) {
    let draft = Draft::from_text("backend: \"b\"\nmax_batch_size: 4", "config.pbtxt")
        .expect("a valid configuration");
    let completion = Completion { directory: "m", auto_complete: true, ..Completion::default() };
    let config = draft.complete(&completion).expect("a complete configuration");
    let request = InferRequest::default();
    let key = Identifier::new(&ModelVersion::new("m", 1), &config).finish().key(&request);
    let bytes = Bytes::from([b"PHRC\x01", &key.as_bytes()[..], data].concat());
    let Ok(entry) = Entry::decode(&bytes, &key) else { return };
    let _ = entry.check(&config, &request, 1);
    let again = Entry::encode(&entry.to_response(&config, 1, &request), &key);
    let again = Entry::decode(&again.into(), &key);
    // Compared as text, because a NaN among the parameters is not equal to itself.
    assert_eq!(format!("{again:?}"), format!("{:?}", Ok::<_, ()>(entry)));
}

/// HTTP load requests with files and a configuration: files of any name stay in the model's
/// directory, and any configuration is either parsed or refused.
pub(crate) fn repository(data: &[u8]) {
    let Ok(Some(given)) = Override::new(pharos_http::fuzzing::load(data)) else { return };
    let inside = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
    for path in given.files.keys() {
        assert!(!path.as_os_str().is_empty() && inside(path), "{}", path.display());
    }
    if let Ok(draft) = Draft::from_json(&given.config) {
        let completion =
            Completion { directory: "m", auto_complete: true, ..Completion::default() };
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

/// Frames between frontend and worker: decoding never panics, and a decoded frame survives encoding
/// and decoding.
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

/// The metrics ring with a hostile producer: the reader neither panics nor loops for any contents
/// of the producer's memory.
pub(crate) fn ring(data: &[u8]) {
    /// The offsets of the producer's words: its head and the records.
    const HEAD: usize = 8 * 8;
    const RECORDS: usize = 32 * 8;
    let (descriptor, mut reader) = channel::create(16 << 10).expect("the ring can be created");
    let length = fs::File::from(descriptor.try_clone().expect("a descriptor"))
        .metadata()
        .expect("a length")
        .len();
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

/// config.pbtxt: parsing never panics, a parsed draft survives encoding and decoding, and a
/// completed one can be rendered.
pub(crate) fn config(data: &[u8]) {
    // What the server reads of a language model's file.
    let _ = pharos::model::gguf::metadata(data);
    text_files(data);
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(draft) = Draft::from_text(text, "config.pbtxt") else { return };
    assert!(Draft::decode(&draft.encode()).is_ok());
    let completion = Completion { directory: "m", auto_complete: true, ..Completion::default() };
    if let Ok(config) = draft.complete(&completion) {
        assert!(config.to_json().starts_with('{'));
    }
}

/// The files of a text model: reading them never panics. A zero byte separates the contents of
/// files; the first ones are those that decide most.
fn text_files(data: &[u8]) {
    const NAMES: [&str; 7] = [
        "config.json",
        "modules.json",
        "1_Pooling/config.json",
        "tokenizer_config.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "special_tokens_map.json",
    ];
    let graphs = ["tokenizer.json", "onnx/model.onnx", "onnx/model_int8.onnx"];
    let names = graphs.map(str::to_owned).to_vec();
    let mut files = TextFiles { names, ..TextFiles::default() };
    for (name, content) in NAMES.into_iter().zip(data.split(|byte| *byte == 0)) {
        assert!(TextFiles::is_read(name));
        files.names.push(name.to_owned());
        files.contents.insert(name.to_owned(), String::from_utf8_lossy(content).into_owned());
    }
    if let Ok(model) = TextModel::of(&files, "", &|_| None) {
        assert!(model.max_tokens > 0 && files.names.contains(&model.graph));
    }
}

const SMALL: &str = "model_metrics:\n  counter: [{name: Hits, unit: Count, dimensions: [page]}]\n  gauge: [{name: \
     Level, unit: m}]\n  histogram: [{name: Size, unit: B}]\n  summary: [{name: Spread, unit: \
     B}]\n";

/// Returns a cache with one metric of each type that also accepts a few undeclared metrics.
fn small_cache() -> Arc<Cache> {
    // Parsed once: this takes longer than most checks.
    static CATALOG: LazyLock<Catalog> =
        LazyLock::new(|| Catalog::parse(SMALL, "metrics.yaml").expect("a valid definition"));
    let settings = Settings { auto_detect: true, max_series: 4, ..Settings::new("host") };
    Arc::new(Cache::new(CATALOG.clone(), settings))
}

/// Checks that each line of the exposition has a valid name and a value.
fn scraped_well(cache: &Arc<Cache>) {
    for line in
        exposition::render(cache, Format::Text).lines().filter(|line| !line.starts_with('#'))
    {
        let (series, value) = line.rsplit_once(' ').expect("a series and its value");
        let name = series.split('{').next().expect("a name");
        assert_eq!(prometheus_name(name), name, "{line}");
        assert!(
            value == "+Inf" || value == "-Inf" || value == "NaN" || value.parse::<f64>().is_ok(),
            "{line}"
        );
    }
}

/// StatsD datagrams: parsing never panics, returns only valid values, and leaves the cache in a
/// state that can be rendered.
pub(crate) fn statsd(data: &[u8]) {
    let mut lines = 0_usize;
    statsd::parse(data, |text, outcome| {
        lines += 1;
        assert!(!text.is_empty() && !text.contains(&b'\n'));
        let Ok(line) = outcome else { return };
        assert_eq!(prometheus_name(&line.name), line.name);
        assert!(
            !line.updates.is_empty() && line.labels.windows(2).all(|pair| pair[0].0 < pair[1].0)
        );
        for update in line.updates.into_iter().flatten() {
            match update {
                Update::Set(value) | Update::Change(value) => assert!(value.is_finite()),
                Update::Observe { value, times, .. } => {
                    assert!(value.is_finite() && (1..=1000).contains(&times))
                }
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

/// Lines that a worker prints after the marker: parsing never panics and leaves the cache in a
/// state that can be rendered.
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

/// Trace files: reading never panics, the traces can be summarised and rendered, and a truncated
/// file yields no more traces than the whole one.
pub(crate) fn trace(data: &[u8]) {
    let Ok(found) = read(data) else { return };
    let models = summary::summarize(found.traces.iter());
    assert!(models.iter().map(|model| model.traces).sum::<usize>() <= found.traces.len());
    assert!(summary::table(&models).lines().count() >= 2 * models.len());
    assert!(
        summary::json(&models).starts_with('{')
            && chrome::render(found.traces.iter()).ends_with("]}\n")
    );
    let stamps =
        |traces: &Traces| traces.traces.iter().map(|trace| trace.stamps.len()).sum::<usize>();
    if let Ok(cut) = read(&data[..data.len() / 2]) {
        assert!(found.broken > 0 || stamps(&cut) <= stamps(&found));
    }
}

/// metrics.yaml: parsing never panics and terminates quickly; a catalog can be listed, modified,
/// compared, served, and loaded in place of another one.
pub(crate) fn metrics(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let catalog = match Catalog::parse(text, "metrics.yaml") {
        Ok(catalog) => catalog,
        Err(error) => {
            return assert!(
                error.line > 0 && error.column > 0 && !error.message.is_empty(),
                "{error}"
            );
        }
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
