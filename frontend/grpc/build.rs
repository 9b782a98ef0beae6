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
        // The core renders a model's configuration as bytes; the edge only wraps them.
        .extern_path(".inference.ModelConfig", "crate::raw::RawModelConfig")
        .compile_fds(files)?;
    Ok(())
}
