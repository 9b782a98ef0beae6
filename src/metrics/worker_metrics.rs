//! What workers know of the metrics that `metrics.yaml` defines: a short form that the frontend
//! makes once for all of them, so that workers do not parse the file at their start.

use std::io;

use serde::{Deserialize, Serialize};

use super::catalog::{Catalog, MetricSpec, Section};
use super::kind::Kind;

/// One metric. Its text has the defaults of most metrics left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerMetric {
    /// Its name.
    pub name: String,
    /// Its type.
    pub kind: Kind,
    /// Its unit as written in the file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// The names of its labels, in the file's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dimensions: Vec<String>,
    /// Whether the last label is one for the host that the server added: models do not give a
    /// value for it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub host_is_added: bool,
    /// Whether it is in the section for metrics of models.
    #[serde(default, skip_serializing_if = "is_false")]
    pub of_models: bool,
    /// Whether the server records it, so that models may not. Unit and dimensions are then
    /// omitted.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_reserved: bool,
    /// Whether the file switches it off.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_disabled: bool,
}

impl WorkerMetric {
    fn new(spec: &MetricSpec, is_disabled: bool) -> Self {
        let is_reserved = spec.builtin.is_some();
        let (unit, dimensions) = if is_reserved {
            Default::default()
        } else {
            (spec.unit.clone(), spec.dimensions.clone())
        };
        let name = spec.name.clone();
        let of_models = spec.section == Section::Model;
        let host_is_added = spec.host_is_added && !is_reserved;
        Self {
            name,
            kind: spec.kind,
            unit,
            dimensions,
            host_is_added,
            of_models,
            is_reserved,
            is_disabled,
        }
    }
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// All metrics of a catalog, in its order; those that the file switches off follow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerMetrics(pub Vec<WorkerMetric>);

impl WorkerMetrics {
    /// Returns what workers need to know of a catalog.
    pub fn of(catalog: &Catalog) -> Self {
        let active = catalog.iter().map(|(_, spec)| WorkerMetric::new(spec, false));
        Self(
            active
                .chain(catalog.disabled().iter().map(|spec| WorkerMetric::new(spec, true)))
                .collect(),
        )
    }

    /// Returns them as JSON.
    pub fn encode(&self) -> String {
        serde_json::to_string(self).expect("text, enums and flags are valid JSON")
    }

    /// Parses the form of [`WorkerMetrics::encode`].
    ///
    /// # Errors
    /// The text has another form.
    pub fn decode(text: &str) -> io::Result<Self> {
        Ok(serde_json::from_str(text)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn contains_what_models_may_record_and_the_names_that_they_may_not() {
        let text = "ts_metrics:\n  counter:\n    - {name: ts_inference_requests_total, unit: Count, dimensions: [model_name, \
                    model_version, hostname]}\nmodel_metrics:\n  gauge:\n    - {name: Depth, unit: m, dimensions: [sea, Hostname]}\n  \
                    counter:\n    - {name: Off, unit: Count, dimensions: [Hostname], enabled: false}\n";
        let metrics = WorkerMetrics::of(&Catalog::parse(text, "m.yaml").unwrap());
        let expected = "[{\"name\":\"ts_inference_requests_total\",\"kind\":\"counter\",\"is_reserved\":true},\
                        {\"name\":\"Depth\",\"kind\":\"gauge\",\"unit\":\"m\",\"dimensions\":[\"sea\",\"Hostname\"],\"of_models\":true},\
                        {\"name\":\"Off\",\"kind\":\"counter\",\"unit\":\"Count\",\"dimensions\":[\"Hostname\"],\"of_models\":true,\
                        \"is_disabled\":true}]";
        assert_eq!(metrics.encode(), expected);
        assert_eq!(WorkerMetrics::decode(expected).unwrap(), metrics);
        for other in ["", "mode: both", "[{}]", "[{\"name\":\"a\",\"kind\":\"none\"}]"] {
            assert!(WorkerMetrics::decode(other).is_err(), "{other}");
        }
    }

    #[test]
    fn the_shipped_definition_is_short() {
        let text = WorkerMetrics::of(&Catalog::shipped()).encode();
        assert!(text.len() < 32 << 10, "{}", text.len());
    }
}
