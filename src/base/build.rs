//! Compiles the schemas of the OpenTelemetry protocol with a protobuf compiler written in Rust: the
//! types for `otlp.rs`.

use std::error::Error;

/// The published schemas of OTLP 1.10.0 (github.com/open-telemetry/opentelemetry-proto,
/// Apache-2.0), unchanged.
const OTLP: [&str; 2] = [
    "opentelemetry/proto/collector/metrics/v1/metrics_service.proto",
    "opentelemetry/proto/collector/trace/v1/trace_service.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../../proto/opentelemetry");
    let mut descriptors = protox::compile(OTLP, ["../../proto"])?;
    for file in &mut descriptors.file {
        // Their comments contain indented text, which rustdoc would compile as tests.
        file.source_code_info = None;
    }
    prost_build::Config::new().include_file("otlp.rs").compile_fds(descriptors)?;
    Ok(())
}
