//! Backends and platforms of Triton that this server does not have, and what serves their models instead.

/// What to do with a model of this backend or platform, as a sentence; empty if the name is not known.
pub fn backend_advice(name: &str) -> &'static str {
    match name {
        "tensorflow" | "tensorflow_savedmodel" | "tensorflow_graphdef" => {
            "TensorFlow models are served as ONNX: `python -m tf2onnx.convert --saved-model DIR --output model.onnx` \
             exports one (--graphdef FILE --inputs NAMES --outputs NAMES for a graph); then backend: \"onnxruntime\""
        }
        "tensorrt" | "tensorrt_plan" => {
            "TensorRT plans are not read: serve the ONNX file that the plan was built from with backend: \"onnxruntime\" and \
             optimization { execution_accelerators { gpu_execution_accelerator: [ { name: \"tensorrt\" } ] } }"
        }
        "openvino" => {
            "OpenVINO's own files are not read: export the model to ONNX (PyTorch: `torch.onnx.export`, TensorFlow: `python -m \
             tf2onnx.convert`) and serve it with backend: \"onnxruntime\" and optimization { execution_accelerators { \
             cpu_execution_accelerator: [ { name: \"openvino\" } ] } }"
        }
        "caffe2_netdef" | "caffe2" => "Caffe2 models are served as ONNX; then backend: \"onnxruntime\"",
        "fil" => "tree models are served by backend: \"xgboost\" (model.json, model.ubj) or \"sklearn\" (model.joblib)",
        "vllm" | "tensorrtllm" | "dali" => {
            "models of this kind are served by code: a model.py that uses the library, with backend: \"python\""
        }
        _ => "",
    }
}

/// The advice as the end of a message.
pub(super) fn advice_clause(name: &str) -> String {
    match backend_advice(name) {
        "" => String::new(),
        advice => format!("; {advice}"),
    }
}
