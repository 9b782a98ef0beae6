//! Reads trace files of this server and of Triton, including truncated ones.
//!
//! From a file that ends within a record, all complete records are read, and the result says that
//! it was truncated. A record that is invalid JSON is skipped (Triton does not escape names and ids
//! chosen by clients). The next record is found by the text with which records start.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::request_trace::Activity;

/// The text with which every record starts.
const RECORD: &[u8] = b"{\"id\":";

/// The number of broken records after which the file is refused.
const MAX_BROKEN: usize = 1000;

/// A request, or a step of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Its number.
    pub id: u64,
    /// The number of the trace that it is a step of; 0 for a request.
    pub parent: u64,
    /// The model's name; empty if the file does not contain it.
    pub model: String,
    /// The model's version.
    pub version: i64,
    /// The request's id.
    pub request_id: String,
    /// The number of the instance that executed it, if the file contains it.
    pub instance: Option<u64>,
    /// The reason of its failure.
    pub error: Option<String>,
    /// Stamps in the order of the file, in nanoseconds.
    pub stamps: Vec<(Activity, u64)>,
    /// The number of collected tensors.
    pub tensors: usize,
}

impl Trace {
    /// Returns the first stamp of an activity.
    pub fn at(&self, activity: Activity) -> Option<u64> {
        self.stamps.iter().find(|(known, _)| *known == activity).map(|(_, ns)| *ns)
    }

    /// Returns the last stamp of an activity.
    pub fn last(&self, activity: Activity) -> Option<u64> {
        self.stamps.iter().rev().find(|(known, _)| *known == activity).map(|(_, ns)| *ns)
    }

    /// Returns all intervals from one activity to another. There may be several: a backend may
    /// reschedule a request, and a decoupled model may send several responses. Omits intervals
    /// without an end or with an end before the start.
    pub fn spans(&self, from: Activity, to: Activity) -> impl Iterator<Item = (u64, u64)> + '_ {
        let all = move |wanted: Activity| {
            self.stamps.iter().filter(move |(known, _)| *known == wanted).map(|(_, ns)| *ns)
        };
        all(from).zip(all(to)).filter(|(start, end)| start <= end)
    }

    /// Returns the sum of the intervals from one activity to another; `None` without intervals.
    pub fn between(&self, from: Activity, to: Activity) -> Option<u64> {
        let times = self.spans(from, to).map(|(start, end)| end - start);
        times.reduce(u64::saturating_add)
    }
}

/// The content of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traces {
    /// Sorted by number.
    pub traces: Vec<Trace>,
    /// Whether the file ends within a record.
    pub truncated: bool,
    /// The number of records that are invalid JSON.
    pub broken: usize,
}

