//! The printed comparison: every row with its spread, its ratio to the limit in the same round, and
//! its targets.

use std::fmt::Write;

use crate::load::{Case, Sample};
use crate::memory::Memory;
use crate::server::Kind;
use crate::stats::Spread;
use crate::workload::Workload;

/// The results of one server in one case: one entry per round.
pub(crate) struct Row {
    pub(crate) case: Case,
    pub(crate) kind: Kind,
    pub(crate) rounds: Vec<Result<Sample, String>>,
}

impl Row {
    fn spread(&self, of: fn(&Sample) -> f64) -> Option<Spread> {
        Spread::of(self.rounds.iter().flatten().map(of))
    }

    fn error(&self) -> Option<&str> {
        self.rounds.iter().find_map(|round| round.as_ref().err()).map(String::as_str)
    }

    /// Returns what a target needs: the ratio, and whether all rounds of both rows succeeded.
    fn against(&self, other: &Self, of: fn(&Sample) -> f64) -> Reached {
        Reached {
            spread: self.ratio(other, of),
            complete: self.error().or(other.error()).is_none(),
        }
    }

    /// Returns the ratio of this row to the other, round by round.
    fn ratio(&self, other: &Self, of: fn(&Sample) -> f64) -> Option<Spread> {
        let pairs = self.rounds.iter().zip(&other.rounds);
        Spread::of(
            pairs.filter_map(|(mine, other)| {
                Some(of(mine.as_ref().ok()?) / of(other.as_ref().ok()?))
            }),
        )
    }
}

/// The measured value of a target.
struct Reached {
    spread: Option<Spread>,
    /// Whether no round failed.
    complete: bool,
}

impl Reached {
    /// Returns the value of a server that is not measured.
    fn missing() -> Self {
        Self { spread: None, complete: true }
    }
}

/// A target. The median decides; the spread shows the certainty. Rounds that failed may be the slow
/// ones, so the others decide nothing.
struct Target {
    text: String,
    reached: Reached,
    passes: fn(f64) -> bool,
}

impl Target {
    fn print(&self, into: &mut String) {
        let verdict = match self.reached {
            Reached { complete: false, .. } => "not judged: rounds failed",
            Reached { spread: None, .. } => "not measured",
            Reached { spread: Some(spread), .. } if (self.passes)(spread.median) => "PASS",
            Reached { .. } => "FAIL",
        };
        let reached = self.reached.spread.map(|spread| spread.to_string()).unwrap_or_default();
        let _ = writeln!(into, "    {:<58} {reached:>24}  {verdict}", self.text);
    }
}

/// Returns an error if a round failed.
pub(crate) fn check(rows: &[Row]) -> Result<(), String> {
    let failed: Vec<(&Row, &String)> = rows
        .iter()
        .flat_map(|row| {
            row.rounds.iter().filter_map(move |round| Some((row, round.as_ref().err()?)))
        })
        .collect();
    let Some((row, error)) = failed.first() else { return Ok(()) };
    Err(format!(
        "{} rounds failed, the first of {} {}: {error}",
        failed.len(),
        row.case.name(),
        row.kind.name()
    ))
}

/// Renders the whole report.
pub(crate) fn render(all: &[Row], memories: Option<&(Memory, Memory)>) -> String {
    let mut text = format!(
        "\n{:<22} {:>24} {:>22} {:>22} {:>22} {:>20} {:>20} {:>20}\n",
        "median (min..max)",
        "requests/s",
        "MB/s each way",
        "p50 µs",
        "p99 µs",
        "rate / echo's",
        "p99 / echo's",
        "processor / echo's"
    );
    // The rows of a case follow each other.
    for rows in all.chunk_by(|left, right| left.case == right.case) {
        let (case, rows) = (rows[0].case, rows.iter().collect::<Vec<_>>());
        let _ = writeln!(text, "{}", case.name());
        rows.iter().for_each(|row| print_row(&mut text, row, find(&rows, Kind::Echo)));
        targets(case, (&rows, all)).iter().for_each(|target| target.print(&mut text));
    }
    if let Some((before, after)) = memories {
        print_memory(&mut text, before, after);
    }
    text
}

