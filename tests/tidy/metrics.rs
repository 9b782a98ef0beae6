//! Checks that code records every metric of `metrics.yaml`, and that the file defines those in expressions of dashboards and rules.
//!
//! An undeclared name in an expression means an empty panel or a rule that never fires.

use std::collections::{BTreeMap, BTreeSet};

use crate::tree::File;

/// The definition and the enum.
const DEFINITION: &str = "metrics.yaml";
const ENUM: &str = "src/metrics/builtin.rs";

/// The files with expressions: dashboards, rules and their tests.
const WATCHED: &[&str] = &["grafana/", "deploy/", "prometheus.yaml"];

/// Keys whose values are expressions, in JSON and in YAML.
const KEYS: &[&str] = &["expr", "query", "definition", "series"];

/// The prefixes of the server's metrics.
const PREFIXES: &[&str] = &["nv_", "ts_", "pharos_", "process_"];

/// Metrics of the worker's runtime, which has no enum.
const OF_THE_WORKER: &[&str] = &["HandlerTime", "PredictionTime", "pharos_sequence_state_bytes"];

/// Metrics of Prometheus itself.
const OF_PROMETHEUS: &[&str] = &["up", "ALERTS", "ALERTS_FOR_STATE"];

/// Returns the violations; none if a file does not exist.
pub(crate) fn check(files: &[File]) -> Vec<String> {
    let file = |path: &str| files.iter().find(|file| file.path == path);
    let Some(definition) = file(DEFINITION) else { return Vec::new() };
    let declared = declared(&definition.text);
    let mut found = Vec::new();
    if let Some(builtins) = file(ENUM) {
        found.extend(unrecorded(&builtins.text, &declared));
    }
    let watched = || files.iter().filter(|file| WATCHED.iter().any(|folder| file.path.starts_with(folder)));
    let recorded: BTreeSet<&str> = watched().flat_map(|file| recorded(&file.text)).collect();
    let known = |name: &str| {
        let of_scrapes = name.starts_with("scrape_") || OF_PROMETHEUS.contains(&name);
        of_scrapes || recorded.contains(name) || is_sample(name, &declared)
    };
    for file in watched() {
        for (line, expression) in expressions(&file.text) {
            for name in metrics(&expression).into_iter().filter(|name| !known(name)) {
                let advice = "declare it in metrics.yaml, or record it by a rule";
                found.push(format!("{}:{line}: undeclared metric `{name}`: {advice}", file.path));
            }
        }
    }
    found
}

/// Returns every name of the definition with its type and line.
fn declared(text: &str) -> BTreeMap<&str, (&str, usize)> {
    let (mut kind, mut found) = ("", BTreeMap::new());
    for (index, line) in text.lines().enumerate() {
        if let Some(key) = line.strip_prefix("  ").filter(|rest| !rest.starts_with([' ', '#'])) {
            kind = key.split(':').next().unwrap_or_default();
        } else if let Some(name) = line.trim().strip_prefix("- name: ") {
            found.insert(name.trim(), (kind, index + 1));
        }
    }
    found
}

/// Finds metrics of the definition that no code records. (That the definition has every metric of the enum, the compiler checks.)
fn unrecorded(builtins: &str, declared: &BTreeMap<&str, (&str, usize)>) -> Vec<String> {
    // A row of the table: `Variant = "name" source;`
    let row = |line: &'_ str| {
        let (_, rest) = line.split_once(" = \"")?;
        let (name, rest) = rest.split_once("\" ")?;
        rest.trim_end().ends_with(';').then(|| name.to_owned())
    };
    let recorded: BTreeSet<String> = builtins.lines().filter_map(row).collect();
    let unknown = declared.iter().filter(|(name, _)| !recorded.contains(**name) && !OF_THE_WORKER.contains(name));
    let violation = |(name, (_, line)): (&&str, &(&str, usize))| {
        format!("{DEFINITION}:{line}: `{name}` is never recorded: add it to the enum in {ENUM}, or delete it")
    };
    unknown.map(violation).collect()
}

