//! Declares the C interface of backends in Rust, from its header.

use std::path::PathBuf;

const HEADER: &str = "../include/pharos_backend.h";

fn main() {
    println!("cargo:rerun-if-changed={HEADER}");
    if std::env::var_os("CARGO_FEATURE_VARIANTS").is_some() {
        // The libraries of llama.cpp are in the directory of this one.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-rpath,$ORIGIN");
    }
    let bindings = bindgen::Builder::default()
        .header(HEADER)
        .allowlist_item("(pharos|PHAROS)_.*")
        .prepend_enum_name(false)
        .derive_debug(false)
        .derive_default(false)
        .generate()
        .expect("the header of backends cannot be read");
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings.write_to_file(folder.join("interface.rs")).expect("OUT_DIR is writable");
}
