//! What the server fills in whatever the model is: name, backend, instance groups and the defaults that clients see in
//! the model configuration extension.

use super::proto::model_instance_group::Kind;
use super::proto::model_version_policy::{Latest, PolicyChoice};
use super::proto::{self, model_config::SchedulingChoice, model_sequence_batching::StrategyChoice};
use super::{Completion, ConfigError};

/// What a backend's models are called: (backend, platform, default file). Triton's pairs.
const BACKENDS: [(&str, &str, &str); 5] = [
    ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ("tract", "onnxruntime_onnx", "model.onnx"),
    ("pytorch", "pytorch_libtorch", "model.pt"),
    ("python", "", "model.py"),
    ("builtin", "", ""),
];

/// The most instances of one group: past it a slip of the pen, not a machine.
pub(super) const MAX_INSTANCES: u32 = 4096;

/// Triton's default for `max_sequence_idle_microseconds`.
const SEQUENCE_IDLE_US: u64 = 1_000_000;

/// The directory names the model; a configuration may repeat that name but not choose another.
pub(super) fn name(config: &mut proto::ModelConfig, completion: &Completion<'_>) -> Result<(), ConfigError> {
    let directory = completion.directory;
    if config.name.is_empty() {
        config.name = directory.to_owned();
    } else if config.name != directory {
        return Err(ConfigError::new(format!(
            "unexpected directory name '{directory}' for model '{}', directory name must equal model name",
            config.name
        )));
    }
    Ok(())
}

/// Fills in `backend` from `platform` or from the model's files, and `platform` and the file name from `backend`.
pub(super) fn backend(config: &mut proto::ModelConfig, completion: &Completion<'_>) -> Result<(), ConfigError> {
    if config.platform == "ensemble" {
        return match config.backend.as_str() {
            "" => Ok(()),
            other => Err(pair("ensemble", other)),
        };
    }
    if config.backend.is_empty() {
        config.backend = missing_backend(config, completion)?.to_owned();
    }
    check_pair(config)?;
    let here = |backend: &str| completion.backends.is_empty() || completion.backends.contains(&backend);
    if config.backend == "onnxruntime" && !here("onnxruntime") && here("tract") {
        // Without ONNX Runtime's library the embedded engine serves the model; the configuration shows which one runs.
        config.backend = "tract".to_owned();
    }
    if !here(&config.backend) {
        return Err(ConfigError::new(format!(
            "backend '{}' of model '{}' is not available here; available: {}",
            config.backend,
            config.name,
            completion.backends.join(", ")
        )));
    }
    let known = BACKENDS.iter().find(|row| row.0 == config.backend);
    let Some((backend, platform, file)) = known.copied() else { return Ok(()) };
    if config.platform.is_empty() && backend != "tract" {
        config.platform = platform.to_owned();
    }
    if config.default_model_filename.is_empty() {
        config.default_model_filename = file.to_owned();
    }
    Ok(())
}

fn missing_backend(config: &proto::ModelConfig, completion: &Completion<'_>) -> Result<&'static str, ConfigError> {
    if !config.platform.is_empty() {
        let row = BACKENDS.iter().find(|row| row.1 == config.platform);
        let unexpected = || format!("unexpected platform type '{}' for {}", config.platform, config.name);
        return row.map(|row| row.0).ok_or_else(|| ConfigError::new(unexpected()));
    }
    let named = &config.default_model_filename;
    let present = |file: &str| completion.files.iter().any(|name| name == file);
    let row = BACKENDS.iter().find(|row| !row.2.is_empty() && (named == row.2 || present(row.2)));
    let by_suffix = || named.ends_with(".onnx").then_some("onnxruntime");
    row.map(|row| row.0).or_else(by_suffix).ok_or_else(|| {
        ConfigError::new(format!(
            "must specify 'platform' or 'backend' for '{}': its version directories hold neither model.onnx, model.pt nor model.py",
            config.name
        ))
    })
}

fn check_pair(config: &proto::ModelConfig) -> Result<(), ConfigError> {
    if config.platform.is_empty() {
        return Ok(());
    }
    let by_platform = BACKENDS.iter().any(|row| row.1 == config.platform);
    let by_backend = BACKENDS.iter().any(|row| row.0 == config.backend);
    let agree = BACKENDS.iter().any(|row| row.0 == config.backend && row.1 == config.platform);
    if agree || (!by_platform && !by_backend) { Ok(()) } else { Err(pair(&config.platform, &config.backend)) }
}

fn pair(platform: &str, backend: &str) -> ConfigError {
    ConfigError::new(format!("unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"))
}

/// The defaults that are filled in last, when the maximum batch size is known.
pub(super) fn defaults(config: &mut proto::ModelConfig, gpus: &[u32]) {
    let policy = config.version_policy.get_or_insert_default();
    policy.policy_choice.get_or_insert(PolicyChoice::Latest(Latest { num_versions: 1 }));
    scheduling(config);
    if config.platform == "ensemble" {
        // Neither instances nor optimizations are an ensemble's.
        return;
    }
    let optimization = config.optimization.get_or_insert_default();
    let pinned = proto::model_optimization_policy::PinnedMemoryBuffer { enable: true };
    optimization.input_pinned_memory.get_or_insert(pinned);
    optimization.output_pinned_memory.get_or_insert(pinned);
    instance_groups(config, gpus);
}

fn scheduling(config: &mut proto::ModelConfig) {
    let batch = config.max_batch_size;
    match &mut config.scheduling_choice {
        Some(SchedulingChoice::DynamicBatching(dynamic)) if batch > 0 && dynamic.preferred_batch_size.is_empty() => {
            dynamic.preferred_batch_size.push(batch);
        }
        Some(SchedulingChoice::SequenceBatching(sequence)) => {
            if sequence.max_sequence_idle_microseconds == 0 {
                sequence.max_sequence_idle_microseconds = SEQUENCE_IDLE_US;
            }
            if let Some(StrategyChoice::Oldest(oldest)) = &mut sequence.strategy_choice
                && oldest.preferred_batch_size.is_empty()
            {
                oldest.preferred_batch_size.push(batch.max(1));
            }
        }
        _ => {}
    }
}

fn instance_groups(config: &mut proto::ModelConfig, gpus: &[u32]) {
    if config.instance_group.is_empty() {
        config.instance_group.push(proto::ModelInstanceGroup { name: config.name.clone(), ..Default::default() });
    }
    for (index, group) in config.instance_group.iter_mut().enumerate() {
        if group.name.is_empty() {
            group.name = format!("{}_{index}", config.name);
        }
        if group.kind() == Kind::Auto {
            group.set_kind(Kind::Cpu);
        }
        if group.count < 1 {
            group.count = 1;
        }
        if group.kind() == Kind::Gpu && group.gpus.is_empty() {
            group.gpus = gpus.iter().filter_map(|&gpu| i32::try_from(gpu).ok()).collect();
        }
    }
}