fn find<'a>(rows: &[&'a Row], kind: Kind) -> Option<&'a Row> {
    rows.iter().copied().find(|row| row.kind == kind)
}

fn print_row(into: &mut String, row: &Row, echo: Option<&Row>) {
    let shown = |spread: Option<Spread>| {
        spread.map(|spread| spread.to_string()).unwrap_or_else(|| "-".to_owned())
    };
    let limit = echo.filter(|_| row.kind != Kind::Echo);
    let ratio =
        |of: fn(&Sample) -> f64| limit.map(|echo| shown(row.ratio(echo, of))).unwrap_or_default();
    let large = row.case.workload.is_large();
    let _ = writeln!(
        into,
        "  {:<20} {:>24} {:>22} {:>22} {:>22} {:>20} {:>20} {:>20}",
        row.kind.name(),
        shown(row.spread(|sample| sample.rate)),
        if large { shown(row.spread(|sample| sample.megabytes)) } else { String::new() },
        shown(row.spread(|sample| sample.p50)),
        shown(row.spread(|sample| sample.p99)),
        ratio(|sample| sample.rate),
        ratio(|sample| sample.p99),
        // The process of a peer may be only its starter.
        if row.kind.is_peer() { String::new() } else { ratio(|sample| sample.processor) },
    );
    if let Some(error) = row.error() {
        let _ = writeln!(into, "    {}: {error}", row.kind.name());
    }
}

/// Returns the targets of a case. Bytes per second and requests per second have the same ratio,
/// because the payload is the same.
fn targets(case: Case, (rows, all): (&[&Row], &[Row])) -> Vec<Target> {
    if case.workload == Workload::Handler {
        return beside_torchserve(rows);
    }
    let Some(pharos) = find(rows, Kind::Pharos) else { return Vec::new() };
    let mut targets = Vec::new();
    if let Some(echo) = find(rows, Kind::Echo) {
        let rate = || pharos.against(echo, |sample| sample.rate);
        match (case.workload, case.clients) {
            (Workload::Identity, _) => {
                let text = "bytes/s at least 0.70 of the echo's".to_owned();
                targets.push(Target { text, reached: rate(), passes: |ratio| ratio >= 0.7 });
            }
            (Workload::Simple, 8) => {
                let text = "requests/s at least 0.50 of the echo's".to_owned();
                targets.push(Target { text, reached: rate(), passes: |ratio| ratio >= 0.5 });
            }
            _ => {}
        }
        if case.clients == 1 {
            let (text, reached) =
                ("p99 under 3 x the echo's".to_owned(), pharos.against(echo, |sample| sample.p99));
            targets.push(Target { text, reached, passes: |ratio| ratio < 3.0 });
        }
    }
    let dynamic = Case { workload: Workload::Simple, ..case };
    if let Some(dynamic) = all.iter().find(|row| {
        case.workload == Workload::Sequences && (row.case, row.kind) == (dynamic, Kind::Pharos)
    }) {
        let text = "requests/s at least 0.80 of the dynamic batcher's".to_owned();
        let reached = pharos.against(dynamic, |sample| sample.rate);
        targets.push(Target { text, reached, passes: |ratio| ratio >= 0.8 });
    }
    if let Some(bare) = find(rows, Kind::Bare).filter(|_| case.clients == 8) {
        let (text, reached) = (
            "requests/s at least 0.97 of those without metrics",
            pharos.against(bare, |sample| sample.rate),
        );
        targets.push(Target { text: text.to_owned(), reached, passes: |ratio| ratio >= 0.97 });
    }
    if let Some(observed) = find(rows, Kind::Observed) {
        let reached = observed.against(pharos, |sample| sample.rate);
        let text = "observed in every way: at least 0.97 of the default".to_owned();
        targets.push(Target { text, reached, passes: |ratio| ratio >= 0.97 });
    }
    if let Some(compiled) = find(rows, Kind::Compiled) {
        let reached = compiled.against(pharos, |sample| sample.rate);
        let text = "Triton's interface: at least 0.95 of the server's own".to_owned();
        targets.push(Target { text, reached, passes: |ratio| ratio >= 0.95 });
    }
    if let Some(triton) = find(rows, Kind::Triton) {
        targets.push(beside_triton(case, pharos.against(triton, |sample| sample.rate)));
    }
    targets
}

