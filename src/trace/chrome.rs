//! Traces as Chrome's trace events (the format of chrome://tracing, which Perfetto opens): for each model a process, for each
//! of its instances a thread and for each further request at the same time another, slices for requests with the queue and
//! the parts of the computation in them, arrows from ensembles to their steps.
//!
//! Source: "Trace Event Format", the Chromium project's document of it.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::read::Trace;
use crate::request_trace::Activity;

/// The process of the requests as clients see them.
const CLIENTS: usize = 1;

/// The row of requests that some instance has executed.
const EXECUTED: &str = "executed";

/// Rows that one instance may have, for their numbers: more requests at the same time are in rows of the next.
const ROWS: usize = 100_000;

/// Slices in a request, from one activity to another.
const INNER: [(&str, Activity, Activity); 5] = [
    ("queue", Activity::QueueStart, Activity::ComputeStart),
    ("compute", Activity::ComputeStart, Activity::ComputeEnd),
    ("input", Activity::ComputeStart, Activity::ComputeInputEnd),
    ("infer", Activity::ComputeInputEnd, Activity::ComputeOutputStart),
    ("output", Activity::ComputeOutputStart, Activity::ComputeEnd),
];

/// The transfers of a request.
const TRANSFERS: [(&str, Activity, Activity); 4] = [
    ("receive", Activity::HttpRecvStart, Activity::HttpRecvEnd),
    ("receive", Activity::GrpcWaitReadStart, Activity::GrpcWaitReadEnd),
    ("send", Activity::HttpSendStart, Activity::HttpSendEnd),
    ("send", Activity::GrpcSendStart, Activity::GrpcSendEnd),
];

/// The file.
pub fn render<'a>(traces: impl Iterator<Item = &'a Trace>) -> String {
    let mut traces: Vec<&Trace> = traces.filter(|trace| !trace.model.is_empty() && bounds(trace).is_some()).collect();
    traces.sort_by_key(|trace| bounds(trace));
    // Numbers begin at the first stamp: Perfetto's own clock is microseconds as doubles.
    let zero = traces.iter().filter_map(|trace| trace.stamps.iter().map(|(_, ns)| *ns).min()).min().unwrap_or(0);
    let mut events = Events { out: String::new(), zero, rows: BTreeMap::new(), processes: BTreeMap::new() };
    let mut places = BTreeMap::new();
    for trace in &traces {
        places.insert(trace.id, events.trace(trace));
    }
    for trace in traces.iter().filter(|trace| trace.parent != 0) {
        if let (Some(from), Some(to)) = (places.get(&trace.parent), places.get(&trace.id)) {
            events.arrow(trace, *from, *to);
        }
    }
    format!("{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{}\n]}}\n", events.out.trim_end_matches([',', '\n']))
}

/// When a request began and ended; a request without an end ends with its last stamp.
fn bounds(trace: &Trace) -> Option<(u64, u64)> {
    let start = trace.at(Activity::RequestStart)?;
    let last = trace.stamps.iter().map(|(_, ns)| *ns).max()?;
    Some((start, trace.last(Activity::RequestEnd).unwrap_or(last).max(start)))
}

/// Where a slice is drawn: Chrome's process and thread.
#[derive(Clone, Copy)]
struct Track {
    process: usize,
    thread: usize,
}

struct Events {
    out: String,
    zero: u64,
    /// For each process and row when it is free again, and its number. A row has a name.
    rows: BTreeMap<(usize, String), Vec<u64>>,
    processes: BTreeMap<String, usize>,
}