/// Returns whether a scrape contains samples of this name.
fn is_sample(name: &str, declared: &BTreeMap<&str, (&str, usize)>) -> bool {
    let kind = |name: &str| declared.get(name).map_or("", |(kind, _)| kind);
    let of = |suffix: &str, kinds: &[&str]| name.strip_suffix(suffix).is_some_and(|stem| kinds.contains(&kind(stem)));
    let plain = matches!(kind(name), "counter" | "gauge" | "summary");
    plain
        || of("_bucket", &["histogram"])
        || of("_sum", &["histogram", "summary"])
        || of("_count", &["histogram", "summary"])
}

/// Returns the names that recording rules define.
fn recorded(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| Some(line.trim().trim_start_matches("- ").strip_prefix("record:")?.trim()))
}

/// Returns the expressions of a JSON or YAML file with their lines. A YAML block (`expr: |`) is one expression.
fn expressions(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        for key in KEYS {
            // JSON may have several keys on one line.
            let quoted = format!("\"{key}\"");
            for (at, _) in line.match_indices(&quoted) {
                let rest = line[at + quoted.len()..].trim_start().strip_prefix(':').map(str::trim_start);
                found.extend(rest.and_then(json_string).map(|value| (index + 1, value)));
            }
            found.extend(yaml_value(&lines, index, key).map(|value| (index + 1, value)));
        }
    }
    found
}

/// Returns the value of a key in YAML: the rest of its line and the following lines that are indented deeper.
fn yaml_value(lines: &[&str], index: usize, key: &str) -> Option<String> {
    let depth = |line: &str| line.len() - line.trim_start_matches([' ', '-']).len();
    let rest = lines[index].trim_start_matches([' ', '-']).strip_prefix(key)?.strip_prefix(':')?.trim();
    let deeper = |line: &&&str| line.trim().is_empty() || depth(line) > depth(lines[index]);
    let below = lines[index + 1..].iter().take_while(deeper);
    let first = if rest.starts_with(['|', '>']) { "" } else { rest };
    let value = [first].into_iter().chain(below.copied()).collect::<Vec<_>>().join(" ");
    Some(json_string(value.trim()).unwrap_or_else(|| value.trim().trim_matches('\'').to_owned()))
}

/// Parses the JSON string at the start of a text.
fn json_string(text: &str) -> Option<String> {
    let mut chars = text.strip_prefix('"')?.chars();
    let mut value = String::new();
    loop {
        match chars.next()? {
            '"' => return Some(value),
            '\\' => value.push(match chars.next()? {
                'n' | 't' | 'r' => ' ',
                other => other,
            }),
            other => value.push(other),
        }
    }
}

/// Returns the metrics that an expression reads: names with our prefixes, names with a colon, which only recording rules have, names
/// before a selector, and arguments of `label_values`. Label names, in braces or after `by`, count only if they have a prefix of our metrics.
fn metrics(expression: &str) -> BTreeSet<String> {
    let text = without_labels(expression);
    let (mut found, mut previous) = (BTreeSet::new(), "");
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut rest = text.as_str();
    while let Some(start) = rest.find(is_part) {
        let before = &rest[..start];
        rest = &rest[start..];
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let first = previous == "label_values" && before.trim() == "(" && after.trim_start().starts_with(',');
        let selected = after.starts_with(['{', '[']);
        let ours = word.contains(':') || PREFIXES.iter().any(|prefix| word.starts_with(prefix));
        // Not a duration, or the colon of a subquery.
        let named = word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && !before.ends_with(['$', '.']);
        if named && (ours || first || selected) {
            found.insert(word.to_owned());
        }
        (previous, rest) = (word, after);
    }
    found
}

/// Removes the content of braces and quotes from an expression.
fn without_labels(expression: &str) -> String {
    let (mut text, mut quote, mut depth) = (String::new(), None, 0_usize);
    for c in expression.chars() {
        match (quote, c) {
            (Some(open), _) if open == c => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'' | '`') => quote = Some(c),
            (None, '{') => {
                depth += 1;
                text.push(c);
            }
            (None, '}') => {
                depth = depth.saturating_sub(1);
                text.push(c);
            }
            (None, _) if depth == 0 => text.push(c),
            (None, _) => {}
        }
    }
    text
}