/// Returns the required lead over Triton's Python backend: by half if the model is in Python here
/// as well.
fn beside_triton(case: Case, reached: Reached) -> Target {
    let (text, passes): (_, fn(f64) -> bool) = match case.workload {
        Workload::Python(_) => ("requests/s at least 1.5 of Triton's", |ratio| ratio >= 1.5),
        _ => ("requests/s ahead of Triton's", |ratio| ratio > 1.0),
    };
    Target { text: text.to_owned(), reached, passes }
}

/// Returns the required lead over TorchServe with the same archive.
fn beside_torchserve(rows: &[&Row]) -> Vec<Target> {
    let (ours, theirs) = (find(rows, Kind::PharosTorchserve), find(rows, Kind::Torchserve));
    let reached = ours.zip(theirs).map(|(ours, theirs)| ours.against(theirs, |sample| sample.rate));
    let reached = reached.unwrap_or_else(Reached::missing);
    let text = "requests/s at least 3 x TorchServe's".to_owned();
    vec![Target { text, reached, passes: |ratio| ratio >= 3.0 }]
}

/// Renders the cost of a counter increment in a Python model, in nanoseconds.
pub(crate) fn render_increments(increments: &[(Kind, Vec<f64>)]) -> String {
    let mut text = String::new();
    for (kind, nanoseconds) in increments {
        let (spread, name) = (Spread::of(nanoseconds.iter().copied()), kind.name());
        if *kind == Kind::Pharos {
            let target = format!("{name}: ns for a counter's increment in Python under 500");
            let reached = Reached { spread, complete: true };
            Target { text: target, reached, passes: |ns| ns < 500.0 }.print(&mut text);
        } else if let Some(spread) = spread {
            let of = format!("{name}: ns for a counter's increment in Python");
            let _ = writeln!(text, "    {of:<58} {:>24}", spread.to_string());
        }
    }
    text
}

