//! The parts of a configuration that clients see: the metadata, and the JSON form of the model
//! configuration extension.

use std::fmt::Write;

use prost_reflect::{DynamicMessage, Kind, MapKey, ReflectMessage, Value};

use super::{ModelConfig, TensorSpec, proto};

/// The model metadata of the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelMetadata {
    /// The model's name.
    pub name: String,
    /// The versions that are ready, as text.
    pub versions: Vec<String>,
    /// The platform, or the backend's name if the model has no platform.
    pub platform: String,
    /// Inputs.
    pub inputs: Vec<TensorMetadata>,
    /// Outputs.
    pub outputs: Vec<TensorMetadata>,
}

/// One input or output of [`ModelMetadata`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMetadata {
    /// Its name.
    pub name: String,
    /// The protocol's name of its datatype.
    pub datatype: &'static str,
    /// Its shape; -1 for variable dimensions, including the batch.
    pub shape: Vec<i64>,
}

impl ModelConfig {
    /// Returns the metadata. `versions` are those that are ready.
    pub fn metadata(&self, versions: &[u64]) -> ModelMetadata {
        let tensor = |spec: &TensorSpec| TensorMetadata {
            name: spec.name.clone(),
            datatype: spec.datatype.name(),
            shape: self.full_shape(spec),
        };
        ModelMetadata {
            name: self.name.clone(),
            versions: versions.iter().map(u64::to_string).collect(),
            platform: if self.platform.is_empty() {
                self.backend.clone()
            } else {
                self.platform.clone()
            },
            inputs: self.inputs.iter().map(tensor).collect(),
            outputs: self.outputs.iter().map(tensor).collect(),
        }
    }

    /// Returns the shape of a tensor in requests: the batch dimension, if the model batches, and
    /// the other dimensions.
    pub fn full_shape(&self, spec: &TensorSpec) -> Vec<i64> {
        let batch = self.batches().then_some(-1);
        batch.into_iter().chain(spec.dims.iter().copied()).collect()
    }

    /// Returns the completed configuration as JSON: field names and order of the schema, explicit
    /// defaults, enum values by name, all integers as numbers, sorted map keys.
    pub fn to_json(&self) -> String {
        json(&self.proto)
    }
}

/// See [`ModelConfig::to_json`].
pub(super) fn json(config: &proto::ModelConfig) -> String {
    let mut out = String::with_capacity(2048);
    write_message(&mut out, &proto::to_dynamic(config));
    out
}

fn write_message(out: &mut String, message: &DynamicMessage) {
    let descriptor = message.descriptor();
    // The descriptor's iterator is ordered by field number; clients expect the order of
    // declaration.
    let fields = descriptor
        .descriptor_proto()
        .field
        .iter()
        .filter_map(|raw| descriptor.get_field_by_name(raw.name()));
    let present = fields.filter(|field| !field.supports_presence() || message.has_field(field));
    write_joined(out, '{', '}', present, |out, field| {
        write_string(out, field.name());
        out.push(':');
        match message.get_field(&field).as_ref() {
            Value::List(list) => write_joined(out, '[', ']', list, |out, value| {
                write_value(out, &field.kind(), value)
            }),
            Value::Map(map) => {
                let mut entries: Vec<(&MapKey, &Value)> = map.iter().collect();
                entries.sort_unstable_by(|a, b| a.0.cmp(b.0));
                let kind = value_kind(&field.kind());
                write_joined(out, '{', '}', entries, |out, (key, value)| {
                    write_key(out, key);
                    out.push(':');
                    write_value(out, &kind, value);
                });
            }
            value => write_value(out, &field.kind(), value),
        }
    });
}

fn write_joined<T>(
    out: &mut String,
    open: char,
    close: char,
    items: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut String, T),
) {
    out.push(open);
    for (index, item) in items.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        write(out, item);
    }
    out.push(close);
}

/// Returns the kind of a map field's values. The field's own kind is the message of an entry.
fn value_kind(entry: &Kind) -> Kind {
    let value = entry.as_message().and_then(|entry| entry.get_field_by_name("value"));
    value.map_or_else(|| entry.clone(), |field| field.kind())
}

fn write_value(out: &mut String, kind: &Kind, value: &Value) {
    match value {
        Value::Bool(value) => write_display(out, value),
        Value::I32(value) => write_display(out, value),
        Value::I64(value) => write_display(out, value),
        Value::U32(value) => write_display(out, value),
        Value::U64(value) => write_display(out, value),
        Value::F32(value) if value.is_finite() => write_display(out, value),
        Value::F64(value) if value.is_finite() => write_display(out, value),
        Value::F32(value) => write_not_finite(out, f64::from(*value)),
        Value::F64(value) => write_not_finite(out, *value),
        Value::String(value) => write_string(out, value),
        Value::EnumNumber(number) => {
            let value = if let Kind::Enum(kind) = kind { kind.get_value(*number) } else { None };
            match value {
                Some(value) => write_string(out, value.name()),
                None => write_display(out, number),
            }
        }
        Value::Message(message) => write_message(out, message),
        // The schema has neither `bytes` fields nor lists within lists.
        Value::Bytes(_) | Value::List(_) | Value::Map(_) => out.push_str("null"),
    }
}

fn write_key(out: &mut String, key: &MapKey) {
    match key {
        MapKey::Bool(key) => write_string(out, &key.to_string()),
        MapKey::I32(key) => write_string(out, &key.to_string()),
        MapKey::I64(key) => write_string(out, &key.to_string()),
        MapKey::U32(key) => write_string(out, &key.to_string()),
        MapKey::U64(key) => write_string(out, &key.to_string()),
        MapKey::String(key) => write_string(out, key),
    }
}

/// Writes a number that JSON cannot represent as a string, as in protobuf's JSON mapping.
fn write_not_finite(out: &mut String, value: f64) {
    let name = if value.is_nan() {
        "NaN"
    } else if value > 0.0 {
        "Infinity"
    } else {
        "-Infinity"
    };
    write_string(out, name);
}

fn write_display(out: &mut String, value: impl std::fmt::Display) {
    // Writing to a String does not fail.
    let _ = write!(out, "{value}");
}

fn write_string(out: &mut String, text: &str) {
    out.push_str(&serde_json::Value::from(text).to_string());
}
