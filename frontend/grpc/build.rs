//! Generates the gRPC service from `proto/` with a protobuf compiler written in Rust: no `protoc` is needed.

use std::path::{Path, PathBuf};

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Relative to the package, where cargo runs this script: clones that share a build directory have no common absolute path.
    let proto = Path::new("../../proto");
    let own = ["grpc_service.proto"];
    for file in own.into_iter().chain(["model_config.proto"]) {
        println!("cargo:rerun-if-changed={}", proto.join(file).display());
    }
    let files = protox::compile(own, [proto])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("grpc_service.bin"), files.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_transport(false)
        .use_arc_self(true)
        .emit_rerun_if_changed(false)
        .bytes(".")
        .btree_map(".")
        .codec_path("pharos_listener::receiving::grpc::bounded::BoundedCodec")
        // The core renders a model's configuration as bytes; the edge only wraps them.
        .extern_path(".inference.ModelConfig", "crate::raw::RawMessage")
        .compile_fds(files)?;
    load_reports(&out, proto)
}

/// Generates the service of load reports. Its descriptors are for reflection.
fn load_reports(out: &Path, proto: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let own = "xds/service/orca/v3/orca.proto";
    for file in [own, "xds/data/orca/v3/orca_load_report.proto"] {
        println!("cargo:rerun-if-changed={}", proto.join(file).display());
    }
    let files = protox::compile([own], [proto])?;
    std::fs::write(out.join("orca.bin"), files.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_transport(false)
        .use_arc_self(true)
        .emit_rerun_if_changed(false)
        // The core encodes reports; the edge only wraps them.
        .extern_path(".xds.data.orca.v3.OrcaLoadReport", "crate::raw::RawMessage")
        .extern_path(".google.protobuf.Duration", "crate::load_report::Duration")
        .compile_fds(files)?;
    Ok(())
}
