//! The keys of `config.properties` in TorchServe 0.12, and their effect in this server.

/// The effect of a key in this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The same as in TorchServe.
    Same,
    /// No effect; the text gives the reason or an alternative.
    None(&'static str),
}

/// A key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The name in the file.
    pub name: &'static str,
    /// Whether `TS_NAME` in the environment overrides the file if that sets
    /// `enable_envvars_config=true`.
    pub variable: bool,
    /// The effect in this server.
    pub effect: Effect,
}

const fn same(name: &'static str) -> Key {
    Key { name, variable: true, effect: Effect::Same }
}

const fn file_only(name: &'static str) -> Key {
    Key { name, variable: false, effect: Effect::Same }
}

const fn none(name: &'static str, why: &'static str) -> Key {
    Key { name, variable: true, effect: Effect::None(why) }
}

const THREADS: &str =
    "the server uses one thread for each CPU (set --http-thread-count after '--')";
const JAVA: &str = "the key configures Java's memory and sockets";
const IPEX: &str = "workers are started without Intel's launcher; the handler may import \
                    intel_extension_for_pytorch itself";
const WORKFLOWS: &str = "workflows are not supported; use an ensemble in the model repository";

/// Every key, in the order of TorchServe's documentation.
pub const KEYS: &[Key] = &[
    none("debug", "the key is for debugging TorchServe itself; use --log-verbose=1 after '--'"),
    same("inference_address"),
    same("management_address"),
    same("metrics_address"),
    same("load_models"),
    same("blacklist_env_vars"),
    same("default_workers_per_model"),
    same("default_response_timeout"),
    same("default_startup_timeout"),
    none(
        "unregister_model_timeout",
        "an unregistered model completes its accepted requests in the background",
    ),
    none("number_of_netty_threads", THREADS),
    none("netty_client_threads", THREADS),
    same("job_queue_size"),
    same("number_of_gpu"),
    same("metrics_config"),
    same("metrics_mode"),
    same("model_metrics_auto_detect"),
    same("disable_system_metrics"),
    none("ipex_enable", IPEX),
    none("cpu_launcher_enable", IPEX),
    none("cpu_launcher_args", IPEX),
    none("ipex_gpu_enable", IPEX),
    none("async_logging", "logs are always written by a separate thread"),
    same("cors_allowed_origin"),
    same("cors_allowed_methods"),
    same("cors_allowed_headers"),
    same("decode_input_request"),
    same("keystore"),
    same("keystore_pass"),
    same("keystore_type"),
    same("certificate_file"),
    same("private_key_file"),
    same("max_request_size"),
    same("max_response_size"),
    same("limit_max_image_pixels"),
    same("default_service_handler"),
    same("service_envelope"),
    none("model_server_home", "the server reads no files from that directory"),
    same("model_store"),
    none("snapshot_store", "snapshots are always files"),
    none("prefer_direct_buffer", JAVA),
    same("allowed_urls"),
    none("use_env_allowed_urls", "set enable_envvars_config=true to use TS_ALLOWED_URLS"),
    same("install_py_dep_per_model"),
    same("enable_metrics_api"),
    same("grpc_inference_address"),
    same("grpc_management_address"),
    same("grpc_inference_port"),
    same("grpc_management_port"),
    same("enable_grpc_ssl"),
    same("grpc_inference_max_connection_age_ms"),
    same("grpc_management_max_connection_age_ms"),
    same("grpc_inference_max_connection_age_grace_ms"),
    same("grpc_management_max_connection_age_grace_ms"),
    same("initial_worker_port"),
    none(
        "initial_distribution_port",
        "workers with several processes (torchrun) are not supported",
    ),
    none("workflow_store", WORKFLOWS),
    none("cpp_log_config", "C++ handlers are not supported"),
    same("ts_open_inference_protocol"),
    same("token_expiration_min"),
    same("disable_token_authorization"),
    same("enable_model_api"),
    same("ts_header_key_sequence_id"),
    same("ts_header_key_sequence_start"),
    same("ts_header_key_sequence_end"),
    none("use_native_io", JAVA),
    none("io_ratio", JAVA),
    file_only("metric_time_interval"),
    file_only("enable_envvars_config"),
    file_only("model_snapshot"),
    file_only("models"),
    none("version", "snapshots record the version of their server in it"),
    none(
        "system_metrics_cmd",
        "system metrics need no external program; send metrics of scripts as StatsD datagrams \
         (--statsd-address after '--')",
    ),
    file_only("vmargs"),
    file_only("tsConfigFile"),
    none("python", "set the interpreter with --python after '--' or PHAROS_PYTHON"),
];

/// Keys for Java's launcher, or written by snapshots: they are ignored without a note.
pub(super) const SILENT: [&str; 3] = ["vmargs", "tsConfigFile", "version"];

/// Finds a key by its name.
pub(super) fn known(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// Returns the known key most similar to `name`, if one is similar enough.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    let (difference, nearest) =
        KEYS.iter().map(|key| (distance(key.name, name), key.name)).min()?;
    (difference <= 3).then_some(nearest)
}

/// Returns the edit distance: the number of characters to change, add or remove.
fn distance(one: &str, other: &str) -> usize {
    let columns: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=columns.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let mut above = i;
        let mut left = i + 1;
        for (b, cell) in columns.iter().zip(row.iter_mut().skip(1)) {
            let best = (above + usize::from(a != *b)).min(left + 1).min(*cell + 1);
            above = std::mem::replace(cell, best);
            left = best;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_the_nearest_key_for_a_mistyped_one() {
        assert_eq!(nearest("metrics_mod"), Some("metrics_mode"));
        assert_eq!(nearest("defualt_workers_per_model"), Some("default_workers_per_model"));
        assert_eq!(nearest("something_else"), None);
        assert_eq!(
            (distance("abc", "abc"), distance("abc", ""), distance("abc", "axcd")),
            (0, 3, 2)
        );
    }
}
