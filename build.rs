//! Compiles the schemas with a protobuf compiler written in Rust, so that no `protoc` is needed: the model configuration's,
//! Rust types for `src/model/proto.rs` and the descriptors that the text format and JSON are read and written with, those of
//! the OpenTelemetry protocol, types for `src/otlp.rs`, and load reports, types for `src/load_report/message.rs`. Also makes a table
//! of the metrics in `metrics.yaml` for `src/metrics/builtin.rs`.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;
use serde_yaml::Value;

/// The published schemas of OTLP 1.10.0 (github.com/open-telemetry/opentelemetry-proto, Apache-2.0), unchanged.
const OTLP: [&str; 2] = [
    "proto/opentelemetry/proto/collector/metrics/v1/metrics_service.proto",
    "proto/opentelemetry/proto/collector/trace/v1/trace_service.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=proto/model_config.proto");
    println!("cargo:rerun-if-changed=proto/opentelemetry");
    println!("cargo:rerun-if-changed=proto/xds/data/orca/v3/orca_load_report.proto");
    let mut descriptors = protox::compile(["proto/model_config.proto"], ["proto"])?;
    for file in &mut descriptors.file {
        // Comments and positions are of no use at run time.
        file.source_code_info = None;
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run this through cargo")?);
    std::fs::write(out.join("model_config.bin"), descriptors.encode_to_vec())?;
    // Sorted maps: the same configuration always has the same bytes and the same JSON.
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    let mut descriptors = protox::compile(OTLP, ["proto"])?;
    for file in &mut descriptors.file {
        // Their comments contain indented text, which rustdoc would compile as tests.
        file.source_code_info = None;
    }
    prost_build::Config::new().include_file("otlp.rs").compile_fds(descriptors)?;
    let load_report = protox::compile(["xds/data/orca/v3/orca_load_report.proto"], ["proto"])?;
    // Sorted maps: the same report always has the same bytes.
    prost_build::Config::new().btree_map(["."]).compile_fds(load_report)?;
    println!("cargo:rerun-if-changed=metrics.yaml");
    let metrics = serde_yaml::from_str(&std::fs::read_to_string("metrics.yaml")?)?;
    std::fs::write(out.join("shipped.rs"), shipped(&metrics).ok_or("metrics.yaml has another form")?)?;
    Ok(())
}

/// Returns the constant `SHIPPED` of `src/metrics/builtin.rs`: the metrics of the shipped `metrics.yaml`.
fn shipped(file: &Value) -> Option<String> {
    let mut text = String::from("const SHIPPED: &[Definition] = &[\n");
    for section in ["ts_metrics", "model_metrics"] {
        for (kind, metrics) in file.get(section)?.as_mapping()? {
            let kind = kind.as_str()?;
            for metric in metrics.as_sequence()? {
                let list = |key: &str| metric.get(key).and_then(Value::as_sequence).into_iter().flatten();
                let name = metric.get("name")?.as_str()?;
                let labels: Vec<&str> = list("dimensions").map(Value::as_str).collect::<Option<_>>()?;
                let buckets: Vec<f64> = list("buckets").map(Value::as_f64).collect::<Option<_>>()?;
                let unit = match metric.get("unit")?.as_str()? {
                    unit @ ("Seconds" | "Milliseconds" | "Microseconds") if matches!(kind, "histogram" | "summary") => {
                        format!("Some(TimeUnit::{unit})")
                    }
                    _ => "None".to_owned(),
                };
                let kind = kind[..1].to_uppercase() + &kind[1..];
                text += &format!(
                    "    Definition {{ name: {name:?}, kind: Kind::{kind}, labels: &{labels:?}, unit: {unit}, buckets: &{buckets:?} }},\n"
                );
            }
        }
    }
    Some(text + "];\n")
}
