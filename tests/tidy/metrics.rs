//! Checks that code records every metric of `metrics.yaml`, and that the file defines those in
//! expressions of dashboards and rules.
//!
//! An undeclared name in an expression means an empty panel or a rule that never fires.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;

use crate::rules::{METRICS_DEFINITION, METRICS_ENUM, METRICS_OF_THE_WORKER};
use crate::{File, violation};

/// The places of dashboards, rules and their tests.
const EXPRESSIONS: &[&str] = &[
    "grafana/",
    "deploy/kubernetes/",
    "deploy/kserve/",
    "deploy/helm/pharos/files/",
    "prometheus.yaml",
];

/// A metric of the definition.
struct Declared {
    kind: String,
    line: usize,
}

pub(crate) fn check(files: &[File]) -> Vec<String> {
    let text =
        |path: &str| files.iter().find(|file| file.path == path).map(|file| file.text.as_str());
    let Some(definition) = text(METRICS_DEFINITION) else { return Vec::new() };
    let declared = declared(definition);
    let mut found =
        text(METRICS_ENUM).map(|builtins| unrecorded(builtins, &declared)).unwrap_or_default();
    found.extend(undeclared(files, &declared));
    found
}

fn declared(definition: &str) -> BTreeMap<&str, Declared> {
    let mut kind = "";
    let mut declared = BTreeMap::new();
    for (line, text) in (1..).zip(definition.lines()) {
        if let Some(key) = text.strip_prefix("  ").filter(|rest| !rest.starts_with([' ', '#'])) {
            kind = key.trim_end_matches(':');
        } else if let Some(name) = text.trim().strip_prefix("- name: ") {
            declared.insert(name.trim(), Declared { kind: kind.to_owned(), line });
        }
    }
    declared
}

/// Finds metrics of the definition that no code records. (The build checks that the definition has
/// every metric of the enum.)
fn unrecorded(builtins: &str, declared: &BTreeMap<&str, Declared>) -> Vec<String> {
    // A row of the enum: `Variant = "name" source;`.
    let row = Regex::new(r#"(?m) = "(\w+)" .*;$"#).expect("valid");
    let mut recorded: BTreeSet<&str> = METRICS_OF_THE_WORKER.iter().copied().collect();
    recorded.extend(row.captures_iter(builtins).map(|captures| captures.extract::<1>().1[0]));
    let mut found = Vec::new();
    for (name, metric) in declared.iter().filter(|(name, _)| !recorded.contains(**name)) {
        let advice = format!("add it to the enum in {METRICS_ENUM}, or delete it");
        found.push(violation(
            METRICS_DEFINITION,
            metric.line,
            &format!("`{name}` is never recorded"),
            &advice,
        ));
    }
    found
}

/// Finds names of metrics that no scrape and no recording rule has: words with a prefix of the
/// server's metrics, words with a colon, words before a selector, and arguments of `label_values`.
/// Descriptions also name whole histograms.
fn undeclared(files: &[File], declared: &BTreeMap<&str, Declared>) -> Vec<String> {
    let is_data =
        |file: &&File| [".json", ".yaml", ".yml"].iter().any(|end| file.path.ends_with(end));
    let is_watched = |file: &&File| EXPRESSIONS.iter().any(|place| file.path.starts_with(place));
    let watched: Vec<_> = files.iter().filter(is_data).filter(is_watched).collect();
    let mut known: BTreeSet<String> =
        ["up", "ALERTS", "ALERTS_FOR_STATE"].map(str::to_owned).into();
    for (name, metric) in declared {
        let suffixes: &[&str] = match metric.kind.as_str() {
            "histogram" => &["_bucket", "_sum", "_count"],
            "summary" => &["", "_sum", "_count"],
            _ => &[""],
        };
        known.extend(suffixes.iter().map(|suffix| format!("{name}{suffix}")));
    }
    let rule = Regex::new(r"record:\s*(\S+)").expect("valid");
    for file in &watched {
        known.extend(rule.captures_iter(&file.text).map(|captures| captures[1].to_owned()));
    }
    let label_value = Regex::new(r#"[=~]\s*(?:\\?"[^"]*"|'[^']*')"#).expect("valid");
    let word = Regex::new(r"(label_values\()?([\w:$./]+)([\[{]*)").expect("valid");
    let name =
        Regex::new(r"^(?:(?:nv|ts|pharos|process)_\w+|[a-z_]+:[a-z_][\w:]*)$").expect("valid");
    let mut found = Vec::new();
    for file in watched {
        for (line, text) in (1..).zip(file.text.lines()) {
            let expression = label_value.replace_all(text, "");
            for captures in word.captures_iter(&expression) {
                let metric = captures[2].trim_end_matches(['.', ':', '/']);
                let is_selected = captures.get(1).is_some() || matches!(&captures[3], "{" | "[");
                let is_word = metric.starts_with(|c: char| c.is_ascii_alphabetic());
                let is_metric = name.is_match(metric)
                    || (is_selected && is_word && !metric.contains(['/', '.', '$']));
                let is_known = known.contains(metric)
                    || metric.starts_with("scrape_")
                    || (text.contains("\"description\"") && declared.contains_key(metric));
                if is_metric && !is_known {
                    let advice = "declare it in metrics.yaml, or record it by a rule";
                    found.push(violation(
                        &file.path,
                        line,
                        &format!("undeclared metric `{metric}`"),
                        advice,
                    ));
                }
            }
        }
    }
    found
}
