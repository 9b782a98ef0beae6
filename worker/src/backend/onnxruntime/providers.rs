//! The execution providers of a session on a GPU: CUDA's, preceded by TensorRT's if the model asks
//! for it. They are separate libraries beside ONNX Runtime's (`pip install onnxruntime-gpu`),
//! loaded together with a model.
//!
//! The options have the names of Triton's backend for ONNX Runtime:
//! `optimization.execution_accelerators` with `gpu_execution_accelerator` of the names `tensorrt`
//! and `cuda`, and parameters of the model for the CUDA provider. Options with a provider's own
//! names are passed on unchanged, except for those that select the device or stream.
//!
//! Contract for `unsafe`: the stream given to the providers lives until their sessions are dropped.

use ort::ep::{
    ArbitrarilyConfigurableExecutionProvider, CUDA, ExecutionProviderDispatch, OpenVINO, TensorRT,
};
use pharos::model::ModelConfig;

/// Options of the CUDA provider that only the server sets.
const OWN: [&str; 3] = ["device_id", "has_user_compute_stream", "user_compute_stream"];

/// The options that make a provider replay a batch's kernels with the addresses of an earlier
/// batch.
const GRAPHS: [&str; 2] = ["enable_cuda_graph", "trt_cuda_graph_enable"];

/// The options of the CUDA provider that are parameters of a model, as in Triton.
const OF_MODEL: [&str; 4] =
    ["cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "use_tf32"];

/// A provider, with its options by ONNX Runtime's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Provider {
    pub(super) is_tensorrt: bool,
    pub(super) options: Vec<(String, String)>,
}

/// Returns the providers of a model on the process's device 0, by preference; CUDA's is always the
/// last.
///
/// # Errors
/// An unknown accelerator or parameter; the text names it and what is allowed.
pub(super) fn of(config: &ModelConfig) -> Result<Vec<Provider>, String> {
    let mut cuda = vec![("device_id".to_owned(), "0".to_owned())];
    for key in OF_MODEL {
        if let Some(value) = config.parameters.get(key) {
            cuda.push(cuda_option(key, value)?);
        }
    }
    let mut tensorrt = None;
    for (name, given) in config.gpu_accelerators() {
        match name {
            "tensorrt" => {
                let own = given.into_iter().map(|(key, value)| tensorrt_option(key, value));
                let mut options = vec![("device_id".to_owned(), "0".to_owned())];
                for option in own.collect::<Result<Vec<_>, _>>()? {
                    options.extend(option);
                }
                tensorrt = Some(Provider { is_tensorrt: true, options });
            }
            "cuda" => {
                for (key, value) in given {
                    cuda.push(cuda_option(key, value)?);
                }
            }
            other => {
                return Err(format!(
                    "the gpu_execution_accelerator '{other}' is not known; allowed are cuda, \
                     tensorrt"
                ));
            }
        }
    }
    Ok(tensorrt.into_iter().chain([Provider { is_tensorrt: false, options: cuda }]).collect())
}

/// Returns the providers of a model on processors: OpenVINO, with its option names. An unusable
/// provider is an error.
pub(super) fn of_processors(config: &ModelConfig) -> Vec<ExecutionProviderDispatch> {
    let mut providers = Vec::new();
    for (_, given) in config.cpu_accelerators().filter(|(name, _)| *name == "openvino") {
        let options: Vec<(String, String)> =
            given.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        providers.push(with_options(OpenVINO::default(), &options).build().error_on_failure());
    }
    providers
}

/// Converts an option of the CUDA provider. Triton's numbers for the search and the strategy become
/// the provider's words.
fn cuda_option(key: &str, value: &str) -> Result<(String, String), String> {
    let one_of = |words: &[&str]| {
        let number = value.parse::<usize>().ok().and_then(|number| words.get(number).copied());
        let word = words.iter().copied().find(|word| word.eq_ignore_ascii_case(value));
        number.or(word).map(str::to_owned).ok_or_else(|| {
            format!(
                "'{key}' is '{value}'; allowed are 0 to {} and {}",
                words.len() - 1,
                words.join(", ")
            )
        })
    };
    let value = match key {
        _ if OWN.contains(&key) => {
            return Err(format!("'{key}' cannot be set for cuda: the server sets it"));
        }
        "cudnn_conv_algo_search" => one_of(&["EXHAUSTIVE", "HEURISTIC", "DEFAULT"])?,
        "arena_extend_strategy" => one_of(&["kNextPowerOfTwo", "kSameAsRequested"])?,
        "gpu_mem_limit" => match value.parse::<u64>() {
            Ok(bytes) if bytes > 0 => value.to_owned(),
            _ => {
                return Err(format!(
                    "'{key}' is '{value}'; allowed are whole numbers of bytes from 1 on"
                ));
            }
        },
        _ => value.to_owned(),
    };
    let key = if key == "use_cuda_graph" { "enable_cuda_graph" } else { key };
    Ok((key.to_owned(), value))
}

