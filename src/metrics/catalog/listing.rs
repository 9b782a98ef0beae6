//! Texts that describe a catalog: a summary in one line, and a table of its metrics.

use super::{
    Catalog, Kind, LabelValue, MetricSpec, NativeSpec, OtherLabel, OtherName, RECORDED_BY_WORKER,
    STATE_BYTES, Section, Views,
};

/// The formats of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Columns for a terminal.
    Table,
    /// An array of objects.
    Json,
    /// A table in Markdown.
    Markdown,
}

impl Form {
    /// The names of the formats.
    pub const NAMES: [&str; 3] = ["table", "json", "markdown"];

    /// Returns the format of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "table" => Self::Table,
            "json" => Self::Json,
            "markdown" => Self::Markdown,
            _ => return None,
        })
    }
}

const HEADS: [&str; 8] =
    ["NAME", "TYPE", "UNIT", "DIMENSIONS", "MODES", "ON", "RECORDED BY", "HELP"];

/// Summarizes the catalog in one line: the number of metrics of each type, and the mode.
pub fn summary(catalog: &Catalog) -> String {
    format!("{}, mode {}", types(catalog), catalog.mode().as_str())
}

/// Summarizes the catalog of a file in one line: the number of metrics of each type, and the mode,
/// which the command line decides if the file does not name it.
pub fn summary_of_file(catalog: &Catalog) -> String {
    let mode = if catalog.names_mode() {
        catalog.mode().as_str()
    } else {
        "not named (the command line decides)"
    };
    format!("{}, mode {mode}", types(catalog))
}

/// Returns the number of metrics of each type, and of those that are switched off.
fn types(catalog: &Catalog) -> String {
    let kinds =
        [(Kind::Counter, "counters"), (Kind::Gauge, "gauges"), (Kind::Histogram, "histograms")];
    let kinds = kinds.into_iter().chain([(Kind::Summary, "summaries")]);
    let counts: Vec<String> = kinds
        .map(|(kind, name)| {
            format!("{} {name}", catalog.iter().filter(|(_, spec)| spec.kind == kind).count())
        })
        .collect();
    format!(
        "{} metrics ({}), {} switched off",
        catalog.len(),
        counts.join(", "),
        catalog.disabled().len()
    )
}

/// Lists every metric; those that are switched off come last.
pub fn list(catalog: &Catalog, form: Form) -> String {
    let on = catalog.iter().map(|(_, spec)| (spec, true));
    let metrics: Vec<_> = on.chain(catalog.disabled().iter().map(|spec| (spec, false))).collect();
    match form {
        Form::Json => json(catalog, &metrics),
        Form::Markdown => markdown(&rows(catalog, &metrics)),
        Form::Table => table(&rows(catalog, &metrics)),
    }
}

/// Returns what records a metric: the `server`, the `worker` for every backend, the `models`, or
/// other `programs` (StatsD).
fn recorded_by(spec: &MetricSpec) -> &'static str {
    match spec.section {
        _ if spec.builtin.is_some() => "server",
        Section::Model if RECORDED_BY_WORKER.contains(&&*spec.name) || spec.name == STATE_BYTES => {
            "worker"
        }
        Section::Model => "models",
        Section::Frontend => "programs",
    }
}

fn modes(catalog: &Catalog, spec: &MetricSpec) -> Vec<&'static str> {
    let Views { tslog, prometheus } = catalog.views(spec);
    [(tslog, "tslog"), (prometheus, "prometheus")]
        .into_iter()
        .filter_map(|(on, name)| on.then_some(name))
        .collect()
}

/// Returns the help in one line, with the metric's further names.
fn help(spec: &MetricSpec) -> String {
    let help = spec.help.replace('\n', " ");
    let names: Vec<String> = spec.also_as.iter().map(OtherName::shown).collect();
    if names.is_empty() { help } else { format!("{help}; also as {}", names.join(", ")) }
}

fn rows(catalog: &Catalog, metrics: &[(&MetricSpec, bool)]) -> Vec<[String; 8]> {
    metrics
        .iter()
        .map(|(spec, on)| {
            [
                spec.name.clone(),
                spec.kind.as_str().to_owned(),
                spec.unit.clone(),
                spec.dimensions.join(","),
                modes(catalog, spec).join(","),
                if *on { "on" } else { "off" }.to_owned(),
                recorded_by(spec).to_owned(),
                help(spec),
            ]
        })
        .collect()
}

