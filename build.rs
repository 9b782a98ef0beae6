//! Compiles the schemas with a protobuf compiler written in Rust, so that no `protoc` is needed: of
//! the model configuration, Rust types for `src/model/proto.rs` and the descriptors that the text
//! format and JSON are read and written with; of load reports, types for `src/load_report/message.
//! rs`.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=proto/model_config.proto");
    println!("cargo:rerun-if-changed=proto/xds/data/orca/v3/orca_load_report.proto");
    let mut descriptors = protox::compile(["proto/model_config.proto"], ["proto"])?;
    for file in &mut descriptors.file {
        // Comments and positions are of no use at run time.
        file.source_code_info = None;
    }
    let out = PathBuf::from(
        std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run this through cargo")?,
    );
    std::fs::write(out.join("model_config.bin"), descriptors.encode_to_vec())?;
    // Sorted maps: the same configuration always has the same bytes and the same JSON.
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    let load_report = protox::compile(["xds/data/orca/v3/orca_load_report.proto"], ["proto"])?;
    // Sorted maps: the same report always has the same bytes.
    prost_build::Config::new().btree_map(["."]).compile_fds(load_report)?;
    Ok(())
}
