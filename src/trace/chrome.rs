//! Renders traces as Chrome's trace events (the format of chrome://tracing, which Perfetto opens).
//! Each model is a process and each of its instances a thread, with more threads for concurrent
//! requests. Requests are slices that contain slices for the queue and the stages of computation;
//! arrows lead from ensembles to their steps.
//!
//! Source: "Trace Event Format", a document of the Chromium project.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::read::Trace;
use crate::request_trace::Activity;

/// The process for the requests as seen by clients.
const CLIENTS: usize = 1;

/// The row of requests executed by an unknown instance.
const EXECUTED: &str = "executed";

/// The number of thread ids reserved for each row. More concurrent requests would use the ids of
/// the next row.
const ROWS: usize = 100_000;

/// The slices within a request: name, first and last activity.
const INNER: [(&str, Activity, Activity); 5] = [
    ("queue", Activity::QueueStart, Activity::ComputeStart),
    ("compute", Activity::ComputeStart, Activity::ComputeEnd),
    ("input", Activity::ComputeStart, Activity::ComputeInputEnd),
    ("infer", Activity::ComputeInputEnd, Activity::ComputeOutputStart),
    ("output", Activity::ComputeOutputStart, Activity::ComputeEnd),
];

/// The transfers of a request: name, first and last activity.
const TRANSFERS: [(&str, Activity, Activity); 4] = [
    ("receive", Activity::HttpRecvStart, Activity::HttpRecvEnd),
    ("receive", Activity::GrpcWaitReadStart, Activity::GrpcWaitReadEnd),
    ("send", Activity::HttpSendStart, Activity::HttpSendEnd),
    ("send", Activity::GrpcSendStart, Activity::GrpcSendEnd),
];

/// Renders the file.
pub fn render<'a>(traces: impl Iterator<Item = &'a Trace>) -> String {
    let mut traces: Vec<&Trace> =
        traces.filter(|trace| !trace.model.is_empty() && bounds(trace).is_some()).collect();
    traces.sort_by_key(|trace| bounds(trace));
    // Times are relative to the first stamp, because Perfetto stores microseconds as doubles.
    let zero = traces
        .iter()
        .filter_map(|trace| trace.stamps.iter().map(|(_, ns)| *ns).min())
        .min()
        .unwrap_or(0);
    let mut events =
        Events { out: String::new(), zero, rows: BTreeMap::new(), processes: BTreeMap::new() };
    let mut places = BTreeMap::new();
    for trace in &traces {
        places.insert(trace.id, events.trace(trace));
    }
    for trace in traces.iter().filter(|trace| trace.parent != 0) {
        if let (Some(from), Some(to)) = (places.get(&trace.parent), places.get(&trace.id)) {
            events.arrow(trace, *from, *to);
        }
    }
    format!(
        "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{}\n]}}\n",
        events.out.trim_end_matches([',', '\n'])
    )
}

/// Returns the start and the end of a request; without an end, the last stamp counts.
fn bounds(trace: &Trace) -> Option<(u64, u64)> {
    let start = trace.at(Activity::RequestStart)?;
    let last = trace.stamps.iter().map(|(_, ns)| *ns).max()?;
    Some((start, trace.last(Activity::RequestEnd).unwrap_or(last).max(start)))
}

/// The position of a slice: Chrome's process and thread.
#[derive(Clone, Copy)]
struct Track {
    process: usize,
    thread: usize,
}

struct Events {
    out: String,
    zero: u64,
    /// For each process and row name: the times from which its threads are free.
    rows: BTreeMap<(usize, String), Vec<u64>>,
    processes: BTreeMap<String, usize>,
}

impl Events {
    /// Adds the slices of a trace. Returns the track of the request.
    fn trace(&mut self, trace: &Trace) -> Track {
        let (start, end) = bounds(trace).unwrap_or_default();
        let process = self.process(&format!("{} version {}", trace.model, trace.version));
        let row = match trace.instance {
            Some(instance) => format!("instance {instance}"),
            // Triton's files do not contain the instance.
            None if trace.at(Activity::ComputeStart).is_some() => EXECUTED.to_owned(),
            None => "not executed".to_owned(),
        };
        let track = Track { process, thread: self.row(process, row, start, end) };
        let mut about = format!("\"id\":{},\"request_id\":{}", trace.id, quoted(&trace.request_id));
        if let Some(error) = &trace.error {
            let _ = write!(about, ",\"error\":{}", quoted(error));
        }
        self.slice(&trace.model, &about, track, start, end);
        for (name, from, to) in INNER {
            for (from, to) in trace.spans(from, to) {
                self.slice(name, "", track, from, to);
            }
        }
        let transfers: Vec<_> = TRANSFERS
            .iter()
            .flat_map(|(name, from, to)| {
                let name = *name;
                trace.spans(*from, *to).map(move |(from, to)| (name, from, to)).collect::<Vec<_>>()
            })
            .collect();
        let first = transfers.iter().map(|(_, from, _)| *from).min();
        if let (Some(first), Some(last)) = (first, transfers.iter().map(|(_, _, to)| *to).max()) {
            let thread = self.row(CLIENTS, "requests".to_owned(), first, last);
            let clients = Track { process: CLIENTS, thread };
            self.slice(&trace.model, &about, clients, first, last);
            for (name, from, to) in transfers {
                self.slice(name, "", clients, from, to);
            }
        }
        track
    }

    fn process(&mut self, name: &str) -> usize {
        if self.processes.is_empty() {
            self.name("process_name", Track { process: CLIENTS, thread: 0 }, "requests");
        }
        let number = CLIENTS + 1 + self.processes.len();
        if let Some(known) = self.processes.get(name) {
            return *known;
        }
        self.processes.insert(name.to_owned(), number);
        self.name("process_name", Track { process: number, thread: 0 }, name);
        number
    }

