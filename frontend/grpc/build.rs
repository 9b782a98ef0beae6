//! Generates the gRPC service from `proto/` with a protobuf compiler written in Rust: no `protoc`
//! is needed.

use std::path::{Path, PathBuf};

use prost::Message;
use protox::prost_reflect::prost_types::FileDescriptorSet;
use protox::prost_reflect::prost_types::field_descriptor_proto::Type;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Relative to the package, where cargo runs this script: clones that share a build directory
    // have no common absolute path.
    let proto = Path::new("../../proto");
    let own = ["grpc_service.proto"];
    for file in own.into_iter().chain(["model_config.proto"]) {
        println!("cargo:rerun-if-changed={}", proto.join(file).display());
    }
    let mut files = protox::compile(own, [proto])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("grpc_service.bin"), files.encode_to_vec())?;
    leave_contents_encoded(&mut files)?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_transport(false)
        .use_arc_self(true)
        .emit_rerun_if_changed(false)
        .bytes(".")
        .btree_map(".")
        .codec_path("crate::codec::RequestCodec")
        // The core renders a model's configuration as bytes; the edge only wraps them.
        .extern_path(".inference.ModelConfig", "crate::raw::RawMessage")
        .compile_fds(files)?;
    load_reports(&out, proto)
}

/// Makes the typed contents of an input a field of bytes, which has the same encoding as a message:
/// so they are not decoded with the request, on a thread that serves sockets, but when they are
/// converted.
fn leave_contents_encoded(files: &mut FileDescriptorSet) -> Result<(), &'static str> {
    let messages = files.file.iter_mut().flat_map(|file| &mut file.message_type);
    let inner = messages
        .filter(|message| message.name() == "ModelInferRequest")
        .flat_map(|message| &mut message.nested_type);
    let mut fields =
        inner.filter(|inner| inner.name() == "InferInputTensor").flat_map(|inner| &mut inner.field);
    let contents = fields
        .find(|field| field.name() == "contents")
        .ok_or("InferInputTensor has no field `contents`")?;
    contents.set_type(Type::Bytes);
    contents.type_name = None;
    contents.proto3_optional = Some(true);
    Ok(())
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