fn print_memory(into: &mut String, before: &Memory, after: &Memory) {
    let _ = writeln!(into, "resident memory of pharos, MiB (in shared mappings)");
    let mut line = |text: &str, memory: Option<&crate::memory::Resident>, limit: Option<f64>| {
        let Some(memory) = memory else {
            let _ = writeln!(into, "    {text:<58} {:>24}", "no such process");
            return;
        };
        let verdict =
            limit.map_or("", |limit| if memory.total < limit { "  PASS" } else { "  FAIL" });
        let figures = format!("{:.1} ({:.1})", memory.total, memory.shared);
        let _ = writeln!(into, "    {text:<58} {figures:>24}{verdict}");
    };
    line("frontend, idle: under 60", Some(&before.frontend), Some(60.0));
    line("builtin worker, idle: under 25", before.worker.as_ref(), Some(25.0));
    line("frontend, after the load", Some(&after.frontend), None);
    line("builtin worker, after the load (the largest)", after.worker.as_ref(), None);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::client::Protocol;

    fn row(kind: Kind, rates: &[f64], p99: f64) -> Row {
        let case = Case { workload: Workload::Simple, protocol: Protocol::Http, clients: 8 };
        let sample =
            |rate: &f64| Ok(Sample { rate: *rate, megabytes: 1.0, p50: 1.0, p99, processor: 1.0 });
        Row { case, kind, rounds: rates.iter().map(sample).collect() }
    }

    #[track_caller]
    fn check_line(rows: &[Row], line: &str, verdict: &str) {
        let text = render(rows, None);
        let found = text
            .lines()
            .find(|found| found.contains(line))
            .unwrap_or_else(|| panic!("no '{line}' in:\n{text}"));
        assert!(found.ends_with(verdict), "{found}");
    }

    #[test]
    fn ratios_compare_the_same_round() {
        let rows = [row(Kind::Echo, &[100.0, 1000.0], 1.0), row(Kind::Pharos, &[60.0, 500.0], 1.0)];
        check_line(&rows, "0.55 (0.50..0.60)", "1.00 (1.00..1.00)    1.00 (1.00..1.00)");
        check_line(&rows, "at least 0.50 of the echo's", "PASS");
    }

    #[test]
    fn reports_missed_targets() {
        let rows = [
            row(Kind::Echo, &[100.0], 1.0),
            row(Kind::Pharos, &[49.0], 1.0),
            row(Kind::Triton, &[50.0], 1.0),
        ];
        check_line(&rows, "at least 0.50 of the echo's", "FAIL");
        check_line(&rows, "ahead of Triton's", "FAIL");
    }

    #[test]
    fn a_python_model_has_a_higher_target() {
        let of = |kind, rate| Row {
            case: Case { workload: Workload::ALL[3], protocol: Protocol::Http, clients: 16 },
            ..row(kind, &[rate], 1.0)
        };
        check_line(
            &[of(Kind::Pharos, 149.0), of(Kind::Triton, 100.0)],
            "at least 1.5 of Triton's",
            "FAIL",
        );
        check_line(
            &[of(Kind::Pharos, 151.0), of(Kind::Triton, 100.0)],
            "at least 1.5 of Triton's",
            "PASS",
        );
    }

    #[test]
    fn the_target_of_a_handler_is_three_times_torchserve() {
        let of = |kind, rate| Row {
            case: Case { workload: Workload::Handler, protocol: Protocol::Http, clients: 32 },
            ..row(kind, &[rate], 1.0)
        };
        check_line(
            &[of(Kind::PharosTorchserve, 299.0), of(Kind::Torchserve, 100.0)],
            "3 x TorchServe's",
            "FAIL",
        );
        check_line(
            &[of(Kind::PharosTorchserve, 301.0), of(Kind::Torchserve, 100.0)],
            "3 x TorchServe's",
            "PASS",
        );
        check_line(&[of(Kind::PharosTorchserve, 301.0)], "3 x TorchServe's", "not measured");
    }

    #[test]
    fn an_increment_has_a_target() {
        let text =
            render_increments(&[(Kind::Pharos, vec![501.0]), (Kind::Triton, vec![900.0, 1100.0])]);
        assert!(
            text.contains("501 (501..501)  FAIL") && text.contains("1000 (900..1100)\n"),
            "{text}"
        );
    }

    #[test]
    fn shows_but_does_not_count_a_failed_round() {
        let mut pharos = row(Kind::Pharos, &[60.0, 70.0], 1.0);
        pharos.rounds[0] = Err("grpc-status 14: gone".to_owned());
        let rows =
            [row(Kind::Echo, &[100.0, 100.0], 1.0), pharos, row(Kind::Triton, &[50.0, 50.0], 1.0)];
        check_line(&rows, "grpc-status", "gone");
        check_line(
            &rows,
            "at least 0.50 of the echo's",
            "0.70 (0.70..0.70)  not judged: rounds failed",
        );
        check_line(&rows, "ahead of Triton's", "not judged: rounds failed");
        let error = check(&rows).unwrap_err();
        assert_eq!(
            error,
            "1 rounds failed, the first of simple/http/8 pharos: grpc-status 14: gone"
        );
        assert_eq!(check(&rows[..1]), Ok(()));
    }

    #[test]
    fn memory_has_targets() {
        let resident = |total| super::super::memory::Resident { total, shared: 0.0 };
        let memory = Memory { frontend: resident(61.0), worker: Some(resident(24.0)) };
        let text = render(&[], Some(&(memory.clone(), memory)));
        let ends: Vec<_> = text
            .lines()
            .filter(|line| line.contains("idle"))
            .map(|line| line.ends_with("PASS"))
            .collect();
        assert_eq!(ends, [false, true], "{text}");
    }
}