    /// Returns the first free thread of this row, with an id that is unique in its process.
    fn row(&mut self, process: usize, name: String, start: u64, end: u64) -> usize {
        let row = (process, name);
        let taken = self.rows.get(&row).map_or(&[][..], Vec::as_slice);
        let free = taken.iter().position(|until| *until <= start).unwrap_or(taken.len());
        // A row's position in its process depends on its name: the instance's number, if it has
        // one.
        let first = row.1.strip_prefix("instance ").and_then(|number| number.parse::<usize>().ok());
        let unnumbered = usize::from(row.1 == EXECUTED);
        let place = first.map_or(unnumbered, |number| number.saturating_add(2));
        let thread = place.saturating_mul(ROWS).saturating_add(free + 1);
        let name = row.1.clone();
        let lanes = self.rows.entry(row).or_default();
        match lanes.get_mut(free) {
            Some(until) => *until = end,
            None => {
                lanes.push(end);
                self.name("thread_name", Track { process, thread }, &name);
            }
        }
        thread
    }

    fn name(&mut self, what: &str, Track { process, thread }: Track, name: &str) {
        let name = quoted(name);
        let _ = writeln!(
            self.out,
            "{{\"ph\":\"M\",\"name\":\"{what}\",\"pid\":{process},\"tid\":{thread},\"args\":{{\"\
             name\":{name}}}}},"
        );
    }

    fn slice(&mut self, name: &str, about: &str, track: Track, from: u64, to: u64) {
        let Track { process, thread } = track;
        let name = quoted(name);
        let ts = self.us(from);
        let dur = us(to.saturating_sub(from));
        let _ = writeln!(
            self.out,
            "{{\"ph\":\"X\",\"name\":{name},\"pid\":{process},\"tid\":{thread},\"ts\":{ts},\"dur\"\
             :{dur},\"args\":{{{about}}}}},"
        );
    }

    /// Adds an arrow from an ensemble's slice to the start of a step's slice.
    fn arrow(&mut self, step: &Trace, from: Track, to: Track) {
        let at = self.us(bounds(step).unwrap_or_default().0);
        for (phase, Track { process, thread }, more) in
            [("s", from, ""), ("f", to, ",\"bp\":\"e\"")]
        {
            let id = step.id;
            let _ = writeln!(
                self.out,
                "{{\"ph\":\"{phase}\",\"name\":\"step\",\"cat\":\"step\",\"id\":{id},\"pid\":\
                 {process},\"tid\":{thread},\"ts\":{at}{more}}},"
            );
        }
    }

    fn us(&self, ns: u64) -> String {
        us(ns.saturating_sub(self.zero))
    }
}

/// Formats nanoseconds as microseconds with three decimals.
fn us(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn quoted(text: &str) -> String {
    // Serializing a string as JSON cannot fail.
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn requests_have_rows_steps_have_arrows_and_slices_nest() {
        use Activity::{
            ComputeEnd, ComputeStart, HttpRecvEnd, HttpRecvStart, QueueStart, RequestEnd,
            RequestStart,
        };
        let trace = |id, parent, model: &str, instance, stamps: &[(Activity, u64)]| Trace {
            id,
            parent,
            model: model.to_owned(),
            version: 1,
            instance,
            stamps: stamps.to_vec(),
            ..Trace::default()
        };
        let step = |id, start: u64| {
            let stamps =
                [(RequestStart, start), (QueueStart, start + 1), (ComputeStart, start + 10)];
            let end = [(ComputeEnd, start + 80), (RequestEnd, start + 100)];
            trace(id, 1, "m", Some(3), &[&stamps[..], &end].concat())
        };
        let root =
            [(HttpRecvStart, 1000), (HttpRecvEnd, 1010), (RequestStart, 1020), (RequestEnd, 2000)];
        let traces =
            [trace(1, 0, "pipe", None, &root), step(2, 1030), step(3, 1050), step(4, 1200)];
        let file: Value = serde_json::from_str(&render(traces.iter())).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let of =
            |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
        assert_eq!((of("s").len(), of("f").len()), (3, 3));
        let rows: Vec<_> = of("X")
            .iter()
            .filter(|e| e["name"] == "m")
            .map(|e| e["tid"].as_u64().unwrap())
            .collect();
        // The first two overlap; the third starts when the first row is free again.
        assert_eq!((rows[0] == rows[2], rows[0] == rows[1]), (true, false));
        let slice = |name: &str| of("X").into_iter().find(|event| event["name"] == name).unwrap();
        assert_eq!(
            (slice("queue")["ts"].as_f64(), slice("queue")["dur"].as_f64()),
            (Some(0.031), Some(0.009))
        );
        assert_eq!(slice("receive")["ts"].as_f64(), Some(0.0));
        assert_eq!(slice("receive")["pid"].as_u64(), Some(1));
        assert!(serde_json::from_str::<Value>(&render(std::iter::empty())).is_ok());
        // Without instances, executed requests and others have separate rows.
        let found = trace(1, 0, "m", None, &[(RequestStart, 0), (RequestEnd, 9)]);
        let executed =
            trace(2, 0, "m", None, &[(RequestStart, 20), (ComputeStart, 21), (RequestEnd, 29)]);
        let file: Value = serde_json::from_str(&render([found, executed].iter())).unwrap();
        let events = file["traceEvents"].as_array().unwrap().iter();
        let rows = events.filter(|event| event["name"] == "thread_name");
        let rows: Vec<_> =
            rows.map(|row| (row["tid"].as_u64(), row["args"]["name"].as_str())).collect();
        assert_eq!(rows, [(Some(1), Some("not executed")), (Some(100_001), Some("executed"))]);
    }
}
