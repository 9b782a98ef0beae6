//! The settings of a backend as it reads them: the JSON that Triton makes of its command line.

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

/// What an instance gets from its group.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Group {
    /// The optimization profiles (`instance_group.profile`).
    pub(crate) profiles: Vec<String>,
    /// Whether the scheduler ignores the instance.
    pub(crate) passive: bool,
}

/// Returns the group of an instance in a configuration as JSON. Instances are named after their
/// groups.
pub(crate) fn group(config: &str, instance: &str) -> Group {
    let shown: Value = serde_json::from_str(config).unwrap_or_default();
    let groups = shown.get("instance_group").and_then(Value::as_array).into_iter().flatten();
    let name = |group: &Value| group.get("name").and_then(Value::as_str).map(str::to_owned);
    let own = groups.filter(|group| {
        name(group).is_some_and(|name| {
            instance.strip_prefix(&name).is_some_and(|rest| rest.starts_with('_'))
        })
    });
    // The name of one group may be the beginning of another one's: the longest is the instance's.
    let Some(own) = own.max_by_key(|group| name(group).map(|name| name.len())) else {
        return Group::default();
    };
    let profiles = own.get("profile").and_then(Value::as_array).into_iter().flatten();
    Group {
        profiles: profiles.filter_map(|name| Some(name.as_str()?.to_owned())).collect(),
        passive: own.get("passive").and_then(Value::as_bool).unwrap_or_default(),
    }
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

    #[test]
    fn an_instance_belongs_to_the_group_with_the_longest_fitting_name() {
        let config = r#"{"instance_group":[{"name":"m_0","profile":["a"]},{"name":"m_0_1","passive":true}]}"#;
        let of = |profiles: &[&str], passive| Group {
            profiles: profiles.iter().map(|name| (*name).to_owned()).collect(),
            passive,
        };
        assert_eq!(group(config, "m_0_0"), of(&["a"], false));
        assert_eq!(group(config, "m_0_1_0"), of(&[], true));
        assert_eq!(group(config, "other_0"), Group::default());
    }
}
