//! Generates TorchServe's gRPC services from `proto/` with a protobuf compiler written in Rust: no
//! `protoc` is needed.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Relative to the package: a build folder shared by several clones must not contain absolute
    // paths.
    let proto = Path::new("../../proto");
    let own = ["torchserve_inference.proto", "torchserve_management.proto"];
    for file in own.into_iter().chain(["google/rpc/status.proto"]) {
        println!("cargo:rerun-if-changed={}", proto.join(file).display());
    }
    tonic_prost_build::configure()
        .build_client(false)
        .build_transport(false)
        .use_arc_self(true)
        .emit_rerun_if_changed(false)
        .bytes(".")
        .btree_map(".")
        .codec_path("pharos_listener::receiving::grpc::bounded::FlatCodec")
        .extern_path(".google.rpc.Status", "crate::grpc::RpcStatus")
        .compile_fds(protox::compile(own, [proto])?)?;
    Ok(())
}