#[derive(Deserialize)]
struct Record {
    id: u64,
    model_name: Option<String>,
    #[serde(default)]
    model_version: i64,
    #[serde(default)]
    request_id: String,
    #[serde(default)]
    parent_id: u64,
    instance: Option<u64>,
    error: Option<String>,
    #[serde(default)]
    timestamps: Vec<Timestamp>,
    tensor: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Timestamp {
    name: String,
    ns: u64,
}

/// Parses a file.
///
/// # Errors
/// Returns a text if the file is not a trace file.
pub fn read(file: &[u8]) -> Result<Traces, String> {
    let mut at = skip_blanks(file, 0);
    if at == file.len() {
        return Ok(Traces { truncated: true, ..Traces::default() });
    }
    if file.get(at) != Some(&b'[') {
        return Err("not a trace file: expected a JSON array, which starts with '['".to_owned());
    }
    at += 1;
    let mut found = Traces::default();
    let mut traces = BTreeMap::new();
    loop {
        at = skip_blanks(file, at);
        match file.get(at) {
            None => {
                found.truncated = true;
                break;
            }
            Some(b']') => break,
            Some(b',') => at += 1,
            Some(_) => match record(file, at) {
                Step::Record(record, end) => {
                    add(&mut traces, *record);
                    at = end;
                }
                Step::Cut => {
                    found.truncated = true;
                    break;
                }
                Step::Broken(next) => {
                    found.broken += 1;
                    if found.broken > MAX_BROKEN {
                        return Err(format!("more than {MAX_BROKEN} records are invalid JSON"));
                    }
                    at = next;
                }
            },
        }
    }
    found.traces = traces.into_values().collect();
    Ok(found)
}

enum Step {
    /// A record, and the position of its end.
    Record(Box<Record>, usize),
    /// The file ends within the record.
    Cut,
    /// An invalid record, and the position where the next one may start.
    Broken(usize),
}

fn record(file: &[u8], at: usize) -> Step {
    let rest = file.get(at..).unwrap_or_default();
    let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<Record>();
    let error = match values.next() {
        Some(Ok(record)) => return Step::Record(Box::new(record), at + values.byte_offset()),
        Some(Err(error)) => error,
        None => return Step::Cut,
    };
    match rest.get(1..).and_then(|rest| find(rest, RECORD)) {
        Some(next) => Step::Broken(at + 1 + next),
        None if error.is_eof() => Step::Cut,
        None => Step::Broken(file.len()),
    }
}

fn add(traces: &mut BTreeMap<u64, Trace>, record: Record) {
    let trace =
        traces.entry(record.id).or_insert_with(|| Trace { id: record.id, ..Trace::default() });
    if let Some(model) = record.model_name {
        (trace.model, trace.version, trace.parent) =
            (model, record.model_version, record.parent_id);
        (trace.request_id, trace.instance, trace.error) =
            (record.request_id, record.instance, record.error);
    }
    trace.tensors += usize::from(record.tensor.is_some());
    let stamps = record.timestamps.into_iter();
    trace
        .stamps
        .extend(stamps.filter_map(|stamp| Some((Activity::from_name(&stamp.name)?, stamp.ns))));
}

fn skip_blanks(file: &[u8], at: usize) -> usize {
    let rest = file.get(at..).unwrap_or_default();
    at + rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FILE: &str = r#"[{"id":3,"timestamps":[{"name":"HTTP_RECV_START","ns":1}]},
{"id":3,"model_name":"pipe","model_version":1,"request_id":"e"},{"id":3,"timestamps":[{"name":"REQUEST_START","ns":2}]},
{"id":4,"model_name":"m","model_version":2,"parent_id":3,"instance":7,"error":"no"},
{"id":4,"activity":"TENSOR_QUEUE_INPUT","tensor":{"name":"X","data":"1,2","shape":"2","dtype":"INT32"}},
{"id":4,"timestamps":[{"name":"REQUEST_START","ns":3},{"name":"CUSTOM_ACTIVITY","ns":4},{"name":"REQUEST_END","ns":9}]},
{"id":3,"timestamps":[{"name":"REQUEST_END","ns":10}]}]"#;

    #[test]
    fn records_of_a_part_are_merged() {
        let Traces { traces, truncated: false, broken: 0 } = read(FILE.as_bytes()).unwrap() else {
            panic!("not whole")
        };
        let [pipe, step] = &traces[..] else { panic!("{traces:?}") };
        assert_eq!((pipe.model.as_str(), pipe.parent, pipe.request_id.as_str()), ("pipe", 0, "e"));
        assert_eq!(pipe.between(Activity::RequestStart, Activity::RequestEnd), Some(8));
        assert_eq!(
            (step.parent, step.instance, step.tensors, step.stamps.len()),
            (3, Some(7), 1, 2)
        );
        assert_eq!(step.error.as_deref(), Some("no"));
    }

    #[test]
    fn complete_records_of_a_truncated_file_are_read() {
        let whole = read(FILE.as_bytes()).unwrap();
        let stamps =
            |traces: &Traces| traces.traces.iter().map(|trace| trace.stamps.len()).sum::<usize>();
        let mut last = 0;
        for end in 0..FILE.len() {
            let Ok(read) = read(&FILE.as_bytes()[..end]) else { panic!("cut at {end}") };
            assert!(read.truncated, "cut at {end} of {}", FILE.len());
            assert!(
                stamps(&read) >= last
                    && FILE[..end].matches("{\"id\"").count() >= read.traces.len()
            );
            last = stamps(&read);
        }
        assert_eq!(last, stamps(&whole));
    }

    #[test]
    fn invalid_records_are_skipped_and_counted() {
        let file = r#"[{"id":2,"model_name":"m","model_version":1,"request_id":"r"\"},{"id":2,"timestamps":[{"name":"QUEUE_START","ns":5}]},7]"#;
        let found = read(file.as_bytes()).unwrap();
        assert_eq!((found.broken, found.traces.len(), found.traces[0].stamps.len()), (2, 1, 1));
        assert!(read(b"{}").is_err() && read(b"text").is_err());
        let many = format!("[{}", "{\"id\":x},".repeat(MAX_BROKEN + 1));
        assert!(read(many.as_bytes()).is_err());
    }
}