impl Events {
    /// The slices of a trace. Gives the track of the request.
    fn trace(&mut self, trace: &Trace) -> Track {
        let (start, end) = bounds(trace).unwrap_or_default();
        let process = self.process(&format!("{} version {}", trace.model, trace.version));
        let row = match trace.instance {
            Some(instance) => format!("instance {instance}"),
            // Triton's files do not say which.
            None if trace.at(Activity::ComputeStart).is_some() => EXECUTED.to_owned(),
            None => "not executed".to_owned(),
        };
        let track = Track { process, thread: self.row(process, row, (start, end)) };
        let mut about = format!("\"id\":{},\"request_id\":{}", trace.id, quoted(&trace.request_id));
        if let Some(error) = &trace.error {
            let _ = write!(about, ",\"error\":{}", quoted(error));
        }
        self.slice(&trace.model, &about, track, (start, end));
        for (name, from, to) in INNER {
            for (from, to) in trace.spans(from, to) {
                self.slice(name, "", track, (from, to));
            }
        }
        let spans = |(name, from, to): &(&'static str, Activity, Activity)| {
            let name = *name;
            trace.spans(*from, *to).map(move |(from, to)| (name, from, to)).collect::<Vec<_>>()
        };
        let transfers: Vec<_> = TRANSFERS.iter().flat_map(spans).collect();
        let first = transfers.iter().map(|(_, from, _)| *from).min();
        if let (Some(first), Some(last)) = (first, transfers.iter().map(|(_, _, to)| *to).max()) {
            let thread = self.row(CLIENTS, "requests".to_owned(), (first, last));
            let clients = Track { process: CLIENTS, thread };
            self.slice(&trace.model, &about, clients, (first, last));
            for (name, from, to) in transfers {
                self.slice(name, "", clients, (from, to));
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

    /// The first thread of this row that is free. Numbers of threads are unique in their process.
    fn row(&mut self, process: usize, name: String, (start, end): (u64, u64)) -> usize {
        let row = (process, name);
        let taken = self.rows.get(&row).map_or(&[][..], Vec::as_slice);
        let free = taken.iter().position(|until| *until <= start).unwrap_or(taken.len());
        // A row's place among those of its process is told by its name: an instance's number, or none.
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
            "{{\"ph\":\"M\",\"name\":\"{what}\",\"pid\":{process},\"tid\":{thread},\"args\":{{\"name\":{name}}}}},"
        );
    }

    fn slice(&mut self, name: &str, about: &str, Track { process, thread }: Track, (from, to): (u64, u64)) {
        let (name, ts, dur) = (quoted(name), self.us(from), us(to.saturating_sub(from)));
        let _ = writeln!(
            self.out,
            "{{\"ph\":\"X\",\"name\":{name},\"pid\":{process},\"tid\":{thread},\"ts\":{ts},\"dur\":{dur},\
             \"args\":{{{about}}}}},"
        );
    }

    /// From an ensemble's slice to the beginning of a step's.
    fn arrow(&mut self, step: &Trace, from: Track, to: Track) {
        let at = self.us(bounds(step).unwrap_or_default().0);
        for (phase, Track { process, thread }, more) in [("s", from, ""), ("f", to, ",\"bp\":\"e\"")] {
            let id = step.id;
            let _ = writeln!(
                self.out,
                "{{\"ph\":\"{phase}\",\"name\":\"step\",\"cat\":\"step\",\"id\":{id},\"pid\":{process},\"tid\":{thread},\
                 \"ts\":{at}{more}}},"
            );
        }
    }

    fn us(&self, ns: u64) -> String {
        us(ns.saturating_sub(self.zero))
    }
}

/// Nanoseconds as microseconds, to three digits.
fn us(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn quoted(text: &str) -> String {
    // A string is always JSON.
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn requests_lie_in_rows_steps_have_arrows_and_slices_nest() {
        use Activity::{ComputeEnd, ComputeStart, HttpRecvEnd, HttpRecvStart, QueueStart, RequestEnd, RequestStart};
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
            let stamps = [(RequestStart, start), (QueueStart, start + 1), (ComputeStart, start + 10)];
            let end = [(ComputeEnd, start + 80), (RequestEnd, start + 100)];
            trace(id, 1, "m", Some(3), &[&stamps[..], &end].concat())
        };
        let root = [(HttpRecvStart, 1000), (HttpRecvEnd, 1010), (RequestStart, 1020), (RequestEnd, 2000)];
        let traces = [trace(1, 0, "pipe", None, &root), step(2, 1030), step(3, 1050), step(4, 1200)];
        let file: Value = serde_json::from_str(&render(traces.iter())).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
        assert_eq!((of("s").len(), of("f").len()), (3, 3));
        let rows: Vec<_> = of("X").iter().filter(|e| e["name"] == "m").map(|e| e["tid"].as_u64().unwrap()).collect();
        // The first two overlap; the third begins when the first row is free again.
        assert_eq!((rows[0] == rows[2], rows[0] == rows[1]), (true, false));
        let slice = |name: &str| of("X").into_iter().find(|event| event["name"] == name).unwrap();
        assert_eq!((slice("queue")["ts"].as_f64(), slice("queue")["dur"].as_f64()), (Some(0.031), Some(0.009)));
        assert_eq!(slice("receive")["ts"].as_f64(), Some(0.0));
        assert_eq!(slice("receive")["pid"].as_u64(), Some(1));
        assert!(serde_json::from_str::<Value>(&render(std::iter::empty())).is_ok());
        // Without instances: what was executed and what was not are in rows of their own.
        let found = trace(1, 0, "m", None, &[(RequestStart, 0), (RequestEnd, 9)]);
        let executed = trace(2, 0, "m", None, &[(RequestStart, 20), (ComputeStart, 21), (RequestEnd, 29)]);
        let file: Value = serde_json::from_str(&render([found, executed].iter())).unwrap();
        let events = file["traceEvents"].as_array().unwrap().iter();
        let rows = events.filter(|event| event["name"] == "thread_name");
        let rows: Vec<_> = rows.map(|row| (row["tid"].as_u64(), row["args"]["name"].as_str())).collect();
        assert_eq!(rows, [(Some(1), Some("not executed")), (Some(100_001), Some("executed"))]);
    }
}
