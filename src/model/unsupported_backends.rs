//! Backends and platforms of Triton that are not part of this server, and how to serve their models
//! without Triton's libraries.

/// How the names of the libraries of Triton's backends begin.
pub const TRITON_LIBRARY: &str = "libtriton_";

/// Returns the library of a backend of Triton that the field `runtime` of a configuration names;
/// other values of the field have no effect.
pub(super) fn library(runtime: &str) -> Option<&str> {
    runtime.starts_with(TRITON_LIBRARY).then_some(runtime)
}

/// Returns advice for a model of this backend or platform, as a sentence; empty if the name is not
/// known.
pub fn backend_advice(name: &str) -> &'static str {
    match name {
        "tensorflow" | "tensorflow_savedmodel" | "tensorflow_graphdef" => {
            "convert TensorFlow models to ONNX with `python -m tf2onnx.convert --saved-model DIR \
             --output model.onnx` (--graphdef FILE --inputs NAMES --outputs NAMES for a graph); \
             then set backend: \"onnxruntime\""
        }
        "tensorrt" | "tensorrt_plan" => {
            "TensorRT plans need Triton's library in a backend directory; without it, serve the \
             ONNX file that the plan was built from with backend: \"onnxruntime\" and optimization \
             { execution_accelerators { gpu_execution_accelerator: [ { name: \"tensorrt\" } ] } }"
        }
        "openvino" => {
            "OpenVINO's own files need Triton's library in a backend directory; without it, export \
             the model to ONNX (PyTorch: `torch.onnx.export`, TensorFlow: `python -m \
             tf2onnx.convert`) and serve it with \
             backend: \"onnxruntime\" and optimization { execution_accelerators { \
             cpu_execution_accelerator: [ { name: \"openvino\" } ] } }"
        }
        "caffe2_netdef" | "caffe2" => {
            "convert Caffe2 models to ONNX; then set backend: \"onnxruntime\""
        }
        "fil" => {
            "without Triton's library, serve tree models with backend: \"xgboost\" (model.json, \
             model.ubj) or \"sklearn\" (model.joblib)"
        }
        "tract" => {
            "the backend tract is built separately: `make tract` in the sources of the server; ONNX \
             models run without it if ONNX Runtime is installed"
        }
        "llamacpp" => {
            "the backend llamacpp is built separately: `make llamacpp` in the sources of the server \
             builds it and installs it there"
        }
        "text" => {
            "the backend text is built separately: `make text` in the sources of the server builds it \
             and installs it there"
        }
        "tensorrtllm" | "dali" => {
            "without Triton's library, serve models of this kind with a model.py that uses the \
             library of the models, and backend: \"python\""
        }
        _ => "",
    }
}

/// Returns the advice as the end of a message.
pub(super) fn advice_clause(name: &str) -> String {
    match backend_advice(name) {
        "" => String::new(),
        advice => format!("; {advice}"),
    }
}
