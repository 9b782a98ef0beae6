//! Loads that bring code: only listeners whose clients may run code on this machine accept them.

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::model::Draft;
use pharos::repository::Override;

/// Checks that a load brings nothing that can run code on this machine.
///
/// # Errors
/// It brings files, or a configuration of a model that can run code. The loader reports a configuration that is not valid.
pub(super) fn check(model: &str, sent: &Override) -> Result<(), InferError> {
    let what = if !sent.files.is_empty() {
        "the files of the request can contain code".to_owned()
    } else {
        match Draft::from_json(&sent.config) {
            Ok(draft) if draft.can_run_code() => "the configuration in the request can run code. Without permission, it must \
                 name the backend builtin, onnxruntime or tract, or the platform ensemble or onnxruntime_onnx, even if it changes \
                 only other settings, and must have neither the parameter 'sandbox' nor names of files for ONNX Runtime (libraries \
                 of operators, options of accelerators, entries of the session)"
                .to_owned(),
            _ => return Ok(()),
        }
    };
    let text = format!(
        "failed to load '{model}', {what}. Start the server with '--allow-model-upload=true' or '--management-token-file' to \
         permit it."
    );
    Err(InferError::new(ErrorCode::Unsupported, Reason::Restricted, text))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn refused(config: &str, file: Option<&str>) -> Option<String> {
        let files = file.into_iter().map(|path| (path.into(), Bytes::from_static(b"x"))).collect();
        let refusal = check("m", &Override { config: config.to_owned(), files }).err()?;
        assert_eq!((refusal.code, refusal.reason), (ErrorCode::Unsupported, Reason::Restricted));
        Some(refusal.message)
    }

    #[test]
    fn only_configurations_of_models_without_code_are_permitted() {
        for config in [
            r#"{"backend":"onnxruntime"}"#,
            r#"{"backend":"tract","max_batch_size":4,"parameters":{"x":{"string_value":"y"}}}"#,
            r#"{"backend":"builtin"}"#,
            r#"{"platform":"onnxruntime_onnx"}"#,
            r#"{"platform":"ensemble"}"#,
            r#"{"backend":"onnxruntime","optimization":{"execution_accelerators":{"gpu_execution_accelerator":[{"name":"tensorrt",
                "parameters":{"precision_mode":"FP16"}}]}},"parameters":{"session.x":{"string_value":"y"}}}"#,
            // The loader names what is wrong.
            "{",
        ] {
            assert_eq!(refused(config, None), None, "{config}");
        }
        for config in [
            "{}",
            r#"{"backend":"python"}"#,
            r#"{"backend":"mine"}"#,
            r#"{"platform":"pytorch_libtorch"}"#,
            r#"{"backend":"onnxruntime","parameters":{"sandbox":{"string_value":"off"}}}"#,
            r#"{"backend":"onnxruntime","model_operations":{"op_library_filename":["/tmp/x.so"]}}"#,
            r#"{"backend":"onnxruntime","optimization":{"execution_accelerators":{"gpu_execution_accelerator":[{"name":"tensorrt",
                "parameters":{"trt_extra_plugin_lib_paths":"/tmp/x.so"}}]}}}"#,
            r#"{"backend":"onnxruntime","optimization":{"execution_accelerators":{"cpu_execution_accelerator":[{"name":"openvino",
                "parameters":{"cache_dir":"/tmp"}}]}}}"#,
            r#"{"backend":"onnxruntime","parameters":{"session.collect_node_memory_stats_to_file":{"string_value":"/tmp/x"}}}"#,
        ] {
            let text = refused(config, None).unwrap_or_default();
            assert!(text.starts_with("failed to load 'm', the configuration in the request"), "{config}: {text}");
            assert!(text.contains("--allow-model-upload"), "{config}: {text}");
        }
        let text = refused(r#"{"backend":"onnxruntime"}"#, Some("1/model.onnx")).unwrap_or_default();
        assert!(text.starts_with("failed to load 'm', the files of the request can contain code"), "{text}");
    }
}
