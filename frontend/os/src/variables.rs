//! The environment variables that the programs of models inherit. Others stay with the server:
//! credentials of object stores and clouds, tokens, and passwords in the server's own settings.

/// Variables of the system, of distributed programs, and single ones of libraries.
const NAMES: [&str; 33] = [
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "CURL_CA_BUNDLE",
    "ENABLE_TORCH_PROFILER",
    "GLIBC_TUNABLES",
    "HOME",
    "HOSTNAME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOCAL_RANK",
    "LOGNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MODELSCOPE_CACHE",
    "NLTK_DATA",
    "NO_PROXY",
    "PATH",
    "PWD",
    "RANK",
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
    "WORLD_SIZE",
    "no_proxy",
];

/// The beginnings of the names of variables: of the locale, of Python and its environments, of
/// thread pools and allocators, of GPUs, of machine learning frameworks, and of the containers of
/// SageMaker and Vertex AI.
const FAMILIES: [&str; 66] = [
    "AIP_",
    "BLIS_",
    "CONDA_",
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "CUPY_",
    "DNNL_",
    "FLAGS_",
    "GLOO_",
    "GOMP_",
    "GOTO_",
    "HF_",
    "HIP_",
    "HSA_",
    "JAX_",
    "JEMALLOC",
    "JOBLIB_",
    "KERAS_",
    "KMP_",
    "LC_",
    "LIGHTGBM_",
    "LOKY_",
    "MALLOC_",
    "MIMALLOC_",
    "MIOPEN_",
    "MKL_",
    "MPL",
    "NCCL_",
    "NEURON_",
    "NUMBA_",
    "NUMEXPR_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "OPENCV_",
    "OPENVINO_",
    "ORT_",
    "PADDLE_",
    "PYENV_",
    "PYTHON",
    "PYTORCH_",
    "ROCM_",
    "ROCR_",
    "RUST_",
    "SAGEMAKER_",
    "SCIPY_",
    "SKLEARN_",
    "SM_",
    "TCMALLOC_",
    "TFHUB_",
    "TF_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "TS_IPEX_",
    "TS_REQUEST_SEQUENCE_",
    "TVM_",
    "UCX_",
    "VECLIB_",
    "VIRTUAL_ENV",
    "VLLM_",
    "XDG_",
    "XLA_",
];

/// Words in names of credentials, which are not inherited even if they belong to a family:
/// `HF_TOKEN`, `VLLM_API_KEY`.
const SECRETS: [&str; 8] =
    ["APIKEY", "CREDENTIAL", "CREDENTIALS", "KEY", "PASSWORD", "PRIVATE", "SECRET", "TOKEN"];

/// Returns whether the programs of models inherit a variable of this name.
pub fn is_inherited(name: &str) -> bool {
    let is_secret = name.split('_').any(|word| SECRETS.contains(&word));
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
            "PYTHON_KEYRING_PASSWORD",
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
