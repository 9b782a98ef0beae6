//! The environment variables that the programs of models inherit. Others stay with the server: credentials of object stores and
//! clouds, tokens, and passwords in the server's own settings.

/// Variables of the system.
const NAMES: [&str; 24] = [
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "CURL_CA_BUNDLE",
    "ENABLE_TORCH_PROFILER",
    "HOME",
    "HOSTNAME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOGNAME",
    "NLTK_DATA",
    "PATH",
    "PWD",
    "REQUESTS_CA_BUNDLE",
    "SENTENCE_TRANSFORMERS_HOME",
    "SHELL",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TEMP",
    "TMP",
    "TMPDIR",
    "TZ",
    "USER",
];

/// The beginnings of the names of variables: of the locale, of Python and its environments, of thread pools and allocators, of
/// GPUs, of machine learning frameworks, and of the containers of SageMaker and Vertex AI.
const FAMILIES: [&str; 51] = [
    "AIP_",
    "BLIS_",
    "CONDA_",
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "GOMP_",
    "GOTO_",
    "HF_",
    "HIP_",
    "HSA_",
    "JAX_",
    "JEMALLOC",
    "KMP_",
    "LC_",
    "LIGHTGBM_",
    "MALLOC_",
    "MIMALLOC_",
    "MIOPEN_",
    "MKL_",
    "NCCL_",
    "NUMBA_",
    "NUMEXPR_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "OPENVINO_",
    "ORT_",
    "PYENV_",
    "PYTHON",
    "PYTORCH_",
    "ROCM_",
    "ROCR_",
    "RUST_",
    "SAGEMAKER_",
    "SM_",
    "TCMALLOC_",
    "TF_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "TS_IPEX_",
    "TVM_",
    "VECLIB_",
    "VIRTUAL_ENV",
    "VLLM_",
    "XDG_",
    "XLA_",
];

/// Parts of names of credentials, which are not inherited even if they belong to a family: `HF_TOKEN`, `VLLM_API_KEY`.
const SECRETS: [&str; 6] = ["API_KEY", "CREDENTIAL", "PASSWORD", "PRIVATE", "SECRET", "_TOKEN"];

/// Returns whether the programs of models inherit a variable of this name.
pub fn is_inherited(name: &str) -> bool {
    let is_secret = SECRETS.iter().any(|part| name.contains(part));
    NAMES.contains(&name) || (FAMILIES.iter().any(|family| name.starts_with(family)) && !is_secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_not_inherited() {
        for name in [
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
            "AWS_SESSION_TOKEN",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AZURE_STORAGE_ACCOUNT_KEY",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "PHAROS_HTTP_RESTRICTED_API",
            "HF_TOKEN",
            "VLLM_API_KEY",
            "KUBERNETES_SERVICE_HOST",
            "HTTPS_PROXY",
            "DATABASE_URL",
            "path",
        ] {
            assert!(!is_inherited(name), "{name}");
        }
        let inherited = [
            "PATH",
            "LC_ALL",
            "PYTHONPATH",
            "CUDA_VISIBLE_DEVICES",
            "OMP_NUM_THREADS",
            "HF_HOME",
            "TOKENIZERS_PARALLELISM",
        ];
        assert_eq!(inherited.iter().find(|name| !is_inherited(name)), None);
    }
}
