//! The worker of text models, with ONNX Runtime.

use std::process::ExitCode;

use pharos_worker::Worker;

fn main() -> ExitCode {
    Worker::new().backend("text", pharos_text::on_onnx_runtime).run()
}
