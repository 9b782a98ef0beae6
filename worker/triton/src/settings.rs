//! The settings of a backend as it reads them: the JSON that Triton makes of its command line.

use pharos::model::ModelConfig;
use serde_json::{Map, Value};

/// The compute capability below which GPUs are not used. Triton's default.
const MIN_COMPUTE_CAPABILITY: &str = "6.000000";
/// The maximum batch size that auto-complete sets, unless the command line sets it.
const DEFAULT_MAX_BATCH_SIZE: (&str, &str) = ("default-max-batch-size", "4");

/// Returns the configuration of a backend as JSON. All values are strings. `directory` is the
/// backend's directory; Triton shows the directory above it.
pub(crate) fn backend_config(settings: &[(String, String)], directory: &str) -> String {
    let above = std::path::Path::new(directory).parent().map(|above| above.to_string_lossy());
    let mut all = Map::new();
    all.insert("auto-complete-config".to_owned(), Value::from("true"));
    all.insert("backend-directory".to_owned(), Value::from(above.unwrap_or_default()));
    all.insert("min-compute-capability".to_owned(), Value::from(MIN_COMPUTE_CAPABILITY));
    all.insert(DEFAULT_MAX_BATCH_SIZE.0.to_owned(), Value::from(DEFAULT_MAX_BATCH_SIZE.1));
    for (name, value) in settings {
        all.insert(name.clone(), Value::from(value.as_str()));
    }
    let mut config = Map::new();
    config.insert("cmdline".to_owned(), Value::Object(all));
    Value::Object(config).to_string()
}

/// Returns the optimization profiles of an instance's group (`instance_group.profile`). Instances
/// are named after their groups.
pub(crate) fn profiles(config: &ModelConfig, instance: &str) -> Vec<String> {
    let shown: Value = serde_json::from_str(&config.to_json()).unwrap_or_default();
    let groups = shown.get("instance_group").and_then(Value::as_array).into_iter().flatten();
    let own = groups.filter(|group| {
        let name = group.get("name").and_then(Value::as_str);
        name.is_some_and(|name| {
            instance.strip_prefix(name).is_some_and(|rest| rest.starts_with('_'))
        })
    });
    // The longest name: that of another group may be its beginning.
    let length = |group: &&Value| group.get("name").and_then(Value::as_str).map(str::len);
    let profiles = own.max_by_key(length).and_then(|group| group.get("profile")?.as_array());
    profiles.into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_command_line_replace_defaults() {
        let settings = [("default-max-batch-size".to_owned(), "8".to_owned())];
        assert_eq!(
            backend_config(&settings, "/opt/backends/mine"),
            r#"{"cmdline":{"auto-complete-config":"true","backend-directory":"/opt/backends","min-compute-capability":"6.000000","default-max-batch-size":"8"}}"#
        );
    }
}