fn table(rows: &[[String; 8]]) -> String {
    let heads = HEADS.map(str::to_owned);
    let mut widths = [0; 8];
    for row in rows.iter().chain([&heads]) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in [&heads].into_iter().chain(rows) {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn markdown(rows: &[[String; 8]]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(&HEADS.map(|head| head.to_lowercase()));
    text.push_str(&line(&HEADS.map(|_| "---".to_owned())));
    for row in rows {
        text.push_str(&line(&row.clone().map(|cell| cell.replace('|', "\\|"))));
    }
    text
}

fn json(catalog: &Catalog, metrics: &[(&MetricSpec, bool)]) -> String {
    let list: Vec<_> = metrics
        .iter()
        .map(|(spec, on)| {
            let mut object = serde_json::json!({
                "name": spec.name,
                "type": spec.kind.as_str(),
                "unit": spec.unit,
                "dimensions": spec.dimensions,
                "modes": modes(catalog, spec),
                "enabled": on,
                "recorded_by": recorded_by(spec),
                "help": spec.help,
            });
            match spec.kind {
                Kind::Histogram => {
                    object["buckets"] = spec.buckets.clone().into();
                    object["native"] = spec.native.map_or(serde_json::Value::Null, native);
                }
                Kind::Summary => object["quantiles"] = spec.quantiles.clone().into(),
                Kind::Counter | Kind::Gauge => {}
            }
            if !spec.also_as.is_empty() {
                let names = spec.also_as.iter().map(|other| {
                    let unit = other.unit.as_ref().unwrap_or(&spec.unit);
                    let mut object = serde_json::json!({ "name": other.name, "unit": unit });
                    if !other.labels.is_empty() {
                        object["labels"] = other.labels.iter().map(label).collect();
                    }
                    object
                });
                object["also_as"] = names.collect();
            }
            object
        })
        .collect();
    format!("{:#}\n", serde_json::Value::Array(list))
}

/// Returns a label of a further name as the file writes it.
fn label(label: &OtherLabel) -> (String, serde_json::Value) {
    let value = match &label.value {
        LabelValue::Of(own) => own.clone().into(),
        LabelValue::Text(text) => serde_json::json!({ "value": text }),
    };
    (label.name.clone(), value)
}

fn native(spec: NativeSpec) -> serde_json::Value {
    let NativeSpec { schema, max_buckets, zero_threshold } = spec;
    serde_json::json!({ "schema": schema, "max_buckets": max_buckets, "zero_threshold": zero_threshold })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TEXT: &str = "
mode: tslog
ts_metrics:
  gauge:
    - {name: CPUUtilization, unit: Percent, dimensions: [Level, Hostname], help: CPU}
    - {name: Own, unit: ms, enabled: false}
model_metrics:
  histogram:
    - {name: Size, unit: B, buckets: [1, 2.5], native: true, modes: [prometheus], help: 'a | b'}
    - {name: Wait, unit: s, buckets: [1], dimensions: [shop], also_as: [wait, {name: wait_ms, \
                        unit: ms, labels: {store: shop, kind: {value: a}}}], help: \
                        Waiting}
";

    #[test]
    fn all_formats_list_the_same_metrics() {
        let catalog = Catalog::parse(TEXT, "m.yaml").unwrap();
        let expected = "\
NAME            TYPE       UNIT     DIMENSIONS      MODES  ON   RECORDED BY  HELP
CPUUtilization  gauge      Percent  Level,Hostname  tslog  on   server       CPU
Size            histogram  B                               on   models       a | b
Wait            histogram  s        shop            tslog  on   models       Waiting; also as \
                        wait, wait_ms (ms)
Own             gauge      ms                       tslog  off  programs     Own (ms)
";
        assert_eq!(list(&catalog, Form::Table), expected);
        let markdown = list(&catalog, Form::Markdown);
        assert!(
            markdown.ends_with("| Own | gauge | ms |  | tslog | off | programs | Own (ms) |\n"),
            "{markdown}"
        );
        assert!(markdown.contains("a \\| b |\n"));
        let json: serde_json::Value = serde_json::from_str(&list(&catalog, Form::Json)).unwrap();
        assert_eq!(json[1]["buckets"], serde_json::json!([1.0, 2.5]));
        assert_eq!((&json[0]["modes"][0], &json[3]["enabled"]), (&"tslog".into(), &false.into()));
        let labels = serde_json::json!({"store": "shop", "kind": {"value": "a"}});
        let names = serde_json::json!([
            {"name": "wait", "unit": "s"},
            {"name": "wait_ms", "unit": "ms", "labels": labels}
        ]);
        assert_eq!((&json[1]["also_as"], &json[2]["also_as"]), (&serde_json::Value::Null, &names));
        assert_eq!((&json[1]["native"]["schema"], json[0].get("native")), (&3.into(), None));
        let expected = "3 metrics (0 counters, 1 gauges, 2 histograms, 0 summaries), 1 switched \
                        off, mode tslog";
        assert_eq!(summary(&catalog), expected);
    }

    #[test]
    fn formats_have_names() {
        assert!(Form::NAMES.iter().all(|name| Form::from_name(name).is_some()));
        assert_eq!(Form::from_name("yaml"), None);
    }
}