/// Converts one of Triton's parameters to options of the TensorRT provider.
fn tensorrt_option(key: &str, value: &str) -> Result<Vec<(String, String)>, String> {
    let named = |name: &str| vec![(name.to_owned(), value.to_owned())];
    Ok(match key {
        "precision_mode" => match value {
            "FP32" => Vec::new(),
            "FP16" => vec![("trt_fp16_enable".to_owned(), "1".to_owned())],
            "INT8" => vec![("trt_int8_enable".to_owned(), "1".to_owned())],
            _ => {
                return Err(format!(
                    "'{key}' of tensorrt is '{value}'; allowed are FP32, FP16, INT8"
                ));
            }
        },
        "max_workspace_size_bytes" => named("trt_max_workspace_size"),
        "minimum_segment_size" => named("trt_min_subgraph_size"),
        "int8_calibration_table_name" => named("trt_int8_calibration_table_name"),
        "int8_use_native_calibration_table" => named("trt_int8_use_native_calibration_table"),
        // From a Triton that converted graphs itself.
        "max_cached_engines" => Vec::new(),
        _ if key.starts_with("trt_") => named(key),
        _ => {
            return Err(format!(
                "'{key}' is not a parameter of tensorrt; allowed are precision_mode, \
                 max_workspace_size_bytes, minimum_segment_size, int8_calibration_table_name, \
                 int8_use_native_calibration_table, and names that begin with trt_"
            ));
        }
    })
}

/// Removes options that enable CUDA graphs; returns whether there were any. A graph replays one
/// batch's addresses, but here each batch has different addresses.
pub(super) fn drop_graphs(providers: &mut [Provider]) -> bool {
    let mut any = false;
    for provider in providers {
        provider.options.retain(|(key, value)| {
            let is_graph = GRAPHS.contains(&key.as_str())
                && !["0", "false", "False"].contains(&value.as_str());
            any |= is_graph;
            !is_graph
        });
    }
    any
}

/// Returns the providers for a session, computing in this stream of the driver. An unusable
/// provider is an error.
///
/// # Safety
/// The stream lives until the sessions created with them are dropped.
pub(super) unsafe fn dispatches(
    providers: &[Provider],
    stream: usize,
) -> Vec<ExecutionProviderDispatch> {
    let stream = std::ptr::with_exposed_provenance_mut(stream);
    let mut dispatches = Vec::with_capacity(providers.len());
    for provider in providers {
        let built = match provider.is_tensorrt {
            // SAFETY: the caller guarantees it.
            true => with_options(
                unsafe { TensorRT::default().with_compute_stream(stream) },
                &provider.options,
            )
            .build(),
            // SAFETY: as above.
            false => with_options(
                unsafe { CUDA::default().with_compute_stream(stream) },
                &provider.options,
            )
            .build(),
        };
        dispatches.push(built.error_on_failure());
    }
    dispatches
}

/// Returns the providers for a session, each of which makes its stream itself. An unusable
/// provider is an error.
pub(super) fn own_streams(providers: &[Provider]) -> Vec<ExecutionProviderDispatch> {
    let built = providers.iter().map(|provider| match provider.is_tensorrt {
        true => with_options(TensorRT::default(), &provider.options).build(),
        false => with_options(CUDA::default(), &provider.options).build(),
    });
    built.map(ExecutionProviderDispatch::error_on_failure).collect()
}

