//! Reads trace files: those that this server writes, Triton's, and both when they were cut.
//!
//! A file that ends in the middle of a record has everything before it; the record that was cut is left out, and that is
//! told. A record that is no JSON (Triton does not escape the names and ids that clients choose) is skipped: the next one is
//! looked for by how records begin.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::request_trace::Activity;

/// How every record begins.
const RECORD: &[u8] = b"{\"id\":";

/// Broken records that are skipped before a file is taken for something else.
const MOST_BROKEN: usize = 1000;

/// A request, or a step of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Its number.
    pub id: u64,
    /// The number of what it is a step of; 0 for a request.
    pub parent: u64,
    /// The model's name; empty if the file does not say.
    pub model: String,
    /// The model's version.
    pub version: i64,
    /// The request's id.
    pub request_id: String,
    /// The number of the instance that executed it, where the file says so.
    pub instance: Option<u64>,
    /// Why it failed.
    pub error: Option<String>,
    /// Stamps in the order of the file, nanoseconds.
    pub stamps: Vec<(Activity, u64)>,
    /// How many tensors were collected.
    pub tensors: usize,
}

impl Trace {
    /// The first stamp of an activity.
    pub fn at(&self, activity: Activity) -> Option<u64> {
        self.stamps.iter().find(|(known, _)| *known == activity).map(|(_, ns)| *ns)
    }

    /// The last stamp of an activity.
    pub fn last(&self, activity: Activity) -> Option<u64> {
        self.stamps.iter().rev().find(|(known, _)| *known == activity).map(|(_, ns)| *ns)
    }

    /// From when to when it went from one activity to another: each time, for a request is executed several times where its
    /// backend wants that, and answered several times by a decoupled model. What has no end, or one before its start, is left
    /// out.
    pub fn spans(&self, from: Activity, to: Activity) -> impl Iterator<Item = (u64, u64)> + '_ {
        let all =
            move |wanted: Activity| self.stamps.iter().filter(move |(known, _)| *known == wanted).map(|(_, ns)| *ns);
        all(from).zip(all(to)).filter(|(start, end)| start <= end)
    }

    /// The time from one activity to another, all times together; `None` if there is none.
    pub fn between(&self, from: Activity, to: Activity) -> Option<u64> {
        let times = self.spans(from, to).map(|(start, end)| end - start);
        times.reduce(u64::saturating_add)
    }
}

/// What a file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traces {
    /// By number.
    pub traces: Vec<Trace>,
    /// The file ends in the middle.
    pub cut: bool,
    /// Records that are no JSON.
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

/// Reads a file.
///
/// # Errors
/// It is no trace file.
pub fn read(file: &[u8]) -> Result<Traces, String> {
    let mut at = skip_blanks(file, 0);
    if at == file.len() {
        return Ok(Traces { cut: true, ..Traces::default() });
    }
    if file.get(at) != Some(&b'[') {
        return Err("it does not begin with '[': a trace file is a JSON array".to_owned());
    }
    at += 1;
    let (mut found, mut traces) = (Traces::default(), BTreeMap::new());
    loop {
        at = skip_blanks(file, at);
        match file.get(at) {
            None => {
                found.cut = true;
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
                    found.cut = true;
                    break;
                }
                Step::Broken(next) => {
                    found.broken += 1;
                    if found.broken > MOST_BROKEN {
                        return Err(format!("more than {MOST_BROKEN} of its records are no JSON"));
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
    /// A record, and where it ends.
    Record(Box<Record>, usize),
    /// The file ends before the record does.
    Cut,
    /// No record; where the next one may begin.
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
    let trace = traces.entry(record.id).or_insert_with(|| Trace { id: record.id, ..Trace::default() });
    if let Some(model) = record.model_name {
        (trace.model, trace.version, trace.parent) = (model, record.model_version, record.parent_id);
        (trace.request_id, trace.instance, trace.error) = (record.request_id, record.instance, record.error);
    }
    trace.tensors += usize::from(record.tensor.is_some());
    let stamps = record.timestamps.into_iter();
    trace.stamps.extend(stamps.filter_map(|stamp| Some((Activity::from_name(&stamp.name)?, stamp.ns))));
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
    fn records_of_a_part_come_together() {
        let Traces { traces, cut: false, broken: 0 } = read(FILE.as_bytes()).unwrap() else { panic!("not whole") };
        let [pipe, step] = &traces[..] else { panic!("{traces:?}") };
        assert_eq!((pipe.model.as_str(), pipe.parent, pipe.request_id.as_str()), ("pipe", 0, "e"));
        assert_eq!(pipe.between(Activity::RequestStart, Activity::RequestEnd), Some(8));
        assert_eq!((step.parent, step.instance, step.tensors, step.stamps.len()), (3, Some(7), 1, 2));
        assert_eq!(step.error.as_deref(), Some("no"));
    }

    #[test]
    fn wherever_a_file_is_cut_what_is_whole_is_read() {
        let records = |text: &str| text.matches("{\"id\"").count();
        let whole = read(FILE.as_bytes()).unwrap();
        let stamps = |traces: &Traces| traces.traces.iter().map(|trace| trace.stamps.len()).sum::<usize>();
        let mut last = 0;
        for end in 0..FILE.len() {
            let Ok(read) = read(&FILE.as_bytes()[..end]) else { panic!("cut at {end}") };
            assert!(read.cut, "cut at {end} of {}", FILE.len());
            assert!(stamps(&read) >= last && records(&FILE[..end]) >= read.traces.len());
            last = stamps(&read);
        }
        assert_eq!(last, stamps(&whole));
    }

    #[test]
    fn what_is_no_record_is_skipped_and_told() {
        let file = r#"[{"id":2,"model_name":"m","model_version":1,"request_id":"r"\"},{"id":2,"timestamps":[{"name":"QUEUE_START","ns":5}]},7]"#;
        let found = read(file.as_bytes()).unwrap();
        assert_eq!((found.broken, found.traces.len(), found.traces[0].stamps.len()), (2, 1, 1));
        assert!(read(b"{}").is_err() && read(b"text").is_err());
        let many = format!("[{}", "{\"id\":x},".repeat(MOST_BROKEN + 1));
        assert!(read(many.as_bytes()).is_err());
    }
}