fn with_options<P: ArbitrarilyConfigurableExecutionProvider + Sized>(
    provider: P,
    options: &[(String, String)],
) -> P {
    options
        .iter()
        .fold(provider, |provider, (key, value)| provider.with_arbitrary_config(key, value))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::model::{Completion, Draft};

    use super::*;

    fn providers(more: &str) -> Result<Vec<Provider>, String> {
        let text = format!(
            "backend: 'onnxruntime' input {{ name: 'a' data_type: TYPE_FP32 dims: 1 }}
             output {{ name: 'b' data_type: TYPE_FP32 dims: 1 }} {more}"
        );
        let draft = Draft::from_text(&text, "config.pbtxt").unwrap();
        of(&draft.complete(&Completion { directory: "m", ..Completion::default() }).unwrap())
    }

    fn accelerator(name: &str, parameters: &[(&str, &str)]) -> String {
        let parameters: String = parameters
            .iter()
            .map(|(key, value)| format!("parameters {{ key: '{key}' value: '{value}' }} "))
            .collect();
        format!(
            "optimization {{ execution_accelerators {{ gpu_execution_accelerator: [ {{ name: \
             '{name}' {parameters} }} ] }} }}"
        )
    }

    fn shown(providers: &[Provider]) -> Vec<String> {
        providers
            .iter()
            .map(|provider| {
                let name = if provider.is_tensorrt { "tensorrt" } else { "cuda" };
                name.to_owned()
                    + &provider
                        .options
                        .iter()
                        .map(|(key, value)| format!(" {key}={value}"))
                        .collect::<String>()
            })
            .collect()
    }

    #[test]
    fn accelerators_become_providers() {
        assert_eq!(shown(&providers("").unwrap()), ["cuda device_id=0"]);
        let limits = "parameters { key: 'gpu_mem_limit' value { string_value: '1024' } }
             parameters { key: 'cudnn_conv_algo_search' value { string_value: '1' } }";
        assert_eq!(
            shown(&providers(limits).unwrap()),
            ["cuda device_id=0 cudnn_conv_algo_search=HEURISTIC gpu_mem_limit=1024"]
        );
        let half = accelerator(
            "tensorrt",
            &[("precision_mode", "FP16"), ("trt_engine_cache_enable", "1")],
        );
        assert_eq!(
            shown(&providers(&half).unwrap()),
            [
                "tensorrt device_id=0 trt_fp16_enable=1 trt_engine_cache_enable=1",
                "cuda device_id=0"
            ]
        );
        let graph = accelerator(
            "cuda",
            &[("use_cuda_graph", "1"), ("arena_extend_strategy", "kSameAsRequested")],
        );
        assert_eq!(
            shown(&providers(&graph).unwrap()),
            ["cuda device_id=0 arena_extend_strategy=kSameAsRequested enable_cuda_graph=1"]
        );
        // SAFETY: no session is created with them.
        assert_eq!(unsafe { dispatches(&providers(&half).unwrap(), 8) }.len(), 2);
    }

    #[test]
    fn options_for_cuda_graphs_are_removed() {
        let mut with =
            providers(&accelerator("cuda", &[("use_cuda_graph", "1"), ("use_tf32", "0")])).unwrap();
        assert!(drop_graphs(&mut with));
        assert_eq!(shown(&with), ["cuda device_id=0 use_tf32=0"]);
        let mut with =
            providers(&accelerator("tensorrt", &[("trt_cuda_graph_enable", "True")])).unwrap();
        assert!(drop_graphs(&mut with) && !drop_graphs(&mut with));
        let mut without = providers(&accelerator("cuda", &[("enable_cuda_graph", "0")])).unwrap();
        assert!(!drop_graphs(&mut without));
    }

    #[test]
    fn unknown_options_are_named_in_errors() {
        for (more, text) in [
            (accelerator("openvino", &[]), "'openvino' is not known; allowed are cuda, tensorrt"),
            (
                accelerator("tensorrt", &[("precision_mode", "FP8")]),
                "is 'FP8'; allowed are FP32, FP16, INT8",
            ),
            (accelerator("tensorrt", &[("speed", "1")]), "'speed' is not a parameter of tensorrt"),
            (
                accelerator("cuda", &[("gpu_mem_limit", "lots")]),
                "'gpu_mem_limit' is 'lots'; allowed are whole numbers",
            ),
            (
                accelerator("cuda", &[("user_compute_stream", "1")]),
                "'user_compute_stream' cannot be set for cuda",
            ),
            (
                accelerator("cuda", &[("cudnn_conv_algo_search", "3")]),
                "allowed are 0 to 2 and EXHAUSTIVE",
            ),
        ] {
            let error = providers(&more).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}
